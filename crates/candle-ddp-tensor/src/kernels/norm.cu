// Normalisation of rows, for LayerNorm and RMSNorm. The statistics are the mean and 1 / deviation of each row, in f64.

struct Norm {
    unsigned long long rows, size; // of x
    unsigned long long centred;    // whether to subtract the mean
    unsigned long long is_narrow;  // whether weight, bias and their gradients have x's dtype, not that of the arithmetic
    unsigned long long vector;     // elements of a row that a thread loads at once: a whole vector, or one
    unsigned long long lanes;      // threads that share a row: a warp's, or a block's
    unsigned long long part;       // rows that a block of norm_columns sums
    unsigned long long parts;      // how many of these there are
};
#define NORM (*reinterpret_cast<const Norm *>(by.numbers))
#define WARP 32u

// Loops over this thread's elements of a row, with the index of the first of some.
#define FOR_EACH_OF_ROW(i)                                                                                           \
    for (unsigned long long i = threadIdx.x % lanes * NORM.vector; row < NORM.rows && i < NORM.size;                 \
         i += lanes * NORM.vector)

// This thread's row, which may be one behind the last: all threads of a block take part in its barriers.
#define LANES_AND_ROW                                                                                                \
    const unsigned lanes = NORM.lanes;                                                                               \
    const unsigned long long row = (unsigned long long)blockIdx.x * (THREADS / lanes) + threadIdx.x / lanes;

// Replaces `values` by their sums over the threads of a row, in a fixed order. Each thread adds the numbers of a warp, which takes
// one barrier. The dtype is that of the arithmetic, because many GPUs are slow in f64. Each call in a kernel has its own `CALL`, and
// so its own memory.
template <int CALL, typename Real, int COUNT>
__device__ inline void add_for_row(Real (&values)[COUNT], unsigned lanes) {
    const unsigned most = 16 / sizeof(Real);
    typedef Neighbours<Real, 16 / sizeof(Real)> Several;
    __shared__ Several all[COUNT][THREADS / most];
    __shared__ Real warps[COUNT][THREADS / WARP];
    for (int v = 0; v < COUNT; v++) all[v][threadIdx.x / most].at[threadIdx.x % most] = values[v];
    __syncthreads();
    for (int v = 0; v < COUNT; v++) {
        const Several *of_warp = all[v] + threadIdx.x / WARP * (WARP / most);
        Several sums = of_warp[0];
        for (unsigned i = 1; i < WARP / most; i++)
            for (unsigned k = 0; k < most; k++) sums.at[k] += of_warp[i].at[k];
        values[v] = sums.at[0];
        for (unsigned k = 1; k < most; k++) values[v] += sums.at[k];
    }
    if (lanes == WARP) return;
    for (int v = 0; v < COUNT; v++)
        if (threadIdx.x % WARP == 0) warps[v][threadIdx.x / WARP] = values[v];
    __syncthreads();
    for (int v = 0; v < COUNT; v++) {
        values[v] = warps[v][0];
        for (unsigned i = 1; i < THREADS / WARP; i++) values[v] += warps[v][i];
    }
}

// Loads elements of the weight or the bias.
template <typename T>
__device__ inline void load_parameter(Few<T> &few, const void *from, unsigned long long i, bool is_narrow, bool is_vector) {
    if (is_narrow) few.load(static_cast<const T *>(from) + i, is_vector);
    else few.load(static_cast<const typename Element<T>::Real *>(from) + i, is_vector);
}

