//! `chat`: a conversation. All turns share one cache: each reads only what is new since the one before.

use super::flags;
use crate::{
    CliError,
    args::{ChatArgs, SamplingArgs},
    device::{self, Job},
    interrupt::{CtrlC, Signal},
    report,
    talk::{
        answer::{self, Answer, INTERRUPTED, LENGTH},
        dialog::{Dialog, Prompt},
        entry::{Entry, HELP, Source},
        first_answers::Expected,
        loaded::{Loaded, Opened, thinking},
    },
};
use backend_nvfp4::{DeviceMemory, DeviceServices, Nvfp4Kernels, Precision};
use model_qwen3::session::Session;
use std::path::Path;

/// Runs the command.
///
/// # Errors
/// If a flag is out of range, the model cannot be loaded or run, or a script has a wrong line.
pub fn run(args: ChatArgs) -> Result<(), CliError> {
    flags::check(&args.sampling, "--")?;
    device::run(args.model.device, args.model.compute_dtype, Chat(args))
}

struct Chat(ChatArgs);

impl Job for Chat {
    type Output = ();

    fn remedy(&self) -> &'static str {
        "give a smaller --context, or --kv-cache-dtype fp8"
    }

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, precision: Precision) -> Result<(), CliError> {
        let args = self.0;
        // The script is read before the model, which takes longer.
        let mut source = Source::new(args.script.as_deref())?;
        if args.system_prompt.is_some() && source.has_system() {
            let text = "--script: the conversation has a system message; leave out --system-prompt";
            return Err(CliError::Usage(text.into()));
        }
        let opened = Opened::new(flags::wanted(&args.model, args.cache.kv_cache_dtype.format(precision)?))?;
        let context = flags::context(args.context, opened.config().max_position_embeddings)?;
        let mut loaded = opened.load::<B>(Some(Expected::unknown(1)), precision, &device)?;
        loaded.inputs.extend(args.script);
        let ctrl_c = CtrlC::new().map_err(CliError::io(Path::new("signals")))?;
        let mut talk = Talk {
            session: Session::new(&loaded.model, context)?,
            loaded: &loaded,
            context,
            dialog: Dialog::new(args.system_prompt, thinking(args.thinking, &loaded.text)),
            sampling: args.sampling,
            json: args.json,
            ctrl_c,
            is_typed: source.is_terminal(),
            last: None,
        };
        let sampling = flags::options(&talk.sampling, &loaded.text, talk.dialog.thinking).sampling;
        answer::say_sampling(&sampling, &loaded.text, talk.dialog.thinking);
        report::label("context", format!("{context} tokens"));
        if source.is_terminal() {
            report::line("/help shows the commands; Ctrl-D ends.");
        }
        while let Some(entry) = next_entry(&mut source, &talk.ctrl_c)? {
            match entry.map_err(CliError::Usage).and_then(|entry| talk.follow(entry)) {
                // Nobody would get a further answer.
                Ok(true) if report::is_lost() => break,
                Ok(true) => {}
                Ok(false) => break,
                // A person sees what was wrong and can try again; nobody watches a script.
                Err(error @ (CliError::Usage(_) | CliError::Data { .. } | CliError::Io { .. }))
                    if source.is_terminal() =>
                {
                    report::error(&error);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// The next entry of a source. A terminal without raw mode, such as that of Emacs, makes a signal of Ctrl-C and discards the line
/// by itself, so that the signal must do nothing.
fn next_entry(source: &mut Source, ctrl_c: &CtrlC) -> Result<Option<Result<Entry, String>>, CliError> {
    if source.is_terminal() { ctrl_c.during(|_| source.next_entry()) } else { source.next_entry() }
}

/// A conversation with a loaded model.
struct Talk<'a, B: Nvfp4Kernels> {
    session: Session<'a, B>,
    loaded: &'a Loaded<B>,
    /// Most tokens of the conversation.
    context: usize,
    dialog: Dialog,
    sampling: SamplingArgs,
    json: bool,
    ctrl_c: CtrlC,
    /// Whether a person types, who says what comes after an answer that was stopped.
    is_typed: bool,
    /// The figures of the last answer.
    last: Option<String>,
}

impl<B: Nvfp4Kernels + DeviceMemory> Talk<'_, B> {
    /// Does what was entered. Returns whether the conversation goes on.
    fn follow(&mut self, entry: Entry) -> Result<bool, CliError> {
        match entry {
            Entry::Say(text) => self.say(&text)?,
            Entry::System(text) => self.dialog.system = text,
            Entry::Reset => self.dialog.reset(),
            Entry::Undo if self.dialog.undo() => {}
            Entry::Undo => return Err(CliError::Usage("/undo: nothing was said yet".into())),
            Entry::Save(path) => {
                let done = if self.dialog.save(&path, &self.loaded.inputs)? { "replaced" } else { "saved" };
                report::line(format!("{done} {}", path.display()));
            }
            Entry::Load(path) => {
                self.dialog.load(&path)?;
                report::line(format!(
                    "{} from {}",
                    report::count(self.dialog.message_count(), "message"),
                    path.display()
                ));
            }
            Entry::Set(name, value) => {
                let mut changed = self.sampling.clone();
                set(&mut changed, &name, &value)?;
                flags::check(&changed, "/set ")?;
                self.sampling = changed;
            }
            Entry::Think(asked) => self.dialog.thinking = thinking(asked, &self.loaded.text),
            Entry::Stats => self.stats()?,
            Entry::Help => report::line(HELP),
            Entry::Exit => return Ok(false),
        }
        Ok(true)
    }

    /// Answers a message. A message that cannot be answered, or whose answer is stopped before it begins, is forgotten. Where
    /// nobody types, a stopped answer ends the conversation.
    fn say(&mut self, message: &str) -> Result<(), CliError> {
        self.dialog.ask(message);
        let answered = self.answered(message);
        match &answered {
            Ok((prompt, answer)) if !(answer.text.is_empty() && answer.stop() == INTERRUPTED) => {
                self.dialog.reply(prompt, answer);
            }
            _ => {
                self.dialog.undo();
            }
        }
        match answered?.1.stop() {
            INTERRUPTED if !self.is_typed => Err(CliError::Stopped(Signal::CTRL_C)),
            _ => Ok(()),
        }
    }

    fn answered(&mut self, message: &str) -> Result<(Prompt, Answer), CliError> {
        let text = &self.loaded.text;
        let prompt = self.dialog.prompt(text)?;
        let ids = &prompt.ids;
        let room = self.context.saturating_sub(ids.len());
        if room == 0 {
            return Err(CliError::Usage(format!(
                "the conversation has {} with this message, and the context ends at {}; take messages back with /undo, \
                 begin anew with /reset, or start with a larger --context",
                report::count(ids.len(), "token"),
                self.context
            )));
        }
        let mut options = flags::options(&self.sampling, text, self.dialog.thinking);
        options.max_tokens = options.max_tokens.min(room);
        let (session, ends) = (&mut self.session, &self.sampling.stop);
        let answer =
            self.ctrl_c.during(|pressed| Answer::of(session, text, ids, &options, ends, !self.json, pressed))?;
        if self.json {
            report::result(answer.json(message).to_string());
        } else {
            report::stream("\n");
        }
        let used = ids.len() + answer.generation.ids.len();
        let figures = format!("{} · context {used} of {}", answer.figures(), self.context);
        report::line(&figures);
        if used >= self.context && answer.stop() == LENGTH {
            report::line("note: the answer was cut because the context is full");
        }
        self.last = Some(figures);
        Ok((prompt, answer))
    }

    fn stats(&self) -> Result<(), CliError> {
        let messages = self.dialog.message_count();
        // Some templates refuse a conversation in which nobody has spoken.
        let prompt = if messages == 0 { vec![] } else { self.dialog.prompt(&self.loaded.text)?.ids };
        let cached = match self.session.cached(&prompt) {
            0 => String::new(),
            cached => format!(" ({cached} cached)"),
        };
        report::line(format!(
            "{}, {} of {} tokens{cached}",
            report::count(messages, "message"),
            prompt.len(),
            self.context
        ));
        if let Some(last) = &self.last {
            report::line(format!("last answer: {last}"));
        }
        let s = flags::options(&self.sampling, &self.loaded.text, self.dialog.thinking).sampling;
        let values = answer::values(&s).join(" · ");
        report::line(format!("{values} · max-tokens {} · seed {}", self.sampling.max_tokens, s.seed));
        Ok(())
    }
}

/// Changes one of the sampling flags.
fn set(sampling: &mut SamplingArgs, name: &str, value: &str) -> Result<(), CliError> {
    fn parsed<T: std::str::FromStr>(name: &str, value: &str, wanted: &str) -> Result<T, CliError> {
        value.parse().map_err(|_| CliError::Usage(format!("/set {name} {value}: the value must be {wanted}")))
    }
    let (number, whole) = ("a number", "a whole number, at least 0");
    match name {
        "temperature" | "temp" => sampling.temperature = Some(parsed(name, value, number)?),
        "top-p" => sampling.top_p = Some(parsed(name, value, number)?),
        "top-k" => sampling.top_k = Some(parsed(name, value, whole)?),
        "min-p" => sampling.min_p = Some(parsed(name, value, number)?),
        "repetition-penalty" => sampling.repetition_penalty = Some(parsed(name, value, number)?),
        "max-tokens" => sampling.max_tokens = parsed(name, value, whole)?,
        "seed" => sampling.seed = parsed(name, value, whole)?,
        _ => return Err(CliError::Usage(format!("/set {name}: there is no such setting; /help lists them"))),
    }
    Ok(())
}
