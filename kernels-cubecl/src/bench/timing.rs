//! Timing one kernel, and the data that it reads.
//!
//! A launch costs some ten microseconds of host time, more than a short kernel runs. So one unit that counts keeps the
//! device busy while launches are queued behind it, and the launches' time is what they add to its time. (Behind a long
//! product, which heats the device, short kernels would read 5 to 10 % slower.) A figure is the median of seven
//! measurements.

use crate::{KernelError, device, operands::PackedArgs};
use cubecl::{prelude::*, server::Handle};
use std::{cell::OnceCell, time::Instant};

/// One measurement.
#[derive(Debug, Clone)]
pub struct Row {
    /// Kernel and variant.
    pub name: String,
    /// The sizes that the kernel was timed at.
    pub shape: String,
    /// Seconds of a call, the median.
    pub seconds: f64,
    /// Bytes that the kernel must move, if memory bounds it.
    pub bytes: Option<f64>,
    /// Operations of the kernel, if arithmetic bounds it.
    pub operations: Option<f64>,
}

/// Launches in one measurement of a long kernel.
const LAUNCHES: usize = 24;
/// Launches in one measurement of a short kernel.
const SHORT_LAUNCHES: usize = 192;
/// Measurements, of which the median counts.
const SAMPLES: usize = 7;
/// A kernel that takes fewer seconds is short.
const SHORT: f64 = 100e-6;
/// Dependent products and sums that keep one unit busy for some four milliseconds.
const COUNT: u32 = 1_600_000;

/// Bytes that are made when a row first asks for them: a filter leaves out most rows, and with them gigabytes.
pub(super) struct Data<'a> {
    handle: OnceCell<Handle>,
    make: Box<dyn Fn() -> Handle + 'a>,
}

impl<'a> Data<'a> {
    fn new<R: Runtime>(client: &'a ComputeClient<R>, bytes: impl Fn() -> Vec<u8> + 'a) -> Self {
        Self { handle: OnceCell::new(), make: Box::new(move || upload(client, &bytes())) }
    }
}

/// CubeCL counts uploaded bytes in 32 bits until a kernel is launched, so this launches one.
fn upload<R: Runtime>(client: &ComputeClient<R>, bytes: &[u8]) -> Handle {
    let handle = client.create_from_slice(bytes);
    // SAFETY: both buffers hold four words.
    let four = || unsafe { ArrayArg::from_raw_parts(client.empty(16), 4) };
    copy(client, four(), four());
    handle
}

/// The device, and the names that are asked for.
pub(super) struct Bench<'a, R: Runtime> {
    pub(super) client: &'a ComputeClient<R>,
    pub(super) filter: &'a str,
    /// The result of the kernel that keeps the device busy while launches are queued.
    counted: Data<'a>,
}

impl<'a, R: Runtime> Bench<'a, R> {
    pub(super) fn new(client: &'a ComputeClient<R>, filter: &'a str) -> Self {
        Self { client, filter, counted: Data::new(client, || vec![0; 4]) }
    }

    /// A packed matrix in buffers of codes, scales and a tensor scale.
    pub(super) fn packed(&self, [codes, scales, one]: [&Data<'a>; 3], rows: usize, cols: usize) -> PackedArgs<R> {
        let n = rows * cols;
        let (codes, scales, global) = (self.arg(codes, n / 8), self.arg(scales, n / 16), self.arg(one, 1));
        PackedArgs { codes, scales, global, rows, cols }
    }

    /// bf16 values in [-1, 1).
    pub(super) fn values(&self, len: usize) -> Data<'a> {
        Data::new(self.client, move || filled(uniform(), len * 2))
    }

