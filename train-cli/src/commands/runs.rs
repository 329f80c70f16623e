//! `runs`: what run folders say. `list` has one line for each run of a folder, `show` the summary of one run, and `compare`
//! what differs between several: settings, figures, and the curves of their losses.

use crate::{
    CliError,
    args::{CompareArgs, ListArgs, RunsCommand, ShowArgs},
    durable,
    outputs::{check_output, is_taken},
    report,
    run::{
        plot::{self as picture, Curve},
        summary::Summary,
    },
    table::Table,
};
use serde_json::Value;
use std::{collections::BTreeSet, fs, io::ErrorKind, path::Path};

/// Runs the command.
///
/// # Errors
/// If a folder is no run folder, or a file cannot be read or written.
pub fn run(command: &RunsCommand) -> Result<(), CliError> {
    match command {
        RunsCommand::List(args) => list(args),
        RunsCommand::Show(args) => show(args),
        RunsCommand::Compare(args) => compare(args),
    }
}

fn list(args: &ListArgs) -> Result<(), CliError> {
    let mut runs = Vec::new();
    let entries = fs::read_dir(&args.folder).map_err(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => CliError::Usage(format!(
            "{}: there is no such folder; give the folder that holds your run folders",
            args.folder.display()
        )),
        _ => CliError::io(&args.folder)(error),
    })?;
    for entry in entries {
        let path = entry.map_err(CliError::io(&args.folder))?.path();
        match Summary::read(&path) {
            Ok(run) => runs.push(run),
            // It is no run folder.
            Err(CliError::Usage(_)) => {}
            Err(error) => report::line(format!("warning: {} is left out: {error}", path.display())),
        }
    }
    if runs.is_empty() {
        return Err(CliError::Usage(format!("{} holds no run folder", args.folder.display())));
    }
    runs.sort_by(|a, b| a.started().cmp(b.started()));
    if args.json {
        runs.iter().for_each(|run| report::result(Value::from(run.numbers()).to_string()));
        return Ok(());
    }
    let width = report::width();
    let rows = runs.iter().zip(Summary::names(&runs)).map(|(run, name)| {
        // A line can end between date and time. A script reads them as one word.
        let started = if width.is_some() { run.started().replace('T', " ") } else { run.started().to_owned() };
        let figure = |name: &str| run.figures().into_iter().find(|(n, _)| *n == name).map_or_else(String::new, |f| f.1);
        vec![
            name,
            started,
            run.setting("recipe"),
            figure("state"),
            figure("loss of the last step"),
            figure("evaluation loss"),
            figure("time of the training"),
        ]
    });
    let heads = ["run", "started", "recipe", "state", "loss", "evaluation loss", "time"];
    report::result(Table::new(&heads, rows).text(width));
    Ok(())
}

fn show(args: &ShowArgs) -> Result<(), CliError> {
    let run = Summary::read(&args.run)?;
    let text = match report::width() {
        _ if args.json => run.json().to_string(),
        Some(columns) => run.page().text(columns, report::marks(report::BOLD).unwrap_or_default()),
        None => run.page().markdown(),
    };
    report::result(text.trim_end());
    Ok(())
}

fn compare(args: &CompareArgs) -> Result<(), CliError> {
    args.plot.as_deref().map_or(Ok(()), check_plot)?;
    let runs = args.runs.iter().map(|run| Summary::read(run)).collect::<Result<Vec<_>, _>>()?;
    if args.json {
        runs.iter().for_each(|run| report::result(compared(run, &differing(&runs))));
    } else {
        let table = compared_table(&runs);
        report::result(if args.markdown { table.markdown() } else { table.text(report::width()) });
    }
    args.plot.as_ref().map_or(Ok(()), |path| plot(&runs, path))
}

/// The settings that differ between runs. The folder of a run is its own.
fn differing(runs: &[Summary]) -> BTreeSet<&String> {
    let keys = runs.iter().flat_map(|run| run.settings.keys()).filter(|key| *key != "output_dir");
    keys.filter(|key| runs.windows(2).any(|pair| pair[0].setting(key) != pair[1].setting(key))).collect()
}

/// The figures of a run and some of its settings, as one JSON object.
fn compared(run: &Summary, keys: &BTreeSet<&String>) -> String {
    let mut line = run.numbers();
    let settings = keys.iter().map(|key| ((*key).clone(), run.settings.get(*key).cloned().unwrap_or_default()));
    line.insert("settings".to_owned(), Value::Object(settings.collect()));
    Value::from(line).to_string()
}

/// The figures of runs side by side, and the settings that differ.
fn compared_table(runs: &[Summary]) -> Table {
    let heads: Vec<String> = std::iter::once(String::new()).chain(Summary::names(runs)).collect();
    let mut names: Vec<&str> = runs.iter().flat_map(|run| run.figures()).map(|(name, _)| name).collect();
    let mut seen = BTreeSet::new();
    names.retain(|name| seen.insert(*name));
    let figure = |run: &Summary, name: &str| {
        run.figures().into_iter().find(|(n, _)| *n == name).map_or_else(|| "–".to_owned(), |(_, value)| value)
    };
    let mut rows: Vec<Vec<String>> =
        names.iter().map(|name| row(name, runs.iter().map(|run| figure(run, name)))).collect();
    rows.extend(differing(runs).into_iter().map(|key| row(key, runs.iter().map(|run| run.setting(key)))));
    Table::new(&heads, rows)
}

/// Refuses a picture's path before the runs are read.
fn check_plot(path: &Path) -> Result<(), CliError> {
    if path.extension().is_none_or(|extension| extension != "svg") || is_taken(path) {
        let text = "the name must end in .svg, and the file must not exist yet";
        return Err(CliError::Usage(format!("--plot {}: {text}", path.display())));
    }
    check_output("--plot", path, &[])
}

/// Draws the losses of runs.
fn plot(runs: &[Summary], path: &Path) -> Result<(), CliError> {
    let curves: Vec<Curve> = runs
        .iter()
        .zip(Summary::names(runs))
        .flat_map(|(run, name)| run.curves().map(|curve| Curve { name: format!("{name}, {}", curve.name), ..curve }))
        .filter(|curve| !curve.points.is_empty())
        .collect();
    durable::write_bytes(path, picture::svg("loss", &curves).as_bytes())?;
    report::label("plot", path.display().to_string());
    Ok(())
}

fn row(name: &str, values: impl Iterator<Item = String>) -> Vec<String> {
    std::iter::once(name.to_owned()).chain(values).collect()
}
