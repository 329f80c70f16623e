//! The pages of a pool, and a prefix cache: which pages are free, and which hold the keys and values of which tokens.
//!
//! A page holds consecutive tokens of one sequence. Sequences that begin with the same tokens share the pages of that beginning,
//! and nothing is written to a shared page. Cached pages form a tree, because keys and values depend on all tokens before them: a
//! page is found by its tokens and by the page in front of it. If no page is free, the least recently used one is evicted (LRU),
//! among pages that no sequence uses and that have no page behind them.

pub(crate) use backend_nvfp4::PAGE;
use std::{cmp::Reverse, collections::BinaryHeap, ops::Range};

/// The pages of a pool.
#[derive(Debug)]
pub(crate) struct Pages {
    pages: Vec<PageState>,
    /// The cached pages with which sequences begin.
    first: Vec<usize>,
    /// Counts what was cached or used.
    clock: u64,
    /// Number of pages that no sequence uses.
    unused: usize,
}

#[derive(Debug, Default)]
struct PageState {
    /// Number of sequences that use the page.
    references: usize,
    cached: Option<CachedPage>,
}

/// What a cached page holds.
#[derive(Debug)]
struct CachedPage {
    tokens: Vec<u32>,
    /// The page in front of it. That one is not evicted before this one.
    parent: Option<usize>,
    /// The pages behind it.
    children: Vec<usize>,
    last_use: u64,
}

/// The pages that hold the beginning of a sequence. They count as used by it until they are released.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// Pages that hold its first tokens, all of them full.
    pub(crate) pages: Vec<usize>,
    /// A page that begins with the tokens behind them, and how many of its tokens these are.
    pub(crate) partial: Option<(usize, usize)>,
}

impl Pages {
    /// `count` free pages.
    pub(crate) fn new(count: usize) -> Self {
        let pages = (0..count).map(|_| PageState::default()).collect();
        Self { pages, first: vec![], clock: 0, unused: count }
    }

    /// Number of pages that no sequence uses.
    pub(crate) fn available(&self) -> usize {
        self.unused
    }

    /// Whether other sequences may use the page, now or later.
    pub(crate) fn is_shared(&self, page: usize) -> bool {
        self.pages[page].references > 1 || self.pages[page].cached.is_some()
    }

    /// Finds the pages that hold the beginning of `tokens`.
    pub(crate) fn find(&mut self, tokens: &[u32]) -> Found {
        let (mut found, mut parent) = (Found { pages: vec![], partial: None }, None);
        while let Some((page, same)) = self.longest(parent, &tokens[found.pages.len() * PAGE..]) {
            self.retain(page);
            self.clock += 1;
            if let Some(cached) = &mut self.pages[page].cached {
                cached.last_use = self.clock;
            }
            if same < PAGE {
                found.partial = Some((page, same));
                break;
            }
            found.pages.push(page);
            parent = Some(page);
        }
        found
    }

    /// The page behind `parent` that has most of the first tokens of `rest`, and how many it has.
    fn longest(&self, parent: Option<usize>, rest: &[u32]) -> Option<(usize, usize)> {
        let same = |page: &usize| {
            let cached = self.pages[*page].cached.as_ref()?;
            let same = cached.tokens.iter().zip(rest).take_while(|(a, b)| a == b).count();
            (same > 0).then_some((*page, same))
        };
        self.behind(parent).iter().filter_map(same).max_by_key(|(_, same)| *same)
    }

    /// The cached pages behind a page, or those with which sequences begin.
    fn behind(&self, parent: Option<usize>) -> &[usize] {
        match parent {
            None => &self.first,
            Some(parent) => self.pages[parent].cached.as_ref().map_or(&[], |cached| &cached.children),
        }
    }

    fn behind_mut(&mut self, parent: Option<usize>) -> &mut Vec<usize> {
        match parent.and_then(|parent| self.pages[parent].cached.as_mut()) {
            Some(parent) => &mut parent.children,
            None => &mut self.first,
        }
    }

