//! Rotary position angles (Su et al., arXiv 2104.09864), in the half-split form of Qwen3:
//! `x' = x * cos + rotate_half(x) * sin`, `rotate_half([a, b]) = [-b, a]`, angle `p * theta^(-2i/E)`.

use burn::tensor::{DType, Tensor, TensorData, backend::Backend};

/// cos and sin of positions `start..start + T`, `[T, E/2]` each, in the activations' dtype.
#[derive(Debug, Clone)]
pub struct Rope<B: Backend> {
    cos_TE: Tensor<B, 2>,
    sin_TE: Tensor<B, 2>,
}

impl<B: Backend> Rope<B> {
    /// Computes the angles in f32 on the host, as Hugging Face does, then casts.
    pub fn new(start: usize, len: usize, head_dim: usize, theta: f64, dtype: DType, device: &B::Device) -> Self {
        let half = head_dim / 2;
        let inverse: Vec<f32> =
            (0..half).map(|i| 1.0 / (theta as f32).powf(2.0 * i as f32 / head_dim as f32)).collect();
        let table = |f: fn(f32) -> f32| {
            let values: Vec<f32> =
                (start..start + len).flat_map(|p| inverse.iter().map(move |w| f(p as f32 * w))).collect();
            Tensor::<B, 2>::from_data(TensorData::new(values, [len, half]), (device, DType::F32)).cast(dtype)
        };
        Self { cos_TE: table(f32::cos), sin_TE: table(f32::sin) }
    }

    /// Rotates `x` `[B, heads, T, E]`.
    pub fn rotate(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let half = x.dims()[3] / 2;
        let cos = self.cos_TE.clone().unsqueeze::<4>();
        let sin = self.sin_TE.clone().unsqueeze::<4>();
        let a = x.clone().narrow(3, 0, half);
        let b = x.narrow(3, half, half);
        let left = a.clone() * cos.clone() - b.clone() * sin.clone();
        Tensor::cat(vec![left, b * cos + a * sin], 3)
    }
}
