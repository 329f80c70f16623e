"""Draws mutants of the four crates with a recorded seed, builds them all at once, and runs the tests against each.

    python doc/notebook/mutations.py choose COPY --seed 14 --count 40 --out mutations.json
    python doc/notebook/mutations.py build COPY --out mutations.json
    python doc/notebook/mutations.py judge COPY --out mutations.json
    python doc/notebook/mutations.py table COPY --out mutations.json

COPY is a clean checkout that may be changed, with its own target folder. `cargo mutants --list` (cargo-mutants) says
which mutants there are; the seed chooses some of each crate. A mutated function keeps its old body beside the new one:

    fn f() -> T { if crate::mutant(17) { new body } else { old body } }

and the environment variable MUTANT chooses at run time, so that one build serves every mutant. A mutant that does not
build does not count, and the next one of the draw takes its place. A function whose two bodies cannot stand side by side
(a constant function, say) is left to a build of its own, which `--alone ID` makes.
"""

import argparse
import json
import os
import random
import re
import subprocess
import time
from pathlib import Path

CRATES = ["kernels-cubecl", "backend-nvfp4", "model-qwen3", "train-cli"]
# They measure, or say what a build is: no test asserts a time.
EXCLUDED = re.compile(r"/bench|/main\.rs|/commands/bench\.rs")
# Tests that should see a mutant of a file, the likeliest first. Every other test follows.
LIKELY = [
    (r"kernels-cubecl/src/decode_attention", "emulated::attention cache random_cases"),
    (r"kernels-cubecl/src/attention", "emulated::attention blocks random_cases"),
    (r"kernels-cubecl/src/gemm", "emulated::gemm random_products"),
    (r"kernels-cubecl/src/(gemv|block_scaled|mma)", "emulated random_products"),
    (r"kernels-cubecl/src/cuda_source", "emulated"),
    (r"kernels-cubecl/src/(quantize|codec|layout|hadamard|rng|dequantize)", "quantizer codec recipe random_cases"),
    (r"kernels-cubecl/src/(adamw|gradient)", "optimizer random_cases"),
    (r"kernels-cubecl/", "random_cases blocks products quantizer optimizer"),
    (r"backend-nvfp4/src/(optim|reference/(adamw|moments))", "optimizer"),
    (r"backend-nvfp4/src/reference", "quantizer codec recipe products optimizer random_cases"),
    (r"backend-nvfp4/", "recipe blocks gradients products quantizer optimizer random_cases cache"),
    (r"model-qwen3/src/(tokenizer|chat_template)", "text generation"),
    (r"model-qwen3/src/loss", "blocks training"),
    (r"model-qwen3/src/(dat|container|safetensors|repack|gguf|foreign|bytes|write|file)", "hostile formats loading cache"),
    (r"model-qwen3/", "generation loading formats cache parity hostile"),
    (r"train-cli/src/data", "data_options cli training"),
    (r"train-cli/src/(plan|args|settings|error|report)", "cli training"),
    (r"train-cli/src/commands/generate", "generation text cli"),
    (r"train-cli/src/commands/parity", "parity loading"),
    (r"train-cli/src/commands/(inspect|export)", "formats loading data_options cli"),
    (r"train-cli/src/durable", "reliability training formats"),
    (r"train-cli/src/train", "streaming training data_options guard"),
    (r"train-cli/src/(memory|run)", "training reliability guard"),
    (r"train-cli/", "cli training formats generation loading parity"),
]
# What the copy does without, so that it builds in half the time: the program on GPUs, and kernel tests on CUDA.
TRIM = [
    ("train-cli/src/device.rs", "on_cube::<AnyCudaRuntime, J>(&choice.to_string(), AnyCudaDevice::Gpu(index), precision, job)"),
    ("train-cli/src/device.rs", 'on_cube::<WgpuRuntime, J>("vulkan", WgpuDevice::DefaultDevice, precision, job)'),
    ("tests/support/mod.rs", "$f::<kernels_cubecl::any_cuda::AnyCudaRuntime>()"),
]
HELPER = """
/// Whether the environment variable MUTANT names this mutant.
#[doc(hidden)]
pub fn mutant(id: u32) -> bool {
    static CHOSEN: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
    *CHOSEN.get_or_init(|| std::env::var("MUTANT").ok().and_then(|v| v.parse().ok()).unwrap_or(u32::MAX)) == id
}
"""


