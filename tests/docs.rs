//! The documents hold together: links, anchors and named files exist, a guide's lines fit a screen, commit hashes stay in
//! the notebook, and the command-line reference is what the program's own help says.

use crate::support::files::commands;
use clap::{CommandFactory, Parser};
use std::{
    collections::BTreeSet,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};
use train_cli::args::Cli;

/// Folders of the repository whose files a document may name in backquotes.
const NAMED: [&str; 7] =
    ["kernels-cubecl/", "backend-nvfp4/", "model-qwen3/", "train-cli/src/", "tests/", "doc/", ".ci/"];

#[test]
fn every_link_and_anchor_resolves() {
    let broken = broken_links(&root());
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn a_broken_link_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let page = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    let good = "[here](#a-heading) [there](doc/b.md#two-words) [web](https://example.org/none)\n# A `heading`\n";
    page("README.md", &format!("{good}```\n[code](none.md)\n```\nand `[code](none.md)`\n"));
    page("doc/b.md", "## Two words\n[up](../README.md)\n");
    assert_eq!(broken_links(folder.path()), Vec::<String>::new());
    page("doc/c.md", "[a](none.md) [b](../README.md#nothing) ![c](none.svg)\n[d](b.md#two-words)\n");
    let broken = broken_links(folder.path());
    assert_eq!(broken.len(), 3, "{broken:?}");
    assert!(broken.iter().all(|line| line.starts_with("doc/c.md:1: ")), "{broken:?}");
}

/// The page of the notebook that says which test shows a feature.
const FEATURES: &str = "doc/notebook/user-experience.md";

/// Outside the notebook and the decisions, which are dated: `path` names a file, and `path:name` something defined in it. The
/// page of features is held to the same.
#[test]
fn every_named_file_and_function_exists() {
    let mut missing = Vec::new();
    let dated = |p: &Path| p.starts_with("doc/notebook") && p != Path::new(FEATURES) || p.starts_with("doc/decisions");
    for page in pages(&root()).iter().filter(|p| !dated(p)) {
        for (number, line) in prose(&read(&root().join(page)), true) {
            for name in line.split('`').skip(1).step_by(2).filter(|n| NAMED.iter().any(|folder| n.starts_with(folder)))
            {
                if !exists(&root(), name) {
                    missing.push(format!("{}:{number}: {name}", page.display()));
                }
            }
        }
    }
    assert!(missing.is_empty(), "named in a document and not found:\n{}", missing.join("\n"));
}

/// The sum of the page of features is that of its rows.
#[test]
fn the_sum_of_the_features_is_that_of_the_rows() {
    let text = read(&root().join(FEATURES));
    let (rows, sum) = text.split_once("## The sum").unwrap();
    let answers: Vec<&str> = rows.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").nth(1)).collect();
    let answers: Vec<&str> = answers.into_iter().filter(|answer| ["yes", "no", "partly"].contains(answer)).collect();
    let yes = answers.iter().filter(|answer| **answer == "yes").count();
    assert!(sum.contains(&format!("{yes} of {} features are yes", answers.len())), "{yes} of {}", answers.len());
    assert!(yes >= 52 && answers.len() == 60, "{yes} of {}", answers.len());
}

/// A mutant that a person wrote names a text that stands once in its file, and so does what the copy leaves out.
#[test]
fn the_texts_of_mutants_match_the_sources() {
    let list: Vec<serde_json::Value> =
        serde_json::from_str(&read(&root().join("doc/notebook/mutations-by-hand.json"))).unwrap();
    let text = |mutant: &serde_json::Value, key: &str| mutant[key].as_str().unwrap().to_owned();
    let mut places: Vec<(String, String)> = list.iter().map(|m| (text(m, "file"), text(m, "find"))).collect();
    assert!(places.len() >= 16, "only {} mutants were found", places.len());
    let script = read(&root().join("doc/notebook/mutations.py"));
    let trimmed = script.split("TRIM = [\n").nth(1).and_then(|rest| rest.split("\n]").next()).expect("the list TRIM");
    places.extend(trimmed.lines().map(|line| {
        let (file, text) = line.trim().trim_matches(['(', ')', ',']).split_once(", ").expect("a file and a text");
        (file.trim_matches('"').to_owned(), text.trim_matches(['"', '\'']).to_owned())
    }));
    let counts = places.into_iter().map(|(file, text)| (read(&root().join(&file)).matches(&text).count(), file, text));
    let wrong: Vec<_> = counts.filter(|(count, ..)| *count != 1).collect();
    assert!(wrong.is_empty(), "texts that do not stand once in their file: {wrong:?}");
}

