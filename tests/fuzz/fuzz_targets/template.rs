//! Any bytes as a chat template, which then renders two messages. A panic of the template engine becomes an error, and is no
//! finding.
#![no_main]

use kernels_cubecl::host_memory;
use model_qwen3::{
    ModelError,
    chat_template::{ChatTemplate, RenderOptions},
    limits,
};
use serde_json::json;
use std::sync::Once;

/// The memory of a template is limited only where memory is counted.
#[global_allocator]
static MEMORY: host_memory::Allocator = host_memory::Allocator;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let found = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !std::thread::current().name().is_some_and(|name| name.starts_with(limits::THREAD)) {
                found(panic);
            }
        }));
    });
    fuzz::file("tokenizer_config.json", b"{}");
    let path = fuzz::file("chat_template.jinja", bytes);
    let messages = [json!({"role": "user", "content": "a"}), json!({"role": "assistant", "content": "b"})];
    let options = RenderOptions { add_generation_prompt: true, ..Default::default() };
    let source = ChatTemplate::source(path.parent().expect("the file is in a folder"));
    let rendered = source.and_then(ChatTemplate::new).and_then(|template| template.render(&messages, options));
    // Templates that took too much memory keep their threads, so that this process would test nothing any more.
    if matches!(rendered, Err(ModelError::GivenUp { .. })) {
        std::process::exit(1);
    }
});
