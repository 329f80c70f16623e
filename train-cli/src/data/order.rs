//! Micro-batches, and their order over a run.

use crate::data::{
    rows::permutation,
    sample::{Origin, Sample},
};
use std::sync::Arc;

/// Sequences that go through the model together.
#[derive(Debug, Clone)]
pub struct MicroBatch {
    /// Token ids of each row.
    pub ids: Vec<Vec<u32>>,
    /// Which tokens of each row are supervised.
    pub supervised: Vec<Vec<bool>>,
    /// Where the documents of each row begin.
    pub documents: Vec<Vec<usize>>,
    /// Where the documents of each row came from.
    pub origins: Vec<Vec<Origin>>,
    /// Supervised tokens of the whole optimizer step, by which its loss is divided.
    pub divisor: usize,
    /// Whether this is the last micro-batch of an optimizer step.
    pub ends_step: bool,
}

/// Rows of one tile of a GPU's matrix products.
pub const TILE: usize = 128;

/// The tokens of a row of `len` tokens with its padding. A row that is longer than one tile of a GPU's matrix products
/// fills whole tiles: the products read them anyway, and buffers then have few sizes. Quantization of activations sees
/// the padding, too.
pub fn padded_len(len: usize) -> usize {
    if len > TILE { len.next_multiple_of(TILE) } else { len }
}

impl MicroBatch {
    /// Makes a batch of samples.
    pub fn new(samples: &[&Sample], divisor: usize) -> Self {
        Self {
            ids: samples.iter().map(|s| s.ids.clone()).collect(),
            supervised: samples.iter().map(|s| s.supervised.clone()).collect(),
            documents: samples.iter().map(|s| s.documents.clone()).collect(),
            origins: samples.iter().map(|s| s.origins.clone()).collect(),
            divisor,
            ends_step: false,
        }
    }

    /// Makes a batch that is a whole step, of rows with one document each.
    pub fn of(ids: Vec<Vec<u32>>, supervised: Vec<Vec<bool>>, divisor: usize) -> Self {
        let (documents, origins) = (vec![vec![0]; ids.len()], vec![vec![Origin::default()]; ids.len()]);
        Self { ids, supervised, documents, origins, divisor, ends_step: true }
    }

    /// Tokens of each row, with padding.
    pub fn tokens_a_row(&self) -> usize {
        padded_len(self.ids.iter().map(Vec::len).max().unwrap_or(0))
    }

    /// The number of tokens, with padding.
    pub fn tokens(&self) -> usize {
        self.ids.len() * self.tokens_a_row()
    }

    /// The ids of each row, with padding.
    pub fn padded(&self) -> Vec<Vec<u32>> {
        let t = self.tokens_a_row();
        let pad = |row: &Vec<u32>| row.iter().copied().chain(std::iter::repeat(0)).take(t).collect();
        self.ids.iter().map(pad).collect()
    }

    /// For every token, its position in its document and the index in its row where that document begins. Padding belongs
    /// to the last document.
    pub fn places(&self) -> (Vec<u32>, Vec<u32>) {
        let t = self.tokens_a_row();
        let (mut positions, mut starts) = (Vec::new(), Vec::new());
        for documents in &self.documents {
            for (i, &start) in documents.iter().enumerate() {
                let end = documents.get(i + 1).copied().unwrap_or(t);
                positions.extend(0..(end - start) as u32);
                starts.extend(std::iter::repeat_n(start as u32, end - start));
            }
        }
        (positions, starts)
    }
}

/// How many steps a run had made when it was resumed, and how many sequences they had. The last of them may have had fewer than the
/// others, if the run was to end with it and was made longer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Made {
    /// Number of steps.
    pub steps: usize,
    /// Number of sequences.
    pub sequences: usize,
}

/// The order of samples over a run. The samples of a step are a function of its number, and of the steps that a shorter run has
/// made before.
#[derive(Debug, Clone)]
pub struct Order {
    /// All samples.
    pub samples: Arc<Vec<Sample>>,
    /// Sequences in a micro-batch.
    pub batch_size: usize,
    /// Micro-batches in a step.
    pub accumulation: usize,
    /// Steps of the run.
    pub steps: usize,
    /// Sequences after which the run ends. Where it comes from a number of epochs, the last step may be smaller.
    pub limit: usize,
    /// Seed of the shuffle.
    pub seed: u64,
    /// The first step that runs. It is above 0 after a resume.
    pub start: usize,
    /// What the run had made when it was resumed.
    pub made: Made,
}

