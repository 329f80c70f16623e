//! Which samples a run trains on, and in which rows: some are held out, files are repeated, samples are packed and
//! shuffled. Every choice is a function of the seed.

use crate::{
    data::sample::{Origin, Sample},
    settings::defaults::{FEWEST_SPLIT, MOST_EVALUATED},
};
use backend_nvfp4::{Stream, reference};
use std::collections::{BTreeSet, HashSet};

/// Splits off the samples of evaluation rows: a share of all rows, but at most [`MOST_EVALUATED`], also of their samples, and at
/// least one of [`FEWEST_SPLIT`] or more rows.
pub fn split(samples: Vec<Sample>, share: f64, seed: u64) -> (Vec<Sample>, Vec<Sample>) {
    let (rows, n) = numbered(&samples);
    let wanted = (n as f64 * share).round() as usize;
    let count = if share <= 0.0 || n < FEWEST_SPLIT { 0 } else { wanted.clamp(1, MOST_EVALUATED) };
    let order = permutation(n, seed, u32::MAX);
    let mut sequences = vec![0; n];
    rows.iter().for_each(|row| sequences[*row] += 1);
    // The rows of long documents make many sequences. After the first row, no more of these are held out than of short rows.
    let mut left = MOST_EVALUATED;
    let fits = |row: &usize| {
        let fits = left == MOST_EVALUATED || sequences[*row] <= left;
        left = left.saturating_sub(sequences[*row]);
        fits
    };
    let held: HashSet<usize> = order[..count].iter().copied().take_while(fits).collect();
    let (mut train, mut eval) = (Vec::new(), Vec::new());
    for (row, sample) in rows.into_iter().zip(samples) {
        if held.contains(&row) { eval.push(sample) } else { train.push(sample) }
    }
    (train, eval)
}

/// Chooses the samples of `most` rows at random, which keep their order. Also returns the number of rows that are left out.
pub fn choose(samples: Vec<Sample>, most: usize, seed: u64) -> (Vec<Sample>, usize) {
    let (rows, n) = numbered(&samples);
    let order = permutation(n, seed, u32::MAX / 2);
    let chosen: HashSet<usize> = order.into_iter().take(most).collect();
    let numbered = rows.into_iter().zip(samples);
    let kept = numbered.filter(|(row, _)| chosen.contains(row)).map(|(_, sample)| sample).collect();
    (kept, n.saturating_sub(most))
}

/// The number of each sample's row, and the number of rows. The samples of a row stand together. A file that is one text has no
/// rows: each of its samples counts as one.
fn numbered(samples: &[Sample]) -> (Vec<usize>, usize) {
    let mut rows: Vec<usize> = Vec::with_capacity(samples.len());
    let mut last: Option<Origin> = None;
    for sample in samples {
        let origin = sample.origins[0];
        let number = match (rows.last(), last) {
            (Some(number), Some(last)) if last == origin && origin.line > 0 => *number,
            (Some(number), _) => number + 1,
            (None, _) => 0,
        };
        rows.push(number);
        last = Some(origin);
    }
    let count = rows.last().map_or(0, |last| last + 1);
    (rows, count)
}

/// Packs samples into rows of at most `most` tokens. It takes the longest sample first and puts it into the fullest row
/// with room for it (best fit, decreasing). The documents of a row do not attend to each other, each begins at position
/// 0, and its first token is not predicted.
pub fn pack(samples: Vec<Sample>, most: usize) -> Vec<Sample> {
    let mut order: Vec<usize> = (0..samples.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(samples[i].ids.len()), i));
    let mut rows: Vec<Sample> = Vec::new();
    // Rows by their room, then by when they were made.
    let mut open: BTreeSet<(usize, usize)> = BTreeSet::new();
    let mut samples: Vec<Option<Sample>> = samples.into_iter().map(Some).collect();
    for i in order {
        let sample = samples[i].take().expect("the order has each sample once");
        let len = sample.ids.len();
        let Some(&(room, row)) = open.range((len, 0)..).next() else {
            open.insert((most.saturating_sub(len), rows.len()));
            rows.push(sample);
            continue;
        };
        open.remove(&(room, row));
        open.insert((room - len, row));
        let packed = &mut rows[row];
        packed.documents.push(packed.ids.len());
        packed.origins.extend(sample.origins);
        packed.ids.extend(sample.ids);
        let first = packed.supervised.len();
        packed.supervised.extend(sample.supervised);
        packed.supervised[first] = false;
    }
    rows
}

