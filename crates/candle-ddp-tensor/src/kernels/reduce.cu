// Reduces the values of all threads of a block to one pair. The order is fixed, so results are reproducible.

struct Add {
    static __device__ double of(double a, double b) { return a + b; }
};

// Returns the maximum, or NaN if one of the values is NaN.
struct Larger {
    static __device__ double of(double a, double b) { return b > a || b != b ? b : a; }
};

// Reduces `first` and `second` over all threads, each with its operation, into `result[0]` and `result[1]`. Before the next reduction,
// the block must have passed a barrier.
template <typename First, typename Second>
__device__ inline void reduce_block(double first, double second, double *result) {
    const unsigned warp = 32;
    __shared__ double firsts[THREADS / warp], seconds[THREADS / warp];
    for (unsigned distance = warp / 2; distance > 0; distance /= 2) {
        first = First::of(first, __shfl_down_sync(0xffffffffu, first, distance));
        second = Second::of(second, __shfl_down_sync(0xffffffffu, second, distance));
    }
    if (threadIdx.x % warp == 0) {
        firsts[threadIdx.x / warp] = first;
        seconds[threadIdx.x / warp] = second;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (unsigned i = 1; i < THREADS / warp; i++) {
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
    for (unsigned long long chunk = from + threadIdx.x; chunk < to; chunk += THREADS) {
        first = First::of(first, pairs[2 * chunk]);
        second = Second::of(second, pairs[2 * chunk + 1]);
    }
    reduce_block<First, Second>(first, second, result);
}