/// A reader of the walks through the code opens each file once.
#[test]
fn each_walk_names_a_file_once() {
    let page = read(&root().join("doc/explain/architecture.md"));
    for walk in ["## One training step", "## One decoded token"] {
        let text = page.split(walk).nth(1).unwrap_or_else(|| panic!("the page has no heading {walk:?}"));
        let text = text.split("\n## ").next().unwrap_or_default().split("\n[").next().unwrap_or_default();
        let files = files_of_a_walk(text);
        assert!(files.len() > 10, "{walk}: only {} files were found", files.len());
        let twice = twice(files);
        assert!(twice.is_empty(), "{walk}: named more than once: {twice:?}");
    }
}

#[test]
fn a_file_that_a_walk_names_again_is_found() {
    let walk = |end: &str| {
        let text = format!("1. `a/src/x.rs:f`: calls `g`.\n2. `a/src/y/mod.rs`: the kernel `a/src/y/x.cuh` {end}.\n");
        twice(files_of_a_walk(&text))
    };
    assert_eq!(walk("ends the walk"), Vec::<String>::new());
    for end in ["calls `a/src/x.rs:h`", "calls `x.rs:h`, too", "calls `h`, in the file of\n   step 1"] {
        assert_eq!(walk(end), ["a/src/x.rs"], "{end}");
    }
}

/// The files that a walk names: by their paths, by the ends of paths that it names in full, or as the file of a step.
fn files_of_a_walk(walk: &str) -> Vec<String> {
    let walk = format!(" {}", walk.split_whitespace().collect::<Vec<_>>().join(" "));
    let spans: Vec<&str> = walk.split('`').skip(1).step_by(2).collect();
    let names = spans.into_iter().map(|span| span.split(':').next().unwrap_or_default());
    let (paths, others): (Vec<&str>, Vec<&str>) = names.partition(|name| name.contains("/src/"));
    let short = others.into_iter().filter(|name| name.ends_with(".rs") || name.ends_with(".cuh"));
    let short = short.map(|name| {
        let end = format!("/{name}");
        paths.iter().find(|path| path.ends_with(&end)).copied().unwrap_or(name)
    });
    let of_steps = walk.split("file of step ").skip(1).filter_map(|rest| {
        let number = rest.split(|c: char| !c.is_ascii_digit()).next()?;
        let step = walk.split(&format!(" {number}. ")).nth(1)?;
        step.split('`').find(|span| span.contains("/src/"))?.split(':').next()
    });
    paths.iter().copied().chain(short).chain(of_steps).map(str::to_owned).collect()
}

/// What stands more than once in a list.
fn twice(mut list: Vec<String>) -> Vec<String> {
    list.sort_unstable();
    list.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| pair[0].clone()).collect()
}

