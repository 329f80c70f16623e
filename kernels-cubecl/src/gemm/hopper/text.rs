//! The CUDA C++ of one form: definitions, the products' instruction, and the two texts beside this file.

use super::form::{Form, Mapped, Number, STAGE_DEPTH};
use crate::cuda_text::Written;
use std::fmt::Write;

impl Written for Form {
    const ENTRY: &'static str = "hopper_gemm";
    /// Three warpgroups.
    const UNITS: u32 = 384;

    fn shared(&self) -> usize {
        self.shared_bytes()
    }

    fn text(&self) -> String {
        let instructions = include_str!("instructions.cuh").replace("@RESULT@", self.result.ptx());
        [&definitions(self), &instructions, &multiply_add(self), include_str!("gemm.cuh")].join("\n")
    }
}

fn definitions(form: &Form) -> String {
    let mut out = String::from("struct __align__(64) CUtensorMap {\n    unsigned long long words[16];\n};\n");
    let parts = form.parts;
    let numbers = [
        ("COLS", form.cols),
        ("STAGES", form.stages()),
        ("PARTS", parts),
        ("A_ACROSS", form.a_across.into()),
        ("B_ACROSS", form.b_across.into()),
        ("SUMMED", form.summed.into()),
        ("SCALED", (form.scales > 0).into()),
        ("ACCUMULATE", form.accumulate.into()),
        ("RESULT_F32", (form.result == Number::F32).into()),
    ];
    for (name, number) in numbers {
        define(&mut out, name, &number.to_string());
    }
    out.push_str("struct Part {\n    long long i_len, j_len, r_len;\n};\nstruct Info {\n    Part parts[PARTS];\n};\n");
    define(&mut out, "PARAMETERS", &parameters(form));
    for (name, of) in [("A", Mapped::A), ("B", Mapped::B), ("OUT", Mapped::Out), ("EDGE", Mapped::Edge)] {
        let count = form.maps().iter().filter(|(other, _)| *other == of).count();
        let map = if count == 0 { "nullptr".into() } else { choice(count, |n| format!("&{}{n}", of.name())) };
        define(&mut out, &format!("{name}_MAP(p)"), &map);
    }
    let product = |p: usize| (0..form.scales).map(|s| format!("scale{}[0]", p * form.scales + s)).collect::<Vec<_>>();
    let factor = |p: usize| if form.scales == 0 { "1.0f".into() } else { product(p).join(" * ") };
    define(&mut out, "FACTOR(p)", &choice(parts, factor));
    out
}

/// The parameters, in the order in which the CUDA runtime of CubeCL passes them: tensor maps, the buffers behind them,
/// other buffers, numbers.
fn parameters(form: &Form) -> String {
    let maps: Vec<String> = form.maps().into_iter().map(|(of, n)| format!("{}{n}", of.name())).collect();
    let mut all: Vec<String> = maps.iter().map(|map| format!("const __grid_constant__ CUtensorMap {map}")).collect();
    // With one product, the values that a result begins with are read by their address.
    all.extend(maps.iter().map(|map| match map.as_str() {
        "out0" if form.accumulate => "const float* out_values".into(),
        _ => format!("const void* buffer_of_{map}"),
    }));
    all.extend((0..form.parts * form.scales).map(|n| format!("const float* scale{n}")));
    all.push("const __grid_constant__ Info info".into());
    all.join(", ")
}

/// An expression that is `of(p)`, or `of(0)` for every `p` if there is one only.
fn choice(count: usize, of: impl Fn(usize) -> String) -> String {
    let last = of(count - 1);
    let cases = (0..count - 1).map(|n| format!("(p) == {n} ? {} : ", of(n)));
    format!("({}{last})", cases.collect::<String>())
}

fn define(out: &mut String, name: &str, value: &str) {
    writeln!(out, "#define {name} {value}").expect("a string can be written to");
}

/// The function `sums += a b` for 64 rows, all columns of a tile and 16 values of r. `a` and `b` are descriptors.
fn multiply_add(form: &Form) -> String {
    let (cols, count) = (form.cols, form.cols / 2);
    let list = |one: &dyn Fn(usize) -> String| (0..count).map(one).collect::<Vec<_>>().join(", ");
    let registers = list(&|n| format!("%{n}"));
    let sums = list(&|n| format!("\"+f\"(sums[{n}])"));
    let others = (count..count + 7).map(|n| format!("%{n}")).collect::<Vec<_>>().join(", ");
    let kind = form.operand.ptx();
    format!(
        "// {STAGE_DEPTH} values of r are four of these. Literals: add to the sums; the signs of a and b; a and b lie across.\n\
         __device__ __forceinline__ void multiply_add(float (&sums)[{count}], unsigned long long a, unsigned long long b) {{\n\
         \x20   asm volatile(\"wgmma.mma_async.sync.aligned.m64n{cols}k16.f32.{kind}.{kind} {{{registers}}}, {others};\"\n\
         \x20                : {sums}\n\
         \x20                : \"l\"(a), \"l\"(b), \"n\"(1), \"n\"(1), \"n\"(1), \"n\"(A_ACROSS), \"n\"(B_ACROSS));\n\
         }}\n"
    )
}
