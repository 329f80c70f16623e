//! The tokens that a device draws are those of the reference: drawn from a few of the most likely ones and from all, over one
//! part of a row and several, with equal logits, infinities and NaN, by temperature, top-k, top-p and min-p, after a repetition
//! penalty. Answers that are made together are those that are made alone, however many candidates each of them asks for. A token
//! that was read ahead leaves nothing behind.

use crate::support::{Cube, Random, golden, on_gpu};
use backend_nvfp4::{Draw, DrawnToken, LinearSpec, Penalty, Precision, Recipe, Scaling, draw, penalize, reference};
use burn::tensor::{Int, Tensor, TensorData};
use burn_cubecl::CubeRuntime;
use model_qwen3::{
    config::Qwen3Config,
    container::Container,
    model::Qwen3,
    sampling::{self, Logprobs, Sampling, Seen},
    session::{Answering, GenerateOptions, Progress, Session, step},
    weights::{self, Purpose},
};
use std::ops::ControlFlow;

#[test]
fn drawn_tokens_are_those_of_the_reference_on_the_gpu() {
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
        }
        if rows > 2 {
            logits[2 * cols + cols / 2] = f32::NAN;
        }
        for (n, row) in logits.chunks(cols).enumerate() {
            let has_nan = row.iter().any(|x| x.is_nan());
            let numbers: Vec<f32> = row.iter().map(|x| if x.is_nan() { f32::NEG_INFINITY } else { *x }).collect();
            for kept in [1, 2, 5, 64, 65, 200] {
                // All candidates are equally likely at this temperature, so that copies of the row draw different ones.
                let nth = |seed: u64| Draw { kept, temperature: 1e30, seed, ..Draw::GREEDY };
                let draws: Vec<Draw> = (0..12).map(nth).collect();
                let found = drawn::<R>(&row.repeat(draws.len()), cols, &draws);
                let expected: Vec<_> =
                    draws.iter().map(|draw| DrawnToken { id: reference::draw(&numbers, draw), has_nan }).collect();
                assert_eq!(found, expected, "row {n} of {rows} x {cols}, {kept} candidates");
            }
        }
    }
    let endless = [f32::NEG_INFINITY, 3.0, f32::INFINITY, f32::INFINITY];
    for kept in [1, 2, 0] {
        let draws: Vec<Draw> = (0..20).map(|seed| Draw { kept, seed, ..Draw::GREEDY }).collect();
        let expected: Vec<u32> = draws.iter().map(|draw| reference::draw(&endless, draw)).collect();
        assert!(expected.iter().all(|id| *id >= 2) && (kept == 1 || expected.contains(&3)), "{expected:?}");
        let found = drawn::<R>(&endless.repeat(20), 4, &draws);
        assert_eq!(found.iter().map(|token| token.id).collect::<Vec<_>>(), expected, "{kept} candidates");
    }
    // Rows of one launch do not touch each other: one has a NaN, and one an infinite logit in its second part.
    let cols = 5000;
    let mut logits = random.normals(3 * cols, 3.0);
    logits[cols + 17] = f32::NAN;
    logits[2 * cols + 3] = f32::NEG_INFINITY;
    logits[2 * cols + 2052] = f32::INFINITY;
    let likeliest = |row: &[f32]| {
        let numbers = (0..cols).filter(|i| !row[*i].is_nan());
        let id = numbers.max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap() as u32;
        DrawnToken { id, has_nan: row.iter().any(|x| x.is_nan()) }
    };
    let expected: Vec<DrawnToken> = logits.chunks(cols).map(likeliest).collect();
    for kept in [1, 5, 64, 0] {
        // Beside the most likely token, no other has a weight.
        let found = drawn::<R>(&logits, cols, &[Draw { kept, temperature: 1e-6, ..Draw::GREEDY }; 3]);
        assert_eq!(found, expected, "{kept} candidates");
    }
    // A row of nothing but NaN has some token.
    let nothing = [f32::NAN; 300];
    for kept in [1, 0] {
        let found = drawn::<R>(&nothing, 300, &[Draw { kept, top_p: 0.5, ..Draw::GREEDY }]);
        assert!(found[0].has_nan && found[0].id < 300, "{found:?}");
    }
}

/// What the device draws from rows of logits.
fn drawn<R: CubeRuntime>(logits: &[f32], cols: usize, draws: &[Draw]) -> Vec<DrawnToken> {
    let data = TensorData::new(logits.to_vec(), [draws.len(), cols]);
    let x = Tensor::<Cube<R>, 2>::from_data(data, &R::Device::default());
    let drawn = draw(x, draws).expect("a device draws");
    let on_device: Vec<i32> = drawn.tokens().into_data().iter().collect();
    let tokens: Vec<DrawnToken> = (0..draws.len()).map(|row| drawn.token(row).unwrap()).collect();
    assert!(on_device.iter().zip(&tokens).all(|(id, token)| *id as u32 == token.id), "{on_device:?}, {tokens:?}");
    tokens
}

