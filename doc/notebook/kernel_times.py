"""Which kernels of a card take the time of a program, by CUPTI's record of each launch.

    python3 kernel_times.py --steps STEPS [--skip N] -- train-cli fit ...
    python3 kernel_times.py --once KERNEL [--skip N] -- train-cli generate ...

The table covers whole steps (or tokens) behind the first N, so that loading and compiling do not count: from one launch to
the last one of a kernel that each step launches once. That is one of which the program makes as many launches as STEPS, or
one whose name contains KERNEL. Without either the table covers the whole program. Below it stands where the card waits.

The script compiles a small library against CUPTI, which NVIDIA's package nvidia-cuda-cupti has, and the program loads it
(CUDA_INJECTION64_PATH). A step of 2,048 tokens took 4 % longer with it, and one of 8,192 less than 1 % (log.md, 2026-11-28)."""

import argparse
import collections
import glob
import os
import subprocess
import sys
import sysconfig
import tempfile

SOURCE = r"""
#include <cupti.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

static FILE* out;

static void requested(uint8_t** buffer, size_t* size, size_t* records) {
  *size = 8 << 20;
  *buffer = static_cast<uint8_t*>(aligned_alloc(8, *size));
  *records = 0;
}

static void completed(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      auto* kernel = reinterpret_cast<KERNEL*>(record);
      fprintf(out, "%llu %llu %s\n", (unsigned long long)kernel->start, (unsigned long long)kernel->end, kernel->name);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      auto* copy = reinterpret_cast<COPY*>(record);
      fprintf(out, "%llu %llu copy_of_memory_%d\n", (unsigned long long)copy->start, (unsigned long long)copy->end, copy->copyKind);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      auto* fill = reinterpret_cast<FILL*>(record);
      fprintf(out, "%llu %llu fill_of_memory\n", (unsigned long long)fill->start, (unsigned long long)fill->end);
    }
  }
  free(buffer);
}

static void finish() {
  cuptiActivityFlushAll(1);
  fclose(out);
}

extern "C" int InitializeInjection() {
  out = fopen(getenv("KERNEL_TIMES"), "w");
  if (!out) return 0;
  cuptiActivityRegisterCallbacks(requested, completed);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY);
  cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMSET);
  atexit(finish);
  return 1;
}
"""


def newest(header, name):
    """The newest form of a record that the header has."""
    forms = [line.split()[1].rstrip(";") for line in header.splitlines() if line.startswith(f"}} CUpti_Activity{name}")]
    forms = [form for form in forms if form[len(f"CUpti_Activity{name}") :].isdigit()]
    return max(forms, key=lambda form: int(form[len(f"CUpti_Activity{name}") :]))


def library(folder):
    """Compiles the library, and returns its path and the folder of CUPTI's."""
    roots = [sysconfig.get_paths()["purelib"] + "/nvidia/cu13", "/usr/local/cuda/extras/CUPTI", "/usr/local/cuda"]
    roots += glob.glob("/usr/local/cuda*/targets/*-linux")
    find = lambda part: next((p for root in roots for p in glob.glob(f"{root}/{part}")), None)
    header, binary = find("include/cupti_activity.h"), find("lib*/libcupti.so*")
    if not header or not binary:
        sys.exit("CUPTI was not found; pip install nvidia-cuda-cupti")
    text = open(header).read()
    source = os.path.join(folder, "times.cpp")
    forms = {"KERNEL": newest(text, "Kernel"), "COPY": newest(text, "Memcpy"), "FILL": newest(text, "Memset")}
    open(source, "w").write(SOURCE)
    path = os.path.join(folder, "times.so")
    includes = sorted({os.path.dirname(p) for root in roots for p in glob.glob(f"{root}/include/cu*.h")})
    defines = [f"-D{name}={form}" for name, form in forms.items()]
    command = ["g++", "-shared", "-fPIC", "-O1", source, "-o", path, binary] + [f"-I{i}" for i in includes] + defines
    subprocess.run(command, check=True)
    return path, os.path.dirname(binary)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, help="how many steps the program makes")
    parser.add_argument("--once", help="part of the name of a kernel that each step launches once")
    parser.add_argument("--skip", type=int, default=3, help="how many of its launches are not counted")
    parser.add_argument("--rows", type=int, default=40, help="how many kernels are shown")
    parser.add_argument("--gaps", type=int, default=12, help="how many places are shown where the card waits")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, cupti = library(folder)
        times = os.path.join(folder, "times")
        libraries = ":".join(filter(None, [cupti, os.environ.get("LD_LIBRARY_PATH")]))
        env = {**os.environ, "CUDA_INJECTION64_PATH": path, "KERNEL_TIMES": times, "LD_LIBRARY_PATH": libraries}
        subprocess.run(args.command, env=env, check=True)
        rows = [line.rstrip("\n").split(" ", 2) for line in open(times)]
    launches = sorted((int(start), int(end), name) for start, end, name in rows)
    steps, at = 1, None
    if args.steps:
        starts = collections.defaultdict(list)
        for start, _, name in launches:
            starts[name].append(start)
        at = next((found for found in starts.values() if len(found) == args.steps), [])
    elif args.once:
        at = [start for start, _, name in launches if args.once in name]
    if at is not None:
        if len(at) <= args.skip + 1:
            sys.exit(f"no kernel marks more than {args.skip + 1} steps; it was launched {len(at)} times")
        first, last, steps = at[args.skip], at[-1], len(at) - 1 - args.skip
        launches = [launch for launch in launches if first <= launch[0] < last]
    else:
        first, last = launches[0][0], max(end for _, end, _ in launches)
    count, total, busy, until, before = collections.Counter(), collections.Counter(), 0, first, ""
    gaps, idle = collections.Counter(), collections.Counter()
    for start, end, name in launches:
        count[name] += 1
        total[name] += end - start
        busy += max(0, end - max(start, until))
        if start > until:
            gaps[before, name] += 1
            idle[before, name] += start - until
        if end > until:
            until, before = end, name
    span = last - first
    print(f"{steps} steps, {span / steps / 1e6:.2f} ms each, {len(launches) / steps:.0f} launches each; "
          f"the card computes {100 * busy / span:.1f} % of the time")
    for name, time in total.most_common(args.rows):
        print(f"{100 * time / span:5.1f} %  {time / steps / 1e6:8.3f} ms  {count[name] / steps:7.1f} x  {name}")
    print("the longest waits of the card: all together, how many, behind and in front of which kernel")
    for pair, time in idle.most_common(args.gaps):
        print(f"{100 * time / span:5.1f} %  {time / steps / 1e6:8.3f} ms  {gaps[pair] / steps:7.1f} x  {pair[0]} | {pair[1]}")


if __name__ == "__main__":
    main()
