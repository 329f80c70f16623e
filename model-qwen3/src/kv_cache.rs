//! The KV cache: keys and values of past tokens. A pool allocates pages for the tokens of several sequences once. The cache of a
//! sequence is a list of pages of a pool. Sequences that begin with the same tokens share pages (pages.rs), also while both run.

use crate::{
    ModelError,
    config::Qwen3Config,
    pages::{PAGE, Pages},
};
use backend_nvfp4::{CacheBuffer, CacheFormat, Nvfp4Kernels};
use burn::tensor::{DType, Tensor, backend::Backend};
use std::{
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Room for the tokens of several sequences.
#[derive(Debug, Clone)]
pub struct KvPool<B: Backend>(Arc<Mutex<Shared<B>>>);

#[derive(Debug)]
struct Shared<B: Backend> {
    /// Keys and values of each block. `None` only while they are written: nothing else holds them then, and they are updated in
    /// place.
    layers: Vec<Option<[CacheBuffer<B>; 2]>>,
    pages: Pages,
}

/// The cache of one sequence.
#[derive(Debug)]
pub struct KvCache<B: Backend> {
    pool: KvPool<B>,
    /// Pages for `capacity` tokens.
    pages: Vec<usize>,
    len: usize,
    capacity: usize,
}

/// The new tokens of a sequence in a forward. A single token can be read in two ways, whose results differ in the last bits: as
/// part of a prompt, or as the newest token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewTokens {
    /// So many tokens of a prompt.
    Prompt(usize),
    /// The newest token: of an answer, or the last one of a prompt.
    Answer,
}

impl NewTokens {
    /// Number of tokens.
    pub fn count(self) -> usize {
        match self {
            Self::Prompt(count) => count,
            Self::Answer => 1,
        }
    }

    pub(crate) fn is_answer(self) -> bool {
        self == Self::Answer
    }
}

impl<B: Backend> KvPool<B> {
    fn shared(&self) -> MutexGuard<'_, Shared<B>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a sequence of `capacity` tokens has room now.
    pub fn has_room(&self, capacity: usize) -> bool {
        capacity.div_ceil(PAGE) <= self.shared().pages.available()
    }

    /// Whether both are the same pool.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Takes the keys and values of a block out, for an operation that updates them in place. [`Self::put`] brings them back.
    pub(crate) fn take(&self, block: usize) -> [CacheBuffer<B>; 2] {
        self.shared().layers[block].take().expect("put back before it is taken again")
    }

    /// Puts keys and values of a block back.
    pub(crate) fn put(&self, block: usize, buffers: [CacheBuffer<B>; 2]) {
        self.shared().layers[block] = Some(buffers);
    }
}

impl<B: Nvfp4Kernels> KvPool<B> {
    /// Allocates room for `tokens` tokens of a model that computes in `dtype`.
    ///
    /// # Errors
    /// If the format does not take the sizes of the model.
    pub(crate) fn new(
        config: &Qwen3Config,
        tokens: usize,
        format: CacheFormat,
        dtype: DType,
        device: &B::Device,
    ) -> Result<Self, ModelError> {
        let width = config.num_key_value_heads * config.head_dim;
        if !format.fits(width) {
            return Err(ModelError::CacheWidth { width });
        }
        let pages = tokens.div_ceil(PAGE).max(1);
        let zeros = || CacheBuffer::zeros([pages * PAGE, width], format, dtype, device);
        let layers = (0..config.num_hidden_layers).map(|_| Some([zeros(), zeros()])).collect();
        Ok(Self(Arc::new(Mutex::new(Shared { layers, pages: Pages::new(pages) }))))
    }

    /// A cache for at most `capacity` tokens, the first of which are `prompt`. It holds the beginning of the prompt that other
    /// sequences of the pool have read, but never its last token, because that token's logits are needed. `None` if the pool
    /// has no room now.
    pub fn cache(&self, prompt: &[u32], capacity: usize) -> Option<KvCache<B>> {
        let mut shared = self.shared();
        let found = shared.pages.find(&prompt[..prompt.len().saturating_sub(1).min(capacity)]);
        let mut pages = found.pages;
        let mut len = pages.len() * PAGE;
        let missing = capacity.div_ceil(PAGE).saturating_sub(pages.len());
        let mut own = shared.pages.take(missing);
        if let Some((page, tokens)) = found.partial {
            if let Some(own) = &own {
                shared.copy(page, own[0], tokens);
                len += tokens;
            }
            shared.pages.release(&[page]);
            // That page may be the one that was missing.
            own = own.or_else(|| shared.pages.take(missing));
        }
        let Some(own) = own else {
            shared.pages.release(&pages);
            return None;
        };
        pages.extend(own);
        Some(KvCache { pool: self.clone(), pages, len, capacity })
    }
}

