//! One function for each address.

use super::{
    callers::Caller,
    ending::{Ending, Unfinished},
    engine::{Piece, Question},
    metrics::Metrics,
    refusal::Refusal,
    reply::{Interface, Reply, Sent},
    request::Request,
    times::Times,
};
use crate::{CliError, model_files::TextFiles, report, talk::answer::Answer};
use axum::{
    Json, Router,
    body::{Body, HttpBody},
    extract::{self, Path, State, rejection::PathRejection},
    http::{HeaderMap, StatusCode, header},
    response::{
        Html, IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
    routing::{get, post},
};
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use std::{
    collections::VecDeque,
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{
    sync::{Semaphore, mpsc},
    time::{Instant, timeout, timeout_at},
};

/// Most bytes of a request's body.
const LONGEST_BODY: usize = 2 << 20;
/// The page at `/`. It holds no data, and asks for nothing from elsewhere.
const PAGE: &str = include_str!("page.html");
/// What the page may load: only the script and the style that stand in it. `'unsafe-inline'` is what the standard of this header
/// (Content Security Policy) calls them; it has nothing to do with Rust's `unsafe`.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; \
                           connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

/// What every request can use.
pub(super) struct App {
    /// Tokenizer, chat template and stop tokens.
    pub(super) text: TextFiles,
    /// The model's name.
    pub(super) model: String,
    /// Number of tokens that the model knows.
    pub(super) vocabulary: usize,
    /// Tokens of a prompt and its answer, at most.
    pub(super) context: usize,
    /// Where questions wait for the engine.
    pub(super) queue: mpsc::UnboundedSender<Question>,
    /// Places in that queue.
    pub(super) places: Arc<Semaphore>,
    /// Requests that may be parsed and tokenized at the same time: each may take a hundred times the memory of its text.
    pub(super) parsers: Arc<Semaphore>,
    /// What is counted.
    pub(super) metrics: Arc<Metrics>,
    /// When the server began, in seconds since 1970.
    pub(super) began: i64,
    /// Replies so far, which name them.
    pub(super) replies: AtomicU64,
    /// The end of the server.
    pub(super) ending: Arc<Ending>,
    /// How long requests may take.
    pub(super) times: Times,
}

impl App {
    /// The model as OpenAI's interface describes one.
    fn described(&self) -> Value {
        json!({
            "id": self.model, "object": "model", "created": self.began, "owned_by": "train-cli",
            "max_model_len": self.context,
        })
    }

    /// Refuses another model than the one that is served.
    fn serves(&self, name: &str) -> Result<(), Refusal> {
        if name == self.model {
            return Ok(());
        }
        let text = format!("the model {name:?} is not served here; {:?} is", self.model);
        Err(Refusal::new(StatusCode::NOT_FOUND, text).with_code("model_not_found"))
    }
}

/// All addresses.
pub(super) fn routes(app: Arc<App>) -> Router {
    Router::new()
        .route("/", get(page))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completion))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .with_state(app)
}

async fn page() -> Response {
    ([(header::CONTENT_SECURITY_POLICY, PAGE_POLICY)], Html(PAGE)).into_response()
}

async fn health(State(app): State<Arc<App>>) -> Response {
    if app.queue.is_closed() {
        return Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "the model does not answer any more").into_response();
    }
    Json(json!({"status": "ok"})).into_response()
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], app.metrics.text()).into_response()
}

async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [app.described()]}))
}

/// The name of a model may have slashes, as on Hugging Face.
async fn model(State(app): State<Arc<App>>, name: Result<Path<String>, PathRejection>) -> Result<Json<Value>, Refusal> {
    let Path(name) = name.map_err(|e| Refusal::bad(format!("the name of the model: {}", e.body_text())))?;
    app.serves(&name)?;
    Ok(Json(app.described()))
}

async fn unknown() -> Refusal {
    Refusal::new(StatusCode::NOT_FOUND, "there is nothing at this address; GET /v1/models says what is served")
}

async fn wrong_method() -> Refusal {
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "this address does not take the method")
}

async fn chat(State(app): State<Arc<App>>, request: extract::Request) -> Result<Response, Refusal> {
    answer(app, Interface::Chat, request).await
}

async fn completion(State(app): State<Arc<App>>, request: extract::Request) -> Result<Response, Refusal> {
    answer(app, Interface::Completion, request).await
}

