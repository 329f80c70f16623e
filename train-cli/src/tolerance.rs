//! How far two computations of the same hidden states may differ, relative to their norm. `parity` judges by these bounds, and its
//! help states them.

use backend_nvfp4::Precision;
use model_qwen3::bytes::FloatType;

/// `‖a - b‖ / ‖b‖`.
pub fn relative_difference(a: &[f32], b: &[f32]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let difference = squares(&mut a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    (difference / squares(&mut b.iter().map(|b| f64::from(*b))).max(f64::MIN_POSITIVE)).sqrt()
}

/// The bound if only one of two models is rounded to NVFP4. Two unrelated models differ by 1.4.
pub const NVFP4: f64 = 0.5;

/// The bound for a model of so many blocks that computes in `precision`. In f32 it is a few times what the tests see. In the other
/// formats it is ten roundings of the format, which add like a random walk over the blocks of the model.
pub fn hidden(precision: Precision, blocks: usize) -> f64 {
    let three = match precision {
        Precision::F32 => 1e-4,
        Precision::Tf32 | Precision::F16 => 10.0 * 2.0f64.powi(-11),
        Precision::Bf16 => 10.0 * 2.0f64.powi(-8),
    };
    grown(three, blocks)
}

/// The bound for two models of so many blocks of which one stores a weight as this float, and the other one in a more precise type:
/// three roundings of the weights. Tests see less than one in a model of three blocks.
pub fn stored(float: FloatType, blocks: usize) -> f64 {
    let three = match float {
        FloatType::F32 => 0.0,
        FloatType::F16 => 3.0 * 2.0f64.powi(-11),
        FloatType::Bf16 => 3.0 * 2.0f64.powi(-8),
    };
    grown(three, blocks)
}

/// What a bound for three blocks is for so many.
fn grown(three: f64, blocks: usize) -> f64 {
    three * (blocks as f64 / 3.0).sqrt().max(1.0)
}
