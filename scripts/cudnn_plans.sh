#!/usr/bin/env bash
# Asks cuDNN itself, without a GPU, for plans of the graphs of attention (kernels/cudnn/attention.rs), for GPUs that
# are only described:
#
#     CUDNN=1 scripts/cuda_toolkit.sh FOLDER && source FOLDER/env.sh && scripts/cudnn_plans.sh [FOLDER OF libcudnn.so.9]
#
# cuDNN compiles its kernels and loads them by the driver. Here, the driver is a stub that takes whatever it loads. So this shows that
# cuDNN knows the graphs, not what its kernels compute.
set -euo pipefail
project=$(cd "$(dirname "$0")/.." && pwd)
stub=$(mktemp -d)
trap 'rm -rf "$stub"' EXIT
# Functions that cuDNN looks for by names without a version.
old='cuCtxPopCurrent cuCtxPushCurrent cuLinkCreate cuLinkAddData'
# Functions that succeed, and those of them that return something.
done='cuLibraryUnload cuKernelSetAttribute cuFuncSetAttribute cuModuleUnload'
loaded='cuLibraryLoadData cuLibraryGetKernel cuKernelGetFunction cuModuleLoadData cuModuleGetFunction'
{
  for name in $done; do echo "int $name(void) { return 0; }"; done
  for name in $loaded; do echo "int $name(void **found) { *found = (void *)1; return 0; }"; done
  for name in $old; do echo "int $name(void) { return 100; }"; done
  grep -vE "^int ($(tr ' ' '|' <<<"$done $loaded $old"))\(" "$CUDA_HOME/lib64/stubs/libcuda.c"
} >"$stub/libcuda.c"
cc -w -shared -fPIC -o "$stub/libcuda.so.1" "$stub/libcuda.c"
LD_LIBRARY_PATH="${1:+$1:}$stub:$LD_LIBRARY_PATH" cargo test --release --features cudnn --locked \
  --manifest-path "$project/Cargo.toml" -p candle-ddp-tensor --lib cudnn_has_plans -- --ignored --nocapture
