// Sums and maps over the channels of a batch (samples, channels, spatial): batch normalisation, and the gradient of a
// bias. Per-channel numbers have the dtype of the arithmetic. Sums over a channel are made by `parts` blocks, each of which
// takes `length` neighbouring elements of the channel, and then put together by one thread per channel.

struct Batch {
    unsigned long long samples, channels, spatial, parts, length;
};
#define BATCH (*reinterpret_cast<const Batch *>(by.numbers))

// Loops over this thread's elements of this block's part of a channel: `i` is its index in the batch.
#define FOR_EACH_OF_PART(b, channel, part, i)                                                                       \
    for (unsigned long long i, at = (part) * (b).length + threadIdx.x,                                              \
                               end_of_part = min((part) * (b).length + (b).length, (b).samples * (b).spatial);      \
         at < end_of_part && (i = index_of(b, channel, at), true); at += THREADS)

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
// `centred`, numbers[5], the mean counts as zero.
template <typename T> __device__ inline void moments(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const T *x = TENSOR(const T, 0);
    unsigned long long channel = blockIdx.x;
    const unsigned long long part = take(channel, b.parts);
    const unsigned long long count = min(b.length, b.samples * b.spatial - part * b.length);
    double mean = 0, squares = 0, unused = 0;
    if (by.numbers[5]) {
        Real sum = 0;
        FOR_EACH_OF_PART(b, channel, part, i) sum += Element<T>::load(x[i]);
        mean = sum;
        add_for_all(mean, unused);
        mean /= count;
    }
    const Real centre = mean;
    Real sum = 0;
    FOR_EACH_OF_PART(b, channel, part, i) {
        const Real distance = Element<T>::load(x[i]) - centre;
        sum += distance * distance;
    }
    squares = sum;
    add_for_all(squares, unused);
    if (threadIdx.x == 0) {
        TENSOR(double, 1)[2 * blockIdx.x] = mean;
        TENSOR(double, 1)[2 * blockIdx.x + 1] = squares;
    }
}
LAYER(moments)

// tensors: the pairs of `moments`, and the means and variances (2, channels). Parts are put together as Chan, Golub and
// LeVeque do (1979). One thread per channel.
template <typename T> __device__ inline void moments_totals(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const unsigned long long channel = thread_in_grid(), total = b.samples * b.spatial;
    if (channel >= b.channels) return;
    const double *pairs = TENSOR(const double, 0) + 2 * channel * b.parts;
    double mean = 0, squares = 0;
    for (unsigned long long part = 0; part < b.parts; part++) {
        const double before = part * b.length, count = min(b.length, total - part * b.length);
        const double distance = pairs[2 * part] - mean;
        mean += distance * count / (before + count);
        squares += pairs[2 * part + 1] + distance * distance * before * count / (before + count);
    }
    TENSOR(Real, 1)[channel] = mean;
    TENSOR(Real, 1)[b.channels + channel] = squares / total;
}
LAYER(moments_totals)

// What a ReLU leaves of a gradient.
template <typename Real> __device__ inline Real gated(Real value, Real gradient) { return value > 0 ? gradient : 0; }

// tensors: x, and pairs (f64) for each channel and part: the part's sum, and 0.
template <typename T> __device__ inline void channel_sums(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const T *x = TENSOR(const T, 0);
    unsigned long long channel = blockIdx.x;
    const unsigned long long part = take(channel, b.parts);
    Real sum = 0;
    FOR_EACH_OF_PART(b, channel, part, i) sum += Element<T>::load(x[i]);
    reduce_block<Add, Add>(sum, 0, TENSOR(double, 1) + 2 * blockIdx.x);
}
LAYER(channel_sums)

// tensors: x, pairs (f64) for each channel and part: Σ dy and Σ dy · (x − mean); dy, mean, and null or scale and shift of a
// normalisation with a ReLU behind it, which lets dy through where its input was positive.
template <typename T> __device__ inline void gradient_sums(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const T *x = TENSOR(const T, 0), *dy = TENSOR(const T, 2);
    unsigned long long channel = blockIdx.x;
    const unsigned long long part = take(channel, b.parts);
    const bool gate = by.tensors[4];
    const Real mean = TENSOR(const Real, 3)[channel];
    const Real scale = gate ? TENSOR(const Real, 4)[channel] : 0, shift = gate ? TENSOR(const Real, 5)[channel] : 0;
    Real plain = 0, weighted = 0;
    FOR_EACH_OF_PART(b, channel, part, i) {
        const Real distance = Element<T>::load(x[i]) - mean;
        Real gradient = Element<T>::load(dy[i]);
        if (gate) gradient = gated(distance * scale + shift, gradient);
        plain += gradient;
        weighted += gradient * distance;
    }
    reduce_block<Add, Add>(plain, weighted, TENSOR(double, 1) + 2 * blockIdx.x);
}
LAYER(gradient_sums)

