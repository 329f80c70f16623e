//! Texts that end an answer (`--stop`). They may begin within one token and end within another, so text that could be the
//! beginning of one is held back until it is certain.

/// Lets the text of an answer through up to the first of several texts.
#[derive(Debug)]
pub struct StopText {
    stops: Vec<String>,
    /// Text that could be the beginning of a stop.
    held: String,
}

impl StopText {
    /// Looks for these texts.
    pub fn new(stops: &[String]) -> Self {
        Self { stops: stops.to_vec(), held: String::new() }
    }

    /// Adds text. Returns what is certainly in front of every stop, and whether a stop was found behind it.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        self.held += piece;
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let uncertain = self.stops.iter().map(|stop| begun(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - uncertain);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// The text that was held back, when no more follows.
    pub fn finish(self) -> String {
        self.held
    }
}

/// Bytes of the longest end of `text` that is a beginning of `stop`.
fn begun(text: &str, stop: &str) -> usize {
    let lengths = stop.char_indices().map(|(at, _)| at).rev();
    lengths.into_iter().find(|at| text.ends_with(&stop[..*at])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::StopText;

    #[test]
    fn a_stop_is_found_across_pieces_and_what_only_looked_like_one_comes_back() {
        let stops = ["END".to_owned(), "。。".to_owned()];
        let shown = |pieces: &[&str]| {
            let mut until = StopText::new(&stops);
            let mut text = String::new();
            for piece in pieces {
                let (more, found) = until.push(piece);
                text += &more;
                if found {
                    return (text, true);
                }
            }
            (text + &until.finish(), false)
        };
        assert_eq!(shown(&["one E", "N", "D two"]), ("one ".into(), true));
        assert_eq!(shown(&["EEN", "DED"]), ("E".into(), true));
        assert_eq!(shown(&["EN", "EN", "ding"]), ("ENENding".into(), false));
        assert_eq!(shown(&["你好。", "。好"]), ("你好".into(), true));
        assert_eq!(shown(&["你好。", "好"]), ("你好。好".into(), false));
        assert_eq!(shown(&["a。。bEND"]), ("a".into(), true), "the first in the text counts");
        assert_eq!(shown(&["E"]), ("E".into(), false));
        // What is certain is not held back.
        assert_eq!(StopText::new(&stops).push("oneE"), ("one".into(), false));
        assert_eq!(StopText::new(&[]).push("one"), ("one".into(), false));
    }
}
