#!/usr/bin/env bash
# Installs the packages that foreign_check.py loads our exports with, in a folder of its own, and runs it for both tiny models.
# It downloads some 6 GB and needs python3 with venv, npm and a C compiler.
#
#   doc/notebook/foreign_check.sh TRAIN_CLI FOLDER
set -euo pipefail
program=$(realpath "$1") folder=$(realpath -m "$2") here=$(realpath "$(dirname "$0")")
mkdir -p "$folder"
cd "$folder"
[ -d venv ] || python3 -m venv venv
venv/bin/pip install -q torch==2.15.0 transformers==5.23.0 compressed-tensors==0.20.0 nvidia-modelopt==0.47.0 gguf==0.19.0
if [ ! -d llama_cpp_python-0.3.36 ]; then
  venv/bin/pip download -q --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36
  tar xzf llama_cpp_python-0.3.36.tar.gz
fi
if [ ! -d package ]; then
  npm pack --silent @node-llama-cpp/linux-x64@3.22.1
  tar xzf node-llama-cpp-linux-x64-3.22.1.tgz
fi
for fixture in tiny-tied tiny-untied; do
  venv/bin/python "$here/foreign_check.py" "$program" "$here/../../tests/golden/hf-qwen3/$fixture" \
    llama_cpp_python-0.3.36/vendor/llama.cpp package/bins/linux-x64
done
