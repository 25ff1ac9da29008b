// Reduces the values of all threads of a block to one pair. The order is fixed, so results are reproducible.

struct Add {
    template <typename Real> static __device__ Real of(Real a, Real b) { return a + b; }
};

// Returns the maximum, or NaN if one of the values is NaN.
struct Larger {
    template <typename Real> static __device__ Real of(Real a, Real b) { return b > a || b != b ? b : a; }
};

#define WARP 32u

// Reduces `value` over the threads of a warp, for all of them. All threads of the block must take part.
template <typename Op, typename Real> __device__ inline Real reduce_warp(Real value) {
    for (unsigned distance = WARP / 2; distance > 0; distance /= 2)
        value = Op::of(value, __shfl_xor_sync(0xffffffffu, value, distance));
    return value;
}

// Reduces `first` and `second` over all threads, each with its operation, into `result[0]` and `result[1]`. Before the next reduction,
// the block must have passed a barrier.
template <typename First, typename Second>
__device__ inline void reduce_block(double first, double second, double *result) {
    __shared__ double firsts[THREADS / WARP], seconds[THREADS / WARP];
    first = reduce_warp<First>(first);
    second = reduce_warp<Second>(second);
    if (threadIdx.x % WARP == 0) {
        firsts[threadIdx.x / WARP] = first;
        seconds[threadIdx.x / WARP] = second;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (unsigned i = 1; i < THREADS / WARP; i++) {
            first = First::of(first, firsts[i]);
            second = Second::of(second, seconds[i]);
        }
        result[0] = first;
        result[1] = second;
    }
}

// Reduces the pairs of the chunks from `from` up to `to`, with one block.
template <typename First, typename Second>
__device__ inline void reduce_chunks(const double *pairs, unsigned long long from, unsigned long long to,
                                     double *result) {
    double first = 0, second = 0;
    _Pragma("unroll 8") for (unsigned long long chunk = from + threadIdx.x; chunk < to; chunk += THREADS) {
        first = First::of(first, pairs[2 * chunk]);
        second = Second::of(second, pairs[2 * chunk + 1]);
    }
    reduce_block<First, Second>(first, second, result);
}
