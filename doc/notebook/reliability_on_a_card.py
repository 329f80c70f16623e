"""What only a card can show of a run's reliability. It prints one line for each case, and ends with exit code 1 if a case
is not as it must be.

    python3 doc/notebook/reliability_on_a_card.py TRAIN_CLI TOKENIZER_FOLDER CONFIG.json FOLDER [memory resume saving lost] [CASE] [--memory-limit SIZE]

memory: this script takes all free memory of the card while a run loads its weights, makes its first step, makes its fifth
        step, evaluates, and exports. Each run must end with exit code 4, without a panic, and leave its checkpoint whole. Its
        message must name what was asked for, if the device said so, what is free, and the flags that help.
resume: three runs of 200 steps, and runs that are resumed after steps 1, 7, 50 and 199: in how many steps loss and gradient
        norm have the same bits, and whether the last checkpoints are equal.
saving: how long training waits for a checkpoint that is saved after 100 steps. With --memory-limit 20GiB there is no room for it
        on the device, so that it waits in the host's memory.

lost:   a kernel in the run's own context fails ("fails"), or takes all multiprocessors and never ends ("hangs"). The run must end
        with exit code 7, in the second case after five minutes without progress. It saves nothing then, and must resume. The
        model is that of TOKENIZER_FOLDER/config.json. This part needs a C++ compiler.

CASE is a word of a case of memory or lost, or a recipe of resume, to make that one alone. CONFIG.json is the shape for memory and
saving. TOKENIZER_FOLDER holds tokenizer.json and demo.tsv.
"""
import ctypes
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time

program, tokenizer, config, folder = [str(pathlib.Path(p).absolute()) for p in sys.argv[1:5]]
if "--memory-limit" in sys.argv:
    at = sys.argv.index("--memory-limit")
    memory_limit = " ".join(sys.argv[at:at + 2])
    del sys.argv[at:at + 2]
else:
    memory_limit = ""
parts = [word for word in sys.argv[5:] if word in ["memory", "resume", "saving", "lost"]] or ["memory", "resume", "saving", "lost"]
only = [word for word in sys.argv[5:] if word not in parts]
pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
wrong = []


def say(ok, text):
    print(("ok   " if ok else "WRONG"), text, flush=True)
    if not ok:
        wrong.append(text)


def read_run(run):
    lines = [json.loads(line) for line in open(f"{folder}/{run}/metrics.jsonl")]
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if "loss" in line}


