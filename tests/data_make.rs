//! `data make` makes rows from a recipe. The recipes of doc/recipes make the corpora of the F# program that this one follows, as
//! far as their order and their draws are known: tests/golden/recipes/digests.json says how far.

use crate::support::{
    files::{ok, run, tiny_model},
    golden,
};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::{fs, path::Path};

fn digest(text: &str) -> String {
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The digest of lines in alphabetical order.
fn digest_of_lines<'a>(lines: impl Iterator<Item = &'a str>) -> String {
    let mut lines: Vec<&str> = lines.collect();
    lines.sort_unstable();
    digest(&lines.concat())
}

#[test]
fn recipes_make_the_corpora_of_the_origin() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let digests: Value = serde_json::from_slice(&fs::read(golden("recipes/digests.json")).unwrap()).unwrap();
    let recipes = golden("").join("../../doc/recipes");
    let found = fs::read_dir(&recipes)
        .unwrap()
        .filter(|file| file.as_ref().unwrap().path().extension().unwrap() == "toml")
        .count();
    assert_eq!(digests.as_object().unwrap().len(), found, "each recipe has a digest");
    for (name, expected) in digests.as_object().unwrap() {
        let recipe = recipes.join(format!("{name}.toml"));
        let line = ok(d, &["data", "make", recipe.to_str().unwrap(), "-o", "rows.tsv", "--overwrite", "--json"]);
        let report: Value = serde_json::from_str(&line).unwrap();
        let text = fs::read_to_string(d.join("rows.tsv")).unwrap();
        let rows = || text.split_inclusive('\n').filter(|line| !line.starts_with('#'));
        if let Some(file) = expected.get("file") {
            assert_eq!(digest(&text), *file, "{name}");
        }
        if let Some(expected_rows) = expected.get("rows") {
            let mark = expected["containing"].as_str().unwrap_or_default();
            assert_eq!(digest_of_lines(rows().filter(|row| row.contains(mark))), *expected_rows, "{name}");
        }
        if let Some(templates) = expected["templates"].as_object() {
            let made = report["templates"].as_array().unwrap();
            let counts = |name: &str| made.iter().find(|t| t["what"] == name).map(|t| t["rows"].clone());
            assert!(templates.iter().all(|(name, rows)| counts(name).as_ref() == Some(rows)), "{name}: {report}");
            assert_eq!(templates.len(), made.len(), "{name}");
            assert_eq!(rows().count() as u64, templates.values().map(|rows| rows.as_u64().unwrap()).sum::<u64>());
        }
        assert_eq!(report["duplicates"], 0, "{name}");
    }
}

const RECIPE: &str = "seed = 5\ndedupe = 'prompts'\norder = 'shuffled'\npools.who = ['you', 'this', 'that']\npools.ask = ['Who is', 'What is', 'Name']\n\
                      pools.says = ['Tiny.', 'A model.']\n\
                      [[rows]]\nname = 'drawn'\nprompt = '{ask} {who}?'\nanswer = '{says}'\npick = 'random'\ncount = 8\n\
                      [[rows]]\nname = 'fixed'\npairs = [['Bye', 'Bye.'], ['Bye', 'See you.']]\n";

fn made(d: &Path, output: &str, more: &[&str]) -> (String, Value) {
    let line = ok(d, &[&["data", "make", "recipe.toml", "--json", "-o", output], more].concat());
    (fs::read_to_string(d.join(output)).unwrap(), serde_json::from_str(&line).unwrap())
}

