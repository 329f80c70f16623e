//! The next tokens, drawn by kernels, and the question for them that is asked before anything else is launched.

use super::launch::{arg, dims, empty, launched};
use crate::{
    draw::{Awaited, Draw, Penalty},
    error::Nvfp4Error,
};
use burn::tensor::DType;
use burn_cubecl::{CubeRuntime, kernel::into_contiguous, tensor::CubeTensor};
use cubecl::{
    bytes::Bytes,
    prelude::ComputeClient,
    server::{Handle, ServerError},
};
use kernels_cubecl::{draw, likeliest, penalty::penalize};
use std::{
    future::poll_fn,
    pin::Pin,
    task::{Context, Poll, Waker},
};

/// See [`Nvfp4Kernels::draw`](crate::kernels::Nvfp4Kernels::draw).
pub(super) fn draw<R: CubeRuntime>(logits: CubeTensor<R>, draws: &[Draw]) -> Option<(CubeTensor<R>, Awaited)> {
    let logits = into_contiguous(logits);
    let ([rows, cols], client) = (dims(&logits), logits.client.clone());
    let count = draws.iter().map(|draw| draw.kept).max()?;
    if !(1..=likeliest::MOST.min(cols)).contains(&count) {
        return None;
    }
    let found = empty(&logits, [rows * likeliest::words(count)], DType::U32);
    let tokens = empty(&logits, [2 * rows], DType::I32);
    launched(likeliest::likeliest(&client, arg(&logits), arg(&found), [rows, cols], count));
    launched(draw::draw(&client, arg(&found), draws, arg(&tokens), count));
    let question = ask(client, tokens.handle.clone());
    let asked = move || {
        let bytes = cubecl::future::block_on(question).map_err(|e| Nvfp4Error::Device(format!("{e:?}")))?;
        let words = bytes.iter().flat_map(|bytes| bytes.chunks_exact(4));
        Ok(words.map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect())
    };
    Some((tokens, Box::new(asked)))
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