/// Repeats training samples by their own weights and those of their files; without weights, each is there once. Call it after
/// [`split`], so that a row that was held out has no copy in training.
pub fn weigh(samples: Vec<Sample>, weights: &[f64], seed: u64) -> Vec<Sample> {
    if samples.iter().any(|sample| sample.weight != 1.0) {
        return by_rows(samples, weights, seed);
    }
    if weights.is_empty() {
        return samples;
    }
    let mut files: Vec<Vec<Sample>> = vec![vec![]; weights.len()];
    samples.into_iter().for_each(|s| files[s.origins[0].file as usize].push(s));
    let own = |(file, (samples, weight)): (usize, (Vec<Sample>, &f64))| weighted(samples, *weight, seed, file as u32);
    files.into_iter().zip(weights).enumerate().flat_map(own).collect()
}

/// Repeats samples `weight` times: whole copies of all, and a random choice for the fraction that remains.
fn weighted(samples: Vec<Sample>, weight: f64, seed: u64, file: u32) -> Vec<Sample> {
    let n = samples.len();
    if n == 0 {
        return samples;
    }
    let wanted = ((n as f64 * weight).round() as usize).max(1);
    let order = permutation(n, seed, u32::MAX - 1 - file);
    (0..wanted).map(|i| samples[if i / n < wanted / n { i % n } else { order[i % n] }].clone()).collect()
}

/// Repeats the samples of each row by its own weight times that of its file. The copies of all rows together are the sum of the
/// weights; what is a fraction for one row goes to some of them, by chance.
fn by_rows(samples: Vec<Sample>, weights: &[f64], seed: u64) -> Vec<Sample> {
    let (rows, count) = numbered(&samples);
    let mut own = vec![0.0; count];
    for (row, sample) in rows.iter().zip(&samples) {
        own[*row] = sample.weight * weights.get(sample.origins[0].file as usize).unwrap_or(&1.0);
    }
    // The rows lie one after another on a line, in a random order, each as long as its weight. It has a copy for each whole number
    // that lies in it.
    let mut copies = vec![0; count];
    let mut end = 0.5f64;
    for row in permutation(count, seed, u32::MAX - 1) {
        let begin = end;
        end += own[row];
        copies[row] = (end.floor() - begin.floor()) as usize;
    }
    samples.into_iter().zip(rows).flat_map(|(sample, row)| std::iter::repeat_n(sample, copies[row])).collect()
}

