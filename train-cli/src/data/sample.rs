//! A token sequence with a mask of the tokens that are supervised.

use backend_nvfp4::{Stream, reference};
use serde::{Deserialize, Serialize};
use std::{ops::Range, path::Path};

/// A token sequence with its mask.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Token ids.
    pub ids: Vec<u32>,
    /// For each token, whether the loss counts its prediction.
    pub supervised: Vec<bool>,
    /// The first user message, for sample answers. Empty for plain text.
    pub prompt: String,
    /// Where each document begins. A packed row has several; the first begins at 0.
    pub documents: Vec<usize>,
    /// Where each document came from.
    pub origins: Vec<Origin>,
    /// How often an epoch uses it.
    pub weight: f64,
}

/// Where a document came from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// Index of the file.
    pub file: u32,
    /// The line, counted from 1; 0 if the file is one text.
    pub line: u32,
    /// The number of the row in its file, counted from 1, if it is not the first thing in its line; otherwise 0.
    pub row: u32,
}

impl Origin {
    /// A line of a file.
    pub(super) fn of_line(line: usize) -> Self {
        Self { line: line as u32, ..Self::default() }
    }

    /// The place in this file: `rows.jsonl:7`, or `rows.json:1, row 3`.
    pub fn in_file(&self, file: &Path) -> String {
        match (file.display(), self.line, self.row) {
            (file, 0, _) => file.to_string(),
            (file, line, 0) => format!("{file}:{line}"),
            (file, line, row) => format!("{file}:{line}, row {row}"),
        }
    }
}

impl Sample {
    /// A sample of one document.
    pub(crate) fn new(mut ids: Vec<u32>, mut supervised: Vec<bool>, prompt: String) -> Self {
        // A run keeps all its samples.
        ids.shrink_to_fit();
        supervised.shrink_to_fit();
        Self { ids, supervised, prompt, documents: vec![0], origins: vec![Origin::default()], weight: 1.0 }
    }

    /// The tokens of a range as a sample of one document.
    pub(crate) fn piece(&self, range: Range<usize>) -> Self {
        let piece = Self::new(self.ids[range.clone()].to_vec(), self.supervised[range].to_vec(), self.prompt.clone());
        Self { origins: self.origins.clone(), ..piece }
    }

    /// The sample in pieces of at most so many tokens.
    pub(crate) fn pieces(&self, most: usize) -> impl Iterator<Item = Self> {
        let len = self.ids.len();
        (0..len).step_by(most).map(move |at| self.piece(at..(at + most).min(len)))
    }

    /// Tokens of each document.
    fn document_lengths(&self) -> impl Iterator<Item = usize> {
        let ends = self.documents.iter().copied().skip(1).chain([self.ids.len()]);
        self.documents.iter().zip(ends).map(|(start, end)| end - start)
    }

    /// Tokens whose prediction the loss counts. The first token is never predicted.
    pub fn supervised_tokens(&self) -> usize {
        self.supervised.iter().skip(1).filter(|s| **s).count()
    }
}

/// The number of tokens of the document that a token lies in, on average over all tokens.
pub fn document_of_a_token(samples: &[Sample]) -> f64 {
    let lengths = samples.iter().flat_map(Sample::document_lengths).map(|length| length as f64);
    let (squares, tokens) = lengths.fold((0.0, 0.0), |(squares, tokens), n| (squares + n * n, tokens + n));
    squares / f64::max(tokens, 1.0)
}

/// Most random rows. Longer runs repeat them.
const RANDOM_ROWS: usize = 1024;

/// Samples of random tokens, all supervised, for measurements of speed and memory. There are at most 1,024.
pub fn synthetic(rows: usize, len: usize, vocab: usize, seed: u64) -> Vec<Sample> {
    let draw = |row: usize, i: usize| {
        let stream = Stream { seed, step: row as u32, stream: 0xDA7A };
        reference::philox(i as u32, stream)[0] % vocab as u32
    };
    (0..rows.min(RANDOM_ROWS))
        .map(|row| Sample::new((0..len).map(|i| draw(row, i)).collect(), vec![true; len], String::new()))
        .collect()
}
