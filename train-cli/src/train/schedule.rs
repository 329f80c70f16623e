//! The learning rate of each step: linear warm-up, then constant, linear or cosine to zero.

use crate::settings::Decay;

/// The learning-rate schedule of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// The highest rate.
    pub peak: f64,
    /// Steps of warm-up. They may be more than the run has.
    pub warmup: usize,
    /// Steps of the run.
    pub total: usize,
    /// How the rate falls after warm-up.
    pub decay: Decay,
}

impl Schedule {
    /// The rate of step `step`, counted from 0. The first step of a warm-up has a rate above 0, and decay reaches 0
    /// only after the last step, so that no step is wasted.
    pub fn at(&self, step: usize) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / (self.warmup + 1) as f64;
        }
        let left = self.total.saturating_sub(self.warmup).max(1) as f64;
        let done = (step - self.warmup) as f64 / left;
        self.peak
            * match self.decay {
                Decay::Constant => 1.0,
                Decay::Linear => 1.0 - done,
                Decay::Cosine => (1.0 + (std::f64::consts::PI * done).cos()) / 2.0,
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warms_up_peaks_and_decays() {
        for decay in [Decay::Cosine, Decay::Linear] {
            let s = Schedule { peak: 1.0, warmup: 4, total: 20, decay };
            let rates: Vec<f64> = (0..20).map(|i| s.at(i)).collect();
            assert!(rates[0] > 0.0 && rates[..5].windows(2).all(|w| w[0] < w[1]));
            assert_eq!(rates[4], 1.0);
            assert!(rates[4..].windows(2).all(|w| w[0] > w[1]) && rates[19] > 0.0);
        }
        assert_eq!(Schedule { peak: 0.0, warmup: 0, total: 1, decay: Decay::Cosine }.at(0), 0.0);
    }
}
