// Softmax, its logarithm, and the cross entropy, over the middle dimension of (outer, count, inner). Where inner is 1, a
// few warps take a row; otherwise a thread takes a vector of columns, or one.

struct Rows {
    unsigned long long outer, count, inner;
};
#define ROWS (*reinterpret_cast<const Rows *>(by.numbers))

// The maximum m of a row and Σ e^(x − m), for all threads that have it.
template <typename Real> struct Sum {
    Real largest, sum;
};

// Places `of` in a row of `x`, which may begin anywhere: `stride` elements behind the one before. Vectors are loaded if all tensors
// `are_aligned`: rows then begin alike in all of them.
template <typename T>
__device__ inline Span aligned(Span of, const T *x, unsigned long long stride, unsigned long long are_aligned) {
    if (are_aligned) {
        const unsigned long long most = Few<T>::most, start = (unsigned long long)(x + of.row * stride) / sizeof(T) % most;
        of.head = min(of.count, (most - start) % most);
        of.tail = of.head + (of.count - of.head) / most * most;
    }
    return of;
}

// This thread's place in its row of `x`, whose rows are adjacent.
template <typename T>
__device__ inline Span span_of(const Rows &r, const T *x, unsigned long long are_aligned, unsigned lanes) {
    return aligned(span(r.outer, r.count, lanes), x, r.count, are_aligned);
}

// Reads the row once: each thread adjusts its sum when it finds a larger element. A NaN is not the largest; it makes the sum NaN.
template <typename T> __device__ inline Sum<typename Element<T>::Real> sum_row(const Span &of, const Row<T> &x) {
    typedef typename Element<T>::Real Real;
    const Real least = __uint_as_float(0xff800000u);
    Real largest = least, part = 0;
    // Returns the shift of all further elements, once `next` is the largest.
    const auto rise = [&](Real next) {
        part *= largest == next ? 1 : exponential<T>(largest - next);
        largest = next;
        return largest == least ? 0 : largest;
    };
    for_each_set(of, [&](unsigned long long i, const Vectors<T> &set) {
        Real next = largest;
        for_each_vector(of, i, [&](auto, auto, const Few<T> &few) {
            FOR_EACH_OF(T, true, k) next = fmax(next, few.at[k]);
        }, set);
        const Real shift = rise(next);
        for_each_vector(of, i, [&](auto, auto, const Few<T> &few) {
            FOR_EACH_OF(T, true, k) part += exponential<T>(few.at[k] - shift);
        }, set);
    }, [&](Real value) {
        const Real shift = rise(fmax(largest, value));
        part += exponential<T>(value - shift);
    }, x);
    const Real all = reduce_row<0, Larger>(of, largest);
    Sum<Real> result = {all, reduce_row<1, Add>(of, part * exponential<T>(largest - all))};
    return result;
}

// A thread's neighbouring columns, of which `vector` are whole vectors or one: the first, its place in the tensors, and the distance
// from each row to the next.
struct Columns {
    unsigned long long column, start, step;
    bool is_vector, is_there;
};

__device__ inline Columns columns_of(const Rows &r, unsigned long long vector) {
    unsigned long long outer = thread_in_grid();
    const unsigned long long column = take(outer, r.inner / vector) * vector;
    Columns of = {outer * r.inner + column, outer * r.count * r.inner + column, r.inner, vector > 1, outer < r.outer};
    return of;
}

// The maxima and sums of columns from `x` on. A NaN is not the largest; it makes the sum NaN.
template <typename T>
__device__ inline void sum_columns(const Columns &of, const T *x, unsigned long long count, Few<T> &largest, Few<T> &sum) {
    const bool is_vector = of.is_vector;
    Few<T> few;
    FOR_EACH_OF(T, is_vector, k) {
        largest.at[k] = __uint_as_float(0xff800000u);
        sum.at[k] = 0;
    }
    for (unsigned long long i = 0; i < count; i++) {
        few.load(x + i * of.step, is_vector);
        FOR_EACH_OF(T, is_vector, k) largest.at[k] = fmax(largest.at[k], few.at[k]);
    }
    for (unsigned long long i = 0; i < count; i++) {
        few.load(x + i * of.step, is_vector);
        FOR_EACH_OF(T, is_vector, k) sum.at[k] += exponential<T>(few.at[k] - largest.at[k]);
    }
}

