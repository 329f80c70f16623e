//! What `doctor` says of one thing that it has looked at.

use crate::wrapping;
use serde::Serialize;

/// One thing that was looked at.
#[derive(Debug, Serialize)]
pub(super) struct Checked {
    name: String,
    pub(super) good: bool,
    found: String,
    /// What to do, if it is not good.
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

impl Checked {
    pub(super) fn good(name: impl Into<String>, found: impl Into<String>) -> Self {
        Self { name: name.into(), good: true, found: found.into(), remedy: None }
    }

    pub(super) fn missing(name: impl Into<String>, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name: name.into(), good: false, found: found.into(), remedy: Some(remedy.into()) }
    }

    /// What was found, and below it the remedy.
    pub(super) fn lines(&self, width: Option<usize>) -> String {
        let mark = if self.good { "ok" } else { "–" };
        let first = wrapping::hanging(&format!("{mark:<3} {:<NAMES$} ", self.name), &self.found, width);
        let indent = " ".repeat(3 + 1 + NAMES + 1);
        let remedy = |remedy: &String| format!("{first}\n{}", wrapping::hanging(&indent, remedy, width));
        self.remedy.as_ref().map_or(first.clone(), remedy)
    }
}

/// The width of the names in front of what was found. `cuda:0 attention over a cache` is the longest.
const NAMES: usize = 29;

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: &str = "only an NVIDIA card needs it; install the CUDA 13 toolkit, or four packages of Python's index, then set \
                        CUDA_PATH and LD_LIBRARY_PATH as doc/guide/first-run.md says";

    #[test]
    fn a_long_remedy_keeps_its_indent() {
        let check = Checked::missing("NVRTC", "the library libnvrtc is not found", LONG);
        let file = check.lines(None);
        assert_eq!(file.lines().count(), 2, "{file}");
        for width in [80, 120] {
            let text = check.lines(Some(width));
            assert!(text.lines().count() > 2 && text.lines().all(|line| line.chars().count() <= width), "{text}");
            assert!(text.lines().skip(1).all(|line| line.starts_with(&" ".repeat(34))), "{text}");
            assert_eq!(text.split_whitespace().collect::<Vec<_>>(), file.split_whitespace().collect::<Vec<_>>());
        }
        let good = Checked::good("cuda:0 attention over a cache", "agrees").lines(Some(80));
        assert_eq!(good.find("agrees"), Some(34), "{good}");
    }
}
