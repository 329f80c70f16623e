//! Defects that are put into the text of a kernel by hand, and that the emulator must find: a barrier that is missing, an
//! index outside its buffer, a wrong register of a fragment.

use super::{
    attention, block_scaled, decoder, gemm,
    gemm::Form,
    gemv,
    gpu::{BF16, F32, Gpu},
    hopper, on_the_cpu,
};
use crate::support::emulator::{self, NOT_COMPILED};
use kernels_cubecl::{cuda_source::Launch, cuda_text::decoder::ActivationRounding, gemv::GemvPlan, operands::Product};
use std::sync::Arc;

/// A small launch, and how the name of its kernel begins.
type Subject = (&'static str, fn(&Gpu) -> Result<(), String>);

const GEMM: Subject = ("gemm", |gpu| gemm::run(gpu, &gemm::one(Product::Nt, 64, 1, (BF16, BF16), Form::One)));
/// Two rows of tiles, and more steps than the ring has stages. The second has results in f32.
const HOPPER: Subject = ("hopper", |gpu| hopper::run(gpu, &gemm::one(Product::Nt, 256, 1, (BF16, BF16), Form::One)));
const HOPPER_F32: Subject = ("hopper", |gpu| {
    let case = gemm::one(Product::Tn, 256, 0, (BF16, F32), Form::One);
    hopper::run(gpu, &gemm::Case { measured: false, ..case })
});
/// Two rows and two columns of tiles, whose squares are summed.
const GEMM_SQUARES: Subject = ("gemm", |gpu| gemm::run(gpu, &gemm::one(Product::Tn, 64, 1, (BF16, F32), Form::One)));
const HOPPER_SQUARES: Subject =
    ("hopper", |gpu| hopper::run(gpu, &gemm::one(Product::Tn, 128, 1, (BF16, F32), Form::One)));
const GEMV: Subject = ("gemv", gemv_with_shares);
const GEMV_WINDOWS: Subject = ("gemv", gemv_in_windows);
const FORWARD: Subject = ("forward", attention::forward_of_one_head);
const BACKWARD_KV: Subject = ("backward_kv", attention::backward_of_one_head);
const BACKWARD_Q: Subject = ("backward_q", attention::backward_of_one_head);
const HOPPER_FORWARD: Subject = ("hopper_attention_forward", attention::forward_of_many_blocks);
const HOPPER_KEYS: Subject = ("hopper_attention_keys", attention::backward_of_many_blocks);
const HOPPER_QUERIES: Subject = ("hopper_attention_queries", attention::backward_of_many_blocks);
const DECODE: Subject = ("split", attention::decode_in_one_split);
/// One token over two shares of keys.
const DECODER: Subject = ("decoder", |gpu| decoder::run(gpu, &decoder::one(true, ActivationRounding::EachRow)));
const DECODER_LONG: Subject = ("decoder", |gpu| decoder::run(gpu, &decoder::long()));
/// Two tokens whose caches hold bytes.
const DECODER_BYTES: Subject = ("decoder", |gpu| decoder::run(gpu, &decoder::bytes()));
const BLOCK_SCALED: Subject = ("block_scaled", |gpu| block_scaled::run(gpu, BF16));

/// Planes that add up their sums in shared memory.
fn gemv_with_shares(gpu: &Gpu) -> Result<(), String> {
    let plan = GemvPlan::of(&gpu.client, 3, 1024, BF16, [2, 2, 2]).expect("few tokens find a place");
    gemv::run(gpu, plan, 3, 1024, &[45], BF16)
}

/// Tokens that come in windows.
fn gemv_in_windows(gpu: &Gpu) -> Result<(), String> {
    let plan = GemvPlan::of(&gpu.client, 11, 9728, BF16, [4, 2, 2]).expect("windows find a place");
    gemv::run(gpu, plan, 11, 9728, &[45], BF16)
}

/// An architecture that has the kernel: attention is another kernel on Hopper.
fn arch(entry: &str) -> u32 {
    match entry {
        entry if entry == BLOCK_SCALED.0 => 121,
        "forward" | "backward_kv" | "backward_q" => 80,
        _ => 90,
    }
}

/// The result of a subject whose kernel's text is changed.
fn changed((entry, run): Subject, change: impl Fn(&str) -> String + Send + Sync + 'static) -> Result<(), String> {
    let executor = move |launch: &Launch, buffers: &mut [Vec<u8>]| {
        let mut launch = launch.clone();
        if launch.entry.starts_with(entry) {
            launch.text = change(&launch.text);
        }
        emulator::run(&launch, buffers)
    };
    run(&Gpu::running(arch(entry), Arc::new(executor)))
}

/// The result of a subject whose kernel leaves out a barrier.
fn without_barrier((entry, run): Subject, barrier: Option<usize>) -> Result<(), String> {
    let executor = move |launch: &Launch, buffers: &mut [Vec<u8>]| {
        emulator::run_without(launch, barrier.filter(|_| launch.entry.starts_with(entry)), buffers)
    };
    run(&Gpu::running(arch(entry), Arc::new(executor)))
}

/// The text of a subject's kernel.
fn text((entry, run): Subject) -> String {
    let gpu = Gpu::recording(arch(entry));
    // There are no results to compare.
    let _ = run(&gpu);
    cubecl::future::block_on(gpu.client.sync()).unwrap();
    let launch = gpu.take_launches().into_iter().find(|launch| launch.entry.starts_with(entry));
    launch.unwrap_or_else(|| panic!("no {entry} kernel")).text
}

/// `text` with its `number`th `old` replaced.
fn replaced(text: &str, old: &str, new: &str, number: usize) -> String {
    let (at, _) = text.match_indices(old).nth(number).expect("there are as many");
    format!("{}{new}{}", &text[..at], &text[at + old.len()..])
}

/// What is replaced in a text, by what, and what the emulator's error has in it.
type Defect = (&'static str, &'static str, &'static str);

/// Puts each defect into the text of its subject. The emulator must find every one.
fn expect_found(defects: impl IntoIterator<Item = (Subject, Defect)>) {
    let missed = defects.into_iter().filter_map(|(subject, defect)| found(subject, defect).err());
    assert_eq!(missed.collect::<Vec<_>>(), Vec::<String>::new());
}

/// Replaces the first `old` of a subject's text. The error says that the emulator has not found that.
fn found(subject: Subject, (old, new, expected): Defect) -> Result<(), String> {
    assert!(text(subject).contains(old), "{} has no {old:?}", subject.0);
    match changed(subject, move |text| replaced(text, old, new, 0)) {
        Err(error) if error.contains(expected) && !error.contains(NOT_COMPILED) => Ok(()),
        other => Err(format!("{}, {new:?} for {old:?}: {other:?}", subject.0)),
    }
}

/// Takes out each barrier of a kernel in turn. The emulator must find it missing, unless nothing depends on it: a barrier
/// after a barrier object is made, which a later barrier makes good, and what `spare` names. Returns how many were missed.
/// The numbers are in `doc/notebook/mutations.md`, too.
fn expect_each_barrier_is_needed(subject: Subject, spare: &[usize]) -> usize {
    without_barrier(subject, None).unwrap();
    let text = text(subject);
    let places: Vec<usize> = text.match_indices(emulator::BARRIER).map(|(at, _)| at).collect();
    assert!(!places.is_empty(), "{} has no barrier", subject.0);
    let mut needed = 0;
    for (number, at) in places.iter().enumerate() {
        let before: String =
            text[..*at].trim_end().chars().rev().take(80).collect::<Vec<_>>().into_iter().rev().collect();
        let made = before.ends_with('}') && before.contains("init(");
        match without_barrier(subject, Some(number)) {
            Err(e) => {
                assert!(e.contains("race"), "{} without barrier {number}: {e}", subject.0);
                needed += 1;
            }
            Ok(()) => {
                assert!(made || spare.contains(&number), "{}: barrier {number} is not missed, {before}", subject.0)
            }
        }
    }
    needed
}

#[test]
fn a_missing_barrier_of_gemm_is_found() {
    // The first barrier stands between two products: here is one.
    on_the_cpu(|| assert_eq!(expect_each_barrier_is_needed(GEMM, &[0]), 3));
}

/// A sum of squares that leaves lanes out, and one that two lanes write.
#[test]
fn a_wrong_sum_of_squares_of_gemm_is_found() {
    let cases = [
        (GEMM_SQUARES, ("offset *=2 )", "offset *=4 )", "sum of squares")),
        (GEMM_SQUARES, ("% warpSize == uint32(0)", "% warpSize <= uint32(1)", "race")),
    ];
    on_the_cpu(|| expect_found(cases));
}

#[test]
fn a_missing_barrier_of_gemv_is_found() {
    on_the_cpu(|| {
        assert_eq!([GEMV, GEMV_WINDOWS].map(|subject| expect_each_barrier_is_needed(subject, &[])), [2, 3]);
    });
}

#[test]
fn a_missing_barrier_of_attention_is_found() {
    on_the_cpu(|| {
        let needed = [FORWARD, BACKWARD_KV, BACKWARD_Q].map(|subject| expect_each_barrier_is_needed(subject, &[]));
        assert_eq!(needed, [2; 3]);
    });
}

#[test]
fn a_missing_barrier_of_decode_attention_is_found() {
    // The fifth barrier is in front of the first plane that writes the joined sums: nobody has read them before.
    on_the_cpu(|| assert_eq!(expect_each_barrier_is_needed(DECODE, &[4]), 6));
}

/// What keeps the warpgroups, the copy engine and the products of the Hopper kernel apart, left out one by one. A wait for a
/// stage that is free is missed as soon as the stages are used again.
#[test]
fn whatever_is_missing_in_the_hopper_kernel_is_found() {
    let cases = [
        (HOPPER, ("products_wait<1>();", "products_wait<2>();", "race")),
        (HOPPER, ("products_wait<0>();", "", ": value ")),
        (HOPPER, ("barrier_wait(empty + 8 * stage, parity ^ 1);", "", "barrier that expects 0 more")),
        (HOPPER, ("barrier_wait(full + 8 * stage, parity);", "", "race")),
        (HOPPER, ("__syncthreads();", "", "before it is made")),
        (HOPPER, ("    if (first_unit) stores_have_ended();", "", "does not wait for its stores")),
        (HOPPER, ("chunk = c % 64 / 8;", "chunk = c % 64 / 8 ^ r / 4 % 2;", ": value ")),
        (HOPPER, ("(B_ACROSS ? 128 : 2) * q", "2 * (q ^ 1)", ": value ")),
        (HOPPER_F32, ("    writes_for_copies();", "", "without fence.proxy")),
        (HOPPER_F32, ("    if (first_unit) stores_have_read();", "", ": value ")),
        (HOPPER_F32, ("(A_ACROSS ? 128 : 2) * q", "128 * (q ^ 1)", ": value ")),
        (HOPPER_F32, ("B_ACROSS ? BOX : 0", "0", ": value ")),
        (
            HOPPER_SQUARES,
            (
                "    warpgroup_sync(consumer + 1);\n    if (threadIdx.x % 128 == 0) *to",
                "    if (threadIdx.x % 128 == 0) *to",
                "race",
            ),
        ),
        (HOPPER_SQUARES, ("int distance = 16;", "int distance = 8;", "sum of squares")),
        (HOPPER_SQUARES, ("* tile_cols + tile.col / COLS", "+ tile.col / COLS", "race")),
    ];
    on_the_cpu(|| expect_found(cases));
}

/// The same in attention on Hopper, and wrong terms of its formulas.
#[test]
fn whatever_is_missing_in_attention_on_hopper_is_found() {
    let forward = [
        ("            barrier_wait(k_empty + 8 * at.stage, at.parity ^ 1);\n", "", "barrier that expects 0 more"),
        ("            barrier_wait(v_empty + 8 * at.stage, at.parity ^ 1);\n", "", "race"),
        ("        barrier_wait(k_full + 8 * k_at.stage, k_at.parity);\n", "", "race"),
        ("        products_wait<1>();\n", "", ": value "),
        ("        products_wait<0>();\n", "", "race"),
        ("sums[i] *= shrink[i / 2 % 2];", ";", ": value "),
        ("rows.total[half] * shrink[half] + sum", "rows.total[half] + sum", ": value "),
        ("best == HIDDEN ? 0.0f : best * POWER", "best * POWER", ": value "),
        ("own > rows.position[half]", "own >= rows.position[half]", ": value "),
        (" || own < rows.start[half]", "", ": value "),
        (" || key < full_from", "", ": value "),
        ("key + BLOCK - 1 > own + past", "key > own + past", ": value "),
        ("b + part * 2048", "b + part * 1024", ": value "),
        ("part % 4 * 32, 0),", "part % 4 * 32 ^ 32, 0),", ": value "),
        ("rounded(scores[2 * i], scores[2 * i + 1])", "rounded(scores[2 * i + 1], scores[2 * i])", ": value "),
        ("    writes_for_copies();\n", "", "without fence.proxy"),
        ("        stores_have_ended();\n", "", "does not wait for its stores"),
        ("chunk = c % 64 / 8;", "chunk = c % 64 / 8 ^ r / 4 % 2;", ": value "),
    ];
    let keys = [
        ("            barrier_wait(empty + 8 * at.stage, at.parity ^ 1);\n", "", "race"),
        ("barrier_wait(full + 8 * next.stage, next.parity);", ";", "race"),
        ("        __syncwarp();\n", "", "race"),
        ("                barrier_arrive(ready);\n", "", "deadlock"),
        ("row < tokens ? lse[from] * LOG2_E", "true ? lse[from] * LOG2_E", "out of bounds"),
        ("own > row ||", "own >= row ||", ": value "),
        (" || own < (int)starts[min(row, tokens - 1)]", "", ": value "),
        ("query < own + 63 ||", "query < own ||", ": value "),
        (
            "        products_wait<0>();\n        products_begin();\n        mix(dv",
            "        products_begin();\n        mix(dv",
            ": value ",
        ),
        ("is_last ? q : stages + next.stage * STAGE", "q", ": value "),
        ("mix(dk, ds_weights, q)", "mix(dk, p_weights, q)", ": value "),
        ("score_gradients(ds, p, own_values + BLOCK * 4)", "score_gradients(ds, p, own_values)", ": value "),
        ("store_rows(dk, SCALE, SCALE", "store_rows(dk, 1.0f, SCALE", ": value "),
    ];
    let queries = [
        ("            barrier_wait(empty + 8 * at.stage, at.parity ^ 1);\n", "", "barrier that expects 0 more"),
        ("        barrier_wait(full + 8 * at.stage, at.parity);\n", "", "race"),
        ("        products_wait<1>();\n", "", ": value "),
        ("        products_wait<0>();\n", "", ": value "),
        ("mean[i / 2 % 2]", "mean[0]", ": value "),
        ("shift[i / 2 % 2]", "shift[0]", ": value "),
        ("other > row + 8 * half", "other > row", ": value "),
        (" || other < start[half]", "", ": value "),
        ("mix(dq, weights, k)", "mix(dq, weights, v)", ": value "),
    ];
    on_the_cpu(|| {
        let forward = forward.into_iter().map(|defect| (HOPPER_FORWARD, defect));
        let keys = keys.into_iter().map(|defect| (HOPPER_KEYS, defect));
        let queries = queries.into_iter().map(|defect| (HOPPER_QUERIES, defect));
        expect_found(forward.chain(keys).chain(queries));
    });
}

/// The same in the kernel of a whole block: barriers of all cubes, of a cube and of a team, waits for copies, and places in shared
/// memory.
#[test]
fn whatever_is_missing_in_the_decoder_block_is_found() {
    let cases = [
        ("    grid_wait(barrier, arrived);\n\n    // Attention.", "\n    // Attention.", "race"),
        ("        grid_wait(barrier, grid_arrive(barrier));\n", "", "race"),
        ("    grid_wait(barrier, arrived);\n\n    // a =", "\n    // a =", "race"),
        ("    grid_wait(barrier, arrived);\n\n    // y =", "\n    // y =", "race"),
        ("                    copies_wait<DEPTH - 2>();\n", "", "race"),
        ("                    __syncwarp();\n", "", "race"),
        ("        __syncthreads();\n        const int steps", "        const int steps", "race"),
        ("    __syncthreads();\n    return amax;\n", "    return amax;\n", "race"),
        ("    team_barrier();\n    const int g", "    const int g", "race"),
        ("large[half] = transposed(pair_of(a, b))", "large[half] = pair_of(a, b)", "wrong"),
        ("upper(c, d), small[0], small[1]", "upper(c, d), small[1], small[0]", "wrong"),
        ("lower(c, d), upper(c, d), large", "upper(c, d), lower(c, d), large", "wrong"),
        ("turns[1], low.z, high.z", "turns[1], high.z, low.z", "wrong"),
        ("g + 8 < valid ? ", "true ? ", "wrong"),
        ("c.z, c.w, b[2], b[3]", "c.z, c.w, b[3], b[2]", "wrong"),
        ("at * 32 + n * 4 + lane % 4", "at * 32 + n * 4 + lane / 4 % 4", "wrong"),
        ("__shfl_xor_sync(0xFFFFFFFFu, own, 4)", "__shfl_xor_sync(0xFFFFFFFFu, own, 1)", "wrong"),
        ("min(first + each, count)", "min(first + each, count - 1)", "wrong"),
        ("page * PAGE + n % PAGE", "page * PAGE + n % 8", "wrong"),
        ("    const u32 half_way = 0x76807680u;", "    const u32 half_way = 0x76007600u;", "wrong"),
    ];
    let long = [
        ("mix.sums[i][h] *= before, ", "", "wrong"),
        ("mix.totals[h] * before + ", "mix.totals[h] + ", "wrong"),
        ("base += TEAM * KEYS", "base += 2 * TEAM * KEYS", "wrong"),
    ];
    let bytes = [
        ("0x7B807B80u", "0x7B007B00u", "wrong"),
        ("(apart & 0x00800080u) << 8", "0u", "wrong"),
        ("bf16_of_e4m3(eight.x >> 16)", "bf16_of_e4m3(eight.x)", "wrong"),
        ("bits >> 8 & 0x80u", "0u", "wrong"),
        ("pages[token * (int)info->pages_of_each", "pages[0 * (int)info->pages_of_each", "wrong"),
    ];
    on_the_cpu(|| {
        let long = long.into_iter().map(|defect| (DECODER_LONG, defect));
        let bytes = bytes.into_iter().map(|defect| (DECODER_BYTES, defect));
        expect_found(cases.into_iter().map(|defect| (DECODER, defect)).chain(long).chain(bytes));
    });
}

/// One cube does not arrive at a barrier of all cubes. The others end the launch after about a second: a GPU makes some 2e9 cycles
/// in this time. Without the trap, or with a limit that is a hundred times as long, they wait until the emulator ends the launch.
#[test]
fn a_barrier_of_all_cubes_that_is_not_passed_ends_the_launch() {
    const ARRIVAL: &str = "    u32 arrived = grid_arrive(barrier);\n";
    let absent = |text: &str| {
        let left = format!("    if (blockIdx.x == gridDim.x - 1) return;\n{ARRIVAL}");
        replaced(text, ARRIVAL, &left, 0)
    };
    on_the_cpu(|| {
        let error = changed(DECODER, absent).unwrap_err();
        let waited = error.split("trap: the unit ends the launch ").nth(1).and_then(|rest| rest.split(' ').next());
        let waited: Option<u64> = waited.and_then(|cycles| cycles.parse().ok());
        assert!(waited.is_some_and(|cycles| (1_000_000_000..3_000_000_000).contains(&cycles)), "{error}");
        for (old, new) in [("@P trap; ", ""), ("2000000000; ", "200000000000; ")] {
            let error = changed(DECODER, move |text| replaced(&absent(text), old, new, 0)).unwrap_err();
            assert!(error.contains("deadlock: 2 of 3 cubes wait for all"), "{new:?} for {old:?}: {error}");
        }
    });
}

/// Copies that are read before they are waited for (a wait for the phase before this one does not wait), and copies that
/// no barrier object counts.
#[test]
fn a_copy_that_nobody_waits_for_is_found() {
    on_the_cpu(|| {
        let defects =
            [(".wait_parity(", ".wait_parity(1 ^ ", "race"), ("__cp_async_arrive(shared", "(void)(shared", "race")];
        let subjects = [GEMM, GEMV_WINDOWS, FORWARD, BACKWARD_KV, BACKWARD_Q, DECODE];
        expect_found(subjects.into_iter().flat_map(|subject| defects.map(|defect| (subject, defect))));
    });
}

/// Every store goes one element too far: the last one leaves its buffer.
#[test]
fn a_store_outside_its_buffer_is_found() {
    let farther = |text: &str| -> String {
        let store = |line: &str| line.starts_with("buffer_") && line.contains("] = ");
        let line = |line: &str| if store(line) { line.replacen('[', "[1 + ", 1) } else { line.to_owned() };
        text.lines().map(|l| line(l) + "\n").collect()
    };
    on_the_cpu(|| {
        for subject in [GEMM, GEMV, FORWARD, BACKWARD_KV, BACKWARD_Q, DECODE, BLOCK_SCALED] {
            let error = changed(subject, farther).unwrap_err();
            assert!(error.contains("out of bounds: writes"), "{}: {error}", subject.0);
        }
    });
}

/// Every copy begins one chunk too far, or ends outside shared memory.
#[test]
fn a_copy_outside_its_buffer_is_found() {
    let changes = [("<16>(buffer_0 + ", "<16>(buffer_0 + 1 + "), ("shared_memory_0 + ", "shared_memory_0 + 16000 + ")];
    on_the_cpu(|| {
        for (old, new) in changes {
            let error = changed(GEMM, move |text| text.replace(old, new)).unwrap_err();
            assert!(error.contains("out of bounds"), "{error}");
        }
    });
}

/// The first product of a kernel takes the second register of its left operand twice.
#[test]
fn a_wrong_fragment_register_is_found() {
    let defect = (")[0], reinterpret_cast<const uint32*>", ")[1], reinterpret_cast<const uint32*>", ": value ");
    let subjects = [GEMM, GEMV, GEMV_WINDOWS, FORWARD, BACKWARD_KV, BACKWARD_Q, DECODE, BLOCK_SCALED];
    on_the_cpu(|| expect_found(subjects.map(|subject| (subject, defect))));
}

/// The first ldmatrix of a kernel reads rows that are eight values farther.
#[test]
fn a_wrong_fragment_address_is_found() {
    on_the_cpu(|| {
        for subject in [GEMM, FORWARD, BACKWARD_KV, BACKWARD_Q, DECODE] {
            let error = changed(subject, |text| {
                let call = text.find("(reinterpret_cast<uint32&>(").expect("an ldmatrix");
                let end = call + text[call..].find(");\n").expect("the call ends");
                format!("{} + 1{}", &text[..end], &text[end..])
            });
            let error = error.expect_err("other rows are read");
            assert!(!error.contains(NOT_COMPILED), "{}: {error}", subject.0);
        }
    });
}