// `scale` is the logarithm of the sum, or 1 / sum.
template <typename T, typename Real> __device__ inline Real softmax_value(Real distance, Real scale, bool is_log) {
    return is_log ? distance - scale : exponential<T>(distance) * scale;
}

// tensors: x, y; numbers[3]: whether to take the logarithm; numbers[4]: whether both are aligned; numbers[5]: the threads of a row.
template <typename T> __device__ inline void softmax_rows(const Arguments &by) {
    const Rows &r = ROWS;
    const bool is_log = by.numbers[3];
    const Span row = span_of(r, TENSOR(const T, 0), by.numbers[4], by.numbers[5]);
    const Row<T> x(TENSOR(const T, 0), row, r.count);
    T *y = TENSOR(T, 1) + row.row * r.count;
    const Sum<typename Element<T>::Real> of = sum_row(row, x);
    const typename Element<T>::Real scale = is_log ? log(of.sum) : 1 / of.sum;
    for_each_of_row(row, [&](auto size, unsigned long long i, Few<T> few) {
        FOR_EACH_OF(T, size.is_vector, k) few.at[k] = softmax_value<T>(few.at[k] - of.largest, scale, is_log);
        few.store(y + i, size.is_vector);
    }, x);
}
LAYER(softmax_rows)

// The same with one thread per vector of columns; numbers[4]: the columns of a thread.
template <typename T> __device__ inline void softmax_columns(const Arguments &by) {
    const Rows &r = ROWS;
    const Columns of = columns_of(r, by.numbers[4]);
    if (!of.is_there) return;
    const T *x = TENSOR(const T, 0) + of.start;
    T *y = TENSOR(T, 1) + of.start;
    const bool is_log = by.numbers[3], is_vector = of.is_vector;
    Few<T> few, largest, scale;
    sum_columns(of, x, r.count, largest, scale);
    FOR_EACH_OF(T, is_vector, k) scale.at[k] = is_log ? log(scale.at[k]) : 1 / scale.at[k];
    for (unsigned long long i = 0; i < r.count; i++) {
        few.load(x + i * of.step, is_vector);
        FOR_EACH_OF(T, is_vector, k) few.at[k] = softmax_value<T>(few.at[k] - largest.at[k], scale.at[k], is_log);
        few.store(y + i * of.step, is_vector);
    }
}
LAYER(softmax_columns)

template <typename Real> __device__ inline Real softmax_term(Real y, Real dy, bool is_log) {
    return is_log ? dy : y * dy;
}

template <typename T, typename Real> __device__ inline Real softmax_slope(Real y, Real dy, Real sum, bool is_log) {
    return is_log ? dy - exponential<T>(y) * sum : y * (dy - sum);
}

// tensors: y, dy, dx; numbers[3]: whether y is the logarithm; numbers[4]: whether all are aligned; numbers[5]: the threads of a row.
template <typename T> __device__ inline void softmax_rows_backward(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Rows &r = ROWS;
    const bool is_log = by.numbers[3];
    const Span of = span_of(r, TENSOR(const T, 0), by.numbers[4], by.numbers[5]);
    const Row<T> y(TENSOR(const T, 0), of, r.count), dy(TENSOR(const T, 1), of, r.count);
    T *dx = TENSOR(T, 2) + of.row * r.count;
    Real part = 0;
    for_each_of_row(of, [&](auto size, unsigned long long, const Few<T> &few, const Few<T> &gradients) {
        FOR_EACH_OF(T, size.is_vector, k) part += softmax_term(few.at[k], gradients.at[k], is_log);
    }, y, dy);
    const Real sum = reduce_row<0, Add>(of, part);
    for_each_of_row(of, [&](auto size, unsigned long long i, Few<T> few, const Few<T> &gradients) {
        FOR_EACH_OF(T, size.is_vector, k) few.at[k] = softmax_slope<T>(few.at[k], gradients.at[k], sum, is_log);
        few.store(dx + i, size.is_vector);
    }, y, dy);
}
LAYER(softmax_rows_backward)

