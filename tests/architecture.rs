//! The structure of the workspace, read from its `use` lines and paths: no file of a crate imports a file that imports
//! it, and inside train-cli a room imports only rooms below it.
//!
//! A name that `lib.rs` or a `mod.rs` re-exports counts as an import of the file that defines it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};
use syn::visit::Visit;

/// The rooms of train-cli, top to bottom. Files outside these folders are the ground floor, below all rooms.
const ROOMS: [&str; 7] = ["commands", "serve", "talk", "run", "train", "memory", "data"];

#[test]
fn no_file_imports_a_file_that_imports_it() {
    for name in ["kernels-cubecl", "backend-nvfp4", "model-qwen3", "train-cli"] {
        let imports = Crate::read(name).imports();
        assert!(imports.values().map(BTreeSet::len).sum::<usize>() > 10, "{name}: too few imports were found");
        if let Some(circle) = circle(&imports) {
            panic!("{name}: these files import each other in a circle: {}", circle.join(" -> "));
        }
    }
}

#[test]
fn rooms_of_train_cli_import_only_what_is_below_them() {
    let imports = Crate::read("train-cli").imports();
    let upward: Vec<String> = imports
        .iter()
        .flat_map(|(from, targets)| targets.iter().map(move |to| (from, to)))
        .filter(|(from, to)| floor(from) < floor(to))
        .map(|(from, to)| format!("{from} imports {to}"))
        .collect();
    assert!(upward.is_empty(), "imports that point upwards:\n{}", upward.join("\n"));
}

/// Each capital letter of a shape, and each type parameter of one letter, is in the table of letters of its crate once.
#[test]
fn letters_have_one_meaning_in_a_crate() {
    for name in ["kernels-cubecl", "backend-nvfp4", "model-qwen3", "train-cli"] {
        let texts = texts(name);
        let lib = &texts.iter().find(|(file, _)| file == "lib.rs").expect("a crate has a lib.rs").1;
        let table =
            lib.split("//! # Letters").nth(1).unwrap_or_else(|| panic!("{name}: lib.rs has no table of letters"));
        let (mut shapes, mut parameters) = (BTreeSet::new(), BTreeSet::new());
        for row in table.lines().filter_map(|line| line.strip_prefix("//! | `")) {
            let (letters, meaning) = row.split_once(" | ").expect("a row has two cells");
            let letters = letters.chars().filter(char::is_ascii_uppercase);
            let list = if meaning.starts_with("type parameter") { &mut parameters } else { &mut shapes };
            letters.for_each(|letter| assert!(list.insert(letter), "{name}: `{letter}` is in the table twice"));
        }
        let both: Vec<_> = shapes.intersection(&parameters).collect();
        assert!(both.is_empty(), "{name}: a shape and a type parameter are both called {both:?}");
        let mut found = 0;
        for (file, text) in &texts {
            let mut generics = Generics(BTreeSet::new());
            generics.visit_file(&syn::parse_file(text).expect("a source file parses"));
            let unknown: Vec<_> = generics.0.difference(&parameters).collect();
            assert!(unknown.is_empty(), "{name}/{file}: type parameters that the table lacks: {unknown:?}");
            for (i, line) in text.lines().enumerate() {
                for letter in shape_letters(line) {
                    let place = format!("{name}/src/{file}:{}", i + 1);
                    assert!(shapes.contains(&letter), "{place}: the table lacks the letter `{letter}`");
                    found += 1;
                }
            }
        }
        assert!(found > 10, "{name}: only {found} letters were found");
    }
}

#[test]
fn letters_are_found_where_they_stand() {
    let letters = |line: &str| shape_letters(line).into_iter().collect::<String>();
    assert_eq!(letters("/// Maps `[M, H*E]` to `[rows, K/16]`, see [`Documents`] and `[1]`."), "MHEK");
    assert_eq!(letters("let q_MHE = x_MD.clone(); // sm_80, CASES_A"), "MHEMD");
    assert_eq!(letters("const MAX_LEN: usize = of_[0];"), "");
}

