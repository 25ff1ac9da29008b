// Normalisation of rows, for LayerNorm and RMSNorm. The statistics are the mean and 1 / deviation of each row, in f64. norm_rows.cu has
// faster kernels for rows that fit into registers.

struct Norm {
    unsigned long long rows, size; // of x
    unsigned long long centred;    // whether to subtract the mean
    unsigned long long is_narrow;  // whether weight, bias and their gradients have x's dtype, not that of the arithmetic
    unsigned long long vector;     // elements of a row that a thread loads at once: a whole vector, or one
    unsigned long long lanes;      // threads that share a row
    unsigned long long part;       // rows that a block of norm_columns sums
    unsigned long long parts;      // its blocks for all rows, or those of the kernels whose threads keep rows
};
#define NORM (*reinterpret_cast<const Norm *>(by.numbers))

__device__ inline Span span_of(const Norm &norm) {
    Span of = span(norm.rows, norm.size, norm.lanes);
    if (norm.vector > 1) of.head = 0;
    return of;
}

// Elements of the weight or the bias.
template <typename T> __device__ inline Few<T> parameter(const void *from, unsigned long long i, bool is_narrow, bool is_vector) {
    Few<T> few;
    if (is_narrow) few.load(static_cast<const T *>(from) + i, is_vector);
    else few.load(static_cast<const typename Element<T>::Real *>(from) + i, is_vector);
    return few;
}

// tensors: x, y, weight, bias or null, the statistics. reals: eps. A few warps per row.
template <typename T> __device__ inline void norm_forward(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Span of = span_of(NORM);
    const Row<T> x(TENSOR(const T, 0), of, NORM.size);
    T *y = TENSOR(T, 1) + of.row * NORM.size;
    const void *weight = by.tensors[2], *bias = by.tensors[3];
    const Real elements = NORM.size, eps = by.reals[0];
    const bool is_narrow = NORM.is_narrow;
    Real mean = 0, squares = 0;
    if (NORM.centred) {
        for_each_of_row(of, [&](auto size, unsigned long long, const Few<T> &few) {
            FOR_EACH_OF(T, size.is_vector, k) mean += few.at[k];
        }, x);
        mean = reduce_row<0, Add>(of, mean) / elements;
    }
    for_each_of_row(of, [&](auto size, unsigned long long, const Few<T> &few) {
        FOR_EACH_OF(T, size.is_vector, k) squares += (few.at[k] - mean) * (few.at[k] - mean);
    }, x);
    const Real scale = 1 / sqrt(reduce_row<1, Add>(of, squares) / elements + eps);
    for_each_of_row(of, [&](auto size, unsigned long long i, Few<T> few) {
        const Few<T> w = parameter<T>(weight, i, is_narrow, size.is_vector);
        FOR_EACH_OF(T, size.is_vector, k) few.at[k] = (few.at[k] - mean) * scale * w.at[k];
        if (bias) {
            const Few<T> b = parameter<T>(bias, i, is_narrow, size.is_vector);
            FOR_EACH_OF(T, size.is_vector, k) few.at[k] += b.at[k];
        }
        few.store(y + i, size.is_vector);
    }, x);
    if (of.lane == 0 && of.count > 0) {
        TENSOR(double, 4)[2 * of.row] = mean;
        TENSOR(double, 4)[2 * of.row + 1] = scale;
    }
}
LAYER(norm_forward)

// tensors: x, dx, weight, dy, the statistics. A few warps per row.
template <typename T> __device__ inline void norm_backward(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Span of = span_of(NORM);
    const Row<T> x(TENSOR(const T, 0), of, NORM.size), dy(TENSOR(const T, 3), of, NORM.size);
    const void *weight = by.tensors[2];
    T *dx = TENSOR(T, 1) + of.row * NORM.size;
    const bool is_narrow = NORM.is_narrow;
    Real mean = 0, scale = 0;
    if (of.count > 0) {
        mean = TENSOR(const double, 4)[2 * of.row];
        scale = TENSOR(const double, 4)[2 * of.row + 1];
    }
    Real sum = 0, weighted = 0; // of dy × weight, and of its products with the distances from the mean
    for_each_of_row(of, [&](auto size, unsigned long long i, const Few<T> &values, const Few<T> &few) {
        const Few<T> w = parameter<T>(weight, i, is_narrow, size.is_vector);
        FOR_EACH_OF(T, size.is_vector, k) {
            const Real d = few.at[k] * w.at[k];
            sum += d;
            weighted += d * (values.at[k] - mean);
        }
    }, x, dy);
    sum = reduce_row<0, Add>(of, sum);
    weighted = reduce_row<1, Add>(of, weighted) * scale;
    const Real elements = NORM.size, a = NORM.centred ? sum / elements : 0, b = weighted / elements * scale;
    for_each_of_row(of, [&](auto size, unsigned long long i, const Few<T> &values, Few<T> few) {
        const Few<T> w = parameter<T>(weight, i, is_narrow, size.is_vector);
        FOR_EACH_OF(T, size.is_vector, k)
            few.at[k] = scale * (few.at[k] * w.at[k] - a - (values.at[k] - mean) * b);
        few.store(dx + i, size.is_vector);
    }, x, dy);
}
LAYER(norm_backward)

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
    add_lines([&](unsigned to, unsigned from) {
        FOR_EACH_OF(T, is_vector, k) {
            weights[to].at[k] += weights[from].at[k];
            biases[to].at[k] += biases[from].at[k];
        }
    });
    if (threadIdx.x >= COLUMNS || column >= size) return;
    Real *sums = TENSOR(Real, 3) + part * size + column;
    weights[threadIdx.x].store(sums, is_vector);
    biases[threadIdx.x].store(sums + NORM.parts * size, is_vector);
}
LAYER(norm_columns)

// The columns of a block of norm_totals, as many as 32 bytes have of f32; TOTALS in norm.rs is the same.
#define TOTALS 8u

// tensors: the sums of norm_columns or norm_gradients, the gradients of weight and bias. One block per TOTALS columns.
template <typename T> __device__ inline void norm_totals(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    __shared__ double weights[THREADS], biases[THREADS];
    const unsigned long long size = NORM.size, column = blockIdx.x * TOTALS + threadIdx.x % TOTALS;
    const Real *sums = TENSOR(const Real, 0) + column;
    double weight = 0, bias = 0;
    if (column < size) {
        _Pragma("unroll 4") for (unsigned long long part = threadIdx.x / TOTALS; part < NORM.parts; part += THREADS / TOTALS) {
            weight += sums[part * size];
            bias += sums[(NORM.parts + part) * size];
        }
    }
    weights[threadIdx.x] = weight;
    biases[threadIdx.x] = bias;
    add_lines<TOTALS>([&](unsigned to, unsigned from) {
        weights[to] += weights[from];
        biases[to] += biases[from];
    });
    if (threadIdx.x >= TOTALS || column >= size) return;
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