def candidates(root):
    """Every mutant of the four crates, in an order that depends on nothing but the sources."""
    command = ["cargo", "mutants", "--list", "--json", "--dir", str(root)]
    for crate in CRATES:
        command += ["--package", crate]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    found = [m for m in found if not EXCLUDED.search(m["file"]) and m.get("function")]
    return sorted(found, key=lambda m: (m["file"], m["span"]["start"]["line"], m["span"]["start"]["column"], m["replacement"]))


def draw(found, seed, count):
    """For each crate a shuffled list, of which the first are wanted and the others stand in."""
    generator = random.Random(seed)
    queues, wanted = {}, {}
    for i, crate in enumerate(CRATES):
        queues[crate] = [m for m in found if m["package"] == crate]
        generator.shuffle(queues[crate])
        wanted[crate] = count // len(CRATES) + (i < count % len(CRATES))
    return queues, wanted


def by_hand(root, path, found):
    """Mutants that a person wrote: a text that stands once in a file, and what takes its place."""
    result = []
    for entry in json.loads(path.read_text()):
        text = (root / entry["file"]).read_text()
        assert text.count(entry["find"]) == 1, entry
        before = text[: text.index(entry["find"])]
        start = {"line": before.count("\n") + 1, "column": len(before) - before.rfind("\n")}
        through = before + entry["find"]
        end = {"line": through.count("\n") + 1, "column": len(through) - through.rfind("\n")}
        around = [m["function"] for m in found if m["file"] == entry["file"] and holds(m["function"]["span"], start)]
        function = min(around, key=lambda f: f["span"]["end"]["line"] - f["span"]["start"]["line"])
        result.append({"package": entry["file"].split("/")[0], "file": entry["file"], "function": function, "genre": "ByHand",
                       "span": {"start": start, "end": end}, "replacement": entry["replace"],
                       "name": f"{entry['file']}: {entry['name']}"})
    return result


def holds(span, place):
    """Whether a place lies in a span of lines."""
    return span["start"]["line"] <= place["line"] <= span["end"]["line"]


def offset(lines, place):
    """The index in the text of a line and a column, both counted from 1."""
    return sum(len(line) for line in lines[: place["line"] - 1]) + place["column"] - 1


def body_of(text, lines, function):
    """Where the statements of a function begin and end, in a file that rustfmt has formatted."""
    line = function["span"]["start"]["line"] - 1
    while not lines[line].rstrip().endswith("{"):
        line += 1
    start = sum(len(x) for x in lines[: line + 1])
    end = text.rindex("}", start, offset(lines, function["span"]["end"]))
    return start, end


def describe(mutant):
    return mutant["name"]


def schemata(root, chosen):
    """Writes the chosen mutants into the sources. `chosen` maps an id to a mutant."""
    subprocess.run(["git", "-C", str(root), "checkout", "-q", "--", *CRATES, "tests"], check=True)
    files = {}
    for key, mutant in chosen.items():
        files.setdefault(mutant["file"], {}).setdefault(json.dumps(mutant["function"]["span"]), []).append((key, mutant))
    for file, functions in files.items():
        path = root / file
        text = path.read_text()
        lines = text.splitlines(keepends=True)
        edits = []
        for group in functions.values():
            function = group[0][1]["function"]
            start, end = body_of(text, lines, function)
            head = text[: offset(lines, function["span"]["start"])].splitlines()
            inside = offset(lines, function["span"]["start"])
            kernel = "#[cube" in text[inside:start] or any("#[cube" in line for line in head[-3:] if line.strip().startswith("#["))
            out = "".join(f"\n// SCHEMA {key} BEGIN" for key, _ in group) + "\n"
            for key, mutant in group:
                a, b = offset(lines, mutant["span"]["start"]), offset(lines, mutant["span"]["end"])
                if mutant["genre"] == "FnValue":
                    new = mutant["replacement"]
                else:
                    new = text[start:a] + mutant["replacement"] + text[b:end]
                condition = f"crate::mutant({key})"
                condition = f"comptime!({condition})" if kernel else condition
                out += f"if {condition} {{\n// MUTANT {key} BEGIN\n{new}\n// MUTANT {key} END\n}} else "
            out += "{\n" + text[start:end] + "\n}\n"
            out += "".join(f"// SCHEMA {key} END\n" for key, _ in group)
            edits.append((start, end, out))
        for start, end, out in sorted(edits, reverse=True):
            text = text[:start] + out + text[end:]
        path.write_text(text)
    for file, text in TRIM:
        path = root / file
        assert path.read_text().count(text) == 1, (file, text)
        path.write_text(path.read_text().replace(text, 'unimplemented!("the copy leaves this out")'))
    for crate in CRATES:
        path = root / crate / "src/lib.rs"
        path.write_text(path.read_text() + HELPER)


