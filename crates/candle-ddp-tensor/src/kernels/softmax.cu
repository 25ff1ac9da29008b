// Softmax, its logarithm, and the cross entropy, over the middle dimension of (outer, count, inner). Where inner is 1, a
// block takes a row; otherwise a thread takes a column.

struct Rows {
    unsigned long long outer, count, inner;
};
#define ROWS (*reinterpret_cast<const Rows *>(by.numbers))

// The maximum m of a row or column and Σ e^(x − m), for all threads that have it.
template <typename Real> struct Sum {
    Real largest, sum;
};

// Calls `body` for this thread's elements of a row, with the index of the first of some: `Several`, a `Few<T>` that begins at a
// multiple of 16, or `One`. If all tensors `are_aligned`, rows may begin anywhere, but do so alike in all tensors.
template <typename T, typename Body>
__device__ inline void for_each_of_row(const T *row, unsigned long long count, bool are_aligned, Body body) {
    const unsigned long long most = Few<T>::most;
    unsigned long long head = count, tail = count;
    if (are_aligned) {
        head = min(count, (most - (unsigned long long)row / sizeof(T) % most) % most);
        tail = head + (count - head) / most * most;
        for (unsigned long long i = head + threadIdx.x * most; i < tail; i += THREADS * most) body(Several(), i);
    }
    for (unsigned long long i = threadIdx.x; i < head; i += THREADS) body(One(), i);
    for (unsigned long long i = tail + threadIdx.x; i < count; i += THREADS) body(One(), i);
}

// Reads the row once: each thread adjusts its sum when it finds a larger element.
template <typename T>
__device__ inline Sum<typename Element<T>::Real> sum_row(const T *__restrict__ x, unsigned long long count,
                                                         bool are_aligned) {
    typedef typename Element<T>::Real Real;
    __shared__ double pair[2];
    const Real least = __uint_as_float(0xff800000u);
    Real largest = least, part = 0;
    for_each_of_row(x, count, are_aligned, [&](auto size, unsigned long long i) {
        Few<T> few;
        few.load(x + i, size.is_vector);
        Real next = largest;
        FOR_EACH_OF(T, size.is_vector, k) {
            if (few.at[k] > next || few.at[k] != few.at[k]) next = few.at[k];
        }
        // NaN stays NaN.
        if (!(next <= largest)) {
            part *= exp(largest - next);
            largest = next;
        }
        if (largest != least) FOR_EACH_OF(T, size.is_vector, k) part += exp(few.at[k] - largest);
    });
    reduce_block<Larger, Add>(largest, 0, pair);
    __syncthreads();
    const Real shift = pair[0];
    __syncthreads();
    reduce_block<Add, Add>(part * exp(largest - shift), 0, pair);
    __syncthreads();
    Sum<Real> result = {shift, (Real)pair[0]};
    return result;
}

template <typename T>
__device__ inline Sum<typename Element<T>::Real> sum_column(const T *x, unsigned long long count,
                                                            unsigned long long inner) {
    typedef typename Element<T>::Real Real;
    Real largest = __uint_as_float(0xff800000u), sum = 0;
    for (unsigned long long i = 0; i < count; i++) {
        const Real value = Element<T>::load(x[i * inner]);
        if (value > largest || value != value) largest = value;
    }
    for (unsigned long long i = 0; i < count; i++) sum += exp(Element<T>::load(x[i * inner]) - largest);
    Sum<Real> result = {largest, sum};
    return result;
}

// `scale` is the logarithm of the sum, or 1 / sum.
template <typename Real> __device__ inline Real softmax_value(Real distance, Real scale, bool is_log) {
    return is_log ? distance - scale : exp(distance) * scale;
}

