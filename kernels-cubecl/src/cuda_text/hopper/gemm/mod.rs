//! The products of [`crate::gemm::gemm()`] on Hopper's own matrix instructions. gemm.cuh says how the kernel works.
//! ```text
//! for i { for j { for r { y[i][j] += a[i][r] * b[j][r] } } }      // the plain loop, Nt
//! ```
//! | file | what it holds |
//! |---|---|
//! | `mod.rs` | for which device and products, and the launch |
//! | `form.rs`, `tiles.rs` | what is compiled into a kernel; the choice of a tile's width |
//! | `text.rs`, `gemm.cuh` | the text |

use super::{Number, PIECE, is_hopper, tensor_map};
use crate::{
    cuda_text::{WrittenKernel, binding},
    device::processors,
    error::{KernelError, expect_len, index, require},
    gemm::{
        args::Gemm,
        shape::{GemmShape, NAME},
    },
};
use cubecl::{
    prelude::*,
    server::{Binding, KernelArguments, MetadataBindingInfo},
};
use form::{HopperGemmForm, Mapped, STAGE_DEPTH, TILE_ROWS};
use tiles::{columns, tiles};
pub use tiles::{hopper_columns, hopper_squares};

mod form;
mod text;
mod tiles;

/// Whether there is a kernel for these products on this device.
pub(crate) fn takes<R: Runtime>(client: &ComputeClient<R>, products: &Gemm<R>) -> bool {
    is_hopper(client) && HopperGemmForm::of(products, TILE_ROWS).is_ok()
}

/// How many sums of squares each result of these products gets: two a tile.
pub(crate) fn squares_of<R: Runtime>(client: &ComputeClient<R>, products: &Gemm<R>) -> Vec<usize> {
    let cols = columns(products.tiled(), products.product, processors(client));
    products.tiled().iter().map(|shape| hopper_squares(shape, cols)).collect()
}

/// Launches the products with the width of tiles that lets the device finish soonest.
pub(crate) fn launch<R: Runtime>(client: &ComputeClient<R>, products: Gemm<R>) -> Result<(), KernelError> {
    let cols = columns(products.tiled(), products.product, processors(client));
    launch_in(client, products, cols)
}

/// Launches the products in tiles of `cols` columns, one of [`hopper_columns`].
///
/// # Errors
/// If the products do not fit together, or there is no kernel for them.
pub fn hopper_gemm_in<R: Runtime>(
    client: &ComputeClient<R>,
    products: Gemm<R>,
    cols: usize,
) -> Result<(), KernelError> {
    products.check()?;
    require(NAME, is_hopper(client), || "this device is no Hopper GPU".into())?;
    let widths = hopper_columns(products.product);
    require(NAME, widths.contains(&cols), || format!("there are no tiles of {cols} columns; there are {widths:?}"))?;
    launch_in(client, products, cols)
}

fn launch_in<R: Runtime>(client: &ComputeClient<R>, products: Gemm<R>, cols: usize) -> Result<(), KernelError> {
    let form = HopperGemmForm::of(&products, cols)?;
    let cubes = index(NAME, "cubes", tiles(products.tiled(), cols).min(processors(client)))?;
    let info = lengths(&products.shapes)?;
    for (sums, shape) in products.squares.iter().zip(&products.shapes) {
        expect_len(NAME, "squares", sums.size(), hopper_squares(shape, cols))?;
    }
    let Gemm { a, b, scales, out, squares, types, shapes, .. } = products;
    let bindings = |list: Vec<ArrayArg<R>>| list.into_iter().map(binding).collect::<Vec<Binding>>();
    let [a, b, scales, out, squares] = [a, b, scales, out, squares].map(bindings);
    let map_of = |(of, n): (Mapped, usize)| {
        let GemmShape { i, j, r } = shapes[n];
        let (buffer, ty) = match of {
            Mapped::A => (&a[n], types.0),
            Mapped::B => (&b[n], types.0),
            Mapped::Out | Mapped::Edge => (&out[n], types.1),
        };
        let (dims, tile) = match of {
            Mapped::A if form.a_across => ([r, i], [STAGE_DEPTH, PIECE]),
            Mapped::A => ([i, r], [TILE_ROWS, STAGE_DEPTH]),
            Mapped::B if form.b_across => ([r, j], [STAGE_DEPTH, PIECE]),
            Mapped::B => ([j, r], [cols, STAGE_DEPTH]),
            Mapped::Out if form.result == Number::F32 => ([i, j], [PIECE, PIECE / 2]),
            Mapped::Out => ([i, j], [PIECE, PIECE]),
            Mapped::Edge => ([i, j], [PIECE, cols % PIECE]),
        };
        tensor_map(buffer.clone(), ty, dims, tile)
    };
    let maps = form.maps().into_iter().map(map_of).collect();
    let numbers = scales.into_iter().chain(squares).collect();
    let arguments = KernelArguments::new().with_tensor_maps(maps).with_buffers(numbers);
    let words = info.len();
    let arguments = arguments.with_info(MetadataBindingInfo::new(info, words));
    // SAFETY: buffer lengths were checked against the shapes; the copy engine stays inside the matrices of its maps, whose
    // dimensions are the shapes; the initial values of the sums are read only inside these matrices; sums of squares have two
    // places for each tile; every loop is bounded by the shapes.
    unsafe { client.launch_unchecked(Box::new(WrittenKernel(form)), CubeCount::Static(cubes, 1, 1), arguments) };
    Ok(())
}

/// The lengths as the kernel reads them: rows, columns and summed values of each product.
fn lengths(shapes: &[GemmShape]) -> Result<Vec<u64>, KernelError> {
    let mut all = Vec::new();
    for (what, len) in shapes.iter().flat_map(|s| [("i", s.i), ("j", s.j), ("r", s.r)]) {
        require(NAME, i32::try_from(len).is_ok(), || {
            format!("{what} = {len} is more than a signed number of 32 bits holds")
        })?;
        all.push(len as u64);
    }
    Ok(all)
}
