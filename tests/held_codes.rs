//! The codes that a step of AdamW leaves of a master weight are those that the quantizer makes of the new weight, in every bit:
//! whether the largest magnitude of the weight is the one of before, or another, or the step was refused. Codes that someone else
//! holds stay as they are.

use crate::{
    optimizer::{judged, step},
    support::{Cpu, Cube, Random, emulator, matrix, on_gpu, skipped_for},
};
use backend_nvfp4::{
    AdamwState, BlockShape, HeldPrimitive, MasterKind, Nvfp4Kernels, Nvfp4Primitive, Nvfp4Tensor, Packed, QuantizeSpec,
    Rounding, STATE_BLOCK, Scaling, StateKind,
};
use burn::tensor::{DType, Tensor, TensorData, TensorPrimitive, ops::FloatTensor};
use burn_cubecl::CubeRuntime;
use kernels_cubecl::{
    any_cuda::{AnyCudaDevice, AnyCudaRuntime},
    cuda_source::{OnLaunch, SourceDevice},
};

fn spec(block: BlockShape) -> QuantizeSpec {
    QuantizeSpec { scaling: Scaling::Two, block, rounding: Rounding::Nearest }
}

fn read<B: Nvfp4Kernels>(packed: &Nvfp4Primitive<B>) -> Packed {
    Nvfp4Tensor::<B>::from_primitive(packed.clone()).to_packed().unwrap()
}

/// The codes that the CPU makes of a weight.
fn on_the_cpu<B: Nvfp4Kernels>(w: FloatTensor<B>, spec: QuantizeSpec) -> Packed {
    let w = Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(w));
    let [rows, cols] = w.dims();
    let values: Vec<f32> = w.into_data().iter().collect();
    let values = matrix::<Cpu>(&values, rows, cols, &Default::default());
    read::<Cpu>(&Cpu::nvfp4_quantize(values.into_primitive().tensor(), spec))
}

/// A weight, and the forms in which it and its moments are kept.
struct Case {
    shape: [usize; 2],
    block: BlockShape,
    master: MasterKind,
    state: StateKind,
}

/// Values of many sizes, in blocks that have one each: some are zero, or have scales below the smallest normal one. The first is
/// the largest, and its gradient is zero.
fn values(random: &mut Random, len: usize) -> (Vec<f32>, Vec<f32>) {
    let mut weights: Vec<f32> = (0..len.div_ceil(16))
        .flat_map(|_| {
            let size = [0.02, 0.05, 1e-4, 3e-6, 0.0][random.below(5)];
            random.normals(16, size)
        })
        .map(|x| half::bf16::from_f32(x).to_f32())
        .collect();
    let mut gradients = random.normals(len, 1e-3);
    (weights[0], gradients[0]) = (1.0, 0.0);
    (weights, gradients)
}

/// Makes four steps, and compares the codes after each. Returns false if the device leaves no codes in this case.
fn leaves_codes<B: Nvfp4Kernels>(device: &B::Device, case: &Case) -> bool {
    let Case { shape: [rows, cols], block, master, state } = *case;
    let half = if B::supports_dtype(device, DType::BF16) { DType::BF16 } else { DType::F32 };
    let (weights, gradients) = values(&mut Random::new(11), rows * cols);
    // Uploaded flat: the rows of a matrix would be padded, and the emulated device reads and writes without strides.
    let float = |values: &[f32], dtype: DType| {
        let data = TensorData::new(values.to_vec(), [rows * cols]);
        let flat = Tensor::<B, 1>::from_data(data, (device, DType::F32)).cast(dtype);
        flat.reshape([rows, cols]).into_primitive().tensor()
    };
    let mut w: FloatTensor<B> = float(&weights, half);
    let mut moments = AdamwState::<B>::zeros(state, rows * cols, half, device);
    if master == MasterKind::BF16_RESIDUAL {
        moments = moments.with_residual(rows * cols, device);
    }
    let Some(mut held) = B::nvfp4_held(w.clone(), state, spec(block)) else { return false };
    // Two small steps leave the largest magnitude as it is, a large one does not, and a step with a verdict changes nothing.
    let steps = [(1e-3, 0.0, false), (1e-3, 0.0, true), (0.3, 0.0, false), (0.3, 1.0, false)];
    for (t, (lr, verdict, elsewhere)) in (1..).zip(steps) {
        let label = format!("{rows}x{cols}, {block:?}, {master:?}, {state:?}, step {t}");
        let before = read::<B>(&held.packed);
        let copy = elsewhere.then(|| held.clone());
        moments.codes = Some(held);
        let gradient = judged::<B>(float(&gradients, DType::F32), verdict);
        let chunk = (rows * cols).next_multiple_of(STATE_BLOCK);
        (w, moments) = B::adamw(w, master.dense(), gradient, moments, step(t, lr, 3), chunk);
        held = moments.codes.take().expect("codes were wanted");
        let (left, made) = (read::<B>(&held.packed), on_the_cpu::<B>(w.clone(), spec(block)));
        assert!(left == made, "{label}: other codes than the quantizer's");
        assert_eq!(left.global == before.global, lr < 0.1 || verdict > 0.0, "{label}: the tensor scale");
        assert_eq!(left == before, verdict > 0.0, "{label}: whether the codes have changed");
        copy.iter().for_each(|copy: &HeldPrimitive<B>| assert!(read::<B>(&copy.packed) == before, "{label}: the copy"));
    }
    true
}

