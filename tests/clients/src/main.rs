//! Asks a running `train-cli serve` with async-openai: a whole answer, the same as a stream, two choices with log probabilities,
//! and a plain completion.

use async_openai::{
    Client,
    config::OpenAIConfig,
    types::{
        chat::{ChatCompletionRequestUserMessageArgs, CreateChatCompletionRequestArgs},
        completions::CreateCompletionRequestArgs,
    },
};
use futures::StreamExt;
use std::error::Error;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let base = std::env::args().nth(1).ok_or("give the address of the server, for example http://127.0.0.1:8123")?;
    let client = Client::with_config(OpenAIConfig::new().with_api_base(base + "/v1").with_api_key("none"));
    let models = client.models().list().await?;
    let model = models.data.first().ok_or("the server lists a model")?.id.clone();
    let question = ChatCompletionRequestUserMessageArgs::default().content("Who are you?").build()?;
    let mut greedy = CreateChatCompletionRequestArgs::default();
    greedy.model(&model).messages([question.into()]).temperature(0.0).max_completion_tokens(20u32);

    let whole = client.chat().create(greedy.clone().n(2).logprobs(true).top_logprobs(3).build()?).await?;
    let texts: Vec<&str> = whole.choices.iter().filter_map(|choice| choice.message.content.as_deref()).collect();
    let [first, second] = texts[..] else { return Err("two answers were asked for".into()) };
    assert_eq!(first, second, "greedy answers are equal");
    let tokens = whole.choices[0].logprobs.as_ref().and_then(|all| all.content.as_ref()).map_or(0, Vec::len);
    let used = whole.usage.as_ref().map_or(0, |usage| usage.completion_tokens as usize);
    assert_eq!(used, 2 * tokens, "each token has its log probabilities");
    println!("chat: {first}");

    let mut stream = client.chat().create_stream(greedy.build()?).await?;
    let mut streamed = String::new();
    while let Some(piece) = stream.next().await {
        streamed.extend(piece?.choices.into_iter().filter_map(|choice| choice.delta.content));
    }
    assert_eq!(streamed, first, "a stream gives the same answer");
    println!("stream: equal");

    let request = CreateCompletionRequestArgs::default().model(&model).prompt("a").max_tokens(5u32).build()?;
    let completion = client.completions().create(request).await?;
    println!("completion: {:?}", completion.choices[0].text);
    Ok(())
}
