#!/usr/bin/env bash
# Runs a command with an emulated GPU, on a machine without one (see tests/emulated_gpu/README.md):
#
#     source FOLDER/env.sh        # the folder of scripts/cuda_toolkit.sh
#     scripts/emulated_gpu.sh cargo test --release --features nccl --test gpu --test gpu_layers --test gpu_data_parallel
#
# EMULATED_GPUS=2 emulates two GPUs, which run PTX. GPU tests then fail instead of being skipped, and small products go to cuBLASLt too. Needs a
# C compiler.
set -euo pipefail
project=$(cd "$(dirname "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$project/target}/emulated_gpu
cargo build --quiet --release --locked --manifest-path "$project/tests/emulated_gpu/Cargo.toml" --target-dir "$target"
exec env LD_PRELOAD="$target/release/libemulated_gpu.so" CANDLE_DDP_REQUIRE_GPU=1 \
  CANDLE_DDP_KERNEL_FORM=ptx CANDLE_DDP_CUBLASLT="${CANDLE_DDP_CUBLASLT:-1}" "$@"
