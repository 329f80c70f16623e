//! An error as OpenAI's clients read it: a status, and `{"error": {"message", "type", "param", "code"}}`. Few errors have a code:
//! those that clients tell apart by it.

use crate::CliError;
use axum::{
    Json,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use model_qwen3::ModelError;
use serde_json::{Value, json};

/// Why a request gets no answer.
#[derive(Debug, Clone)]
pub(super) struct Refusal {
    /// The HTTP status.
    pub(super) status: StatusCode,
    message: String,
    /// The field that is wrong.
    param: Option<String>,
    /// OpenAI's name of the error.
    code: Option<&'static str>,
}

impl Refusal {
    /// A refusal with a status and a message.
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None }
    }

    /// A request that cannot be answered as it is.
    pub(super) fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// A field that is wrong.
    pub(super) fn field(name: &str, reason: impl std::fmt::Display) -> Self {
        Self { param: Some(name.to_owned()), ..Self::bad(format!("{name}: {reason}")) }
    }

    /// The same refusal with OpenAI's name of the error.
    pub(super) fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// The text of a field does not become tokens. That the system gives no thread for it is not the client's fault.
    pub(super) fn of_text(name: &str, error: ModelError) -> Self {
        match error {
            ModelError::Thread { .. } | ModelError::GivenUp { .. } => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
            }
            error => Self::field(name, error),
        }
    }

    /// The body of the reply.
    pub(super) fn json(&self) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.json())).into_response();
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<CliError> for Refusal {
    fn from(error: CliError) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
    }
}
