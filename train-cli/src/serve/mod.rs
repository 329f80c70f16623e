//! `serve`: a model behind OpenAI's HTTP interface.
//!
//! | module | what it holds |
//! |---|---|
//! | `http` | the listener: who may connect, its limits, how it stops |
//! | `callers` | the open connections, and which of them must make room for others |
//! | `times` | how long a client, an answer and a connection may take |
//! | `ending` | the last answers, and what clients are told whose answers are cut |
//! | `routes` | one function for each address |
//! | `request`, `json_fields` | the JSON of a question, checked field by field |
//! | `reply` | the JSON of an answer, whole or in pieces |
//! | `logprobs` | log probabilities of tokens, which may be parts of characters |
//! | `refusal` | an error as OpenAI's clients read it |
//! | `engine` | the thread that owns the model and makes all answers together |
//! | `metrics` | counters for Prometheus |
//!
//! HTTP runs on threads of its own. A question goes through a queue to the engine, and the answer comes back piece by piece
//! through a channel. If the client disconnects, the channel is dropped, and the engine ends the answer.

mod callers;
mod ending;
mod engine;
mod http;
mod json_fields;
mod logprobs;
mod metrics;
mod refusal;
mod reply;
mod request;
mod routes;
mod times;

pub use engine::Engine;
pub use http::{Address, Server};
