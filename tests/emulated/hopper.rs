//! `gemm` on Hopper's own instructions: every form that the backend launches, in each width of tiles, against f64.

use super::{
    gemm::{Case, Form, cases, joint, launch_and_compare, one},
    gpu::{BF16, F16, F32, Gpu},
};
use kernels_cubecl::{
    gemm::GemmShape,
    hopper,
    matmul::Product::{Nn, Nt, Tn},
};

/// Every storage order in every width; every form in one width.
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
    expect(gpu, &one(Tn, 128, 0, (BF16, F32), Form::Accumulate));
    for (product, scales, form, parts) in [
        (Nt, 1, Form::SharedLeft, 3),
        (Tn, 0, Form::SharedRight, 2),
        (Nt, 2, Form::SharedRight, 3),
        (Nn, 0, Form::Summed, 2),
        (Nn, 2, Form::Summed, 3),
    ] {
        expect(gpu, &joint(product, 128, scales, form, parts));
    }
    // More tiles than multiprocessors, and more rows of tiles than are walked together.
    let shapes = vec![GemmShape { i: 1030, j: 1544, r: 24 }];
    expect(gpu, &Case { product: Nt, shapes, cols: 128, scales: 0, types: (BF16, BF16), form: Form::One });
}

/// Every form in every type and width.
pub(super) fn all(gpu: &Gpu) {
    for cols in [256, 192, 160, 128] {
        let fits = |case: &Case| hopper::hopper_columns(case.product).contains(&cols);
        cases(cols, true).into_iter().filter(fits).for_each(|case| expect(gpu, &case));
    }
}

fn expect(gpu: &Gpu, case: &Case) {
    run(gpu, case).unwrap_or_else(|e| panic!("{case:?}: {e}"));
}

/// Launches the case, and compares its results.
pub(super) fn run(gpu: &Gpu, case: &Case) -> Result<(), String> {
    launch_and_compare(gpu, case, |client, products| hopper::hopper_gemm_in(client, products, case.cols))
}