def errors(root):
    """File and line of every error of a check of the workspace."""
    command = ["cargo", "check", "--workspace", "--tests", "--message-format=json", "--keep-going"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    found = []
    for line in done.stdout.splitlines():
        message = json.loads(line).get("message") if line.startswith("{") else None
        if isinstance(message, dict) and message.get("level") == "error":
            found += [(span["file_name"], span["line_start"], message["message"]) for span in message["spans"]]
            if not message["spans"] and "aborting" not in message["message"] and "could not compile" not in message["message"]:
                found.append(("", 0, message["message"]))
    if done.returncode and not found:
        raise SystemExit(done.stderr[-2000:])
    return found


def blamed(root, file, line):
    """The mutants whose text holds a line, else those whose function does."""
    if not (root / file).is_file():
        return "MUTANT", set()
    open_ = {"MUTANT": set(), "SCHEMA": set()}
    for number, text in enumerate((root / file).read_text().splitlines(), 1):
        if mark := re.fullmatch(r"\s*// (MUTANT|SCHEMA) (\d+) (BEGIN|END)", text):
            kind, key, edge = mark.groups()
            (open_[kind].add if edge == "BEGIN" else open_[kind].discard)(int(key))
        if number == line:
            return ("MUTANT", set(open_["MUTANT"])) if open_["MUTANT"] else ("SCHEMA", set(open_["SCHEMA"]))
    return "SCHEMA", set()


def choose(root, queues, wanted, own):
    """The first mutants of the draw that build, besides a person's own; and what did not build.

    Twice as many as are wanted are checked together, because a check takes a minute and most errors show at once.
    """
    chosen, rejected, next_id = dict(enumerate(own, 1001)), [], 1

    def drawn(crate):
        return [key for key, m in chosen.items() if m["package"] == crate and m["genre"] != "ByHand"]

    while True:
        for crate in CRATES:
            if len(drawn(crate)) < wanted[crate]:
                for mutant in queues[crate][: 2 * wanted[crate]]:
                    chosen[next_id] = mutant
                    next_id += 1
                del queues[crate][: 2 * wanted[crate]]
        schemata(root, chosen)
        found = errors(root)
        print(f"{len(chosen)} mutants checked, {len(found)} errors", flush=True)
        if not found:
            break
        dropped = {}
        for file, line, text in found:
            kind, keys = blamed(root, file, line)
            for key in keys & chosen.keys():
                dropped.setdefault(key, (kind, text))
        if not dropped:
            raise SystemExit(f"an error that no mutant explains: {found[:5]}")
        for key, (kind, text) in sorted(dropped.items()):
            reason = "does not build" if kind == "MUTANT" else "cannot stand beside the old body"
            print(f"{key}: {reason}: {describe(chosen[key])}: {text}", flush=True)
            rejected.append({"mutant": describe(chosen.pop(key)), "reason": reason, "error": text})
    for crate in CRATES:
        for key in drawn(crate)[wanted[crate] :]:
            del chosen[key]
    schemata(root, chosen)
    return chosen, rejected


def binaries(root):
    """The test programs: the unit tests of each crate, the promises, and the rehearsals."""
    command = ["cargo", "test", "--workspace", "--no-run", "--message-format=json"]
    output = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    subprocess.run(["cargo", "build", "--workspace", "--bins"], cwd=root, check=True, capture_output=True)
    found = {}
    for line in output.splitlines():
        message = json.loads(line) if line.startswith("{") else {}
        if message.get("executable") and message.get("profile", {}).get("test"):
            crate = Path(message["manifest_path"]).parent.name
            found[crate, message["target"]["name"]] = message["executable"]
    return found


def run(binary, filters, key, root, limit):
    """The names of failed tests, or why the program did not end."""
    environment = dict(os.environ, MUTANT=str(key), TRAIN_CLI=str(root / "target/debug/train-cli"), CARGO_MANIFEST_DIR=str(root))
    command = [binary, *filters]
    try:
        out = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return [f"{' '.join(filters)} did not end within {limit} s"]
    if out.returncode == 0:
        return []
    failed = re.findall(r"^test (\S+) \.\.\. FAILED", out.stdout, re.M)
    return failed or [f"{Path(binary).name} ended with {out.returncode}"]


def judge(root, programs, key, mutant, limit, everything, known):
    """The first tests that fail with the mutant and pass without it."""
    promises, rehearsals = programs["tests", "promises"], programs["tests", "rehearsals"]
    likely = next(names for pattern, names in LIKELY if re.search(pattern, mutant["file"])).split()
    # A name with colons is the beginning of a test's, else that of a file.
    likely = [name if "::" in name else f"{name}::" for name in likely]
    rest = [word for name in likely for word in ("--skip", name)]
    plan = [(path, [], limit) for (crate, _), path in programs.items() if crate == mutant["package"]]
    plan += [(rehearsals if name.startswith("rehearsal") else promises, [name], limit) for name in likely]
    plan += [(promises, rest, 6 * limit), (rehearsals, [], limit)] if everything else []
    for binary, filters, most in plan:
        if failed := run(binary, filters, key, root, most):
            case = f"{binary} {filters}"
            if case not in known:
                known[case] = run(binary, filters, 0, root, most)
            if failed := [name for name in failed if name not in known[case]]:
                return failed
    return []


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["draw", "choose", "build", "judge", "table"])
    parser.add_argument("copy", type=Path)
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--limit", type=int, default=300, help="seconds for the tests of one file")
    parser.add_argument("--out", type=Path, default=Path("mutations.json"))
    parser.add_argument("--by-hand", type=Path, help="a list of mutants that a person wrote")
    parser.add_argument("--everything", action="store_true", help="run every test on a mutant that the likely ones missed")
    args = parser.parse_args()
    root = args.copy.resolve()
    if args.what == "judge":
        return judge_all(root, args)
    if args.what == "table":
        return table(args)
    if args.what == "build":
        report = json.loads(args.out.read_text())
        report["programs"] = [[*key, path] for key, path in binaries(root).items()]
        args.out.write_text(json.dumps(report, indent=1, ensure_ascii=False))
        return
    subprocess.run(["git", "-C", str(root), "checkout", "-q", "--", *CRATES, "tests"], check=True)
    found = candidates(root)
    queues, wanted = draw(found, args.seed, args.count)
    counts = {crate: len(queues[crate]) for crate in CRATES}
    print(f"seed {args.seed}, mutants {counts}, wanted {wanted}", flush=True)
    if args.what == "draw":
        for crate in CRATES:
            print("\n".join(describe(m) for m in queues[crate][: wanted[crate]]))
        return
    chosen, rejected = choose(root, queues, wanted, by_hand(root, args.by_hand, found) if args.by_hand else [])
    report = {"seed": args.seed, "mutants": counts, "rejected": rejected}
    report["chosen"] = {key: {k: v for k, v in m.items() if k != "diff"} for key, m in chosen.items()}
    args.out.write_text(json.dumps(report, indent=1, ensure_ascii=False))


