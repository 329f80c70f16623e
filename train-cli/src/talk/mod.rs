//! A model that answers: [`loaded`] finds and loads it, [`first_answers`] says which kernels its first answers need, [`answer`] streams what it says, [`stop_text`] ends that at a text,
//! [`batch`] makes several answers at once, [`dialog`] keeps a conversation, [`entry`] reads what a person types.

pub mod answer;
pub mod batch;
pub mod dialog;
pub mod entry;
pub mod first_answers;
pub mod loaded;
pub mod stop_text;
