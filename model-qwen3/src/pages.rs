//! Which pages of a pool are free, and which hold the keys and values of which tokens.
//!
//! A page holds consecutive tokens of a sequence. Sequences that begin alike share the pages of their common beginning: nothing
//! is written to a page that is remembered. A page is remembered by its tokens and by the page in front of it, so the remembered
//! pages are a tree. Where room is needed, the page that was used longest ago is forgotten, of those that no sequence has and
//! behind which there is no other.

pub(crate) use backend_nvfp4::PAGE;
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
};

/// The pages of a pool.
#[derive(Debug)]
pub(crate) struct Pages {
    pages: Vec<Page>,
    /// The remembered pages behind each remembered page, and behind [`ROOT`].
    behind: HashMap<u64, Vec<usize>>,
    /// Counts what was remembered or used.
    clock: u64,
    /// Number of pages that no sequence has.
    idle: usize,
}

#[derive(Debug, Default)]
struct Page {
    /// Number of sequences that have the page.
    holders: usize,
    remembered: Option<Remembered>,
}

/// What a page holds.
#[derive(Debug)]
struct Remembered {
    /// No other page ever has this number.
    number: u64,
    /// The number of the page in front of it.
    before: u64,
    /// The page in front of it. It is remembered as long as this one is.
    parent: Option<usize>,
    tokens: Vec<u32>,
    /// When it was last used.
    used: u64,
}

/// Stands for the page in front of the first one.
const ROOT: u64 = 0;

/// What the pages hold of a sequence. They belong to the finder until they are released.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// Pages that hold its first tokens, all of them full.
    pub(crate) pages: Vec<usize>,
    /// A page that begins with the tokens behind them, and how many.
    pub(crate) part: Option<(usize, usize)>,
}

impl Pages {
    /// `count` free pages.
    pub(crate) fn new(count: usize) -> Self {
        let pages = (0..count).map(|_| Page::default()).collect();
        Self { pages, behind: HashMap::new(), clock: ROOT, idle: count }
    }

    /// Number of pages that no sequence has.
    pub(crate) fn available(&self) -> usize {
        self.idle
    }

    /// Counts another sequence that has the page.
    fn hold(&mut self, page: usize) {
        self.idle -= usize::from(self.pages[page].holders == 0);
        self.pages[page].holders += 1;
    }

    /// Whether others may have the page, now or later.
    pub(crate) fn is_shared(&self, page: usize) -> bool {
        self.pages[page].holders > 1 || self.pages[page].remembered.is_some()
    }

    /// Finds the pages that hold the beginning of `tokens`.
    pub(crate) fn find(&mut self, tokens: &[u32]) -> Found {
        let (mut found, mut before) = (Found { pages: vec![], part: None }, ROOT);
        loop {
            let rest = &tokens[found.pages.len() * PAGE..];
            let Some((page, same)) = self.longest(before, rest) else { return found };
            self.clock += 1;
            self.hold(page);
            let remembered = self.pages[page].remembered.as_mut().expect("it is behind another one");
            remembered.used = self.clock;
            before = remembered.number;
            if same < PAGE {
                found.part = Some((page, same));
                return found;
            }
            found.pages.push(page);
        }
    }

    /// The page behind another one that has most of the first tokens of `rest`, and how many it has.
    fn longest(&self, before: u64, rest: &[u32]) -> Option<(usize, usize)> {
        let same = |page: &usize| {
            let remembered = self.pages[*page].remembered.as_ref()?;
            let same = remembered.tokens.iter().zip(rest).take_while(|(a, b)| a == b).count();
            (same > 0).then_some((*page, same))
        };
        self.behind.get(&before)?.iter().filter_map(same).max_by_key(|(_, same)| *same)
    }

