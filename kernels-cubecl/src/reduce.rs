//! Sums and maxima over the units of a cube: every plane reduces its own values, then the planes exchange results
//! through shared memory. Any plane size works; the cube has a multiple of 32 units, at most 1,024. Every unit must
//! take part, and every unit gets the result.

use cubecl::prelude::*;

/// The sum of `x` over the cube.
#[cube]
pub(crate) fn cube_sum(x: f32) -> f32 {
    let mut shared = SharedMemory::<f32>::new(256usize);
    let plane = plane_sum(x);
    // Other units may still read the values of an earlier call.
    sync_cube();
    if UNIT_POS_PLANE == 0u32 {
        shared[(UNIT_POS / PLANE_DIM) as usize] = plane;
    }
    sync_cube();
    let mut sum = 0.0f32;
    for p in 0..CUBE_DIM / PLANE_DIM {
        sum += shared[p as usize];
    }
    sum
}

/// The sums of `x` and of `y` over the cube, with one pair of barriers for both.
#[cube]
pub(crate) fn cube_sums(x: f32, y: f32) -> (f32, f32) {
    let shared = exchanged(plane_sum(x), plane_sum(y));
    let mut x = 0.0f32;
    let mut y = 0.0f32;
    for p in 0..CUBE_DIM / PLANE_DIM {
        x += shared[(p * 2u32) as usize];
        y += shared[(p * 2u32 + 1u32) as usize];
    }
    (x, y)
}

/// The largest `x` in the cube.
#[cube]
pub(crate) fn cube_max(x: f32) -> f32 {
    let mut shared = SharedMemory::<f32>::new(256usize);
    let plane = plane_max(x);
    sync_cube();
    if UNIT_POS_PLANE == 0u32 {
        shared[(UNIT_POS / PLANE_DIM) as usize] = plane;
    }
    sync_cube();
    let mut best = shared[0usize];
    for p in 0..CUBE_DIM / PLANE_DIM {
        best = max(best, shared[p as usize]);
    }
    best
}

/// The largest `x` and the largest `y` in the cube, with one pair of barriers for both.
#[cube]
pub(crate) fn cube_maxima(x: f32, y: f32) -> (f32, f32) {
    let shared = exchanged(plane_max(x), plane_max(y));
    let mut x = shared[0usize];
    let mut y = shared[1usize];
    for p in 0..CUBE_DIM / PLANE_DIM {
        x = max(x, shared[(p * 2u32) as usize]);
        y = max(y, shared[(p * 2u32 + 1u32) as usize]);
    }
    (x, y)
}

/// Writes the pair of every plane to shared memory, side by side.
#[cube]
fn exchanged(x: f32, y: f32) -> SharedMemory<f32> {
    let mut shared = SharedMemory::<f32>::new(512usize);
    // Other units may still read the values of an earlier call.
    sync_cube();
    if UNIT_POS_PLANE == 0u32 {
        shared[(UNIT_POS / PLANE_DIM * 2u32) as usize] = x;
        shared[(UNIT_POS / PLANE_DIM * 2u32 + 1u32) as usize] = y;
    }
    sync_cube();
    shared
}

/// The sum of the elements of a vector.
#[cube]
pub(crate) fn lanes<N: Size>(x: Vector<f32, N>) -> f32 {
    let mut sum = x[0];
    #[unroll]
    for i in 1..N::value() {
        sum += x[i];
    }
    sum
}

/// The largest magnitude among the elements of a vector; infinity if one is NaN. Magnitudes are in the order of their bits, in
/// which NaN stands behind infinity.
#[cube]
pub(crate) fn largest<F: Float, N: Size>(x: Vector<F, N>) -> f32 {
    let mut top = 0u32;
    #[unroll]
    for i in 0..N::value() {
        top = max(top, u32::reinterpret(f32::cast_from(x[i])) & 0x7FFF_FFFFu32);
    }
    f32::reinterpret(min(top, 0x7F80_0000u32))
}