// tensors: x, y; numbers[3]: whether to take the logarithm; numbers[4]: whether both are aligned. One block per row.
template <typename T> __device__ inline void softmax_rows(const Arguments &by) {
    const Rows &r = ROWS;
    const T *x = TENSOR(const T, 0) + blockIdx.x * r.count;
    T *y = TENSOR(T, 1) + blockIdx.x * r.count;
    const bool is_log = by.numbers[3], are_aligned = by.numbers[4];
    const Sum<typename Element<T>::Real> of = sum_row(x, r.count, are_aligned);
    const typename Element<T>::Real scale = is_log ? log(of.sum) : 1 / of.sum;
    for_each_of_row(x, r.count, are_aligned, [&](auto size, unsigned long long i) {
        Few<T> few;
        few.load(x + i, size.is_vector);
        FOR_EACH_OF(T, size.is_vector, k) few.at[k] = softmax_value(few.at[k] - of.largest, scale, is_log);
        few.store(y + i, size.is_vector);
    });
}
LAYER(softmax_rows)

// The same with one thread per column.
template <typename T> __device__ inline void softmax_columns(const Arguments &by) {
    const Rows &r = ROWS;
    unsigned long long outer = thread_in_grid();
    const unsigned long long column = take(outer, r.inner), start = outer * r.count * r.inner + column;
    if (outer >= r.outer) return;
    const T *x = TENSOR(const T, 0) + start;
    T *y = TENSOR(T, 1) + start;
    const bool is_log = by.numbers[3];
    const Sum<typename Element<T>::Real> of = sum_column(x, r.count, r.inner);
    const typename Element<T>::Real scale = is_log ? log(of.sum) : 1 / of.sum;
    for (unsigned long long i = 0; i < r.count; i++)
        y[i * r.inner] = Element<T>::store(softmax_value(Element<T>::load(x[i * r.inner]) - of.largest, scale, is_log));
}
LAYER(softmax_columns)

template <typename Real> __device__ inline Real softmax_term(Real y, Real dy, bool is_log) {
    return is_log ? dy : y * dy;
}

template <typename Real> __device__ inline Real softmax_slope(Real y, Real dy, Real sum, bool is_log) {
    return is_log ? dy - exp(y) * sum : y * (dy - sum);
}

// tensors: y, dy, dx; numbers[3]: whether y is the logarithm; numbers[4]: whether all are aligned. One block per row.
template <typename T> __device__ inline void softmax_rows_backward(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    __shared__ double pair[2];
    const Rows &r = ROWS;
    const bool is_log = by.numbers[3], are_aligned = by.numbers[4];
    const unsigned long long start = blockIdx.x * r.count;
    const T *__restrict__ y = TENSOR(const T, 0) + start, *__restrict__ dy = TENSOR(const T, 1) + start;
    Real part = 0;
    for_each_of_row(y, r.count, are_aligned, [&](auto size, unsigned long long i) {
        Few<T> few, gradients;
        few.load(y + i, size.is_vector);
        gradients.load(dy + i, size.is_vector);
        FOR_EACH_OF(T, size.is_vector, k) part += softmax_term(few.at[k], gradients.at[k], is_log);
    });
    reduce_block<Add, Add>(part, 0, pair);
    __syncthreads();
    const Real sum = pair[0];
    for_each_of_row(y, r.count, are_aligned, [&](auto size, unsigned long long i) {
        Few<T> few, gradients;
        few.load(y + i, size.is_vector);
        gradients.load(dy + i, size.is_vector);
        FOR_EACH_OF(T, size.is_vector, k) few.at[k] = softmax_slope(few.at[k], gradients.at[k], sum, is_log);
        few.store(TENSOR(T, 2) + start + i, size.is_vector);
    });
}
LAYER(softmax_rows_backward)

// The same with one thread per column.
template <typename T> __device__ inline void softmax_columns_backward(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Rows &r = ROWS;
    const bool is_log = by.numbers[3];
    unsigned long long outer = thread_in_grid();
    const unsigned long long column = take(outer, r.inner), start = outer * r.count * r.inner + column;
    if (outer >= r.outer) return;
    const T *y = TENSOR(const T, 0) + start, *dy = TENSOR(const T, 1) + start;
    Real sum = 0;
    for (unsigned long long i = 0; i < r.count; i++)
        sum += softmax_term<Real>(Element<T>::load(y[i * r.inner]), Element<T>::load(dy[i * r.inner]), is_log);
    for (unsigned long long i = 0; i < r.count; i++)
        TENSOR(T, 2)[start + i * r.inner] = Element<T>::store(
            softmax_slope<Real>(Element<T>::load(y[i * r.inner]), Element<T>::load(dy[i * r.inner]), sum, is_log));
}
LAYER(softmax_columns_backward)