    /// Gives pages to a sequence, those that lie side by side where it can. `None` if there are not enough.
    pub(crate) fn take(&mut self, count: usize) -> Option<Vec<usize>> {
        if count > self.available() {
            return None;
        }
        let is_free = |page: &Page| page.holders == 0 && page.remembered.is_none();
        self.forget_oldest(count.saturating_sub(self.pages.iter().filter(|page| is_free(page)).count()));
        // Free pages that lie side by side, the smallest such row that has room for all.
        let mut rows: Vec<std::ops::Range<usize>> = Vec::new();
        for page in (0..self.pages.len()).filter(|page| is_free(&self.pages[*page])) {
            match rows.last_mut() {
                Some(row) if row.end == page => row.end += 1,
                _ => rows.push(page..page + 1),
            }
        }
        rows.sort_by_key(|row| row.len());
        let fits = rows.iter().find(|row| row.len() >= count).cloned();
        let taken: Vec<usize> = match fits {
            Some(row) => row.take(count).collect(),
            None => rows.into_iter().rev().flatten().take(count).collect(),
        };
        taken.iter().for_each(|page| self.hold(*page));
        Some(taken)
    }

    /// Forgets `count` pages, one after another: the page that was used longest ago, of those that no sequence has and behind
    /// which there is no other. There is one as long as a page is remembered and not held: whoever has a page has all in front
    /// of it.
    fn forget_oldest(&mut self, count: usize) {
        if count == 0 {
            return;
        }
        let last = |page: usize| self.is_last(page).map(|used| Reverse((used, page)));
        let mut oldest: BinaryHeap<_> = (0..self.pages.len()).filter_map(last).collect();
        for _ in 0..count {
            let Some(Reverse((_, page))) = oldest.pop() else { return };
            let parent = self.pages[page].remembered.as_ref().and_then(|remembered| remembered.parent);
            self.forget(page);
            oldest.extend(parent.and_then(|parent| Some(Reverse((self.is_last(parent)?, parent)))));
        }
    }

    /// When a remembered page was used, if no sequence has it and there is no other behind it.
    fn is_last(&self, page: usize) -> Option<u64> {
        let Page { holders, remembered } = &self.pages[page];
        let remembered = remembered.as_ref().filter(|_| *holders == 0)?;
        self.behind.get(&remembered.number).is_none_or(Vec::is_empty).then_some(remembered.used)
    }

    fn forget(&mut self, page: usize) {
        if let Some(Remembered { number, before, .. }) = self.pages[page].remembered.take() {
            self.behind.remove(&number);
            if let Some(behind) = self.behind.get_mut(&before) {
                behind.retain(|other| *other != page);
            }
        }
    }

    /// Forgets what a page holds, so that the only sequence that has it can write to it. Returns whether it is so: others may
    /// have the page, or there may be one behind it.
    pub(crate) fn own(&mut self, page: usize) -> bool {
        let Page { holders, remembered } = &self.pages[page];
        let behind = remembered.as_ref().and_then(|r| self.behind.get(&r.number));
        let alone = *holders == 1 && behind.is_none_or(Vec::is_empty);
        if alone {
            self.forget(page);
        }
        alone
    }

    /// Takes pages back from a sequence. What is remembered stays until its room is needed.
    pub(crate) fn release(&mut self, pages: &[usize]) {
        for page in pages {
            self.pages[*page].holders -= 1;
            self.idle += usize::from(self.pages[*page].holders == 0);
        }
    }

