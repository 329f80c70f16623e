//! `parity --against`: two models, or one model under two recipes, side by side on one prompt. For the embedding, each block,
//! the final norm and the logits it prints how far the two are apart, and it names the first layer in which they differ by more
//! than rounding. For that layer it names the weight that differs most. The likeliest first tokens of both come last.

use crate::{
    CliError,
    args::ParityArgs,
    device::{self, Job},
    report,
    run::stored_model::StoredModel,
    tolerance,
};
use backend_nvfp4::{DeviceServices, Nvfp4Kernels, Precision, Recipe};
use model_qwen3::{
    bytes::FloatType,
    chat_template::RenderOptions,
    model::{Places, Qwen3, ids_tensor},
    names,
    repack::{Repacked, StoreAs},
    sampling::Logprobs,
    tensors::{Stored, Tensors},
    weights::to_host,
};
use serde_json::json;

/// Number of first tokens that are shown.
const TOP: usize = 10;

/// Compares what the flags name and prints what was found.
///
/// # Errors
/// If a model is broken, the two have different shapes, or they differ by more than rounding explains.
pub(super) fn run(args: &ParityArgs) -> Result<(), CliError> {
    let Some(prompt) = &args.prompt else {
        return Err(CliError::Usage(
            "--prompt is missing: two models are compared on a prompt; give --prompt TEXT".into(),
        ));
    };
    if let Some(tolerance) = args.tolerance.filter(|tolerance| !(0.0..=10.0).contains(tolerance)) {
        return Err(CliError::Usage(format!("--tolerance {tolerance}: the value must be between 0 and 10")));
    }
    let tokenizer = args.tokenizer.as_deref();
    let left = Side { stored: StoredModel::open("--model", &args.model, tokenizer)?, recipe: args.recipe };
    let (flag, other) = args.against.as_ref().map_or(("--model", &args.model), |other| ("--against", other));
    let right = Side { stored: StoredModel::open(flag, other, tokenizer)?, recipe: args.against_recipe };
    check_shapes(&left.stored, &right.stored)?;
    let ids = prompt_ids(prompt, args.raw, &left.stored)?;
    let found = device::run(args.device, args.compute_dtype, Compare { left: &left, right: &right, ids: &ids, args })?;
    found.print(args.json, &left.stored)?;
    match found.failure() {
        Some(reason) => Err(CliError::corrupt(&args.model, format!("parity failed: {reason}"))),
        None => Ok(()),
    }
}

/// A model and the recipe under which it computes; None is the one that it runs with.
struct Side {
    stored: StoredModel,
    recipe: Option<Recipe>,
}

impl Side {
    fn load<B: Nvfp4Kernels>(&self, precision: Precision, device: &B::Device) -> Result<(Qwen3<B>, Rounded), CliError> {
        let stored = &self.stored;
        match self.recipe {
            Some(recipe) => {
                let weights = recipe.packs_weights() || stored.is_stored_packed();
                let form = Rounded { weights, activations: recipe.packs_activations() };
                Ok((stored.load_under(recipe, precision, device)?, form))
            }
            None => {
                let recipe = stored.recipe(None)?;
                let packed = stored.is_packed();
                let form = Rounded { weights: packed, activations: packed && recipe.packs_activations() };
                Ok((stored.load(recipe, precision, device)?, form))
            }
        }
    }
}

/// What of a model is rounded to NVFP4.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Rounded {
    weights: bool,
    activations: bool,
}

/// Refuses models that have other layers.
fn check_shapes(left: &StoredModel, right: &StoredModel) -> Result<(), CliError> {
    let (a, b) = (&left.config, &right.config);
    for (name, a, b) in [
        ("vocab_size", a.vocab_size, b.vocab_size),
        ("hidden_size", a.hidden_size, b.hidden_size),
        ("num_hidden_layers", a.num_hidden_layers, b.num_hidden_layers),
    ] {
        if a != b {
            let text =
                format!("{name} is {a} in the model and {b} in the other; only models of one shape can be compared");
            return Err(CliError::Usage(format!("--against: {text}")));
        }
    }
    Ok(())
}

fn prompt_ids(prompt: &str, raw: bool, stored: &StoredModel) -> Result<Vec<u32>, CliError> {
    let text = &stored.text;
    let ids = if raw {
        text.tokenizer.encode(prompt)?
    } else {
        let options =
            RenderOptions { add_generation_prompt: true, enable_thinking: text.thinking, ..Default::default() };
        text.tokenizer.encode(&text.template.render(&[json!({"role": "user", "content": prompt})], options)?)?
    };
    let most = stored.config.max_position_embeddings;
    if ids.is_empty() || ids.len() > most {
        let tokens = report::count(ids.len(), "token");
        return Err(CliError::Usage(format!("--prompt: it has {tokens}; the model takes 1 to {most}")));
    }
    Ok(ids)
}

struct Compare<'a> {
    left: &'a Side,
    right: &'a Side,
    ids: &'a [u32],
    args: &'a ParityArgs,
}

