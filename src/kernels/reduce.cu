// One pair of values out of those of all threads of a block. The order is fixed, and so are the results.

struct Add {
    static __device__ double of(double a, double b) { return a + b; }
};

// NaN if one of them is.
struct Larger {
    static __device__ double of(double a, double b) { return b > a || b != b ? b : a; }
};

// `first` and `second` of all threads, each put together by its operation, go to `result[0]` and `result[1]`.
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

// The same for the pairs of the chunks from `from` up to `to`, by one block.
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