    /// Gives pages to a sequence, those that lie side by side where it can. `None` if there are not enough.
    pub(crate) fn take(&mut self, count: usize) -> Option<Vec<usize>> {
        if count > self.available() {
            return None;
        }
        let is_free = |page: &PageState| page.references == 0 && page.cached.is_none();
        self.evict_oldest(count.saturating_sub(self.pages.iter().filter(|page| is_free(page)).count()));
        // Free pages that lie side by side, the smallest such row that has room for all.
        let mut rows: Vec<Range<usize>> = Vec::new();
        for page in (0..self.pages.len()).filter(|page| is_free(&self.pages[*page])) {
            match rows.last_mut() {
                Some(row) if row.end == page => row.end += 1,
                _ => rows.push(page..page + 1),
            }
        }
        rows.sort_by_key(Range::len);
        let taken: Vec<usize> = match rows.iter().find(|row| row.len() >= count).cloned() {
            Some(row) => row.take(count).collect(),
            None => rows.into_iter().rev().flatten().take(count).collect(),
        };
        assert_eq!(taken.len(), count, "whoever uses a page uses all in front of it");
        taken.iter().for_each(|page| self.retain(*page));
        Some(taken)
    }

    /// Evicts `count` pages, one after another. There is one to evict as long as a cached page is unused, because whoever uses a
    /// page uses all in front of it.
    fn evict_oldest(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        let evictable = |page: usize| self.last_use_if_evictable(page).map(|last_use| Reverse((last_use, page)));
        let mut oldest: BinaryHeap<_> = (0..self.pages.len()).filter_map(evictable).collect();
        for _ in 0..count {
            let Some(Reverse((_, page))) = oldest.pop() else { return };
            let Some(CachedPage { parent, .. }) = self.pages[page].cached.take() else { return };
            self.behind_mut(parent).retain(|other| *other != page);
            oldest.extend(parent.and_then(|parent| Some(Reverse((self.last_use_if_evictable(parent)?, parent)))));
        }
    }

    fn last_use_if_evictable(&self, page: usize) -> Option<u64> {
        let PageState { references, cached } = &self.pages[page];
        cached.as_ref().filter(|cached| *references == 0 && cached.children.is_empty()).map(|cached| cached.last_use)
    }

    /// Counts another sequence that uses the page.
    fn retain(&mut self, page: usize) {
        self.unused -= usize::from(self.pages[page].references == 0);
        self.pages[page].references += 1;
    }

    /// Takes pages back from a sequence. Cached ones stay until their room is needed.
    pub(crate) fn release(&mut self, pages: &[usize]) {
        for page in pages {
            self.pages[*page].references -= 1;
            self.unused += usize::from(self.pages[*page].references == 0);
        }
    }