def judge_all(root, args):
    """Judges what was built, and goes on where an earlier call ended."""
    report = json.loads(args.out.read_text())
    programs = {(crate, name): path for crate, name, path in report["programs"]}
    results, known = report.setdefault("results", {}), {}
    for key, mutant in report["chosen"].items():
        if key in results:
            continue
        started = time.time()
        failed = judge(root, programs, int(key), mutant, args.limit, args.everything, known)
        seen = f"seen by {failed[0]}" if failed else "MISSED"
        print(f"{key}: {seen} ({time.time() - started:.0f} s): {describe(mutant)}", flush=True)
        results[key] = {"mutant": describe(mutant), "failed": failed[:5]}
        args.out.write_text(json.dumps(report, indent=1, ensure_ascii=False))
    caught = sum(bool(r["failed"]) for r in results.values())
    print(f"{caught} of {len(results)} mutants were seen")


def table(args):
    """Prints the results as a table in Markdown."""
    report = json.loads(args.out.read_text())
    print("| file | what was broken | seen by |\n|---|---|---|")
    for key, result in report["results"].items():
        mutant = report["chosen"][key]
        what = mutant["name"].split(": ", 1)[1].replace("|", "\\|")
        place = f"{mutant['file']}:{mutant['span']['start']['line']}"
        print(f"| {place} | {what} | {result['failed'][0] if result['failed'] else '**missed**'} |")


if __name__ == "__main__":
    main()