/// Each file and folder of a crate's sources stands in the tables of the page, whose first column names it.
#[test]
fn the_rooms_of_the_architecture_page_are_those_of_the_sources() {
    let page = read(&root().join("doc/explain/architecture.md"));
    let rooms = page.split("## Rooms of each crate").nth(1).expect("the heading of the rooms");
    for name in ["backend-nvfp4", "model-qwen3", "train-cli"] {
        let section = rooms.split(&format!("### {name}\n")).nth(1).unwrap_or_else(|| panic!("no section {name}"));
        let section = section.split("\n##").next().unwrap_or_default();
        let cells = section.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
        let listed: BTreeSet<&str> = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
        for entry in fs::read_dir(root().join(name).join("src")).unwrap() {
            let entry = entry.unwrap();
            let folder = if entry.path().is_dir() { "/" } else { "" };
            let room = format!("{}{folder}", entry.file_name().to_string_lossy());
            let door = ["lib.rs", "main.rs"].contains(&room.as_str());
            assert!(door || listed.contains(room.as_str()), "{name}: the page does not list `{room}`");
        }
    }
    for tree in ["README.md", "doc/zh-TW/README.md"] {
        let text = read(&root().join(tree));
        for entry in fs::read_dir(root().join("train-cli/src")).unwrap().map(Result::unwrap) {
            let room = format!("\n      {}/ ", entry.file_name().to_string_lossy());
            assert!(!entry.path().is_dir() || text.contains(&room), "{tree}: the folders lack {room}");
        }
    }
}

#[test]
fn every_document_that_the_code_names_exists() {
    let mut missing = Vec::new();
    for path in sources(&root()) {
        for (i, line) in read(&root().join(&path)).lines().enumerate() {
            for rest in line.split("doc/").skip(1) {
                let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || "-_./".contains(c))).unwrap_or(rest.len());
                let name = rest[..end].trim_end_matches('.');
                if name.ends_with(".md") && !root().join("doc").join(name).exists() {
                    missing.push(format!("{}:{}: doc/{name}", path.display(), i + 1));
                }
            }
        }
    }
    assert!(missing.is_empty(), "named in the code and not found:\n{}", missing.join("\n"));
}

#[test]
fn lines_of_a_guide_have_at_most_100_characters() {
    let guides = ["doc/guide", "doc/zh-TW/guide"];
    for page in pages(&root()).iter().filter(|p| guides.iter().any(|guide| p.starts_with(guide))) {
        for (i, line) in read(&root().join(page)).lines().enumerate() {
            let length = line.chars().count();
            assert!(length <= 100, "{}:{}: {length} characters", page.display(), i + 1);
        }
    }
}

/// A longer heading is one that the paragraph below it has slipped into.
#[test]
fn headings_are_short() {
    for page in pages(&root()).iter().filter(|p| !p.starts_with("doc/notebook")) {
        for heading in read(&root().join(page)).lines().filter(|line| line.starts_with("## ")) {
            assert!(heading.chars().count() <= 70, "{}: {heading}", page.display());
        }
    }
}

#[test]
fn commit_hashes_stay_in_the_notebook() {
    for page in pages(&root()).iter().filter(|p| !p.starts_with("doc/notebook")) {
        for (i, line) in read(&root().join(page)).lines().enumerate() {
            let words = line.split(|c: char| !c.is_ascii_alphanumeric());
            let hashes: Vec<&str> = words.filter(|word| is_commit(word)).collect();
            assert!(hashes.is_empty(), "{}:{}: {hashes:?}", page.display(), i + 1);
        }
    }
}

#[test]
fn the_readme_has_the_commands_that_ci_runs() {
    let readme = read(&root().join("README.md"));
    for command in ["cargo run --release -p train-cli -- fit --demo", "cargo test --workspace"] {
        assert!(readme.contains(command), "README.md does not show `{command}`");
    }
}

/// The Chinese pages are those of the guide and the README, with the same commands, headings, flags and figures.
#[test]
fn the_chinese_pages_say_what_the_english_ones_say() {
    let translated = |page: &Path| page.starts_with("doc/guide") || page == Path::new("README.md");
    let english: Vec<PathBuf> = pages(&root()).into_iter().filter(|page| translated(page)).collect();
    let chinese: Vec<PathBuf> = pages(&root()).into_iter().filter(|page| page.starts_with("doc/zh-TW")).collect();
    let expected = english.iter().map(|page| Path::new("doc/zh-TW").join(page.strip_prefix("doc").unwrap_or(page)));
    assert_eq!(chinese, expected.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>());
    for page in english {
        let other = Path::new("doc/zh-TW").join(page.strip_prefix("doc").unwrap_or(&page));
        let (text, translation) = (read(&root().join(&page)), read(&root().join(&other)));
        for (what, of) in [
            ("line of a code block", code_lines as fn(&str) -> Vec<String>),
            ("level of a heading", heading_levels),
            ("figures of a row of a table", table_figures),
            ("flag in the text", named_flags),
        ] {
            let (a, b) = (of(&text), of(&translation));
            let differing = (0..a.len().max(b.len())).find(|&i| a.get(i) != b.get(i));
            assert_eq!(differing.map(|i| (a.get(i), b.get(i))), None, "{} and its translation: {what}", page.display());
        }
    }
}