/// The letters of the shapes in a line: those of `[M, D]` in a comment, and those that end a name, as in `x_MD`.
fn shape_letters(line: &str) -> Vec<char> {
    let mut found = Vec::new();
    if let Some((_, comment)) = line.split_once("//") {
        for span in comment.split('`').skip(1).step_by(2) {
            let Some(shape) = span.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) else { continue };
            let words = shape.split(|c: char| !c.is_alphanumeric()).filter(|word| word.len() == 1);
            found.extend(words.flat_map(str::chars).filter(char::is_ascii_uppercase));
        }
    }
    for word in line.split("//").next().unwrap_or_default().split(|c: char| !(c.is_alphanumeric() || c == '_')) {
        if let Some((name, letters)) = word.rsplit_once('_')
            && name.chars().any(|c| c.is_ascii_lowercase())
            && letters.chars().all(|c| c.is_ascii_uppercase())
        {
            found.extend(letters.chars());
        }
    }
    found
}

/// The type and const parameters of one letter.
struct Generics(BTreeSet<char>);

impl<'ast> Visit<'ast> for Generics {
    fn visit_generics(&mut self, generics: &'ast syn::Generics) {
        for parameter in &generics.params {
            let name = match parameter {
                syn::GenericParam::Type(parameter) => parameter.ident.to_string(),
                syn::GenericParam::Const(parameter) => parameter.ident.to_string(),
                syn::GenericParam::Lifetime(_) => continue,
            };
            if let (Some(letter), 1) = (name.chars().next(), name.len()) {
                self.0.insert(letter);
            }
        }
        syn::visit::visit_generics(self, generics);
    }
}

/// Clippy's thresholds hold: long functions are split, and only a kernel or its launch takes more parameters.
#[test]
fn no_function_is_excused_from_being_short() {
    let mut excused = 0;
    for name in ["kernels-cubecl", "backend-nvfp4", "model-qwen3", "train-cli", "tests"] {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name);
        let mut files = Vec::new();
        collect(&root, &mut files);
        for path in files {
            let text = fs::read_to_string(&path).expect("a readable source file");
            for (i, line) in text.lines().enumerate() {
                let place = format!("{}:{}", path.display(), i + 1);
                // Written so that this file does not contain what it looks for.
                let excuses = |lint: &str| {
                    ["allow", "expect"].iter().any(|level| line.contains(&format!("{level}(clippy::too_many_{lint}")))
                };
                assert!(!excuses("lines"), "{place}: split the function");
                if excuses("arguments") {
                    let launches = ["a launch takes", "a kernel takes"].iter().any(|reason| line.contains(reason));
                    assert!(name == "kernels-cubecl" && launches, "{place}: give the function a struct");
                    excused += 1;
                }
            }
        }
    }
    assert!(excused > 5, "only {excused} excuses were found: is the text that is looked for still right?");
}

/// Only `bytes.rs` of the model's crate knows how numbers lie in files.
#[test]
fn one_file_converts_numbers_and_bytes() {
    let found = calls("model-qwen3", &["_le_bytes", "_be_bytes", "_ne_bytes"]);
    assert!(found.iter().any(|(file, _)| file == "bytes.rs"), "the owner has no conversions");
    let others: Vec<_> = found.iter().filter(|(file, _)| file != "bytes.rs").collect();
    assert!(others.is_empty(), "numbers become bytes outside of bytes.rs: {others:?}");
}

/// The ways of the standard library to change a file system, and that of rustyline to append to its history.
const WRITES: [&str; 14] = [
    "fs::write",
    "fs::create_dir",
    "fs::remove",
    "fs::rename",
    "fs::copy",
    "fs::hard_link",
    "fs::set_permissions",
    "File::create",
    "File::options",
    "OpenOptions",
    "DirBuilder",
    "symlink(",
    "set_len(",
    "append_history",
];

#[test]
fn one_folder_of_train_cli_writes_files() {
    let found = calls("train-cli", &WRITES);
    assert!(found.iter().filter(|(file, _)| file.starts_with("durable/")).count() > 3, "the owner writes nothing");
    let allowed = |(file, call): &(String, &str)| {
        file.starts_with("durable/") || file == "talk/entry.rs" && *call == "append_history"
    };
    let others: Vec<_> = found.iter().filter(|found| !allowed(found)).collect();
    assert!(others.is_empty(), "files are written outside of durable: {others:?}");
}

