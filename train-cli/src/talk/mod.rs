//! A model that answers: [`loaded`] finds and loads it, [`first_answers`] rehearses its first answers so that their kernels are
//! compiled, [`answer`] streams an answer, [`stop_text`] ends an answer at a text, [`batch`] makes several answers at once,
//! [`dialog`] keeps a conversation, [`known_tokens`] its tokens, [`transcript`] is the format of a saved one, [`message`] checks
//! messages that somebody sends, [`entry`] reads what a person types.

pub mod answer;
pub mod batch;
pub mod dialog;
pub mod entry;
pub mod first_answers;
pub mod known_tokens;
pub mod loaded;
pub mod message;
pub mod stop_text;
pub mod transcript;
