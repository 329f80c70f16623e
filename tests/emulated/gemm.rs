//! `gemm` in every tile width, for one product and for several of one launch, against f64.

use super::gpu::{BF16, Data, Exact, ExactProduct, F16, F32, Gpu, matrix};
use crate::support::Random;
use cubecl::{client::ComputeClient, ir::StorageType};
use kernels_cubecl::{
    KernelError,
    any_cuda::AnyCudaRuntime,
    gemm::{self, Gemm, GemmShape},
    operands::Product::{self, Nn, Nt, Tn},
};
use std::ops::Range;

/// Everything about a launch that its text depends on.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub(super) product: Product,
    pub(super) shapes: Vec<GemmShape>,
    pub(super) cols: usize,
    /// Tensor scales of a product: none for dense operands, one for each packed one.
    pub(super) scales: usize,
    pub(super) types: (StorageType, StorageType),
    pub(super) form: Form,
    /// Whether the kernel sums the squares of its results, as for gradients of weights.
    pub(super) measured: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Form {
    One,
    Accumulate,
    SharedLeft,
    SharedRight,
    Summed,
}

/// How a kernel divides a result among its sums of squares.
pub(super) struct Squares {
    /// The number of sums, from the shape of a product and the columns of its tiles.
    pub(super) count: fn(&GemmShape, usize) -> usize,
    /// The part of the result that a sum covers, from these two and the number of the sum.
    pub(super) part: fn(&GemmShape, usize, usize) -> Part,
}

/// Rows and columns of a result. They may lie outside the result.
pub(super) type Part = (Range<usize>, Vec<usize>);

/// The forms that the backend launches, in tiles of `cols` columns, for bf16 values or for every type.
pub(super) fn cases(cols: usize, every_type: bool) -> Vec<Case> {
    let mut all = Vec::new();
    for (product, most) in [(Nt, 2), (Nn, 2), (Tn, 1)] {
        for scales in 0..=most {
            let types = if every_type { &[(BF16, BF16), (BF16, F32), (F16, F16)][..] } else { &[(BF16, BF16)] };
            all.extend(types.iter().map(|types| one(product, cols, scales, *types, Form::One)));
        }
    }
    let values = if every_type { &[BF16, F16][..] } else { &[BF16] };
    // The first chunk of the head's gradient: nobody asks for its squares.
    all.extend(every_type.then(|| Case { measured: false, ..one(Tn, cols, 1, (BF16, F32), Form::One) }));
    // The head's gradient is the sum of several chunks. The last one multiplies it by the factor of the loss, the others by 1.
    all.extend(values.iter().map(|ty| one(Tn, cols, 1, (*ty, F32), Form::Accumulate)));
    for (product, scales, form, parts) in [
        (Nt, 0, Form::SharedLeft, 2),
        (Nt, 1, Form::SharedLeft, 3),
        (Nt, 2, Form::SharedLeft, 2),
        (Tn, 0, Form::SharedRight, 3),
        (Tn, 1, Form::SharedRight, 2),
        // The wgrad of recipe nvfp4: codes of transposes, so that both operands lie along the sum.
        (Nt, 2, Form::SharedRight, 3),
        (Nn, 0, Form::Summed, 3),
        (Nn, 1, Form::Summed, 2),
        (Nn, 2, Form::Summed, 3),
    ] {
        all.extend(values.iter().map(|ty| joint(product, cols, scales, *ty, form, parts)));
    }
    all
}

/// One product with ragged tiles, and more steps than the ring has stages twice over.
pub(super) fn one(product: Product, cols: usize, scales: usize, types: (StorageType, StorageType), form: Form) -> Case {
    let (i, j, r) = if product == Tn { (136, cols + 8, 407) } else { (131, cols + 8, 408) };
    let measured = product == Tn && form == Form::One && types.1 == F32;
    Case { product, shapes: vec![GemmShape { i, j, r }], cols, scales, types, form, measured }
}

