//! The next token of an answer, drawn from its logits: what [`kernels_cubecl::draw`] computes, which names the sources.

use super::philox;
use kernels_cubecl::draw::Draw;

/// Draws the token that follows, of logits `[V]`.
///
/// # Panics
/// If there are no logits.
pub fn draw(logits: &[f32], draw: &Draw) -> u32 {
    let candidates = likeliest(logits, if draw.kept > 0 { draw.kept } else { logits.len() });
    let top = logits[candidates[0] as usize];
    let weight = |id: &u32| {
        let logit = logits[*id as usize];
        // Both may be infinite, and their difference is then no number.
        if logit >= top { 1.0 } else { f64::from((logit - top) / draw.temperature).exp() }
    };
    let mut weights: Vec<f64> = candidates.iter().map(weight).collect();
    let share = f64::from(draw.top_p) * weights.iter().sum::<f64>();
    let mut sum = 0.0;
    let crossing = weights.iter().position(|w| {
        sum += w;
        sum >= share
    });
    weights.truncate(crossing.map_or(weights.len(), |last| last + 1));

    let (mut drawn, mut best) = (candidates[0], 0.0);
    for (id, w) in candidates.iter().zip(&weights).filter(|(_, w)| **w >= f64::from(draw.min_p)) {
        let ratio = w / exponential(*id, draw);
        if ratio > best {
            (drawn, best) = (*id, ratio);
        }
    }
    drawn
}

/// The `count` ids with the largest logits, the largest first; of equal ones the first.
pub fn likeliest(logits: &[f32], count: usize) -> Vec<u32> {
    let likelier = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    if count < order.len() {
        order.select_nth_unstable_by(count, likelier);
        order.truncate(count);
    }
    order.sort_unstable_by(likelier);
    order
}

/// The exponential random number of an id.
fn exponential(id: u32, draw: &Draw) -> f64 {
    let word = philox(id / 4, draw.stream())[id as usize % 4];
    -(-(f64::from(word) + 0.5) / 4_294_967_296.0).ln_1p()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Draw = Draw { kept: 0, ..Draw::GREEDY };

    fn counts(draw: Draw) -> [usize; 4] {
        let mut counts = [0; 4];
        for position in 0..4000 {
            // Probabilities .5, .3, .15, .05.
            let logits = [0.5f32, 0.3, 0.15, 0.05].map(f32::ln);
            counts[super::draw(&logits, &Draw { position, ..draw }) as usize] += 1;
        }
        counts
    }

    #[test]
    fn draws_follow_the_probabilities() {
        for (count, p) in counts(ONE).iter().zip([0.5, 0.3, 0.15, 0.05f64]) {
            let sigma = (4000.0 * p * (1.0 - p)).sqrt();
            assert!((*count as f64 - 4000.0 * p).abs() < 4.0 * sigma, "{count} of {p}");
        }
    }

    #[test]
    fn filters_keep_the_tokens_that_they_should() {
        let kept = |draw| counts(draw).map(|count| count > 0);
        assert_eq!(kept(Draw { kept: 2, ..ONE }), [true, true, false, false]);
        assert_eq!(kept(Draw { top_p: 0.6, ..ONE }), [true, true, false, false]);
        // The most likely token stays, even if its probability alone exceeds top-p.
        assert_eq!(kept(Draw { top_p: 0.1, ..ONE }), [true, false, false, false]);
        assert_eq!(kept(Draw { min_p: 0.2, ..ONE }), [true, true, true, false]);
        assert_eq!(kept(Draw { temperature: 0.01, ..ONE }), [true, false, false, false]);
    }

    #[test]
    fn a_greedy_draw_takes_the_first_of_equal_tokens() {
        assert_eq!(draw(&[1.0, 3.0, 3.0], &Draw::GREEDY), 1);
        assert_eq!(draw(&[f32::NEG_INFINITY, 3.0, f32::INFINITY, f32::INFINITY], &Draw::GREEDY), 2);
    }
}
