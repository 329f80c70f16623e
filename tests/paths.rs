//! An answer does not depend on the path to it: on what shares its forwards, on how its prompt is divided, on what the
//! session has read before. With quantized activations, too, where a scale over all rows would let others change it.

use crate::support::{
    Cpu, Cube,
    files::{F32, demo_file, ok, tiny_model_with_spread},
    golden,
    http::Server,
    on_gpu,
    scripted::numbers_tokenizer,
};
use backend_nvfp4::{CacheFormat, LinearSpec, MasterKind, Nvfp4Kernels, Nvfp4Parts, Recipe};
use burn_cubecl::CubeRuntime;
use model_qwen3::{
    config::Qwen3Config,
    container::Container,
    model::{Qwen3, ids_tensor},
    sampling::Sampling,
    session::{Answering, GenerateOptions, Generation, Session, generate, generate_together, step},
    weights::{self, Purpose, to_host},
};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::{ops::ControlFlow, path::Path, thread};

type Request = (Vec<u32>, GenerateOptions);

fn load<B: Nvfp4Kernels>(folder: &Path, spec: LinearSpec, purpose: Purpose) -> Qwen3<B> {
    let config = Qwen3Config::from_file(&folder.join("config.json")).unwrap();
    weights::load(&Container::open(folder).unwrap(), &config, spec, purpose, &Default::default()).unwrap()
}

fn alone<B: Nvfp4Kernels>(model: &Qwen3<B>, (prompt, options): &Request) -> Generation {
    generate(model, prompt, options, |_| ControlFlow::Continue(())).unwrap()
}

/// Answers requests together. One more joins at each step.
fn together<B: Nvfp4Kernels>(model: &Qwen3<B>, requests: &[Request]) -> Vec<Generation> {
    let pool = model.pool(requests.len() * 800).unwrap();
    let mut sessions: Vec<_> = requests.iter().map(|_| Session::of_pool(model, &pool, &[], 800).unwrap()).collect();
    let begin = |(session, (prompt, options)): (&mut Session<'_, B>, &Request)| {
        Answering::new(session, prompt, options).unwrap()
    };
    let mut answers: Vec<_> = sessions.iter_mut().zip(requests).map(begin).collect();
    let mut steps = 0;
    while answers.iter().any(|answer| !answer.has_ended()) {
        steps += 1;
        assert!(steps < 1000, "an answer waits forever");
        let joined = sessions.iter_mut().zip(&mut answers).take(steps);
        step(&mut joined.filter(|(_, answer)| !answer.has_ended()).collect::<Vec<_>>()).unwrap();
    }
    answers.into_iter().map(|answer| answer.into_generation().unwrap()).collect()
}

/// Requests with 16 neighbors: prompts shorter than a chunk of 512 tokens, as long, longer, greedy and with seeds.
fn requests() -> Vec<Request> {
    let lengths = [3, 600, 17, 512, 1, 513, 40, 5, 90, 2, 700, 31, 8, 64, 511, 4, 250];
    let request = |(i, &length): (usize, &usize)| {
        let prompt = (0..length).map(|t| ((t * 37 + i * 101 + t * t * 7) % 500) as u32).collect();
        let drawn = Sampling { temperature: 1.2, top_k: 40, top_p: 0.95, seed: i as u64, ..Sampling::GREEDY };
        let sampling = if i % 3 == 0 { Sampling::GREEDY } else { drawn };
        (prompt, GenerateOptions { max_tokens: 3 + i % 5, sampling, stop_ids: vec![], logprobs: Some(5) })
    };
    lengths.iter().enumerate().map(request).collect()
}

