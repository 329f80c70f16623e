//! The CUDA C++ of one form: definitions, and the texts beside this file.

use super::args::PAGE;
use super::form::{DecoderForm, EVEN, SHARED_FOUND, SLOT, SPLITS, TEAM, UNITS};
use crate::cuda_text::Written;
use std::fmt::Write;

/// The weights of each product, as the text names them.
const WEIGHTS: [(&str, &[&str]); 4] =
    [("QKV", &["q", "k", "v"]), ("O", &["o"]), ("GATE_UP", &["gate", "up"]), ("DOWN", &["down"])];

impl Written for DecoderForm {
    const UNITS: u32 = UNITS as u32;

    fn entry(&self) -> &'static str {
        "decoder_block"
    }

    fn shared(&self) -> usize {
        self.shared_bytes()
    }

    fn text(&self) -> String {
        let texts = [
            include_str!("numbers.cuh"),
            include_str!("products.cuh"),
            include_str!("attention.cuh"),
            include_str!("block.cuh"),
        ];
        definitions(self) + &texts.join("\n")
    }
}

fn definitions(form: &DecoderForm) -> String {
    let mut out = String::new();
    let (eps, scale) = (f32::from_bits(form.eps), std::f32::consts::LOG2_E / (form.head_dim as f32).sqrt());
    let numbers = [
        ("UNITS", UNITS),
        ("CUBES", form.cubes),
        ("TOKENS", form.tokens),
        ("D", form.hidden),
        ("F", form.intermediate),
        ("H", form.heads),
        ("G", form.kv_heads),
        ("E", form.head_dim),
        ("PART", form.heads_together),
        ("PAGE", PAGE),
        ("SPLITS", SPLITS),
        ("TEAM", TEAM),
        ("TEAM_BYTES", form.team_bytes()),
        ("CHUNK", form.chunk),
        ("X_ROWS", form.rows()),
        ("X_STRIDE", form.stride()),
        ("SLOT", SLOT),
        ("DEPTH", form.depth),
        ("EVEN", EVEN),
        ("SHARED_SUMS", form.sums_bytes()),
        ("SHARED_FOUND", SHARED_FOUND),
    ];
    // Constants, not macros: a macro `D` or `E` would also replace the names of template parameters.
    for (name, number) in numbers {
        writeln!(out, "constexpr int {name} = {number};").expect(WRITES);
    }
    writeln!(out, "typedef {} CacheNumber;", if form.cache_bytes { "unsigned char" } else { "unsigned short" })
        .expect(WRITES);
    writeln!(out, "constexpr bool PREPARED = {};", form.prepares()).expect(WRITES);
    writeln!(out, "constexpr float EPS = {eps:e}f, SCORE_SCALE = {scale:e}f;").expect(WRITES);
    for (product, (name, weights)) in form.products.iter().zip(WEIGHTS) {
        let (codes, split, scales) = (product.codes, product.split, product.scales);
        writeln!(out, "constexpr bool {name}_CODES = {codes};").expect(WRITES);
        writeln!(out, "constexpr int {name}_SPLIT = {split}, {name}_SCALES = {scales};").expect(WRITES);
        for weight in weights {
            let upper = weight.to_uppercase();
            let [numbers, scales, tensor_scale] = if codes {
                [format!("{weight}_codes"), format!("{weight}_scales"), format!("{weight}_global[0]")]
            } else {
                [format!("{weight}_values"), "nullptr".into(), "1.0f".into()]
            };
            writeln!(out, "#define {upper}_NUMBERS {numbers}\n#define {upper}_BLOCK_SCALES {scales}").expect(WRITES);
            writeln!(out, "#define {upper}_SCALE {tensor_scale}").expect(WRITES);
        }
    }
    out.push_str("struct Info {\n    long long tokens, pages_of_each, past[TOKENS], scales[4][2];\n};\n");
    writeln!(out, "#define PARAMETERS {}", parameters(form)).expect(WRITES);
    out
}

/// The parameters, in the order in which the launch passes buffers; numbers are the last.
fn parameters(form: &DecoderForm) -> String {
    let mut all: Vec<String> = ["const u16* x", "u16* y"].map(String::from).into();
    all.extend(
        ["input_norm", "q_norm", "k_norm", "post_norm", "cosines", "sines"].map(|n| format!("const float* {n}")),
    );
    all.push("const u32* lines".into());
    for (product, (_, weights)) in form.products.iter().zip(WEIGHTS) {
        for weight in weights {
            if product.codes {
                all.push(format!(
                    "const void* {weight}_codes, const void* {weight}_scales, const float* {weight}_global"
                ));
            } else {
                all.push(format!("const void* {weight}_values"));
            }
        }
    }
    all.extend(["CacheNumber* keys", "CacheNumber* values", "const u32* pages"].map(String::from));
    all.extend(
        ["u32* barrier", "u16* qkv", "u16* mixed", "u16* h", "u16* gated", "u16* prepared", "float* shares"]
            .map(String::from),
    );
    all.push("const __grid_constant__ Info info".into());
    all.join(", ")
}

const WRITES: &str = "a string can be written to";
