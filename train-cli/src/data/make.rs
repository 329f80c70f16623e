//! Training rows from a recipe: templates whose slots are filled from pools of texts. A recipe is a TOML file; the same recipe,
//! seed and count always make the same rows.
//!
//! The combinations of a template are numbered: its last slot changes with every row, the one before when that has gone
//! through its pool, and so on. `every` gives a slot another pace. A template takes its combinations in this order, or at
//! random.

use crate::{data::rows::permutation, toml_text};
use backend_nvfp4::{Stream, reference};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashSet};

/// Most rows that a recipe makes.
const MOST_ROWS: usize = 10_000_000;

/// So many draws in a row that give nothing new end the making of a template's rows.
const VAIN_DRAWS: usize = 10_000;

/// A recipe.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowRecipe {
    /// First line of a tab-separated file.
    pub header: Option<String>,
    /// Seed of what is drawn and of the order.
    #[serde(default)]
    pub seed: u64,
    /// Number of rows, which the templates share in proportion to their counts.
    pub count: Option<usize>,
    /// The order of the rows.
    #[serde(default)]
    order: RowOrder,
    /// Which rows are left out because an earlier one is like them.
    #[serde(default)]
    dedupe: Dedupe,
    /// Texts by the name of their slot.
    #[serde(default)]
    pools: BTreeMap<String, Vec<String>>,
    /// The templates.
    rows: Vec<Template>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum RowOrder {
    /// As the recipe lists the templates.
    #[default]
    Listed,
    Shuffled,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Dedupe {
    #[default]
    None,
    /// A prompt occurs once.
    Prompts,
    /// A prompt occurs once with each answer.
    Rows,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Pick {
    #[default]
    InOrder,
    Random,
}

/// Rows that are alike: a prompt and an answer with slots, or pairs of a prompt and an answer without slots.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Template {
    name: Option<String>,
    prompt: Option<String>,
    answer: Option<String>,
    #[serde(default)]
    pairs: Vec<(String, String)>,
    /// Number of rows; all combinations if it is not given.
    count: Option<usize>,
    #[serde(default)]
    pick: Pick,
    /// For a slot, after how many rows it changes.
    #[serde(default)]
    every: BTreeMap<String, usize>,
    /// Number of combinations, if it is not that of all texts of the slots with each other.
    numbers: Option<usize>,
    /// The number of the first combination, for `{number}`.
    #[serde(default = "one")]
    first: usize,
    dedupe: Option<Dedupe>,
}

fn one() -> usize {
    1
}

/// A row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MadeRow {
    /// What is asked.
    pub prompt: String,
    /// What the model is to answer.
    pub answer: String,
}

/// How often something occurs in the rows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Counted {
    /// The name of a template, or a text.
    pub what: String,
    /// Its rows.
    pub rows: usize,
}

/// What the rows are made of.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Balance {
    /// Number of rows.
    pub rows: usize,
    /// Rows that were left out because an earlier one is like them.
    pub duplicates: usize,
    /// Rows of each template.
    pub templates: Vec<Counted>,
    /// Rows with each answer, the most frequent first.
    pub answers: Vec<Counted>,
    /// Rows with each text of a pool.
    pub pools: BTreeMap<String, Vec<Counted>>,
}

impl RowRecipe {
    /// Reads a recipe.
    ///
    /// # Errors
    /// If the text is no TOML, or no recipe.
    pub fn parse(text: &str) -> Result<Self, String> {
        toml_text::parse(text)
    }