#[test]
fn rows_follow_recipe_seed_and_count() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    fs::write(d.join("recipe.toml"), RECIPE).unwrap();
    let (rows, report) = made(d, "a.tsv", &[]);
    assert_eq!((rows.lines().count(), &report["rows"], &report["duplicates"]), (9, &9.into(), &1.into()));
    assert_eq!(made(d, "b.tsv", &["--seed", "5"]).0, rows);
    assert_ne!(made(d, "c.tsv", &["--seed", "6"]).0, rows);
    // The report counts what is in the file.
    for (answer, text) in [("Tiny.", "\tTiny.\n"), ("A model.", "\tA model.\n"), ("Bye.", "\tBye.\n")] {
        let counted = report["answers"].as_array().unwrap().iter().find(|a| a["what"] == answer).unwrap();
        assert_eq!(counted["rows"], rows.matches(text).count(), "{answer}");
    }
    let words = report["pools"]["who"].as_array().unwrap();
    assert!(
        words.iter().all(|word| word["rows"] == rows.matches(&format!(" {}?", word["what"].as_str().unwrap())).count())
    );
    // A count is divided as the counts of the recipe are: 8 to 2.
    let (few, report) = made(d, "few.tsv", &["--count", "5"]);
    assert_eq!(
        (few.lines().count(), &report["templates"][0]["rows"], &report["templates"][1]["rows"]),
        (5, &4.into(), &1.into())
    );
    let table = ok(d, &["data", "make", "recipe.toml", "-o", "d.tsv"]);
    for line in [
        "9 rows in d.tsv · 1 duplicate left out",
        "        8   88.9 %  drawn",
        "  ask          3 texts, each in 2 to 3 rows",
    ] {
        assert!(table.lines().any(|l| l == line), "{line:?} is missing in:\n{table}");
    }
    // The same rows as messages, and a run reads both alike.
    let (messages, _) = made(d, "a.jsonl", &[]);
    let first: Value = serde_json::from_str(messages.lines().next().unwrap()).unwrap();
    let (prompt, answer) = rows.lines().next().unwrap().split_once('\t').unwrap();
    assert_eq!((&first["messages"][0]["content"], &first["messages"][1]["content"]), (&prompt.into(), &answer.into()));
    tiny_model(&d.join("m"), true);
    let stats =
        |file: &str| -> Value { serde_json::from_str(&ok(d, &["data", "stats", file, "-m", "m", "--json"])).unwrap() };
    let (tsv, jsonl) = (stats("a.tsv"), stats("a.jsonl"));
    assert!(tsv["rows"] == 9 && tsv["tokens"] == jsonl["tokens"] && jsonl["formats"][0] == "messages", "{jsonl}");
}

#[test]
fn a_recipe_or_a_file_that_cannot_be_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    fs::write(d.join("recipe.toml"), RECIPE).unwrap();
    fs::write(d.join("there.tsv"), "a\tb\n").unwrap();
    for (name, text) in [
        ("broken.toml", "[[rows]\n"),
        ("slot.toml", "[[rows]]\nprompt = '{who}'\nanswer = 'a'"),
        ("many.toml", "dedupe = 'prompts'\n[[rows]]\nprompt = 'a'\nanswer = 'b'\npick = 'random'\ncount = 2"),
        ("tab.toml", "[[rows]]\npairs = [[\"a\\tb\", 'c']]"),
        ("comment.toml", "[[rows]]\npairs = [['# a', 'c']]"),
        ("columns.toml", "header = \"name\\tanswer\"\n[[rows]]\npairs = [['a', 'c']]"),
        ("lines.toml", "header = \"# a\\nb\"\n[[rows]]\npairs = [['a', 'c']]"),
        ("header.toml", "header = '# a'\n[[rows]]\npairs = [['prompt', 'target'], ['a', 'c']]"),
        ("other.toml", "[[rows]]\npairs = [['Question', 'Answer'], ['a', 'c']]"),
    ] {
        fs::write(d.join(name), text).unwrap();
    }
    for (recipe, output, reason) in [
        ("none.toml", "x.tsv", "none.toml"),
        ("broken.toml", "x.tsv", "broken.toml: TOML parse error at line 1"),
        ("slot.toml", "x.tsv", "slot.toml: rows 1: there is no pool \"who\""),
        ("many.toml", "x.tsv", "many.toml: rows 1: 1 of 2 rows are made"),
        ("tab.toml", "x.tsv", "contains a tab or a line break"),
        ("comment.toml", "x.tsv", "its prompt begins with #"),
        ("columns.toml", "x.tsv", "columns.toml: header \"name\\tanswer\": a .tsv file can begin with"),
        ("lines.toml", "x.tsv", "lines.toml: header \"# a\\nb\": a .tsv file can begin with"),
        ("other.toml", "x.tsv", "other.toml: the first row would be"),
        ("header.toml", "x.tsv", "the first row would be read as a header; add header = \"prompt\\ttarget\", or write"),
        ("recipe.toml", "x.txt", "--output x.txt: the name must end in .tsv or .jsonl"),
        ("recipe.toml", "there.tsv", "--output there.tsv: the file exists; choose another name, or give --overwrite"),
        ("recipe.toml", "nowhere/x.tsv", "there is no folder nowhere"),
    ] {
        let out = run(d, &["data", "make", recipe, "-o", output]);
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(2) && stderr.contains(reason), "{recipe}: {stderr}");
        assert!(!d.join("x.tsv").exists());
    }
    assert_eq!(fs::read_to_string(d.join("there.tsv")).unwrap(), "a\tb\n");
    made(d, "there.tsv", &["--overwrite"]);
    // What a .tsv file cannot hold, messages can.
    ok(d, &["data", "make", "tab.toml", "-o", "tab.jsonl"]);
    ok(d, &["data", "make", "header.toml", "-o", "header.jsonl"]);
}