fn code_lines(text: &str) -> Vec<String> {
    text.lines().filter(|line| line.starts_with("    ")).map(str::to_owned).collect()
}

fn heading_levels(text: &str) -> Vec<String> {
    let levels = text.lines().filter(|line| line.starts_with('#'));
    levels.map(|line| line.chars().take_while(|c| *c == '#').collect()).collect()
}

fn table_figures(text: &str) -> Vec<String> {
    let digits = |c: char| c.is_ascii_digit() || ".,".contains(c);
    let figures = |line: &str| {
        let numbers = line.split(|c| !digits(c)).map(|number| number.trim_matches(['.', ',']));
        let mut numbers: Vec<&str> = numbers.filter(|number| !number.is_empty()).collect();
        numbers.sort_unstable();
        numbers.join(" ")
    };
    text.lines().filter(|line| line.starts_with('|')).map(figures).collect()
}

/// The flags that the text names, in the order of the alphabet: a sentence may be in another order.
fn named_flags(text: &str) -> Vec<String> {
    let text: Vec<String> = prose(text, true).into_iter().map(|(_, line)| line).collect();
    let text = text.join(" ");
    let flags = text.split('`').skip(1).step_by(2).filter_map(|span| span.split_whitespace().next());
    flags.filter(|flag| flag.starts_with('-')).map(str::to_owned).collect::<BTreeSet<_>>().into_iter().collect()
}

/// Lines of a code block that begin with `train-cli` or run it through cargo; `...` stands for more flags.
#[test]
fn the_program_takes_every_command_that_the_readme_and_the_guides_show() {
    let mut tried = 0;
    for page in pages(&root()).iter().filter(|p| p.starts_with("doc/guide") || p.ends_with("README.md")) {
        let text = read(&root().join(page)).replace("\\\n", "");
        for line in text.lines().filter(|line| line.starts_with("    ")) {
            let command = line.trim().strip_prefix("cargo run --release -p train-cli -- ");
            let Some(arguments) = command.or(line.trim().strip_prefix("train-cli ")) else { continue };
            let words = shell_words(&arguments.replace("...", ""));
            let parsed = Cli::try_parse_from(["train-cli".to_owned()].into_iter().chain(words));
            assert!(parsed.is_ok(), "{}: {}\n{}", page.display(), line.trim(), parsed.unwrap_err());
            tried += 1;
        }
    }
    assert!(tried > 20, "only {tried} commands were found");
}

/// `UPDATE_GOLDEN=1 cargo test -p tests the_cli_reference` rewrites the page.
#[test]
fn the_cli_reference_is_the_programs_own_help() {
    let page = root().join("doc/reference/cli.md");
    let rendered = cli_reference();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&page, &rendered).unwrap();
    }
    let written = read(&page);
    let differing = written.lines().zip(rendered.lines()).position(|(a, b)| a != b);
    let line = differing.unwrap_or_else(|| written.lines().count().min(rendered.lines().count())) + 1;
    assert!(
        written == rendered,
        "doc/reference/cli.md differs from the program's help at line {line}.\n\
         To rewrite it: UPDATE_GOLDEN=1 cargo test -p tests the_cli_reference"
    );
}