impl Order {
    /// The micro-batches of a step, counted from 0.
    pub fn step(&self, step: usize) -> Vec<MicroBatch> {
        let n = self.samples.len();
        let range = self.sequences(step)..self.sequences(step + 1);
        let mut epoch = (usize::MAX, Vec::new());
        let picked: Vec<&Sample> = range
            .map(|i| {
                if epoch.0 != i / n {
                    epoch = (i / n, permutation(n, self.seed, (i / n) as u32));
                }
                &self.samples[epoch.1[i % n]]
            })
            .collect();
        let divisor = picked.iter().map(|s| s.supervised_tokens()).sum();
        let mut batches: Vec<_> = picked.chunks(self.batch_size).map(|c| MicroBatch::new(c, divisor)).collect();
        if let Some(last) = batches.last_mut() {
            last.ends_step = true;
        }
        batches
    }

    /// Sequences that are done after `steps` steps.
    pub fn sequences(&self, steps: usize) -> usize {
        let size = self.batch_size * self.accumulation;
        let done = match steps.checked_sub(self.made.steps) {
            Some(more) => self.made.sequences + more * size,
            // Each of the steps from here to the resumption had a sequence at least.
            None => (steps * size).min(self.made.sequences.saturating_sub(self.made.steps - steps)),
        };
        done.min(self.limit)
    }

    /// The micro-batches of all steps, from the first one that runs.
    pub fn micro_batches(&self) -> MicroBatches<'_> {
        MicroBatches { order: self, micro: vec![].into_iter(), next: self.start }
    }

    /// Epochs that are done after `steps` steps.
    pub fn epochs(&self, steps: usize) -> f64 {
        self.sequences(steps) as f64 / self.samples.len() as f64
    }
}

/// The micro-batches of a run, one after another.
pub struct MicroBatches<'a> {
    order: &'a Order,
    micro: std::vec::IntoIter<MicroBatch>,
    next: usize,
}

impl MicroBatches<'_> {
    /// How many steps have been handed out, and how many there are.
    pub fn handed_out(&self) -> (usize, usize) {
        (self.next, self.order.steps)
    }
}

impl Iterator for MicroBatches<'_> {
    type Item = MicroBatch;

    fn next(&mut self) -> Option<MicroBatch> {
        loop {
            if let Some(batch) = self.micro.next() {
                return Some(batch);
            }
            if self.next >= self.order.steps {
                return None;
            }
            self.micro = self.order.step(self.next).into_iter();
            self.next += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::sample::synthetic;

    #[test]
    fn an_epoch_shows_every_sample_once_in_a_new_order() {
        let order = Order {
            samples: Arc::new(synthetic(10, 4, 100, 1)),
            batch_size: 3,
            accumulation: 1,
            steps: 7,
            limit: 20,
            seed: 5,
            start: 0,
            made: Made::default(),
        };
        let seen: Vec<Vec<u32>> = (0..7).flat_map(|s| order.step(s)).flat_map(|b| b.ids).collect();
        assert_eq!(seen.len(), 20);
        let sorted = |ids: &[Vec<u32>]| {
            let mut ids = ids.to_vec();
            ids.sort();
            ids
        };
        assert_eq!(sorted(&seen[..10]), sorted(&seen[10..]));
        assert_ne!(seen[..10], seen[10..]);
        let resumed = Order { start: 4, ..order.clone() };
        let all: Vec<_> = order.micro_batches().map(|b| b.ids).collect();
        let rest: Vec<_> = resumed.micro_batches().map(|b| b.ids).collect();
        assert_eq!(all[4..], rest[..]);
    }

    #[test]
    fn rows_longer_than_a_tile_fill_whole_tiles() {
        let batch = |lengths: &[usize]| {
            let ids: Vec<Vec<u32>> = lengths.iter().map(|&n| vec![7; n]).collect();
            let supervised = lengths.iter().map(|&n| vec![true; n]).collect();
            MicroBatch::of(ids, supervised, 1)
        };
        for (lengths, tokens) in [(&[3usize, 100][..], 100), (&[128], 128), (&[129, 5], 256), (&[2000], 2048)] {
            let batch = batch(lengths);
            assert_eq!(batch.tokens_a_row(), tokens);
            assert!(batch.padded().iter().all(|row| row.len() == tokens));
            let (positions, starts) = batch.places();
            assert_eq!((positions.len(), starts.len()), (tokens * lengths.len(), tokens * lengths.len()));
        }
    }
}