/// Several products of values of type `ty` in one launch, each with a length of its own.
pub(super) fn joint(product: Product, cols: usize, scales: usize, ty: StorageType, form: Form, parts: usize) -> Case {
    let shape = |n: &usize| match form {
        Form::SharedLeft => GemmShape { i: 131, j: *n, r: 88 },
        Form::Summed => GemmShape { i: 131, j: 136, r: *n },
        _ => GemmShape { i: *n, j: 136, r: if product == Nt { 80 } else { 75 } },
    };
    let shapes = [cols + 8, 40, 72][..parts].iter().map(shape).collect();
    let types = (ty, if form == Form::SharedRight { F32 } else { ty });
    Case { product, shapes, cols, scales, types, form, measured: form == Form::SharedRight }
}

/// Launches the case on `mma.sync`, and compares its results.
pub(super) fn run(gpu: &Gpu, case: &Case) -> Result<(), String> {
    let squares = Squares { count: gemm::mma_squares, part: part_of_a_plane };
    launch_and_compare(gpu, case, squares, |client, products| gemm::gemm_in(client, products, case.cols))
}

/// A tile of 128 rows has four sums. Each covers 64 rows, and half of the first 128 columns and half of the others.
fn part_of_a_plane(shape: &GemmShape, cols: usize, at: usize) -> Part {
    let (tile, plane) = (at / 4, at % 4);
    let (row, col) = (tile / shape.j.div_ceil(cols) * 128 + plane / 2 * 64, tile % shape.j.div_ceil(cols) * cols);
    let halves = [(0, cols.min(128)), (cols.min(128), cols)];
    let half = |(from, to): (usize, usize)| {
        let half = (to - from) / 2;
        col + from + plane % 2 * half..col + from + (plane % 2 + 1) * half
    };
    (row..row + 64, halves.into_iter().flat_map(half).collect())
}

/// Launches the case by `launch`, and compares its results.
pub(super) fn launch_and_compare(
    gpu: &Gpu,
    case: &Case,
    division: Squares,
    launch: impl Fn(&ComputeClient<AnyCudaRuntime>, Gemm<AnyCudaRuntime>) -> Result<(), KernelError>,
) -> Result<(), String> {
    let mut random = Random::new(5);
    let Case { product, shapes, cols, scales, types, form, measured } = case.clone();
    let parts = shapes.len();
    let count = |shared: bool| if shared { 1 } else { parts };
    let operand = |n: usize, len: &dyn Fn(&GemmShape) -> usize, random: &mut Random| -> Vec<Data> {
        shapes[..n].iter().map(|s| gpu.normal(random, len(s), types.0)).collect()
    };
    let a = operand(count(form == Form::SharedLeft), &|s| s.i * s.r, &mut random);
    let b = operand(count(form == Form::SharedRight), &|s| s.j * s.r, &mut random);
    // The second of three summed products has a tensor of zeros: its scale is zero.
    let zero = |n: usize| form == Form::Summed && parts == 3 && n / scales == 1;
    let scale = |n: usize, random: &mut Random| if zero(n) { 0.0 } else { f64::from(random.uniform()) + 0.5 };
    let factors: Vec<Data> = (0..parts * scales).map(|n| gpu.put(&[scale(n, &mut random)], F32)).collect();
    let results = count(form == Form::Summed);
    let out: Vec<Data> = shapes[..results]
        .iter()
        .map(|s| match form {
            Form::Accumulate => gpu.normal(&mut random, s.i * s.j, types.1),
            _ => gpu.room(s.i * s.j, types.1),
        })
        .collect();
    let places = |shape: &GemmShape| gpu.room((division.count)(shape, cols), F32);
    let squares: Vec<Data> = shapes[..if measured { results } else { 0 }].iter().map(places).collect();
    let args = |list: &[Data]| list.iter().map(Data::arg).collect();
    let products = Gemm {
        a: args(&a),
        b: args(&b),
        scales: args(&factors),
        out: args(&out),
        types,
        shapes: shapes.clone(),
        product,
        accumulate: form == Form::Accumulate,
        squares: args(&squares),
    };
    launch(&gpu.client, products).map_err(|e| e.to_string())?;
    // The parts, with their tensor scales.
    let exact = (0..parts).map(|p| {
        let (s, a, b) = (shapes[p], &a[p.min(a.len() - 1)].values, &b[p.min(b.len() - 1)].values);
        let left = if product == Tn { matrix(a, s.r, s.i).reversed_axes() } else { matrix(a, s.i, s.r) };
        let right = if product == Nt { matrix(b, s.j, s.r).reversed_axes() } else { matrix(b, s.r, s.j) };
        ExactProduct::new(left, right, factors[p * scales..][..scales].iter().map(|f| f.values[0]).product())
    });
    let exact: Vec<ExactProduct> = exact.collect();
    let part = |p: usize, i: usize, j: usize| exact[p].at(i, j);
    for (p, y) in out.iter().enumerate() {
        gpu.compare(&format!("result {p}"), y, |at| {
            let (i, j) = (at / shapes[p].j, at % shapes[p].j);
            match form {
                Form::Summed => (1..parts).map(|p| part(p, i, j)).fold(part(0, i, j), |sum, next| Exact {
                    value: sum.value + next.value,
                    allowed: sum.allowed + next.allowed,
                }),
                Form::Accumulate => {
                    let factor: f64 = factors.iter().map(|f| f.values[0]).product();
                    Exact { value: y.values[at] * factor + part(p, i, j).value, ..part(p, i, j) }
                }
                _ => part(p, i, j),
            }
        })?;
    }
    for (p, sums) in squares.iter().enumerate() {
        let (stored, shape) = (gpu.read(&out[p])?, shapes[p]);
        gpu.compare(&format!("sum of squares of result {p}"), sums, |at| {
            let (rows, columns) = (division.part)(&shape, cols, at);
            let row = |i: usize| columns.iter().filter(|j| **j < shape.j).map(move |j| i * shape.j + j);
            let places = rows.filter(|i| *i < shape.i).flat_map(row);
            Exact::sum(places.map(|at| stored[at] * stored[at]), 1.0)
        })?;
    }
    Ok(())
}

