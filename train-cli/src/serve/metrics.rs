//! What a server counts, in Prometheus's text format.

use crate::talk::answer::Answer;
use std::{
    collections::BTreeMap,
    fmt::Write,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

/// A number that rises and falls.
#[derive(Debug, Default)]
pub(super) struct Gauge(AtomicUsize);

impl Gauge {
    /// Sets the number.
    pub(super) fn set(&self, value: usize) {
        self.0.store(value, Ordering::Relaxed);
    }
}

/// The counters of a server.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    /// Replies by address and status.
    replies: Mutex<BTreeMap<(&'static str, u16), u64>>,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    answer_tokens: AtomicU64,
    answers: AtomicU64,
    microseconds_to_first_token: AtomicU64,
    microseconds: AtomicU64,
    /// Answers that are being made.
    pub(super) running: Gauge,
    /// Answers that have not begun yet.
    pub(super) waiting: Gauge,
}

impl Metrics {
    /// Counts a reply.
    pub(super) fn replied(&self, address: &'static str, status: u16) {
        let mut replies = self.replies.lock().unwrap_or_else(PoisonError::into_inner);
        *replies.entry((address, status)).or_default() += 1;
    }

    /// Counts an answer.
    pub(super) fn answered(&self, answer: &Answer) {
        let add = |counter: &AtomicU64, value: u64| {
            counter.fetch_add(value, Ordering::Relaxed);
        };
        add(&self.answers, 1);
        add(&self.prompt_tokens, answer.prompt_tokens as u64);
        add(&self.cached_tokens, answer.cached_tokens as u64);
        add(&self.answer_tokens, answer.generation.ids.len() as u64);
        add(&self.microseconds_to_first_token, (answer.seconds_to_first_token * 1e6) as u64);
        add(&self.microseconds, (answer.seconds * 1e6) as u64);
    }

    /// All of them as text.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        let mut put = |name: &str, kind: &str, help: &str, values: &[(String, f64)]| {
            // Writing to a String does not fail.
            let _ = writeln!(text, "# HELP train_cli_{name} {help}\n# TYPE train_cli_{name} {kind}");
            for (labels, value) in values {
                let _ = writeln!(text, "train_cli_{name}{labels} {value}");
            }
        };
        let replies = self.replies.lock().unwrap_or_else(PoisonError::into_inner);
        let labels = |(address, status): &(&str, u16)| format!("{{address=\"{address}\",status=\"{status}\"}}");
        let replies: Vec<_> = replies.iter().map(|(key, count)| (labels(key), *count as f64)).collect();
        put("replies_total", "counter", "Replies by address and status.", &replies);
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
        let seconds = |counter: &AtomicU64| count(counter) / 1e6;
        for (name, help, value) in [
            ("answers_total", "Answers that have ended.", count(&self.answers)),
            ("prompt_tokens_total", "Tokens of their prompts, once for each answer.", count(&self.prompt_tokens)),
            ("cached_prompt_tokens_total", "Prompt tokens that were read before.", count(&self.cached_tokens)),
            ("answer_tokens_total", "Tokens of the answers.", count(&self.answer_tokens)),
            ("seconds_to_first_token_total", "Seconds to first tokens.", seconds(&self.microseconds_to_first_token)),
            ("answer_seconds_total", "Seconds of all answers.", seconds(&self.microseconds)),
        ] {
            put(name, "counter", help, &[(String::new(), value)]);
        }
        for (name, help, gauge) in [
            ("answers_running", "Answers that are being made.", &self.running),
            ("answers_waiting", "Answers that have not begun yet.", &self.waiting),
        ] {
            put(name, "gauge", help, &[(String::new(), gauge.0.load(Ordering::Relaxed) as f64)]);
        }
        text
    }
}
