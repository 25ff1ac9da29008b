#!/usr/bin/env bash
# The GPU tests and measurements, for a machine that has a GPU but no Rust. Two halves:
#
#     source FOLDER/env.sh                             # the folder of scripts/cuda_toolkit.sh
#     scripts/gpu_suite.sh build gpu_suite.tar.xz      # here: builds the programs and packs them (.tar: uncompressed)
#
#     tar xf gpu_suite.tar.xz                          # there: needs bash, coreutils, Python 3 and CUDA's libraries
#     gpu_suite/gpu_suite.sh run RESULTS tests         # or: steps, bandwidth, models, allreduce, faults, all
#
# `run` writes logs and `summary.md` to the folder RESULTS, and fails if a test fails. Every program has a time limit, and a
# part takes at most eight minutes. With QUICK=1 it measures so little that the emulated GPU can do it
# (scripts/emulated_gpu.sh). CUDA_COMPUTE_CAP=90 or another value chooses the generation to build for.
#
#     tests      the tests, among them one that leaves out each fence between streams and sees wrong results
#     steps      what DistributedDataParallel adds to a step, in a world of one; a timeline
#     bandwidth  optimizers, clipping, loss scaling and norms: their share of the memory's bandwidth
#     models     steps of ResNet-50 and a GPT, f32 and bf16
#     allreduce  collectives over NCCL, and the cost of a call beyond NCCL's own
#     faults     ranks that die, leave or disagree, and training that continues without them
#
# Where Python finds PyTorch with CUDA, `bandwidth` and `models` measure it too; otherwise the summary says that they do not.
set -euo pipefail

usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '$d'; exit 2; }

# The tests, benches and examples that are packed.
TESTS=(gpu gpu_layers gpu_data_parallel)
BENCHES=(ddp_step_gpu bandwidth_gpu nccl_call step)
EXAMPLES=(allreduce digits)

build() {
  local archive
  archive=$(realpath -m "${1:?$(usage)}")
  cd "$(dirname "$0")/.."
  : "${CUDA_HOME:?source the env.sh of scripts/cuda_toolkit.sh first}"
  local features=nccl,cudnn
  local tests=() programs=(--bin ddprun)
  for name in "${TESTS[@]}"; do tests+=(--test "$name"); done
  for name in "${BENCHES[@]}"; do tests+=(--bench "$name"); done
  for name in "${EXAMPLES[@]}"; do programs+=(--example "$name"); done
  pack=$(mktemp -d)
  trap 'rm -rf "$pack"' EXIT
  mkdir -p "$pack/gpu_suite/bin"
  # Cargo says which file each target became.
  {
    cargo test --release --locked --no-run --features "$features" "${tests[@]}" --message-format=json
    cargo build --release --locked --features "$features" "${programs[@]}" --message-format=json
  } | python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable"):
        print(message["target"]["name"], message["executable"])' |
    while read -r name file; do strip --strip-all -o "$pack/gpu_suite/bin/$name" "$file"; done
  for name in "${TESTS[@]}" "${BENCHES[@]}" "${EXAMPLES[@]}" ddprun; do
    [ -x "$pack/gpu_suite/bin/$name" ] || { echo "error: cargo built no $name" >&2; exit 1; }
  done
  cp scripts/gpu_suite.sh "$pack/gpu_suite/"
  cp scripts/compare/{step_pytorch,bandwidth_pytorch,gpt}.py "$pack/gpu_suite/"
  git rev-parse --short HEAD >"$pack/gpu_suite/commit"
  echo "$features, compute capability ${CUDA_COMPUTE_CAP:-90}" >"$pack/gpu_suite/features"
  case $archive in
    # The programs have most of their content in common; a dictionary that spans several of them finds it.
    *.xz) tar -C "$pack" -c gpu_suite | xz --lzma2=preset=4,dict=256MiB >"$archive" ;;
    *) tar -C "$pack" -cf "$archive" gpu_suite ;;
  esac
  echo "$archive: $(du -h "$archive" | cut -f1)"
}

