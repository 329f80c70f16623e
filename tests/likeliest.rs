//! The largest logits that a device finds are those of a sort on the host: over one part of a row and several, with equal
//! logits, infinities and NaN. Answers that are made together from them are those that are made alone, however many candidates
//! each of them asks for.

use crate::support::{Cube, Random, golden, on_gpu};
use backend_nvfp4::{Likeliest, LinearSpec, Precision, Recipe, Scaling, likeliest};
use burn::tensor::{Tensor, TensorData};
use burn_cubecl::CubeRuntime;
use model_qwen3::{
    config::Qwen3Config,
    container::Container,
    model::Qwen3,
    sampling::Sampling,
    session::{Answering, GenerateOptions, Session, step},
    weights::{self, Purpose},
};
use std::ops::ControlFlow;

#[test]
fn the_likeliest_tokens_are_those_of_a_sort_on_the_gpu() {
    on_gpu!(on_cube);
}

fn on_cube<R: CubeRuntime>() {
    let mut random = Random::new(5);
    for (rows, cols) in [(1, 7), (3, 2048), (2, 5000), (17, 12_345)] {
        let mut logits = random.normals(rows * cols, 3.0);
        // Equal ones at the borders of parts, and whole rows of few different values.
        logits[cols - 1] = 50.0;
        logits[0] = 50.0;
        if rows > 1 {
            logits[cols..2 * cols].iter_mut().for_each(|x| *x = x.round());
            logits[cols + 3] = f32::NEG_INFINITY;
            logits[cols + 4] = f32::INFINITY;
        }
        if rows > 2 {
            logits[2 * cols + cols / 2] = f32::NAN;
        }
        let x = Tensor::<Cube<R>, 2>::from_data(TensorData::new(logits.clone(), [rows, cols]), &R::Device::default());
        for count in [1, 5, 64] {
            let Some(found) = likeliest(&x, count).unwrap() else {
                assert!(count > cols, "{count} of {cols}");
                continue;
            };
            for (n, (row, found)) in logits.chunks(cols).zip(found).enumerate() {
                let mut order: Vec<u32> = (0..cols as u32).filter(|i| !row[*i as usize].is_nan()).collect();
                order.sort_by(|a, b| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b)));
                let tokens = order.into_iter().take(count).map(|i| (i, row[i as usize])).collect();
                let expected = Likeliest { tokens, has_nan: row.iter().any(|x| x.is_nan()) };
                assert_eq!(found, expected, "row {n} of {rows} x {cols}, {count} values");
            }
        }
    }
}

#[test]
fn answers_with_other_candidates_beside_them_are_the_same_on_the_gpu() {
    on_gpu!(other_candidates);
}

fn other_candidates<R: CubeRuntime>() {
    let folder = golden("hf-qwen3/tiny-tied").canonicalize().unwrap();
    let config = Qwen3Config::from_file(&folder.join("config.json")).unwrap();
    let (container, device) = (Container::open(&folder).unwrap(), R::Device::default());
    let spec = LinearSpec::new(Recipe::Bf16, Scaling::Two, Precision::F32).each_row();
    let model: Qwen3<Cube<R>> = weights::load(&container, &config, spec, Purpose::Infer, &device).unwrap();
    let with = |temperature: f32, top_k: usize, seed: u64| {
        let sampling = Sampling { temperature, top_k, seed, ..Sampling::GREEDY };
        GenerateOptions { max_tokens: 12, sampling, stop_ids: vec![], logprobs: None }
    };
    let all = [with(0.0, 0, 0), with(2.0, 2, 1), with(3.0, 60, 2), with(2.0, 5, 3)];
    let prompt = [5, 17, 200, 31];
    let alone = all.each_ref().map(|options| {
        let mut session = Session::new(&model, 20).unwrap();
        session.answer(&prompt, options, |_| ControlFlow::Continue(())).unwrap().ids
    });
    let pool = model.pool(4 * 32).unwrap();
    let mut sessions = all.each_ref().map(|_| Session::of_pool(&model, &pool, &[], 20).unwrap());
    let mut answers: Vec<Answering<_>> = sessions
        .iter_mut()
        .zip(&all)
        .map(|(session, options)| Answering::new(session, &prompt, options).unwrap())
        .collect();
    while answers.iter().any(|answer| !answer.has_ended()) {
        step(&mut sessions.iter_mut().zip(&mut answers).collect::<Vec<_>>()).unwrap();
    }
    let together: Vec<Vec<u32>> = answers.into_iter().map(|answer| answer.into_generation().unwrap().ids).collect();
    assert_eq!(together, alone);
}