    /// Random bytes below 0x7F: valid codes and valid scales.
    pub(super) fn bytes(&self, len: usize, seed: u32) -> Data<'a> {
        Data::new(self.client, move || filled(codes(seed), len))
    }

    /// The given words.
    pub(super) fn words(&self, words: Vec<u32>) -> Data<'a> {
        Data::new(self.client, move || words.iter().flat_map(|word| word.to_le_bytes()).collect())
    }

    pub(super) fn arg(&self, data: &Data<'a>, len: usize) -> ArrayArg<R> {
        let handle = data.handle.get_or_init(|| (data.make)()).clone();
        // SAFETY: every length given here is the one its data is made with.
        unsafe { ArrayArg::from_raw_parts(handle, len) }
    }

    fn sync(&self) -> Result<(), KernelError> {
        let done = cubecl::future::block_on(self.client.sync());
        done.map_err(|e| KernelError::Device { reason: format!("{e:?}") })
    }

    fn busy(&self) {
        let (count, dim) = (CubeCount::Static(1, 1, 1), CubeDim::new_1d(1));
        // SAFETY: the buffer holds the one value that is written.
        unsafe { count_kernel::launch_unchecked(self.client, count, dim, self.arg(&self.counted, 1), COUNT) };
    }

    /// Seconds of a call. The number of the launch is handed to `call`.
    fn time(&self, mut call: impl FnMut(usize) -> Result<(), KernelError>) -> Result<f64, KernelError> {
        // Everything is made and compiled before the first measurement.
        self.busy();
        (0..LAUNCHES).try_for_each(&mut call)?;
        let mut median = |calls: usize| -> Result<f64, KernelError> {
            let mut all = Vec::new();
            for _ in 0..SAMPLES {
                self.sync()?;
                let start = Instant::now();
                self.busy();
                (0..calls).try_for_each(&mut call)?;
                self.sync()?;
                all.push(start.elapsed().as_secs_f64());
            }
            all.sort_by(f64::total_cmp);
            Ok(all[SAMPLES / 2])
        };
        let mut each = |launches: usize| Ok((median(launches)? - median(0)?) / launches as f64);
        match each(LAUNCHES)? {
            seconds if seconds < SHORT => each(SHORT_LAUNCHES),
            seconds => Ok(seconds),
        }
    }

    /// Times a row and shows it, if the filter includes its name. `work` is its bytes and its operations.
    pub(super) fn row(
        &self,
        show: &mut dyn FnMut(Row),
        name: &str,
        shape: String,
        work: (Option<f64>, Option<f64>),
        call: impl FnMut(usize) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        if name.contains(self.filter) { self.measured(show, name, shape, work, call) } else { Ok(()) }
    }

    fn measured(
        &self,
        show: &mut dyn FnMut(Row),
        name: &str,
        shape: String,
        (bytes, operations): (Option<f64>, Option<f64>),
        call: impl FnMut(usize) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        let seconds = self.time(call)?;
        show(Row { name: name.to_owned(), shape, seconds, bytes, operations });
        Ok(())
    }

    pub(super) fn copy(&self, show: &mut dyn FnMut(Row)) -> Result<(), KernelError> {
        let len = 1usize << 29;
        let (from, to) = (self.bytes(len, 1), self.bytes(len, 2));
        self.measured(show, "copy", "512 MiB".into(), (Some(2.0 * len as f64), None), |_| {
            copy(self.client, self.arg(&from, len / 4), self.arg(&to, len / 4));
            Ok(())
        })
    }
}

/// bf16 values in [-1, 1).
fn uniform() -> Vec<u8> {
    let mut state = 0x9E37_79B9u32;
    let value = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let value = (state >> 8) as f32 / 8_388_608.0 - 1.0;
        ((value.to_bits() >> 16) as u16).to_le_bytes()
    };
    (0..1 << 20).flat_map(value).collect()
}

/// Bytes below 0x7F.
fn codes(seed: u32) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let byte = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8 % 0x7F
    };
    (0..1 << 20).map(byte).collect()
}

/// A pattern, repeated to `len` bytes.
fn filled(pattern: Vec<u8>, len: usize) -> Vec<u8> {
    let mut bytes = pattern.repeat(len.div_ceil(pattern.len()));
    bytes.truncate(len);
    bytes
}

fn copy<R: Runtime>(client: &ComputeClient<R>, from: ArrayArg<R>, to: ArrayArg<R>) {
    let (count, dim) = device::flat_launch((from.size() / 4).div_ceil(4));
    // SAFETY: both buffers are equally long; units past the end stop.
    unsafe { copy_kernel::launch_unchecked(client, count, dim, from, to) };
}

/// Keeps one unit busy.
#[cube(launch_unchecked)]
fn count_kernel(out: &mut Array<f32>, times: u32) {
    let mut x = out[0];
    for _ in 0..times {
        x = x * 0.999f32 + 1.0f32;
    }
    out[0] = x;
}

/// A unit copies four vectors of 16 bytes, all loaded before the first is stored.
#[cube(launch_unchecked)]
fn copy_kernel(from: &Array<Vector<u32, Const<4>>>, to: &mut Array<Vector<u32, Const<4>>>) {
    let first = ((CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X) * 1024u32 + UNIT_POS) as usize;
    let mut values = Array::<Vector<u32, Const<4>>>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        values[i] = from[min(first + comptime!(i * 256), from.len() - 1usize)];
    }
    #[unroll]
    for i in 0..4usize {
        if first + comptime!(i * 256) < to.len() {
            to[first + comptime!(i * 256)] = values[i];
        }
    }
}