impl<B: Nvfp4Kernels> Shared<B> {
    /// Copies the first `tokens` rows of a page to another one.
    fn copy(&mut self, from: usize, to: usize, tokens: usize) {
        let rows = |page: usize| page * PAGE..page * PAGE + tokens;
        for layer in &mut self.layers {
            let buffers = layer.take().expect("put back before it is taken again");
            *layer = Some(buffers.map(|buffer| buffer.copy_rows(rows(from), rows(to))));
        }
    }
}

impl<B: Backend> KvCache<B> {
    /// Number of tokens in the cache.
    pub fn tokens(&self) -> usize {
        self.len
    }

    /// Checks that `more` tokens fit.
    ///
    /// # Errors
    /// If they exceed the capacity.
    pub fn reserve(&self, more: usize) -> Result<(), ModelError> {
        let value = self.len + more;
        if value > self.capacity {
            return Err(ModelError::TooLarge { what: "sequence length", value, limit: self.capacity });
        }
        Ok(())
    }

    /// The pool of the cache.
    pub(crate) fn pool(&self) -> &KvPool<B> {
        &self.pool
    }

    /// The pages of the cache in the order of its tokens.
    pub(crate) fn pages(&self) -> &[usize] {
        &self.pages
    }

    /// Forgets all tokens but the first `len`, and returns how many are left. These are fewer than `len` if token `len` lies within
    /// a shared page: a shared page is not overwritten, so all of its tokens are forgotten.
    pub fn rewind(&mut self, len: usize) -> usize {
        let mut shared = self.pool.shared();
        self.len = self.len.min(len);
        if self.pages.get(self.len / PAGE).is_some_and(|page| shared.pages.is_shared(*page)) {
            self.len = self.len / PAGE * PAGE;
        }
        // What follows is written to pages of this cache alone. All shared pages are released before others are taken, because a
        // page is not evicted while one behind it is in use. Where the pool has too few, the cache has less room.
        let behind = self.pages.split_off(self.len.div_ceil(PAGE));
        let (others, own): (Vec<usize>, Vec<usize>) =
            behind.into_iter().partition(|page| shared.pages.is_shared(*page));
        shared.pages.release(&others);
        let count = others.len().min(shared.pages.available());
        self.pages.extend(own);
        self.pages.extend(shared.pages.take(count).into_iter().flatten());
        self.capacity = self.capacity.min(self.pages.len() * PAGE);
        self.len
    }

    /// Counts `tokens` more tokens, after every block has appended them.
    pub fn advance(&mut self, tokens: usize) {
        self.len += tokens;
    }

    /// Shares the pages of `ids`, the first tokens of the cache, with later sequences of the pool: those that are full, and the
    /// last one too if the sequence has `ended`, so that nothing is written to it any more.
    pub(crate) fn share(&self, ids: &[u32], ended: bool) {
        let len = if ended { ids.len() } else { ids.len() / PAGE * PAGE };
        self.pool.shared().pages.insert(&self.pages, &ids[..len], ended);
    }

    /// The rows of some tokens, as few ranges as they are.
    fn rows(&self, tokens: Range<usize>) -> Vec<Range<usize>> {
        let mut rows: Vec<Range<usize>> = Vec::new();
        for page in tokens.start / PAGE..tokens.end.div_ceil(PAGE) {
            let [first, end] = [tokens.start.max(page * PAGE), tokens.end.min((page + 1) * PAGE)];
            let start = self.pages[page] * PAGE + first % PAGE;
            match rows.last_mut() {
                Some(last) if last.end == start => last.end += end - first,
                _ => rows.push(start..start + end - first),
            }
        }
        rows
    }
}

impl<B: Nvfp4Kernels> KvCache<B> {
    /// Writes the keys and values of new tokens `[T, G*E]` for a block behind those that the cache holds, and returns the keys and
    /// values of all tokens as they are stored, `[S, G*E]`.
    pub(crate) fn append(&self, block: usize, new: [Tensor<B, 2>; 2]) -> [Tensor<B, 2>; 2] {
        let (dtype, end) = (new[0].dtype(), self.len + new[0].dims()[0]);
        let (fresh, all) = (self.rows(self.len..end), self.rows(0..end));
        let [k, v] = new;
        let [old_k, old_v] = self.pool.take(block);
        let buffers = [old_k.write(&fresh, k), old_v.write(&fresh, v)];
        let read = buffers.each_ref().map(|buffer| buffer.read(&all, dtype));
        self.pool.put(block, buffers);
        read
    }
}

impl<B: Backend> Drop for KvCache<B> {
    fn drop(&mut self) {
        self.pool.shared().pages.release(&self.pages);
    }
}