    /// Makes the rows, `count` of them if it is given, else as many as the recipe says.
    ///
    /// # Errors
    /// If a template is wrong, or cannot make as many different rows as it is to make.
    pub fn rows(&self, seed: u64, count: Option<usize>) -> Result<(Vec<MadeRow>, Balance), String> {
        let mut templates = Vec::new();
        for (i, template) in self.rows.iter().enumerate() {
            let name = template.name.clone().unwrap_or_else(|| format!("rows {}", i + 1));
            templates.push(Filled::new(name.clone(), template, self).map_err(|e| format!("{name}: {e}"))?);
        }
        if let Some(total) = count.or(self.count) {
            let parts: Vec<usize> = templates.iter().map(|t| t.count).collect();
            if parts.iter().all(|part| *part == 0) {
                return Err(format!(
                    "every count is 0, so that no template has a share of the {total} rows; give counts"
                ));
            }
            templates.iter_mut().zip(allotted(&parts, total)).for_each(|(t, count)| t.count = count);
        }
        let total = templates.iter().map(|t| t.count as u128).sum::<u128>();
        if !(1..=MOST_ROWS as u128).contains(&total) {
            return Err(format!("the recipe makes {total} rows; it must make between 1 and {MOST_ROWS}"));
        }
        let (mut made, mut seen) = (Vec::new(), Seen::default());
        let mut balance = Balance::default();
        for (i, template) in templates.iter().enumerate() {
            let before = made.len();
            balance.duplicates += template.make(seed, i as u32, &mut seen, &mut made)?;
            balance.templates.push(Counted { what: template.name.clone(), rows: made.len() - before });
        }
        self.count_texts(&templates, &made, &mut balance);
        let order = match self.order {
            RowOrder::Listed => (0..made.len()).collect(),
            RowOrder::Shuffled => permutation(made.len(), seed, ORDER),
        };
        let mut made: Vec<Option<MadeRow>> = made.into_iter().map(|(row, ..)| Some(row)).collect();
        let rows: Vec<MadeRow> = order.into_iter().filter_map(|i| made[i].take()).collect();
        Ok((rows, balance))
    }

    /// Counts answers and texts of pools.
    fn count_texts(&self, templates: &[Filled<'_>], made: &[Made], balance: &mut Balance) {
        balance.rows = made.len();
        let mut answers: BTreeMap<&str, usize> = BTreeMap::new();
        let mut used: BTreeMap<&str, Vec<usize>> =
            self.pools.iter().map(|(name, texts)| (name.as_str(), vec![0; texts.len()])).collect();
        for (row, template, number) in made {
            *answers.entry(&row.answer).or_default() += 1;
            for slot in templates[*template as usize].slots.iter().filter(|slot| slot.name != PAIRS) {
                used.entry(slot.name).and_modify(|counts| counts[slot.index(*number)] += 1);
            }
        }
        let counted = |(what, rows): (&str, usize)| Counted { what: what.to_owned(), rows };
        balance.answers = answers.into_iter().map(counted).collect();
        balance.answers.sort_by_key(|answer| std::cmp::Reverse(answer.rows));
        balance.pools = used
            .into_iter()
            .map(|(name, counts)| {
                let texts = self.pools[name].iter().map(String::as_str).zip(counts);
                (name.to_owned(), texts.map(counted).collect())
            })
            .collect();
    }
}

/// A row, the index of its template, and the number of its combination, counted from 0.
type Made = (MadeRow, u32, usize);

/// The draw of the order, beside those of the templates.
const ORDER: u32 = u32::MAX;

/// The name of the slot that the pairs of a template are.
const PAIRS: &str = "";

/// A slot of a template.
struct Slot<'a> {
    name: &'a str,
    /// The number of its texts.
    len: usize,
    /// The rows after which it changes.
    every: usize,
}

impl Slot<'_> {
    /// Which text combination `number` has.
    fn index(&self, number: usize) -> usize {
        number / self.every % self.len
    }
}

/// A part of a prompt or answer.
enum TextPart<'a> {
    Text(String),
    /// The text of a slot, from this list.
    Slot(usize, Vec<&'a str>),
    /// The number of the combination, with at least so many digits.
    Number(usize),
}

/// A template with its pools.
struct Filled<'a> {
    name: String,
    prompt: Vec<TextPart<'a>>,
    answer: Vec<TextPart<'a>>,
    slots: Vec<Slot<'a>>,
    combinations: usize,
    count: usize,
    pick: Pick,
    first: usize,
    dedupe: Dedupe,
}

impl<'a> Filled<'a> {
    fn new(name: String, template: &'a Template, recipe: &'a RowRecipe) -> Result<Self, String> {
        let mut slots = Vec::new();
        let (prompt, answer) = match (&template.prompt, &template.answer, &template.pairs[..]) {
            (Some(prompt), Some(answer), []) => {
                let mut parsed = |text: &str| pieces(text, &recipe.pools, &mut slots);
                (parsed(prompt)?, parsed(answer)?)
            }
            (None, None, pairs) if !pairs.is_empty() => {
                slots.push(Slot { name: PAIRS, len: pairs.len(), every: 1 });
                let (prompts, answers) = pairs.iter().map(|(p, a)| (p.as_str(), a.as_str())).unzip();
                (vec![TextPart::Slot(0, prompts)], vec![TextPart::Slot(0, answers)])
            }
            _ => return Err("give `prompt` and `answer`, or `pairs` alone".into()),
        };
        let mut combinations = 1usize;
        for slot in slots.iter_mut().rev() {
            slot.every = combinations;
            combinations = combinations.checked_mul(slot.len).ok_or("too many combinations")?;
        }
        combinations = template.numbers.unwrap_or(combinations).max(1);
        for (name, every) in &template.every {
            let slot = slots.iter_mut().find(|slot| slot.name == name);
            let slot = slot.ok_or_else(|| format!("`every` names {name}, which is no slot of this template"))?;
            slot.every = (*every > 0).then_some(*every).ok_or("`every` must be at least 1")?;
        }
        Ok(Self {
            name,
            prompt,
            answer,
            slots,
            combinations,
            count: template.count.unwrap_or(combinations),
            pick: template.pick,
            first: template.first,
            dedupe: template.dedupe.unwrap_or(recipe.dedupe),
        })
    }