impl Job for Compare<'_> {
    type Output = Found;

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, precision: Precision) -> Result<Found, CliError> {
        // One model after the other, so that two of them need no more memory than one.
        let computed = |side: &Side| -> Result<_, CliError> {
            let (model, form) = side.load::<B>(precision, &device)?;
            Ok((values(&model, self.ids)?, form))
        };
        let ((left, a), (right, b)) = (computed(self.left)?, computed(self.right)?);
        let blocks = self.left.stored.config.num_hidden_layers;
        let rounding = if a == b {
            tolerance::hidden(precision, blocks).max(stored_apart(&self.left.stored, &self.right.stored, blocks))
        } else {
            tolerance::NVFP4
        };
        let limit = self.args.tolerance.unwrap_or(rounding);
        let layers: Vec<ComparedValues> = left
            .iter()
            .zip(&right)
            .map(|((name, ours), (_, theirs))| ComparedValues::of(name, ours, theirs, limit))
            .collect();
        let first = layers.iter().find(|layer| layer.fails()).map(|layer| layer.name.clone());
        let weight = match &first {
            Some(layer) => worst_weight(&self.left.stored, &self.right.stored, layer)?,
            None => None,
        };
        let top = |values: &[(String, Vec<f32>)]| {
            let logits = values.last().map_or(&[][..], |(_, logits)| logits);
            Logprobs::of(logits, 0, TOP).top
        };
        Ok(Found { tops: [top(&left), top(&right)], layers, first, weight, limit })
    }
}

/// The largest bound of a weight that two models store in different float types, or 0 if there is none.
fn stored_apart(left: &StoredModel, right: &StoredModel, blocks: usize) -> f64 {
    let float = |stored: &StoredModel, name: &str| match stored.with_tensors(|tensors| tensors.stored(name)) {
        Some(Stored::Dense { float, .. }) => Some(float),
        _ => None,
    };
    let names = left.with_tensors(|tensors| tensors.names());
    let both = names.iter().filter_map(|name| Some([float(left, name)?, float(right, name)?]));
    both.filter(|[a, b]| a != b).flatten().map(|float| tolerance::stored(float, blocks)).fold(0.0, f64::max)
}

/// What a model computes for a prompt, layer by layer: all tokens, and the logits of the last one.
fn values<B: Nvfp4Kernels>(model: &Qwen3<B>, ids: &[u32]) -> Result<Vec<(String, Vec<f32>)>, CliError> {
    let input = ids_tensor(&[ids.to_vec()], model.config(), &model.device())?;
    let ctx = model.context(&[Places::of_rows([1, ids.len()])]);
    let mut h = model.embed(input);
    let mut found = vec![(names::layer(names::EMBEDDING).to_owned(), to_host(h.clone())?)];
    for (i, block) in model.layers.iter().enumerate() {
        h = block.forward(h, &model.of_block(&ctx, i));
        found.push((names::block(i), to_host(h.clone())?));
    }
    let h = model.final_norm(h);
    found.push((names::layer(names::FINAL_NORM).to_owned(), to_host(h.clone())?));
    let last = h.slice(ids.len() - 1..ids.len());
    found.push(("logits".to_owned(), to_host(model.logits(last))?));
    Ok(found)
}

/// How far two models are apart in the values that one of their parts gives.
#[derive(Debug, Clone)]
struct ComparedValues {
    name: String,
    /// Mean of the absolute differences.
    mean: f64,
    /// Largest absolute difference.
    max: f64,
    /// `‖a - b‖ / ‖b‖`.
    relative: f64,
    cosine: f64,
    /// `relative` over the largest one that passes.
    of_bound: f64,
}

impl ComparedValues {
    fn of(name: &str, ours: &[f32], theirs: &[f32], limit: f64) -> Self {
        let (mut sum, mut max, mut squares, mut dot, mut a2, mut b2) = (0.0, 0.0f64, 0.0, 0.0, 0.0, 0.0);
        for (a, b) in ours.iter().zip(theirs) {
            let (a, b) = (f64::from(*a), f64::from(*b));
            let d = if a.is_finite() && b.is_finite() { (a - b).abs() } else { f64::INFINITY };
            sum += d;
            max = max.max(d);
            squares += d * d;
            dot += a * b;
            a2 += a * a;
            b2 += b * b;
        }
        let tiny = f64::MIN_POSITIVE;
        let relative = (squares / b2.max(tiny)).sqrt();
        // A limit of 0 lets equal values pass.
        let of_bound = if relative == 0.0 { 0.0 } else { relative / limit };
        let cosine = dot / (a2.sqrt() * b2.sqrt()).max(tiny);
        Self { name: name.to_owned(), mean: sum / ours.len().max(1) as f64, max, relative, cosine, of_bound }
    }

    fn fails(&self) -> bool {
        self.of_bound.is_nan() || self.of_bound > 1.0
    }
}