/// `UPDATE_GOLDEN=1 cargo test --workspace --test promises the_list_of_unsafe_code` rewrites the page.
#[test]
fn the_list_of_unsafe_code_is_that_of_the_sources() {
    let mut listed = String::from(
        "# Unsafe code\n\nAll of it is in `kernels-cubecl`; the other crates forbid it. CubeCL declares two things unsafe: \
         a\nlaunch, because a kernel may access memory that is not its own; and an argument of a launch, because its length \
         is\nnot checked. Each reason is copied from the comment in the code.\n\n| file | why it is sound |\n|---|---|\n",
    );
    for file in sources(&root()).into_iter().collect::<BTreeSet<_>>() {
        let text = read(&root().join(&file));
        let code = |line: &&str| !line.trim_start().starts_with("//");
        let opens = |line: &&str| ["unsafe {", "unsafe fn", "unsafe impl"].iter().any(|what| line.contains(what));
        let places = text.lines().filter(code).filter(opens).count();
        if !file.starts_with("kernels-cubecl") {
            assert_eq!(places, 0, "{} has unsafe code", file.display());
            continue;
        }
        let reasons = safety_comments(&text);
        assert!(reasons.len() >= places, "{}: {places} places, {} reasons", file.display(), reasons.len());
        for reason in reasons {
            listed += &format!("| `{}` | {reason} |\n", file.display());
        }
    }
    let page = root().join("doc/reference/unsafe-code.md");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&page, &listed).unwrap();
    }
    assert!(
        read(&page) == listed,
        "doc/reference/unsafe-code.md is not what the sources say; UPDATE_GOLDEN=1 rewrites it"
    );
}

/// The comments that begin with SAFETY, each as one line.
fn safety_comments(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut lines = text.lines().map(str::trim).peekable();
    while let Some(line) = lines.next() {
        let Some(reason) = line.strip_prefix("// SAFETY: ") else { continue };
        let mut reason = reason.to_owned();
        while let Some(more) = lines.next_if(|line| line.starts_with("// ")) {
            reason += &more[2..];
        }
        found.push(reason);
    }
    found
}

fn root() -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    if built.exists() { built } else { PathBuf::from(".") }
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The documents below `root`: Markdown files in it and below `doc`, relative to it.
fn pages(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![(root.to_owned(), false), (root.join("doc"), true)];
    while let Some((folder, deep)) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() && deep {
                folders.push((path, true));
            } else if path.extension().is_some_and(|e| e == "md") {
                found.push(path.strip_prefix(root).unwrap().to_owned());
            }
        }
    }
    found.sort();
    found
}

/// Rust files of the workspace, relative to `root`. Without this one, whose tests name documents that do not exist.
fn sources(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let crates = ["kernels-cubecl", "backend-nvfp4", "model-qwen3", "train-cli", "tests"];
    let mut folders: Vec<PathBuf> = crates.into_iter().map(|folder| root.join(folder)).filter(|f| f.is_dir()).collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("tests/docs.rs") {
                found.push(path.strip_prefix(root).unwrap().to_owned());
            }
        }
    }
    found
}

/// Lines outside code blocks, numbered from 1; code spans are removed unless `spans` keeps them.
fn prose(text: &str, spans: bool) -> Vec<(usize, String)> {
    let mut fenced = false;
    let mut kept = Vec::new();
    for (i, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced && !line.starts_with("    ") {
            let line = if spans { line.to_owned() } else { line.split('`').step_by(2).collect::<Vec<_>>().join("` `") };
            kept.push((i + 1, line));
        }
    }
    kept
}

/// `page:line: target` of every link that leads nowhere.
fn broken_links(root: &Path) -> Vec<String> {
    let mut broken = Vec::new();
    for page in pages(root) {
        for (number, line) in prose(&read(&root.join(&page)), false) {
            for target in targets(&line).filter(|t| !t.contains("://") && !t.starts_with("mailto:")) {
                if !resolves(root, &page, target) {
                    broken.push(format!("{}:{number}: {target}", page.display()));
                }
            }
        }
    }
    broken
}

/// The targets of `[text](target)` and `![text](target)` in a line.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split_once(')').map(|(target, _)| target))
}

fn resolves(root: &Path, page: &Path, target: &str) -> bool {
    let (file, anchor) = target.split_once('#').map_or((target, None), |(file, anchor)| (file, Some(anchor)));
    let folder = page.parent().unwrap_or(Path::new(""));
    let path = if file.is_empty() { root.join(page) } else { root.join(folder).join(file) };
    match anchor {
        None => path.exists(),
        Some(anchor) => path.is_file() && anchors(&read(&path)).iter().any(|a| a == anchor),
    }
}

