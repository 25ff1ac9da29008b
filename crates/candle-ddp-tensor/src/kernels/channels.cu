// Sums and maps over the channels of a batch (samples, channels, spatial): batch normalisation, and the gradient of a
// bias. Per-channel numbers have the dtype of the arithmetic. Sums over a channel are made by `parts` blocks, each of which
// takes `length` neighbouring elements of the channel, and then put together by one thread per channel.

struct Batch {
    unsigned long long samples, channels, spatial, parts, length;
    unsigned long long vector; // elements that a thread takes at once, all of the same sample and channel: those of a `Few`, or 1
};
#define BATCH (*reinterpret_cast<const Batch *>(by.numbers))

// Loops over this thread's elements of this block's part of a channel: `i` is the index in the batch of the first of
// `b.vector` elements.
#define FOR_EACH_OF_PART(b, channel, part, i)                                                                       \
    for (unsigned long long i, at = (part) * (b).length + threadIdx.x * (b).vector,                                 \
                               end_of_part = min((part) * (b).length + (b).length, (b).samples * (b).spatial);      \
         at < end_of_part && (i = index_of(b, channel, at), true); at += THREADS * (b).vector)

__device__ inline unsigned long long index_of(const Batch &b, unsigned long long channel, unsigned long long at) {
    const unsigned long long column = take(at, b.spatial);
    return (at * b.channels + channel) * b.spatial + column;
}

// Like `reduce_block` with sums, but every thread gets the results.
__device__ inline void add_for_all(double &first, double &second) {
    __shared__ double pair[2];
    reduce_block<Add, Add>(first, second, pair);
    __syncthreads();
    first = pair[0];
    second = pair[1];
    __syncthreads();
}

// tensors: x, and pairs (f64) for each channel and part: the part's mean and the sum of squared distances from it. Without
// `centred`, numbers[6], the mean counts as zero.
template <typename T> __device__ inline void moments(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const bool is_vector = b.vector > 1;
    const T *__restrict__ x = TENSOR(const T, 0);
    unsigned long long channel = blockIdx.x;
    const unsigned long long part = take(channel, b.parts);
    const unsigned long long count = min(b.length, b.samples * b.spatial - part * b.length);
    double mean = 0, squares = 0, unused = 0;
    Few<T> few;
    if (by.numbers[6]) {
        Real sum = 0;
        FOR_EACH_OF_PART(b, channel, part, i) {
            few.load(x + i, is_vector);
            FOR_EACH_OF(T, is_vector, k) sum += few.at[k];
        }
        mean = sum;
        add_for_all(mean, unused);
        mean /= count;
    }
    const Real centre = mean;
    Real sum = 0;
    FOR_EACH_OF_PART(b, channel, part, i) {
        few.load(x + i, is_vector);
        FOR_EACH_OF(T, is_vector, k) sum += (few.at[k] - centre) * (few.at[k] - centre);
    }
    squares = sum;
    add_for_all(squares, unused);
    if (threadIdx.x == 0) {
        TENSOR(double, 1)[2 * blockIdx.x] = mean;
        TENSOR(double, 1)[2 * blockIdx.x + 1] = squares;
    }
}
LAYER(moments)

// The dtypes of tensors whose dtype may differ from the batch's: f32, f64, f16 and bf16 by their numbers, four bits for each.
template <typename Real>
__device__ inline Real get(const void *tensor, unsigned long long dtype, unsigned long long i) {
    switch (dtype & 15) {
    case 0: return static_cast<const float *>(tensor)[i];
    case 1: return static_cast<const double *>(tensor)[i];
    case 2: return to_f32(static_cast<const F16 *>(tensor)[i]);
    default: return to_f32(static_cast<const BF16 *>(tensor)[i]);
    }
}