// tensors: pairs, and their sums over the parts: `numbers[5]` rows of channels, in the dtype of the arithmetic, or of x if
// numbers[6]. One thread per channel.
template <typename T> __device__ inline void sums_totals(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const unsigned long long channel = thread_in_grid();
    if (channel >= b.channels) return;
    const double *pairs = TENSOR(const double, 0) + 2 * channel * b.parts;
    double first = 0, second = 0;
    for (unsigned long long part = 0; part < b.parts; part++) {
        first += pairs[2 * part];
        second += pairs[2 * part + 1];
    }
    if (by.numbers[6]) TENSOR(T, 1)[channel] = Element<T>::store(first);
    else TENSOR(Real, 1)[channel] = first;
    if (by.numbers[5] > 1) TENSOR(Real, 1)[b.channels + channel] = second;
}
LAYER(sums_totals)

// Returns the channel of an element.
__device__ inline unsigned long long channel_of(const Batch &b, unsigned long long element) {
    take(element, b.spatial);
    return take(element, b.channels);
}

// tensors: x, y, mean, scale, shift, and null or z: y = (x − mean) × scale + shift (+ z), with a ReLU if numbers[5].
template <typename T> __device__ inline void normalise(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const unsigned long long i = thread_in_grid();
    if (i >= b.samples * b.channels * b.spatial) return;
    const unsigned long long channel = channel_of(b, i);
    Real value = (Element<T>::load(TENSOR(const T, 0)[i]) - TENSOR(const Real, 2)[channel]) *
                     TENSOR(const Real, 3)[channel] +
                 TENSOR(const Real, 4)[channel];
    if (by.tensors[5]) value += Element<T>::load(TENSOR(const T, 5)[i]);
    // NaN stays NaN.
    if (by.numbers[5] && value < 0) value = 0;
    TENSOR(T, 1)[i] = Element<T>::store(value);
}
LAYER(normalise)

// tensors: x, the gradient of z, mean, scale, shift, z, dy: what the ReLU behind (x − mean) × scale + shift + z leaves of dy.
template <typename T> __device__ inline void add_relu_gradient(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const unsigned long long i = thread_in_grid();
    if (i >= b.samples * b.channels * b.spatial) return;
    const unsigned long long channel = channel_of(b, i);
    const Real value = (Element<T>::load(TENSOR(const T, 0)[i]) - TENSOR(const Real, 2)[channel]) *
                           TENSOR(const Real, 3)[channel] +
                       TENSOR(const Real, 4)[channel] + Element<T>::load(TENSOR(const T, 5)[i]);
    TENSOR(T, 1)[i] = Element<T>::store(gated(value, (Real)Element<T>::load(TENSOR(const T, 6)[i])));
}
LAYER(add_relu_gradient)

// tensors: x, dx, mean, scale, a, b, dy, and null or the shift of a normalisation with a ReLU behind it:
// dx = scale × (dy − a − (x − mean) × b).
template <typename T> __device__ inline void input_gradient(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const unsigned long long i = thread_in_grid();
    if (i >= b.samples * b.channels * b.spatial) return;
    const unsigned long long channel = channel_of(b, i);
    const Real distance = Element<T>::load(TENSOR(const T, 0)[i]) - TENSOR(const Real, 2)[channel];
    const Real scale = TENSOR(const Real, 3)[channel];
    Real gradient = Element<T>::load(TENSOR(const T, 6)[i]);
    if (by.tensors[7]) gradient = gated(distance * scale + TENSOR(const Real, 7)[channel], gradient);
    const Real sum = gradient - TENSOR(const Real, 4)[channel] - distance * TENSOR(const Real, 5)[channel];
    TENSOR(T, 1)[i] = Element<T>::store(scale * sum);
}
LAYER(input_gradient)