/// The anchors that a page's headings get: lower case, spaces as hyphens, other punctuation removed.
fn anchors(text: &str) -> Vec<String> {
    let heading = |line: &str| line.strip_prefix('#').map(|rest| rest.trim_start_matches('#').trim().to_owned());
    let anchor = |title: String| {
        let kept =
            title.to_lowercase().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c)).collect::<String>();
        kept.replace(' ', "-")
    };
    prose(text, true).iter().filter_map(|(_, line)| heading(line)).map(anchor).collect()
}

/// Whether `path` or `path:name` exists: a name is that of an item, methods as `Type::method`.
fn exists(root: &Path, name: &str) -> bool {
    let (path, item) = name.split_once(':').map_or((name, None), |(path, item)| (path, Some(item)));
    let path = root.join(path);
    let Some(item) = item else { return path.exists() };
    let item = item.rsplit("::").next().unwrap_or(item);
    let Ok(text) = fs::read_to_string(path) else { return false };
    let defines = |line: &str| {
        let keywords = ["fn ", "struct ", "enum ", "trait ", "const ", "type ", "mod "];
        let rest = keywords.iter().find_map(|keyword| line.split_once(keyword).map(|(_, rest)| rest));
        rest.and_then(|r| r.strip_prefix(item))
            .is_some_and(|r| !r.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
    };
    text.lines().any(defines)
}

/// The words of a command line, as a shell splits them; double quotes keep spaces, `#` starts a comment.
fn shell_words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (i, part) in line.split('"').enumerate() {
        if i % 2 == 1 {
            words.push(part.to_owned());
        } else {
            words.extend(part.split_whitespace().take_while(|word| !word.starts_with('#')).map(str::to_owned));
        }
    }
    words
}

fn is_commit(word: &str) -> bool {
    let hex = word.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    let mixed = word.bytes().any(|b| b.is_ascii_digit()) && word.bytes().any(|b| b.is_ascii_lowercase());
    [7, 40].contains(&word.len()) && hex && mixed
}

/// Every command with its arguments and flags as Markdown, in the order and under the headings of `--help`.
fn cli_reference() -> String {
    let mut cli = Cli::command();
    cli.build();
    let mut page = String::from(
        "# Command-line reference\n\n\
         This page is generated from the program's own `--help`; a test compares the two. Do not edit it.\n\n\
         Flags may be written with `_` instead of `-`. `fit` and `estimate` also read their flags from a TOML file (`--config`), whose \
         keys are the flags' names with `_`; a flag on the command line wins over the file.\n\n\
         Terms: [NVFP4, recipes and scales](../explain/nvfp4.md); [master weights, moments, clipping, damped finish and \
         packing](../explain/streaming-step.md).\n",
    );
    let mut written: Vec<(String, String)> = Vec::new();
    for (name, command) in &commands(&cli) {
        let about = command.get_long_about().or(command.get_about()).map(ToString::to_string).unwrap_or_default();
        write!(page, "\n## {name}\n\n{}\n", sentence(&about)).unwrap();
        let flags = flags(command);
        // `estimate` has the rows of `fit`, and one more.
        let rows = |flags: &str| flags.lines().map(str::to_owned).collect::<Vec<_>>();
        let more = |others: &str| {
            let (own, others) = (rows(&flags), rows(others));
            let more: Vec<String> = own.iter().filter(|row| !others.contains(row)).cloned().collect();
            (own.len() == others.len() + more.len() && more.len() <= 1).then_some(more)
        };
        match written.iter().find_map(|(same, others)| Some((same, more(others)?))) {
            Some((same, more)) => {
                write!(page, "\nThe flags are those of [{same}](#{same})").unwrap();
                page += if more.is_empty() {
                    ".\n"
                } else {
                    ", and:\n\n| flag | default | what it does |\n|---|---|---|\n"
                };
                more.iter().for_each(|row| writeln!(page, "{row}").unwrap());
            }
            None => page += &flags,
        }
        written.push((name.clone(), flags));
    }
    page
}

