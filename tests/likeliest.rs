//! The largest logits that a device finds are those of a sort on the host: over one part of a row and several, with equal
//! logits, infinities and NaN.

use crate::support::{Cube, Random, on_gpu};
use backend_nvfp4::{Likeliest, likeliest};
use burn::tensor::{Tensor, TensorData};
use burn_cubecl::CubeRuntime;

#[test]
fn the_likeliest_tokens_are_those_of_a_sort_on_the_gpu() {
    on_gpu!(on_cube);
}

fn on_cube<R: CubeRuntime>() {
    let mut random = Random::new(5);
    for (rows, cols) in [(1, 7), (3, 2048), (2, 5000), (17, 12_345)] {
        let mut logits = random.normals(rows * cols, 3.0);
        // Equal ones at the borders of parts, and whole rows of few different values.
        logits[cols - 1] = 50.0;
        logits[0] = 50.0;
        if rows > 1 {
            logits[cols..2 * cols].iter_mut().for_each(|x| *x = x.round());
            logits[cols + 3] = f32::NEG_INFINITY;
            logits[cols + 4] = f32::INFINITY;
        }
        if rows > 2 {
            logits[2 * cols + cols / 2] = f32::NAN;
        }
        let x = Tensor::<Cube<R>, 2>::from_data(TensorData::new(logits.clone(), [rows, cols]), &R::Device::default());
        for count in [1, 5, 64] {
            let Some(found) = likeliest(&x, count).unwrap() else {
                assert!(count > cols, "{count} of {cols}");
                continue;
            };
            for (n, (row, found)) in logits.chunks(cols).zip(found).enumerate() {
                let mut order: Vec<u32> = (0..cols as u32).filter(|i| !row[*i as usize].is_nan()).collect();
                order.sort_by(|a, b| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b)));
                let tokens = order.into_iter().take(count).map(|i| (i, row[i as usize])).collect();
                let expected = Likeliest { tokens, has_nan: row.iter().any(|x| x.is_nan()) };
                assert_eq!(found, expected, "row {n} of {rows} x {cols}, {count} values");
            }
        }
    }
}
