// Normalisation of rows, for LayerNorm and RMSNorm. `weight`, `bias` and their gradients have the dtype of the arithmetic; the
// statistics are the mean and 1 / deviation of each row, in f64.

struct Norm {
    unsigned long long rows, size; // of x
    unsigned long long centred;    // whether to subtract the mean
    unsigned long long group;      // rows summed per block for the gradients of weight and bias
    unsigned long long vector;     // elements of a row that a thread loads at once: a whole vector, or one
};
#define NORM (*reinterpret_cast<const Norm *>(by.numbers))

// Loops over this thread's elements of a row, with the index of the first of some.
#define FOR_EACH_OF_ROW(i) \
    for (unsigned long long i = threadIdx.x * NORM.vector; i < NORM.size; i += THREADS * NORM.vector)

// Like `reduce_block` with sums, but every thread gets the results. Later steps use the dtype of the arithmetic,
// because many GPUs are slow in f64.
template <typename Real> __device__ inline void add_for_all(Real &first, Real &second) {
    __shared__ double pair[2];
    reduce_block<Add, Add>(first, second, pair);
    __syncthreads();
    first = pair[0];
    second = pair[1];
}

// tensors: x, y, weight, bias or null, the statistics. reals: eps. One block per row.
template <typename T> __device__ inline void norm_forward(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const unsigned long long size = NORM.size, row = blockIdx.x;
    const T *x = TENSOR(const T, 0) + row * size;
    T *y = TENSOR(T, 1) + row * size;
    const Real *weight = TENSOR(const Real, 2), *bias = TENSOR(const Real, 3);
    const Real elements = size, eps = by.reals[0];
    const bool is_vector = NORM.vector > 1;
    Real sum = 0, squares = 0, unused = 0;
    Few<T> few, w, b;
    if (NORM.centred) {
        FOR_EACH_OF_ROW(i) {
            few.load(x + i, is_vector);
            FOR_EACH_OF(T, is_vector, k) sum += few.at[k];
        }
        add_for_all(sum, unused);
    }
    const Real mean = sum / elements;
    FOR_EACH_OF_ROW(i) {
        few.load(x + i, is_vector);
        FOR_EACH_OF(T, is_vector, k) {
            const Real distance = few.at[k] - mean;
            squares += distance * distance;
        }
    }
    add_for_all(squares, unused);
    const Real scale = 1 / sqrt(squares / elements + eps);
    FOR_EACH_OF_ROW(i) {
        few.load(x + i, is_vector);
        w.load(weight + i, is_vector);
        if (bias) b.load(bias + i, is_vector);
        FOR_EACH_OF(T, is_vector, k) {
            const Real value = (few.at[k] - mean) * scale * w.at[k];
            few.at[k] = bias ? value + b.at[k] : value;
        }
        few.store(y + i, is_vector);
    }
    if (threadIdx.x == 0) {
        TENSOR(double, 4)[2 * row] = mean;
        TENSOR(double, 4)[2 * row + 1] = scale;
    }
}
LAYER(norm_forward)

// tensors: x, dx, weight, dy, the statistics. One block per row.
template <typename T> __device__ inline void norm_backward(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const unsigned long long size = NORM.size, row = blockIdx.x;
    const T *x = TENSOR(const T, 0) + row * size, *dy = TENSOR(const T, 3) + row * size;
    const Real *weight = TENSOR(const Real, 2);
    T *dx = TENSOR(T, 1) + row * size;
    const Real mean = TENSOR(const double, 4)[2 * row], scale = TENSOR(const double, 4)[2 * row + 1];
    const bool is_vector = NORM.vector > 1;
    Real plain = 0, weighted = 0;
    Few<T> values, few, w;
    // Calls `use` with the products of dy and weight, and with x's distances from the mean; stores the results.
    const auto each_of_row = [&](T *to, auto use) {
        FOR_EACH_OF_ROW(i) {
            values.load(x + i, is_vector);
            few.load(dy + i, is_vector);
            w.load(weight + i, is_vector);
            FOR_EACH_OF(T, is_vector, k) few.at[k] = use(few.at[k] * w.at[k], values.at[k] - mean);
            if (to) few.store(to + i, is_vector);
        }
    };
    each_of_row(nullptr, [&](Real d, Real distance) {
        plain += d;
        weighted += d * (distance * scale);
        return d;
    });
    add_for_all(plain, weighted);
    const Real elements = size, a = NORM.centred ? plain / elements : 0, b = weighted / elements * scale;
    each_of_row(dx, [&](Real d, Real distance) { return scale * (d - a - distance * b); });
}
LAYER(norm_backward)

// tensors: x, dy, the statistics, and a pair for each group of rows and each column: the group's contribution to the gradients of
// weight and bias. Each thread of a block processes a column of a group, or a vector of them.
template <typename T> __device__ inline void norm_columns(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const unsigned long long size = NORM.size, width = THREADS * NORM.vector, tiles = (size + width - 1) / width;
    const unsigned long long group = blockIdx.x / tiles, column = blockIdx.x % tiles * width + threadIdx.x * NORM.vector;
    if (column >= size) return;
    const bool is_vector = NORM.vector > 1;
    const T *x = TENSOR(const T, 0) + column, *dy = TENSOR(const T, 1) + column;
    const double *statistics = TENSOR(const double, 2);
    const unsigned long long from = group * NORM.group, to = min(from + NORM.group, NORM.rows);
    double weight[Few<T>::most] = {}, bias[Few<T>::most] = {};
    // A few rows at a time in the dtype of the arithmetic; their sums are added in f64.
    for (unsigned long long block = from; block < to; block += 16) {
        Real block_weight[Few<T>::most] = {}, block_bias[Few<T>::most] = {};
        for (unsigned long long row = block; row < min(block + 16, to); row++) {
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
    double *pairs = TENSOR(double, 3) + 2 * (group * size + column);
    FOR_EACH_OF(T, is_vector, k) {
        pairs[2 * k] = weight[k];
        pairs[2 * k + 1] = bias[k];
    }
}
LAYER(norm_columns)

// tensors: the pairs of norm_columns, the gradients of weight and bias. One thread per column.
template <typename T> __device__ inline void norm_totals(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const unsigned long long size = NORM.size, column = thread_in_grid();
    if (column >= size) return;
    const unsigned long long groups = (NORM.rows + NORM.group - 1) / NORM.group;
    const double *pairs = TENSOR(const double, 0) + 2 * column;
    double weight = 0, bias = 0;
    for (unsigned long long group = 0; group < groups; group++) {
        weight += pairs[2 * group * size];
        bias += pairs[2 * group * size + 1];
    }
    TENSOR(Real, 1)[column] = weight;
    TENSOR(Real, 2)[column] = bias;
}
LAYER(norm_totals)