// The cross entropy. A target that is neither a class nor the ignored index makes the loss and the gradient NaN.

// numbers: those of `Rows`, then these; reals: the label smoothing.
struct Losses {
    long long ignore;
    unsigned long long is_mean;
    unsigned long long are_aligned; // whether logits, and their gradient, begin at a multiple of 16
};
#define LOSSES (*reinterpret_cast<const Losses *>(by.numbers + 3))

// The weight of the target's negative log-probability.
template <typename Real>
__device__ inline double share(const Real *weights, unsigned long long classes, long long target, long long ignore) {
    if (target == ignore) return 0;
    if (target < 0 || target >= (long long)classes) return __uint_as_float(0x7fc00000u);
    return weights ? weights[target] : 1;
}

// Writes what is known of a sample: its logits are `distance` apart, `smooth` is the weighted sum of all negative
// log-probabilities.
template <typename T>
__device__ inline void put_loss(const Arguments &by, unsigned long long sample, const T *x, unsigned long long distance,
                                double norm, double smooth) {
    typedef typename Element<T>::Real Real;
    const Rows &r = ROWS;
    const long long target = TENSOR(const long long, 1)[sample];
    const double weight = share(TENSOR(const Real, 2), r.count, target, LOSSES.ignore);
    double loss = weight;
    if (weight == weight && target != LOSSES.ignore)
        loss = weight * (1 - by.reals[0]) * (norm - Element<T>::load(x[target * distance])) + by.reals[0] / r.count * smooth;
    TENSOR(double, 3)[sample] = norm;
    TENSOR(double, 4)[2 * sample] = loss;
    TENSOR(double, 4)[2 * sample + 1] = weight;
}

// tensors: logits, targets (i64), weights of the classes or null, log Σ e^x of each sample (f64), pairs (f64) for each sample:
// its loss, and the weight of its target. One block per sample.
template <typename T> __device__ inline void losses_of_rows(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    __shared__ double pair[2];
    const Rows &r = ROWS;
    const T *x = TENSOR(const T, 0) + blockIdx.x * r.count;
    const Real *weights = TENSOR(const Real, 2);
    const Sum<Real> of = sum_row(x, r.count, LOSSES.are_aligned);
    const double norm = (double)of.largest + log((double)of.sum);
    double smooth = 0;
    if (by.reals[0] > 0) {
        for (unsigned long long i = threadIdx.x; i < r.count; i += THREADS)
            smooth += (weights ? weights[i] : 1) * (norm - Element<T>::load(x[i]));
        __syncthreads();
        reduce_block<Add, Add>(smooth, 0, pair);
    }
    if (threadIdx.x != 0) return;
    if (by.reals[0] > 0) smooth = pair[0];
    put_loss(by, blockIdx.x, x, 1, norm, smooth);
}
LAYER(losses_of_rows)

// The same with one thread per sample.
template <typename T> __device__ inline void losses_of_columns(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Rows &r = ROWS;
    const unsigned long long sample = thread_in_grid();
    unsigned long long outer = sample;
    const unsigned long long column = take(outer, r.inner);
    if (outer >= r.outer) return;
    const T *x = TENSOR(const T, 0) + outer * r.count * r.inner + column;
    const Real *weights = TENSOR(const Real, 2);
    const Sum<Real> of = sum_column(x, r.count, r.inner);
    const double norm = (double)of.largest + log((double)of.sum);
    double smooth = 0;
    if (by.reals[0] > 0)
        for (unsigned long long i = 0; i < r.count; i++)
            smooth += (weights ? weights[i] : 1) * (norm - Element<T>::load(x[i * r.inner]));
    put_loss(by, sample, x, r.inner, norm, smooth);
}
LAYER(losses_of_columns)