// The same with one thread per vector of columns; numbers[4]: the columns of a thread.
template <typename T> __device__ inline void softmax_columns_backward(const Arguments &by) {
    const Rows &r = ROWS;
    const Columns of = columns_of(r, by.numbers[4]);
    if (!of.is_there) return;
    const T *y = TENSOR(const T, 0) + of.start, *dy = TENSOR(const T, 1) + of.start;
    T *dx = TENSOR(T, 2) + of.start;
    const bool is_log = by.numbers[3], is_vector = of.is_vector;
    Few<T> few, gradients, sums;
    FOR_EACH_OF(T, is_vector, k) sums.at[k] = 0;
    for (unsigned long long i = 0; i < r.count; i++) {
        few.load(y + i * of.step, is_vector);
        gradients.load(dy + i * of.step, is_vector);
        FOR_EACH_OF(T, is_vector, k) sums.at[k] += softmax_term(few.at[k], gradients.at[k], is_log);
    }
    for (unsigned long long i = 0; i < r.count; i++) {
        few.load(y + i * of.step, is_vector);
        gradients.load(dy + i * of.step, is_vector);
        FOR_EACH_OF(T, is_vector, k) few.at[k] = softmax_slope<T>(few.at[k], gradients.at[k], sums.at[k], is_log);
        few.store(dx + i * of.step, is_vector);
    }
}
LAYER(softmax_columns_backward)

// The cross entropy. A target that is neither a class nor the ignored index makes the loss and the gradient NaN.

// numbers: those of `Rows`, then these; reals: the label smoothing.
struct Losses {
    long long ignore;
    unsigned long long is_mean;
    unsigned long long are_aligned; // whether logits, and their gradient, begin at a multiple of 16
    unsigned long long lanes;       // the threads of a row
    unsigned long long vector;      // the columns of a thread
    unsigned long long stride;      // elements from the beginning of one row to that of the next
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
    if (by.tensors[3]) TENSOR(double, 3)[sample] = norm;
    TENSOR(double, 4)[2 * sample] = loss;
    TENSOR(double, 4)[2 * sample + 1] = weight;
}

// The gradients of a sample's logits: e^(x − norm) × by_p − each × weight, and less by `own` for the target.
template <typename Real> struct Slopes {
    bool is_ignored;
    long long target;
    Real norm, by_p, each, own;
};

// `factor` is that of the sum of losses; `all` is the sum of the classes' weights.
template <typename Real>
__device__ inline Slopes<Real> slopes(const Arguments &by, unsigned long long sample, double norm, double factor, double all) {
    const Rows &r = ROWS;
    const long long target = TENSOR(const long long, 1)[sample];
    const double weight = share(TENSOR(const Real, 2), r.count, target, LOSSES.ignore);
    const double own = factor * weight * (1 - by.reals[0]), each = factor * by.reals[0] / r.count;
    Slopes<Real> of = {target == LOSSES.ignore, target, (Real)norm, (Real)(own + each * all), (Real)each, (Real)own};
    return of;
}

template <typename T, typename Real>
__device__ inline Real loss_slope(const Slopes<Real> &of, const Real *weights, unsigned long long row, Real x) {
    if (of.is_ignored) return 0;
    const Real by_weight = (weights ? of.each * weights[row] : of.each) + ((long long)row == of.target ? of.own : 0);
    return exponential<T>(x - of.norm) * of.by_p - by_weight;
}

// A mean's factor is divided between the logits' gradients and those of what they were computed from: in f16, gradients of the logits
// that are divided by the number of samples would vanish. Infinite factors must meet the zeros of samples that are ignored first.
__device__ inline double factor_of_logits(double scale) { return isinf(scale) ? scale : 1; }
__device__ inline double factor_of_rest(double scale) { return isinf(scale) ? 1 : scale; }