#[test]
fn the_device_draws_what_the_host_draws_on_the_gpu() {
    on_gpu!(same_draws);
}

fn same_draws<R: CubeRuntime>() {
    let mut random = Random::new(6);
    let (cols, count, mut others) = (3000, 1000, 0);
    for part in 0..count / 20 {
        let logits = random.normals(20 * cols, 2.0);
        let samplings: Vec<Sampling> = (0..20)
            .map(|n| Sampling {
                temperature: [0.0, 0.2, 0.7, 1.0, 3.0][n % 5],
                top_k: [1 + (part * 20 + n) % 64, 65 + part * n, 0][n % 7 % 3],
                top_p: [1.0, 0.95, 0.8, 0.3][n % 4],
                min_p: [0.0, 0.05, 0.3][n % 3],
                seed: n as u64,
                ..Sampling::GREEDY
            })
            .collect();
        let position = part as u32;
        let draws: Vec<Draw> = samplings.iter().map(|sampling| sampling.draw(position)).collect();
        let found = drawn::<R>(&logits, cols, &draws);
        for ((row, sampling), token) in logits.chunks(cols).zip(&samplings).zip(found) {
            others += usize::from(token.id != sampling::next(&mut row.to_vec(), None, sampling, position));
        }
    }
    // The device computes in f32, the host in f64: a token at a border may fall to either side.
    assert!(others <= 1, "{others} of {count} tokens are others");
}

#[test]
fn the_device_penalizes_as_the_host_does_on_the_gpu() {
    on_gpu!(same_penalties);
}

/// The device learns the newest token of a row from itself: the host may know it, too, or not yet.
fn same_penalties<R: CubeRuntime>() {
    let mut random = Random::new(7);
    let (rows, cols) = (5, 2050);
    let mut logits = random.normals(rows * cols, 2.0);
    logits[cols + 9] = f32::NAN;
    let seen = |ids: &[u32]| {
        let mut seen = Seen::new(cols);
        seen.extend(ids);
        seen
    };
    let known: [&[u32]; 5] = [&[3, 31, 32, 2049], &[9], &[], &[5, 5, 1024], &[7, 8]];
    let newest = [2049, 40, 64, 6, 0];
    let samplings = [1.3, 2.0, 0.5, 1.7, 1.0].map(|repetition_penalty| Sampling {
        temperature: 0.0,
        repetition_penalty,
        ..Sampling::GREEDY
    });
    let bits = known.map(seen);
    let penalties: Vec<Penalty<'_>> = bits.iter().zip(&samplings).map(|(bits, own)| bits.penalty(own)).collect();
    let device = R::Device::default();
    let x = Tensor::<Cube<R>, 2>::from_data(TensorData::new(logits.clone(), [rows, cols]), &device);
    let ids =
        Tensor::<Cube<R>, 1, Int>::from_data(TensorData::new(newest.map(|id| id as i32).to_vec(), [rows]), &device);
    let found: Vec<f32> = penalize(x, ids, &penalties).unwrap().into_data().to_vec().unwrap();
    for (n, row) in logits.chunks(cols).enumerate() {
        let own = &found[n * cols..][..cols];
        for (id, (before, after)) in row.iter().zip(own).enumerate() {
            let is_seen = known[n].contains(&(id as u32)) || newest[n] as usize == id;
            let factor = if is_seen { samplings[n].repetition_penalty } else { 1.0 };
            let expected = if *before > 0.0 { before / factor } else { before * factor };
            let near = (after - expected).abs() <= 1e-6 * expected.abs() || after.is_nan() && expected.is_nan();
            assert!(near, "row {n}, token {id}: {before} became {after}, not {expected}");
        }
        // The host, which knows the newest token as well, chooses the same token.
        let all = seen(&[known[n], &[newest[n]]].concat());
        let largest = (0..cols).filter(|i| !own[*i].is_nan()).max_by(|a, b| own[*a].total_cmp(&own[*b])).unwrap();
        let mut clean: Vec<f32> = row.iter().map(|x| if x.is_nan() { f32::NEG_INFINITY } else { *x }).collect();
        assert_eq!(sampling::next(&mut clean, Some(&all), &samplings[n], 0) as usize, largest, "row {n}");
    }
}

#[test]
fn a_token_that_was_read_ahead_leaves_nothing_behind_on_the_gpu() {
    on_gpu!(read_ahead);
}

