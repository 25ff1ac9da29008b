#!/usr/bin/env bash
# The GPU tests and measurements, for a machine that has a GPU but no Rust. Two halves:
#
#     source FOLDER/env.sh                             # the folder of scripts/cuda_toolkit.sh
#     scripts/gpu_suite.sh build gpu_suite.tar.xz      # here: builds the programs and packs them (a folder: puts them there as they are)
#
#     tar xf gpu_suite.tar.xz                          # there: needs bash, coreutils, Python 3 and CUDA's libraries
#     gpu_suite/gpu_suite.sh run RESULTS quick         # or some of the parts below; `quick` before them measures less
#
# `run` writes to the folder RESULTS: a log of each step, a line of JSON for each step in `results.jsonl` as soon as it has ended,
# and `summary.md`, also if it is interrupted. It fails if a test fails. Every step has a time limit; one that exceeds it leaves
# the stacks of its threads (with gdb, where it is installed). CUDA_COMPUTE_CAP, 80 by default, is the oldest generation of GPUs
# that the programs run on, PROFILE cargo's profile, `release` by default. JOBS is the number of tests that run at the same time, ONLY a
# pattern of their names, SUITE_SECONDS the time for all steps together: when it has passed, a step that runs is ended and the others are
# left out. For `models` and `profile`, MODELS is a pattern of "DTYPE MODEL", such as 'bf16 (resnet50|gpt2)', MODES the modes of the bench
# `step`, such as local,ddp,parts, WAIT_EVERY how many steps wait for the GPU once, and PEERS whether PyTorch is measured too: 0, `eager`
# (not compiled) or `all`, the default.
#
#     preflight  the machine, versions and paths of the libraries, and whether a kernel runs
#     tests      each test by itself, among them one that leaves out each fence between streams and sees wrong results
#     faults     ranks that die, leave or disagree, and training that continues without them
#     steps      what DistributedDataParallel adds to a step, in a world of one; a timeline
#     bandwidth  optimizers, clipping, loss scaling and layers: their share of the memory's bandwidth, and the host's time for an operation
#     models     steps of ResNet-50, ViT-S, BERT-base, a small GPT and one of GPT-2's size, in f32 without and with TF32, and in bf16
#     profile    the kernels and the calls of a step, also of PyTorch's
#     allreduce  collectives over NCCL, and the cost of a call beyond NCCL's own
#     multi      where there are several GPUs, with a rank on each: their topology, NCCL's own log, the tests, the same collectives, steps of
#                models, next to each other with one setting changed, and a timeline. It comes first on such a machine
#     switches   steps with one setting changed: kept memory, cuDNN, its attention and its workspace, lazy loading, queues, PTX
#     sanitizer  CUDA's compute-sanitizer over some layers, where it is installed
#     quick      all tests, and something of each measurement, in at most six minutes
#     all        everything, in this order
#
# A quarter of an hour on a GPU is two calls. The first says whether the kernels are right and how fast they are, the second where the time of
# a step goes, how PyTorch does on the same machine, and what memcheck finds:
#
#     JOBS=14 SUITE_SECONDS=190 gpu_suite/gpu_suite.sh run R1 quick preflight tests
#     SUITE_SECONDS=70 PEERS=0 gpu_suite/gpu_suite.sh run R2 quick bandwidth
#
#     SUITE_SECONDS=75 MODELS='bf16 (resnet50|gpt2)' PEERS=0 gpu_suite/gpu_suite.sh run R3 quick profile
#     SUITE_SECONDS=45 MODELS='bf16 gpt2' MODES=local,ddp,parts PEERS=0 WAIT_EVERY=10 gpu_suite/gpu_suite.sh run R4 quick models
#     SUITE_SECONDS=50 gpu_suite/gpu_suite.sh run R5 quick switches
#     SUITE_SECONDS=150 MODELS=bf16 PEERS=eager gpu_suite/gpu_suite.sh run R6 quick models
#     SUITE_SECONDS=60 gpu_suite/gpu_suite.sh run R7 quick sanitizer
#
# GPUS is the number of GPUs, for `multi`; by default what nvidia-smi lists.
# With QUICK=1 all parts measure so little that the emulated GPU can do it (scripts/emulated_gpu.sh).
# Where Python finds PyTorch with CUDA, `bandwidth`, `models` and `profile` measure it too, in the modes that its users choose; otherwise the
# summary says that they do not. torch.compile compiles while `tests` runs, if that comes before.
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
  export CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-80}
  local features=nccl,cudnn profile=${PROFILE:-release}
  local tests=() programs=(--bin ddprun)
  for name in "${TESTS[@]}"; do tests+=(--test "$name"); done
  for name in "${BENCHES[@]}"; do tests+=(--bench "$name"); done
  for name in "${EXAMPLES[@]}"; do programs+=(--example "$name"); done
  pack=$(mktemp -d)
  trap 'rm -rf "$pack"' EXIT
  mkdir -p "$pack/gpu_suite/bin"
  # Cargo says which file each target became.
  {
    cargo test --profile "$profile" --locked --no-run --features "$features" "${tests[@]}" --message-format=json
    cargo build --profile "$profile" --locked --features "$features" "${programs[@]}" --message-format=json
  } | python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable"):
        print(message["target"]["name"], message["executable"])' |
    while read -r name file; do strip --strip-debug -o "$pack/gpu_suite/bin/$name" "$file"; done
  for name in "${TESTS[@]}" "${BENCHES[@]}" "${EXAMPLES[@]}" ddprun; do
    [ -x "$pack/gpu_suite/bin/$name" ] || { echo "error: cargo built no $name" >&2; exit 1; }
  done
  cp scripts/gpu_suite.sh "$pack/gpu_suite/"
  cp scripts/compare/{step_pytorch,step_models,bandwidth_pytorch,gpt,gpu_trace}.py "$pack/gpu_suite/"
  cc -O2 -shared -fPIC -I "$CUDA_HOME/include" -o "$pack/gpu_suite/libgpu_trace.so" scripts/compare/gpu_trace.c \
    -L "$CUDA_HOME/lib64" -l:libcupti.so.13
  git rev-parse --short HEAD >"$pack/gpu_suite/commit"
  echo "$features, compute capability $CUDA_COMPUTE_CAP" >"$pack/gpu_suite/features"
  if [ -d "$archive" ]; then
    mv "$pack/gpu_suite" "$archive"
  else
    # The programs have most of their content in common; a dictionary that spans several of them finds it.
    tar -C "$pack" -c gpu_suite | xz --lzma2=preset=4,dict=256MiB >"$archive"
  fi
  echo "$archive: $(du -hs "$archive" | cut -f1)"
}