template <typename Real>
__device__ inline void put(void *tensor, unsigned long long dtype, unsigned long long i, Real value) {
    switch (dtype & 15) {
    case 0: static_cast<float *>(tensor)[i] = value; break;
    case 1: static_cast<double *>(tensor)[i] = value; break;
    case 2: static_cast<F16 *>(tensor)[i] = to_f16(value); break;
    default: static_cast<BF16 *>(tensor)[i] = to_bf16(value);
    }
}

// running = running × (1 − momentum) + newest × momentum
template <typename Real>
__device__ inline void mix(void *running, unsigned long long dtype, unsigned long long i, Real newest, Real momentum) {
    put<Real>(running, dtype, i, get<Real>(running, dtype, i) * (1 - momentum) + newest * momentum);
}

// Where the statistics come from, numbers[7].
#define OF_BATCH 0   // tensor 0: the pairs of `moments`
#define GIVEN 1      // tensors 0, 6 and 7: means, variances and the number of values
#define OF_RUNNING 2 // the running statistics

// tensors: see above; the result (5, channels): mean, variance, 1 / deviation, scale and shift; weight and bias, or null for 1 and
// 0; running mean and variance, or null. numbers[6]: the dtypes of the last four; numbers[8]: whether the running mean is updated
// too; reals: eps, momentum. Unless they are the statistics, running statistics are updated. Parts are put together as Chan, Golub
// and LeVeque do (1979). One thread per channel.
template <typename T> __device__ inline void statistics(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const unsigned long long channel = thread_in_grid(), dtypes = by.numbers[6];
    if (channel >= b.channels) return;
    double count = b.samples * b.spatial, middle = 0, squares = 0;
    if (by.numbers[7] == OF_BATCH) {
        const double *pairs = TENSOR(const double, 0) + 2 * channel * b.parts;
        for (unsigned long long part = 0; part < b.parts; part++) {
            const double before = part * b.length, here = min(b.length, b.samples * b.spatial - part * b.length);
            const double distance = pairs[2 * part] - middle;
            middle += distance * here / (before + here);
            squares += pairs[2 * part + 1] + distance * distance * before * here / (before + here);
        }
        squares /= count;
    } else if (by.numbers[7] == GIVEN) {
        middle = TENSOR(const Real, 0)[channel];
        squares = TENSOR(const Real, 6)[channel];
        count = *TENSOR(const Real, 7);
    } else {
        middle = get<Real>(by.tensors[4], dtypes >> 8, channel);
        squares = get<Real>(by.tensors[5], dtypes >> 12, channel);
    }
    const Real mean = middle, variance = squares, momentum = by.reals[1];
    const Real inverse = 1 / sqrt(variance + Real(by.reals[0]));
    const Real weight = by.tensors[2] ? get<Real>(by.tensors[2], dtypes, channel) : 1;
    const Real bias = by.tensors[3] ? get<Real>(by.tensors[3], dtypes >> 4, channel) : 0;
    const Real rows[5] = {mean, variance, inverse, weight * inverse, bias};
    for (int row = 0; row < 5; row++) TENSOR(Real, 1)[row * b.channels + channel] = rows[row];
    if (by.numbers[7] == OF_RUNNING || !by.tensors[5]) return;
    if (by.numbers[8]) mix(by.tensors[4], dtypes >> 8, channel, mean, momentum);
    mix<Real>(by.tensors[5], dtypes >> 12, channel, variance * (count / (count - 1)), momentum);
}
LAYER(statistics)

// What a ReLU leaves of a gradient.
template <typename Real> __device__ inline Real gated(Real value, Real gradient) { return value > 0 ? gradient : 0; }

// tensors: x, and pairs (f64) for each channel and part: the part's sum, and 0.
template <typename T> __device__ inline void channel_sums(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const bool is_vector = b.vector > 1;
    const T *__restrict__ x = TENSOR(const T, 0);
    unsigned long long channel = blockIdx.x;
    const unsigned long long part = take(channel, b.parts);
    Real sum = 0;
    Few<T> few;
    FOR_EACH_OF_PART(b, channel, part, i) {
        few.load(x + i, is_vector);
        FOR_EACH_OF(T, is_vector, k) sum += few.at[k];
    }
    reduce_block<Add, Add>(sum, 0, TENSOR(double, 1) + 2 * blockIdx.x);
}
LAYER(channel_sums)