/// Under every recipe, tokens and logarithms of probabilities are equal to the bit.
#[test]
fn neighbors_do_not_change_an_answer() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("m");
    tiny_model_with_spread(&folder, false, 0.3);
    let requests = requests();
    for (recipe, format) in [
        (Recipe::W4a4, CacheFormat::Native),
        (Recipe::W4a4, CacheFormat::E4m3),
        (Recipe::W4, CacheFormat::Native),
        (Recipe::Nvfp4(Nvfp4Parts::ALL), CacheFormat::Native),
    ] {
        // Masters are quantized by each forward, the head too.
        let spec = LinearSpec::new(recipe, F32.scaling, F32.precision);
        let model = load::<Cpu>(&folder, spec, Purpose::Train(MasterKind::F32)).with_cache_format(format);
        for (i, (found, request)) in together(&model, &requests).iter().zip(&requests).enumerate() {
            let expected = alone(&model, request);
            assert_eq!(found.ids, expected.ids, "request {i} of {recipe:?}");
            assert_eq!(found.logprobs, expected.logprobs, "request {i} of {recipe:?}");
        }
        let prompts: Vec<Vec<u32>> = requests.iter().take(5).map(|(prompt, _)| prompt.clone()).collect();
        let found = generate_together(&model, &prompts, &greedy(4), || ()).unwrap();
        assert_eq!(found.len(), prompts.len());
        for (found, prompt) in found.iter().zip(prompts) {
            assert_eq!(found.ids, alone(&model, &(prompt, greedy(4))).ids, "{recipe:?}");
        }
        // What the test would see: the scale that training takes over all rows lets one row change another.
        let first = |rows: &[Vec<u32>]| {
            let ids = ids_tensor(rows, model.config(), &model.device()).unwrap();
            to_host(model.forward(ids, |_| {}).slice(0..rows[0].len())).unwrap()
        };
        let rows = [vec![1, 2, 3, 4], vec![50, 60, 70, 80]];
        let apart = first(&rows[..1]).iter().zip(first(&rows)).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(!recipe.packs_activations() || apart > 1e-4, "{recipe:?}: {apart}");
    }
}

/// Prompts that begin differently, and prompts with a common beginning of several pages.
fn prompts() -> Vec<String> {
    let common = "Seventeen of us say this first, and then each says his own. ";
    let begins = |i: usize| if i.is_multiple_of(2) { common } else { "" };
    (0..17).map(|i| format!("{}{} {}", begins(i), 17 * i, "word ".repeat(1 + i * 5 % 23))).collect()
}

/// A folder `p` with an NVFP4 model.
fn packed_folder(d: &Path) {
    tiny_model_with_spread(&d.join("m"), true, 0.3);
    std::fs::create_dir(d.join("p")).unwrap();
    ok(d, &["convert", "m", "p/model.dat", "--to", "dat", "--dtype", "nvfp4"]);
}

#[test]
fn prompts_of_a_file_do_not_change_each_other_with_quantized_activations() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    packed_folder(d);
    let prompts = prompts();
    let row = |p: &String| json!({ "prompt": p }).to_string();
    std::fs::write(d.join("p.jsonl"), prompts.iter().map(row).collect::<Vec<_>>().join("\n")).unwrap();
    let fixed = ["generate", "-m", "p", "--w4a4", "--device", "cpu", "--temp", "1.2", "--seed", "9"];
    let fixed = [&fixed[..], &["--max-tokens", "12", "--logprobs", "3", "--raw", "--json"]].concat();
    let lines = ok(d, &[&fixed[..], &["--prompts", "p.jsonl", "--batch-size", "17"]].concat());
    let found: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(found.len(), prompts.len());
    for i in [0, 3, 8, 16] {
        let alone: Value = serde_json::from_str(&ok(d, &[&fixed[..], &["-p", &prompts[i]]].concat())).unwrap();
        for key in ["ids", "logprobs", "text"] {
            assert_eq!(found[i][key], alone[key], "{key} of {:?}", prompts[i]);
        }
    }
}