// tensors: the pairs, the loss, weights or null, and (f64) the factor of sums over samples and the sum of all
// weights. One block.
template <typename T> __device__ inline void loss_total(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    __shared__ double pair[2];
    const Rows &r = ROWS;
    const Real *weights = TENSOR(const Real, 2);
    double all = r.count, unused = 0;
    if (weights) {
        all = 0;
        for (unsigned long long i = threadIdx.x; i < r.count; i += THREADS) all += weights[i];
        reduce_block<Add, Add>(all, unused, pair);
        if (threadIdx.x == 0) all = pair[0];
        __syncthreads();
    }
    reduce_chunks<Add, Add>(TENSOR(const double, 0), 0, r.outer * r.inner, pair);
    if (threadIdx.x != 0) return;
    const double scale = LOSSES.is_mean ? 1 / pair[1] : 1;
    *TENSOR(T, 1) = Element<T>::store(pair[0] * scale);
    TENSOR(double, 3)[0] = scale;
    TENSOR(double, 3)[1] = all;
}
LAYER(loss_total)

// The gradients of a sample's logits: e^(x − norm) × by_p − each × weight, and less by `own` for the target.
template <typename Real> struct Slopes {
    bool is_ignored;
    long long target;
    Real norm, by_p, each, own;
};

template <typename T> __device__ inline Slopes<typename Element<T>::Real> slopes(const Arguments &by, unsigned long long sample) {
    typedef typename Element<T>::Real Real;
    const Rows &r = ROWS;
    const long long target = TENSOR(const long long, 1)[sample];
    const double factor = Element<T>::load(*TENSOR(const T, 4)) * TENSOR(const double, 5)[0];
    const double weight = share(TENSOR(const Real, 2), r.count, target, LOSSES.ignore);
    const double own = factor * weight * (1 - by.reals[0]), each = factor * by.reals[0] / r.count;
    Slopes<Real> of = {target == LOSSES.ignore, target, (Real)TENSOR(const double, 3)[sample],
                       (Real)(own + each * TENSOR(const double, 5)[1]), (Real)each, (Real)own};
    return of;
}

template <typename Real>
__device__ inline Real loss_slope(const Slopes<Real> &of, const Real *weights, unsigned long long row, Real x) {
    if (of.is_ignored) return 0;
    const Real by_weight = (weights ? of.each * weights[row] : of.each) + ((long long)row == of.target ? of.own : 0);
    return exp(x - of.norm) * of.by_p - by_weight;
}

// tensors: logits, targets, weights or null, log Σ e^x, the gradient of the loss, scale and sum of weights, dx. One block per
// sample.
template <typename T> __device__ inline void loss_rows_backward(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    __shared__ Slopes<Real> shared;
    const Rows &r = ROWS;
    if (threadIdx.x == 0) shared = slopes<T>(by, blockIdx.x);
    __syncthreads();
    const Slopes<Real> of = shared;
    const Real *weights = TENSOR(const Real, 2);
    const unsigned long long start = blockIdx.x * r.count;
    const T *__restrict__ x = TENSOR(const T, 0) + start;
    for_each_of_row(x, r.count, LOSSES.are_aligned, [&](auto size, unsigned long long i) {
        Few<T> few;
        few.load(x + i, size.is_vector);
        FOR_EACH_OF(T, size.is_vector, k) few.at[k] = loss_slope(of, weights, i + k, few.at[k]);
        few.store(TENSOR(T, 6) + start + i, size.is_vector);
    });
}
LAYER(loss_rows_backward)

// The same with one thread per sample.
template <typename T> __device__ inline void loss_columns_backward(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Rows &r = ROWS;
    const unsigned long long sample = thread_in_grid();
    unsigned long long outer = sample;
    const unsigned long long column = take(outer, r.inner);
    if (outer >= r.outer) return;
    const Slopes<Real> of = slopes<T>(by, sample);
    const Real *weights = TENSOR(const Real, 2);
    for (unsigned long long row = 0; row < r.count; row++) {
        const unsigned long long element = (outer * r.count + row) * r.inner + column;
        const Real x = Element<T>::load(TENSOR(const T, 0)[element]);
        TENSOR(T, 6)[element] = Element<T>::store(loss_slope(of, weights, row, x));
    }
}
LAYER(loss_columns_backward)
