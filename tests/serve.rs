//! `serve`: a real server, real connections. Answers are those of `generate`, whoever else asks at the same time; what is
//! malformed is refused and the server stays; who may not ask gets nothing; who hangs up frees his place.

use crate::support::{
    Random,
    files::{ok, run, tiny_model_with_spread},
    http::{JSON, Server, chunk, reply},
    scripted::{STOP, VOCABULARY, scripted_model, scripted_model_with},
};
use serde_json::{Value, json};
use std::{
    fs,
    io::{BufRead, Read, Write},
    net::TcpStream,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;

const CHAT: &str = "/v1/chat/completions";
const COMPLETION: &str = "/v1/completions";

/// A folder with a model whose answers differ from prompt to prompt.
fn folder() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    tiny_model_with_spread(&dir.path().join("m"), true, 0.3);
    dir
}

/// What `generate` answers.
fn generated(d: &Path, prompt: &str, flags: &[&str]) -> Value {
    let words = [&["generate", "-m", "m", "--device", "cpu", "--json", "-p", prompt], flags].concat();
    serde_json::from_str(&ok(d, &words)).unwrap()
}

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

#[test]
fn tools_stand_in_the_prompt_unless_none_may_be_called() {
    let dir = folder();
    let server = Server::start(dir.path(), &["-m", "m", "--context", "1024"]);
    let read = |more: Value| {
        let mut body = json!({"messages": user("a"), "max_tokens": 1});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.ask(CHAT, &body)["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    let tool = |name: &str| json!([{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}]);
    let without = read(json!({}));
    let with = read(json!({"tools": tool("add")}));
    assert!(with > without + 20, "{without} tokens without a tool, {with} with one");
    assert!(read(json!({"tools": tool("add_two_numbers_to_each_other")})) > with);
    assert_eq!(read(json!({"tools": tool("add"), "tool_choice": "none"})), without);
}

/// A model that calls a tool is heard by a client as one that calls a tool, whole and in pieces, and its call and the tool's
/// result go back into the next prompt.
#[test]
fn a_call_of_a_tool_goes_to_the_client_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let call = ["One moment.", "\n<tool_", "call>\n{\"name\": \"add\", \"arguments\": ", "{\"a\": 1}}\n</tool_call>"];
    let first = VOCABULARY as u32;
    let last = first + call.len() as u32 - 1;
    scripted_model_with(&d.join("m"), &call, |token| {
        let next = match token {
            _ if token == last => STOP,
            _ if token >= first => token + 1,
            _ => first,
        };
        vec![(next, 20.0)]
    });
    let server = Server::start(d, &["-m", "m", "--context", "1024"]);
    let tools = json!([{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]);
    let body = |more: Value| {
        let mut body = json!({"messages": user("a"), "max_tokens": 32});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let choice = |more: Value| server.ask(CHAT, &body(more))["choices"][0].clone();
    // Without tools, or where none may be called, the text is a text.
    for more in [json!({}), json!({"tools": tools, "tool_choice": "none"})] {
        let plain = choice(more);
        assert_eq!(plain["message"]["content"], call.concat());
        assert!(plain["finish_reason"] == "stop" && plain["message"]["tool_calls"].is_null(), "{plain}");
    }
    let whole = choice(json!({"tools": tools}));
    assert_eq!((&whole["finish_reason"], &whole["message"]["content"]), (&json!("tool_calls"), &json!("One moment.")));
    let called = &whole["message"]["tool_calls"][0];
    assert_eq!(called["function"], json!({"name": "add", "arguments": "{\"a\":1}"}));
    assert!(called["type"] == "function" && called["id"].as_str().is_some_and(|id| !id.is_empty()), "{called}");

    let events = server.events(CHAT, &body(json!({"tools": tools, "stream": true})));
    let pieces: Vec<Value> = events[..events.len() - 1].iter().map(|e| serde_json::from_str(e).unwrap()).collect();
    let deltas: Vec<&Value> = pieces.iter().map(|piece| &piece["choices"][0]["delta"]).collect();
    let texts: Vec<&str> = deltas.iter().filter_map(|delta| delta["content"].as_str()).collect();
    assert_eq!(texts, ["", "One moment."]);
    let waited = deltas.iter().any(|delta| delta.get("tool_calls").is_some() && !delta["content"].is_null());
    assert!(!waited, "the text in front of a call has waited for the call: {deltas:?}");
    let calls: Vec<&Value> = deltas.iter().filter_map(|delta| delta.get("tool_calls")).collect();
    assert!(calls.len() == 1 && calls[0][0]["function"] == called["function"], "{calls:?}");
    assert_eq!(pieces.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");

    // What the client sends back is longer than a conversation without the call, and than one without the tool's result.
    let read = |messages: Value| {
        let reply = server.ask(CHAT, &json!({"messages": messages, "tools": tools, "max_tokens": 1}));
        reply["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    let asked = json!({"role": "user", "content": "a"});
    let result = json!({"role": "tool", "tool_call_id": called["id"], "content": "3"});
    let plain = json!({"role": "assistant", "content": "One moment."});
    let (without, with, answered) = (
        read(json!([asked, plain])),
        read(json!([asked, whole["message"]])),
        read(json!([asked, whole["message"], result])),
    );
    assert!(without < with && with < answered, "{without}, {with} and {answered} tokens");
}

#[test]
fn served_answers_are_those_of_generate() {
    let dir = folder();
    let d = dir.path();
    let server = Server::start(d, &["-m", "m", "--context", "192", "--parallel", "3"]);
    let prompts = [
        "Hello",
        "Who are you?",
        "你好，請介紹自己",
        "a b c d e f g h i j k l m n o p q r s t u v w x y z",
        "1+1=",
        "🎈",
    ];
    let greedy = ["--temperature", "0", "--max-tokens", "24"];
    let expected: Vec<Value> = prompts.iter().map(|prompt| generated(d, prompt, &greedy)).collect();
    // More questions than places, all at once, whole and in pieces.
    thread::scope(|scope| {
        for round in 0..2 {
            for (prompt, expected) in prompts.iter().zip(&expected) {
                let server = &server;
                scope.spawn(move || {
                    let mut body = json!({"messages": user(prompt), "temperature": 0, "max_tokens": 24});
                    if round == 0 {
                        let reply = server.ask(CHAT, &body);
                        let choice = &reply["choices"][0];
                        assert_eq!(choice["message"]["content"], expected["text"], "{prompt}");
                        assert_eq!(choice["finish_reason"], expected["stop"], "{prompt}");
                        assert_eq!(reply["usage"]["prompt_tokens"], expected["prompt_tokens"]);
                        assert_eq!(reply["usage"]["completion_tokens"], expected["tokens"]);
                        return;
                    }
                    body["stream"] = true.into();
                    body["stream_options"] = json!({"include_usage": true});
                    let events = server.events(CHAT, &body);
                    assert_eq!(events.last().unwrap(), "[DONE]");
                    let pieces: Vec<Value> =
                        events[..events.len() - 1].iter().map(|e| serde_json::from_str(e).unwrap()).collect();
                    let text: String =
                        pieces.iter().filter_map(|p| p["choices"][0]["delta"]["content"].as_str()).collect();
                    assert_eq!(expected["text"], text.as_str(), "{prompt}");
                    assert_eq!(pieces[0]["choices"][0]["delta"]["role"], "assistant");
                    let last = &pieces[pieces.len() - 2];
                    assert_eq!(last["choices"][0]["finish_reason"], expected["stop"]);
                    assert_eq!(pieces.last().unwrap()["usage"]["completion_tokens"], expected["tokens"]);
                });
            }
        }
    });
    // A prompt that was read before is not read again, and answers the same.
    let [_, again] =
        [(); 2].map(|()| server.ask(CHAT, &json!({"messages": user(prompts[3]), "temperature": 0, "max_tokens": 24})));
    assert_eq!(again["choices"][0]["message"]["content"], expected[3]["text"]);
    let (tokens, cached) =
        (&again["usage"]["prompt_tokens"], &again["usage"]["prompt_tokens_details"]["cached_tokens"]);
    assert_eq!(cached.as_u64(), tokens.as_u64().map(|n| n - 1), "{again}");

    // Two conversations in turn: each keeps what was read for it.
    let mut talks = [json!([]), json!([])];
    for turn in 0..3 {
        for (who, talk) in talks.iter_mut().enumerate() {
            let said = json!({"role": "user", "content": format!("{who} says {turn}")});
            talk.as_array_mut().unwrap().push(said);
            let reply = server.ask(CHAT, &json!({"messages": *talk, "temperature": 0, "max_tokens": 4}));
            let cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
            assert!(turn == 0 || cached > 12 * turn, "turn {turn} of {who}: {reply}");
            let answer = reply["choices"][0]["message"].clone();
            talk.as_array_mut().unwrap().push(answer);
        }
    }
}

/// Requests with one beginning read it once. The answers of a cache with room for one of them are those of a cache with room for
/// all; so are those with 8-bit numbers, which have half the bytes.
#[test]
fn requests_share_what_begins_alike_in_a_cache_of_any_size() {
    let dir = folder();
    let d = dir.path();
    let system = "All of us begin with these words, and each of us goes on in another way. ";
    let body = |who: usize| {
        let said = json!([{"role": "system", "content": system}, {"role": "user", "content": format!("{who}")}]);
        json!({"messages": said, "temperature": 0, "max_tokens": 8, "ignore_eos": true})
    };
    let all = |flags: &[&str]| -> Vec<Value> {
        let fixed = ["-m", "m", "--compute-dtype", "f32", "--context", "160", "--parallel", "4"];
        let server = Server::start(d, &[&fixed[..], flags].concat());
        let first = server.ask(CHAT, &body(0));
        let together: Vec<Value> = std::thread::scope(|scope| {
            let asking: Vec<_> = (1..7)
                .map(|who| {
                    scope.spawn({
                        let server = &server;
                        move || server.ask(CHAT, &body(who))
                    })
                })
                .collect();
            asking.into_iter().map(|asking| asking.join().unwrap()).collect()
        });
        assert_eq!(metric(&server, "answers_waiting"), 0.0);
        [vec![first], together].concat()
    };
    let alike = system.len() as u64 / 8;
    let (wide, narrow, bytes) = (all(&[]), all(&["--kv-cache-tokens", "160"]), all(&["--kv-cache-dtype", "fp8"]));
    for (who, replies) in [&wide, &narrow, &bytes].into_iter().flat_map(|replies| replies.iter().enumerate()) {
        let usage = &replies["usage"];
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        assert_eq!(usage["completion_tokens"], 8);
        assert!(if who == 0 { cached == 0 } else { cached > alike }, "request {who}: {usage}");
    }
    for (wide, narrow) in wide.iter().zip(&narrow) {
        assert_eq!(wide["choices"], narrow["choices"]);
    }
    // Whoever reads all by himself gets the same.
    let mut longest = 0;
    let flags = ["--compute-dtype", "f32", "--system-prompt", system, "--temp", "0", "--max-tokens", "8"];
    for (who, (wide, bytes)) in wide.iter().zip(&bytes).enumerate() {
        let prompt = who.to_string();
        for (reply, more) in [(wide, "auto"), (bytes, "fp8")] {
            let alone = generated(d, &prompt, &[&flags[..], &["--kv-cache-dtype", more]].concat());
            let text = reply["choices"][0]["message"]["content"].as_str().unwrap();
            longest = longest.max(alone["text"].as_str().unwrap().len());
            assert!(text.starts_with(alone["text"].as_str().unwrap()), "request {who}, {more}: {text:?}, {alone}");
        }
    }
    assert!(longest > 0, "every answer was empty");
    for huge in [["--parallel", "1152921504606846977"], ["--kv-cache-tokens", "18446744073709551615"]] {
        let out = run(d, &[&["serve", "-m", "m", "--device", "cpu", "--port", "0"], &huge[..]].concat());
        assert_eq!(out.status.code(), Some(2), "{huge:?}");
    }
    let out =
        run(d, &["serve", "-m", "m", "--device", "cpu", "--port", "0", "--context", "160", "--kv-cache-tokens", "159"]);
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(2) && stderr.contains("--kv-cache-tokens 159"), "{stderr}");
}

#[test]
fn the_fields_of_a_request_do_what_they_say() {
    let dir = folder();
    let d = dir.path();
    let server = Server::start(d, &["-m", "m", "--context", "160", "--model-name", "Qwen/tiny"]);
    let models: Value = serde_json::from_str(&server.send("GET", "/v1/models", &[], b"").1).unwrap();
    assert_eq!(models["data"][0]["id"], "Qwen/tiny");

    // Two choices of one seed are those of two seeds, and again the same.
    let sampled = ["--temperature", "1.5", "--top-k", "40", "--top-p", "0.95", "--max-tokens", "12"];
    let two = json!({"model": "Qwen/tiny", "messages": user("Hello"), "temperature": 1.5, "top_k": 40, "top_p": 0.95,
        "max_completion_tokens": 12, "n": 2, "seed": 5});
    let reply = server.ask(CHAT, &two);
    for (choice, seed) in ["5", "6"].into_iter().enumerate() {
        let expected = generated(d, "Hello", &[&sampled[..], &["--seed", seed]].concat());
        assert_eq!(reply["choices"][choice]["message"]["content"], expected["text"], "seed {seed}");
    }
    assert_eq!(reply["choices"], server.ask(CHAT, &two)["choices"]);
    let unseeded = json!({"messages": user("Hello"), "temperature": 2, "max_tokens": 24});
    assert_ne!(server.ask(CHAT, &unseeded)["choices"], server.ask(CHAT, &unseeded)["choices"]);

    // Completions: raw prompts, several of them, logarithms of probabilities, and a text that ends an answer.
    let raw = ["--raw", "--temperature", "0", "--max-tokens", "16", "--logprobs", "2"];
    let expected = generated(d, "Once upon", &raw);
    let reply = server.ask(COMPLETION, &json!({"prompt": ["Once upon", "a"], "temperature": 0, "logprobs": 2}));
    let first = &reply["choices"][0];
    assert_eq!((&first["text"], reply["choices"].as_array().unwrap().len()), (&expected["text"], 2));
    for (i, token) in expected["logprobs"].as_array().unwrap().iter().enumerate() {
        assert_eq!(first["logprobs"]["token_logprobs"][i], token["logprob"]);
        // A part of a character is named by its bytes.
        let (found, named) = (first["logprobs"]["tokens"][i].as_str().unwrap(), token["token"].as_str().unwrap());
        assert!(found == named || named.contains('\u{FFFD}') && found.starts_with("bytes:"), "{found}: {token}");
    }
    let text = expected["text"].as_str().unwrap();
    let middle = text.chars().skip(text.chars().count() / 2).take(2).collect::<String>();
    let stopped = server.ask(COMPLETION, &json!({"prompt": "Once upon", "temperature": 0, "stop": middle}));
    assert_eq!(stopped["choices"][0]["text"], &text[..text.find(&middle).unwrap()]);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    // A null is a field that is not there, also within another field, and whatever the name of the field.
    let nulls = json!({"messages": user("a"), "max_tokens": 1, "stream": true, "seed": null, "functions": null,
        "prompt_cache_retention": "24h", "stream_options": {"include_usage": null, "include_obfuscation": false},
        "chat_template_kwargs": {"enable_thinking": null, "unknown": null}});
    assert_eq!(server.events(CHAT, &nulls).last().unwrap(), "[DONE]");
    let chat = server.ask(CHAT, &json!({"messages": user("a"), "max_tokens": 3, "logprobs": true, "top_logprobs": 2}));
    let tokens = chat["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert!(tokens.len() == 3 && tokens[0]["top_logprobs"].as_array().unwrap().len() == 2, "{chat}");

    // An answer may fill the context, and no more.
    let full = server.ask(CHAT, &json!({"messages": user("a"), "temperature": 0}));
    let (used, reason) = (&full["usage"]["total_tokens"], &full["choices"][0]["finish_reason"]);
    assert!(reason == "stop" || *used == 160, "{full}");
    // Fewer max_tokens are no remedy for a prompt that fills the context by itself.
    let long = json!({"prompt": "a ".repeat(400), "max_tokens": 1});
    let many = json!({"messages": user("a"), "max_tokens": 155});
    for (address, body, field, reason, helps) in [
        (COMPLETION, long, "prompt", "the context ends at 160", false),
        (CHAT, many, "messages", "the answer may have 155", true),
    ] {
        let (status, text) = server.post(address, &body);
        assert!(status == 400 && text.contains(reason) && text.contains("fewer max_tokens") == helps, "{text}");
        let error = serde_json::from_str::<Value>(&text).unwrap()["error"].take();
        assert_eq!([&error["code"], &error["param"]], ["context_length_exceeded", field]);
    }
    for (path, expected) in [("Qwen/tiny", 200), ("Qwen%2Ftiny", 200), ("tiny", 404), ("Qwen/", 404), ("%ff", 400)] {
        let (status, text) = server.send("GET", &format!("/v1/models/{path}"), &[], b"");
        let found: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{path}: {e}: {text}"));
        assert_eq!(status, expected, "{path}: {text}");
        assert_eq!(found == models["data"][0], status == 200, "{text}");
        assert_eq!(found["error"]["message"].is_string(), status != 200, "{text}");
        assert_eq!(found["error"]["code"] == "model_not_found", status == 404, "{text}");
    }
    let metrics = server.send("GET", "/metrics", &[], b"").1;
    assert!(metrics.contains("train_cli_replies_total{address=\"/v1/completions\",status=\"400\"} 1"), "{metrics}");
}

/// Requests with a value that a chat template would render as nothing, or as text that nobody wrote. The field with the value
/// comes first.
fn wrong_tools_and_messages() -> Vec<(&'static str, Value)> {
    let tools = [
        json!([null]),
        json!([1]),
        json!(["x"]),
        json!([{}]),
        json!([[[[]]]]),
        json!([{"type": "function", "function": {"name": 1}}]),
        json!([{"type": "function", "function": {"name": ""}}]),
        json!([{"function": {"name": "add"}}]),
        json!([{"type": "function", "function": {"name": "add", "parameters": "{}"}}]),
        json!([{"type": "function", "function": {"name": "add", "description": 7}}]),
        json!([{"type": "function", "function": {"name": "add", "strict": "maybe"}}]),
    ];
    let keys = [
        ("tool_calls", json!([1])),
        ("tool_calls", json!([{"function": {}}])),
        ("tool_calls", json!([{"function": {"name": "add"}, "id": 5}])),
        ("tool_call_id", json!(7)),
        ("name", json!(5)),
        ("reasoning_content", json!(5)),
    ];
    let with_tools =
        tools.into_iter().map(|tools| ("tools", json!({"messages": user("a"), "max_tokens": 1, "tools": tools})));
    let with_keys = keys.into_iter().map(|(key, value)| {
        let mut messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
        messages[1][key] = value;
        ("messages", json!({"messages": messages, "max_tokens": 1}))
    });
    with_tools.chain(with_keys).collect()
}

/// What is refused before anybody reads the JSON of a request.
fn refuses_before_it_reads_json(server: &Server, good: &Value) {
    for (method, path, expected) in [("GET", "/nothing", 404), ("GET", CHAT, 405), ("DELETE", "/v1/models", 405)] {
        assert_eq!(server.send(method, path, &[], b"").0, expected, "{method} {path}");
    }
    let (status, _) = server.send("POST", CHAT, &["Content-Type: text/plain"], good.to_string().as_bytes());
    assert_eq!(status, 415);
    let (status, _) = server.send("POST", CHAT, &[JSON], &vec![b' '; 3 << 20]);
    assert_eq!(status, 413);
    // A body that is too long, and one whose chunks have no size, are not waited for.
    let head = format!("POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{JSON}\r\n");
    for (rest, expected) in
        [("Content-Length: 99999999\r\n\r\n", 413), ("Transfer-Encoding: chunked\r\n\r\nsize\r\n", 400)]
    {
        let began = Instant::now();
        let (status, text) = reply(server.write(&format!("{head}{rest}")));
        let error: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{rest}: {e}: {text}"));
        assert!(status == expected && error["error"]["message"].is_string(), "{rest}: {status}: {text}");
        assert!(began.elapsed() < Duration::from_secs(10), "{rest}: {:?}", began.elapsed());
    }
    let header = format!("X-Long: {}", "x".repeat(40_000));
    assert!([0, 431].contains(&server.send("GET", "/health", &[&header], b"").0));
}

/// Bodies that are malformed in many ways, and some that are not, of requests of both kinds.
fn bodies(good: &Value, completion: &Value) -> Vec<Vec<u8>> {
    let values = [
        json!(-1),
        json!(1e300),
        json!(9_223_372_036_854_775_808u64),
        json!("NaN"),
        json!([]),
        json!({}),
        json!([[[]]]),
        json!({"a": {"b": 1}}),
        json!("\u{0}"),
        json!(0.5),
        json!([null]),
        json!([{"role": "user"}]),
        json!(1u64 << 40),
    ];
    let others =
        ["presence_penalty", "logit_bias", "tools", "tool_choice", "response_format", "unknown", "stream_options"];
    let mut bodies = Vec::new();
    for field in good.as_object().unwrap().keys().map(String::as_str).chain(others) {
        for value in &values {
            let mut body = good.clone();
            body[field] = value.clone();
            bodies.push(body.to_string().into_bytes());
        }
    }
    let mut random = Random::new(12);
    let texts = [good, completion].map(|body| body.to_string().into_bytes());
    while bodies.len() < 2400 {
        let mut body = texts[bodies.len() % 2].clone();
        for _ in 0..=random.below(3) {
            let at = random.below(body.len());
            match random.below(4) {
                0 => body.truncate(at.max(1)),
                1 => body[at] = random.below(256) as u8,
                2 => body.insert(at, b"{}[]\",:\\"[random.below(8)]),
                _ => drop(body.remove(at)),
            }
        }
        bodies.push(body);
    }
    bodies
}

/// A thousand bodies that are refused, besides some that are good.
#[test]
fn malformed_requests_are_refused_and_the_server_stays() {
    let dir = folder();
    let server = Server::start(dir.path(), &["-m", "m", "--context", "96"]);
    let good = json!({
        "model": "m", "messages": user("a"), "max_tokens": 1, "temperature": 0.5, "top_p": 0.5, "top_k": 4, "n": 1,
        "stop": ["x"], "seed": 1, "stream": false, "logprobs": true, "top_logprobs": 1, "min_p": 0.1,
        "repetition_penalty": 1.1,
    });
    server.ask(CHAT, &good);
    let completion = json!({"model": "m", "prompt": "a", "max_tokens": 1, "n": 1, "stop": ["x"], "logprobs": 1});
    server.ask(COMPLETION, &completion);
    let bodies = bodies(&good, &completion);
    let mut refused = 0;
    for body in &bodies {
        let shown = String::from_utf8_lossy(body);
        let path = if shown.contains("\"prompt\"") { COMPLETION } else { CHAT };
        let (status, text) = server.send("POST", path, &[JSON], body);
        assert!(status == 200 || (400..500).contains(&status), "{status}: {shown}: {text}");
        let reply: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {shown}: {text}"));
        assert_eq!(status == 200, reply["error"].is_null(), "{shown}: {text}");
        assert!(status == 200 || reply["error"]["message"].as_str().is_some_and(|m| !m.is_empty()), "{shown}: {text}");
        refused += usize::from(status != 200);
    }
    assert!(refused >= 1000, "{refused} of {} bodies were refused", bodies.len());
    for (field, body) in wrong_tools_and_messages() {
        let (status, text) = server.post(CHAT, &body);
        let error: Value = serde_json::from_str(&text).unwrap();
        assert!(status == 400 && error["error"]["param"] == field, "{status}: {body}: {text}");
    }
    let tool = json!({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}});
    let (_, text) = server.post(CHAT, &json!({"messages": user("a"), "max_tokens": 1, "tools": [tool]}));
    assert!(text.contains("the context ends at 96"), "a good tool is read, and is too long for this server: {text}");
    for (field, value) in [("temperature", 7), ("n", 9)] {
        let mut body = json!({"messages": user("a")});
        body[field] = value.into();
        let (status, text) = server.post(CHAT, &body);
        let error: Value = serde_json::from_str(&text).unwrap();
        assert!(status == 400 && error["error"]["param"] == field, "{text}");
    }
    refuses_before_it_reads_json(&server, &good);
    server.ask(CHAT, &good);
}

/// Rendering cannot be ended, so that each such request keeps its memory.
#[test]
#[cfg(target_os = "linux")]
fn requests_that_take_too_much_memory_are_few() {
    let dir = folder();
    let grows = "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}";
    let template = format!("{{% if messages[0].content == 'grow' %}}{grows}{{% endif %}}{{{{ messages[0].content }}}}");
    fs::write(dir.path().join("m/chat_template.jinja"), template).unwrap();
    let server = Server::start(dir.path(), &["-m", "m", "--context", "192"]);
    let ask = |text: &str| server.post(CHAT, &json!({"messages": user(text), "max_tokens": 2}));
    assert_eq!(ask("hello").0, 200);
    for _ in 0..4 {
        let (status, text) = ask("grow");
        assert!(status == 400 && text.contains("more than 48 MiB"), "{status}: {text}");
    }
    let (status, text) = ask("hello");
    assert!(status == 503 && text.contains("4 times") && text.contains("restart"), "{status}: {text}");
}

#[test]
fn only_who_may_ask_is_answered() {
    let dir = folder();
    let d = dir.path();
    let key = "0123456789abcdef0123456789abcdef";
    fs::write(d.join("key"), format!("{key}\n")).unwrap();
    let words = |more: &[&'static str]| [&["serve", "-m", "m", "--device", "cpu", "--port", "0"], more].concat();
    let refused = |more: &[&'static str], text: &str| {
        let out = run(d, &words(more));
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(2) && stderr.contains(text), "{more:?}: {stderr}");
    };
    refused(&["--host", "0.0.0.0"], "--api-key-file");
    refused(&["--parallel", "0"], "--parallel 0");
    refused(&["--model-name="], "--model-name");
    refused(&["--context", "100000000"], "--context 100000000");
    refused(&["--context", "0"], "--context");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(d.join("key"), fs::Permissions::from_mode(0o644)).unwrap();
        refused(&["--api-key-file", "key"], "others may read it");
        fs::set_permissions(d.join("key"), fs::Permissions::from_mode(0o600)).unwrap();
    }
    fs::write(d.join("key"), &key[1..]).unwrap();
    refused(&["--api-key-file", "key"], "the key has 31 bytes; at least 32 are needed");
    // The file may begin with a byte order mark, as editors on Windows write it.
    fs::write(d.join("key"), format!("\u{feff}{key}\n")).unwrap();
    let server = Server::start(d, &["-m", "m", "--context", "64", "--api-key-file", "key"]);
    let body = json!({"messages": user("a"), "max_tokens": 1}).to_string();
    let (right, wrong) =
        (format!("Authorization: Bearer {key}"), format!("Authorization: Bearer {}", key.replace('0', "1")));
    let routes =
        [("GET", "/v1/models"), ("GET", "/v1/models/m"), ("GET", "/metrics"), ("GET", "/nothing"), ("PUT", CHAT)];
    for (method, path) in routes.into_iter().chain([("POST", CHAT), ("POST", COMPLETION)]) {
        for header in ["X-None: 1", &wrong, "Authorization: Bearer"] {
            assert_eq!(server.send(method, path, &[JSON, header], body.as_bytes()).0, 401, "{path} with {header}");
        }
        let status = server.send(method, path, &[JSON, &right], body.as_bytes()).0;
        let expected = match (method, path) {
            (_, "/nothing") => 404,
            ("PUT", _) => 405,
            // The body asks for a chat, and has no prompt.
            (_, COMPLETION) => 400,
            _ => 200,
        };
        assert_eq!(status, expected, "{method} {path} with the right key");
    }
    let mut refusal = String::new();
    server.open("GET", "/v1/models", &[], b"").read_to_string(&mut refusal).unwrap();
    let (head, body_of_refusal) = refusal.split_once("\r\n\r\n").unwrap();
    assert!(head.to_ascii_lowercase().contains("www-authenticate: bearer"), "{refusal}");
    // Pages of other sites may not read answers.
    let mut page = String::new();
    server.open("GET", "/", &["Origin: https://evil.example"], b"").read_to_string(&mut page).unwrap();
    assert!(!format!("{head}{page}").to_ascii_lowercase().contains("access-control"), "{head}{page}");
    assert!(body_of_refusal.contains("\"code\":\"invalid_api_key\""), "{refusal}");
    for scheme in ["bearer", "BEARER "] {
        let header = format!("Authorization: {scheme} {key}");
        assert_eq!(server.send("GET", "/v1/models", &[&header], b"").0, 200, "{header}");
    }
    for scheme in ["Basic", ""] {
        let header = format!("Authorization: {scheme} {key}");
        assert_eq!(server.send("GET", "/v1/models", &[&header], b"").0, 401, "{header}");
    }
    assert_eq!(server.send("GET", "/health", &[], b"").0, 200);
    let page = server.send("GET", "/", &[], b"");
    assert!(
        page.0 == 200 && page.1.contains("<textarea") && !page.1.contains("http"),
        "the page asks for nothing elsewhere"
    );

    // Without a key, a page of another site cannot reach the server under that site's name.
    let open = Server::start(d, &["-m", "m", "--context", "64"]);
    for (host, status) in [
        ("evil.example:8080", 403),
        ("localhost:8080", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("127.0.0.2:1", 200),
        ("LocalHost", 200),
        ("", 403),
    ] {
        assert_eq!(open.send("GET", "/v1/models", &[&format!("Host: {host}")], b"").0, status, "{host}");
    }
    // The port is taken.
    let out = run(d, &["serve", "-m", "m", "--device", "cpu", "--port", &open.address.port().to_string()]);
    assert!(out.status.code() == Some(2) && String::from_utf8_lossy(&out.stderr).contains("cannot listen there"));
}

fn metric(server: &Server, name: &str) -> f64 {
    let text = server.send("GET", "/metrics", &[], b"").1;
    let line = text.lines().find(|line| line.starts_with(&format!("train_cli_{name} "))).unwrap();
    line.split(' ').nth(1).unwrap().parse().unwrap()
}

/// Waits until something holds, for at most ten seconds.
fn until(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < Duration::from_secs(10), "{what}");
        thread::yield_now();
    }
}

/// Begins `count` long answers that are read piece by piece, each as long as the context.
fn long_answers(server: &Server, count: usize) -> std::io::BufReader<TcpStream> {
    let body = json!({"prompt": "a b", "n": count, "max_tokens": 2000, "ignore_eos": true, "stream": true});
    let mut stream = server.open("POST", COMPLETION, &[JSON], body.to_string().as_bytes());
    let mut line = String::new();
    while line != "\r\n" {
        line.clear();
        assert!(stream.read_line(&mut line).unwrap() > 0);
    }
    chunk(&mut stream).expect("a first piece");
    stream
}

#[test]
fn who_hangs_up_frees_the_place_and_a_full_queue_is_said() {
    let dir = folder();
    let server = Server::start(dir.path(), &["-m", "m", "--context", "2048", "--parallel", "1"]);
    let first = long_answers(&server, 8);
    assert_eq!(metric(&server, "answers_running"), 1.0);
    // The only place is taken, and seven wait for it. 57 more may wait, and the next one is refused.
    let body = json!({"prompt": "a", "max_tokens": 1}).to_string();
    let waiting: Vec<_> = (0..57).map(|_| server.open("POST", COMPLETION, &[JSON], body.as_bytes())).collect();
    until("the queue is not full", || metric(&server, "answers_waiting") == 64.0);
    let (status, text) = server.send("POST", COMPLETION, &[JSON], body.as_bytes());
    assert!(status == 429 && text.contains("the queue is full"), "{status}: {text}");
    // A client that begins a head and does not go on keeps nobody waiting.
    let mut slow = TcpStream::connect(server.address).unwrap();
    slow.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n").unwrap();
    assert_eq!(server.send("GET", "/health", &[], b"").0, 200);
    drop(first);
    for stream in waiting {
        let (status, text) = reply(stream);
        assert_eq!(status, 200, "{text}");
    }
    until("the place is not free", || metric(&server, "answers_running") == 0.0);
    // The place of a client that hangs up is free within a second of the server's time; the whole answer takes longer. So it is
    // if the client has read pieces of the answer, and if it waits for the whole.
    let whole = json!({"prompt": "a b", "max_tokens": 2000, "ignore_eos": true}).to_string();
    let ask = || server.open("POST", COMPLETION, &[JSON], whole.as_bytes());
    for streams in [true, false] {
        let again = if streams { long_answers(&server, 1) } else { ask() };
        until("the answer is not made", || metric(&server, "answers_running") == 1.0);
        drop(again);
        let before = server.processor_seconds();
        until("the place is not free", || metric(&server, "answers_running") == 0.0);
        let taken = server.processor_seconds() - before;
        assert!(taken < 1.0, "{taken} s");
    }
}

/// Three of four places are free while a long answer is made. In a cache with room for four such answers, another question is
/// answered at once. In a cache with room for one it waits, and so does a question behind it for which there would be room. Both
/// are answered when the long answer has ended.
#[test]
fn a_question_waits_for_room_in_the_cache() {
    let dir = folder();
    let context = ["-m", "m", "--context", "2048", "--parallel", "4"];
    let question = |tokens: usize| json!({"prompt": "a", "max_tokens": tokens, "ignore_eos": true});
    let wide = Server::start(dir.path(), &context);
    let long = long_answers(&wide, 1);
    wide.ask(COMPLETION, &question(64));
    until("the long answer ended too early to show anything", || metric(&wide, "answers_running") == 1.0);
    drop((long, wide));

    let narrow = Server::start(dir.path(), &[&context[..], &["--kv-cache-tokens", "2048"]].concat());
    let long = long_answers(&narrow, 1);
    let waiting = [(64, 1.0), (1, 2.0)].map(|(tokens, count)| {
        let stream = narrow.open("POST", COMPLETION, &[JSON], question(tokens).to_string().as_bytes());
        until("a question does not wait for room", || metric(&narrow, "answers_waiting") == count);
        assert_eq!(metric(&narrow, "answers_running"), 1.0);
        (tokens, stream)
    });
    drop(long);
    for (tokens, stream) in waiting {
        let (status, text) = reply(stream);
        assert_eq!(status, 200, "{text}");
        let reply: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(reply["usage"]["completion_tokens"], tokens, "{reply}");
    }
    until("the questions are counted as waiting", || metric(&narrow, "answers_waiting") == 0.0);
}

#[test]
#[cfg(unix)]
fn a_signal_lets_the_last_answers_end() {
    let dir = folder();
    let server = Server::start(dir.path(), &["-m", "m", "--context", "2048"]);
    let mut stream = {
        let body = json!({"prompt": "a b", "max_tokens": 400, "ignore_eos": true, "stream": true}).to_string();
        server.open("POST", COMPLETION, &[JSON], body.as_bytes())
    };
    stream.fill_buf().unwrap();
    server.signal("-TERM");
    let (status, text) = reply(stream);
    assert!(status == 200 && text.ends_with("data: [DONE]\n\n"), "{status}: {text}");
    let (ended, said) = server.end();
    assert!(ended.success() && said.contains("SIGTERM") && !said.contains("warning"), "{ended}: {said}");
    // A server without questions has no last answers.
    let idle = Server::start(dir.path(), &["-m", "m", "--context", "1", "--parallel", "1"]);
    idle.signal("-TERM");
    let (ended, said) = idle.end();
    assert!(ended.success() && said.contains("SIGTERM: no more questions are taken\n"), "{ended}: {said}");
    assert!(said.contains(" · 1 answer at once, 1 token each, "), "{said}");
}

/// Many streams for some seconds: every answer is right, and the server's memory does not grow.
#[test]
fn many_streams_at_once_get_their_own_answers() {
    let dir = folder();
    let d = dir.path();
    let server = Server::start(d, &["-m", "m", "--context", "96", "--parallel", "8"]);
    let prompts: Vec<String> = (0..16).map(|i| format!("question {i}: {}", "x".repeat(i % 5))).collect();
    let body = |prompt: &str| json!({"messages": user(prompt), "temperature": 0, "max_tokens": 16});
    let expected: Vec<Value> = prompts.iter().map(|p| server.ask(CHAT, &body(p))["choices"].clone()).collect();
    let texts: std::collections::BTreeSet<String> = expected.iter().map(Value::to_string).collect();
    assert!(texts.len() > 8, "the answers are too much alike to tell them apart: {texts:?}");
    // Each of 32 clients asks so many questions. Seconds would be fewer questions on a busy machine.
    let round = |questions: usize| {
        thread::scope(|scope| {
            for client in 0..32 {
                let (server, prompts, expected) = (&server, &prompts, &expected);
                scope.spawn(move || {
                    for n in 0..questions {
                        let i = (client * 7 + n) % prompts.len();
                        assert_eq!(server.ask(CHAT, &body(&prompts[i]))["choices"], expected[i], "{}", prompts[i]);
                    }
                });
            }
        });
    };
    round(32);
    let before = server.allocated();
    round(32);
    let after = server.allocated();
    assert!(after < before + (1 << 20), "1,024 questions made the memory grow from {before} to {after} bytes");
}

/// Logarithms of probabilities come with the text of their tokens, and joined they are those of a whole reply.
#[test]
fn streamed_logarithms_come_with_each_piece() {
    let dir = folder();
    let server = Server::start(dir.path(), &["-m", "m", "--context", "128"]);
    let chat =
        json!({"messages": user("Hello"), "temperature": 0, "max_tokens": 16, "logprobs": true, "top_logprobs": 2});
    let completion = json!({"prompt": "Once upon", "temperature": 0, "max_tokens": 16, "logprobs": 2});
    for (address, body, content) in [(CHAT, chat, "content"), (COMPLETION, completion, "tokens")] {
        let whole = server.ask(address, &body)["choices"][0].clone();
        if let Some(tokens) = whole["logprobs"]["content"].as_array() {
            // The bytes of the tokens are the text, whatever part of a character each of them is. It has no special tokens.
            let tokens = tokens.iter().filter(|token| !token["token"].as_str().unwrap().starts_with("<|"));
            let bytes = tokens.flat_map(|token| token["bytes"].as_array().expect("a token has bytes"));
            let bytes: Vec<u8> = bytes.map(|byte| byte.as_u64().unwrap() as u8).collect();
            assert_eq!(whole["message"]["content"], String::from_utf8_lossy(&bytes).into_owned());
        }
        let whole = whole["logprobs"].clone();
        let mut streamed = body.clone();
        streamed["stream"] = true.into();
        let mut joined = json!({});
        let mut pieces = 0;
        for event in server.events(address, &streamed).iter().filter(|event| *event != "[DONE]") {
            let event: Value = serde_json::from_str(event).unwrap();
            let choice = &event["choices"][0];
            let text = choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
            let Some(found) = choice["logprobs"].as_object() else {
                assert!(text.is_empty(), "a piece without logarithms: {event}");
                continue;
            };
            pieces += usize::from(choice["finish_reason"].is_null());
            for (key, list) in found {
                let all = joined.as_object_mut().unwrap().entry(key).or_insert_with(|| json!([]));
                all.as_array_mut().unwrap().extend(list.as_array().unwrap().iter().cloned());
            }
        }
        assert_eq!(joined, whole, "{address}");
        assert!(pieces > 3 && joined[content].as_array().unwrap().len() == 16, "{pieces} pieces: {joined}");
    }
}

/// Who asks for logarithms of an answer that has no tokens gets lists without entries.
#[test]
fn an_answer_without_tokens_has_empty_lists_of_logarithms() {
    let dir = tempfile::tempdir().unwrap();
    scripted_model(&dir.path().join("m"), |_| vec![(STOP, 20.0)]);
    let server = Server::start(dir.path(), &["-m", "m", "--context", "64"]);
    let chat = json!({"messages": user("a"), "logprobs": true});
    let completion = json!({"prompt": "a", "logprobs": 2});
    let lists = json!({"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []});
    for (address, body, expected) in [(CHAT, chat, json!({"content": []})), (COMPLETION, completion, lists)] {
        let reply = server.ask(address, &body);
        assert_eq!(reply["usage"]["completion_tokens"], 0, "{reply}");
        assert_eq!(reply["choices"][0]["logprobs"], expected, "{reply}");
    }
    let silent = server.ask(CHAT, &json!({"messages": user("a")}));
    assert!(silent["choices"][0]["logprobs"].is_null(), "{silent}");
}

/// More connections than there are places begin a head or a body and never end it. Whoever asks is answered at once.
#[test]
fn slow_heads_and_bodies_do_not_keep_good_clients_out() {
    let dir = folder();
    let server = Server::start(dir.path(), &["-m", "m", "--context", "64"]);
    let head = "GET /health HTTP/1.1\r\nHost: loc".to_owned();
    let body = format!("POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\nContent-Length: 99\r\n\r\n{{");
    let mut slow = Vec::new();
    for n in 0..1400 {
        let Ok(mut stream) = TcpStream::connect(server.address) else { continue };
        let _ = stream.write_all(if n < 600 { &head } else { &body }.as_bytes());
        slow.push(stream);
        if n % 100 == 99 {
            for stream in &mut slow {
                // The server has closed some of them.
                let _ = stream.write_all(b"a");
            }
            let began = Instant::now();
            assert_eq!(server.send("GET", "/health", &[], b"").0, 200, "behind {n} slow clients");
            let reply = server.ask(COMPLETION, &json!({"prompt": "a", "max_tokens": 2}));
            assert_eq!(reply["usage"]["completion_tokens"].as_u64().map(|n| n > 0), Some(true));
            assert!(began.elapsed() < Duration::from_secs(5), "behind {n} slow clients: {:?}", began.elapsed());
        }
    }
    assert!(slow.len() > 1300, "{}", slow.len());
}

/// The events of a stream, and of each token but those of the first piece the gap in front of it, in seconds: of the server's
/// processor time, and of real time. A piece may have several tokens, which only together are text. `open` counts the streams
/// that have begun and not ended: how many there are now, and how many there have been at most.
fn heard(server: &Server, body: &Value, open: &[AtomicUsize; 2]) -> (Vec<Value>, Vec<[f64; 2]>) {
    let mut stream = server.open("POST", COMPLETION, &[JSON], body.to_string().as_bytes());
    let mut line = String::new();
    while line != "\r\n" {
        line.clear();
        assert!(stream.read_line(&mut line).unwrap() > 0);
        assert!(!line.starts_with("HTTP/") || line.contains(" 200 "), "{line}");
    }
    let (mut events, mut gaps, mut last) = (Vec::new(), Vec::new(), None::<(f64, Instant)>);
    while let Some(piece) = chunk(&mut stream) {
        let now = (server.processor_seconds(), Instant::now());
        let text = String::from_utf8(piece).unwrap();
        let found = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
        let found: Vec<Value> = found.filter_map(|event| serde_json::from_str(event).ok()).collect();
        let tokens = found.iter().filter_map(|event| event["choices"][0]["logprobs"]["tokens"].as_array());
        let tokens: usize = tokens.map(Vec::len).sum();
        let gap =
            |last: (f64, Instant)| [now.0 - last.0, (now.1 - last.1).as_secs_f64()].map(|gap| gap / tokens as f64);
        gaps.extend(last.map(gap).into_iter().flat_map(|gap| std::iter::repeat_n(gap, tokens)));
        if last.replace(now).is_none() {
            let count = open[0].fetch_add(1, Ordering::Relaxed) + 1;
            open[1].fetch_max(count, Ordering::Relaxed);
        }
        events.extend(found);
    }
    open[0].fetch_sub(1, Ordering::Relaxed);
    (events, gaps)
}

/// 32 streams at once, for 20 seconds: no error, no wrong answer, no long gap between two tokens, and no growing memory. The
/// gaps are measured in processor time of the server, because other tests take time on the same cores; a server that waits
/// takes none, and for that there is a wide limit of real time. A thread of this test that waits for a core still sees its
/// tokens late, so it is enough that one round in five is even.
#[test]
fn streams_at_once_are_even_and_right() {
    let dir = folder();
    let server = Server::start(dir.path(), &["-m", "m", "--context", "96", "--parallel", "32"]);
    let bodies: Vec<Value> = (0..16)
        .map(|i| {
            let prompt = format!("question {i}: {}", "x".repeat(i % 5));
            let mut body =
                json!({"temperature": 0, "max_tokens": 48, "ignore_eos": true, "stream": true, "logprobs": 0});
            body["prompt"] = prompt.into();
            body
        })
        .collect();
    let told =
        |events: &[Value]| -> String { events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect() };
    let open = [const { AtomicUsize::new(0) }; 2];
    let expected: Vec<String> = bodies.iter().map(|body| told(&heard(&server, body, &open).0)).collect();
    let round = |rounds: usize| -> Vec<[f64; 2]> {
        let client = |client: usize| {
            let one = |n| {
                let i = (client * 7 + n) % bodies.len();
                let (events, gaps) = heard(&server, &bodies[i], &open);
                assert!(events.iter().all(|event| event["error"].is_null()), "{events:?}");
                assert_eq!(told(&events), expected[i], "{}", bodies[i]);
                gaps
            };
            (0..rounds).flat_map(one).collect::<Vec<_>>()
        };
        thread::scope(|scope| {
            let clients: Vec<_> = (0..32).map(|n| scope.spawn(move || client(n))).collect();
            clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
        })
    };
    round(8);
    let before = server.allocated();
    let round_is_even = || {
        let gaps = round(6);
        let [processor, real] = [0, 1].map(|clock| {
            let mut gaps: Vec<f64> = gaps.iter().map(|gap| gap[clock]).collect();
            gaps.sort_by(f64::total_cmp);
            [0.5, 0.99].map(|share| gaps[((gaps.len() - 1) as f64 * share) as usize])
        });
        eprintln!("{} gaps, half of them and 99 %: {processor:?} s of processor time, {real:?} s", gaps.len());
        // The clock of a process goes on when the system looks at it, some hundred times a second.
        processor[1] <= 4.0 * processor[0] + 0.01 && real[1] <= 20.0 * real[0] + 0.5
    };
    let (began, mut rounds, mut even, mut after) = (Instant::now(), 0, 0, before);
    while began.elapsed() < Duration::from_secs(20) || even == 0 && rounds < 5 {
        (rounds, even) = (rounds + 1, even + usize::from(round_is_even()));
        // The bound below is that of a thousand streams. A fast machine makes more, and what threads touch of their stacks and what
        // lies between allocations still grows a little with each.
        if rounds <= 5 {
            after = server.allocated();
        }
    }
    eprintln!("memory {before} to {after}");
    assert!(
        5 * even >= rounds,
        "{even} of {rounds} rounds are even: in the others 1 % of the gaps are more than four times as long as half of them, or \
         the server waits"
    );
    let most = open[1].load(Ordering::Relaxed);
    assert!(most >= 24, "at most {most} of 32 streams had begun and not ended");
    assert!(
        after <= before + before / 100 + (1 << 19),
        "up to 960 streams made the memory grow from {before} to {after} bytes"
    );
}
