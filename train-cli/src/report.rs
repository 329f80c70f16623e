//! All printing. Results go to standard output; progress and messages go to standard error, one plain line each, so
//! that either can be kept in a file. A terminal gets lines that fit it.

use crate::{progress, wrapping};
use backend_nvfp4::Precision;
use std::{
    error::Error,
    io::{ErrorKind, IsTerminal, Write},
    sync::OnceLock,
};
use terminal_size::terminal_size_of;

/// Prints a line of progress.
pub fn line(text: impl AsRef<str>) {
    to_stderr(&(wrapping::lines(text.as_ref(), width_of_stderr()) + "\n"));
}

/// Prints a command that can be copied: one line on every terminal.
pub fn command(text: impl AsRef<str>) {
    to_stderr(&format!("  {}\n", text.as_ref()));
}

/// Prints a line that begins with a label, as the header of a run does.
pub fn label(name: &str, text: impl AsRef<str>) {
    to_stderr(&labeled(name, text.as_ref(), width_of_stderr()));
}

/// A line that begins with a label.
fn labeled(name: &str, text: &str, width: Option<usize>) -> String {
    wrapping::hanging(&format!("  {name:<9} "), text, width) + "\n"
}

fn width_of_stderr() -> Option<usize> {
    terminal_size_of(std::io::stderr()).map(|(width, _)| usize::from(width.0))
}

/// The width of the terminal that results are printed to, in columns. None if they go to a file or a pipe.
pub fn width() -> Option<usize> {
    terminal_size_of(std::io::stdout()).map(|(width, _)| usize::from(width.0))
}

/// Says that the output has no scales of activations, if the model's files have some (`given`).
pub fn unscaled_inputs(given: bool) {
    if given {
        label("inputs", "the model's files give the scales of activations; the output has none");
    }
}

/// Prints a line of result.
pub fn result(text: impl AsRef<str>) {
    stream(&format!("{}\n", text.as_ref()));
}

/// Prints the next piece of an answer.
pub fn stream(text: &str) {
    progress::above(|| {
        let mut out = std::io::stdout().lock();
        if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            LOST.get_or_init(|| error);
        }
    });
}

/// The green of a terminal: a color of its table of 256, which can be read on white and on black.
pub const GREEN: u8 = 29;

/// What makes the text that follows bold on a terminal.
pub const BOLD: &str = "\x1b[1m";

/// What makes the text that follows bold and [`GREEN`] on a terminal.
pub const BOLD_GREEN: &str = "\x1b[1;38;5;29m";

/// What stands in front of a text that a terminal shows in a style, and behind it. None if results go to a file or a pipe, or the
/// user wants no colors (<https://no-color.org>).
pub fn marks(style: &'static str) -> Option<[&'static str; 2]> {
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    (std::io::stdout().is_terminal() && !plain).then_some([style, "\x1b[0m"])
}

/// Why a result could not be printed, the first time.
static LOST: OnceLock<std::io::Error> = OnceLock::new();

/// Whether a result could not be printed, so that nobody gets those that follow.
pub fn is_lost() -> bool {
    LOST.get().is_some()
}

/// Whether a result could not be printed because its reader has closed its end of a pipe, and wanted no more of it.
pub fn is_unwanted(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::BrokenPipe
}

/// Whether every result was printed that its reader wanted.
///
/// # Errors
/// If standard output refused one.
pub fn all_printed() -> std::io::Result<()> {
    match LOST.get() {
        Some(error) if !is_unwanted(error) => Err(std::io::Error::new(error.kind(), error.to_string())),
        _ => Ok(()),
    }
}

/// Prints the device and the number format of a job, so that nothing is chosen silently.
pub fn chosen_device(device: &str, precision: Precision) {
    label("device", format!("{device} · {}", precision.name()));
}

/// Prints an error with its causes.
pub fn error(error: &dyn Error) {
    line(format!("error: {error}"));
    let mut cause = error.source();
    while let Some(inner) = cause {
        let text = inner.to_string();
        if !error.to_string().contains(&text) {
            line(format!("caused by: {text}"));
        }
        cause = inner.source();
    }
}

/// Prints the error of a program that ends at once, whatever another part of it was printing.
pub fn last_error(error: &dyn Error) {
    let _ = writeln!(std::io::stderr(), "error: {error}");
}

/// A number of things: `0 rows`, `1 row`, `2 rows`.
pub fn count(n: usize, thing: &str) -> String {
    if n == 1 { format!("1 {thing}") } else { format!("{n} {thing}s") }
}

/// A large number with a unit: 12.3k, 3.4M, 4.02B.
pub fn short(value: f64) -> String {
    match value {
        v if v >= 1e9 => format!("{:.2}B", v / 1e9),
        v if v >= 1e6 => format!("{:.1}M", v / 1e6),
        v if v >= 1e4 => format!("{:.1}k", v / 1e3),
        v => format!("{v:.0}"),
    }
}