# Finds the folders of CUDA's libraries: the system's and those in Python packages.
library_path() {
  local name found
  for name in libcuda.so.1 libcudart.so libcublas.so libcurand.so libnvrtc.so libnccl.so.2 libcudnn.so; do
    found=$(ldconfig -p 2>/dev/null | awk -v name="$name" 'index($1, name) == 1 { print $NF; exit }')
    if [ -z "$found" ]; then
      found=$({ find /usr/local /opt /usr/lib -name "$name*" -not -path '*/stubs/*' 2>/dev/null || true; } | sort | head -n 1)
      [ -n "$found" ] && dirname "$found"
    fi
    echo "$name: ${found:-not found}" >&2
  done
}

# Runs a program for at most so many seconds, with its output in a log and its last lines in the summary.
step() {
  local name=$1 seconds=$2 status=0 start=$SECONDS
  shift 2
  # The emulated GPU is slow.
  [ "${QUICK:-0}" = 0 ] || seconds=$((4 * seconds))
  timeout --kill-after=10 "$seconds" "$@" >"$results/$name.log" 2>&1 || status=$?
  local outcome=passed
  [ "$status" = 0 ] || { outcome="FAILED (exit status $status)"; failed=1; }
  {
    printf '\n## %s: %s, %d s\n\n' "$name" "$outcome" $((SECONDS - start))
    printf '    %s\n\n' "$*"
    grep -E '^test result|^\||^\{|^SKIPPED|panicked|rror' "$results/$name.log" | head -n 60 | sed 's/^/    /' || true
  } >>"$results/summary.md"
  echo "$name: $outcome"
}

# Several ranks share one GPU if NCCL takes each for a separate host. For correctness only: it is slow.
shared() {
  export CANDLE_DDP_ALLOW_SHARED_GPU=1 NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NET=Socket NCCL_IB_DISABLE=1 \
    NCCL_SOCKET_IFNAME=lo NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_MNNVL_ENABLE=0 NCCL_NVLS_ENABLE=0 \
    NCCL_CUMEM_HOST_ENABLE=0 NCCL_RAS_ENABLE=0 NCCL_MAX_CTAS=2
}

tests() {
  step tests-gpu 240 "$bin/gpu" --test-threads=2
  step tests-layers 90 "$bin/gpu_layers" --test-threads=2
  step tests-layers-without-cudnn 60 env CANDLE_DDP_CUDNN=0 "$bin/gpu_layers" --test-threads=2
  step tests-data-parallel 90 "$bin/gpu_data_parallel" --test-threads=2
}

steps() {
  local rounds=(--rounds 20)
  [ "${QUICK:-0}" = 0 ] || rounds=(--rounds 1 --steps 1 --divide-batch 64 --model MLP)
  step steps-world-of-one 300 "$bin/ddp_step_gpu" --bench "${rounds[@]}"
  step steps-timeline 60 env CANDLE_DDP_TRACE="$results/trace" \
    "$bin/ddprun" --nproc-per-node 1 "$bin/step" --model mlp --steps 3 --modes ddp
}

# Whether PyTorch can be measured as well. The summary says if not.
pytorch() {
  python3 -c 'import torch; assert torch.cuda.is_available()' 2>"$results/pytorch.log" && return
  printf '\n## %s: PyTorch was not measured\n\n    %s\n' "$1" "$(tail -n 1 "$results/pytorch.log")" >>"$results/summary.md"
  return 1
}

bandwidth() {
  local sizes=(--millions 64 --rounds 20 --steps 10)
  [ "${QUICK:-0}" = 0 ] || sizes=(--millions 0.1 --rounds 1 --steps 1)
  step bandwidth 200 "$bin/bandwidth_gpu" --bench "${sizes[@]}"
  if pytorch bandwidth; then step bandwidth-pytorch 200 python3 "$here/bandwidth_pytorch.py" "${sizes[@]}"; fi
}