/// The shapes of `rows`, and two in 16x16 blocks, in several forms.
fn cases(rows: [[usize; 2]; 2]) -> Vec<Case> {
    let mut all = Vec::new();
    for (shape, block) in [
        (rows[0], BlockShape::Row),
        (rows[1], BlockShape::Row),
        ([32, 256], BlockShape::Square),
        ([48, 768], BlockShape::Square),
    ] {
        for (master, state) in [
            (MasterKind::BF16, StateKind::Int8),
            (MasterKind::BF16_RESIDUAL, StateKind::Int4),
            (MasterKind::BF16_NEAREST, StateKind::Int8),
        ] {
            all.push(Case { shape, block, master, state });
        }
    }
    all
}

/// Planes of any size leave codes in blocks of 16 values. 16x16 blocks need planes of 32 units.
#[test]
fn a_step_leaves_the_codes_of_the_quantizer_on_the_gpu() {
    fn on_cube<R: CubeRuntime>() {
        for case in cases([[13, 48], [37, 272]]) {
            let leaves = leaves_codes::<Cube<R>>(&Default::default(), &case);
            assert!(leaves || case.block == BlockShape::Square, "{:?} in {:?}", case.shape, case.block);
        }
    }
    on_gpu!(on_cube);
}

#[test]
fn a_step_leaves_the_codes_of_the_quantizer_in_the_emulator() {
    if emulator::compiler().is_none() {
        return skipped_for("no C++ compiler (apt-get install g++)");
    }
    let device = SourceDevice::new(90, OnLaunch::Run(emulator::executor()));
    // The emulated device reads whole buffers, so that matrices have whole blocks of 256 values.
    for case in cases([[16, 48], [48, 272]]) {
        let leaves = leaves_codes::<Cube<AnyCudaRuntime>>(&AnyCudaDevice::Source(device.clone()), &case);
        assert!(leaves, "{:?} in {:?}", case.shape, case.block);
    }
    device.give_back();
}

/// What cannot leave codes says so before a step: the CPU, moments in floats, matrices that do not divide into tiles.
#[test]
fn what_leaves_no_codes_is_known_before_a_step() {
    fn held<B: Nvfp4Kernels>(shape: [usize; 2], state: StateKind, block: BlockShape) -> bool {
        let w = Tensor::<B, 2>::ones(shape, (&Default::default(), DType::F32));
        let TensorPrimitive::Float(w) = w.into_primitive() else { unreachable!("a float tensor") };
        B::nvfp4_held(w, state, spec(block)).is_some()
    }
    assert!(!held::<Cpu>([16, 256], StateKind::Int8, BlockShape::Row));
    fn on_cube<R: CubeRuntime>() {
        assert!(held::<Cube<R>>([16, 256], StateKind::Int8, BlockShape::Row));
        for (shape, state, block) in [
            ([16, 256], StateKind::F32, BlockShape::Row),
            ([16, 256], StateKind::Bf16, BlockShape::Row),
            ([16, 272], StateKind::Int8, BlockShape::Square),
            ([24, 256], StateKind::Int8, BlockShape::Square),
        ] {
            assert!(!held::<Cube<R>>(shape, state, block), "{shape:?}, {state:?}, {block:?}");
        }
    }
    on_gpu!(on_cube);
}
