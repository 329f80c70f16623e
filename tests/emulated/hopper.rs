//! `gemm` on Hopper's own instructions, against f64: every joint form that the backend launches and every storage order in each
//! width of tiles, and the other single forms, and joint forms for f16, in one.

use super::{
    gemm::{Case, Form, Part, Squares, cases, launch_and_compare, one},
    gpu::{BF16, F16, F32, Gpu},
};
use kernels_cubecl::{
    cuda_text::hopper,
    gemm::GemmShape,
    operands::Product::{Nn, Nt, Tn},
};

/// Every storage order, and every joint form, in every width for bf16. The other single forms, and the joint forms for f16, in one
/// width.
pub(super) fn every(gpu: &Gpu) {
    for product in [Nt, Nn, Tn] {
        for cols in hopper::hopper_columns(product) {
            let types = if product == Tn { (BF16, F32) } else { (BF16, BF16) };
            expect(gpu, &one(product, *cols, 1, types, Form::One));
        }
    }
    for types in [(BF16, F32), (F16, F16)] {
        expect(gpu, &one(Nt, 160, 2, types, Form::One));
    }
    for form in [Form::Accumulate, Form::One] {
        expect(gpu, &Case { measured: false, ..one(Tn, 128, 1, (BF16, F32), form) });
    }
    for case in forms().into_iter().filter(|case| case.shapes.len() > 1) {
        match (case.cols, case.types.0) {
            (128, BF16) => expect(gpu, &case),
            (128, _) | (_, BF16) => expect(gpu, &small(case)),
            _ => {}
        }
    }
    // More tiles than multiprocessors, and more rows of tiles than are walked together.
    let shapes = vec![GemmShape { i: 1030, j: 1544, r: 24 }];
    expect(
        gpu,
        &Case { product: Nt, shapes, cols: 128, scales: 0, types: (BF16, BF16), form: Form::One, measured: false },
    );
}

/// Every form in every width and type. Gradients of weights are measured.
pub(super) fn forms() -> Vec<Case> {
    let fits = |case: &Case| hopper::hopper_columns(case.product).contains(&case.cols);
    let measured = |case: Case| Case { measured: case.types.1 == F32 && case.form != Form::Accumulate, ..case };
    // No product has a width that Nt has not.
    hopper::hopper_columns(Nt).iter().flat_map(|cols| cases(*cols, true)).filter(fits).map(measured).collect()
}

/// A joint form with products that are as small as they can be: their tiles have rows for both warpgroups that multiply, a whole
/// tile of columns lies beside a ragged one, and a whole step of summed values before a ragged one.
fn small(case: Case) -> Case {
    let (j, r) = (case.cols + 8, if case.product == Tn { 75 } else { 72 });
    let shape = |n: &usize| match case.form {
        Form::SharedLeft => GemmShape { i: 72, j: if *n == 72 { j } else { *n }, r },
        Form::Summed => GemmShape { i: 72, j, r: *n },
        _ => GemmShape { i: *n, j, r },
    };
    let shapes = [72, 40, 88][..case.shapes.len()].iter().map(shape).collect();
    Case { shapes, ..case }
}

/// Launches the case, and compares its results, which must be right.
pub(super) fn expect(gpu: &Gpu, case: &Case) {
    run(gpu, case).unwrap_or_else(|e| panic!("{case:?}: {e}"));
}

/// Launches the case, and compares its results.
pub(super) fn run(gpu: &Gpu, case: &Case) -> Result<(), String> {
    let squares = Squares { count: hopper::hopper_squares, part: part_of_a_warpgroup };
    launch_and_compare(gpu, case, squares, |client, products| hopper::hopper_gemm_in(client, products, case.cols))
}

/// A tile of 128 rows has two sums. Each covers 64 rows.
fn part_of_a_warpgroup(shape: &GemmShape, cols: usize, at: usize) -> Part {
    let wide = shape.j.div_ceil(cols);
    let (row, col) = (at / 2 / wide * 128 + at % 2 * 64, at / 2 % wide * cols);
    (row..row + 64, (col..col + cols).collect())
}
