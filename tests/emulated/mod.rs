//! Tensor-core kernels without a GPU: the CUDA C++ of each launch runs on the CPU, in the emulator of `support/emulator`,
//! and its results are compared with f64, for sm_80, sm_90 and sm_121: the joint and single forms of `gemm` that recipes
//! use in each width of tiles (on Hopper's own instructions the joint forms and each storage order in each width), `gemv` by
//! each plan for the layers of Qwen3-0.6B to 32B, attention, and NVFP4 tensor cores. A seed draws an eighth of all forms of
//! products in every width and type.
//! Several kinds of defects are put into the kernels by hand, and found. Where there is a card, the same launches, and random ones,
//! run on it by each kind of instructions that it has, whatever the program would choose there.

mod attention;
mod block_scaled;
mod decoder;
mod defects;
mod gemm;
mod gemv;
mod gpu;
mod hopper;
mod numbers;

use crate::support::{self, Feature, Random, emulator, lacks, skipped_for};
use gpu::{ARCHITECTURES, Gpu};
use kernels_cubecl::mma;

/// Runs `check` if there is a C++ compiler, or says that it was skipped.
fn on_the_cpu<T>(check: impl FnOnce() -> T) {
    if emulator::compiler().is_some() {
        check();
        return;
    }
    skipped_for("no C++ compiler (apt-get install g++)");
}

/// Runs `check` on an emulated GPU of each architecture.
fn on_each(check: impl Fn(&Gpu)) {
    on_the_cpu(|| ARCHITECTURES.map(|arch| check(&Gpu::emulated(arch))));
}

#[test]
fn gemm_in_tiles_of_128_columns() {
    on_each(|gpu| gemm::every(gpu, 128));
}

#[test]
fn gemm_in_tiles_of_160_columns() {
    on_each(|gpu| gemm::every(gpu, 160));
}

#[test]
fn gemm_in_tiles_of_64_columns() {
    on_each(|gpu| gemm::every(gpu, 64));
}

#[test]
fn gemm_on_hopper() {
    on_the_cpu(|| hopper::every(&Gpu::emulated(90)));
}

#[test]
#[ignore = "it takes ten minutes; an_eighth_of_the_forms_of_products runs a draw of these"]
fn every_form_of_products_in_every_width_and_type() {
    forms_of_products(|_| true);
}

/// The seed of the draw. Whoever changes a kernel of products may change the seed, too: another one draws another eighth.
const SEED: u64 = 14;

#[test]
fn an_eighth_of_the_forms_of_products() {
    forms_of_products(|random| random.below(8) == 0);
}

/// Tries the forms of products that `takes` accepts, of all of them in every width and type.
fn forms_of_products(takes: fn(&mut Random) -> bool) {
    on_the_cpu(|| {
        let mut random = Random::new(SEED);
        let mut takes = || takes(&mut random);
        for arch in ARCHITECTURES {
            let gpu = Gpu::emulated(arch);
            gemm::forms(&gpu).iter().filter(|_| takes()).for_each(|case| gemm::expect(&gpu, case));
            if arch == 90 {
                hopper::forms().iter().filter(|_| takes()).for_each(|case| hopper::expect(&gpu, case));
            }
            gemv::in_f16(&gpu, &mut takes);
        }
    });
}

#[test]
fn gemv_by_each_plan_for_qwen3_600m_and_4b() {
    on_each(|gpu| gemv::every(gpu, &gemv::SMALL));
}

#[test]
fn gemv_by_each_plan_for_the_other_sizes_of_qwen3() {
    on_each(|gpu| gemv::every(gpu, &gemv::LARGE));
}

#[test]
fn attention_forward() {
    on_each(attention::forward);
}

#[test]
fn attention_backward() {
    on_each(attention::backward);
}

#[test]
fn decode_attention() {
    on_each(attention::decode);
}

#[test]
fn a_block_in_one_launch() {
    on_each(decoder::every);
}

#[test]
fn a_block_in_more_cubes_than_processors_is_refused() {
    decoder::in_too_many_cubes(&Gpu::recording(90));
}

#[test]
fn a_decoded_token_has_the_same_bits_beside_others() {
    on_the_cpu(|| decoder::beside_others_as_alone(&Gpu::emulated(90)));
}

/// Runs `check` on a card, or says that there is none.
fn on_a_card(check: impl FnOnce(&Gpu)) {
    if !matches!(support::gpu(), support::Gpu::Cuda) {
        return lacks(Feature::TensorCores);
    }
    let gpu = Gpu::real();
    assert!(mma::supported(&gpu.client, gpu::BF16));
    check(&gpu);
}

#[test]
fn a_card_multiplies_500_random_shapes_by_mma_sync() {
    on_a_card(|gpu| gemm::random(&gemm::forms(gpu), 500).iter().for_each(|case| gemm::expect(gpu, case)));
}

#[test]
fn a_card_multiplies_500_random_shapes_on_hopper() {
    on_a_card(|gpu| {
        if gpu.arch != 90 {
            return lacks(Feature::Hopper);
        }
        gemm::random(&hopper::forms(), 500).iter().for_each(|case| hopper::expect(gpu, case));
    });
}

#[test]
fn a_card_computes_500_random_calls_of_attention() {
    on_a_card(|gpu| attention::random(gpu, 500));
}

#[test]
fn a_card_decodes_by_each_plan() {
    on_a_card(|gpu| {
        gemv::every(gpu, &gemv::SMALL);
        gemv::every(gpu, &gemv::LARGE);
    });
}

#[test]
fn a_card_decodes_a_block_in_one_launch() {
    on_a_card(|gpu| {
        attention::decode(gpu);
        decoder::every(gpu);
        decoder::beside_others_as_alone(gpu);
        block_scaled::every(gpu);
    });
}

#[test]
fn sixteen_bit_numbers() {
    on_the_cpu(numbers::are_those_of_half);
}

#[test]
fn block_scaled_products() {
    on_each(block_scaled::every);
}
