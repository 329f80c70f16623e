//! The listener: who may connect, limits on the size and the duration of requests, and how the server stops.
//!
//! Without a key, the server answers only this machine, and only requests that call it by a name of this machine. So it refuses
//! a web page whose domain somebody has pointed at this machine (DNS rebinding). With a key, every address but `/` and
//! `/health` needs it.

use super::{
    callers::{Callers, MOST_CONNECTIONS},
    ending::Ending,
    engine::{Engine, Question},
    metrics::Metrics,
    refusal::Refusal,
    routes::{App, routes},
    times::Times,
};
use crate::{
    CliError,
    interrupt::{Interruption, Signal},
    model_files::TextFiles,
    report,
};
use axum::{
    Router,
    body::HttpBody,
    extract::{Request, State},
    http::{StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use std::{
    net::{IpAddr, SocketAddr, TcpListener},
    sync::Arc,
    time::Duration,
};
use subtle::ConstantTimeEq;
use tokio::sync::{Semaphore, mpsc};

/// Questions that wait, at most.
const LONGEST_QUEUE: usize = 64;
/// Requests that are parsed at the same time.
const MOST_PARSERS: usize = 2;
/// How long the listener waits when the system refuses a connection, for example for lack of file descriptors.
const PAUSE: Duration = Duration::from_millis(200);
/// Most bytes of the head of a request.
const LONGEST_HEAD: usize = 16 << 10;
/// How often the listener looks whether it shall end.
const LOOK: Duration = Duration::from_millis(50);

/// Where a server listens, and who may ask.
#[derive(Debug, Clone)]
pub struct Address {
    /// The address of a network card of this machine.
    pub host: IpAddr,
    /// The port; 0 lets the system choose one.
    pub port: u16,
    /// The key that every request must send.
    pub key: Option<String>,
}

/// A server that listens and does not answer yet.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    key: Option<String>,
}

impl Server {
    /// Listens at an address.
    ///
    /// # Errors
    /// If other machines could ask without a key, or the system refuses the address.
    pub fn listen(address: Address) -> Result<Self, CliError> {
        let Address { host, port, key } = address;
        if !host.is_loopback() && key.is_none() {
            return Err(CliError::Usage(format!(
                "--host {host}: other machines could ask, so that a key is needed; give --api-key-file FILE"
            )));
        }
        let listener = TcpListener::bind((host, port))
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .map_err(|e| CliError::Usage(format!("--host {host} --port {port}: cannot listen there: {e}")))?;
        Ok(Self { listener, key })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// If the system does not say.
    pub fn address(&self) -> Result<SocketAddr, CliError> {
        self.listener.local_addr().map_err(CliError::io("the listener".as_ref()))
    }

    /// Answers on threads of its own what the engine answers, until a signal arrives. The engine ends when the last answer is
    /// sent.
    ///
    /// # Errors
    /// If the system has no threads.
    pub fn start(self, text: TextFiles, model: String, vocabulary: usize, context: usize) -> Result<Engine, CliError> {
        let interruption = Interruption::listen().map_err(CliError::io("signals".as_ref()))?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.map_err(CliError::no_thread("server"))?;
        let (sender, queue) = mpsc::unbounded_channel::<Question>();
        let metrics = Arc::new(Metrics::default());
        let began = jiff::Timestamp::now().as_second();
        let app = App {
            text,
            model,
            vocabulary,
            context,
            queue: sender,
            places: Arc::new(Semaphore::new(LONGEST_QUEUE)),
            parsers: Arc::new(Semaphore::new(MOST_PARSERS)),
            metrics: metrics.clone(),
            began,
            replies: Default::default(),
            ending: Default::default(),
            times: Times::OF_SERVER,
        };
        let (times, ending, router) = (app.times, app.ending.clone(), router(app, self.key));
        let serve = move || -> std::io::Result<()> {
            let signal = || interruption.received().map(Signal::name);
            let cut = runtime.block_on(accept(self.listener, router, &ending, times, signal));
            // Answers that are still being made are ended.
            runtime.shutdown_background();
            let (cut, seconds) = (cut?, times.last_answers.as_secs());
            if cut > 0 {
                report::line(format!("warning: the server ends {seconds} s after the signal; answers cut: {cut}"));
            }
            Ok(())
        };
        let listener = std::thread::Builder::new().name("http".into()).spawn(serve);
        Ok(Engine { queue, metrics, listener: listener.map_err(CliError::no_thread("server"))? })
    }
}

/// All addresses, behind the check of who may ask.
fn router(app: App, key: Option<String>) -> Router {
    let gate = Arc::new(Gate { key, metrics: app.metrics.clone(), ending: app.ending.clone() });
    routes(Arc::new(app)).layer(middleware::from_fn_with_state(gate, passed))
}

/// Takes connections until `signal` names a signal that has arrived. Requests that are being answered then have some time to end.
/// Returns how many answers were cut.
async fn accept(
    listener: TcpListener,
    router: Router,
    ending: &Ending,
    times: Times,
    signal: impl Fn() -> Option<&'static str>,
) -> std::io::Result<usize> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let open = GracefulShutdown::new();
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(times.head).max_buf_size(LONGEST_HEAD);
    let (mut look, mut callers) = (tokio::time::interval(LOOK), Callers::default());
    let signal = loop {
        let stream = tokio::select! {
            _ = look.tick() => match signal() {
                Some(signal) => break signal,
                None => continue,
            },
            taken = listener.accept() => match taken {
                Ok((stream, _)) => stream,
                Err(error) => {
                    report::line(format!("warning: a connection could not be taken: {error}"));
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            },
        };
        // Where no place is free, the oldest connection without a question makes room.
        let Some(place) = callers.place(&places).await else { continue };
        let caller = callers.add();
        // Each token is sent when it is made. A connection that cannot be set so works all the same.
        let _ = stream.set_nodelay(true);
        let heard = caller.clone();
        let router = router.clone().layer(middleware::from_fn(move |mut request: Request, next: Next| {
            if request.body().is_end_stream() {
                heard.has_asked();
            } else {
                // Whoever reads the body says when it has arrived.
                request.extensions_mut().insert(heard.clone());
            }
            next.run(request)
        }));
        let connection = server.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
        let connection = open.watch(connection);
        tokio::spawn(async move {
            tokio::select! {
                // What fails here is the client's network.
                _ = tokio::time::timeout(times.connection, connection) => {}
                () = caller.must_leave() => {}
            }
            drop(place);
        });
    };
    // Whoever asks now is refused by the system, and does not wait.
    drop(listener);
    let last = if ending.unfinished() > 0 { "; the last answers are being made" } else { "" };
    report::line(format!("{signal}: no more questions are taken{last}"));
    Ok(ending.after(open.shutdown(), times.last_answers).await)
}

/// Who may ask.
struct Gate {
    key: Option<String>,
    metrics: Arc<Metrics>,
    ending: Arc<Ending>,
}

impl Gate {
    fn check(&self, request: &Request) -> Result<(), Refusal> {
        let text = |name| request.headers().get(name).and_then(|value| value.to_str().ok());
        match &self.key {
            Some(_) if ["/", "/health"].contains(&request.uri().path()) => Ok(()),
            Some(key) => {
                let given = text(header::AUTHORIZATION).and_then(|value| value.split_once(' '));
                let given = given.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("Bearer"));
                if given.is_some_and(|(_, given)| bool::from(given.trim().as_bytes().ct_eq(key.as_bytes()))) {
                    return Ok(());
                }
                let text = "the key is missing or wrong; send Authorization: Bearer KEY";
                Err(Refusal::new(StatusCode::UNAUTHORIZED, text).with_code("invalid_api_key"))
            }
            None => {
                let host = text(header::HOST).unwrap_or_default();
                if is_this_machine(host) {
                    return Ok(());
                }
                let text = format!("the host {host:?} is not this machine; without a key only localhost may ask");
                Err(Refusal::new(StatusCode::FORBIDDEN, text))
            }
        }
    }
}

/// Whether a `Host` header names this machine: `localhost` or a loopback address, with or without a port.
fn is_this_machine(host: &str) -> bool {
    let port = host.rsplit_once(':').filter(|(_, port)| port.bytes().all(|b| b.is_ascii_digit()));
    let name = port.map_or(host, |(name, _)| name);
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    name.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

async fn passed(State(gate): State<Arc<Gate>>, request: Request, next: Next) -> Response {
    let address = named(request.uri().path());
    let mut response = match gate.check(&request) {
        Ok(()) => tokio::select! {
            response = next.run(request) => response,
            refusal = gate.ending.cut() => refusal.into_response(),
        },
        Err(refusal) => refusal.into_response(),
    };
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, header::HeaderValue::from_static("nosniff"));
    gate.metrics.replied(address, response.status().as_u16());
    response
}

/// The name of an address among the metrics.
fn named(path: &str) -> &'static str {
    if path.starts_with("/v1/models/") {
        return "/v1/models";
    }
    let known = ["/", "/health", "/metrics", "/v1/models", "/v1/chat/completions", "/v1/completions"];
    known.into_iter().find(|address| *address == path).unwrap_or("other")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::engine::Piece;
    use model_qwen3::config::Qwen3Config;
    use std::{
        io::{Read, Write},
        net::TcpStream,
        path::Path,
        sync::atomic::{AtomicBool, Ordering},
    };

    /// Long enough for everything that is to happen here.
    const LONG: Duration = Duration::from_secs(60);
    const TIMES: Times =
        Times { head: LONG, body: LONG, answer: LONG, connection: LONG, last_answers: Duration::from_secs(5) };
    /// Too short for a client that waits.
    const SHORT: Duration = Duration::from_millis(200);

    /// A server whose answers never end, because nobody makes them.
    fn app(queue: mpsc::UnboundedSender<Question>, times: Times) -> App {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
        let config = Qwen3Config::from_file(&demo.join("config.json")).unwrap();
        App {
            text: TextFiles::open(&demo, &config).unwrap(),
            model: "demo".into(),
            vocabulary: config.vocab_size,
            context: 64,
            queue,
            places: Arc::new(Semaphore::new(LONGEST_QUEUE)),
            parsers: Arc::new(Semaphore::new(MOST_PARSERS)),
            metrics: Default::default(),
            began: 0,
            replies: Default::default(),
            ending: Default::default(),
            times,
        }
    }

    fn reply(mut stream: TcpStream) -> String {
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    struct Served {
        address: SocketAddr,
        /// Asks the server to end.
        ends: Arc<AtomicBool>,
        server: std::thread::JoinHandle<std::io::Result<usize>>,
        queue: mpsc::UnboundedReceiver<Question>,
    }

    fn served(times: Times) -> Served {
        let (sender, queue) = mpsc::unbounded_channel::<Question>();
        let app = app(sender, times);
        let (ending, router) = (app.ending.clone(), router(app, None));
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let ends = Arc::new(AtomicBool::new(false));
        let signal = ends.clone();
        let server = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            let signal = || signal.load(Ordering::Relaxed).then_some("SIGTERM");
            runtime.block_on(accept(listener, router, &ending, times, signal))
        });
        Served { address, ends, server, queue }
    }

    fn connected(address: SocketAddr) -> TcpStream {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream
    }

    fn ask(address: SocketAddr, header: &str, length: usize, body: &str) -> TcpStream {
        let mut stream = connected(address);
        let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
        write!(stream, "{head}Content-Length: {length}\r\n{header}\r\n{body}").unwrap();
        stream
    }

    /// A client that sends half of a head, or nothing, is not waited for; nor is one that sends half of a body. An answer that
    /// takes too long is one no longer, whole or in pieces. No connection stays for ever.
    #[test]
    fn what_takes_too_long_ends() {
        let slow_head = served(Times { head: SHORT, ..TIMES });
        let mut half = connected(slow_head.address);
        half.write_all(b"GET /health HTTP/1.1\r\nHost: ").unwrap();
        assert_eq!(reply(half), "");
        assert_eq!(reply(connected(slow_head.address)), "");

        let slow_body = served(Times { body: SHORT, ..TIMES });
        let text = reply(ask(slow_body.address, "Connection: close\r\n", 100, "{"));
        assert!(text.starts_with("HTTP/1.1 408") && text.contains("the body took longer than 0.2 seconds"), "{text}");

        let slow_answer = served(Times { answer: SHORT, ..TIMES });
        let asked = |body: &str| reply(ask(slow_answer.address, "Connection: close\r\n", body.len(), body));
        let text = asked(r#"{"prompt": "a"}"#);
        assert!(text.starts_with("HTTP/1.1 504") && text.contains("the answer took longer than 0.2 seconds"), "{text}");
        let text = asked(r#"{"prompt": "a", "stream": true}"#);
        assert!(text.starts_with("HTTP/1.1 200") && text.contains("the answer took longer than 0.2 seconds"), "{text}");
        assert!(!text.contains("[DONE]"), "{text}");

        // Long enough for an answer, also on a machine that is busy.
        let short_lived = served(Times { connection: 10 * SHORT, ..TIMES });
        let mut kept = connected(short_lived.address);
        kept.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let text = reply(kept);
        assert!(text.starts_with("HTTP/1.1 200"), "{text}");

        for Served { ends, server, .. } in [slow_head, slow_body, slow_answer, short_lived] {
            ends.store(true, Ordering::Relaxed);
            assert_eq!(server.join().unwrap().unwrap(), 0);
        }
    }

    #[test]
    fn who_connects_at_the_end_is_refused_and_whose_answer_is_cut_is_told() {
        let Served { address, ends, server, mut queue } = served(TIMES);
        let ask = |header: &str, length: usize, body: &str| ask(address, header, length, body);
        // One answer at once, one in pieces, and a question that does not arrive as a whole.
        let (whole, pieces) = (r#"{"prompt": "a"}"#, r#"{"prompt": "a", "stream": true}"#);
        let whole = ask("", whole.len(), whole);
        let _first = queue.blocking_recv().unwrap();
        let pieces = ask("", pieces.len(), pieces);
        let second = queue.blocking_recv().unwrap();
        second.heard_by.send((0, Piece::Text("b".into(), vec![]))).unwrap();
        let mut half = ask("Expect: 100-continue\r\n", 100, "");
        let mut goes_on = [0; 25];
        half.read_exact(&mut goes_on).unwrap();
        assert_eq!(&goes_on, b"HTTP/1.1 100 Continue\r\n\r\n");

        ends.store(true, Ordering::Relaxed);
        while TcpStream::connect(address).is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!second.heard_by.is_closed(), "new connections were taken until the last answer was cut");
        for stream in [whole, half] {
            let text = reply(stream);
            assert!(text.starts_with("HTTP/1.1 503") && text.contains("the server ends"), "{text}");
        }
        let text = reply(pieces);
        assert!(text.starts_with("HTTP/1.1 200") && text.contains(r#""text":"b""#), "{text}");
        assert!(text.contains("the server ends") && !text.contains("[DONE]"), "{text}");
        assert_eq!(server.join().unwrap().unwrap(), 2);
    }
}
