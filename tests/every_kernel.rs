//! Every kernel launched on twelve row counts and three types: what `compute-sanitizer --tool memcheck` and `racecheck`
//! are pointed at (doc/kernels.md). By itself it shows that each compiles for the device and runs.

use crate::support::on_gpu;
use burn_cubecl::CubeRuntime;
use cubecl::ir::{ElemType, FloatKind, StorageType};

/// Smallest, ragged and whole tiles.
const ROWS: [usize; 12] = [1, 2, 7, 15, 16, 17, 31, 48, 64, 100, 129, 256];

#[test]
fn twelve_shapes() {
    on_gpu!(launch);
}

fn launch<R: CubeRuntime>() {
    let client = R::client(&R::Device::default());
    let types =
        [FloatKind::F32, FloatKind::F16, FloatKind::BF16].map(|kind| StorageType::Scalar(ElemType::Float(kind)));
    for rows in ROWS {
        for dtype in types.into_iter().filter(|dtype| client.properties().supports_type(*dtype)) {
            kernels_cubecl::once::once(&client, dtype, rows).unwrap();
        }
        cubecl::future::block_on(client.sync()).unwrap();
    }
}
