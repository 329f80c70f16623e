//! Training losses: cross-entropy over supervised tokens, and the L1 distance of hidden states.

use burn::tensor::{DType, Int, Tensor, TensorData, activation, backend::Backend};

/// The target of a position that is not supervised.
pub const IGNORE: i64 = -100;

/// Sums `-log softmax(logits)[target]` over rows, f32 `[1]`. `logits` is `[M, V]` in f32, and `targets` holds M ids.
pub(crate) fn cross_entropy_sum<B: Backend>(logits_MV: Tensor<B, 2>, targets: &[i64]) -> Tensor<B, 1> {
    let [m, _] = logits_MV.dims();
    assert_eq!(m, targets.len(), "one target a row");
    let device = logits_MV.device();
    let ids: Vec<i32> = targets.iter().map(|&t| t as i32).collect();
    let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [m, 1]), &device);
    activation::log_softmax(logits_MV, 1).gather(1, ids).sum().neg()
}

/// The targets of next-token prediction: position i predicts token i+1 if that token is supervised. Rows are padded to
/// `t` columns with [`IGNORE`].
pub fn shifted_targets(ids: &[Vec<u32>], supervised: &[Vec<bool>], t: usize) -> Vec<i64> {
    let mut out = vec![IGNORE; ids.len() * t];
    for (row, (ids, kept)) in ids.iter().zip(supervised).enumerate() {
        for i in 1..ids.len() {
            if kept[i] {
                out[row * t + i - 1] = i64::from(ids[i]);
            }
        }
    }
    out
}

/// A loss for debugging: sums the mean absolute difference between hidden states and the embeddings of the next tokens,
/// both `[M, D]`, over the rows where `kept` is 1.
pub fn hidden_l1_sum<B: Backend>(hidden_MD: Tensor<B, 2>, next_MD: Tensor<B, 2>, kept: Vec<f32>) -> Tensor<B, 1> {
    let [m, d] = hidden_MD.dims();
    let kept = Tensor::<B, 2>::from_data(TensorData::new(kept, [m, 1]), (&hidden_MD.device(), DType::F32));
    let diff = (hidden_MD.cast(DType::F32) - next_MD.cast(DType::F32)).abs();
    (diff * kept).sum() / d as f64
}