/// Answers a question of either interface.
async fn answer(app: Arc<App>, interface: Interface, request: extract::Request) -> Result<Response, Refusal> {
    let deadline = Instant::now() + app.times.answer;
    let (head, body) = request.into_parts();
    let body = checked_body(&head.headers, body, app.times.body).await?;
    if let Some(caller) = head.extensions.get::<Arc<Caller>>() {
        caller.has_asked();
    }
    let parser =
        app.parsers.clone().acquire_owned().await.map_err(|e| Refusal::from(CliError::Usage(e.to_string())))?;
    let number = app.replies.fetch_add(1, Ordering::Relaxed);
    let now = jiff::Timestamp::now();
    // Without a seed each request draws from another one.
    let seed = (now.as_nanosecond() as u64).wrapping_add(number);
    // A clone of the tokenizer would be another one: slow to make, and with a cache of its own that is never freed.
    let shared = app.clone();
    let parsed = tokio::task::spawn_blocking(move || {
        // It is held until the work is done, also if the client disconnects meanwhile.
        let _parser = parser;
        match interface {
            Interface::Chat => Request::chat(&body, &shared.text, seed),
            Interface::Completion => Request::completion(&body, &shared.text, seed),
        }
    });
    let request = parsed.await.map_err(|e| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, e.to_string()))??;
    fits(&app, interface, &request)?;
    let (prefix, model) = (if interface == Interface::Chat { "chatcmpl" } else { "cmpl" }, app.model.clone());
    let (id, created) = (format!("{prefix}-{:x}-{number}", app.began), now.as_second());
    let reply = Reply { interface, id, created, model, calls_tools: request.calls_tools };
    let pieces = ask(&app, &request)?;
    let wanted = request.prompts.len() * request.choices;
    let answers = (0..wanted).map(|_| None).collect();
    let unfinished = (0..wanted).map(|_| app.ending.begun()).collect();
    let waiting = Waiting { app, request, reply, pieces, deadline, answers, unfinished };
    if waiting.request.streams { Ok(waiting.stream()) } else { waiting.whole().await }
}

/// The body of a request. Only JSON is taken: a page of another site cannot send it without asking first.
async fn checked_body(headers: &HeaderMap, body: Body, longest: Duration) -> Result<Vec<u8>, Refusal> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    if kind.split(';').next().is_none_or(|kind| !kind.trim().eq_ignore_ascii_case("application/json")) {
        let text = format!("the content type is {kind:?}; application/json is needed");
        return Err(Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, text));
    }
    // A body that says that it is too long is not waited for.
    if body.size_hint().lower() > LONGEST_BODY as u64 {
        return Err(too_long());
    }
    timeout(longest, joined(body)).await.unwrap_or_else(|_| {
        let text = format!("the body took longer than {} seconds", longest.as_secs_f64());
        Err(Refusal::new(StatusCode::REQUEST_TIMEOUT, text))
    })
}

/// The bytes of a body, which arrives in pieces.
async fn joined(body: Body) -> Result<Vec<u8>, Refusal> {
    let (mut pieces, mut all) = (body.into_data_stream(), Vec::new());
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|e| Refusal::bad(format!("the body is cut off or broken: {e}")))?;
        if all.len() + piece.len() > LONGEST_BODY {
            return Err(too_long());
        }
        all.extend_from_slice(&piece);
    }
    Ok(all)
}

fn too_long() -> Refusal {
    Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body has more than {LONGEST_BODY} bytes"))
}

/// Refuses a request for another model, and prompts that do not fit this one.
fn fits(app: &App, interface: Interface, request: &Request) -> Result<(), Refusal> {
    request.model.as_ref().map_or(Ok(()), |model| app.serves(model))?;
    let field = if interface == Interface::Chat { "messages" } else { "prompt" };
    for prompt in &request.prompts {
        let (wanted, context) = (request.max_tokens.unwrap_or(1), app.context);
        if prompt.len().saturating_add(wanted) > context {
            let tokens = report::count(prompt.len(), "token");
            let reason = if prompt.len() >= context {
                format!(
                    "the prompt has {tokens}, and the context ends at {context}; shorten the prompt, or start the server with a \
                     larger --context"
                )
            } else {
                format!(
                    "the prompt has {tokens} and the answer may have {wanted}, but the context ends at {context}; shorten the \
                     prompt, ask for fewer max_tokens, or start the server with a larger --context"
                )
            };
            return Err(Refusal::field(field, reason).with_code("context_length_exceeded"));
        }
        if let Some(id) = prompt.iter().find(|id| **id as usize >= app.vocabulary) {
            return Err(Refusal::field(field, format_args!("the model knows no token {id}")));
        }
    }
    Ok(())
}

type AnswerPieces = mpsc::UnboundedReceiver<(usize, Piece)>;

