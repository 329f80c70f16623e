//! Every data format is recognized, makes the samples that its rows mean, and is refused by file, line and reason where it
//! is broken.

use crate::support::{
    files::{Cost, cost, ok, refused, run, tiny_model},
    golden,
};
use parquet::{
    data_type::{ByteArray, ByteArrayType},
    file::writer::SerializedFileWriter,
    schema::parser::parse_message_type,
};
use serde_json::json;
use std::path::Path;

/// What `fit --dry-run` says of a data file, from its line `data`.
fn plan(d: &Path, file: &str, more: &[&str]) -> Result<String, String> {
    let args = ["fit", "-m", "m", "-d", file, "-o", "out", "--device", "cpu", "--val-split", "0", "--dry-run"];
    let out = run(d, &[&args, more].concat());
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    match out.status.code() {
        Some(0) => Ok(stderr.lines().find_map(|line| line.trim().strip_prefix("data ")).unwrap().trim().to_owned()),
        Some(3) => Err(stderr),
        code => panic!("exit code {code:?}:\n{stderr}"),
    }
}

/// Every row that holds a conversation may have its system message beside the messages.
#[test]
fn a_system_message_may_stand_beside_the_messages() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let write = |name: &str, text: &str| std::fs::write(d.join(name), text).unwrap();
    let of = |file: &str| plan(d, file, &[]).unwrap().split_once(" · ").unwrap().1.to_owned();
    let messages = r#"[{"role": "system", "content": "Be short."}, {"role": "user", "content": "Add.\n1 and 2"}, {"role": "assistant", "content": "3"}]"#;
    write("b.json", &format!(r#"[{{"messages": {messages}}}]"#));
    let rest = messages.split_once("}, ").unwrap().1;
    for row in [
        format!(r#"{{"system": "Be short.", "messages": [{rest}}}"#),
        r#"{"system": "Be short.", "prompt": "Add.\n1 and 2", "completion": "3"}"#.to_owned(),
        r#"{"system": "Be short.", "prompt": [{"role": "user", "content": "Add.\n1 and 2"}], "completion": [{"role": "assistant", "content": "3"}]}"#.to_owned(),
        format!(r#"{{"system": "Be short.", "messages": {messages}}}"#),
    ] {
        write("s.jsonl", &row);
        assert_eq!(of("s.jsonl"), of("b.json"), "{row}");
    }
    write("s.jsonl", &format!(r#"{{"system": "Be long.", "messages": {messages}}}"#));
    let error = plan(d, "s.jsonl", &[]).unwrap_err();
    assert!(error.contains("s.jsonl:1: a system message stands both in \"system\" and among the messages"), "{error}");
}

/// One conversation in every format that can hold it has the tokens of its tab-separated row.
#[test]
fn one_conversation_is_the_same_in_every_format() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let write = |name: &str, text: &str| std::fs::write(d.join(name), text).unwrap();
    write("row.tsv", "Who are you?\tI am tiny.\n");
    let expected = plan(d, "row.tsv", &[]).unwrap();
    let (rows, tokens) = expected.split_once(" of tsv · ").unwrap();
    let user = r#"{"role": "user", "content": "Who are you?"}"#;
    let assistant = r#"{"role": "assistant", "content": "I am tiny."}"#;
    let parts =
        r#"{"role": "user", "content": [{"type": "text", "text": "Who are"}, {"type": "text", "text": " you?"}]}"#;
    let turns = r#"[{"from": "human", "value": "Who are you?"}, {"from": "gpt", "value": "I am tiny."}]"#;
    let alpaca = r#"{"instruction": "Who are you?", "input": "", "output": "I am tiny."}"#;
    let good = [
        ("messages", format!(r#"{{"messages": [{user}, {assistant}]}}"#)),
        ("messages", format!(r#"{{"messages": [{parts}, {assistant}], "tools": null}}"#)),
        ("messages", format!("\u{feff}[\n {{\"messages\": [{user},\n {assistant}]}}\n]\n")),
        ("sharegpt", format!(r#"{{"conversations": {turns}}}"#)),
        (
            "sharegpt",
            format!(
                r#"{{"id": "1", "conversations": {}}}"#,
                turns.replace("human", "user").replace("gpt", "assistant")
            ),
        ),
        ("sharegpt", format!(r#"[{{"system": "", "tools": "", "conversations": {turns}}}]"#)),
        ("alpaca", alpaca.to_owned()),
        ("alpaca", format!("[{alpaca}]")),
        ("alpaca", r#"{"instruction": "Who are you?", "output": "I am tiny.", "history": []}"#.to_owned()),
        ("alpaca", r#"{"instruction": "Who are you?", "output": "I am tiny.", "history": null}"#.to_owned()),
        ("alpaca", r#"{"instruction": " ", "input": "Who are you?", "output": "I am tiny."}"#.to_owned()),
        ("alpaca", r#"{"instruction": "", "input": "Who are you?", "output": "I am tiny."}"#.to_owned()),
        ("completion", r#"{"prompt": "Who are you?", "completion": "I am tiny."}"#.to_owned()),
        ("completion", format!(r#"{{"prompt": [{user}], "completion": [{assistant}]}}"#)),
        ("completion", "\n\n{\"completion\": \"I am tiny.\", \"prompt\": \"Who are you?\"}\n\n".to_owned()),
    ];
    for (format, text) in good {
        write("row.jsonl", &text);
        assert_eq!(plan(d, "row.jsonl", &[]).unwrap(), format!("{rows} of {format} · {tokens}"), "{text}");
        write("row.other", &text);
        assert_eq!(plan(d, "row.other", &["--format", format]).unwrap(), format!("{rows} of {format} · {tokens}"));
    }
    // An input follows the instruction on a line of its own, and a system message comes first.
    write("a.json", r#"[{"system": "Be short.", "instruction": "Add.", "input": "1 and 2", "output": "3"}]"#);
    let messages = r#"[{"role": "system", "content": "Be short."}, {"role": "user", "content": "Add.\n1 and 2"}, {"role": "assistant", "content": "3"}]"#;
    write("b.json", &format!(r#"[{{"messages": {messages}}}]"#));
    let of = |file: &str| plan(d, file, &[]).unwrap().split_once(" · ").unwrap().1.to_owned();
    assert_eq!(of("a.json"), of("b.json"));
    // OpenAI's newer name of that role.
    write("b.json", &format!(r#"[{{"messages": {}}}]"#, messages.replace(r#""system""#, r#""developer""#)));
    assert_eq!(of("a.json"), of("b.json"));
    // The history of a row has the turns before it, and its answers are learned.
    write(
        "a.json",
        r#"[{"system": "Be short.", "instruction": "Add.", "input": "1 and 2", "output": "3", "history": [["Hi.", "Hello."], ["Bye.", "Bye."]]}]"#,
    );
    let turns = r#"{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Bye."}, {"role": "assistant", "content": "Bye."}, "#;
    let user = r#"{"role": "user", "content": "Add"#;
    write("b.json", &format!(r#"[{{"messages": {}}}]"#, messages.replace(user, &format!("{turns}{user}"))));
    assert_eq!(of("a.json"), of("b.json"));
    write("a.json", r#"[{"system": "Be short.", "instruction": "Add.", "input": "1 and 2", "output": "3"}]"#);
    // So does the system message of ShareGPT come first, whose calls of functions are calls.
    write(
        "c.jsonl",
        r#"{"system": "Be short.", "conversations": [{"from": "human", "value": "Add.\n1 and 2"}, {"from": "gpt", "value": "3"}]}"#,
    );
    assert_eq!(of("a.json"), of("c.jsonl"));
    let call = r#"{\"name\": \"add\", \"arguments\": {\"a\": 1}}"#;
    write(
        "d.jsonl",
        &format!(
            r#"{{"conversations": [{{"from": "human", "value": "Add."}}, {{"from": "function_call", "value": "{call}"}}, {{"from": "observation", "value": "3"}}, {{"from": "gpt", "value": "3"}}]}}"#
        ),
    );
    let call = r#"{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}"#;
    write(
        "e.jsonl",
        &format!(
            r#"{{"messages": [{{"role": "user", "content": "Add."}}, {{"role": "assistant", "content": "", "tool_calls": [{call}]}}, {{"role": "tool", "content": "3"}}, {{"role": "assistant", "content": "3"}}]}}"#
        ),
    );
    assert_eq!(of("d.jsonl"), of("e.jsonl"));
}

/// A Parquet or Arrow table has the tokens of the same rows in JSON (golden/tables/make_tables.py).
#[test]
fn a_table_is_read_as_its_rows_in_json() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let table = |name: &str| golden(&format!("tables/{name}")).display().to_string();
    let messages = concat!(
        r#"{"messages": [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "I am tiny."}]}"#,
        "\n",
        r#"{"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "你好"}, "#,
        r#"{"role": "assistant", "content": "好"}]}"#,
    );
    let conversation =
        r#"{"conversations": [{"from": "human", "value": "Who are you?"}, {"from": "gpt", "value": "I am tiny."}]}"#;
    let alpaca = concat!(
        r#"{"instruction": "Who are you?", "output": "I am tiny."}"#,
        "\n",
        r#"{"instruction": "Add.", "input": "1 and 2", "output": "3"}"#,
    );
    let documents: String = (0..1000).map(|i| format!("{{\"text\": \"Text number {i}.\"}}\n")).collect();
    for (name, arrow, rows) in [
        ("messages", "arrow", messages.to_owned()),
        ("sharegpt", "feather", format!("{conversation}\n{conversation}")),
        ("alpaca", "arrow", alpaca.to_owned()),
        ("completion", "feather", r#"{"prompt": "Who are you?", "completion": "I am tiny."}"#.to_owned()),
        ("documents", "feather", documents),
    ] {
        std::fs::write(d.join("rows.jsonl"), rows).unwrap();
        let expected = plan(d, "rows.jsonl", &[]).unwrap();
        let stats = |file: &str| {
            let found = ok(d, &["data", "stats", file, "-m", "m", "--max-seq-length", "8", "--json"]);
            let found: serde_json::Value = serde_json::from_str(&found).unwrap();
            ["rows", "sequences", "tokens", "lengths"].map(|key| found[key].clone())
        };
        for (file, kind) in [(format!("{name}.parquet"), "Parquet"), (format!("{name}.{arrow}"), "Arrow")] {
            let expected = expected.replacen(&format!(" of {name} "), &format!(" of {name} in {kind} "), 1);
            assert_eq!(plan(d, &table(&file), &[]).unwrap(), expected, "{file}");
            assert_eq!(plan(d, &table(&file), &["--format", name]).unwrap(), expected, "{file}");
            assert_eq!(stats(&table(&file)), stats("rows.jsonl"), "{file}");
        }
    }
    // The row that is broken is named by its number, also where it is in a later part of the file.
    for file in ["broken_row.parquet", "broken_row.feather"] {
        let error = plan(d, &table(file), &[]).unwrap_err();
        assert!(error.contains(&format!("{file}:3: no \"text\"; it must be text")), "{error}");
    }
    for file in ["nothing_known.parquet", "nothing_known.feather"] {
        let error = plan(d, &table(file), &[]).unwrap_err();
        assert!(error.contains(&format!("{file}:1: a row with the keys [\"question\", \"reply\"]")), "{error}");
    }
    let error = plan(d, &table("alpaca.parquet"), &["--format", "tsv"]).unwrap_err();
    assert!(error.contains("--format tsv: a table has rows with named columns"), "{error}");
    // pyarrow compresses .feather files unless it is told not to.
    let documents = plan(d, &table("documents.feather"), &[]).unwrap();
    for file in ["zstd.feather", "lz4.feather"] {
        assert_eq!(plan(d, &table(file), &[]).unwrap(), documents, "{file}");
    }
    let error = plan(d, &table("inflated.feather"), &[]).unwrap_err();
    assert!(error.contains("its columns decompress to 2097152") && error.contains("at most 33554432"), "{error}");
    assert!(plan(d, &table("bytes_beside.parquet"), &[]).unwrap().contains("2 rows of documents in Parquet"));
    let error = plan(d, &table("bytes.parquet"), &[]).unwrap_err();
    assert!(error.contains("column \"text\" holds bytes; write it as text"), "{error}");
    for (file, kind) in [("x.parquet", "Parquet"), ("x.arrow", "Arrow")] {
        std::fs::write(d.join(file), "no table").unwrap();
        let error = plan(d, file, &[]).unwrap_err();
        assert!(error.contains(&format!("not a readable {kind} file")), "{error}");
    }
    // A column that JSON has no values for is left out, as every column that nobody asks for.
    assert!(plan(d, &table("dated.arrow"), &[]).unwrap().contains("2 rows of documents in Arrow"));
    for (file, said) in [
        ("many_values.arrow", "a row has more than 1048576 values"),
        ("much_text.arrow", "texts of more than 16 MiB"),
        ("twice.arrow", "two columns are named \"text\""),
    ] {
        let error = plan(d, &table(file), &[]).unwrap_err();
        assert!(error.contains(said), "{error}");
    }
    let whole = std::fs::read(table("dated.arrow")).unwrap();
    std::fs::write(d.join("no_end.arrow"), &whole[..whole.len() - 8]).unwrap();
    let error = plan(d, "no_end.arrow", &[]).unwrap_err();
    assert!(error.contains("the mark at its end is missing"), "{error}");
    // Half a file is an error, and not the rows of its first half.
    let whole = std::fs::read(table("documents.feather")).unwrap();
    std::fs::write(d.join("half.arrow"), &whole[..whole.len() / 2]).unwrap();
    let error = plan(d, "half.arrow", &[]).unwrap_err();
    assert!(error.contains("half.arrow") && error.contains("not a readable Arrow file"), "{error}");
}

/// An Arrow table without rows is whole if the mark at its end follows the schema.
#[test]
fn an_arrow_table_without_rows_is_not_cut() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let table = std::fs::read(golden("tables/dated.arrow")).unwrap();
    // The size of the schema follows the mark of a message, which has 4 bytes.
    let schema = 8 + u32::from_le_bytes(table[4..8].try_into().unwrap()) as usize;
    let empty = [&table[..schema], &table[table.len() - 8..]].concat();
    for (bytes, reason) in [(&empty[..], ": no rows in it"), (&empty[..schema], ": not a readable Arrow file")] {
        std::fs::write(d.join("x.arrow"), bytes).unwrap();
        for more in [&[][..], &["--format", "documents"]] {
            let error = plan(d, "x.arrow", more).unwrap_err();
            assert!(error.contains("x.arrow") && error.contains(reason), "{error}");
        }
    }
}

/// Bytes are no text, also where they stand in a list: nobody trains on their base64.
#[test]
fn bytes_inside_a_column_of_parquet_are_no_text() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    for (value, reason) in
        [("value (UTF8)", None), ("value", Some("x.parquet:1: turn 1: no \"value\"; it must be text"))]
    {
        let turn = format!("repeated group conversations {{ required binary from (UTF8); required binary {value}; }}");
        let schema = parse_message_type(&format!("message rows {{ {turn} }}")).unwrap();
        let file = std::fs::File::create(d.join("x.parquet")).unwrap();
        let mut writer = SerializedFileWriter::new(file, schema.into(), Default::default()).unwrap();
        let mut group = writer.next_row_group().unwrap();
        for texts in [["human", "gpt"], ["Who are you?", "I am tiny."]] {
            let texts = texts.map(|text| ByteArray::from(text.as_bytes().to_vec()));
            let mut column = group.next_column().unwrap().unwrap();
            // Both turns are there, and the second one belongs to the row of the first.
            column.typed::<ByteArrayType>().write_batch(&texts, Some(&[1, 1]), Some(&[0, 1])).unwrap();
            column.close().unwrap();
        }
        group.close().unwrap();
        writer.close().unwrap();
        match (plan(d, "x.parquet", &[]), reason) {
            (Ok(line), None) => assert!(line.starts_with("1 row of sharegpt in Parquet · 1 train"), "{line}"),
            (Err(error), Some(reason)) => assert!(error.contains(reason), "{error}"),
            other => panic!("{other:?}"),
        }
    }
}

/// A Parquet file that ends too early, or whose rows are damaged, is refused.
#[test]
fn a_damaged_parquet_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let whole = std::fs::read(golden("tables/documents.parquet")).unwrap();
    let mut damaged = whole.clone();
    damaged[100..200].iter_mut().for_each(|byte| *byte ^= 0xFF);
    for (file, bytes) in
        [("half", &whole[..whole.len() / 2]), ("no_end", &whole[..whole.len() - 8]), ("damaged", &damaged[..])]
    {
        std::fs::write(d.join(format!("{file}.parquet")), bytes).unwrap();
        let error = plan(d, &format!("{file}.parquet"), &[]).unwrap_err();
        assert!(error.contains(&format!("{file}.parquet")) && error.contains("not a readable Parquet file"), "{error}");
    }
}

/// The texts between separators are documents of their own: each ends with the end-of-text token and begins a sequence.
#[test]
fn a_text_may_hold_several_documents() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    std::fs::write(d.join("all.txt"), "One text.\n---\nAnother one,\nof two lines.\n---\n").unwrap();
    std::fs::write(d.join("rows.jsonl"), "{\"text\": \"One text.\"}\n{\"text\": \"Another one,\\nof two lines.\"}\n")
        .unwrap();
    let expected = plan(d, "rows.jsonl", &[]).unwrap().replace("documents", "text");
    assert_eq!(plan(d, "all.txt", &["--document-separator", "---"]).unwrap(), expected);
    assert_ne!(plan(d, "all.txt", &[]).unwrap(), expected);
    // Empty documents are none, and a separator needs no line of its own.
    for (text, separator) in [
        ("---\nOne text.\n---\n\n---\nAnother one,\nof two lines.", "---"),
        ("One text.<END>Another one,\nof two lines.<END>", "<END>"),
    ] {
        std::fs::write(d.join("other.txt"), text).unwrap();
        assert_eq!(plan(d, "other.txt", &["--document-separator", separator]).unwrap(), expected, "{text}");
    }
    // A broken text is named by its line, also behind a separator.
    for (text, reason) in [
        (&b"one\n---\ntwo\0\n"[..], ":3: a byte that is 0"),
        (b"---\n---\n", ": no rows in it"),
        (b"one\n---\ntwo \xFF\xFE three\n", ":3: not UTF-8"),
    ] {
        std::fs::write(d.join("broken.txt"), text).unwrap();
        let error = plan(d, "broken.txt", &["--document-separator", "---"]).unwrap_err();
        assert!(error.contains(&format!("broken.txt{reason}")), "{text:?}: {error}");
    }
    let refused = |file: &str, separator: &str| {
        let args = ["fit", "-m", "m", "-d", file, "--device", "cpu", "--document-separator", separator, "--dry-run"];
        let out = run(d, &args);
        assert_eq!(out.status.code(), Some(2));
        String::from_utf8_lossy(&out.stderr).into_owned()
    };
    assert!(refused("rows.jsonl", "---").contains("no file is one (.txt or .md)"));
    // It counts for every text of several files, and for the evaluation file.
    let stats =
        |files: &[&str]| run(d, &[&["data", "stats", "-m", "m", "--document-separator", "---"], files].concat());
    assert!(stats(&["rows.jsonl", "all.txt"]).status.success());
    assert_eq!(stats(&["rows.jsonl"]).status.code(), Some(2));
    let both = plan(d, "rows.jsonl", &["--eval-data", "all.txt", "--document-separator", "---"]).unwrap();
    assert!(both.contains("2 train / 2 eval"), "{both}");
    assert!(refused("all.txt", "").contains("--document-separator"));
}

/// A column says how often a row is used.
#[test]
fn rows_are_repeated_by_a_column() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let row = |prompt: &str, weight: &str| format!("{{\"prompt\": \"{prompt}\", \"completion\": \"b\"{weight}}}\n");
    let rows = row("a", ", \"w\": 3") + &row("c", ", \"w\": 0") + &row("d", ", \"w\": 1");
    std::fs::write(d.join("rows.jsonl"), rows).unwrap();
    let losses = |more: &[&str]| {
        let args = ["fit", "-m", "m", "--device", "cpu", "--val-split", "0", "--lr", "0", "--recipe", "bf16"];
        let out = run(
            d,
            &[&args[..], &["-o", "r", "--overwrite", "--save-strategy", "no", "--eval-steps", "0"], more].concat(),
        );
        assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
        let text = std::fs::read_to_string(d.join("r/metrics.jsonl")).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let mut losses: Vec<String> = lines.map(|line| line["loss"].to_string()).collect();
        losses.sort();
        losses
    };
    std::fs::write(d.join("by_hand.jsonl"), row("a", "").repeat(3) + &row("d", "")).unwrap();
    assert_eq!(losses(&["-d", "rows.jsonl", "--weight-column", "w"]), losses(&["-d", "by_hand.jsonl"]));
    // The cache keeps the weights.
    let cached = ["-d", "rows.jsonl", "--weight-column", "w", "--token-cache", "cache"];
    assert_eq!(
        (losses(&cached), losses(&cached)),
        (losses(&["-d", "by_hand.jsonl"]), losses(&["-d", "by_hand.jsonl"]))
    );
    let said = plan(d, "rows.jsonl", &["--weight-column", "w"]).unwrap();
    assert!(said.contains("1 row dropped (longer than 2048 tokens, nothing supervised, or of weight 0)"), "{said}");
    std::fs::write(d.join("little.jsonl"), row("a", ", \"w\": 0.01").repeat(20)).unwrap();
    let args = ["fit", "-m", "m", "-d", "little.jsonl", "--weight-column", "w", "--device", "cpu", "-o", "little"];
    let out = run(d, &args);
    let error = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(2) && error.contains("less than one row"), "{error}");
    let error = plan(d, "by_hand.jsonl", &["--weight-column", "w"]).unwrap_err();
    assert!(error.contains("by_hand.jsonl:1: no \"w\", which --weight-column names"), "{error}");
    std::fs::write(d.join("row.tsv"), "a\tb\n").unwrap();
    let error = plan(d, "row.tsv", &["--weight-column", "w"]).unwrap_err();
    assert!(error.contains("rows of the format tsv have no columns with names"), "{error}");
}

/// `--data` takes folders and patterns; a weight counts for all files that they stand for.
#[test]
fn folders_and_patterns_stand_for_their_files() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    std::fs::create_dir(d.join("rows")).unwrap();
    for name in ["a.tsv", "b.tsv", "c.jsonl", "readme.rst"] {
        let text = if name == "c.jsonl" { r#"{"prompt": "c", "completion": "d"}"# } else { "a\tb\n" };
        std::fs::write(d.join("rows").join(name), text).unwrap();
    }
    let rows = |files: &str, more: &[&str]| plan(d, files, more).unwrap().split(" · ").next().unwrap().to_owned();
    assert_eq!(rows("rows", &[]), "3 rows of completion and tsv");
    assert_eq!(rows("rows/*.tsv", &[]), "2 rows of tsv");
    let line = plan(d, "rows/*.tsv", &["-d", "rows/c.jsonl", "--data-weights", "3,1"]).unwrap();
    assert!(line.contains(" · 7 train / 0 eval"), "{line}");
    let line = plan(d, "rows", &["--max-rows", "2"]).unwrap();
    assert!(line.contains(" · 2 train / 0 eval") && line.contains("1 row left out by --max-rows"), "{line}");
    assert_eq!(rows("rows/[ac].*", &[]), "2 rows of completion and tsv");
    // An extension may be in capitals. What is hidden is no data.
    std::fs::create_dir(d.join("more")).unwrap();
    for name in ["A.TSV", ".b.tsv"] {
        std::fs::write(d.join("more").join(name), "a\tb\n").unwrap();
    }
    assert_eq!(rows("more", &[]), "1 row of tsv");
    // A folder or a pattern without a file, and a pattern that is none.
    std::fs::create_dir(d.join("empty")).unwrap();
    for (files, said) in [
        ("rows/*.txt", "rows/*.txt: no file fits this pattern"),
        ("empty", "empty: no .jsonl, .json, .parquet, .arrow, .feather, .tsv, .txt or .md file is in this folder"),
        ("rows/[", "rows/[: the pattern is wrong: "),
    ] {
        let out = run(d, &["fit", "-m", "m", "-d", files, "-o", "out", "--device", "cpu", "--dry-run"]);
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(2) && stderr.contains(said), "{files}: {stderr}");
    }
    // A broken row is named by the file in which it stands, and not by what stands for the file.
    std::fs::write(d.join("rows/b.tsv"), "a\tb\nc\n").unwrap();
    for files in ["rows", "rows/*.tsv", "rows/?.tsv"] {
        let error = plan(d, files, &[]).unwrap_err();
        assert!(error.contains("rows/b.tsv:2: no tab"), "{files}: {error}");
    }
}

/// A row that makes several sequences is one row: they are used or left out together, and held out together.
#[test]
fn the_sequences_of_a_row_stay_together() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let row = json!({"text": "one two three four five. ".repeat(12)}).to_string() + "\n";
    std::fs::write(d.join("rows.jsonl"), row.repeat(10)).unwrap();
    let short = ["--max-seq-length", "32"];
    let train = |more: &[&str]| {
        let line = plan(d, "rows.jsonl", &[&short[..], more].concat()).unwrap();
        let train = line.split(" · ").nth(1).unwrap().split(' ').next().unwrap().parse::<usize>().unwrap();
        (train, line)
    };
    let (all, line) = train(&["--max-rows", "10"]);
    assert!(all > 20 && !line.contains("left out"), "{line}");
    let (few, line) = train(&["--max-rows", "4"]);
    assert!(few == all / 10 * 4 && line.contains("6 rows left out by --max-rows"), "{all}: {line}");
    let words = ["fit", "-m", "m", "-d", "rows.jsonl", "--device", "cpu", "--dry-run"];
    let said = String::from_utf8_lossy(&run(d, &[&words[..], &short].concat()).stderr).into_owned();
    assert!(said.contains(&format!("{} train / {} eval", all / 10 * 9, all / 10)), "{all}: {said}");
    // Documents are rows, also if they share a line.
    std::fs::write(d.join("all.txt"), "A text.<END>".repeat(10)).unwrap();
    let line = plan(d, "all.txt", &["--document-separator", "<END>", "--max-rows", "4"]).unwrap();
    assert!(line.contains("4 train / 0 eval") && line.contains("6 rows left out"), "{line}");
}

/// A message of weight 0 is read, but not supervised.
#[test]
fn a_message_of_weight_0_is_not_supervised() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let supervised = |weights: [&str; 2]| {
        let answer = |text: &str, weight: &str| format!(r#"{{"role": "assistant", "content": "{text}"{weight}}}"#);
        let user = r#"{"role": "user", "content": "Again."}"#;
        let (first, second) = (answer("one two three", weights[0]), answer("four", weights[1]));
        let row = format!(r#"{{"messages": [{user}, {first}, {user}, {second}]}}"#);
        std::fs::write(d.join("row.jsonl"), row).unwrap();
        let line = plan(d, "row.jsonl", &[]).unwrap();
        let (_, tokens) = line.rsplit_once(" · ").unwrap();
        let (tokens, supervised) = tokens.split_once(" tokens, ").unwrap();
        (tokens.to_owned(), supervised.trim_end_matches(" supervised").parse::<u32>().unwrap())
    };
    let (tokens, both) = supervised(["", ""]);
    let (first, second) =
        (supervised([r#", "weight": 1"#, r#", "weight": 0"#]), supervised([r#", "weight": 0.0"#, ""]));
    // The turns of ShareGPT may have weights, too.
    let of_turns = |weight: &str| {
        let turn = |from: &str, text: &str, more: &str| format!(r#"{{"from": "{from}", "value": "{text}"{more}}}"#);
        let turns = [turn("human", "Again.", ""), turn("gpt", "one two three", weight)];
        let rest = [turn("human", "Again.", ""), turn("gpt", "four", "")];
        let row = format!(r#"{{"conversations": [{}, {}]}}"#, turns.join(", "), rest.join(", "));
        std::fs::write(d.join("row.jsonl"), row).unwrap();
        let line = plan(d, "row.jsonl", &[]).unwrap();
        line.rsplit_once(", ").unwrap().1.trim_end_matches(" supervised").parse::<u32>().unwrap()
    };
    assert_eq!((of_turns(""), of_turns(r#", "weight": 0"#)), (both, second.1));
    // A row ends with its last learned answer.
    assert!(second.0 == tokens && first.0 != tokens, "{first:?} {second:?} {tokens}");
    assert!(first.1 > second.1 && first.1 + second.1 == both, "{first:?} {second:?} {both}");
}

/// The rows of a file as `data preview` marks them, without the lines that say where they come from.
fn marked(d: &Path, row: &str) -> String {
    std::fs::write(d.join("row.jsonl"), row).unwrap();
    let shown = ok(d, &["data", "preview", "row.jsonl", "-m", "m"]);
    let rows = shown.split("\n\nrow.jsonl:1 · ").skip(1);
    rows.map(|row| row.split_once('\n').unwrap().1).collect::<Vec<_>>().join("\n--\n").trim_end().to_owned()
}

/// Calls of tools may be a list or its JSON text, in tables without the arguments of other calls. What is no call is refused,
/// because a template would render it as calls that nobody made.
#[test]
fn calls_of_tools_are_calls_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    std::fs::copy(golden("chat/qwen3-instruct-2507.jinja"), d.join("m/chat_template.jinja")).unwrap();
    let row = |calls: serde_json::Value| {
        let called = json!({"role": "assistant", "content": "", "tool_calls": calls});
        json!({"messages": [{"role": "user", "content": "Where?"}, called]}).to_string()
    };
    let call = |arguments: serde_json::Value| json!([{"function": {"name": "find", "arguments": arguments}}]);
    let one = call(json!({"city": "Rome"}));
    let shown = marked(d, &row(one.clone()));
    assert!(shown.contains("\"name\": \"find\"") && shown.contains("{\"city\": \"Rome\"}"), "{shown}");
    assert_eq!(marked(d, &row(one.to_string().into())), shown);
    assert_eq!(marked(d, &row(json!([{"name": "find", "arguments": {"city": "Rome"}}]))), shown);
    let from_text = json!({"conversations": [
        {"from": "human", "value": "Where?"},
        {"from": "function_call", "value": "[{\"name\": \"find\", \"arguments\": {\"city\": \"Rome\"}}]"},
    ]});
    assert_eq!(marked(d, &from_text.to_string()), shown);
    for (calls, reason) in [
        (json!("[{"), "\"tool_calls\" is not JSON"),
        (json!("find"), "\"tool_calls\" is not JSON"),
        (json!({"name": "find"}), "\"tool_calls\" must be a list"),
        (json!([{"function": {"arguments": {}}}]), "each of its tool_calls needs"),
        (json!([{"function": {"name": "find", "arguments": 3}}]), "the arguments of its tool_calls"),
    ] {
        std::fs::write(d.join("x.jsonl"), row(calls)).unwrap();
        let error = plan(d, "x.jsonl", &[]).unwrap_err();
        assert!(error.contains(&format!("x.jsonl:1: message 2: {reason}")), "{error}");
    }
    let both = format!("{}\n{}", row(one), row(call(json!({"street": "Via Appia"}))));
    std::fs::write(d.join("both.jsonl"), both).unwrap();
    let expected = plan(d, "both.jsonl", &[]).unwrap();
    for (name, kind) in [("calls.parquet", "Parquet"), ("calls.arrow", "Arrow")] {
        let table = golden(&format!("tables/{name}")).display().to_string();
        let expected = expected.replacen(" of messages ", &format!(" of messages in {kind} "), 1);
        assert_eq!(plan(d, &table, &[]).unwrap(), expected, "{name}");
    }
    // A compressed file is no text in another encoding.
    std::fs::write(d.join("x.jsonl"), b"\x1f\x8b\x08\x00").unwrap();
    let error = plan(d, "x.jsonl", &[]).unwrap_err();
    assert!(error.contains("x.jsonl: the file is compressed; unpack it first"), "{error}");
}

/// An assistant's turn at the beginning of a conversation, before which no message stands or only a system message, is
/// learned like every other one. A template that refuses it is named with file, line and reason.
#[test]
fn a_conversation_may_begin_with_the_assistant() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let row = |first: &str| {
        let turn = |role: &str, text: &str| format!(r#"{{"role": "{role}", "content": "{text}"}}"#);
        let (greets, asks, answers) = (turn("assistant", "Hello."), turn("user", "Hi."), turn("assistant", "Bye."));
        format!(r#"{{"messages": [{first}{greets}, {asks}, {answers}]}}"#)
    };
    let turns = "<|im_start|>assistant\n⟦Hello.<|im_end|>⟧\n<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n\
                 ⟦Bye.<|im_end|>⟧";
    let system = r#"{"role": "system", "content": "Be brief."}, "#;
    let check = || {
        assert_eq!(marked(d, &row("")), turns);
        assert_eq!(marked(d, &row(system)), format!("<|im_start|>system\nBe brief.<|im_end|>\n{turns}"));
        // Tools stand before the first turn.
        let tools = r#"{"tools": [{"name": "<|im_start|>assistant"}], "messages""#;
        let shown = marked(d, &row("").replace("{\"messages\"", tools));
        assert!(shown.starts_with("<|im_start|>system\n# Tools") && shown.ends_with(turns), "{shown}");
    };
    check();
    // A template that can think opens an answer as the other one does.
    std::fs::copy(golden("chat/qwen3-thinking.jinja"), d.join("m/chat_template.jinja")).unwrap();
    let alone = r#"{"messages": [{"role": "assistant", "content": "Hello."}]}"#;
    assert_eq!(marked(d, alone), "<|im_start|>assistant\n⟦Hello.<|im_end|>⟧");
    let refusing = "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}\
                    {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    std::fs::write(d.join("m/chat_template.jinja"), refusing).unwrap();
    std::fs::write(
        d.join("row.jsonl"),
        format!("{}\n{alone}\n", row("").replace("[", "[{\"role\": \"user\", \"content\": \"a\"}, ")),
    )
    .unwrap();
    let error = plan(d, "row.jsonl", &[]).unwrap_err();
    let reason =
        "row.jsonl:2: the conversation begins with a message of role \"assistant\", and the chat template fails";
    assert!(error.contains(reason) && error.contains("roles must alternate"), "{error}");
    assert!(error.contains("begin it with a user message"), "{error}");
}

/// What an assistant thinks, in a field of its own, is learned where the template renders it, as it is in the text.
#[test]
fn reasoning_is_learned_where_the_template_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let user = r#"{"role": "user", "content": "Why?"}"#;
    let fields = r#"{"role": "assistant", "reasoning_content": "So.", "content": "Because."}"#;
    let inline = r#"{"role": "assistant", "content": "<think>\nSo.\n</think>\n\nBecause."}"#;
    let row = |answer: &str| format!(r#"{{"messages": [{user}, {answer}]}}"#);
    let opening = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n";
    // The template of an instruct model has no place for it, and the commands that read rows say so once for each file.
    assert_eq!(marked(d, &row(fields)), format!("{opening}⟦Because.<|im_end|>⟧"));
    let said = |words: &[&str]| String::from_utf8_lossy(&run(d, words).stderr).into_owned();
    let note = |field: &str, rows: &str| {
        format!("note: row.jsonl: the chat template leaves out \"{field}\", which stands in {rows}\n")
    };
    std::fs::write(d.join("row.jsonl"), format!("{}\n{}\n{}\n", row(fields), row(inline), row(fields))).unwrap();
    let fit = "fit -m m -d row.jsonl -o out --device cpu --dry-run --token-cache cache".split(' ').collect::<Vec<_>>();
    let [preview, stats] = ["preview", "stats"].map(|name| ["data", name, "row.jsonl", "-m", "m"]);
    // The second time, the rows come from the cache.
    for words in [&preview[..], &stats, &fit, &fit] {
        let said = said(words);
        assert!(said.contains(&note("reasoning_content", "2 rows")), "{words:?}: {said}");
        assert_eq!(said.matches("leaves out").count(), 1, "{words:?}: {said}");
    }
    std::fs::copy(golden("chat/qwen3-thinking.jinja"), d.join("m/chat_template.jinja")).unwrap();
    let thought = format!("{opening}⟦<think>\nSo.\n</think>\n\nBecause.<|im_end|>⟧");
    assert_eq!(marked(d, &row(fields)), thought);
    assert!(!said(&stats).contains("leaves out"), "{}", said(&stats));
    // Templates of Qwen3 know no other name for it.
    assert_eq!(marked(d, &row(&fields.replace("reasoning_content", "thinking"))), thought.replace("So.", ""));
    assert!(said(&stats).contains(&note("thinking", "1 row")), "{}", said(&stats));
    assert_eq!(marked(d, &row(inline)), thought);
    // The template drops the thoughts of earlier turns, so that each turn is a sequence of its own.
    let two = format!(r#"{{"messages": [{user}, {fields}, {user}, {fields}]}}"#);
    let second = format!("{opening}Because.<|im_end|>\n{opening}⟦<think>\nSo.\n</think>\n\nBecause.<|im_end|>⟧");
    assert_eq!(marked(d, &two), format!("{thought}\n--\n{second}"));
}

/// For each answer the beginning of the conversation is rendered, so that four times as many messages take sixteen times as long.
/// Where a template drops earlier thoughts, each answer is a sequence of its own, which begins as the one before: only its end is
/// encoded. Messages that are long take four times as long. The bounds are about twice these numbers, and the times are those of
/// the processor.
#[test]
#[cfg(target_os = "linux")]
fn a_long_conversation_takes_no_minutes() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let seconds = |turns: usize, words: usize| {
        let turn = |i: usize| {
            let asked = format!("question {i} {}", "why is that so, ".repeat(words));
            let answer = format!("<think>\nlet me see\n</think>\n\nanswer {i} {}", "because it is, ".repeat(words));
            [json!({"role": "user", "content": asked}), json!({"role": "assistant", "content": answer})]
        };
        let messages: Vec<_> = (0..turns).flat_map(turn).collect();
        std::fs::write(d.join("talk.jsonl"), json!({"messages": messages}).to_string()).unwrap();
        let Cost { status, seconds, .. } = cost(d, &["data", "stats", "talk.jsonl", "-m", "m"]);
        assert!(status.success(), "{turns} turns: {status}");
        seconds
    };
    for template in ["of an instruct model", "that drops thoughts"] {
        if template == "that drops thoughts" {
            std::fs::copy(golden("chat/qwen3-thinking.jinja"), d.join("m/chat_template.jinja")).unwrap();
        }
        let (few, many) = (seconds(125, 1), seconds(500, 1));
        assert!(many <= 30.0 * few + 0.5, "a template {template}: 125 turns take {few:.2} s, and 500 take {many:.2} s");
    }
    // The texts have 100 and 400 KB.
    let (few, many) = (seconds(32, 100), seconds(125, 100));
    assert!(many <= 9.0 * few, "32 long turns take {few:.2} s, and 125 take {many:.2} s");
}

/// Documents are sequences of their own, all of whose tokens are supervised.
#[test]
fn each_text_is_a_document() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let write = |name: &str, text: &str| std::fs::write(d.join(name), text).unwrap();
    write("one.txt", "First text.");
    let one = plan(d, "one.txt", &[]).unwrap();
    assert!(one.starts_with("1 row of text · 1 train / 0 eval · "), "{one}");
    for (name, text, rows) in [
        ("a.jsonl", "{\"text\": \"First text.\"}\n", 1),
        ("b.json", "[{\"text\": \"First text.\", \"meta\": {}}, {\"text\": \"First text.\"}]", 2),
        ("c.jsonl", "{\"text\": \"First text.\"}\n\n{\"text\": \"First text.\"}\n{\"text\": \"First text.\"}", 3),
    ] {
        write(name, text);
        let line = plan(d, name, &[]).unwrap();
        let found: Vec<&str> = line.split(" · ").collect();
        assert!(found[0].ends_with("of documents") && found[1] == format!("{rows} train / 0 eval"), "{line}");
        let tokens = |line: &str| line.rsplit_once(" · ").unwrap().1.split(' ').next().unwrap().parse::<u32>().unwrap();
        assert_eq!(tokens(&line), rows * tokens(&one), "{line}");
    }
}

/// Comments, blank lines, a header and the ends of lines of other systems are no part of the rows, and an answer may hold tabs.
#[test]
fn tab_separated_rows_are_read_as_people_write_them() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let expected = marked(d, r#"{"prompt": "Who?", "completion": "I."}"#);
    let of = |text: &str| {
        std::fs::write(d.join("row.tsv"), text).unwrap();
        let shown = ok(d, &["data", "preview", "row.tsv", "-m", "m"]);
        let (_, row) = shown.split_once("\n\nrow.tsv:").unwrap();
        let (place, row) = row.split_once('\n').unwrap();
        (place.split(' ').next().unwrap().to_owned(), row.trim_end().to_owned())
    };
    assert_eq!(of("# a comment\n\nWho?\tI.\n\n"), ("3".to_owned(), expected.clone()));
    assert_eq!(of("prompt\ttarget\nWho?\tI."), ("2".to_owned(), expected.clone()));
    assert_eq!(of("Question\tResponse\nWho?\tI."), ("2".to_owned(), expected.clone()));
    // Only the first row can be names, and a row of one name is a row.
    assert_eq!(of("Who?\tI.\nquestion\tanswer\n").0, "1");
    assert_eq!(of("question\tWho?\nWho?\tI.\n").0, "1");
    assert_eq!(of("\u{feff}Who?\tI.\r\n"), ("1".to_owned(), expected.clone()));
    assert_eq!(of("Who?\tI.\tYou.\n"), ("1".to_owned(), expected.replace("I.", "I.\tYou.")));
}

/// A row needs no `input` and no `system`. A value of theirs that is no text is refused, and not ignored.
#[test]
fn an_optional_field_is_text_or_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let alpaca = json!({"instruction": "Who?", "output": "I."});
    let sharegpt = json!({"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I."}]});
    let expected = marked(d, &alpaca.to_string());
    for (row, field) in [(&alpaca, "input"), (&alpaca, "system"), (&sharegpt, "system")] {
        let with = |value| {
            let mut row = row.clone();
            row[field] = value;
            row.to_string()
        };
        for nothing in [json!(null), json!(""), json!(" ")] {
            assert_eq!(marked(d, &with(nothing)), expected, "{field} of {row}");
        }
        for wrong in [json!(12), json!(["be nice"]), json!({"text": "a"}), json!(false)] {
            std::fs::write(d.join("x.jsonl"), with(wrong)).unwrap();
            let error = plan(d, "x.jsonl", &[]).unwrap_err();
            let reason = format!("x.jsonl:1: {field:?} is no text; write it as text, or leave it out");
            assert!(error.contains(&reason), "{row}: {error}");
        }
    }
}

#[test]
fn a_thought_that_is_no_text_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    for (key, thought) in [("reasoning_content", "[\"c\"]"), ("thinking", "5")] {
        let answer = format!("{{\"role\": \"assistant\", \"content\": \"b\", {key:?}: {thought}}}");
        let row = format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"a\"}}, {answer}]}}\n");
        std::fs::write(d.join("x.jsonl"), row).unwrap();
        let said = refused(d, &["data", "stats", "x.jsonl", "-m", "m"], 3);
        assert!(said.contains(&format!("x.jsonl:1: message 2: {key:?} must be text")), "{said}");
    }
}

/// What is broken is refused with file, line and reason.
#[test]
fn a_broken_row_is_named_by_its_file_and_line() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let good = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
    let cases = [
        ("x.jsonl", format!("{good}\n{{\"messages\": 3}}\n"), ":2: the row has no \"messages\" list"),
        ("x.jsonl", format!("{good}\n{{\"text\": \"a\"}}\n"), ":2: the row has no \"messages\" list"),
        ("x.json", format!("[{good},\n{good},\n{{\"messages\": }}]"), ":3:14: not JSON: expected value"),
        ("x.json", format!("[{good},\n\n 7]"), ":3: a row must be a JSON object"),
        // Rows that share a line are counted.
        ("x.json", format!("[{good}, {good}, {{\"messages\": 3}}]"), ":1, row 3: the row has no \"messages\" list"),
        ("x.json", format!("[{}]", good.replace("\"b\"", "\" \"")), ":1, row 1: message 2: \"content\" is empty"),
        ("x.json", "[]".to_owned(), ": no rows in it"),
        (
            "x.jsonl",
            "{\"question\": \"a\", \"answer\": \"b\"}".to_owned(),
            ":1: a row with the keys [\"question\", \"answer\"]",
        ),
        ("x.jsonl", good.replace("\"b\"", "\"b\", \"weight\": 0.5"), ":1: message 2: weight 0.5; it must be 0 or 1"),
        ("x.jsonl", "{\"conversations\": {}}".to_owned(), ":1: the row has no \"conversations\" list"),
        ("x.jsonl", "{\"conversations\": [{\"from\": \"human\"}]}".to_owned(), ":1: turn 1: no \"value\""),
        (
            "x.jsonl",
            "{\"conversations\": [{\"from\": \"bot\", \"value\": \"a\"}]}".to_owned(),
            ":1: turn 1: \"bot\" is unknown",
        ),
        (
            "x.jsonl",
            "{\"conversations\": [{\"from\": \"function_call\", \"value\": \"a(\"}]}".to_owned(),
            ":1: turn 1: the call is not JSON",
        ),
        (
            "x.jsonl",
            "{\"conversations\": [{\"from\": \"gpt\", \"value\": \" \"}]}".to_owned(),
            ":1: turn 1: \"value\" is empty",
        ),
        ("x.jsonl", "{\"instruction\": \"a\", \"output\": \"\"}".to_owned(), ":1: \"output\" is empty; write it"),
        ("x.jsonl", "{\"instruction\": \"\", \"output\": \"b\"}".to_owned(), ":1: \"instruction\" is empty; write it"),
        (
            "x.jsonl",
            "{\"instruction\": \"a\", \"output\": \"b\", \"history\": [[\"c\", \"\"]]}".to_owned(),
            ":1: turn 1 of \"history\" has an empty prompt or answer",
        ),
        // An object of several lines, and one that was cut.
        (
            "x.json",
            "{\n\"prompt\": \"a\",\n\"completion\": \"b\"\n}".to_owned(),
            ":1: the object does not end in this line",
        ),
        (
            "x.jsonl",
            format!("{good}\n{}", &good[..50]),
            ":2: the object does not end in this line; write each row in one",
        ),
        ("x.jsonl", "{\"instruction\": [], \"output\": \"b\"}".to_owned(), ":1: no \"instruction\"; it must be text"),
        ("x.jsonl", "{\"instruction\": \"a\", \"output\": 3}".to_owned(), ":1: no \"output\"; it must be text"),
        (
            "x.jsonl",
            "{\"instruction\": \"a\", \"output\": \"b\", \"history\": [[\"c\", \"d\"], [\"e\"]]}".to_owned(),
            ":1: turn 2 of \"history\" is no pair of a prompt and its answer",
        ),
        ("x.jsonl", "{\"prompt\": \"a\", \"completion\": \" \"}".to_owned(), ":1: prompt or answer is empty"),
        ("x.jsonl", "{\"prompt\": [], \"completion\": \"b\"}".to_owned(), ":1: the row has no \"completion\" list"),
        ("x.jsonl", "{\"prompt\": 1, \"completion\": \"b\"}".to_owned(), ":1: no \"prompt\"; it must be text"),
        ("x.jsonl", "{\"text\": 5}".to_owned(), ":1: no \"text\"; it must be text"),
        ("x.jsonl", "{\"text\": \"a\"}\n{\"text\": \"\"}".to_owned(), ":2: \"text\" is empty"),
        ("x.jsonl", "{\"text\": \"a\"}\nplain".to_owned(), ":2:1: not JSON: expected value"),
        ("x.tsv", "a\tb\nc\n".to_owned(), ":2: no tab"),
        ("x.tsv", "a\t\n".to_owned(), ":1: prompt or answer is empty"),
        ("x.tsv", "a\tb\n\n\tc\n".to_owned(), ":3: prompt or answer is empty"),
        ("x.tsv", "a\tb\nc\td\0\n".to_owned(), ":2: a byte that is 0"),
        ("x.txt", String::new(), ": no rows in it"),
        ("x.txt", "one\ntwo\0".to_owned(), ":2: a byte that is 0"),
        ("x.xyz", "a,b".to_owned(), ": the file name does not tell the data format"),
    ];
    for (name, text, expected) in cases {
        std::fs::write(d.join(name), &text).unwrap();
        let error = plan(d, name, &[]).unwrap_err();
        assert!(error.contains(&format!("{name}{expected}")), "{text}: {error}");
        assert!(!d.join("out").exists());
    }
}

/// Rows that nothing is wrong with have places, too, and so have those that are left out.
#[test]
fn rows_have_the_places_where_they_stand() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let good = r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#;
    let silent = good.replace("\"b\"", "\"b\", \"weight\": 0");
    std::fs::write(d.join("x.json"), format!("[{good}, {silent},\n{good}]")).unwrap();
    let shown = ok(d, &["data", "preview", "x.json", "-m", "m"]);
    assert!(shown.contains("\nx.json:1, row 1 · ") && shown.contains("\nx.json:2 · "), "{shown}");
    let counted = ok(d, &["data", "stats", "x.json", "-m", "m"]);
    assert!(
        counted.contains("1 row in which the loss counts nothing or whose weight is 0: x.json:1, row 2\n"),
        "{counted}"
    );
    for name in ["x.txt", "x.tsv", "x.jsonl"] {
        std::fs::write(d.join(name), b"one\n\ntwo \xFF\xFE three\n").unwrap();
        let error = plan(d, name, &[]).unwrap_err();
        assert!(error.contains(&format!("{name}:3: not UTF-8")), "{error}");
    }
}
