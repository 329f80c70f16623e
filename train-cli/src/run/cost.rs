//! How much loss the choices of a run cost, measured by pre-training a model of 15.7 million parameters
//! (doc/notebook/training.md). The costs differ for another model or other data, but the order of the choices should hold.

use backend_nvfp4::{MasterKind, Recipe, StateKind};

/// The measured costs of a recipe and of what is stored; `None` for a run that costs nothing. `dense` are the blocks that compute
/// in bf16, of how many.
pub(super) fn of(recipe: Recipe, dense: (usize, usize), master: MasterKind, states: StateKind) -> Option<String> {
    let (master, states) = (of_master(master).map(str::to_owned), of_states(states).map(str::to_owned));
    let parts: Vec<String> = [of_recipe(recipe, dense), master, states].into_iter().flatten().collect();
    (!parts.is_empty())
        .then(|| format!("loss of a small model, against f32 storage and no quantization: {}", parts.join(" · ")))
}

/// Means of three seeds, after 2,048 steps (2026-11-29).
fn of_recipe(recipe: Recipe, (dense, all): (usize, usize)) -> Option<String> {
    let measured = match (recipe, dense) {
        (Recipe::Bf16, _) => return None,
        (Recipe::W4, _) => return Some("recipe w4 +0.2 %".to_owned()),
        (Recipe::Nvfp4(_), 0) => return Some("recipe nvfp4 +1.2 % with no block in bf16".to_owned()),
        (Recipe::W4a4, _) => "recipe w4a4 +1.0 %",
        (Recipe::Nvfp4(_), _) => "recipe nvfp4 +0.7 %",
    };
    let here = if dense == 0 { ", which was not measured" } else { "" };
    Some(format!("{measured} with 2 of 8 blocks in bf16 (here {dense} of {all}{here})"))
}

/// 1,280 steps; bf16 and bf16-nearest are means of three seeds, bf16-residual is one seed. NVFP4 has one run of 1,280 steps, and
/// two of 2,048.
fn of_master(master: MasterKind) -> Option<&'static str> {
    match master {
        MasterKind::F32 => None,
        MasterKind::BF16 => Some("bf16 master weights +0.03 %"),
        MasterKind::BF16_RESIDUAL => Some("bf16-residual master weights +0.3 %"),
        MasterKind::BF16_NEAREST => Some("bf16-nearest master weights +2.1 %"),
        MasterKind::Nvfp4 => Some("NVFP4 master weights +9.8 to +11.5 %"),
    }
}

/// 1,280 steps; int8 is the mean of three seeds, int4 two seeds with opposite signs.
fn of_states(states: StateKind) -> Option<&'static str> {
    match states {
        StateKind::F32 => None,
        StateKind::Bf16 => Some("bf16 optimizer states not measured"),
        StateKind::Int8 => Some("int8 optimizer states 0.0 %"),
        StateKind::Int4 => Some("int4 optimizer states -0.6 to +0.6 %"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend_nvfp4::Nvfp4Parts;

    #[test]
    fn each_choice_that_costs_something_is_named() {
        assert_eq!(of(Recipe::Bf16, (0, 8), MasterKind::F32, StateKind::F32), None);
        // What was measured is one thing, and what this run does another.
        let text = of(Recipe::W4a4, (0, 36), MasterKind::F32, StateKind::F32).unwrap_or_default();
        let said = "recipe w4a4 +1.0 % with 2 of 8 blocks in bf16 (here 0 of 36, which was not measured)";
        assert!(text.ends_with(said), "{text}");
        let text = of(Recipe::W4, (0, 8), MasterKind::Nvfp4, StateKind::Int4).unwrap_or_default();
        assert!(["w4 +0.2 %", "NVFP4 master weights", "int4"].iter().all(|part| text.contains(part)), "{text}");
    }

    /// A run of recipe nvfp4 without a block in bf16 shows the price that was measured for that, and not that of the default.
    #[test]
    fn nvfp4_without_a_block_in_bf16_has_a_price_of_its_own() {
        let recipe = Recipe::Nvfp4(Nvfp4Parts::ALL);
        let cost = |dense| of(recipe, (dense, 3), MasterKind::F32, StateKind::F32).unwrap_or_default();
        assert!(cost(1).ends_with("recipe nvfp4 +0.7 % with 2 of 8 blocks in bf16 (here 1 of 3)"), "{}", cost(1));
        let none = cost(0);
        assert!(none.ends_with("recipe nvfp4 +1.2 % with no block in bf16") && !none.contains("0.7 %"), "{none}");
    }
}