# Finds the folders of the libraries that the programs need: those of Python packages first, which belong together and are PyTorch's,
# then those that the system finds by itself.
library_path() {
  local name found folders
  folders=$(python3 -c '
import glob, site, sys
for folder in [*site.getsitepackages(), site.getusersitepackages(), *sys.path]:
    print(*glob.glob(folder + "/nvidia/*/lib"), *glob.glob(folder + "/torch/lib"), sep="\n")' 2>/dev/null | sort -u)
  for name in $(ldd "$bin/gpu" "$here/libgpu_trace.so" 2>/dev/null |
    awk '/not found/ || $1 ~ /^lib(nccl|cudnn|cublas|cublasLt|curand|nvrtc|cudart|cupti)\./ { print $1 }' | sort -u) libcuda.so.1; do
    # shellcheck disable=SC2086  # a list of folders
    found=$({ [ -z "$folders" ] || find $folders -name "$name" 2>/dev/null || true; } | head -n 1)
    [ -n "$found" ] && dirname "$found"
    [ -n "$found" ] || found=$(ldconfig -p 2>/dev/null | awk -v name="$name" '$1 == name { print $NF; exit }')
    if [ -z "$found" ]; then
      # A driver library in a folder `compat` is for other drivers.
      found=$({ find /usr/local /opt /usr/lib -name "$name" -not -path '*/stubs/*' -not -path '*/compat/*' 2>/dev/null || true; } |
        head -n 1)
      [ -n "$found" ] && dirname "$found"
    fi
    echo "$name: ${found:-not found}" >&2
  done
}

# Runs nvidia-smi. A driver that hangs must not hold up the suite, so it writes to a file: a pipe would wait even for a process that
# cannot be killed.
smi() {
  local status=0
  timeout -k 5 20 nvidia-smi "$@" >"$results/nvidia-smi.log" || status=$?
  cat "$results/nvidia-smi.log"
  return "$status"
}

# The processes of a session.
of_session() {
  local file fields
  for file in /proc/[0-9]*/stat; do
    # The name, in parentheses, may contain anything; after it come the state, the parent, the group and the session.
    read -r -a fields < <(sed 's/.*) //' "$file" 2>/dev/null) || continue
    if [ "${fields[3]:-}" = "$1" ]; then file=${file%/stat}; echo "${file#/proc/}"; fi
  done
}

# Ends a step's processes.
end() {
  # shellcheck disable=SC2046  # a list of processes
  kill -KILL "$1" $(of_session "$1") 2>/dev/null || true
}

# What a step that has run out of time is doing.
stacks() {
  local pid task
  for pid in $(of_session "$1"); do
    echo "== process $pid: $(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null)"
    if command -v gdb >/dev/null; then
      timeout -k 5 30 gdb -p "$pid" -batch -ex 'set pagination off' -ex 'thread apply all backtrace 40' 2>&1 || true
    fi
    for task in "/proc/$pid/task"/*; do
      echo "$(cat "$task/comm" 2>/dev/null) waits in $(cat "$task/wchan" 2>/dev/null)"
    done
  done
  smi 2>&1 || true
  dmesg 2>/dev/null | grep -i -E 'xid|nvrm' | tail -n 20 || true
}

result() {
  printf '{"part": "%s", "step": "%s", "outcome": "%s", "status": %d, "seconds": %d}\n' "$part" "$@" \
    >>"$results/results.jsonl"
  echo "$1: $2"
}

# Runs a program for at most so many seconds, with its output in a log, and appends its result to `results.jsonl`, and to the summary
# unless it is a test that passes. A test that is skipped is no test that passes.
step() {
  local name=$1 seconds=$2 status=0 start=$SECONDS outcome=passed pid
  shift 2
  # The emulated GPU is slow.
  [ "$size" != tiny ] || seconds=$((4 * seconds))
  local left=$((SUITE_SECONDS - SECONDS))
  [ "$seconds" -le "$left" ] || seconds=$left
  [ "$seconds" -ge 5 ] || { result "$name" "left out" 0 0; return; }
  setsid "$@" >"$results/$name.log" 2>&1 </dev/null &
  pid=$!
  touch "$running/$pid"
  while kill -0 "$pid" 2>/dev/null && [ $((SECONDS - start)) -lt "$seconds" ]; do sleep 0.1; done
  if kill -0 "$pid" 2>/dev/null; then
    outcome="timed out"
    stacks "$pid" >"$results/$name.stacks" 2>&1 || true
    end "$pid"
    for _ in {1..100}; do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
  fi
  # A process that waits in the driver may survive even this.
  if kill -0 "$pid" 2>/dev/null; then status=137; else wait "$pid" 2>/dev/null || status=$?; fi
  rm -f "$running/$pid"
  [ "$status" = 0 ] || [ "$outcome" != passed ] || outcome=failed
  if [ "$outcome" = passed ] && grep -q '^running 1 test' "$results/$name.log" && grep -q 'SKIPPED ' "$results/$name.log"; then
    outcome=skipped
    sed -n "s/.*SKIPPED /- skipped: /p" "$results/$name.log" >>"$results/summary.md"
  fi
  result "$name" "$outcome" "$status" $((SECONDS - start))
  case $outcome in
    skipped) return ;;
    passed) if [[ $name == test-* ]]; then return; fi ;;
  esac
  {
    printf '\n## %s: %s, %d s\n\n' "$name" "$outcome" $((SECONDS - start))
    printf '    %s\n\n' "$*"
    grep -E '^test result|^\||^\{|^SKIPPED|panicked|rror' "$results/$name.log" | head -n 120 | sed 's/^/    /' || true
  } >>"$results/summary.md"
  [ "$outcome" = passed ]
}

# Several ranks share one GPU if NCCL takes each for a separate host. For correctness only: it is slow.
shared() {
  export CANDLE_DDP_ALLOW_SHARED_GPU=1 NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NET=Socket NCCL_IB_DISABLE=1 \
    NCCL_SOCKET_IFNAME=lo NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_MNNVL_ENABLE=0 NCCL_NVLS_ENABLE=0 \
    NCCL_CUMEM_HOST_ENABLE=0 NCCL_RAS_ENABLE=0 NCCL_MAX_CTAS=2
}

# The tests of a program that match a pattern, or with -v those that do not.
names() {
  comm -23 <("$bin/$1" --list 2>/dev/null | sed -n 's/: test$//p' | sort) \
    <("$bin/$1" --list --ignored 2>/dev/null | sed -n 's/: test$//p' | sort) | grep -E "${@:2}" |
    grep -E "${ONLY:-.}" || true
}

# Runs a test. One that fails runs again with messages.
one() {
  local program=$1 seconds=$2 name=$3 file
  file=test-$program-${name//::/-}${VARIANT:+-$VARIANT}
  step "$file" "$seconds" "$bin/$program" --exact "$name" --nocapture && return
  CUDA_LAUNCH_BLOCKING=1 NCCL_DEBUG=INFO step "$file-again" "$seconds" "$bin/$program" --exact "$name" --nocapture || true
}

# Runs tests, each by itself, JOBS at the same time. `all_ended` waits for the last ones.
each() {
  local name
  while read -r name; do
    while [ "$(jobs -rp | wc -l)" -ge "$JOBS" ]; do wait -n || true; done
    one "$1" "$2" "$name" &
  done
}

all_ended() {
  local pid
  for pid in $(jobs -rp); do [ "$pid" = "${compiling:-}" ] || wait "$pid" || true; done
}

# Tests in which ranks die, leave or disagree.
FAULTS='death|late_rank|stopped|messages_with_a_rank|mismatched|elastic|communicators_end|ends_with_its_group'

tests() {
  CANDLE_DDP_CUBLASLT=1 each gpu_layers 60 < <(names gpu_layers .)
  CANDLE_DDP_CUDNN=0 VARIANT=without-cudnn each gpu_layers 60 < <(names gpu_layers 'conv|images|resnet|address')
  CANDLE_DDP_CUBLASLT=0 VARIANT=without-cublaslt each gpu_layers 60 < <(names gpu_layers 'linear|biases')
  # cuDNN's attention is for 16 bits, and attention of many heads is tested in f32.
  CANDLE_DDP_CUDNN_ATTENTION=0 VARIANT=without-cudnn-attention each gpu_layers 60 < <(names gpu_layers 'attention' | grep -v many_heads)
  each gpu 60 < <(names gpu -v "$FAULTS")
  each gpu_data_parallel 60 < <(names gpu_data_parallel .)
  all_ended
}

faults() {
  each gpu 110 < <(names gpu "$FAULTS")
  all_ended
}

steps() {
  local rounds=(--rounds 20) seconds=300
  case $size in
    quick) rounds=(--rounds 2 --steps 3 --model MLP) seconds=30 ;;
    tiny) rounds=(--rounds 1 --steps 1 --divide-batch 64 --model MLP) ;;
  esac
  step steps-world-of-one "$seconds" "$bin/ddp_step_gpu" --bench "${rounds[@]}" || true
  step steps-timeline 30 env CANDLE_DDP_TRACE="$results/trace" \
    "$bin/ddprun" --nproc-per-node 1 "$bin/step" --model mlp --steps 3 --modes ddp || true
}

# Whether PyTorch can be measured as well. The summary says if not.
pytorch() {
  [ "${PEERS:-all}" != 0 ] || return 1
  timeout -k 5 60 python3 -c 'import torch; assert torch.cuda.is_available()' 2>"$results/pytorch.log" && return
  printf '\n## %s: PyTorch was not measured\n\n    %s\n' "$1" "$(tail -n 1 "$results/pytorch.log")" >>"$results/summary.md"
  return 1
}

bandwidth() {
  local sizes=(--millions 64 --rounds 20 --steps 10) seconds=200
  case $size in
    quick) sizes=(--rounds 3 --steps 3) seconds=45 ;;
    tiny) sizes=(--millions 0.1 --rounds 1 --steps 1) ;;
  esac
  step bandwidth "$seconds" "$bin/bandwidth_gpu" --bench "${sizes[@]}" || true
  if pytorch bandwidth; then
    step bandwidth-pytorch "$seconds" python3 "$here/bandwidth_pytorch.py" "${sizes[@]}" || true
  fi
}

# PyTorch's modes for a model and a dtype: as it is, then as its users speed it up.
peers() {
  local left_out='^$'
  [ "${PEERS:-all}" = all ] || left_out='-(compile|autotune)$'
  all_peers "$@" | grep -v -E -e "$left_out" || true
}

all_peers() {
  local model=$1 dtype=$2 words=compile
  case $model in
    gpt2 | bert) echo "$model $dtype"; model=$model-padded ;;
    resnet50) echo "$model $dtype"; echo "$model $dtype-channels_last-benchmark"; words=channels_last-compile dtype=$dtype-channels_last ;;
  esac
  echo "$model $dtype"
  echo "$model ${2}-$words"
  # Takes minutes.
  [ "$size" != full ] || echo "$model ${2}-${words/compile/autotune}"
}

# Steps of PyTorch: SECONDS, NAME, MODEL, DTYPE, STEPS, MODES, BATCH, OPTIONS.
peer() {
  step "$2" "$1" env RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((29000 + RANDOM % 900)) CANDLE_DDP_DEVICE=cuda \
    python3 "$here/step_pytorch.py" "$3" "$5" "$6" "$4" "$7" --no-phases "--wait-every=$wait_every" "${@:8}" || true
}

# The dtype, the model and the batch size of each measurement of `models`. tf32 is f32 that is rounded to TF32 in products and convolutions, as
# PyTorch does by default in convolutions.
model_runs() {
  all_model_runs | chosen_models
}

chosen_models() { grep -E -e "${MODELS:-.}" || true; }

all_model_runs() {
  case $size in
    full) printf '%s\n' {f32,tf32,bf16}' resnet50 128' {f32,tf32,bf16}' gpt 32' {f32,tf32,bf16}' gpt2 8' {tf32,bf16}' vit 128' \
      {tf32,bf16}' bert 16' ;;
    quick) printf '%s\n' bf16' '{'resnet50 128','gpt2 8','vit 128','bert 16','gpt 32'} 'tf32 resnet50 128' 'f32 gpt2 8' ;;
    # GPT-2 and BERT are too large for the emulated GPU.
    tiny) printf '%s\n' {f32,bf16}' resnet50 2' {tf32,bf16}' gpt 1' 'f32 vit 1' ;;
  esac
}

# Fills torch.compile's cache in the background.
compile_peers() {
  local model format dtype batch
  pytorch models || return 0
  while read -r dtype model batch; do
    while read -r model format; do
      [[ $format == *-compile ]] || continue
      while [ "$(jobs -rp | wc -l)" -ge 4 ]; do wait -n || true; done
      peer 300 "compile-$model-$format" "$model" "$format" 1 ddp "$batch" &
    done < <(peers "$model" "$dtype")
  done < <(model_runs)
  all_ended
}

models() {
  local count=20 seconds=58 quick=() has_pytorch=0 modes=local,ddp arguments dtype model batch format
  case $size in
    quick) count=7 seconds=40 modes=ddp ;;
    tiny) count=1 quick=(--image-size 32) MODES=${MODES:-ddp} ;;
  esac
  if pytorch models; then has_pytorch=1; fi
  [ -z "${compiling:-}" ] || wait "$compiling" || true
  while read -r dtype model batch; do
    arguments=(--dtype "$dtype")
    [ "$dtype" != tf32 ] || arguments=(--dtype f32 --tf32)
    arguments+=(--model "$model" --steps "$count" --batch-size "$batch" --no-phases --wait-every "$wait_every" "${quick[@]}")
    [ -z "${MODES:-}" ] || arguments+=(--modes "$MODES")
    step "models-$model-$dtype" "$seconds" "$bin/ddprun" --nproc-per-node 1 "$bin/step" "${arguments[@]}" || true
    [ "$model" != resnet50 ] || step "models-$model-$dtype-channels_last" "$seconds" \
      "$bin/ddprun" --nproc-per-node 1 "$bin/step" "${arguments[@]}" --channels-last || true
    [ "$has_pytorch" = 1 ] || continue
    while read -r model format; do
      case $format in *-autotune) seconds=600 ;; *-compile) seconds=200 ;; *) seconds=58 ;; esac
      peer "$seconds" "models-$model-$format-pytorch" "$model" "$format" "$count" "$modes" "$batch"
    done < <(peers "$model" "$dtype")
  done < <(model_runs)
}

# Which kernels run in a step, for how long, and what the host calls.
profile() {
  local runs=("bf16 resnet50 128" "bf16 gpt2 8" "bf16 vit 128" "f32 gpt2 8" "bf16 gpt 32")
  local dtype model batch count=6 name format has_pytorch=0 arguments
  case $size in
    quick) runs=("bf16 resnet50 128" "bf16 gpt2 8" "bf16 vit 128") ;;
    tiny) return ;;
  esac
  if pytorch profile; then has_pytorch=1; fi
  [ -z "${compiling:-}" ] || wait "$compiling" || true
  while read -r dtype model batch; do
    for format in "$dtype" "$dtype-channels_last"; do
      name=profile-$model-$format arguments=(--dtype "$dtype" --model "$model" --batch-size "$batch")
      case $model-$format in
        resnet50-*-channels_last) arguments+=(--channels-last) ;;
        *-channels_last) continue ;;
      esac
      # shellcheck disable=SC2016  # the inner shell expands it
      GPU_TRACE=$results/$name.tsv CUDA_INJECTION64_PATH=$here/libgpu_trace.so HERE=$here step "$name" 60 \
        bash -c '"$@"; CUDA_INJECTION64_PATH="" python3 "$HERE/gpu_trace.py" "$GPU_TRACE"; gzip -f "$GPU_TRACE"' - \
        "$bin/ddprun" --nproc-per-node 1 "$bin/step" --steps "$count" --modes ddp "${arguments[@]}" --no-phases \
        --wait-every "$wait_every" || true
    done
    [ "$has_pytorch" = 1 ] || continue
    while read -r model format; do
      [[ $format == *-compile ]] || continue
      peer 120 "profile-$model-$format-pytorch" "$model" "$format" "$count" ddp "$batch" --profile
    done < <(peers "$model" "$dtype")
  done < <(printf '%s\n' "${runs[@]}" | chosen_models)
}

allreduce() {
  local sizes=(--sizes 1M,4M,25M,256M) calls=(--calls 50)
  case $size in
    quick) sizes=(--sizes 1M,25M --iters 5) calls=(--calls 10 --rounds 3) ;;
    tiny) sizes=(--sizes 1K,4K,16K --iters 2) calls=(--sizes 0.001,0.1 --calls 2 --rounds 2) ;;
  esac
  step allreduce-world-of-one 30 "$bin/ddprun" --nproc-per-node 1 "$bin/allreduce" "${sizes[@]}" || true
  step allreduce-calls-world-of-one 30 "$bin/ddprun" --nproc-per-node 1 "$bin/nccl_call" --bench "${calls[@]}" || true
  [ "$size" != quick ] || return 0
  (
    shared
    # shellcheck disable=SC2016  # each rank's shell expands RANK
    local ranks=("$bin/ddprun" --nproc-per-node 2 sh -c 'NCCL_HOSTID=rank$RANK exec "$0" "$@"')
    step allreduce-two-ranks-on-one-gpu 200 "${ranks[@]}" "$bin/allreduce" "${sizes[@]}" || true
    step allreduce-calls-two-ranks-on-one-gpu 100 "${ranks[@]}" "$bin/nccl_call" --bench "${calls[@]}" || true
  )
}

# A rank on each GPU: what NCCL does between them, and how much of it the backward pass hides.
multi() {
  local gpus=${GPUS:-$(smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)} of dtype model batch
  if [ "${gpus:-0}" -lt 2 ]; then
    printf '\n## multi: this machine does not have several GPUs\n' >>"$results/summary.md"
    return
  fi
  local sizes=(--sizes 1M,4M,25M,256M) calls=(--calls 50) count=20
  local runs=("bf16 resnet50 128" "bf16 gpt2 8" "bf16 gpt 32" "f32 mlp 4096")
  local ranks=("$bin/ddprun" --nproc-per-node "$gpus") arguments=() tests=(--test-threads=1) tests_limit=900 ab=(gpt2 8) name setting
  case $size in
    quick) sizes=(--sizes 1M,25M,256M --iters 5) calls=(--calls 10 --rounds 3) count=5 runs=("bf16 resnet50 128" "bf16 gpt2 8") ;;
    tiny)
      sizes=(--sizes 1K,16K --iters 2) calls=(--sizes 0.001 --calls 2 --rounds 1) count=1 runs=("f32 mlp 16") ab=(mlp 16)
      tests=(--test-threads=2 several::)
      ;;
  esac
  # How the GPUs are connected, and what NCCL makes of it. If this fails, nothing else can pass.
  if command -v nvidia-smi >/dev/null; then step multi-topology 20 nvidia-smi topo -m || true; fi
  step multi-info 60 env NCCL_DEBUG=INFO "${ranks[@]}" "$bin/allreduce" --sizes 1K,16K --iters 2 || true
  # The tests take a GPU for each of two or three ranks.
  step multi-tests "$tests_limit" "$bin/gpu" "${tests[@]}" || true
  step multi-allreduce 60 "${ranks[@]}" "$bin/allreduce" "${sizes[@]}" || true
  step multi-allreduce-calls 60 "${ranks[@]}" "$bin/nccl_call" --bench "${calls[@]}" || true
  for of in "${runs[@]}"; do
    read -r dtype model batch <<<"$of"
    arguments=(--model "$model" --steps "$count" --dtype "$dtype" --batch-size "$batch" --modes local,ddp)
    step "multi-$model-$dtype" 60 "${ranks[@]}" "$bin/step" "${arguments[@]}" || true
  done
  # Blocks that are gathered while others compute.
  arguments=(--model gpt2 --dtype bf16 --batch-size 8)
  [ "$size" != tiny ] || arguments=(--model gpt --layers 1 --batch-size 1)
  step multi-shard 60 "${ranks[@]}" "$bin/step" "${arguments[@]}" --steps "$count" --modes ddp,zero,shard || true
  # One setting changed: the default is above. NCCL's kernels on fewer multiprocessors leave more to the backward pass.
  arguments=(--model "${ab[0]}" --steps "$count" --batch-size "${ab[1]}" --modes local,ddp)
  [ "$size" = tiny ] || arguments+=(--dtype bf16)
  step multi-low-priority 60 "${ranks[@]}" "$bin/step" "${arguments[@]}" --low-priority || true
  for setting in NCCL_MAX_CTAS=8 NCCL_MAX_CTAS=16 NCCL_MAX_CTAS=32 NCCL_P2P_DISABLE=1 NCCL_NVLS_ENABLE=0 CUDA_DEVICE_MAX_CONNECTIONS=8; do
    name=${setting,,}
    step "multi-${name//[=_]/-}" 60 env "$setting" "${ranks[@]}" "$bin/step" "${arguments[@]}" || true
  done
  step multi-timeline 60 env CANDLE_DDP_TRACE="$results/multi-trace" "${ranks[@]}" "$bin/step" --model "${ab[0]}" --batch-size "${ab[1]}" \
    --steps 3 --modes ddp || true
}

# Steps of a model with one setting changed, next to each other. The first of a pair is the default.
switches() {
  local count=20 gpt=(--model gpt --batch-size 32) resnet=(--model resnet50 --batch-size 64) tiny=()
  case $size in
    quick) count=5 ;;
    tiny) count=1 gpt=(--model gpt --batch-size 1) ;;
  esac
  tiny=(--steps "$count" --modes ddp --dtype bf16)
  ab() { # NAME, VARIABLE, OTHER VALUE, ARGUMENTS
    local name=$1 setting=$2
    shift 2
    step "switch-$name-default" 45 "$bin/ddprun" --nproc-per-node 1 "$bin/step" "$@" "${tiny[@]}" || true
    step "switch-$name" 45 env "$setting" "$bin/ddprun" --nproc-per-node 1 "$bin/step" "$@" "${tiny[@]}" || true
  }
  ab cublaslt CANDLE_DDP_CUBLASLT=0 "${gpt[@]}"
  ab attention CANDLE_DDP_CUDNN_ATTENTION=0 "${gpt[@]}"
  ab attention-fast CANDLE_DDP_CUDNN_ATTENTION=fast "${gpt[@]}"
  ab memory CANDLE_DDP_KEEP_GPU_MEMORY=0 "${gpt[@]}"
  [ "$size" != tiny ] || return 0
  # By default, only large products take it.
  ab resnet-cublaslt CANDLE_DDP_CUBLASLT=1 "${resnet[@]}" --channels-last
  [ "$size" = full ] || return 0
  ab cudnn CANDLE_DDP_CUDNN=0 "${resnet[@]}"
  ab workspace CANDLE_DDP_CUDNN_WORKSPACE=67108864 "${resnet[@]}"
  ab loading CUDA_MODULE_LOADING=LAZY "${gpt[@]}"
  ab queues CUDA_DEVICE_MAX_CONNECTIONS=8 "${gpt[@]}"
  ab ptx CANDLE_DDP_KERNEL_FORM=ptx "${gpt[@]}"
}

sanitizer() {
  local program tool tools=(memcheck racecheck initcheck synccheck) seconds=240
  # Each kernel of this crate, so not cuDNN's.
  local tests=(match_pytorch matches_pytorch heads_may any_address)
  program=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1 || true)
  if [ -z "$program" ]; then
    printf '\n## sanitizer: compute-sanitizer was not found\n' >>"$results/summary.md"
    return
  fi
  [ "$size" != quick ] || tools=(memcheck racecheck) tests=(match_pytorch matches_pytorch) seconds=100
  for tool in "${tools[@]}"; do
    step "sanitizer-$tool" "$seconds" env CANDLE_DDP_CUDNN=0 "$program" --tool "$tool" --error-exitcode 9 "$bin/gpu_layers" --test-threads=1 \
      "${tests[@]}" || true
  done
}

# Looks at the machine. Only libraries that are missing, and a GPU that is too old or serves one process alone, are failures.
preflight() {
  {
    smi -q || true
    smi topo -m || true
    env | grep -E '^(NCCL|CUDA|CANDLE_DDP|LD_LIBRARY_PATH|LD_PRELOAD)' || true
    cat /etc/nccl.conf 2>/dev/null || true
    ulimit -a
    df -h /dev/shm || true
    for program in "$bin"/*; do ldd "$program"; done
  } >"$results/machine.log" 2>&1
  # shellcheck disable=SC2016  # the inner shell expands it
  step libraries 30 bash -c '! ldd "$0"/* | grep "not found"' "$bin" || true
  local built gpu mode
  built=$(sed 's/.* //' "$here/features")
  gpu=$(smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .) || true
  if [ -n "$gpu" ]; then
    step capability 10 test "$gpu" -ge "$built" || echo "build for this GPU with CUDA_COMPUTE_CAP=$gpu" >&2
  fi
  # Two ranks on this GPU need it to serve several processes.
  mode=$(smi --query-gpu=compute_mode --format=csv,noheader 2>/dev/null | head -n 1) || true
  step compute-mode 10 test "${mode#Exclusive}" = "$mode" || echo "let processes share this GPU: nvidia-smi -c DEFAULT" >&2
  # Compiles or loads kernels for the first time.
  step first-kernel 60 "$bin/gpu_layers" --exact activations_match_pytorch || true
}

# One part.
part() {
  part=$1
  "$part" || true
}

finish() {
  local status=$? failed=0 pid
  for pid in "$running"/*; do
    [ -e "$pid" ] || continue
    end "${pid##*/}"
    result "a step that was running" interrupted "$status" 0
  done
  rm -rf "$running"
  if cut -d'"' -f12 "$results/results.jsonl" 2>/dev/null | grep -q -E 'failed|timed out'; then failed=1; fi
  {
    printf '\n## Outcomes\n\n'
    cut -d'"' -f12 "$results/results.jsonl" 2>/dev/null | sort | uniq -c | sed 's/^ */- /'
    [ "$status" = 0 ] || echo "- interrupted, with exit status $status"
  } >>"$results/summary.md"
  cat "$results/summary.md"
  [ "$failed" = 0 ] || exit 1
}

