//! How long a client, an answer and a connection may take.

use std::time::Duration;

/// The longest times of a server.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    /// Of the head of a request, and of a connection without a request.
    pub(super) head: Duration,
    /// Of the body of a request, until it has arrived.
    pub(super) body: Duration,
    /// Of an answer, with the time in which it waits for its turn.
    pub(super) answer: Duration,
    /// Of a connection. A client that reads nothing holds one as long.
    pub(super) connection: Duration,
    /// Of answers that are being made when the server is asked to end.
    pub(super) last_answers: Duration,
}

impl Times {
    /// Those of the program.
    pub(super) const OF_SERVER: Self = Self {
        head: Duration::from_secs(10),
        body: Duration::from_secs(30),
        answer: Duration::from_secs(600),
        connection: Duration::from_secs(3600),
        last_answers: Duration::from_secs(30),
    };
}