    /// Adds the rows of the template, and returns how many were left out as duplicates.
    fn make(&self, seed: u64, stream: u32, seen: &mut Seen, made: &mut Vec<Made>) -> Result<usize, String> {
        let (mut left_out, mut vain, mut draw) = (0, 0, 0u32);
        let until = made.len() + self.count;
        let mut number = 0;
        while made.len() < until - left_out {
            if self.pick == Pick::Random {
                let [a, b, ..] = reference::philox(draw, Stream { seed, step: stream, stream: 0x3A4E });
                number = ((u64::from(a) << 32 | u64::from(b)) % self.combinations as u64) as usize;
                draw = draw.wrapping_add(1);
            }
            let row = self.row(number)?;
            let is_new = seen.add(&row, self.dedupe);
            match (is_new, self.pick) {
                (true, _) => {
                    made.push((row, stream, number));
                    vain = 0;
                }
                (false, Pick::InOrder) => left_out += 1,
                // Another draw takes its place.
                (false, Pick::Random) => vain += 1,
            }
            if vain == VAIN_DRAWS {
                return Err(format!(
                    "{}: {} of {} rows are made, and {VAIN_DRAWS} more draws gave none that is new; lower its count, or add \
                     to its pools",
                    self.name,
                    made.len() + self.count - until,
                    self.count
                ));
            }
            number += 1;
        }
        Ok(left_out)
    }

    /// The row of combination `number`, counted from 0.
    fn row(&self, number: usize) -> Result<MadeRow, String> {
        let text = |pieces: &[TextPart<'_>]| {
            let mut text = String::new();
            for piece in pieces {
                match piece {
                    TextPart::Text(part) => text += part,
                    TextPart::Slot(slot, texts) => text += texts[self.slots[*slot].index(number)],
                    TextPart::Number(width) => text += &format!("{:0width$}", self.first.saturating_add(number)),
                }
            }
            text
        };
        let row = MadeRow { prompt: text(&self.prompt), answer: text(&self.answer) };
        if row.prompt.trim().is_empty() || row.answer.trim().is_empty() {
            return Err(format!("{}: row {} has an empty prompt or answer", self.name, number + 1));
        }
        Ok(row)
    }
}

/// The parts of a text with slots `{name}` and `{number}`, or `{number:04}` with at least four digits. A brace is written
/// twice.
fn pieces<'a>(
    text: &str,
    pools: &'a BTreeMap<String, Vec<String>>,
    slots: &mut Vec<Slot<'a>>,
) -> Result<Vec<TextPart<'a>>, String> {
    let (mut pieces, mut plain) = (Vec::new(), String::new());
    let mut rest = text;
    while let Some(at) = rest.find(['{', '}']) {
        let brace = &rest[at..=at];
        plain += &rest[..at];
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix(brace) {
            plain += brace;
            rest = after;
            continue;
        }
        let (name, after) = rest
            .split_once('}')
            .filter(|_| brace == "{")
            .ok_or_else(|| format!("{text:?} has a single brace; write it twice to have it in the row"))?;
        rest = after;
        pieces.push(TextPart::Text(std::mem::take(&mut plain)));
        pieces.push(match name.strip_prefix("number") {
            Some("") => TextPart::Number(0),
            Some(width) if width.starts_with(":0") => {
                let width = width[2..].parse().ok().filter(|width| *width <= 20);
                TextPart::Number(
                    width.ok_or_else(|| format!("{{{name}}}: write a width up to 20, as in {{number:04}}"))?,
                )
            }
            _ => {
                let (name, texts) = pools.get_key_value(name).ok_or_else(|| format!("there is no pool {name:?}"))?;
                if texts.is_empty() {
                    return Err(format!("pool {name:?} is empty"));
                }
                let known = slots.iter().position(|slot| slot.name == name);
                let slot = known.unwrap_or_else(|| {
                    slots.push(Slot { name, len: texts.len(), every: 1 });
                    slots.len() - 1
                });
                TextPart::Slot(slot, texts.iter().map(String::as_str).collect())
            }
        });
    }
    pieces.push(TextPart::Text(plain + rest));
    Ok(pieces)
}