    /// Remembers that these pages of a sequence hold these tokens. Nothing may be written to them any more. Of a sequence that
    /// goes on (not `ended`), no page is remembered behind one that it does not have: whoever has a page has all in front of it.
    pub(crate) fn learn(&mut self, pages: &[usize], tokens: &[u32], ended: bool) {
        let (mut before, mut parent) = (ROOT, None);
        for (page, tokens) in pages.iter().zip(tokens.chunks(PAGE)) {
            let known = self.behind.get(&before).into_iter().flatten().find_map(|known| {
                let remembered = self.pages[*known].remembered.as_ref()?;
                remembered.tokens.starts_with(tokens).then_some((*known, remembered.number))
            });
            if let Some((known, number)) = known {
                if known != *page && !ended {
                    return;
                }
                (before, parent) = (number, Some(known));
                continue;
            }
            // Pages of one sequence are remembered in order, so that one with other tokens was not remembered before.
            self.clock += 1;
            let number = self.clock;
            let remembered = Remembered { number, before, parent, tokens: tokens.to_vec(), used: number };
            self.pages[*page].remembered = Some(remembered);
            self.behind.entry(before).or_default().push(*page);
            (before, parent) = (number, Some(*page));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tokens of a sequence: `length` of them, those from `differs` on like in no other sequence of another `kind`.
    fn tokens(length: usize, differs: usize, kind: u32) -> Vec<u32> {
        (0..length).map(|at| if at < differs { at as u32 } else { 1000 * kind + at as u32 }).collect()
    }

    /// A sequence that has ended, of which the pages remember all tokens.
    fn ended(pages: &mut Pages, tokens: &[u32]) {
        let found = pages.find(tokens);
        let own = pages.take(tokens.len().div_ceil(PAGE) - found.pages.len()).unwrap();
        found.part.iter().for_each(|(page, _)| pages.release(&[*page]));
        let all = [found.pages, own].concat();
        pages.learn(&all, tokens, true);
        pages.release(&all);
    }

    #[test]
    fn sequences_share_what_begins_alike() {
        let mut pages = Pages::new(20);
        ended(&mut pages, &tokens(3 * PAGE + 5, 99, 1));
        // Two full pages are alike, and 7 tokens of the third.
        let other = tokens(3 * PAGE, 2 * PAGE + 7, 2);
        assert_eq!(pages.find(&other), Found { pages: vec![0, 1], part: Some((2, 7)) });
        pages.release(&[0, 1, 2]);
        // The last page is not full, and the whole of it is alike.
        let longer = tokens(5 * PAGE, 99, 3);
        assert_eq!(pages.find(&longer), Found { pages: vec![0, 1, 2], part: Some((3, 5)) });
        pages.release(&[0, 1, 2, 3]);
        assert_eq!(pages.find(&tokens(50, 0, 4)), Found { pages: vec![], part: None });
        assert_eq!(pages.available(), 20);
    }

    #[test]
    fn a_page_is_remembered_behind_its_own_beginning_only() {
        let mut pages = Pages::new(8);
        let (first, second) = (tokens(2 * PAGE, 0, 1), tokens(2 * PAGE, 0, 2));
        ended(&mut pages, &first);
        // The second page of the first sequence behind the first page of another one.
        let mixed = [&second[..PAGE], &first[PAGE..]].concat();
        assert_eq!(pages.find(&mixed), Found { pages: vec![], part: None });
        ended(&mut pages, &mixed);
        assert_eq!(pages.find(&mixed).pages, [2, 3]);
    }

    #[test]
    fn what_was_used_longest_ago_is_forgotten_last_page_first() {
        let mut pages = Pages::new(6);
        let (a, b) = (tokens(2 * PAGE, 0, 1), tokens(2 * PAGE, 0, 2));
        ended(&mut pages, &a);
        ended(&mut pages, &b);
        let used = pages.find(&a).pages;
        pages.release(&used);
        // Two pages are free. Of the third sequence's four, two are taken from the second one, which was used before the first.
        let own = pages.take(4).unwrap();
        assert_eq!(pages.find(&b), Found { pages: vec![], part: None });
        assert_eq!(pages.find(&a).pages.len(), 2);
        // What sequences have is not forgotten.
        assert_eq!((pages.take(1), pages.available()), (None, 0));
        pages.release(&own);
        assert_eq!(pages.take(4).map(|pages| pages.len()), Some(4));
    }

    /// Two sequences read the same at the same time. One ends, and the other one goes on with pages of its own.
    #[test]
    fn a_sequence_that_goes_on_keeps_what_is_in_front_of_its_pages() {
        let mut pages = Pages::new(4);
        let same = tokens(2 * PAGE, 99, 1);
        let [a, b] = [0, 1].map(|_| pages.take(2).unwrap());
        pages.learn(&a[..1], &same[..PAGE], false);
        pages.learn(&b, &same, false);
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
