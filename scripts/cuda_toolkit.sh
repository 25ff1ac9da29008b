#!/usr/bin/env bash
# Assembles a CUDA toolkit from PyPI wheels, so that the features `nccl` and `cudnn` can be built, linked and started on a
# machine without a GPU. Installs nothing outside the folder; running it again resumes an incomplete installation.
#
#     scripts/cuda_toolkit.sh FOLDER        # 1.4 GB
#     source FOLDER/env.sh
#     cargo build --release --features nccl
#
# The driver library, libcuda.so.1, comes with a GPU's driver and is in no wheel. The script builds a stub whose functions
# all return CUDA_ERROR_NO_DEVICE, so that programs link and start. env.sh adds the stub to LD_LIBRARY_PATH; on a machine
# with a driver, remove that line. cuDNN's wheel has 900 MB, of which linking needs only the names: by default its library
# is such a stub as well, whose functions return CUDNN_STATUS_NOT_INITIALIZED. CUDNN=1 installs the wheel instead.
set -euo pipefail
project=$(cd "$(dirname "$0")/.." && pwd)
home=$(mkdir -p "${1:?usage: cuda_toolkit.sh FOLDER}" && cd "$1" && pwd)
pins=(
  nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96
  nvidia-cuda-cccl==13.0.85 'nvidia-cublas==13.0.*' nvidia-curand==10.4.0.35 nvidia-cuda-nvrtc==13.0.88
  nvidia-nccl-cu13==2.28.9 nvidia-cuda-cupti==13.0.85
)
[ -z "${CUDNN:-}" ] || pins+=('nvidia-cudnn-cu13==9.*')

# Install the wheels, once per set of pins.
if [ "$(cat "$home/pins" 2>/dev/null)" != "${pins[*]}" ]; then
  rm -rf "$home/wheels" "$home/pins"
  python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$home/wheels" "${pins[@]}"
  echo "${pins[*]}" >"$home/pins"
fi
wheels=$home/wheels/nvidia

# Create the layout that build scripts expect. Links are replaced one by one, because a build may be using them.
mkdir -p "$home/bin" "$home/lib64/stubs"
ln -sf "$wheels"/cu13/bin/* "$home/bin/"
chmod -R u+x "$wheels"/cu13/bin "$wheels"/cu13/nvvm/bin
ln -sfn "$wheels/cu13/include" "$home/include"
ln -sfn "$wheels/cu13/nvvm" "$home/nvvm"
for library in cublas.13 cublasLt.13 cudart.13 curand.10 nvrtc.13 cupti.13 nccl.2; do
  name=lib${library%.*}.so version=${library##*.}
  file=$(find "$wheels" -name "$name.$version" | head -n 1)
  [ -n "$file" ] || { echo "error: no wheel contains $name.$version" >&2; exit 1; }
  ln -sf "$file" "$home/lib64/$name.$version"
  ln -sf "$file" "$home/lib64/$name"
done
find "$wheels" -name 'libnvrtc-builtins.so.*' -exec ln -sf {} "$home/lib64/" ';'
for archive in libcudadevrt.a libcudart_static.a; do
  ln -sf "$(find "$wheels" -name "$archive" | head -n 1)" "$home/lib64/$archive"
done

# Build the stubs, with every function that cudarc names.
cudarc=$(cd "$project" && cargo metadata --format-version 1 --locked --features nccl |
  python3 -c 'import json, sys; print(next(p["manifest_path"] for p in json.load(sys.stdin)["packages"] if p["name"] == "cudarc"))')
stub() { # FOLDER OF BINDINGS, PREFIX OF NAMES, LIBRARY, VERSION, RESULT
  local library=$home/lib64/stubs/$3
  grep -rhoE "\\bfn $2[A-Za-z0-9_]+" "$(dirname "$cudarc")/src/$1/sys" | sort -u |
    sed -E "s/fn (.*)/int \\1(void) { return $5; }/" >"$library.c"
  cc -shared -fPIC -Wl,-soname,"$3.so.$4" -o "$library.so" "$library.c" 2>/dev/null
  ln -sf "$3.so" "$library.so.$4"
}
stub driver cu libcuda 1 100
rm -f "$home"/lib64/stubs/libcudnn.* "$home"/lib64/libcudnn*
if [ -n "${CUDNN:-}" ]; then
  find "$wheels/cudnn/lib" -name '*.so.9' -exec ln -sf {} "$home/lib64/" ';'
  ln -sf libcudnn.so.9 "$home/lib64/libcudnn.so"
else
  stub cudnn cudnn libcudnn 9 1001
fi

cat >"$home/env.sh" <<EOF
export CUDA_HOME="$home" CUDA_PATH="$home" PATH="$home/bin:\$PATH"
export CUDA_COMPUTE_CAP="\${CUDA_COMPUTE_CAP:-80}" CUDAFORGE_THREADS="\${CUDAFORGE_THREADS:-2}"
export LIBRARY_PATH="$home/lib64:$home/lib64/stubs:\${LIBRARY_PATH:-}"
export LD_LIBRARY_PATH="$home/lib64:$home/lib64/stubs:\${LD_LIBRARY_PATH:-}"
EOF

# Check that a kernel compiles, the driver stub responds, and NCCL loads.
(
  # shellcheck source=/dev/null
  source "$home/env.sh"
  echo '__global__ void twice(float *x) { x[threadIdx.x] *= 2; }' >"$home/check.cu"
  nvcc -arch=sm_90 -cubin -o "$home/check.cubin" "$home/check.cu"
  python3 - <<'EOF'
import ctypes
assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 100, "the driver's stand-in should answer CUDA_ERROR_NO_DEVICE"
version = ctypes.c_int()
assert ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version)) == 0
print("toolkit complete: NCCL", version.value)
EOF
)
