#!/usr/bin/env bash
# Trains a small model on a card to find a number in long texts, first in short texts and then in longer ones, and counts how
# often it finds it (`eval needle`). Run it in the repository's root:
#
#     bash doc/notebook/needle.sh TRAIN_CLI FOLDER
set -euo pipefail
program=$(realpath "$1")
demo=$PWD/train-cli/assets/demo
mkdir -p "$2"
cd "$2"
python3 - "$demo/config.json" <<'PY'
import json, sys
config = json.load(open(sys.argv[1]))
config.update(hidden_size=256, intermediate_size=768, num_hidden_layers=4, max_window_layers=4, head_dim=128,
              max_position_embeddings=131072)
json.dump(config, open("config.json", "w"))
PY

fit() { # run folder, flags
  "$program" fit -o "$1" --overwrite --device cuda --save-steps 0 --eval-steps 0 --val-split 0 --lr-scheduler-type constant "${@:2}"
}
rows() { # tokens, texts for each of five depths, seed
  "$program" eval needle -m base --lengths "$1" --tries "$2" --seed "$3" --write-rows "r$1.jsonl"
}

# A model of one step names the tokenizer.
fit base --init-config config.json --tokenizer "$demo" -d "$demo/demo.tsv" --max-steps 1
rows 128 4000 11
rows 512 2000 2
rows 4096 300 4
rows 16384 60 5
rows 32768 30 6
rows 65536 30 7
(cat r16384.jsonl r32768.jsonl r65536.jsonl; head -150 r4096.jsonl) > mixed.jsonl

fit s1 --init-config config.json --tokenizer "$demo" --recipe bf16 -d r128.jsonl --max-seq-length 128 --batch-size 64 \
  --max-steps 5000 --learning-rate 1e-3 --warmup-steps 100
fit s2 -m s1/final --recipe bf16 -d r512.jsonl --max-seq-length 512 --batch-size 16 --max-steps 2000 --learning-rate 5e-4 \
  --warmup-steps 100
fit s3 -m s2/final --recipe w4 -d r4096.jsonl --max-seq-length 4096 --batch-size 4 --max-steps 600 --learning-rate 3e-4 \
  --warmup-steps 50
fit s4 -m s3/final --recipe w4 -d mixed.jsonl --max-seq-length 65536 --batch-size 1 --max-steps 800 --learning-rate 2e-4 \
  --warmup-steps 50
"$program" eval needle -m s4/final --lengths 4096,16384,32768,65536,98304 --tries 20 --seed 77 --device cuda
