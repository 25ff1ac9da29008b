#!/usr/bin/env bash
# nvcc for tests: compiles candle's kernels for quantized models and for mixtures of experts without optimisation, in a minute instead of
# five. No test calls these kernels.
#
#     NVCC=$PWD/scripts/quick_nvcc.sh cargo test --features nccl
set -euo pipefail
case $* in
  *mmq_* | *mmvq_* | *moe_* | *quantized*) set -- -Ofc=max "$@" ;;
esac
exec nvcc "$@"
