//! What every text begins with: the struct of a tensor map, the instructions as functions, and the products of a
//! warpgroup, whose instruction names its sums one by one.

use super::Number;
use std::fmt::Write;

/// The struct of a tensor map and the functions of `instructions.cuh`. Results are rounded to `result`.
pub(super) fn instructions(result: Number) -> String {
    let map = "struct __align__(64) CUtensorMap {\n    unsigned long long words[16];\n};\n";
    map.to_owned() + &include_str!("instructions.cuh").replace("@RESULT@", result.ptx())
}

/// `#define name value`.
pub(super) fn define(out: &mut String, name: &str, value: &str) {
    writeln!(out, "#define {name} {value}").expect("a string can be written to");
}

/// The function `name<ADD>(sums, a, b)`: `sums = a b`, or with `ADD` 1 `sums += a b`, for 64 rows, `cols` columns and 16
/// summed values. `a` and `b` are descriptors of shared memory. `across` says of each whether it lies across.
pub(super) fn from_shared(name: &str, cols: usize, kind: Number, [a_across, b_across]: [bool; 2]) -> String {
    let (a, b) = (usize::from(a_across), usize::from(b_across));
    product(name, cols, kind, "unsigned long long a", &["\"l\"(a)"], &format!("\"n\"({a}), \"n\"({b})"))
}

/// The same with `a` in registers: four words, each of two values that lie along. `b` lies across.
pub(super) fn from_registers(name: &str, cols: usize, kind: Number) -> String {
    let words: Vec<String> = (0..4).map(|n| format!("\"r\"(a[{n}])")).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    product(name, cols, kind, "const unsigned* a", &words, "\"n\"(1)")
}

/// The operands of the instruction after the sums: a, b, whether it adds to the sums, the signs of a and b, and whether the
/// operands in shared memory lie across.
fn product(name: &str, cols: usize, kind: Number, a: &str, a_operands: &[&str], across: &str) -> String {
    let count = cols / 2;
    let list =
        |range: std::ops::Range<usize>, one: &dyn Fn(usize) -> String| range.map(one).collect::<Vec<_>>().join(", ");
    let place = |n: usize| format!("%{n}");
    let (registers, sums) = (list(0..count, &place), list(0..count, &|n| format!("\"+f\"(sums[{n}])")));
    let left = match a_operands.len() {
        1 => place(count),
        words => format!("{{{}}}", list(count..count + words, &place)),
    };
    let first = count + a_operands.len();
    let others = list(first..first + 4 + across.matches("\"n\"").count(), &place);
    let (kind, a_operands) = (kind.ptx(), a_operands.join(", "));
    format!(
        "template <int ADD>\n\
         __device__ __forceinline__ void {name}(float (&sums)[{count}], {a}, unsigned long long b) {{\n\
         \x20   asm volatile(\"wgmma.mma_async.sync.aligned.m64n{cols}k16.f32.{kind}.{kind} {{{registers}}}, {left}, {others};\"\n\
         \x20                : {sums}\n\
         \x20                : {a_operands}, \"l\"(b), \"n\"(ADD), \"n\"(1), \"n\"(1), {across});\n\
         }}\n"
    )
}
