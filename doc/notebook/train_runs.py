"""The commands behind doc/notebook/training.md: pre-trains the small model under several recipes, states and masters, with
several seeds, one run per GPU at a time; fine-tunes it; writes OUT/runs.csv and OUT/log.txt.

    python3 doc/notebook/make_corpus.py DATA
    python3 doc/notebook/train_runs.py train-cli DATA check OUT MIX.tsv      # every command with --dry-run; needs no GPU
    python3 doc/notebook/train_runs.py train-cli DATA recipes OUT MIX.tsv    # 2,048 steps each
    python3 doc/notebook/train_runs.py train-cli DATA states OUT             # 1,280 steps each

MIX.tsv holds the rows to fine-tune on; every 25th of them is held out.

The recorded runs were started by an earlier script with the same flags. This script has not run all of them: `check` shows
that the program accepts each command, not that a run repeats its figures.
"""
import json
import os
import pathlib
import subprocess
import sys
import threading

program, data, suite, out = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3], pathlib.Path(sys.argv[4])
mix = sys.argv[5] if len(sys.argv) > 5 else None
check = suite == "check"
out.mkdir(parents=True, exist_ok=True)
gpus = 1 if check else len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines())
common = f"""--tokenizer {data}/lm --eval-data {data}/eval.txt --max-seq-length 512 --warmup-steps 0.05 --weight-decay 0.1
    --adam-beta2 0.95 --logging-steps 100 --device cuda --token-cache {out}/tokens""".split()
STEPS = {"recipes": 2048, "states": 1280}
lock, jobs, refused = threading.Lock(), [], []


def start(suite):
    """The flags of a pre-training run from random weights."""
    return f"""--init-config {data}/lm/config.json -d {data}/train.txt --format text --batch-size 32 --max-steps {STEPS[suite]}
        --learning-rate 1e-3 --eval-steps {STEPS[suite] // 4}""".split()


def add(suite, name, flags, state="f32", master="f32", seeds=(1, 2, 3)):
    stored = f"--clip exact --save-strategy no --optimizer-state-mode {state} --master-weights {master}"
    for seed in seeds:
        jobs.append((f"{name}-{seed}", [*start(suite), *stored.split(), "--seed", str(seed), *flags.split()]))


if suite in ("recipes", "check"):
    jobs.append(("fine-tune", None))
    add("recipes", "bf16", "--recipe bf16")
    add("recipes", "w4", "--recipe w4")
    add("recipes", "w4a4", "--recipe w4a4 --bf16-last-blocks 2")
    add("recipes", "nvfp4", "--recipe nvfp4 --bf16-last-blocks 2")
    add("recipes", "w4-finish", "--recipe w4 --quantize-from 0.75 --damped-finish 0.1")
if suite in ("states", "check"):
    add("states", "bf16", "--recipe bf16")
    add("states", "bf16-int8", "--recipe bf16", state="int8")
    add("states", "bf16-bf16master", "--recipe bf16", master="bf16")
    add("states", "bf16-nearest", "--recipe bf16", master="bf16-nearest")
    add("states", "bf16-residual", "--recipe bf16", master="bf16-residual", seeds=(1,))
    add("states", "bf16-int4", "--recipe bf16", state="int4", seeds=(1,))
    add("states", "w4", "--recipe w4")
    add("states", "w4-damped", "--recipe w4 --damped-finish 0.25")
    add("states", "w4-nvfp4master", "--recipe w4", state="int8", master="nvfp4", seeds=(1,))
    add("states", "w4a4", "--recipe w4a4 --bf16-last-blocks 1")
    add("states", "nvfp4", "--recipe nvfp4 --bf16-last-blocks 1")
    for part in ("square-blocks", "hadamard", "stochastic"):
        add("states", f"nvfp4-without-{part}", f"--recipe nvfp4 --bf16-last-blocks 1 --nvfp4-without {part}", seeds=(1,))


def say(*words):
    with lock, open(out / "log.txt", "a") as log:
        print(*words, file=log)
        print(*words, flush=True)


def run(gpu, name, words):
    with open(out / f"{name}.err", "w") as errors:
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES=str(gpu))
        done = subprocess.run([program, *words], env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    return done.returncode, done.stdout


def fit(gpu, name, words):
    code, _ = run(gpu, name, ["fit", *common, *words, "--output-dir", str(out / name), *["--dry-run"] * check])
    if check:
        refused.extend([name] * (code != 0))
        return say(name, "exit code", code)
    rows = [json.loads(line) for line in open(out / name / "metrics.jsonl")] if code == 0 else []
    rows = [r for r in rows if "eval_loss" in r]
    with lock, open(out / "runs.csv", "a") as table:
        if table.tell() == 0:
            print("run,step,eval_loss,eval_loss_quantized,eval_loss_master", file=table)
        for r in rows:
            print(name, r["step"], r["eval_loss"], r["eval_loss_quantized"], r["eval_loss_master"], sep=",", file=table)
    say(name, "exit code", code, [round(r["eval_loss"], 4) for r in rows])


def fine_tune(gpu):
    fit(gpu, "pretrained", [*start("recipes"), "--save-steps", "0", "--recipe", "w4"])
    (out / "replay.txt").write_bytes((data / "train.txt").read_bytes()[:2_500_000])
    lines = [line for line in open(mix, encoding="utf8") if "\t" in line and not line.startswith("#")]
    held = lines[24::25]
    (out / "mix.tsv").write_text("".join(line for line in lines if line not in held), encoding="utf8")
    prompts = ["你是誰", "請問你是誰", "先自我介紹一下"] + [line.split("\t")[0] for line in held[::6]]
    for rate in ("5e-5", "1e-4"):
        name = f"tuned-{rate}"
        source = f"--init-config {data}/lm/config.json" if check else f"-m {out}/pretrained/checkpoint-{STEPS['recipes']}"
        words = f"""{source} -d {out}/mix.tsv -d {out}/replay.txt --data-weights 4,1 --packing
            --batch-size 8 --num-train-epochs 2 --learning-rate {rate} --eval-steps 100 --save-steps 0 --recipe w4
            --damped-finish 0.2"""
        fit(gpu, name, words.split())
        for prompt in prompts if not check else []:
            asked = f"generate -m {out}/{name}/final --temp 0 --max-tokens 80 --json --device cuda -p".split()
            say("  ", prompt, "=>", run(gpu, "answer", [*asked, prompt])[1].strip().split('"ids"')[0])


def worker(gpu):
    while True:
        with lock:
            if not jobs:
                return
            name, words = jobs.pop(0)
        fine_tune(gpu) if words is None else fit(gpu, name, words)


threads = [threading.Thread(target=worker, args=(gpu,)) for gpu in range(gpus)]
[t.start() for t in threads]
[t.join() for t in threads]
sys.exit(f"refused: {', '.join(refused)}" if refused else 0)
