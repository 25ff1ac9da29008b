// Normalisation of rows, for LayerNorm and RMSNorm. The table has one part: `count` elements of x, in rows of `size`.
// `weight`, `bias` and their gradients have the dtype of the arithmetic.

struct NormScalars {
    double size;    // elements in a row
    double eps;     // added to variances
    double centred; // whether to subtract the mean, 0 or 1
    double rows;    // summed per block for the gradients of weight and bias
};

// Like `reduce_block` with sums, but every thread gets the results. Later steps use the dtype of the arithmetic,
// because many GPUs are slow in f64.
template <typename Real> __device__ inline void add_for_all(Real &first, Real &second) {
    __shared__ double pair[2];
    reduce_block<Add, Add>(first, second, pair);
    __syncthreads();
    first = pair[0];
    second = pair[1];
}

// parameter: y; gradient: x; states: weight, and bias or null. One block per row. Writes the mean and 1 / deviation of
// each row to `sums`.
template <typename T> __device__ inline void norm_forward(const Part *part, unsigned, double *sums) {
    typedef typename Element<T>::Real Real;
    const NormScalars &by = *reinterpret_cast<const NormScalars *>(part->scalars);
    const unsigned long long size = by.size, row = blockIdx.x;
    const T *x = static_cast<const T *>(part->gradient) + row * size;
    T *y = static_cast<T *>(part->parameter) + row * size;
    const Real *weight = static_cast<const Real *>(part->states[0]), *bias = static_cast<const Real *>(part->states[1]);
    const Real elements = by.size, eps = by.eps;
    Real sum = 0, squares = 0, unused = 0;
    if (by.centred != 0) {
        for (unsigned long long i = threadIdx.x; i < size; i += THREADS) sum += Element<T>::load(x[i]);
        add_for_all(sum, unused);
    }
    const Real mean = sum / elements;
    for (unsigned long long i = threadIdx.x; i < size; i += THREADS) {
        const Real distance = Element<T>::load(x[i]) - mean;
        squares += distance * distance;
    }
    add_for_all(squares, unused);
    const Real scale = 1 / sqrt(squares / elements + eps);
    for (unsigned long long i = threadIdx.x; i < size; i += THREADS) {
        const Real value = (Element<T>::load(x[i]) - mean) * scale * weight[i];
        y[i] = Element<T>::store(bias ? value + bias[i] : value);
    }
    if (threadIdx.x == 0) {
        sums[2 * row] = mean;
        sums[2 * row + 1] = scale;
    }
}
KERNELS(norm_forward)

// parameter: dx; gradient: x; states: dy, weight; sums: from norm_forward. One block per row.
template <typename T> __device__ inline void norm_backward(const Part *part, unsigned, double *sums) {
    typedef typename Element<T>::Real Real;
    const NormScalars &by = *reinterpret_cast<const NormScalars *>(part->scalars);
    const unsigned long long size = by.size, row = blockIdx.x;
    const T *x = static_cast<const T *>(part->gradient) + row * size;
    const T *dy = static_cast<const T *>(part->states[0]) + row * size;
    const Real *weight = static_cast<const Real *>(part->states[1]);
    T *dx = static_cast<T *>(part->parameter) + row * size;
    const Real mean = sums[2 * row], scale = sums[2 * row + 1];
    Real plain = 0, weighted = 0;
    for (unsigned long long i = threadIdx.x; i < size; i += THREADS) {
        const Real d = Element<T>::load(dy[i]) * weight[i];
        plain += d;
        weighted += d * ((Element<T>::load(x[i]) - mean) * scale);
    }
    add_for_all(plain, weighted);
    const Real elements = by.size, a = by.centred != 0 ? plain / elements : 0, b = weighted / elements * scale;
    for (unsigned long long i = threadIdx.x; i < size; i += THREADS) {
        const Real d = Element<T>::load(dy[i]) * weight[i];
        dx[i] = Element<T>::store(scale * (d - a - (Element<T>::load(x[i]) - mean) * b));
    }
}
KERNELS(norm_backward)

// parameter: the sums of norm_forward; gradient: x; states: dy. Writes to `sums` a pair for each group of rows and each
// column: the group's contribution to the gradients of weight and bias. A block processes THREADS columns of a group.
template <typename T> __device__ inline void norm_columns(const Part *part, unsigned, double *sums) {
    typedef typename Element<T>::Real Real;
    const NormScalars &by = *reinterpret_cast<const NormScalars *>(part->scalars);
    const unsigned long long size = by.size, tiles = (size + THREADS - 1) / THREADS, group = blockIdx.x / tiles;
    const unsigned long long column = blockIdx.x % tiles * THREADS + threadIdx.x;
    if (column >= size) return;
    const double *statistics = static_cast<const double *>(part->parameter);
    const T *x = static_cast<const T *>(part->gradient), *dy = static_cast<const T *>(part->states[0]);
    const unsigned long long rows = by.rows, from = group * rows, to = min(from + rows, part->count / size);
    double weight = 0, bias = 0;
    // A few rows at a time in the dtype of the arithmetic; their sums are added in f64.
    for (unsigned long long block = from; block < to; block += 16) {
        Real block_weight = 0, block_bias = 0;
        for (unsigned long long row = block; row < min(block + 16, to); row++) {
            const Real mean = statistics[2 * row], scale = statistics[2 * row + 1];
            const Real d = Element<T>::load(dy[row * size + column]);
            block_weight += d * ((Element<T>::load(x[row * size + column]) - mean) * scale);
            block_bias += d;
        }
        weight += block_weight;
        bias += block_bias;
    }
    double *pair = sums + 2 * (group * size + column);
    pair[0] = weight;
    pair[1] = bias;
}
KERNELS(norm_columns)

// parameter: the gradient of weight; states: that of bias, or null; sums: from norm_columns, whose number of groups is
// `count` / (`size` × `rows`), rounded up.
template <typename T> __device__ inline void norm_totals(const Part *part, unsigned, double *sums) {
    typedef typename Element<T>::Real Real;
    const NormScalars &by = *reinterpret_cast<const NormScalars *>(part->scalars);
    const unsigned long long size = by.size, rows = by.rows;
    const unsigned long long column = (unsigned long long)blockIdx.x * THREADS + threadIdx.x;
    if (column >= size) return;
    const unsigned long long groups = (part->count / size + rows - 1) / rows;
    double weight = 0, bias = 0;
    for (unsigned long long group = 0; group < groups; group++) {
        weight += sums[2 * (group * size + column)];
        bias += sums[2 * (group * size + column) + 1];
    }
    static_cast<Real *>(part->parameter)[column] = weight;
    if (part->states[0]) static_cast<Real *>(part->states[0])[column] = bias;
}
KERNELS(norm_totals)