run() {
  results=$(realpath -m "${1:?$(usage)}")
  local what=${*:2} parts=(preflight tests faults steps bandwidth models profile allreduce multi switches sanitizer) word chosen=()
  here=$(realpath "$(dirname "$0")")
  bin=$here/bin
  size=full part=''
  for word in "${@:2}"; do
    case " ${parts[*]} " in
      *" $word "*) chosen+=("$word") ;;
      *) case $word in quick) size=quick ;; all) ;; *) usage ;; esac ;;
    esac
  done
  [ ${#chosen[@]} = 0 ] || parts=("${chosen[@]}")
  [ "${QUICK:-0}" = 0 ] || size=tiny
  if [ "$size" = quick ]; then SUITE_SECONDS=${SUITE_SECONDS:-360}; else SUITE_SECONDS=${SUITE_SECONDS:-86400}; fi
  JOBS=${JOBS:-$((($(nproc) + 1) / 2))}
  wait_every=${WAIT_EVERY:-1}
  mkdir -p "$results"
  : >"$results/results.jsonl"
  # A file for the session of each step that runs.
  running=$(mktemp -d)
  trap finish EXIT
  trap 'exit 130' INT TERM HUP
  {
    echo "# GPU suite: $what"
    echo
    echo "- Date: $(date -u +%F)"
    echo "- Commit: $(cat "$here/commit"); features $(cat "$here/features")"
    echo "- GPU: $(smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo none)"
    echo "- Kernel: $(uname -r)" # of a sandbox, it tells how expensive calls of the driver are
    echo "- Processor: $(nproc) cores, $(sed -n 's/^model name\s*: //p' /proc/cpuinfo | head -n 1)"
    echo "- Command: gpu_suite/gpu_suite.sh run RESULTS $what"
  } >"$results/summary.md"
  local folders
  folders=$(library_path 2>"$results/libraries.log" | sort -u | paste -sd :)
  export LD_LIBRARY_PATH=$folders${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  {
    ldd "$bin/gpu" | sed -n -E 's/^\s*(lib(nccl|cudnn|cublas|nvrtc)\.so\S*) => (\S+).*/- \1: \3/p'
    timeout -k 5 60 python3 -c 'import ctypes
print("- cuDNN", ctypes.CDLL("libcudnn.so.9").cudnnGetVersion())' 2>/dev/null || true
    timeout -k 5 60 python3 -c 'import torch
print("- PyTorch", torch.__version__, "with cuDNN", torch.backends.cudnn.version(), "and NCCL", torch.cuda.nccl.version())' 2>/dev/null || true
  } >>"$results/summary.md"
  export CANDLE_DDP_REQUIRE_GPU=1
  # The driver's own cache, for kernels that it compiles.
  export CUDA_CACHE_PATH=${CUDA_CACHE_PATH:-$results/cuda-cache}
  # Without a home, every process would compile the kernels.
  [ -w "${XDG_CACHE_HOME:-${HOME:-/nowhere}}" ] || export CANDLE_DDP_KERNEL_CACHE=${CANDLE_DDP_KERNEL_CACHE:-$results/kernel-cache}
  export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$results/inductor}
  case " ${parts[*]} " in
    *" tests "*"models "*) part=models; compile_peers & compiling=$! ;;
  esac
  for word in "${parts[@]}"; do part "$word"; done
}

case ${1:-} in
  build) shift; build "$@" ;;
  run) shift; run "$@" ;;
  *) usage ;;
esac
