//! The next tokens, drawn by kernels, and questions for what kernels write, which are asked before anything else is launched.

use super::launch::{arg, dims, empty, launched};
use crate::{
    asked::Asked,
    draw::{Draw, Penalty},
    error::Nvfp4Error,
};
use burn::tensor::DType;
use burn_cubecl::{CubeRuntime, kernel::into_contiguous, tensor::CubeTensor};
use cubecl::{
    bytes::Bytes,
    prelude::ComputeClient,
    server::{Handle, ServerError},
};
use kernels_cubecl::{draw, penalty::penalize};
use std::{
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll, Waker},
};

/// See [`Nvfp4Kernels::draw`](crate::kernels::Nvfp4Kernels::draw).
pub(super) fn draw<R: CubeRuntime>(logits: CubeTensor<R>, draws: &[Draw]) -> (CubeTensor<R>, Asked) {
    let logits = into_contiguous(logits);
    let [rows, cols] = dims(&logits);
    let tokens = empty(&logits, [2 * rows], DType::I32);
    launched(draw::draw(&logits.client, || arg(&logits), draws, || arg(&tokens), cols));
    let asked = words_of(tokens.clone());
    (tokens, asked)
}

/// See [`Nvfp4Kernels::words_of`](crate::kernels::Nvfp4Kernels::words_of).
pub(super) fn words_of<R: CubeRuntime>(x: CubeTensor<R>) -> Asked {
    let x = into_contiguous(x);
    let len = x.meta.shape().num_elements();
    let question = ask(x.client.clone(), x.handle.clone());
    Asked::new(move || {
        let bytes = cubecl::future::block_on(question).map_err(|e| Nvfp4Error::Device(format!("{e:?}")))?;
        let words = bytes.iter().flat_map(|bytes| bytes.chunks_exact(4)).take(len);
        Ok(words.map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect())
    })
}

/// See [`Nvfp4Kernels::penalize`](crate::kernels::Nvfp4Kernels::penalize).
pub(super) fn penalized<R: CubeRuntime>(
    logits: CubeTensor<R>,
    newest: CubeTensor<R>,
    penalties: &[Penalty<'_>],
) -> CubeTensor<R> {
    let [logits, newest] = [logits, newest].map(into_contiguous);
    assert_eq!(newest.dtype, DType::I32, "the kernel reads words");
    let y = empty(&logits, dims(&logits), DType::F32);
    launched(penalize(&logits.client, arg(&logits), arg(&newest), penalties, arg(&y), dims(&logits)[1]));
    y
}

type Answer = Result<Vec<Bytes>, ServerError>;

/// Asks for the bytes of a buffer now, in front of what is launched next. Whoever wants the answer waits for it.
fn ask<R: CubeRuntime>(client: ComputeClient<R>, buffer: Handle) -> Pin<Box<dyn Future<Output = Answer> + Send>> {
    let mut question = Box::pin(async move {
        let answer = client.read_async(vec![buffer]);
        let mut is_asked = false;
        poll_fn(|_| if std::mem::replace(&mut is_asked, true) { Poll::Ready(()) } else { Poll::Pending }).await;
        answer.await
    });
    // The first poll asks, and waits for nothing.
    let pending = question.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    debug_assert!(pending.is_pending());
    question
}
