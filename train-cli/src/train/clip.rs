//! Gradient clipping: where the global gradient norm exceeds a maximum, every gradient is multiplied by
//! `maximum / (norm + 1e-6)`, as PyTorch does. The factor must be known before the first gradient reaches the
//! optimizer. `exact` uses the norm of the same step; `previous` uses the norm of the step before, so that no second
//! pass is needed.

use crate::settings::Clip;

/// How gradients are clipped.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clipping {
    /// Which norm decides.
    pub clip: Clip,
    /// The largest norm that is not clipped; 0 turns clipping off.
    pub max_norm: f64,
    /// The norm of the previous step; `None` before the first.
    pub last_norm: Option<f32>,
}

impl Clipping {
    /// Whether a step must know its own norm before it updates anything.
    pub fn needs_the_norm_first(&self) -> bool {
        self.clip.needs_the_norm_first(self.max_norm)
    }

    /// The factor on every gradient of a step; `norm` is the step's own norm where it is known by now.
    pub fn clip_factor(&self, norm: Option<f32>) -> f64 {
        match norm.filter(|_| self.clip == Clip::Exact).or(self.last_norm).map(f64::from) {
            Some(norm) if self.max_norm > 0.0 && norm > self.max_norm => self.max_norm / (norm + 1e-6),
            _ => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_factor_brings_the_chosen_norm_down_to_the_maximum() {
        let clipping = |clip, last_norm| Clipping { clip, max_norm: 2.0, last_norm };
        let close = |scale: f64, expected: f64| assert!((scale - expected).abs() < 1e-6, "{scale}");
        close(clipping(Clip::Exact, Some(20.0)).clip_factor(Some(8.0)), 0.25);
        close(clipping(Clip::Previous, Some(20.0)).clip_factor(Some(8.0)), 0.1);
        assert_eq!(clipping(Clip::Previous, None).clip_factor(Some(8.0)), 1.0, "the first step is not clipped");
        assert_eq!(clipping(Clip::Exact, Some(20.0)).clip_factor(Some(1.5)), 1.0, "a small norm is left alone");
        assert_eq!(Clipping { max_norm: 0.0, ..clipping(Clip::Exact, Some(20.0)) }.clip_factor(Some(8.0)), 1.0);
    }
}
