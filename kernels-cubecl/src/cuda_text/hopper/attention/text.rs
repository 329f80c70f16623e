//! The CUDA C++ of one form: instructions, definitions, and the texts beside this file.

use super::form::{HopperAttentionForm, Kernel, ROWS};
use crate::{
    cuda_text::Written,
    cuda_text::hopper::text::{define, from_registers, from_shared, instructions},
};

impl Kernel {
    /// The matrices that the copy engine moves, in the order of the kernel's parameters.
    pub(super) fn maps(self) -> &'static [&'static str] {
        match self {
            Self::Forward => &["q", "k", "v", "y"],
            Self::Keys => &["q", "k", "v", "dy", "dk", "dv"],
            Self::Queries => &["q", "k", "v", "dy", "dq"],
        }
    }

    /// The other buffers, as parameters.
    fn buffers(self) -> &'static [&'static str] {
        match self {
            Self::Forward => &["const unsigned* starts", "float* lse"],
            Self::Keys => &["const float* lse", "const float* delta", "const unsigned* starts", "const unsigned* ends"],
            Self::Queries => &["const float* lse", "const float* delta", "const unsigned* starts"],
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Forward => include_str!("forward.cuh"),
            Self::Keys => include_str!("keys.cuh"),
            Self::Queries => include_str!("queries.cuh"),
        }
    }
}

impl Written for HopperAttentionForm {
    /// Three warpgroups.
    const UNITS: u32 = 384;

    fn entry(&self) -> &'static str {
        match self.kernel {
            Kernel::Forward => "hopper_attention_forward",
            Kernel::Keys => "hopper_attention_keys",
            Kernel::Queries => "hopper_attention_queries",
        }
    }

    fn shared(&self) -> usize {
        self.shared_bytes()
    }

    fn text(&self) -> String {
        let scores = from_shared("multiply_scores", self.block(), self.number, [false, false]);
        let mixing = from_registers("multiply_mixing", self.heads.dim as usize, self.number);
        let parts = [&instructions(self.number), &definitions(self), &scores, &mixing, include_str!("tiles.cuh")];
        parts.map(|part| part.to_owned() + "\n").concat() + self.kernel.text()
    }
}

fn definitions(form: &HopperAttentionForm) -> String {
    let mut out = String::from("struct Info {\n    long long queries, past;\n};\n");
    let numbers = [
        ("DIM", form.heads.dim as usize),
        ("GROUP", form.heads.group() as usize),
        ("ROWS", ROWS),
        ("BLOCK", form.block()),
        ("STAGES", form.stages()),
    ];
    for (name, number) in numbers {
        define(&mut out, name, &number.to_string());
    }
    define(&mut out, "SCALE", &format!("{:e}f", 1.0 / (form.heads.dim as f32).sqrt()));
    define(&mut out, "PARAMETERS", &parameters(form.kernel));
    out
}

/// The parameters, in the order in which the CUDA runtime of CubeCL passes them: tensor maps, the buffers behind them,
/// other buffers, numbers.
fn parameters(kernel: Kernel) -> String {
    let maps = kernel.maps().iter().map(|name| format!("const __grid_constant__ CUtensorMap {name}_map"));
    let behind = kernel.maps().iter().map(|name| format!("const void* buffer_of_{name}"));
    let buffers = kernel.buffers().iter().map(ToString::to_string);
    let info = ["const __grid_constant__ Info info".to_owned()];
    maps.chain(behind).chain(buffers).chain(info).collect::<Vec<_>>().join(", ")
}
