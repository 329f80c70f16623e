//! The line at the bottom of a terminal that shows how far long work has come: a bar, numbers, and the time that is left. Where
//! standard error is no terminal there is no such line, and plain lines alone tell what happens.

use backend_nvfp4::{GivenScale, PACKED_BYTES, Packed};
use indicatif::{ProgressBar, ProgressStyle};
use model_qwen3::{
    ModelError,
    tensors::{Put, Stored, Tensors},
};
use std::{
    io::{IsTerminal, Write},
    ops::Range,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// The line that is shown, if one is. A terminal has one bottom.
static SHOWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

fn shown() -> MutexGuard<'static, Option<ProgressBar>> {
    SHOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Prints something above the line.
pub fn above(print: impl FnOnce()) {
    // The lock is not kept: what prints may end the line.
    let bar = shown().clone();
    match bar {
        Some(bar) => bar.suspend(print),
        None => print(),
    }
}

/// Says at the end of the line what is being done.
pub fn doing(what: &str) {
    if let Some(bar) = &*shown() {
        bar.set_message(what.to_owned());
    }
}

/// A line that is shown until this is dropped.
#[derive(Debug)]
pub struct Line(Option<ProgressBar>);

impl Line {
    /// Shows how many of `total` steps are made.
    pub fn steps(done: usize, total: usize) -> Self {
        let bar = Self::begin("{spinner} {bar:24} {pos}/{len} steps · {percent} % · {msg}", total as u64);
        bar.set(done);
        bar
    }

    /// Shows how many of `total` bytes are read or written.
    fn bytes(what: &str, total: u64) -> Self {
        let bar = Self::begin("{spinner} {bar:24} {msg} · {bytes} of {total_bytes} · {bytes_per_sec}", total);
        doing(what);
        bar
    }

    /// Shows that something is being done which has no measure.
    pub fn of(what: &str) -> Self {
        let bar = Self::begin("{spinner} {msg} · {elapsed}", 0);
        doing(what);
        bar
    }

    fn begin(style: &str, total: u64) -> Self {
        let mut shown = shown();
        // What is part of longer work is not shown by itself.
        if shown.is_some() || !std::io::stderr().is_terminal() {
            return Self(None);
        }
        let style = ProgressStyle::with_template(style).expect("the templates above are right");
        let bar = ProgressBar::new(total).with_style(style.progress_chars("━╸ "));
        // So that a terminal also shows life while a step takes long.
        bar.enable_steady_tick(Duration::from_millis(200));
        *shown = Some(bar.clone());
        Self(Some(bar))
    }

    /// Shows that `done` is done.
    pub fn set(&self, done: usize) {
        self.0.iter().for_each(|bar| bar.set_position(done as u64));
    }

    /// Shows that `more` is done besides.
    fn add(&self, more: usize) {
        self.0.iter().for_each(|bar| bar.inc(more as u64));
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
            *shown() = None;
        }
    }
}

/// A file whose writing is shown.
pub struct Writing<'a> {
    out: &'a mut dyn Write,
    line: Line,
}

impl<'a> Writing<'a> {
    /// Shows how much of `total` bytes is written to `out`, and what for.
    pub fn of(out: &'a mut dyn Write, total: u64, what: &str) -> Self {
        Self { out, line: Line::bytes(what, total) }
    }
}

impl Write for Writing<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.line.add(written);
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}

/// The bytes of all tensors.
pub fn size(tensors: &dyn Tensors) -> u64 {
    let bytes =
        |name: String| tensors.stored(&name).map_or(0, |stored| bytes(&stored, stored.shape().iter().product()));
    tensors.names().into_iter().map(bytes).sum::<usize>() as u64
}

/// Tensors whose reading is shown.
pub struct Reading<'a> {
    tensors: &'a dyn Tensors,
    line: Line,
}

impl<'a> Reading<'a> {
    /// Shows how much of `tensors` is read, and what for.
    pub fn of(tensors: &'a dyn Tensors, what: &str) -> Self {
        Self { tensors, line: Line::bytes(what, size(tensors)) }
    }

    fn read(&self, name: &str, rows: Range<usize>) {
        if let Some(stored) = self.tensors.stored(name) {
            let shape = stored.shape();
            let width = if shape.len() > 1 { shape[1..].iter().product() } else { shape[0] };
            self.line.add(bytes(&stored, rows.len() * width));
        }
    }
}

/// The bytes of so many values of a tensor.
fn bytes(stored: &Stored, values: usize) -> usize {
    match stored {
        Stored::Dense { float, .. } => values * float.size(),
        Stored::Packed { .. } => (values as f64 * PACKED_BYTES) as usize,
    }
}

impl Tensors for Reading<'_> {
    fn path(&self) -> &Path {
        self.tensors.path()
    }

    fn names(&self) -> Vec<String> {
        self.tensors.names()
    }

    fn stored(&self, name: &str) -> Option<Stored> {
        self.tensors.stored(name)
    }

    fn trains_quantized(&self, name: &str) -> bool {
        self.tensors.trains_quantized(name)
    }

    fn keeps_codes(&self, name: &str) -> bool {
        self.tensors.keeps_codes(name)
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        self.read(name, rows.clone());
        self.tensors.read_rows(name, rows)
    }

    fn put_rows(&self, name: &str, rows: Range<usize>, put: Put) -> Result<(), ModelError> {
        self.read(name, rows.clone());
        self.tensors.put_rows(name, rows, put)
    }

    fn gives_input_scale(&self, name: &str) -> bool {
        self.tensors.gives_input_scale(name)
    }

    fn input_scale(&self, name: &str) -> Result<Option<GivenScale>, ModelError> {
        self.tensors.input_scale(name)
    }

    fn read_packed(&self, name: &str) -> Result<Packed, ModelError> {
        let packed = self.tensors.read_packed(name)?;
        self.line.add(packed.codes.len() * 4 + packed.scales.len());
        Ok(packed)
    }

    fn read_packed_rows(&self, name: &str, rows: Range<usize>) -> Result<Packed, ModelError> {
        self.read(name, rows.clone());
        self.tensors.read_packed_rows(name, rows)
    }

    fn reciprocal_scale(&self, name: &str, packed: &Packed) -> Result<f32, ModelError> {
        self.tensors.reciprocal_scale(name, packed)
    }

    fn read_dense(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let values = self.tensors.read_dense(name)?;
        self.tensors.stored(name).iter().for_each(|stored| self.line.add(bytes(stored, values.len())));
        Ok(values)
    }
}