// tensors: x, pairs (f64) for each channel and part: Σ dy and Σ dy · (x − mean); dy, mean, and null or scale and shift of a
// normalisation with a ReLU behind it, which lets dy through where its input was positive.
template <typename T> __device__ inline void gradient_sums(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const bool is_vector = b.vector > 1;
    const T *__restrict__ x = TENSOR(const T, 0), *__restrict__ dy = TENSOR(const T, 2);
    unsigned long long channel = blockIdx.x;
    const unsigned long long part = take(channel, b.parts);
    const bool gate = by.tensors[4];
    const Real mean = TENSOR(const Real, 3)[channel];
    const Real scale = gate ? TENSOR(const Real, 4)[channel] : 0, shift = gate ? TENSOR(const Real, 5)[channel] : 0;
    Real plain = 0, weighted = 0;
    Few<T> few, gradients;
    FOR_EACH_OF_PART(b, channel, part, i) {
        few.load(x + i, is_vector);
        gradients.load(dy + i, is_vector);
        FOR_EACH_OF(T, is_vector, k) {
            const Real distance = few.at[k] - mean;
            const Real gradient = gate ? gated(distance * scale + shift, gradients.at[k]) : gradients.at[k];
            plain += gradient;
            weighted += gradient * distance;
        }
    }
    reduce_block<Add, Add>(plain, weighted, TENSOR(double, 1) + 2 * blockIdx.x);
}
LAYER(gradient_sums)

// tensors: the pairs of `channel_sums`, and the sums of their first numbers over the parts. One thread per channel.
template <typename T> __device__ inline void sums_totals(const Arguments &by) {
    const Batch &b = BATCH;
    const unsigned long long channel = thread_in_grid();
    if (channel >= b.channels) return;
    const double *pairs = TENSOR(const double, 0) + 2 * channel * b.parts;
    double sum = 0;
    for (unsigned long long part = 0; part < b.parts; part++) sum += pairs[2 * part];
    TENSOR(T, 1)[channel] = Element<T>::store(sum);
}
LAYER(sums_totals)

// tensors: the pairs of `gradient_sums`, or null if the sums are given; (4, channels): Σ dy and Σ dy · (x − mean), then a and b of
// `input_gradient`; the gradients of weight and bias, or null; 1 / deviation; the number of values, or null for the batch's.
// numbers[6]: the dtypes of both gradients; numbers[7]: whether the mean was subtracted; numbers[8]: whether the statistics are
// constants. One thread per channel.
template <typename T> __device__ inline void gradient_totals(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const unsigned long long channel = thread_in_grid(), dtypes = by.numbers[6];
    if (channel >= b.channels) return;
    Real *rows = TENSOR(Real, 1) + channel;
    if (by.tensors[0]) {
        const double *pairs = TENSOR(const double, 0) + 2 * channel * b.parts;
        double first = 0, second = 0;
        for (unsigned long long part = 0; part < b.parts; part++) {
            first += pairs[2 * part];
            second += pairs[2 * part + 1];
        }
        rows[0] = first;
        rows[b.channels] = second;
    }
    const Real plain = rows[0], weighted = rows[b.channels], inverse = TENSOR(const Real, 4)[channel];
    const Real count = by.tensors[5] ? *TENSOR(const Real, 5) : Real(b.samples * b.spatial);
    if (by.tensors[2]) put<Real>(by.tensors[2], dtypes, channel, weighted * inverse);
    if (by.tensors[3]) put<Real>(by.tensors[3], dtypes >> 4, channel, plain);
    rows[2 * b.channels] = by.numbers[8] || !by.numbers[7] ? 0 : plain / count;
    rows[3 * b.channels] = by.numbers[8] ? 0 : weighted / count * (inverse * inverse);
}
LAYER(gradient_totals)