    /// Caches the pages of a sequence, which hold these tokens. Nothing may be written to them any more. Of a sequence that has not
    /// `ended`, no page is cached behind one that it does not use.
    pub(crate) fn insert(&mut self, pages: &[usize], tokens: &[u32], ended: bool) {
        let mut parent = None;
        for (page, tokens) in pages.iter().zip(tokens.chunks(PAGE)) {
            let holds = |page: &usize| self.pages[*page].cached.as_ref().is_some_and(|c| c.tokens.starts_with(tokens));
            let known = self.behind(parent).iter().copied().find(holds);
            if known.is_some_and(|known| known != *page && !ended) {
                return;
            }
            if known.is_none() {
                self.clock += 1;
                let cached = CachedPage { tokens: tokens.to_vec(), parent, children: vec![], last_use: self.clock };
                self.pages[*page].cached = Some(cached);
                self.behind_mut(parent).push(*page);
            }
            parent = known.or(Some(*page));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sequence of `length` tokens. The first `differs` are the same for every `kind`; the others differ between kinds.
    fn tokens(length: usize, differs: usize, kind: u32) -> Vec<u32> {
        (0..length).map(|at| if at < differs { at as u32 } else { 1000 * kind + at as u32 }).collect()
    }

    /// A sequence that has ended, whose pages are cached.
    fn ended(pages: &mut Pages, tokens: &[u32]) {
        let found = pages.find(tokens);
        let own = pages.take(tokens.len().div_ceil(PAGE) - found.pages.len()).unwrap();
        found.partial.iter().for_each(|(page, _)| pages.release(&[*page]));
        let all = [found.pages, own].concat();
        pages.insert(&all, tokens, true);
        pages.release(&all);
    }

    #[test]
    fn sequences_share_what_begins_alike() {
        let mut pages = Pages::new(20);
        ended(&mut pages, &tokens(3 * PAGE + 5, 99, 1));
        // Two full pages are alike, and 7 tokens of the third.
        let other = tokens(3 * PAGE, 2 * PAGE + 7, 2);
        assert_eq!(pages.find(&other), Found { pages: vec![0, 1], partial: Some((2, 7)) });
        pages.release(&[0, 1, 2]);
        // The last page is not full, and the whole of it is alike.
        let longer = tokens(5 * PAGE, 99, 3);
        assert_eq!(pages.find(&longer), Found { pages: vec![0, 1, 2], partial: Some((3, 5)) });
        pages.release(&[0, 1, 2, 3]);
        assert_eq!(pages.find(&tokens(50, 0, 4)), Found { pages: vec![], partial: None });
        assert_eq!(pages.available(), 20);
    }

    #[test]
    fn a_page_is_found_behind_its_own_beginning_only() {
        let mut pages = Pages::new(8);
        let (first, second) = (tokens(2 * PAGE, 0, 1), tokens(2 * PAGE, 0, 2));
        ended(&mut pages, &first);
        // The second page of the first sequence behind the first page of another one.
        let mixed = [&second[..PAGE], &first[PAGE..]].concat();
        assert_eq!(pages.find(&mixed), Found { pages: vec![], partial: None });
        ended(&mut pages, &mixed);
        assert_eq!(pages.find(&mixed).pages, [2, 3]);
    }

    #[test]
    fn what_was_used_longest_ago_is_evicted_last_page_first() {
        let mut pages = Pages::new(6);
        let (a, b) = (tokens(2 * PAGE, 0, 1), tokens(2 * PAGE, 0, 2));
        ended(&mut pages, &a);
        ended(&mut pages, &b);
        let used = pages.find(&a).pages;
        pages.release(&used);
        // Two pages are free. Of the third sequence's three, one is the last page of the second one, which was used before the
        // first.
        let own = pages.take(3).unwrap();
        assert_eq!(pages.find(&b).pages, [2]);
        assert_eq!(pages.find(&a).pages, [0, 1]);
        // What sequences use is not evicted.
        assert_eq!((pages.take(1), pages.available()), (None, 0));
        pages.release(&own);
        assert_eq!(pages.take(3).map(|pages| pages.len()), Some(3));
        // A page goes, and in the same call the one in front of it.
        pages.release(&[0, 1, 2]);
        assert_eq!(pages.take(3).map(|pages| pages.len()), Some(3));
        assert_eq!(pages.find(&a), Found { pages: vec![], partial: None });
    }

    /// Two sequences read the same at the same time. One ends, and the other one continues with pages of its own.
    #[test]
    fn a_running_sequence_uses_all_in_front_of_its_cached_pages() {
        let mut pages = Pages::new(4);
        let same = tokens(2 * PAGE, 99, 1);
        let [a, b] = [0, 1].map(|_| pages.take(2).unwrap());
        pages.insert(&a[..1], &same[..PAGE], false);
        pages.insert(&b, &same, false);
        pages.release(&a);
        assert_eq!(pages.available(), 2);
        assert_eq!(pages.take(2).map(|pages| pages.len()), Some(2));
    }

    #[test]
    fn pages_side_by_side_go_together() {
        let mut pages = Pages::new(10);
        let [a, b, c] = [3, 2, 3].map(|count| pages.take(count).unwrap());
        pages.release(&a);
        pages.release(&c);
        // Three at the beginning are free, and five at the end.
        assert_eq!(pages.take(4).unwrap(), [5, 6, 7, 8]);
        assert_eq!(pages.take(3).unwrap(), [0, 1, 2]);
        assert_eq!((b, pages.available()), (vec![3, 4], 1));
    }
}
