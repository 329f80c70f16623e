//! The CUDA C++ of one form: instructions, definitions, and the text beside this file.

use super::form::{HopperGemmForm, Mapped};
use crate::{
    cuda_text::Written,
    cuda_text::hopper::{
        Number,
        text::{define, from_shared, instructions},
    },
};

impl Written for HopperGemmForm {
    /// Three warpgroups.
    const UNITS: u32 = 384;

    fn entry(&self) -> &'static str {
        "hopper_gemm"
    }

    fn shared(&self) -> usize {
        self.shared_bytes()
    }

    fn text(&self) -> String {
        let multiply = from_shared("multiply", self.cols, self.operand, [self.a_across, self.b_across]);
        [&instructions(self.result), &definitions(self), &multiply, include_str!("gemm.cuh")].join("\n")
    }
}

fn definitions(form: &HopperGemmForm) -> String {
    let mut out = String::new();
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
        ("MEASURED", form.measured.into()),
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
    if form.measured {
        define(&mut out, "SQUARES(p)", &choice(form.results(), |p| format!("squares{p}")));
    }
    out
}

/// The parameters, in the order in which the CUDA runtime of CubeCL passes them: tensor maps, the buffers behind them,
/// other buffers, numbers.
fn parameters(form: &HopperGemmForm) -> String {
    let maps: Vec<String> = form.maps().into_iter().map(|(of, n)| format!("{}{n}", of.name())).collect();
    let mut all: Vec<String> = maps.iter().map(|map| format!("const __grid_constant__ CUtensorMap {map}")).collect();
    // With one product, the values that a result begins with are read by their address.
    all.extend(maps.iter().map(|map| match map.as_str() {
        "out0" if form.accumulate => "const float* out_values".into(),
        _ => format!("const void* buffer_of_{map}"),
    }));
    all.extend((0..form.parts * form.scales).map(|n| format!("const float* scale{n}")));
    all.extend((0..if form.measured { form.results() } else { 0 }).map(|n| format!("float* squares{n}")));
    all.push("const __grid_constant__ Info info".into());
    all.join(", ")
}

/// An expression that is `of(p)`, or `of(0)` for every `p` if there is one only.
fn choice(count: usize, of: impl Fn(usize) -> String) -> String {
    let last = of(count - 1);
    let cases = (0..count - 1).map(|n| format!("(p) == {n} ? {} : ", of(n)));
    format!("({}{last})", cases.collect::<String>())
}