#[test]
fn served_neighbors_do_not_change_an_answer_with_quantized_activations() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    packed_folder(d);
    let server = Server::start(d, &["-m", "p", "--w4a4", "--context", "192", "--parallel", "17"]);
    let body = |(i, prompt): (usize, &String)| json!({"prompt": prompt, "temperature": 1.2, "seed": i, "max_tokens": 12, "logprobs": 3, "ignore_eos": true});
    let bodies: Vec<Value> = prompts().iter().enumerate().map(body).collect();
    let asked = |body: &Value| server.ask("/v1/completions", body)["choices"].clone();
    let together: Vec<Value> = thread::scope(|scope| {
        let asking: Vec<_> = bodies.iter().map(|body| scope.spawn(|| asked(body))).collect();
        asking.into_iter().map(|asking| asking.join().unwrap()).collect()
    });
    // One after another, on a new server. Those with the common beginning are read from its end on.
    let server = Server::start(d, &["-m", "p", "--w4a4", "--context", "192", "--parallel", "17"]);
    for (body, together) in bodies.iter().zip(&together) {
        assert_eq!(&server.ask("/v1/completions", body)["choices"], together, "{body}");
    }
    // A prompt with the common beginning, on a server that has read nothing yet.
    let server = Server::start(d, &["-m", "p", "--w4a4", "--context", "192", "--parallel", "17"]);
    assert_eq!(server.ask("/v1/completions", &bodies[16])["choices"], together[16]);
}

/// Pages that later sessions may use are not overwritten: a session that forgets them takes others.
#[test]
fn a_session_that_has_shared_its_pages_reads_anew() {
    let model = load::<Cpu>(&golden("hf-qwen3/tiny-tied"), F32, Purpose::Infer);
    let ids: Vec<u32> = (0..40).map(|i| (i * 37 + 5) % 300).collect();
    let expected = Session::new(&model, 48).unwrap().read(&ids).unwrap();
    let pool = model.pool(48).unwrap();
    let mut session = Session::of_pool(&model, &pool, &[], 48).unwrap();
    for _ in 0..2 {
        assert_eq!(session.read(&ids).unwrap(), expected);
        session.share();
        session.forget();
    }
    // Where the pool has room, a later session finds what was shared, whatever the first one has read since.
    let pool = model.pool(96).unwrap();
    let mut session = Session::of_pool(&model, &pool, &[], 48).unwrap();
    session.read(&ids[..32]).unwrap();
    session.share();
    session.forget();
    session.read(&ids[8..]).unwrap();
    let mut later = Session::of_pool(&model, &pool, &ids, 48).unwrap();
    assert_eq!(later.tokens(), 32);
    let mut alone = Session::new(&model, 48).unwrap();
    alone.read(&ids[..32]).unwrap();
    assert_eq!(later.read(&ids[32..]).unwrap(), alone.read(&ids[32..]).unwrap());
}

/// The keys and values of an answer are rounded otherwise than those of a prompt: other sessions read these tokens themselves. So
/// they do with what a session has read behind an answer.
#[test]
fn other_sessions_get_what_was_read_as_a_prompt() {
    let model = load::<Cpu>(&golden("hf-qwen3/tiny-tied"), F32, Purpose::Infer);
    let ids: Vec<u32> = (0..60).map(|i| (i * 37 + 5) % 300).collect();
    let pool = model.pool(256).unwrap();
    let cached = |prompt: &[u32]| Session::of_pool(&model, &pool, prompt, 64).unwrap().tokens();
    let mut session = Session::of_pool(&model, &pool, &ids[..20], 64).unwrap();
    let answer = session.answer(&ids[..20], &greedy(16), |_| ControlFlow::Continue(())).unwrap().ids;
    let next = [&ids[..20], &answer[..], &ids[20..30]].concat();
    assert!(session.tokens() >= 32, "the session has two full pages");
    session.read(&ids[40..50]).unwrap();
    session.share();
    assert_eq!(cached(&next), 16, "a full page of the prompt");
    session.end();
    assert_eq!(cached(&next), 19, "the prompt without its last token, which is read like one of an answer");
    assert_eq!(cached(&ids), 19, "the same for a prompt that another one continues");
}