/// Where the sources of a crate hold one of these texts, outside of comments and unit tests: the file and the text.
fn calls<'a>(name: &str, wanted: &[&'a str]) -> Vec<(String, &'a str)> {
    let mut found = Vec::new();
    for (file, text) in texts(name) {
        let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
        let code: Vec<&str> = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
        found.extend(
            wanted
                .iter()
                .filter(|call| code.iter().any(|line| line.contains(**call)))
                .map(|call| (file.clone(), *call)),
        );
    }
    found
}

/// Flags stay in the commands: other rooms take values.
#[test]
fn only_commands_read_flags() {
    let imports = Crate::read("train-cli").imports();
    let readers: Vec<&String> = imports
        .iter()
        .filter(|(_, targets)| targets.iter().any(|t| t.starts_with("args/")))
        .map(|(file, _)| file)
        .collect();
    assert!(readers.len() > 10, "too few readers of flags were found: {readers:?}");
    let may = |file: &str| {
        file.starts_with("commands/") || file.starts_with("args/") || ["lib.rs", "main.rs"].contains(&file)
    };
    let others: Vec<_> = readers.into_iter().filter(|file| !may(file)).collect();
    assert!(others.is_empty(), "flags are read outside of the commands: {others:?}");
}

#[test]
fn a_circle_is_found() {
    let imports = |pairs: &[(&str, &str)]| {
        let mut map: Imports = BTreeMap::new();
        for (from, to) in pairs {
            map.entry((*from).to_owned()).or_default().insert((*to).to_owned());
        }
        map
    };
    assert_eq!(circle(&imports(&[("a", "b"), ("a", "c"), ("b", "c")])), None);
    let found = circle(&imports(&[("a", "b"), ("b", "c"), ("c", "d"), ("d", "b")])).expect("b, c, d form a circle");
    assert_eq!(found, ["b", "c", "d", "b"]);
}

#[test]
fn every_form_of_import_is_seen() {
    let forms = [
        "use crate::b::X;",
        "use super::b::{X as Y};",
        "use crate::{a, b::*};",
        "use crate::b; fn f() { b::g(); }",
        "use crate::b as c; fn f() { c::g(); }",
        "fn f() -> crate::b::X { todo() }",
        "fn f() { assert!(crate::b::g()); }",
        "fn f() { assert!(super::b::g()); }",
        "mod inner { use super::super::b::X; }",
        "use crate::Z;",
        "pub use crate::b::X;",
    ];
    for form in forms {
        let files = [("lib.rs", "mod a; mod b; pub use b::X as Z;"), ("a.rs", form), ("b.rs", "pub struct X;")];
        let imports = Crate::of(files.map(|(file, text)| (file.to_owned(), text.to_owned()))).imports();
        assert!(imports["a.rs"].contains("b.rs"), "not seen: {form}");
    }
}

/// The height of a file's room; `main.rs` and `lib.rs` are the roof.
fn floor(file: &str) -> usize {
    let (room, rest) = file.split_once('/').unwrap_or(("", file));
    match ROOMS.iter().position(|r| *r == room) {
        Some(i) => ROOMS.len() - i,
        None if rest == "main.rs" || rest == "lib.rs" => ROOMS.len() + 1,
        None => 0,
    }
}

/// File to the files that it imports.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// A module's path below the crate's root; the root is the empty path.
type ModulePath = Vec<String>;

struct Crate {
    /// Module path to its file, relative to `src`, and its syntax tree.
    modules: BTreeMap<ModulePath, (String, syn::File)>,
}

impl Crate {
    fn read(name: &str) -> Self {
        Self::of(texts(name))
    }

    /// A crate of files, each with its path below `src` and its text.
    fn of(files: impl IntoIterator<Item = (String, String)>) -> Self {
        let modules = files
            .into_iter()
            .map(|(file, text)| {
                let tree = syn::parse_file(&text).unwrap_or_else(|e| panic!("{file}: {e}"));
                (module_path(&file), (file, tree))
            })
            .collect();
        Self { modules }
    }

