//! Every choice that a training run makes: its flag, its key in a config file, its default, its range.
//!
//! One [`Settings`] value is the config file, the record in a checkpoint and the `config.toml` of a run
//! folder. Defaults, file and flags are put together by [`Layer`]; `--help` prints the defaults of
//! [`Settings`].
//!
//! To add a setting, add a field with its help text to [`fields`], its default to the `Default` below the struct (to [`defaults`]
//! if it depends on the model or on the run), and its range to [`fields::RANGES`] if it is a number. A setting that a resumed run
//! may change also goes into `FREE`.

mod amount;
mod choices;
pub mod defaults;
pub mod extensions;
pub mod fields;
mod layer;
mod record;

pub(crate) use amount::bytes;
pub use choices::{
    AUTO, Auto, CacheDtype, Choice, Clip, Decay, DeviceChoice, Format, HeadFormat, LossKind, LossOn, Nvfp4Part,
    Overlong, Recompute, ReportTo, ResumeFrom, SaveStrategy, parser,
};
pub(crate) use choices::{by_name, name_of};
pub(crate) use fields::TOKENIZER;
pub use fields::{MOST_WEIGHT, Settings};
pub use layer::Layer;
pub(crate) use layer::with_flags;
pub use record::{Change, flag, not_recordable};