/// Puts the questions of a request into the queue. Returns where the pieces of the answers arrive.
fn ask(app: &App, request: &Request) -> Result<AnswerPieces, Refusal> {
    let (sender, receiver) = mpsc::unbounded_channel();
    let wanted = request.prompts.len() * request.choices;
    let full = |_| Refusal::new(StatusCode::TOO_MANY_REQUESTS, "the queue is full; try again later");
    let mut places = app.places.clone().try_acquire_many_owned(wanted as u32).map_err(full)?;
    let questions = request.prompts.iter().flat_map(|prompt| (0..request.choices).map(move |choice| (prompt, choice)));
    for (index, (prompt, choice)) in questions.enumerate() {
        let options = request.options(choice, app.context - prompt.len(), &app.text);
        let (prompt, ends, heard_by) = (prompt.clone(), request.ends.clone(), sender.clone());
        let Some(place) = places.split(1) else { break };
        let question = Question { prompt, options, ends, index, heard_by, place };
        if app.queue.send(question).is_err() {
            return Err(Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "the model does not answer any more"));
        }
    }
    Ok(receiver)
}

/// A request whose answers are being made. Dropping it ends them.
struct Waiting {
    app: Arc<App>,
    request: Request,
    reply: Reply,
    pieces: AnswerPieces,
    deadline: Instant,
    /// The answers that are complete; `None` for the others.
    answers: Vec<Option<Answer>>,
    /// One for each answer that is not complete.
    unfinished: Vec<Unfinished>,
}

impl Waiting {
    async fn next(&mut self) -> Result<(usize, Piece), Refusal> {
        let heard = tokio::select! {
            heard = timeout_at(self.deadline, self.pieces.recv()) => heard,
            refusal = self.app.ending.cut() => return Err(refusal),
        };
        match heard {
            Ok(Some((_, Piece::Refused(refusal)))) => Err(refusal),
            Ok(Some(piece)) => Ok(piece),
            Ok(None) => Err(Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, "the model does not answer any more")),
            Err(_) => {
                let text = format!("the answer took longer than {} seconds", self.app.times.answer.as_secs_f64());
                Err(Refusal::new(StatusCode::GATEWAY_TIMEOUT, text))
            }
        }
    }

    /// Takes a complete answer.
    fn take(&mut self, index: usize, answer: Answer) {
        self.answers[index] = Some(answer);
        self.unfinished.pop();
    }

    /// All answers, if they are complete.
    fn complete(&self) -> Option<Vec<&Answer>> {
        self.answers.iter().map(Option::as_ref).collect()
    }

    /// The reply when all answers are complete.
    async fn whole(mut self) -> Result<Response, Refusal> {
        loop {
            if let Some(answers) = self.complete() {
                let reply = self.reply.whole(&answers, &self.request, &self.app.text.tokenizer);
                return Ok(Json(reply).into_response());
            }
            if let (index, Piece::Complete(answer)) = self.next().await? {
                self.take(index, *answer);
            }
        }
    }

    /// The reply in pieces, as server-sent events.
    fn stream(self) -> Response {
        let openings = (0..self.answers.len()).filter_map(|index| self.reply.opening(index)).collect();
        let sent = vec![Sent::default(); self.answers.len()];
        let state = Streaming { waiting: self, ready: openings, sent, ended: false };
        let events = stream::unfold(state, async |mut state| {
            let event = state.next().await?;
            Some((Ok::<_, Infallible>(event), state))
        });
        Sse::new(events).keep_alive(KeepAlive::default()).into_response()
    }
}

struct Streaming {
    waiting: Waiting,
    ready: VecDeque<Value>,
    /// What of each answer was put into pieces.
    sent: Vec<Sent>,
    ended: bool,
}

impl Streaming {
    /// The next event; None behind the last.
    async fn next(&mut self) -> Option<Event> {
        while self.ready.is_empty() {
            if self.ended {
                return None;
            }
            if self.waiting.complete().is_some() {
                self.ended = true;
                return Some(Event::default().data("[DONE]"));
            }
            match self.waiting.next().await.and_then(|(index, piece)| self.pieces(index, piece)) {
                Ok(pieces) => self.ready.extend(pieces),
                Err(refusal) => {
                    self.ended = true;
                    self.ready.push_back(refusal.json());
                }
            }
        }
        Some(Event::default().data(self.ready.pop_front()?.to_string()))
    }

    /// What is sent for a piece of an answer.
    fn pieces(&mut self, index: usize, piece: Piece) -> Result<Vec<Value>, Refusal> {
        let Waiting { app, reply, .. } = &self.waiting;
        match piece {
            Piece::Text(text, tokens) => {
                Ok(reply.text(index, &text, &tokens, &mut self.sent[index], &app.text.tokenizer).into_iter().collect())
            }
            Piece::Refused(refusal) => Err(refusal),
            Piece::Complete(answer) => {
                let mut pieces = reply.closing(index, &answer, &mut self.sent[index], &app.text.tokenizer);
                self.waiting.take(index, *answer);
                if let Some(all) = self.waiting.complete().filter(|_| self.waiting.request.streams_usage) {
                    pieces.push(self.waiting.reply.usage(&all, &self.waiting.request));
                }
                Ok(pieces)
            }
        }
    }
}