// `has_slopes`: whether the gradients of the logits are written over them. Apart, since the losses alone need few registers, so that more
// blocks run at once.
template <typename T, bool has_slopes> __device__ inline void losses_of(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Rows &r = ROWS;
    const unsigned long long stride = LOSSES.stride;
    const Real *weights = TENSOR(const Real, 2);
    const Span row = aligned<T>(span(r.outer, r.count, LOSSES.lanes), TENSOR(const T, 0), stride, LOSSES.are_aligned);
    T *logits = TENSOR(T, 0) + row.row * stride;
    const Row<T> x(TENSOR(const T, 0), row, stride);
    const Sum<Real> of = sum_row(row, x);
    const double norm = (double)of.largest + log((double)of.sum);
    double smooth = 0;
    if (by.reals[0] > 0) {
        for_each_few_of_row(row, logits, [&](auto size, unsigned long long i, const Few<T> &few) {
            FOR_EACH_OF(T, size.is_vector, k) smooth += (weights ? weights[i + k] : 1) * (norm - few.at[k]);
        });
        smooth = reduce_row<2, Add>(row, smooth);
    }
    if (row.lane == 0 && row.count > 0) put_loss(by, row.row, logits, 1, norm, smooth);
    if constexpr (has_slopes) {
        // Before the target's logit is overwritten.
        __syncthreads();
        if (row.count == 0) return;
        const double *scale = TENSOR(const double, 5);
        const Slopes<Real> each = slopes<Real>(by, row.row, norm, factor_of_logits(scale[0]), scale[1]);
        for_each_of_row(row, [&](auto size, unsigned long long i, Few<T> few) {
            FOR_EACH_OF(T, size.is_vector, k) few.at[k] = loss_slope<T>(each, weights, i + k, few.at[k]);
            few.store(logits + i, size.is_vector);
        }, x);
    }
}

// tensors: logits, targets (i64), weights of the classes or null, log Σ e^x of each sample (f64) or null, and pairs (f64) for each sample:
// its loss, and the weight of its target. A few warps per sample.
template <typename T> __device__ inline void losses_of_rows(const Arguments &by) { losses_of<T, false>(by); }
LAYER(losses_of_rows)

// tensors: as above, and the factor of sums over samples and the sum of all weights (f64). The gradients of the logits are written over
// them. What is between rows stays as it is.
template <typename T> __device__ inline void losses_and_slopes_of_rows(const Arguments &by) { losses_of<T, true>(by); }
LAYER(losses_and_slopes_of_rows)

// The same with one thread per vector of samples.
template <typename T> __device__ inline void losses_of_columns(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Rows &r = ROWS;
    const Columns of = columns_of(r, LOSSES.vector);
    if (!of.is_there) return;
    const T *x = TENSOR(const T, 0) + of.start;
    const Real *weights = TENSOR(const Real, 2);
    const bool is_vector = of.is_vector;
    Few<T> few, largest, sums;
    sum_columns(of, x, r.count, largest, sums);
    double norms[Few<T>::most], smooth[Few<T>::most];
    FOR_EACH_OF(T, is_vector, k) {
        norms[k] = (double)largest.at[k] + log((double)sums.at[k]);
        smooth[k] = 0;
    }
    if (by.reals[0] > 0) {
        for (unsigned long long i = 0; i < r.count; i++) {
            few.load(x + i * of.step, is_vector);
            FOR_EACH_OF(T, is_vector, k) smooth[k] += (weights ? weights[i] : 1) * (norms[k] - few.at[k]);
        }
    }
    FOR_EACH_OF(T, is_vector, k) put_loss(by, of.column + k, x + k, of.step, norms[k], smooth[k]);
}
LAYER(losses_of_columns)

// Writes the factor of sums over samples, whose targets have the weight `of_targets`, and the sum of the classes' weights. Returns the factor.
template <typename Real> __device__ inline double put_scale(const Arguments &by, const Real *weights, double of_targets) {
    __shared__ double pair[2];
    const Rows &r = ROWS;
    double all = r.count, unused = 0;
    if (weights) {
        all = 0;
        for (unsigned long long i = threadIdx.x; i < r.count; i += THREADS) all += weights[i];
        reduce_block<Add, Add>(all, unused, pair);
        __syncthreads();
        all = pair[0];
    }
    const double scale = LOSSES.is_mean ? 1 / of_targets : 1;
    if (threadIdx.x == 0) {
        TENSOR(double, 3)[0] = scale;
        TENSOR(double, 3)[1] = all;
    }
    return scale;
}

// Of the dtype of the loss, f32 or f64. tensors: the pairs, the loss, weights or null, and (f64) the factor of sums over samples and the
// sum of all weights. One block.
template <typename T> __device__ inline void loss_total(const Arguments &by) {
    __shared__ double pair[2];
    reduce_chunks<Add, Add>(TENSOR(const double, 0), 0, ROWS.outer * ROWS.inner, pair);
    __syncthreads();
    const double scale = put_scale(by, TENSOR(const typename Element<T>::Real, 2), pair[1]);
    if (threadIdx.x == 0) *TENSOR(T, 1) = Element<T>::store(pair[0] * scale);
}
LAYER(loss_total)

