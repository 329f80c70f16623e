#!/usr/bin/env bash
# Measures the rows of doc/notebook/training.md on this machine, one after another. Each figure is appended to OUT/log.txt as
# soon as it is known, so that a run that is cut off keeps what it has.
#
#   doc/notebook/measure.sh TRAIN_CLI TOKENIZER_FOLDER CONFIGS_FOLDER OUT [ROWS.tsv]
#
# CONFIGS_FOLDER: config-4b.json, config-8b.json, config-32b.json (Qwen3 shapes).
# ROWS.tsv: real rows for the 32B run. PROMISES=path of the built test binary runs it on CUDA first.
set -u
program=$1 tokenizer=$2 configs=$3 out=$4 rows=${5:-}
mkdir -p "$out"
say() { echo "$*" | tee -a "$out/log.txt"; }

# name, seconds, flags: a short run; its loss, steady tokens/s, and the peaks of nvidia-smi and of the pool
run() {
  local name=$1 limit=$2 code
  shift 2
  nvidia-smi -i "${CUDA_VISIBLE_DEVICES:-0}" --query-gpu=memory.used --format=csv,noheader,nounits -lms 50 > "$out/smi.txt" &
  local smi=$!
  timeout "$limit" "$program" fit --tokenizer "$tokenizer" --batch-size 1 --clip previous --undo-copy false --save-strategy no --eval-steps 0 \
    --device cuda --overwrite --output-dir "$out/run" "$@" 2> "$out/$name.err"
  code=$?
  kill $smi
  say "$name: exit code $code, nvidia-smi $(sort -n "$out/smi.txt" | tail -1) MiB, $(python3 - "$out/run/metrics.jsonl" <<'PY'
import json, statistics, sys
steps = [s for s in map(json.loads, open(sys.argv[1])) if "loss" in s]
rate = statistics.median([s["tokens_per_second"] for s in steps][2:] or [0])
print(f"loss {steps[0]['loss']:.3f} to {steps[-1]['loss']:.3f}, {rate:.0f} tokens/s, pool {max(s['memory_mib'] for s in steps)} MiB")
PY
)"
}

if [ -n "${PROMISES:-}" ]; then
  say "promises: $(TEST_GPU=cuda TRAIN_CLI=$program RUST_MIN_STACK=67108864 timeout 500 "$PROMISES" --test-threads 4 2>&1 |
    tee "$out/promises.txt" | grep -E '^test result|FAILED' | tr '\n' ' ')"
fi
small="--synthetic --init-config $configs/config-4b.json --recipe w4a4"
for tokens in 1024 2048 4096 8192 16384 32768; do
  run "4B-$tokens" 120 $small --max-steps 6 --max-seq-length $tokens
done
run 4B-2048-int4 60 $small --max-steps 5 --max-seq-length 2048 --optimizer-state-mode int4
run 4B-2048-nvfp4-master-int4 60 $small --max-steps 5 --max-seq-length 2048 --master-weights nvfp4 --optimizer-state-mode int4
run 4B-4096-nvfp4 60 ${small/w4a4/nvfp4} --max-steps 6 --max-seq-length 4096
run 8B-2048 90 --synthetic --init-config "$configs/config-8b.json" --recipe w4a4 --max-steps 4 --max-seq-length 2048
if [ -n "$rows" ]; then
  run 32B-2048 200 --init-config "$configs/config-32b.json" --recipe w4a4 --master-weights nvfp4 -d "$rows" --packing --val-split 0 \
    --max-steps 20 --max-seq-length 2048 --learning-rate 2e-4
fi
say "$(timeout 120 python3 "$(dirname "$0")/train_torch.py" "$configs/config-4b.json" 2>&1 | tail -2)"
say "$(timeout 60 "$program" bench kernels --filter adamw 2>&1 | tail -8)"

# Where a step goes, and where the card waits.
say "$(timeout 120 python3 "$(dirname "$0")/kernel_times.py" --steps 8 --rows 14 --gaps 4 -- "$program" fit --tokenizer "$tokenizer" $small \
  --batch-size 1 --max-steps 8 --max-seq-length 2048 --save-strategy no --eval-steps 0 --device cuda --overwrite --output-dir "$out/run" \
  2> "$out/kernels.err")"