def digest(run, name):
    checkpoint = max(pathlib.Path(f"{folder}/{run}").glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    return hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()[:16]


def fit(run, flags, watch=lambda line: None, environment=None):
    """Starts a run, shows each line of its standard error to `watch`, and returns its exit code, text and seconds."""
    started = time.time()
    words = [program, "fit", "--tokenizer", tokenizer, "--device", "cuda", "-o", f"{folder}/{run}"] + flags.split()
    child = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
    text = ""
    for line in child.stderr:
        text += line
        watch(line)
    return child.wait(), text, time.time() - started


def missing(error):
    """What the message of a device that is out of memory must name, and this one does not."""
    promised = {
        "that it is the device": r"^error: the device is out of memory",
        "what is free": r"[0-9.]+ [MG]iB are free now",
        "--max-seq-length": r"use a smaller --max-seq-length or --batch-size",
        "--optimizer-state-mode": r"--optimizer-state-mode int4",
        "--master-weights": r"--master-weights nvfp4",
    }
    # The device names the size of a buffer, but no size if it cannot load a kernel.
    if re.search(r"size: [0-9]+", error):
        promised["what was asked for"] = r"out of memory: [0-9.]+ [MG]iB were asked for in one piece, and "
    return [name for name, words in promised.items() if not re.search(words, error)]


class Card:
    """Memory of the card that this process holds."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        assert self.cuda.cuInit(0) == 0 and self.cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
        assert self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        self.context, self.held, self.taking = context, [], False
        threading.Thread(target=self.work, daemon=True).start()

    def free(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.cuda.cuCtxSetCurrent(self.context)
        assert self.cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
        return free.value

    def work(self):
        """Takes what is free, and what becomes free, as long as `taking` is set."""
        self.cuda.cuCtxSetCurrent(self.context)
        while True:
            taken = False
            for size in [1 << 30, 1 << 26, 1 << 22, 1 << 21] if self.taking else []:
                pointer = ctypes.c_void_p()
                while self.taking and self.cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0:
                    self.held.append(pointer.value)
                    taken = True
            if not taken:
                time.sleep(0.001)

    def give_back(self):
        self.taking = False
        time.sleep(0.1)
        self.cuda.cuCtxSetCurrent(self.context)
        while self.held:
            self.cuda.cuMemFree_v2(ctypes.c_void_p(self.held.pop()))


def memory():
    card = Card()
    rows, long = pathlib.Path(folder) / "rows.tsv", pathlib.Path(folder) / "long.txt"
    rows.write_text("".join(f"question {i}\tanswer {i}\n" for i in range(64)))
    long.write_text("a text of many words, " * 4000)
    flags = f"--init-config {config} -d {rows} --max-seq-length 2048 --max-steps 8 --overwrite"

    def when(words):
        def watch(line):
            card.taking = card.taking or words in line
        return watch

    free = card.free()
    # The first step begins when the weights are there.
    weights = 0

    def loaded():
        while not done:
            if free - card.free() > weights:
                card.taking = True
                return
            time.sleep(0.001)

    cases = [
        ("while weights are loaded", "--eval-steps 0 --save-steps 2", when("  products "), None),
        ("in the first step", "--eval-steps 0 --save-steps 2", None, None),
        ("in the fifth step", f"--eval-steps 4 --save-steps 2 --eval-data {long}", when("evaluation after step 4"), 4),
        ("in an evaluation", f"--eval-steps 4 --save-steps 2 --eval-data {long}", when(" 3/8 "), 2),
        ("in the export", f"--eval-steps 0 --save-steps 8", when("checkpoint-8"), 8),
    ]
    for name, more, watch, saved in cases:
        if only and not any(word in name for word in only):
            continue
        done = False
        if watch is None:
            out = subprocess.run([program, "estimate", "--init-config", config, "--tokenizer", tokenizer, "-d", rows,
                                  "--device", "cuda"], capture_output=True, text=True).stdout
            gib = float(next(line for line in out.splitlines() if line.startswith("weights")).split()[1])
            weights = gib * 2**30 * 1.02
            threading.Thread(target=loaded, daemon=True).start()
        code, text, _ = fit("memory", flags + " " + more, watch or (lambda line: None))
        done = True
        card.give_back()
        # The reason that the device gave may have several lines.
        error = text[text.rfind("\nerror: ") + 1:] if "\nerror: " in text else text[-300:]
        say(code == 4 and "panicked" not in text, f"memory {name}: exit code {code}: {error[:400]}")
        say(not missing(error), f"  the message names what it must{''.join(f', but not {name}' for name in missing(error))}")
        if saved:
            # The checkpoint that was still being written when the device failed is given up.
            newest = max((int(p.name.split("-")[1]) for p in pathlib.Path(f"{folder}/memory").glob("checkpoint-*")), default=0)
            whole = newest == 0 or subprocess.run([program, "inspect", f"{folder}/memory/checkpoint-{newest}", "--verify"],
                                                  capture_output=True, text=True).returncode == 0
            given_up = "could not be written" in text or "nothing was saved" in text
            say(newest >= saved - 2 * given_up and whole, f"  newest checkpoint {newest}, verified: {whole}, one given up: {given_up}")
        code, text, _ = fit("memory", "--resume-from-checkpoint")
        say(code == 0, f"  resumed when the memory is free again: exit code {code}{'' if code == 0 else ': ' + text[-300:]}")
        shutil.rmtree(f"{folder}/memory", ignore_errors=True)


def resume():
    rows = f"{tokenizer}/demo.tsv"
    for recipe in [recipe for recipe in ["w4a4", "nvfp4"] if not only or recipe in only]:
        flags = (f"--init-config {tokenizer}/config.json -d {rows} --recipe {recipe} --max-seq-length 64 --batch-size 4 --learning-rate 1e-3 "
                 "--lr-scheduler-type constant --warmup-steps 0 --eval-steps 0 --save-steps 0 --overwrite")
        runs = {}
        for i in range(3):
            fit(f"fresh-{i}", flags + " --max-steps 200")
            runs[f"fresh-{i}"] = read_run(f"fresh-{i}")
        for at in [1, 7, 50, 199]:
            fit(f"at-{at}", flags + f" --max-steps {at}")
            code, text, _ = fit(f"at-{at}", "--resume-from-checkpoint --max-steps 200")
            if code != 0:
                say(False, f"resume at {at}: exit code {code}: {text[-300:]}")
                continue
            runs[f"at-{at}"] = read_run(f"at-{at}")
        first = runs["fresh-0"]
        for name, run in runs.items():
            same = sum(run.get(step) == value for step, value in first.items())
            until = next((step for step in sorted(first) if run.get(step) != first[step]), 201) - 1
            files = [digest(name, f) == digest("fresh-0", f) for f in ["model.safetensors", "optimizer.safetensors"]]
            say(len(run) == 200, f"resume {recipe} {name}: {same} of 200 steps have the bits of the first run, the first {until} of them in "
                f"a row; weights equal: {files[0]}, states equal: {files[1]}; last loss {run[max(run)][0]:.6f}")
            shutil.rmtree(f"{folder}/{name}" if name != "fresh-0" else f"{folder}/none", ignore_errors=True)
        shutil.rmtree(f"{folder}/fresh-0")


def saving():
    """A run that is killed 99 steps after it saved the second time; and small runs that show what was saved meanwhile."""
    flags = (f"--init-config {config} --synthetic --recipe w4a4 --batch-size 1 --max-seq-length 2048 --eval-steps 0 "
             f"--clip previous --overwrite --max-steps 1000 --save-steps 100 {memory_limit}")
    stamps, saved = {}, []
    words = [program, "fit", "--tokenizer", tokenizer, "--device", "cuda", "-o", f"{folder}/saving"] + flags.split()
    child = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    for line in child.stderr:
        first = (line.split() or [""])[0]
        if first.endswith("/1000"):
            stamps[int(first.split("/")[0])] = time.time()
        if "warning" in line or "error" in line or first in ["memory", "guard"]:
            print("    ", line.strip(), flush=True)
        if first == "saved":
            saved.append(time.time())
        if len(saved) >= 2 and max(stamps) >= 299:
            break
    child.kill()
    child.wait()
    size = sum(p.stat().st_size for p in pathlib.Path(f"{folder}/saving/checkpoint-100").iterdir())
    waits = {step: stamps[step] - stamps[step - 1] for step in range(3, max(stamps) + 1)}
    before = sum(waits[step] for step in range(20, 101)) / 81
    for number, at in enumerate([100, 200]):
        # The first step after a checkpoint waits for the memory of its copy. The mean of the steps before it has the same noise
        # as the steps after it; their median has not.
        stall = waits[at + 1] - before
        later = sum(waits[step] - before for step in range(at + 2, at + 101) if step in waits)
        counted = sum(step in waits for step in range(at + 1, at + 101))
        print(f"saving {size / 2**30:.1f} GiB after step {at}: the mean step before {before:.4f} s; the next step waited "
              f"{stall:.2f} s more, the {counted - 1} after it together {later:.2f} s; written {saved[number] - stamps[at]:.1f} s "
              f"later; cost of a checkpoint in 100 steps {(stall + later) / before:.1f} %", flush=True)
    shutil.rmtree(f"{folder}/saving", ignore_errors=True)
    flags = (f"--init-config {tokenizer}/config.json -d {tokenizer}/demo.tsv --recipe w4a4 --max-seq-length 64 --eval-steps 0 "
             "--lr-scheduler-type constant --warmup-steps 0 --learning-rate 1e-3 --overwrite --save-total-limit 10")
    fit("beside", flags + " --max-steps 60 --save-steps 20")
    fit("alone", flags + " --max-steps 40 --save-steps 40")
    for name in ["model.safetensors", "optimizer.safetensors"]:
        beside, alone = [pathlib.Path(f"{folder}/{run}/checkpoint-40/{name}").read_bytes() for run in ["beside", "alone"]]
        say(beside == alone, f"saving: {name} that was written while steps were made is that of a run that ends there")


# A library that is loaded into the program. When a file appears, a thread of it launches a kernel in the program's own context.
FAULT = r"""
#include <cstdlib>
#include <dlfcn.h>
#include <thread>
#include <unistd.h>
static const char* PTX = ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry fails() { trap; }\n"
    ".visible .entry hangs() { .reg .u32 %r; AGAIN: mov.u32 %r, %clock; bra AGAIN; }\n";
static void work(const char* file, const char* kernel) {
    while (access(file, F_OK) != 0) usleep(1000);
    void* cuda = dlopen("libcuda.so.1", RTLD_NOW);
    int device;
    void *context, *module, *function, *stream;
    auto call = [&](const char* name, auto... args) { return reinterpret_cast<int (*)(decltype(args)...)>(dlsym(cuda, name))(args...); };
    if (call("cuDeviceGet", &device, 0) || call("cuDevicePrimaryCtxRetain", &context, device) || call("cuCtxSetCurrent", context) ||
        call("cuModuleLoadData", &module, (const void*)PTX) || call("cuModuleGetFunction", &function, module, kernel) ||
        call("cuStreamCreate", &stream, 1u) ||
        call("cuLaunchKernel", function, 100000u, 1u, 1u, 1024u, 1u, 1u, 0u, stream, (void**)nullptr, (void**)nullptr))
        abort();
}
__attribute__((constructor)) static void start() {
    const char *file = getenv("FAULT_FILE"), *kernel = getenv("FAULT_KERNEL");
    unsetenv("LD_PRELOAD");
    if (file && kernel) std::thread(work, file, kernel).detach();
}
"""


def lost():
    source, library, trigger = [pathlib.Path(folder) / name for name in ["fault.cpp", "fault.so", "fault"]]
    source.write_text(FAULT)
    subprocess.run(["c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True)
    flags = (f"--init-config {tokenizer}/config.json -d {tokenizer}/demo.tsv --max-seq-length 64 --max-steps 4000 --eval-steps 0 "
             "--save-steps 500 --overwrite")
    for kernel in ["fails", "hangs"]:
        if only and kernel not in only:
            continue
        trigger.unlink(missing_ok=True)
        environment = {**os.environ, "LD_PRELOAD": str(library), "FAULT_FILE": str(trigger), "FAULT_KERNEL": kernel}
        stamps = []

        def watch(line):
            if (line.split() or [""])[0].startswith("700/"):
                stamps.append(time.time())
                trigger.touch()
        code, text, _ = fit("lost", flags, watch, environment)
        after = time.time() - stamps[0] if stamps else -1
        error = text[text.rfind("\nerror: ") + 1:] if "\nerror: " in text else text[-300:]
        saved = sorted(int(p.name.split("-")[1]) for p in pathlib.Path(f"{folder}/lost").glob("checkpoint-*"))
        say(code == 7 and "panicked" not in text, f"lost {kernel}: exit code {code} after {after:.0f} s: {error[:400]}")
        say(saved and max(saved) == 500, f"  checkpoints {saved}")
        code, text, _ = fit("lost", "--resume-from-checkpoint --max-steps 1200")
        say(code == 0, f"  resumed: exit code {code}{'' if code == 0 else ': ' + text[-300:]}")
        shutil.rmtree(f"{folder}/lost", ignore_errors=True)


for part in parts:
    {"memory": memory, "resume": resume, "saving": saving, "lost": lost}[part]()
sys.exit(1 if wrong else 0)