    fn imports(&self) -> Imports {
        let mut imports = Imports::new();
        for (module, (file, tree)) in &self.modules {
            let door = file == "lib.rs" || file.ends_with("mod.rs");
            let mut paths = Paths { re_exports: !door, ..Paths::default() };
            paths.visit_file(tree);
            let targets = imports.entry(file.clone()).or_default();
            for path in paths.whole() {
                if let Some(target) = self.resolve(module, &path, 0).filter(|target| target != file) {
                    targets.insert(target);
                }
            }
        }
        imports
    }

    /// The file that defines what a path names, if it is in this crate.
    fn resolve(&self, from: &ModulePath, path: &[String], depth: usize) -> Option<String> {
        assert!(depth < 16, "re-exports that lead in a circle: {path:?}");
        let mut at = from.clone();
        let mut rest = path;
        match rest.first()?.as_str() {
            "crate" => (at, rest) = (vec![], &rest[1..]),
            "self" => rest = &rest[1..],
            "super" => {
                while rest.first().is_some_and(|s| s == "super") {
                    at.pop();
                    rest = &rest[1..];
                }
            }
            // A plain path names a child module or something from another crate.
            child => {
                let mut below = at.clone();
                below.push(child.to_owned());
                self.modules.get(&below)?;
            }
        }
        while let Some((next, tail)) = rest.split_first() {
            let mut below = at.clone();
            below.push(next.clone());
            if self.modules.contains_key(&below) {
                (at, rest) = (below, tail);
            } else if let Some(origin) = self.re_export(&at, next) {
                let origin: Vec<String> = origin.into_iter().chain(tail.iter().cloned()).collect();
                return self.resolve(&at, &origin, depth + 1).or_else(|| self.file(&at));
            } else {
                break;
            }
        }
        self.file(&at)
    }

    fn file(&self, module: &ModulePath) -> Option<String> {
        self.modules.get(module).map(|(file, _)| file.clone())
    }

    /// The path that `pub use` gives a name in this module.
    fn re_export(&self, module: &ModulePath, name: &str) -> Option<Vec<String>> {
        let (_, tree) = self.modules.get(module)?;
        tree.items.iter().find_map(|item| match item {
            syn::Item::Use(item) if !matches!(item.vis, syn::Visibility::Inherited) => {
                let mut leaves = Vec::new();
                flatten(&item.tree, &mut vec![], &mut leaves);
                leaves.into_iter().find(|(_, visible)| visible == name).map(|(path, _)| path)
            }
            _ => None,
        })
    }
}

/// The files of a crate, each with its path below `src` and its text.
fn texts(name: &str) -> Vec<(String, String)> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name).join("src");
    let mut files = Vec::new();
    collect(&source, &mut files);
    let read = |path: PathBuf| {
        let file = path.strip_prefix(&source).expect("below src").to_string_lossy().into_owned();
        (file, fs::read_to_string(&path).expect("a readable source file"))
    };
    files.into_iter().map(read).collect()
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a source folder") {
        let path = entry.expect("a folder entry").path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|e| e == "rs") {
            files.push(path);
        }
    }
}

fn module_path(file: &str) -> ModulePath {
    let mut path: ModulePath = file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    if path.last().is_some_and(|last| last == "mod") || path == ["lib"] {
        path.pop();
    }
    path
}

/// Every leaf of a `use` tree: its whole path and the name it gets.
fn flatten(tree: &syn::UseTree, prefix: &mut Vec<String>, leaves: &mut Vec<(Vec<String>, String)>) {
    match tree {
        syn::UseTree::Path(p) => {
            prefix.push(p.ident.to_string());
            flatten(&p.tree, prefix, leaves);
            prefix.pop();
        }
        syn::UseTree::Group(g) => g.items.iter().for_each(|tree| flatten(tree, prefix, leaves)),
        syn::UseTree::Glob(_) => leaves.push((prefix.clone(), "*".to_owned())),
        syn::UseTree::Name(n) if n.ident == "self" => {
            leaves.push((prefix.clone(), prefix.last().cloned().unwrap_or_default()));
        }
        syn::UseTree::Name(n) => {
            let path = prefix.iter().cloned().chain([n.ident.to_string()]).collect();
            leaves.push((path, n.ident.to_string()));
        }
        syn::UseTree::Rename(r) => {
            let path = if r.ident == "self" {
                prefix.clone()
            } else {
                prefix.iter().cloned().chain([r.ident.to_string()]).collect()
            };
            leaves.push((path, r.rename.to_string()));
        }
    }
}

