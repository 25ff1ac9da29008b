// Reduces the values of all threads of a block to one pair. The order is fixed, so results are reproducible.

struct Add {
    static __device__ double of(double a, double b) { return a + b; }
};

// Returns the maximum, or NaN if one of the values is NaN.
struct Larger {
    static __device__ double of(double a, double b) { return b > a || b != b ? b : a; }
};

// Reduces `first` and `second` over all threads, each with its operation, into `result[0]` and `result[1]`.
template <typename First, typename Second>
__device__ inline void reduce_block(double first, double second, double *result) {
    __shared__ double firsts[THREADS], seconds[THREADS];
    firsts[threadIdx.x] = first;
    seconds[threadIdx.x] = second;
    for (unsigned half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            firsts[threadIdx.x] = First::of(firsts[threadIdx.x], firsts[threadIdx.x + half]);
            seconds[threadIdx.x] = Second::of(seconds[threadIdx.x], seconds[threadIdx.x + half]);
        }
    }
    if (threadIdx.x == 0) {
        result[0] = firsts[0];
        result[1] = seconds[0];
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