/// The flags of a command: a table for each heading.
fn flags(command: &clap::Command) -> String {
    let shown: Vec<&clap::Arg> = command
        .get_arguments()
        .filter(|a| !a.is_hide_set() && !["help", "version"].contains(&a.get_id().as_str()))
        .collect();
    let mut headings: Vec<Option<&str>> = Vec::new();
    for arg in &shown {
        if !headings.contains(&arg.get_help_heading()) {
            headings.push(arg.get_help_heading());
        }
    }
    let mut tables = String::new();
    for heading in &headings {
        if headings.len() > 1 {
            write!(tables, "\n### {}\n", heading.unwrap_or("Most used")).unwrap();
        }
        tables += "\n| flag | default | what it does |\n|---|---|---|\n";
        for arg in shown.iter().filter(|a| a.get_help_heading() == *heading) {
            let (help, default) = help(arg);
            writeln!(tables, "| {} | {default} | {help} |", names(arg)).unwrap();
        }
    }
    tables
}

fn names(arg: &clap::Arg) -> String {
    let values: Vec<String> =
        arg.get_value_names().unwrap_or_default().iter().map(|value| format!("<{value}>")).collect();
    let takes = arg.get_num_args().is_none_or(|n| n.takes_values());
    let values = if takes { values.join(" ") } else { String::new() };
    if arg.is_positional() {
        return format!("`{values}`");
    }
    let short = arg.get_short().map(|c| format!("`-{c}`, ")).unwrap_or_default();
    let long = arg.get_long().unwrap_or_default();
    let optional = arg.get_num_args().is_some_and(|n| n.min_values() == 0 && takes);
    let values = match (values.is_empty(), optional) {
        (true, _) => String::new(),
        (_, true) => format!(" [{values}]"),
        (_, false) => format!(" {values}"),
    };
    format!("{short}`--{long}{values}`")
}

/// The help with the values that the flag takes and its other names, and the default: clap's, or the one that the help
/// ends with in words.
fn help(arg: &clap::Arg) -> (String, String) {
    let takes = arg.get_num_args().is_none_or(|n| n.takes_values());
    let text = arg.get_help().or(arg.get_long_help()).map(ToString::to_string).unwrap_or_default();
    let (text, words) = match text.rsplit_once("[default: ") {
        Some((text, words)) => (text.to_owned(), cell(words.trim().trim_end_matches(']'))),
        None => (text, String::new()),
    };
    let values: Vec<String> = arg.get_default_values().iter().map(|v| v.to_string_lossy().into_owned()).collect();
    let default =
        if takes && values.iter().any(|value| !value.is_empty()) { format!("`{}`", values.join(",")) } else { words };

    let mut help = sentence(&text);
    if arg.is_required_set() && !arg.is_positional() {
        help += " Required.";
    }
    let choices = arg.get_possible_values();
    let switch = choices.iter().all(|choice| ["true", "false"].contains(&choice.get_name()));
    let listed = takes && !switch && !arg.is_hide_possible_values_set();
    for choice in choices.iter().filter(|choice| listed && !choice.is_hide_set()) {
        write!(help, "<br>`{}`", choice.get_name()).unwrap();
        if let Some(text) = choice.get_help() {
            write!(help, ": {}", cell(text.to_string().trim_end_matches('.'))).unwrap();
        }
    }
    let aliases: Vec<String> =
        arg.get_all_aliases().unwrap_or_default().iter().map(|alias| format!("`--{alias}`")).collect();
    if !aliases.is_empty() {
        write!(help, "<br>Also {}", aliases.join(", ")).unwrap();
    }
    (help, default)
}

/// Text as one table cell that ends like a sentence.
fn sentence(text: &str) -> String {
    let text = cell(text.trim());
    if text.is_empty() || text.ends_with(['.', ':']) { text } else { format!("{text}.") }
}

fn cell(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|").replace('<', "&lt;")
}