const FIXTURES: [&str; 2] = ["tiny-tied", "tiny-untied"];

/// The prompt of a fixture, and the greedy answer that Hugging Face gave to it.
fn expected_answer(fixture: &str) -> (Vec<u32>, Vec<u32>) {
    let bytes = std::fs::read(golden(&format!("hf-qwen3/{fixture}/expected.safetensors"))).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let ids = |name: &str| -> Vec<u32> {
        file.tensor(name).unwrap().data().chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let (prompt, all) = (ids("generate.prompt"), ids("generate.ids"));
    let answer = all[prompt.len()..].to_vec();
    (prompt, answer)
}

fn greedy(max_tokens: usize) -> GenerateOptions {
    GenerateOptions { max_tokens, sampling: Sampling::GREEDY, stop_ids: vec![], logprobs: None }
}

#[test]
fn every_path_gives_the_answer_of_hugging_face_on_the_cpu() {
    every_path::<Cpu>();
}

#[test]
fn every_path_gives_the_answer_of_hugging_face_on_the_gpu() {
    fn on_cube<R: CubeRuntime>() {
        every_path::<Cube<R>>();
    }
    on_gpu!(on_cube);
}

/// In f32 with an f32 cache, the tokens of Hugging Face come out of every path.
fn every_path<B: Nvfp4Kernels>() {
    for fixture in FIXTURES {
        let (prompt, expected) = expected_answer(fixture);
        let model = load::<B>(&golden(&format!("hf-qwen3/{fixture}")), F32, Purpose::Infer);
        let options = greedy(expected.len());
        let request = (prompt.clone(), options.clone());
        let answer = |session: &mut Session<'_, B>| {
            session.answer(&prompt, &options, |_| ControlFlow::Continue(())).unwrap().ids
        };
        assert_eq!(alone(&model, &request).ids, expected, "{fixture}: in one piece");
        for chunk in [1, 2, 4, 7] {
            let mut session = Session::new(&model, 64).unwrap();
            prompt[..prompt.len() - 1].chunks(chunk).for_each(|part| drop(session.read(part).unwrap()));
            assert_eq!(answer(&mut session), expected, "{fixture}: in chunks of {chunk}");
            assert_eq!(answer(&mut session), expected, "{fixture}: of a session that has read it");
            let other = [&prompt[..4], &expected[..9]].concat();
            session.answer(&other, &greedy(20), |_| ControlFlow::Continue(())).unwrap();
            assert_eq!(session.cached(&prompt), 4);
            assert_eq!(answer(&mut session), expected, "{fixture}: after a rewind to the fourth token");
        }
        // A pool remembers what others have read: a beginning of the prompt, and then all of it.
        let pool = model.pool(128).unwrap();
        for (begins, cached) in [(0, 0), (prompt.len() - 2, prompt.len() - 2), (prompt.len(), prompt.len() - 1)] {
            let own: Vec<u32> = prompt[..begins].iter().copied().chain((0..20).map(|t| (t * 7 + 1) % 300)).collect();
            let mut other = Session::of_pool(&model, &pool, &own, own.len() + 3).unwrap();
            other.answer(&own, &greedy(3), |_| ControlFlow::Continue(())).unwrap();
            other.end();
            let mut session = Session::of_pool(&model, &pool, &prompt, prompt.len() + expected.len()).unwrap();
            assert_eq!(session.tokens(), cached, "{fixture}");
            assert_eq!(
                answer(&mut session),
                expected,
                "{fixture}: after {cached} tokens that another session has read"
            );
        }
        let mut batch = vec![request];
        batch.extend(requests().into_iter().map(|(p, o)| (p.iter().map(|id| id % 300).collect(), o)));
        batch.swap(0, 8);
        assert_eq!(together(&model, &batch)[8].ids, expected, "{fixture}: with 17 others");
        // Without a cache: the whole text again for each token.
        let mut ids = prompt.clone();
        for next in &expected {
            let h = model.forward(ids_tensor(&[ids.clone()], model.config(), &model.device()).unwrap(), |_| {});
            let logits = to_host(model.logits(h.slice(ids.len() - 1..ids.len()))).unwrap();
            let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
            assert_eq!(best as u32, *next, "{fixture}: without a cache, token {}", ids.len());
            ids.push(*next);
        }
    }
}