/// `count` cases of random shapes: each storage order in each width, and every third of all forms. With three widths, that is each
/// form in one of them. A card takes seconds to compile a form.
pub(super) fn random(forms: &[Case], count: usize) -> Vec<Case> {
    let mut random = Random::new(29);
    let dense = |case: &Case| case.shapes.len() == 1 && case.scales == 0 && case.types == (BF16, F32);
    let taken: Vec<&Case> =
        forms.iter().enumerate().filter(|(n, case)| n % 3 == 0 || dense(case)).map(|(_, case)| case).collect();
    taken.iter().cycle().take(count).map(|case| case.ragged(&mut random)).collect()
}

impl Case {
    /// The same form with random shapes. A copy takes eight values, so that stored rows are whole copies.
    fn ragged(&self, random: &mut Random) -> Self {
        let across = self.product == Tn;
        let mut length = |whole: bool| if whole { 8 * (1 + random.below(40)) } else { 1 + random.below(320) };
        let mut next = || GemmShape { i: length(across), j: length(true), r: length(!across) };
        let first = next();
        let shape = |_: &GemmShape| {
            let GemmShape { i, j, r } = next();
            match self.form {
                Form::SharedLeft => GemmShape { j, ..first },
                Form::SharedRight => GemmShape { i, ..first },
                Form::Summed => GemmShape { r, ..first },
                Form::One | Form::Accumulate => first,
            }
        };
        Self { shapes: self.shapes.iter().map(shape).collect(), ..self.clone() }
    }
}

/// Every case in every type and tile width that the device has.
pub(super) fn forms(gpu: &Gpu) -> Vec<Case> {
    gemm::tile_columns(&gpu.client).into_iter().flat_map(|cols| cases(cols, true)).collect()
}

/// Launches the case, and compares its results, which must be right.
pub(super) fn expect(gpu: &Gpu, case: &Case) {
    run(gpu, case).unwrap_or_else(|e| panic!("sm_{} {case:?}: {e}", gpu.arch));
}

/// Every case of one tile width, where the device has it. Types change how values are converted, and nothing else: f16 and other
/// types of the output are tried in tiles of 128 columns only.
pub(super) fn every(gpu: &Gpu, cols: usize) {
    if !gemm::tile_columns(&gpu.client).contains(&cols) {
        return;
    }
    cases(cols, cols == 128).iter().for_each(|case| expect(gpu, case));
    if cols == 128 {
        // More rows of tiles than are walked together.
        let shapes = vec![GemmShape { i: 1030, j: 136, r: 24 }];
        expect(
            gpu,
            &Case { product: Nt, shapes, cols, scales: 0, types: (BF16, BF16), form: Form::One, measured: false },
        );
    }
}