/// The weight of a layer that differs most between two models, and by how much, relative to its norm. None if all of them are
/// equal, or the two models store other tensors.
fn worst_weight(left: &StoredModel, right: &StoredModel, layer: &str) -> Result<Option<(String, f64)>, CliError> {
    let of = |name: &str| match layer {
        "logits" => name == names::HEAD,
        layer => name.strip_prefix(layer).is_some_and(|rest| rest.starts_with('.')),
    };
    let read = |stored: &StoredModel, name: &str| {
        stored.with_tensors(|tensors| match tensors.stored(name) {
            Some(_) => Repacked::new(tensors, StoreAs::Float(FloatType::F32)).read_dense(name).map(Some),
            None => Ok(None),
        })
    };
    let mut worst: Option<(String, f64)> = None;
    for name in left.with_tensors(|tensors| tensors.names()).into_iter().filter(|name| of(name)) {
        let (Some(a), Some(b)) = (read(left, &name)?, read(right, &name)?) else { continue };
        let relative = ComparedValues::of(&name, &a, &b, 1.0).relative;
        if a.len() == b.len() && relative > worst.as_ref().map_or(0.0, |(_, most)| *most) {
            worst = Some((name, relative));
        }
    }
    Ok(worst)
}

/// What a comparison found.
struct Found {
    layers: Vec<ComparedValues>,
    /// The likeliest first tokens of both, with the logarithms of their probabilities.
    tops: [Vec<(u32, f32)>; 2],
    /// The first layer that differs by more than rounding.
    first: Option<String>,
    /// The weight of that layer that differs most.
    weight: Option<(String, f64)>,
    /// The largest relative difference that passes.
    limit: f64,
}

impl Found {
    fn worst(&self) -> Option<&ComparedValues> {
        self.layers.iter().max_by(|a, b| a.of_bound.total_cmp(&b.of_bound))
    }

    fn failure(&self) -> Option<String> {
        let first = self.first.as_ref()?;
        let worst = self.worst()?;
        let weight = match &self.weight {
            Some((name, relative)) => format!("; its weight {name} differs by {relative:.3e}, most of that layer"),
            None => String::new(),
        };
        Some(format!(
            "the first layer that differs is {first}{weight}; {} differs most, by {:.3} times its bound",
            worst.name, worst.of_bound
        ))
    }

    fn print(&self, json: bool, stored: &StoredModel) -> Result<(), CliError> {
        for layer in &self.layers {
            let ComparedValues { name, mean, max, relative, cosine, of_bound } = layer;
            report::result(match json {
                true => json!({
                    "layer": name, "mean": mean, "max": max, "relative": relative, "cosine": cosine, "of_bound": of_bound,
                })
                .to_string(),
                false => format!(
                    "{name:<24} mean {mean:.3e}  max {max:.3e}  relative {relative:.3e}  cosine {cosine:.6}  {of_bound:.3} of \
                     bound"
                ),
            });
        }
        let shown = |(id, logprob): &(u32, f32)| -> Result<_, CliError> {
            let token = stored.text.tokenizer.decode_all(&[*id])?;
            Ok((json!({"id": id, "token": token, "logprob": logprob}), format!("{token:?} {:.4}", logprob.exp())))
        };
        for (rank, (ours, theirs)) in self.tops[0].iter().zip(&self.tops[1]).enumerate() {
            let ((a, left), (b, right)) = (shown(ours)?, shown(theirs)?);
            report::result(match json {
                true => json!({"rank": rank + 1, "model": a, "against": b}).to_string(),
                false => format!("first token {:>2}  {left:<32} {right}", rank + 1),
            });
        }
        let failure = self.failure();
        let verdict = if failure.is_none() { "PASS" } else { "FAIL" };
        let worst = self.worst().map(|layer| layer.name.as_str()).unwrap_or_default();
        report::result(match json {
            true => json!({
                "verdict": verdict, "worst": worst, "limit": self.limit, "first_divergent": self.first,
                "weight": self.weight.as_ref().map(|(name, _)| name), "failure": failure,
            })
            .to_string(),
            false => format!("{verdict} · nearest to its bound of {:.1e}: {worst}", self.limit),
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::ComparedValues;

    #[test]
    fn differences_are_relative_and_nan_fails() {
        let layer = ComparedValues::of("x", &[3.0, 4.5], &[3.0, 4.0], 0.2);
        assert_eq!((layer.mean, layer.max, layer.relative, layer.of_bound), (0.25, 0.5, 0.1, 0.5));
        assert!(!layer.fails() && ComparedValues::of("x", &[f32::NAN, 4.0], &[3.0, 4.0], 0.2).fails());
        let turned = ComparedValues::of("x", &[0.0, 1.0], &[1.0, 0.0], 0.2);
        assert!(turned.cosine == 0.0 && turned.fails());
        let equal = ComparedValues::of("x", &[3.0], &[3.0], 0.0);
        assert!(!equal.fails() && (equal.cosine - 1.0).abs() < 1e-12);
    }
}