// The first element of this thread, and its channel.
struct Start {
    unsigned long long i, channel;
    bool exists;

    __device__ Start(const Batch &b) : i(thread_in_grid() * b.vector) {
        unsigned long long rest = i;
        take(rest, b.spatial);
        channel = take(rest, b.channels);
        exists = rest < b.samples;
    }
};

// tensors: x, y, mean, scale, shift, and null or z: y = (x − mean) × scale + shift (+ z), with a ReLU if numbers[6]. One thread
// per vector.
template <typename T> __device__ inline void normalise(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Start at(BATCH);
    if (!at.exists) return;
    const bool is_vector = BATCH.vector > 1, relu = by.numbers[6], has_z = by.tensors[5];
    const Real mean = TENSOR(const Real, 2)[at.channel], scale = TENSOR(const Real, 3)[at.channel];
    const Real shift = TENSOR(const Real, 4)[at.channel];
    Few<T> x, z;
    x.load(TENSOR(const T, 0) + at.i, is_vector);
    if (has_z) z.load(TENSOR(const T, 5) + at.i, is_vector);
    FOR_EACH_OF(T, is_vector, k) {
        Real value = (x.at[k] - mean) * scale + shift;
        if (has_z) value += z.at[k];
        // NaN stays NaN.
        x.at[k] = relu && value < 0 ? 0 : value;
    }
    x.store(TENSOR(T, 1) + at.i, is_vector);
}
LAYER(normalise)

// tensors: x, the gradient of z, mean, scale, shift, z, dy: what the ReLU behind (x − mean) × scale + shift + z leaves of dy. One
// thread per vector.
template <typename T> __device__ inline void add_relu_gradient(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Start at(BATCH);
    if (!at.exists) return;
    const bool is_vector = BATCH.vector > 1;
    const Real mean = TENSOR(const Real, 2)[at.channel], scale = TENSOR(const Real, 3)[at.channel];
    const Real shift = TENSOR(const Real, 4)[at.channel];
    Few<T> x, z, dy;
    x.load(TENSOR(const T, 0) + at.i, is_vector);
    z.load(TENSOR(const T, 5) + at.i, is_vector);
    dy.load(TENSOR(const T, 6) + at.i, is_vector);
    FOR_EACH_OF(T, is_vector, k) dy.at[k] = gated((x.at[k] - mean) * scale + shift + z.at[k], dy.at[k]);
    dy.store(TENSOR(T, 1) + at.i, is_vector);
}
LAYER(add_relu_gradient)

// tensors: x, dx, mean, scale, a, b, dy, and null or the shift of a normalisation with a ReLU behind it:
// dx = scale × (dy − a − (x − mean) × b). One thread per vector.
template <typename T> __device__ inline void input_gradient(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Start at(BATCH);
    if (!at.exists) return;
    const bool is_vector = BATCH.vector > 1, gate = by.tensors[7];
    const Real mean = TENSOR(const Real, 2)[at.channel], scale = TENSOR(const Real, 3)[at.channel];
    const Real a = TENSOR(const Real, 4)[at.channel], b = TENSOR(const Real, 5)[at.channel];
    const Real shift = gate ? TENSOR(const Real, 7)[at.channel] : 0;
    Few<T> x, dy;
    x.load(TENSOR(const T, 0) + at.i, is_vector);
    dy.load(TENSOR(const T, 6) + at.i, is_vector);
    FOR_EACH_OF(T, is_vector, k) {
        const Real distance = x.at[k] - mean;
        const Real gradient = gate ? gated(distance * scale + shift, dy.at[k]) : dy.at[k];
        x.at[k] = scale * (gradient - a - distance * b);
    }
    x.store(TENSOR(T, 1) + at.i, is_vector);
}
LAYER(input_gradient)