#[test]
fn the_program_and_its_server_give_the_answer_of_hugging_face() {
    let spelled = |ids: &[u32]| ids.iter().map(|id| format!("<{id}>")).collect::<String>();
    for fixture in FIXTURES {
        let dir = tempfile::tempdir().unwrap();
        let d = dir.path();
        let (prompt, expected) = expected_answer(fixture);
        let m = d.join("m");
        std::fs::create_dir(&m).unwrap();
        for name in ["config.json", "model.safetensors"] {
            std::fs::copy(golden(&format!("hf-qwen3/{fixture}/{name}")), m.join(name)).unwrap();
        }
        std::fs::copy(demo_file("tokenizer_config.json"), m.join("tokenizer_config.json")).unwrap();
        let vocabulary = Qwen3Config::from_file(&m.join("config.json")).unwrap().vocab_size;
        std::fs::write(m.join("tokenizer.json"), numbers_tokenizer(vocabulary).to_string()).unwrap();
        let stop = (0..vocabulary as u32).find(|id| !expected.contains(id)).unwrap();
        std::fs::write(m.join("generation_config.json"), json!({ "eos_token_id": stop }).to_string()).unwrap();

        let others = (0..5).map(|i| spelled(&(0..3 + i * 4).map(|t| (t * 17 + i * 5) % 300).collect::<Vec<_>>()));
        let mut prompts: Vec<String> = others.collect();
        prompts.insert(2, spelled(&prompt));
        let row = |p: &String| json!({ "prompt": p }).to_string();
        std::fs::write(d.join("p.jsonl"), prompts.iter().map(row).collect::<Vec<_>>().join("\n")).unwrap();
        let tokens = expected.len().to_string();
        let fixed = ["generate", "-m", "m", "--device", "cpu", "--compute-dtype", "f32", "--temp", "0", "--raw"];
        let fixed = [&fixed[..], &["--json", "--max-tokens", &tokens]].concat();
        let alone: Value = serde_json::from_str(&ok(d, &[&fixed[..], &["-p", &prompts[2]]].concat())).unwrap();
        assert_eq!(alone["ids"], json!(expected), "{fixture}: generate");
        let lines = ok(d, &[&fixed[..], &["--prompts", "p.jsonl", "--batch-size", "4"]].concat());
        let batched: Value = serde_json::from_str(lines.lines().nth(2).unwrap()).unwrap();
        assert_eq!(batched["ids"], json!(expected), "{fixture}: generate --prompts");

        let server = Server::start(d, &["-m", "m", "--compute-dtype", "f32", "--context", "128", "--parallel", "4"]);
        let ask = |prompt: &String| {
            let body = json!({"prompt": prompt, "temperature": 0, "max_tokens": expected.len(), "ignore_eos": true});
            server.ask("/v1/completions", &body)["choices"][0]["text"].clone()
        };
        assert_eq!(ask(&prompts[2]), spelled(&expected), "{fixture}: served");
        assert_eq!(ask(&prompts[2]), spelled(&expected), "{fixture}: served from what was read before");
        let together: Vec<Value> = thread::scope(|scope| {
            let asking: Vec<_> = prompts.iter().map(|prompt| scope.spawn(|| ask(prompt))).collect();
            asking.into_iter().map(|asking| asking.join().unwrap()).collect()
        });
        assert_eq!(together[2], spelled(&expected), "{fixture}: served with others");
    }
}
