// The parts of CUDA that the kernels need, on a CPU: blocks run one after the other, and the threads of a block are
// fibres that take turns at __syncthreads(), alternately upwards and downwards, so that a missing barrier shows.
#include <cmath>
#include <cstring>
#include <ucontext.h>
#include <vector>

#define __global__ __attribute__((visibility("default")))
#define __device__
#define __shared__ static
#define __launch_bounds__(...)

struct Index {
    unsigned x;
};
static Index threadIdx, blockIdx;

using std::fabs;
using std::sqrt;

static inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }

static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static ucontext_t turns;
struct Fibre {
    ucontext_t context;
    std::vector<char> stack;
    bool done;
};
static std::vector<Fibre> fibres;

static void __syncthreads() { swapcontext(&fibres[threadIdx.x].context, &turns); }

// The value of the thread of the warp whose number differs in these bits. Here all threads of a block must call it.
template <typename T> static T __shfl_xor_sync(unsigned, T value, unsigned bits) {
    static T values[1024];
    values[threadIdx.x] = value;
    __syncthreads();
    const T result = values[threadIdx.x ^ bits];
    __syncthreads();
    return result;
}