// The factor and the sum that `loss_total` finds, before there are losses. tensors as there, but the targets (i64) instead of the pairs.
template <typename T> __device__ inline void loss_scale(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    __shared__ double pair[2];
    const Real *weights = TENSOR(const Real, 2);
    double sum = 0, unused = 0;
    for (unsigned long long i = threadIdx.x; i < ROWS.outer; i += THREADS)
        sum += share(weights, ROWS.count, TENSOR(const long long, 0)[i], LOSSES.ignore);
    reduce_block<Add, Add>(sum, unused, pair);
    __syncthreads();
    put_scale(by, weights, pair[0]);
}
LAYER(loss_scale)

// tensors: the gradient of the loss, the factor of sums over samples (f64), and the scalars of products of the logits' gradients:
// what these are multiplied by, and a zero. One block. Of the dtype of the loss.
template <typename T> __device__ inline void loss_factor(const Arguments &by) {
    if (threadIdx.x > 0) return;
    const double gradient = Element<T>::load(*TENSOR(const T, 0));
    TENSOR(T, 2)[0] = Element<T>::store(gradient * factor_of_rest(*TENSOR(const double, 1)));
    TENSOR(T, 2)[1] = Element<T>::store(0);
}
LAYER(loss_factor)

// tensors: sums of the dtype of the arithmetic, what `loss_factor` wrote, and the gradient; numbers: its elements, and those of a thread: a
// whole vector, or one.
template <typename T> __device__ inline void scale_sums(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const unsigned long long vector = by.numbers[1], i = thread_in_grid() * vector;
    if (i >= by.numbers[0]) return;
    const Real factor = *TENSOR(const Real, 1);
    Few<T> few;
    few.load(TENSOR(const Real, 0) + i, vector > 1);
    FOR_EACH_OF(T, vector > 1, k) few.at[k] *= factor;
    few.store(TENSOR(T, 2) + i, vector > 1);
}
LAYER(scale_sums)

template <typename T> __device__ inline Slopes<typename Element<T>::Real> known_slopes(const Arguments &by, unsigned long long sample) {
    typedef typename Element<T>::Real Real;
    const double *scale = TENSOR(const double, 5);
    return slopes<Real>(by, sample, TENSOR(const double, 3)[sample], *TENSOR(const Real, 4) * scale[0], scale[1]);
}

// tensors: logits, targets, weights or null, log Σ e^x, the gradient of the loss, scale and sum of weights, dx. A few
// warps per sample.
template <typename T> __device__ inline void loss_rows_backward(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Rows &r = ROWS;
    const Span row = span_of(r, TENSOR(const T, 0), LOSSES.are_aligned, LOSSES.lanes);
    if (row.count == 0) return;
    const Row<T> x(TENSOR(const T, 0), row, r.count);
    const Slopes<Real> of = known_slopes<T>(by, row.row);
    const Real *weights = TENSOR(const Real, 2);
    T *dx = TENSOR(T, 6) + row.row * r.count;
    for_each_of_row(row, [&](auto size, unsigned long long i, Few<T> few) {
        FOR_EACH_OF(T, size.is_vector, k) few.at[k] = loss_slope<T>(of, weights, i + k, few.at[k]);
        few.store(dx + i, size.is_vector);
    }, x);
}
LAYER(loss_rows_backward)

// The same with one thread per vector of samples.
template <typename T> __device__ inline void loss_columns_backward(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Rows &r = ROWS;
    const Columns of = columns_of(r, LOSSES.vector);
    if (!of.is_there) return;
    const T *x = TENSOR(const T, 0) + of.start;
    T *dx = TENSOR(T, 6) + of.start;
    const Real *weights = TENSOR(const Real, 2);
    const bool is_vector = of.is_vector;
    Slopes<Real> each[Few<T>::most];
    FOR_EACH_OF(T, is_vector, k) each[k] = known_slopes<T>(by, of.column + k);
    Few<T> few;
    for (unsigned long long row = 0; row < r.count; row++) {
        few.load(x + row * of.step, is_vector);
        FOR_EACH_OF(T, is_vector, k) few.at[k] = loss_slope<T>(each[k], weights, row, few.at[k]);
        few.store(dx + row * of.step, is_vector);
    }
}
LAYER(loss_columns_backward)
