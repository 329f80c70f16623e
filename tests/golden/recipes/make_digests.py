"""Writes digests.json: what tests/data_make.rs compares the rows of doc/recipes with. Run it with the folder of the F# program's
corpora: python3 make_digests.py TrainData. It fails if a corpus holds a row that its recipe cannot make."""

import collections, hashlib, json, pathlib, re, sys, tomllib

CORPORA, HERE = pathlib.Path(sys.argv[1]), pathlib.Path(__file__).parent
RECIPES = HERE / "../../../doc/recipes"
# Recipes whose order is random, and those that also draw rows at random, with a text that only rows contain that are not drawn.
SHUFFLED, DRAWN = {"stageL-1percent-mix"}, {"whoami-1000-natural": "（樣本", "whoami-mixed-safe": "一般能力", "stageB-mixed-30-70": None}


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def counts(recipe, rows):
    """The rows of each template, by its name."""
    pools = {name: "(?:" + "|".join(map(re.escape, texts)) + ")" for name, texts in recipe["pools"].items()}

    def pattern(text):
        parts = re.split(r"\{(\w+)(?::\d+)?\}", text)
        return "".join(re.escape(part) if i % 2 == 0 else pools.get(part, r"\d+") for i, part in enumerate(parts))

    found = collections.Counter()
    for prompt, answer in rows:
        fits = [
            t["name"]
            for t in recipe["rows"]
            if [prompt, answer] in t.get("pairs", [])
            or "prompt" in t and re.fullmatch(pattern(t["prompt"]) + "\t" + pattern(t["answer"]), prompt + "\t" + answer)
        ]
        assert len(fits) == 1, (prompt, answer, fits)
        found[fits[0]] += 1
    return dict(sorted(found.items()))


result = {}
for path in sorted(RECIPES.glob("*.toml")):
    text = (CORPORA / (path.stem + ".tsv")).read_text(encoding="utf-8")
    if path.stem in SHUFFLED:
        result[path.stem] = {"rows": digest("".join(sorted(text.splitlines(keepends=True))))}
    elif path.stem in DRAWN:
        lines = [line for line in text.splitlines(keepends=True) if not line.startswith("#")]
        recipe, marked = tomllib.loads(path.read_text(encoding="utf-8")), DRAWN[path.stem]
        result[path.stem] = {"templates": counts(recipe, [line.rstrip("\n").split("\t") for line in lines])}
        if marked:
            result[path.stem] |= {"containing": marked, "rows": digest("".join(sorted(line for line in lines if marked in line)))}
    else:
        result[path.stem] = {"file": digest(text)}
(HERE / "digests.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