// tensors: x, y, weight, bias or null, the statistics. reals: eps. A warp or a block per row.
template <typename T> __device__ inline void norm_forward(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    LANES_AND_ROW
    const T *x = TENSOR(const T, 0) + row * NORM.size;
    T *y = TENSOR(T, 1) + row * NORM.size;
    const void *weight = by.tensors[2], *bias = by.tensors[3];
    const Real elements = NORM.size, eps = by.reals[0];
    const bool is_vector = NORM.vector > 1, is_narrow = NORM.is_narrow;
    Real sum[1] = {0}, squares[1] = {0};
    Few<T> few, w, b;
    if (NORM.centred) {
        FOR_EACH_OF_ROW(i) {
            few.load(x + i, is_vector);
            FOR_EACH_OF(T, is_vector, k) sum[0] += few.at[k];
        }
        add_for_row<0>(sum, lanes);
    }
    const Real mean = sum[0] / elements;
    FOR_EACH_OF_ROW(i) {
        few.load(x + i, is_vector);
        FOR_EACH_OF(T, is_vector, k) {
            const Real distance = few.at[k] - mean;
            squares[0] += distance * distance;
        }
    }
    add_for_row<1>(squares, lanes);
    const Real scale = 1 / sqrt(squares[0] / elements + eps);
    FOR_EACH_OF_ROW(i) {
        few.load(x + i, is_vector);
        load_parameter(w, weight, i, is_narrow, is_vector);
        if (bias) load_parameter(b, bias, i, is_narrow, is_vector);
        FOR_EACH_OF(T, is_vector, k) {
            const Real value = (few.at[k] - mean) * scale * w.at[k];
            few.at[k] = bias ? value + b.at[k] : value;
        }
        few.store(y + i, is_vector);
    }
    if (threadIdx.x % lanes == 0 && row < NORM.rows) {
        TENSOR(double, 4)[2 * row] = mean;
        TENSOR(double, 4)[2 * row + 1] = scale;
    }
}
LAYER(norm_forward)

// tensors: x, dx, weight, dy, the statistics. A warp or a block per row.
template <typename T> __device__ inline void norm_backward(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    LANES_AND_ROW
    const T *x = TENSOR(const T, 0) + row * NORM.size, *dy = TENSOR(const T, 3) + row * NORM.size;
    const void *weight = by.tensors[2];
    T *dx = TENSOR(T, 1) + row * NORM.size;
    const bool is_vector = NORM.vector > 1, is_narrow = NORM.is_narrow;
    Real mean = 0, scale = 0;
    if (row < NORM.rows) {
        mean = TENSOR(const double, 4)[2 * row];
        scale = TENSOR(const double, 4)[2 * row + 1];
    }
    Real sums[2] = {0, 0}; // of dy × weight, and of its products with the normalised values
    Few<T> values, few, w;
    // Calls `use` with the products of dy and weight, and with x's distances from the mean; stores the results.
    const auto each_of_row = [&](T *to, auto use) {
        FOR_EACH_OF_ROW(i) {
            values.load(x + i, is_vector);
            few.load(dy + i, is_vector);
            load_parameter(w, weight, i, is_narrow, is_vector);
            FOR_EACH_OF(T, is_vector, k) few.at[k] = use(few.at[k] * w.at[k], values.at[k] - mean);
            if (to) few.store(to + i, is_vector);
        }
    };
    each_of_row(nullptr, [&](Real d, Real distance) {
        sums[0] += d;
        sums[1] += d * (distance * scale);
        return d;
    });
    add_for_row<0>(sums, lanes);
    const Real elements = NORM.size, a = NORM.centred ? sums[0] / elements : 0, b = sums[1] / elements * scale;
    each_of_row(dx, [&](Real d, Real distance) { return scale * (d - a - distance * b); });
}
LAYER(norm_backward)

// How many neighbouring columns, or vectors of them, a block sums, and into how many sums of each.
#define COLUMNS 32u
#define LINES (THREADS / COLUMNS)

