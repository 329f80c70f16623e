#!/usr/bin/env bash
# Builds the program and its tests for 64-bit ARM Linux (a DGX Spark, for example), and runs the demo and the tests that
# compare with recorded values under QEMU, which emulates the processor. It needs Debian's cross compiler and QEMU:
#
#     apt-get install qemu-user-static gcc-aarch64-linux-gnu libc6-dev-arm64-cross
#     rustup target add aarch64-unknown-linux-gnu
#     bash doc/notebook/aarch64.sh [TARGET_FOLDER [all]]
#
# With `all`, the tests of calibration, of rows made from recipes, and of file formats run, too.
set -euo pipefail
cd "$(dirname "$0")/../.."
export CARGO_TARGET_DIR=${1:-target}
triple=aarch64-unknown-linux-gnu
emulator="qemu-aarch64-static -L /usr/aarch64-linux-gnu"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=$emulator
# No GPU is emulated: tests that need one are skipped, and their NVRTC is for another processor.
unset REQUIRE_GPU REQUIRE_NVRTC NVRTC_HOME
export CARGO_INCREMENTAL=0 RUST_MIN_STACK=16777216

cargo build --locked --workspace --bins --target "$triple"
cargo test --locked --workspace --target "$triple" --test promises --no-run
built=$(realpath "$CARGO_TARGET_DIR/$triple/debug")
file "$built/train-cli" 2>/dev/null || true

# A file that starts the program under QEMU, for the demo and for tests that start the program.
runs=$(mktemp -d)
printf '#!/bin/sh\nexec %s %s "$@"\n' "$emulator" "$built/train-cli" > "$runs/train-cli"
chmod +x "$runs/train-cli"

# The demo keeps one processor busy; the tests run beside it.
(cd "$runs" && time ./train-cli fit --demo) > "$runs/demo.txt" 2>&1 &
demo=$!
modules=(codec:: optimizer:: parity:: quantizer:: text::)
if [ "${2-}" = all ]; then
  modules+=(calibration:: data_make:: foreign:: formats:: gguf::)
fi
TRAIN_CLI="$runs/train-cli" cargo test --locked --workspace --target "$triple" --test promises -- \
  "${modules[@]}" --skip data_formats
if [ "${2-}" = all ]; then
  TRAIN_CLI="$runs/train-cli" cargo test --locked --workspace --target "$triple" --test promises -- \
    --exact data_formats::a_table_is_read_as_its_rows_in_json
fi
wait "$demo" || { code=$?; cat "$runs/demo.txt"; exit "$code"; }
tail -n 5 "$runs/demo.txt"
recorded="$PWD/tests/golden/demo.sha256"
(cd "$runs"/runs/*_demo/final && sha256sum --check "$recorded")
rm -rf "$runs"