/// The order of `n` samples in an epoch: Fisher and Yates's shuffle with counter-based random numbers.
pub(crate) fn permutation(n: usize, seed: u64, epoch: u32) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        let [a, b, ..] = reference::philox(i as u32, Stream { seed, step: epoch, stream: 0x5EED });
        order.swap(i, ((u64::from(a) << 32 | u64::from(b)) % (i as u64 + 1)) as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{order::MicroBatch, sample::synthetic};

    fn samples(n: usize) -> Vec<Sample> {
        synthetic(n, 4, 100, 1)
    }

    #[test]
    fn rows_are_chosen_by_the_seed_and_keep_their_order() {
        let ids = |samples: &[Sample]| samples.iter().map(|s| s.ids.clone()).collect::<Vec<_>>();
        let all = samples(40);
        let chosen = ids(&choose(all.clone(), 10, 1).0);
        let places: Vec<usize> = chosen.iter().map(|row| ids(&all).iter().position(|r| r == row).unwrap()).collect();
        assert!(places.len() == 10 && places.is_sorted() && *places.last().unwrap() > 15, "{places:?}");
        assert_eq!(chosen, ids(&choose(all.clone(), 10, 1).0));
        assert_ne!(chosen, ids(&choose(all.clone(), 10, 2).0));
        assert_eq!(ids(&choose(all.clone(), 50, 1).0), ids(&all));
    }

    #[test]
    fn packing_keeps_each_document_whole_and_separate() {
        let lengths = [5usize, 30, 7, 12, 29, 3, 64, 20];
        let all: Vec<Sample> = lengths.iter().zip(synthetic(8, 64, 100, 2)).map(|(&len, s)| s.piece(0..len)).collect();
        let rows = pack(all.clone(), 64);
        assert_eq!(rows.len(), 3, "170 tokens fill three rows of 64");
        let mut found = Vec::new();
        for row in &rows {
            assert!(row.ids.len() <= 64 && row.ids.len() == row.supervised.len());
            for (i, &start) in row.documents.iter().enumerate() {
                let end = row.documents.get(i + 1).copied().unwrap_or(row.ids.len());
                assert_eq!(row.supervised[start], start == 0, "the first token of a document is not predicted");
                found.push(row.ids[start..end].to_vec());
            }
        }
        let sorted = |mut ids: Vec<Vec<u32>>| {
            ids.sort();
            ids
        };
        assert_eq!(sorted(found), sorted(all.into_iter().map(|s| s.ids).collect()));
        let (positions, starts) = MicroBatch::new(&[&rows[1]], 1).places();
        for i in 0..positions.len() {
            assert_eq!(positions[i] + starts[i], i as u32);
        }
    }

    #[test]
    fn weights_repeat_and_thin_out() {
        let all = samples(10);
        let of = |weight| weighted(all.clone(), weight, 3, 0);
        assert_eq!((of(1.0).len(), of(2.5).len(), of(0.3).len()), (10, 25, 3));
        assert!(all.iter().all(|s| (2..=3).contains(&of(2.5).iter().filter(|t| *t == s).count())));
    }

    #[test]
    fn the_sequences_of_a_row_stay_together() {
        // Rows of 50 sequences.
        let mut all = samples(1000);
        all.iter_mut().enumerate().for_each(|(i, sample)| {
            sample.origins[0].line = 1 + i as u32 / 50;
            sample.weight = 0.5;
        });
        let rows = |samples: &[Sample]| -> Vec<usize> {
            let of = |line| samples.iter().filter(|sample| sample.origins[0].line == line).count();
            (1..=20).map(of).collect()
        };
        // Ten rows are half of them, and have more sequences than are held out.
        let held = rows(&split(all.clone(), 0.5, 3).1);
        assert!(held.iter().all(|n| [0, 50].contains(n)) && held.iter().sum::<usize>() == MOST_EVALUATED, "{held:?}");
        let weighed = rows(&weigh(all, &[], 3));
        assert!(weighed.iter().all(|n| [0, 50].contains(n)) && weighed.iter().sum::<usize>() == 500, "{weighed:?}");
    }

    #[test]
    fn a_row_is_repeated_by_its_own_weight() {
        let mut all = samples(400);
        all.iter_mut().enumerate().for_each(|(i, sample)| {
            sample.weight = [0.25, 1.0, 2.5, 4.0][i % 4];
            sample.origins[0].file = u32::from(i >= 200);
        });
        let copies = |weights: &[f64]| {
            let made = weigh(all.clone(), weights, 3);
            all.iter().map(|s| made.iter().filter(|t| t.ids == s.ids).count()).collect::<Vec<_>>()
        };
        let alone = copies(&[]);
        assert!(alone.iter().enumerate().all(|(i, n)| [0..=1, 1..=1, 2..=3, 4..=4][i % 4].contains(n)), "{alone:?}");
        assert_eq!(alone.iter().sum::<usize>(), 775);
        // The fractions fall on some of the rows, not on the first of them.
        let quarter: Vec<usize> = alone.iter().step_by(4).copied().collect();
        assert!(
            (10..=40).contains(&quarter.iter().sum::<usize>()) && quarter[50..].iter().sum::<usize>() > 3,
            "{quarter:?}"
        );
        let halved = copies(&[0.5, 1.0]);
        assert!(halved[..200].iter().enumerate().all(|(i, n)| [0..=1, 0..=1, 1..=2, 2..=2][i % 4].contains(n)));
        assert_eq!(halved[200..].iter().sum::<usize>() + halved[..200].iter().sum::<usize>(), 581);
    }

    #[test]
    fn the_samples_of_a_row_stay_together() {
        let mut all = samples(40);
        // Four samples a row. The places are those of lines, and of rows that share one.
        all.iter_mut().enumerate().for_each(|(i, sample)| {
            sample.origins[0] = Origin { file: 0, line: 1 + i as u32 / 8, row: i as u32 / 4 };
        });
        let rows = |samples: &[Sample]| samples.iter().map(|sample| sample.origins[0].row).collect::<Vec<_>>();
        let (train, eval) = split(all.clone(), 0.3, 3);
        assert_eq!((train.len(), eval.len()), (28, 12));
        assert!(rows(&eval).iter().all(|row| !rows(&train).contains(row)), "{:?}", rows(&eval));
        let (chosen, left_out) = choose(all, 3, 3);
        let whole: Vec<u32> = rows(&chosen).chunks(4).map(|row| row[0]).collect();
        assert_eq!((left_out, rows(&chosen)), (7, whole.iter().flat_map(|row| [*row; 4]).collect::<Vec<_>>()));
    }

    #[test]
    fn split_is_disjoint_and_small_sets_keep_their_rows() {
        let (train, eval) = split(samples(64), 0.02, 3);
        assert_eq!((train.len(), eval.len()), (63, 1));
        assert!(!train.contains(&eval[0]));
        assert_eq!(split(samples(9), 0.5, 3).1.len(), 0);
    }
}