// tensors: x, dy, the statistics, and sums: a row for each part of the rows with its contribution to the gradient of the weight, and
// behind these as many rows for the bias. One block per part and COLUMNS columns or vectors.
template <typename T> __device__ inline void norm_columns(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    __shared__ Few<T> weights[THREADS], biases[THREADS];
    const unsigned long long size = NORM.size;
    unsigned long long part = blockIdx.x;
    const unsigned long long tile = take(part, (size + NORM.vector * COLUMNS - 1) / (NORM.vector * COLUMNS));
    const unsigned long long column = (tile * COLUMNS + threadIdx.x % COLUMNS) * NORM.vector;
    const bool is_vector = NORM.vector > 1;
    const T *x = TENSOR(const T, 0) + column, *dy = TENSOR(const T, 1) + column;
    const double *statistics = TENSOR(const double, 2);
    const unsigned long long to = column < size ? min((part + 1) * NORM.part, NORM.rows) : 0;
    double weight[Few<T>::most] = {}, bias[Few<T>::most] = {};
    // A few rows at a time in the dtype of the arithmetic; their sums are added in f64.
    for (unsigned long long block = part * NORM.part + threadIdx.x / COLUMNS; block < to; block += 16 * LINES) {
        Real block_weight[Few<T>::most] = {}, block_bias[Few<T>::most] = {};
        _Pragma("unroll 4") for (unsigned long long row = block; row < min(block + 16 * LINES, to); row += LINES) {
            const Real mean = statistics[2 * row], scale = statistics[2 * row + 1];
            Few<T> values, few;
            values.load(x + row * size, is_vector);
            few.load(dy + row * size, is_vector);
            FOR_EACH_OF(T, is_vector, k) {
                block_weight[k] += few.at[k] * ((values.at[k] - mean) * scale);
                block_bias[k] += few.at[k];
            }
        }
        FOR_EACH_OF(T, is_vector, k) {
            weight[k] += block_weight[k];
            bias[k] += block_bias[k];
        }
    }
    FOR_EACH_OF(T, is_vector, k) {
        weights[threadIdx.x].at[k] = weight[k];
        biases[threadIdx.x].at[k] = bias[k];
    }
    for (unsigned half = THREADS / 2; half >= COLUMNS; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            FOR_EACH_OF(T, is_vector, k) {
                weights[threadIdx.x].at[k] += weights[threadIdx.x + half].at[k];
                biases[threadIdx.x].at[k] += biases[threadIdx.x + half].at[k];
            }
        }
    }
    if (threadIdx.x >= COLUMNS || column >= size) return;
    Real *sums = TENSOR(Real, 3) + part * size + column;
    weights[threadIdx.x].store(sums, is_vector);
    biases[threadIdx.x].store(sums + NORM.parts * size, is_vector);
}
LAYER(norm_columns)

// tensors: the sums of norm_columns, the gradients of weight and bias. One block per COLUMNS columns.
template <typename T> __device__ inline void norm_totals(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    __shared__ double weights[THREADS], biases[THREADS];
    const unsigned long long size = NORM.size, column = blockIdx.x * COLUMNS + threadIdx.x % COLUMNS;
    const Real *sums = TENSOR(const Real, 0) + column;
    double weight = 0, bias = 0;
    if (column < size) {
        _Pragma("unroll 4") for (unsigned long long part = threadIdx.x / COLUMNS; part < NORM.parts; part += LINES) {
            weight += sums[part * size];
            bias += sums[(NORM.parts + part) * size];
        }
    }
    weights[threadIdx.x] = weight;
    biases[threadIdx.x] = bias;
    for (unsigned half = THREADS / 2; half >= COLUMNS; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            weights[threadIdx.x] += weights[threadIdx.x + half];
            biases[threadIdx.x] += biases[threadIdx.x + half];
        }
    }
    if (threadIdx.x >= COLUMNS || column >= size) return;
    const Real of_weight = weights[threadIdx.x], of_bias = biases[threadIdx.x];
    if (NORM.is_narrow) {
        TENSOR(T, 1)[column] = Element<T>::store(of_weight);
        TENSOR(T, 2)[column] = Element<T>::store(of_bias);
    } else {
        TENSOR(Real, 1)[column] = of_weight;
        TENSOR(Real, 2)[column] = of_bias;
    }
}
LAYER(norm_totals)
