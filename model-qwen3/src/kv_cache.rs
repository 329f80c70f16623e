//! Keys and values of past tokens. A pool has room for the tokens of several sequences, in pages that are allocated once; the
//! cache of a sequence has pages of a pool. What the pool remembers of sequences that have ended serves later ones that begin
//! alike (pages.rs).

use crate::{
    ModelError,
    config::Qwen3Config,
    pages::{PAGE, Pages},
};
use backend_nvfp4::{CacheFormat, Kept, Nvfp4Kernels};
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
    layers: Vec<Option<[Kept<B>; 2]>>,
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

impl<B: Backend> KvPool<B> {
    fn shared(&self) -> MutexGuard<'_, Shared<B>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether sequences of `capacity` tokens have room now.
    pub fn has_room(&self, capacity: usize) -> bool {
        capacity.div_ceil(PAGE) <= self.shared().pages.available()
    }

    /// Whether both are the same pool.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Takes the keys and values of a block out, for an operation that updates them in place. [`Self::put`] brings them back.
    pub(crate) fn take(&self, block: usize) -> [Kept<B>; 2] {
        self.shared().layers[block].take().expect("put back before it is taken again")
    }

    /// Puts keys and values of a block back.
    pub(crate) fn put(&self, block: usize, kept: [Kept<B>; 2]) {
        self.shared().layers[block] = Some(kept);
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
        let zeros = || Kept::zeros([pages * PAGE, width], format, dtype, device);
        let layers = (0..config.num_hidden_layers).map(|_| Some([zeros(), zeros()])).collect();
        Ok(Self(Arc::new(Mutex::new(Shared { layers, pages: Pages::new(pages) }))))
    }

    /// A cache for at most `capacity` tokens, the first of which are `prompt`. It holds what the pool remembers of the prompt,
    /// but never its last token, because that token's logits are needed. `None` if the pool has no room now.
    pub fn cache(&self, prompt: &[u32], capacity: usize) -> Option<KvCache<B>> {
        let mut shared = self.shared();
        let found = shared.pages.find(&prompt[..prompt.len().saturating_sub(1).min(capacity)]);
        let mut pages = found.pages;
        let mut len = pages.len() * PAGE;
        let missing = capacity.div_ceil(PAGE).saturating_sub(pages.len());
        match (shared.pages.take(missing), found.part) {
            (Some(own), Some((page, tokens))) => {
                shared.copy(page, own[0], tokens);
                shared.pages.release(&[page]);
                pages.extend(own);
                len += tokens;
            }
            (Some(own), None) => pages.extend(own),
            // The page that begins alike may be what is missing.
            (None, Some((page, tokens))) if shared.pages.own(page) => {
                pages.push(page);
                let Some(own) = shared.pages.take(missing - 1) else {
                    shared.pages.release(&pages);
                    return None;
                };
                pages.extend(own);
                len += tokens;
            }
            (None, part) => {
                part.iter().for_each(|(page, _)| shared.pages.release(&[*page]));
                let Some(own) = shared.pages.take(missing) else {
                    shared.pages.release(&pages);
                    return None;
                };
                pages.extend(own);
            }
        }
        Some(KvCache { pool: self.clone(), pages, len, capacity })
    }
}

impl<B: Nvfp4Kernels> Shared<B> {
    /// Copies the first `tokens` rows of a page to another one.
    fn copy(&mut self, from: usize, to: usize, tokens: usize) {
        let rows = |page: usize| page * PAGE..page * PAGE + tokens;
        for layer in &mut self.layers {
            let kept = layer.take().expect("put back before it is taken again");
            *layer = Some(kept.map(|kept| kept.copied(rows(from), rows(to))));
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

    /// Forgets all tokens but the first `len`, and those before them on a page that later sequences may share: such a page is
    /// not overwritten. Returns how many are left.
    pub fn rewind(&mut self, len: usize) -> usize {
        self.len = self.len.min(len);
        let page = self.len / PAGE;
        if !self.len.is_multiple_of(PAGE) && self.pool.shared().pages.is_shared(self.pages[page]) {
            self.len = page * PAGE;
        }
        // What follows is written to pages of this cache alone. Where the pool has none left, the cache has less room.
        let (first, pool) = (self.len.div_ceil(PAGE), self.pool.clone());
        let mut shared = pool.shared();
        for at in first..self.pages.len() {
            if !shared.pages.is_shared(self.pages[at]) {
                continue;
            }
            shared.pages.release(&self.pages[at..=at]);
            match shared.pages.take(1) {
                Some(own) => self.pages[at] = own[0],
                None => {
                    shared.pages.release(&self.pages[at + 1..]);
                    self.pages.truncate(at);
                    self.capacity = at * PAGE;
                    break;
                }
            }
        }
        self.len
    }

    /// Counts `tokens` more tokens, after every block has appended them.
    pub fn advance(&mut self, tokens: usize) {
        self.len += tokens;
    }

    /// Makes the pool remember the pages of `ids`, the tokens of the cache: those that are full, and the last one too if the
    /// sequence has ended, so that nothing is written to it any more.
    pub fn remember(&self, ids: &[u32], ended: bool) {
        let len = if ended { self.len } else { self.len / PAGE * PAGE };
        self.pool.shared().pages.learn(&self.pages, &ids[..len], ended);
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
    /// Writes the keys and values of new tokens `[T, G*E]` for a block behind those that the cache holds, and returns those of
    /// all tokens as they are kept, `[S, G*E]`.
    pub(crate) fn append(&self, block: usize, new: [Tensor<B, 2>; 2]) -> [Tensor<B, 2>; 2] {
        let (dtype, end) = (new[0].dtype(), self.len + new[0].dims()[0]);
        let (fresh, all) = (self.rows(self.len..end), self.rows(0..end));
        let [k, v] = new;
        let [old_k, old_v] = self.pool.take(block);
        let kept = [old_k.written(&fresh, k), old_v.written(&fresh, v)];
        let read = kept.each_ref().map(|kept| kept.read(&all, dtype));
        self.pool.put(block, kept);
        read
    }
}

impl<B: Backend> Drop for KvCache<B> {
    fn drop(&mut self) {
        self.pool.shared().pages.release(&self.pages);
    }
}