fn read_ahead<R: CubeRuntime>() {
    let model = tiny_model::<R>();
    let options =
        |stop_ids: Vec<u32>| GenerateOptions { max_tokens: 9, sampling: Sampling::GREEDY, stop_ids, logprobs: None };
    let prompt = [5, 17, 200, 31];
    let answer = |session: &mut Session<'_, Cube<R>>, prompt: &[u32], stop_ids, most: usize| {
        let mut left = most;
        let count = |progress| {
            left -= usize::from(matches!(progress, Progress::Token(_)));
            if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        session.answer(prompt, &options(stop_ids), count).unwrap().ids
    };
    let whole = answer(&mut Session::new(&model, 60).unwrap(), &prompt, vec![], 99);
    assert_eq!(whole.len(), 9);
    // A token is waited for when the device has been asked to read it: the first one in the second step.
    let mut session = Session::new(&model, 60).unwrap();
    let mut answering = Answering::new(&mut session, &prompt, &options(vec![])).unwrap();
    let mut has_token = vec![];
    while !answering.has_ended() {
        has_token.push(step(&mut [(&mut session, &mut answering)]).unwrap()[0].is_some());
    }
    assert_eq!(has_token, [vec![false], vec![true; 9]].concat());
    // A penalty and log probabilities change nothing about that.
    let penalized = |logprobs: Option<usize>| {
        let sampling = Sampling { repetition_penalty: 1.5, ..Sampling::GREEDY };
        let options = GenerateOptions { sampling, logprobs, ..options(vec![]) };
        let mut session = Session::new(&model, 60).unwrap();
        let mut answering = Answering::new(&mut session, &prompt, &options).unwrap();
        let first = step(&mut [(&mut session, &mut answering)]).unwrap()[0];
        while !answering.has_ended() {
            step(&mut [(&mut session, &mut answering)]).unwrap();
        }
        assert_eq!(first, None, "the host waits for a token");
        answering.into_generation().unwrap()
    };
    let found = penalized(Some(2));
    assert_eq!(penalized(None).ids, found.ids);
    assert_ne!(found.ids, whole, "the penalty changes the answer");
    // The logarithms are those of the model, before the penalty.
    assert_eq!(found.logprobs.len(), found.ids.len());
    for (n, own) in found.logprobs.iter().enumerate() {
        let logits = Session::new(&model, 60).unwrap().read(&[&prompt[..], &found.ids[..n]].concat()).unwrap();
        let expected = Logprobs::of(&logits, found.ids[n], 2);
        let numbers = |of: &Logprobs| [of.chosen, of.top[0].1, of.top[1].1];
        let near = numbers(own).iter().zip(numbers(&expected)).all(|(a, b)| (a - b).abs() < 1e-3);
        assert!(near && own.top[0].0 == expected.top[0].0, "token {n}: {own:?}, {expected:?}");
    }
    let stop = (2..9).find(|n| !whole[..*n].contains(&whole[*n])).expect("a token that is new in the answer");
    // A stop token ends the answer, and the session has read it ahead; or the caller ends it.
    for (stop_ids, most) in [(vec![whole[stop]], 99), (vec![], stop)] {
        let mut session = Session::new(&model, 60).unwrap();
        assert_eq!(answer(&mut session, &prompt, stop_ids, most), whole[..stop]);
        let next: Vec<u32> = prompt.iter().chain(&whole[..stop]).copied().chain([9, 40]).collect();
        let alone = answer(&mut Session::new(&model, 60).unwrap(), &next, vec![], 99);
        assert_eq!(answer(&mut session, &next, vec![], 99), alone, "{most} tokens");
        // The session holds all tokens but the last one of the answer, and none that was read ahead.
        let read: Vec<u32> = next.iter().chain(&alone[..8]).copied().collect();
        assert_eq!(session.tokens(), read.len());
    }
    // What is read right behind an answer continues it, however the answer ended.
    let [behind_stop, behind_limit] = [(9, vec![whole[stop]]), (stop + 1, vec![])].map(|(max_tokens, stop_ids)| {
        let mut session = Session::new(&model, 60).unwrap();
        let options = GenerateOptions { max_tokens, ..options(stop_ids) };
        session.answer(&prompt, &options, |_| ControlFlow::Continue(())).unwrap();
        session.read(&[9]).unwrap()
    });
    assert_eq!(behind_stop, behind_limit);
}

/// A model in f32 that was made by Hugging Face.
fn tiny_model<R: CubeRuntime>() -> Qwen3<Cube<R>> {
    let folder = golden("hf-qwen3/tiny-tied").canonicalize().unwrap();
    let config = Qwen3Config::from_file(&folder.join("config.json")).unwrap();
    let spec = LinearSpec::new(Recipe::Bf16, Scaling::Two, Precision::F32).each_row();
    weights::load(&Container::open(&folder).unwrap(), &config, spec, Purpose::Infer, &R::Device::default()).unwrap()
}

#[test]
fn answers_with_other_candidates_beside_them_are_the_same_on_the_gpu() {
    on_gpu!(other_candidates);
}

fn other_candidates<R: CubeRuntime>() {
    let model = tiny_model::<R>();
    let with = |temperature: f32, top_k: usize, seed: u64| {
        let sampling = Sampling { temperature, top_k, seed, ..Sampling::GREEDY };
        GenerateOptions { max_tokens: 12, sampling, stop_ids: vec![], logprobs: None }
    };
    let mut all = [with(0.0, 0, 0), with(2.0, 2, 1), with(3.0, 60, 2), with(2.0, 0, 3)];
    all[1].sampling.repetition_penalty = 1.4;
    all[2].logprobs = Some(1);
    all[3].sampling.top_p = 0.9;
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