models() {
  local count=20 batches=("resnet50 128" "gpt 32") quick=() has_pytorch=0
  [ "${QUICK:-0}" = 0 ] || count=1 batches=("resnet50 2" "gpt 1") quick=(--modes ddp --image-size 32)
  if pytorch models; then has_pytorch=1; fi
  for dtype in f32 bf16; do
    for of in "${batches[@]}"; do
      read -r model batch <<<"$of"
      step "models-$model-$dtype" 58 "$bin/ddprun" --nproc-per-node 1 \
        "$bin/step" --model "$model" --steps "$count" --dtype "$dtype" --batch-size "$batch" "${quick[@]}"
      [ "$has_pytorch" = 1 ] || continue
      step "models-$model-$dtype-pytorch" 58 env RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29555 \
        CANDLE_DDP_DEVICE=cuda python3 "$here/step_pytorch.py" "$model" "$count" local,ddp "$dtype" "$batch"
    done
  done
}

allreduce() {
  local sizes=(--sizes 1M,4M,25M,256M) calls=(--calls 50)
  [ "${QUICK:-0}" = 0 ] || sizes=(--sizes 1K,4K,16K --iters 2) calls=(--sizes 0.001,0.1 --calls 2 --rounds 2)
  step allreduce-world-of-one 100 "$bin/ddprun" --nproc-per-node 1 "$bin/allreduce" "${sizes[@]}"
  step allreduce-calls-world-of-one 60 "$bin/ddprun" --nproc-per-node 1 "$bin/nccl_call" --bench "${calls[@]}"
  (
    shared
    # shellcheck disable=SC2016  # each rank's shell expands RANK
    local ranks=("$bin/ddprun" --nproc-per-node 2 sh -c 'NCCL_HOSTID=rank$RANK exec "$0" "$@"')
    step allreduce-two-ranks-on-one-gpu 200 "${ranks[@]}" "$bin/allreduce" "${sizes[@]}"
    step allreduce-calls-two-ranks-on-one-gpu 100 "${ranks[@]}" "$bin/nccl_call" --bench "${calls[@]}"
    [ "${failed:-0}" = 0 ]
  ) || failed=1
}

faults() {
  # The tests in which ranks die, leave or disagree.
  for name in the_death messages_with_a_rank mismatched elastic; do
    step "faults-$name" 110 "$bin/gpu" "$name" --test-threads=1 --nocapture
  done
}

run() {
  results=$(realpath -m "${1:?$(usage)}")
  local part=${2:-all}
  here=$(realpath "$(dirname "$0")")
  bin=$here/bin
  failed=0
  mkdir -p "$results"
  {
    echo "# GPU suite: $part"
    echo
    echo "- Date: $(date -u +%F)"
    echo "- Commit: $(cat "$here/commit"); features $(cat "$here/features")"
    echo "- GPU: $(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo none)"
    echo "- Processor: $(nproc) cores, $(sed -n 's/^model name\s*: //p' /proc/cpuinfo | head -n 1)"
    echo "- Command: gpu_suite/gpu_suite.sh run RESULTS $part"
  } >"$results/summary.md"
  local folders
  folders=$(library_path 2>"$results/libraries.log" | sort -u | paste -sd :)
  export LD_LIBRARY_PATH=$folders${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  { echo; sed 's/^/- /' "$results/libraries.log"; } >>"$results/summary.md"
  export CANDLE_DDP_REQUIRE_GPU=1
  case $part in
    tests | steps | bandwidth | models | allreduce | faults) "$part" ;;
    all) tests; steps; bandwidth; models; allreduce; faults ;;
    *) usage ;;
  esac
  cat "$results/summary.md"
  return "$failed"
}

case ${1:-} in
  build) shift; build "$@" ;;
  run) shift; run "$@" ;;
  *) usage ;;
esac