/// The rows so far, to find those that are like an earlier one.
#[derive(Default)]
struct Seen {
    prompts: HashSet<String>,
    rows: HashSet<(String, String)>,
}

impl Seen {
    /// Whether a row is new. If it is, it is remembered.
    fn add(&mut self, row: &MadeRow, dedupe: Dedupe) -> bool {
        let pair = (row.prompt.clone(), row.answer.clone());
        let is_new = match dedupe {
            Dedupe::None => true,
            Dedupe::Prompts => !self.prompts.contains(&row.prompt),
            Dedupe::Rows => !self.rows.contains(&pair),
        };
        if is_new {
            self.prompts.insert(row.prompt.clone());
            self.rows.insert(pair);
        }
        is_new
    }
}

/// `total` in whole parts that are as `parts` are to each other, as nearly as possible.
fn allotted(parts: &[usize], total: usize) -> Vec<usize> {
    let sum = parts.iter().map(|part| *part as u128).sum::<u128>().max(1);
    let exact = |part: usize| part as u128 * total as u128;
    let mut whole: Vec<usize> = parts.iter().map(|part| (exact(*part) / sum) as usize).collect();
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by_key(|i| std::cmp::Reverse(exact(parts[*i]) % sum));
    let rest = total.saturating_sub(whole.iter().sum());
    order.into_iter().take(rest).for_each(|i| whole[i] += 1);
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    const POOLS: &str = "pools.a = ['x', 'y', 'z']\npools.b = ['1', '2']\npools.yes = ['ja', 'oui']\n";

    fn made(text: &str) -> (Vec<String>, Balance) {
        let recipe = RowRecipe::parse(text).unwrap();
        let (rows, balance) = recipe.rows(recipe.seed, None).unwrap();
        (rows.into_iter().map(|row| format!("{}={}", row.prompt, row.answer)).collect(), balance)
    }

    fn refused(text: &str) -> String {
        RowRecipe::parse(text).and_then(|recipe| recipe.rows(0, None).map(|_| ())).unwrap_err()
    }

    #[test]
    fn combinations_are_made_in_order() {
        let rows = "[[rows]]\nprompt = '{a}{b}{{{number:03}}}'\nanswer = '{b}!'";
        let (all, balance) = made(&format!("{POOLS}{rows}"));
        assert_eq!(all, ["x1{001}=1!", "x2{002}=2!", "y1{003}=1!", "y2{004}=2!", "z1{005}=1!", "z2{006}=2!"]);
        let counts = |counted: &[Counted]| counted.iter().map(|c| c.rows).collect::<Vec<_>>();
        assert_eq!((counts(&balance.pools["a"]), counts(&balance.answers)), (vec![2, 2, 2], vec![3, 3]));
        assert_eq!(counts(&balance.pools["yes"]), [0, 0]);
        // A slot with a pace of its own, more rows than combinations, and numbers from elsewhere.
        let (all, _) = made(&format!("{POOLS}{rows}\ncount = 7\nfirst = 9\nevery = {{ a = 1, b = 4 }}"));
        assert_eq!(
            all,
            ["x1{009}=1!", "y1{010}=1!", "z1{011}=1!", "x1{012}=1!", "y2{013}=2!", "z2{014}=2!", "x2{015}=2!"]
        );
        let (all, _) = made("[[rows]]\nprompt = '{number}'\nanswer = 'a'\nnumbers = 3\nfirst = 0");
        assert_eq!(all, ["0=a", "1=a", "2=a"]);
        let (all, _) = made("[[rows]]\npairs = [['a', 'b'], ['c', 'd']]\ncount = 3");
        assert_eq!(all, ["a=b", "c=d", "a=b"]);
    }

    #[test]
    fn draws_follow_the_seed_and_do_not_repeat_if_that_is_asked_for() {
        let rows = "[[rows]]\npick = 'random'\nprompt = '{a}{b}'\nanswer = '{yes}'\n";
        let with = |more: &str| made(&format!("{more}\n{POOLS}{rows}count = 6"));
        let (one, _) = with("seed = 1\ndedupe = 'prompts'");
        let (same, balance) = with("seed = 1\ndedupe = 'prompts'");
        let (other, _) = with("seed = 2\ndedupe = 'prompts'");
        assert!(one == same && one != other);
        let mut prompts: Vec<&str> = one.iter().map(|row| row.split('=').next().unwrap()).collect();
        prompts.sort_unstable();
        assert_eq!(prompts, ["x1", "x2", "y1", "y2", "z1", "z2"]);
        assert_eq!((balance.rows, balance.duplicates), (6, 0));
        let text = refused(&format!("dedupe = 'prompts'\n{POOLS}{rows}count = 7"));
        assert!(text.contains("rows 1: 6 of 7 rows are made"), "{text}");
        assert_eq!(with("dedupe = 'none'").0.len(), 6);
        // Draws are even: each of twelve combinations about a hundred times.
        let (_, balance) = made(&format!("{POOLS}{rows}count = 1200"));
        assert!(balance.pools.values().flatten().all(|text| text.rows > 300), "{balance:?}");
    }

    #[test]
    fn duplicates_are_left_out_as_the_recipe_says() {
        let pairs = "[[rows]]\npairs = [['a', 'b'], ['a', 'b'], ['a', 'c']]";
        for (dedupe, rows) in [("none", 3), ("rows", 2), ("prompts", 1)] {
            let (all, balance) = made(&format!("dedupe = '{dedupe}'\n{pairs}"));
            assert_eq!((all.len(), balance.duplicates), (rows, 3 - rows), "{dedupe}");
        }
        let (all, _) = made(&format!("dedupe = 'prompts'\n{pairs}\ndedupe = 'rows'"));
        assert_eq!(all, ["a=b", "a=c"]);
    }

    #[test]
    fn a_count_is_divided_among_the_templates() {
        assert_eq!(allotted(&[75, 15, 10], 1000), [750, 150, 100]);
        assert_eq!(allotted(&[1, 1, 1], 100), [34, 33, 33]);
        assert_eq!(allotted(&[0, 5], 3), [0, 3]);
        let (rows, balance) = made(
            "count = 10\norder = 'shuffled'\n[[rows]]\npairs = [['a', 'b']]\ncount = 3\n[[rows]]\nname = 'n'\nprompt = '{number}'\n\
             answer = 'c'\ncount = 1",
        );
        assert_eq!(
            balance.templates.iter().map(|t| (t.what.as_str(), t.rows)).collect::<Vec<_>>(),
            [("rows 1", 8), ("n", 2)]
        );
        let mut sorted = rows.clone();
        sorted.sort();
        assert!(
            sorted != rows && sorted[..2] == ["1=c", "2=c"] && sorted[2..].iter().all(|row| row == "a=b"),
            "{rows:?}"
        );
    }

    #[test]
    fn wrong_recipes_are_refused_with_the_reason() {
        for (text, reason) in [
            ("", "missing field `rows`"),
            ("rows = []", "makes 0 rows"),
            ("[[rows]]\nprompt = 'a'", "give `prompt` and `answer`, or `pairs` alone"),
            ("[[rows]]\nname = 'n'\nprompt = '{a}'\nanswer = 'b'", "n: there is no pool \"a\""),
            ("pools.a = []\n[[rows]]\nprompt = '{a}'\nanswer = 'b'", "pool \"a\" is empty"),
            ("[[rows]]\nprompt = 'a}'\nanswer = 'b'", "has a single brace"),
            ("[[rows]]\nprompt = '{a'\nanswer = 'b'", "has a single brace"),
            ("[[rows]]\nprompt = '{number:0x}'\nanswer = 'b'", "write a width"),
            ("[[rows]]\nprompt = ' '\nanswer = 'b'", "row 1 has an empty prompt or answer"),
            ("[[rows]]\nprompt = 'a'\nanswer = 'b'\nevery = { a = 1 }", "is no slot of this template"),
            ("[[rows]]\nprompt = 'a'\nanswer = 'b'\ncount = 10000001", "it must make between 1 and 10000000"),
            ("count = 9\n[[rows]]\nprompt = 'a'\nanswer = 'b'\ncount = 0", "every count is 0"),
            ("[[rows]]\nprompt = 'a'\nanswer = 'b'\nshare = 1", "unknown field `share`"),
        ] {
            let found = refused(text);
            assert!(found.contains(reason), "{text}: {found}");
        }
    }
}