/// The paths that a file imports or spells out. Tests inside it are left out, and so is what `lib.rs` or a `mod.rs`
/// re-exports, which is a name and no import.
#[derive(Default)]
struct Paths {
    found: Vec<Vec<String>>,
    /// The names that `use` lines give to paths.
    names: BTreeMap<String, Vec<String>>,
    /// Whether re-exports count as imports.
    re_exports: bool,
    /// Modules written inside the file that the visitor is in: there, `super` names the file itself.
    inline_modules: usize,
}

impl Paths {
    /// The paths that were found, each from the name on that a `use` line gave it.
    fn whole(self) -> Vec<Vec<String>> {
        let Self { found, names, .. } = self;
        let whole = |path: Vec<String>| match names.get(&path[0]) {
            Some(start) => start.iter().cloned().chain(path.into_iter().skip(1)).collect(),
            None => path,
        };
        found.into_iter().filter(|path| !path.is_empty()).map(whole).collect()
    }

    fn add(&mut self, path: Vec<String>) {
        let inside = path.iter().take(self.inline_modules).take_while(|s| *s == "super").count();
        if inside == 0 {
            self.found.push(path);
        } else if path.get(inside).is_some_and(|s| s == "super") {
            self.found.push(path[inside..].to_vec());
        }
    }
}

impl<'ast> Visit<'ast> for Paths {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        let test = item
            .attrs
            .iter()
            .any(|a| a.path().is_ident("cfg") && a.parse_args::<syn::Path>().is_ok_and(|path| path.is_ident("test")));
        if !test {
            let inline = usize::from(item.content.is_some());
            self.inline_modules += inline;
            syn::visit::visit_item_mod(self, item);
            self.inline_modules -= inline;
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if self.re_exports || matches!(item.vis, syn::Visibility::Inherited) {
            let mut leaves = Vec::new();
            flatten(&item.tree, &mut vec![], &mut leaves);
            for (path, name) in leaves {
                self.add(path.clone());
                // A name that begins its own path, as in `use once::once`, would never end.
                if path.first() != Some(&name) {
                    self.names.insert(name, path);
                }
            }
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<String> = path.segments.iter().map(|s| s.ident.to_string()).collect();
        // A path that begins with a name from elsewhere resolves to nothing.
        if names.len() > 1 {
            self.add(names);
        }
        syn::visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        let text = call.tokens.to_string();
        for (at, _) in ["crate ::", "super ::", "self ::"].iter().flat_map(|start| text.match_indices(start)) {
            let path = text[at..].split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':' || c == ' '));
            let path = path.into_iter().next().unwrap_or_default();
            self.add(path.split("::").map(|s| s.trim().to_owned()).collect());
        }
        syn::visit::visit_macro(self, call);
    }
}

/// The first circle that a depth-first walk meets, its first file repeated at its end.
fn circle(imports: &Imports) -> Option<Vec<String>> {
    fn walk<'a>(
        at: &'a str,
        imports: &'a Imports,
        path: &mut Vec<&'a str>,
        done: &mut BTreeSet<&'a str>,
    ) -> Option<Vec<String>> {
        if let Some(start) = path.iter().position(|p| *p == at) {
            return Some(path[start..].iter().chain([&at]).map(|s| (*s).to_owned()).collect());
        }
        if !done.insert(at) {
            return None;
        }
        path.push(at);
        let found = imports.get(at).into_iter().flatten().find_map(|next| walk(next, imports, path, done));
        path.pop();
        found
    }
    let mut done = BTreeSet::new();
    imports.keys().find_map(|file| walk(file, imports, &mut Vec::new(), &mut done))
}