/// Bytes in a unit in which they say something: `7.5 GiB`, `317 MiB`, `4.2 MiB`, `12 KiB`.
pub fn size(bytes: u64) -> String {
    let (unit, name) = unit(bytes);
    let value = bytes as f64 / unit;
    // 1,023.7 MiB is 1.0 GiB, not 1024 MiB.
    match name {
        "GiB" => format!("{value:.1} GiB"),
        _ if value >= 1023.5 => size(1024 * unit as u64),
        "MiB" if value < 9.95 => format!("{value:.1} MiB"),
        _ => format!("{value:.0} {name}"),
    }
}

/// The unit for so many bytes, in bytes, and its name. The rows of a column take the unit of the largest.
pub fn unit(bytes: u64) -> (f64, &'static str) {
    match bytes {
        0x4000_0000.. => (f64::from(1 << 30), "GiB"),
        0x10_0000.. => (f64::from(1 << 20), "MiB"),
        _ => (1024.0, "KiB"),
    }
}

/// Seconds as m:ss or h:mm:ss.
pub fn duration(seconds: f64) -> String {
    let s = seconds.max(0.0).round() as u64;
    if s >= 3600 {
        format!("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60)
    } else {
        format!("{}:{:02}", s / 60, s % 60)
    }
}

/// A word that a shell reads as it is, on one line. Control characters are escaped, as bash and zsh read them.
pub fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_./:,+@".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    if !text.contains(char::is_control) {
        return format!("'{}'", text.replace('\'', "'\\''"));
    }
    let escaped = |c: char| match c {
        '\'' | '\\' => format!("\\{c}"),
        '\n' => "\\n".to_owned(),
        '\t' => "\\t".to_owned(),
        c if c.is_control() => format!("\\u{:04x}", u32::from(c)),
        c => c.to_string(),
    };
    format!("$'{}'", text.chars().map(escaped).collect::<String>())
}

fn to_stderr(text: &str) {
    progress::above(|| {
        let _ = std::io::stderr().lock().write_all(text.as_bytes());
    });
}

#[cfg(test)]
mod tests {
    use super::{BOLD_GREEN, GREEN, labeled, quoted, size};

    #[test]
    fn a_quoted_word_is_one_line() {
        for (text, expected) in [
            ("a-b", "a-b"),
            ("", "''"),
            ("it's", r"'it'\''s'"),
            ("a\nb", r"$'a\nb'"),
            ("it's \\\t\u{1b}", r"$'it\'s \\\t\u001b'"),
        ] {
            assert_eq!(quoted(text), expected);
        }
    }

    /// Web pages ask for a contrast of 4.5 between a text and what is behind it (WCAG 2, AA).
    #[test]
    fn green_can_be_read_on_white_and_on_black() {
        // Colors from 16 on are a cube of six levels of red, green and blue.
        let levels = [0, 95, 135, 175, 215, 255].map(|level| f64::from(level) / 255.0);
        let light = |level: usize| {
            let value = levels[level % 6];
            if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
        };
        let place = usize::from(GREEN) - 16;
        let luminance = 0.2126 * light(place / 36) + 0.7152 * light(place / 6) + 0.0722 * light(place);
        let (on_white, on_black) = (1.05 / (luminance + 0.05), (luminance + 0.05) / 0.05);
        assert!(on_white >= 4.5 && on_black >= 4.5, "{on_white}, {on_black}");
        assert_eq!(BOLD_GREEN, format!("\x1b[1;38;5;{GREEN}m"));
    }

    #[test]
    fn a_size_has_a_unit_in_which_it_says_something() {
        let (kib, mib, gib) = (1 << 10, 1 << 20, 1_u64 << 30);
        for (bytes, shown) in [
            (0, "0 KiB"),
            (700, "1 KiB"),
            (12 * kib, "12 KiB"),
            (mib - 1, "1.0 MiB"),
            (mib * 42 / 10, "4.2 MiB"),
            (mib * 998 / 100, "10 MiB"),
            (317 * mib, "317 MiB"),
            (gib - 1, "1.0 GiB"),
            (gib * 15 / 2, "7.5 GiB"),
            (1 << 40, "1024.0 GiB"),
        ] {
            assert_eq!(size(bytes), shown, "{bytes}");
        }
    }

    #[test]
    fn a_label_fits_the_terminal_and_keeps_words_whole() {
        let text =
            "bf16 master weights · int8 optimizer states · no gradient clipping · runs/a-long-path/of-a-run-folder";
        assert_eq!(labeled("step", text, None), format!("  step      {text}\n"), "a file gets one line");
        let narrow = labeled("step", text, Some(40));
        assert!(narrow.starts_with("  step      bf16 master weights"), "{narrow}");
        assert!(narrow.lines().skip(1).all(|line| line.starts_with("            ")), "{narrow}");
        let long = |line: &&str| line.chars().count() > 40 && !line.contains("runs/a-long-path/of-a-run-folder");
        assert_eq!(narrow.lines().find(long), None);
        assert_eq!(narrow.split_whitespace().skip(1).collect::<Vec<_>>(), text.split_whitespace().collect::<Vec<_>>());
    }
}
