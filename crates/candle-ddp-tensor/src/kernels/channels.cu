// Sums and maps over the channels of a batch (samples, channels, spatial): batch normalisation, and the gradient of a
// bias. Per-channel numbers have the dtype of the arithmetic. Sums over a channel are made by `parts` blocks, each of which
// takes `length` neighbouring vectors of the channel, and then put together by one warp per channel.
//
// Vectors begin at multiples of their size in the batch, so a vector may hold elements of two channels, but not of more. All of the
// batch is vectors. A thread keeps several in flight, and finds its next one without a division.

// What a thread takes at once, and indices of elements: batches of 2^31 elements or more are taken one by one.
struct Singles {
    typedef unsigned long long Index;
    static const bool is_vector = false, spans = false;
};
// Planes are whole vectors.
struct Wholes {
    typedef unsigned Index;
    static const bool is_vector = true, spans = false;
};
// Vectors may hold elements of two planes.
struct Spanning {
    typedef unsigned Index;
    static const bool is_vector = true, spans = true;
};

// Defines the kernel that is `NAME_of` for what a thread takes at once.
#define CHANNELS(NAME)                                                       \
    template <typename T> __device__ inline void NAME(const Arguments &by) { \
        if (BATCH.vector == 1) {                                             \
            NAME##_of<T, Singles>(by);                                       \
        } else if (BATCH.spatial % Few<T>::most == 0) {                      \
            NAME##_of<T, Wholes>(by);                                        \
        } else {                                                             \
            NAME##_of<T, Spanning>(by);                                      \
        }                                                                    \
    }                                                                        \
    LAYER(NAME)

// Where this thread is in this block's part of a channel.
template <typename T, typename By> struct Place {
    typedef typename By::Index Index;
    static const unsigned count = By::is_vector ? Few<T>::most : 1;
    unsigned channel;
    Index end;             // vectors of the part
    Index spatial, start;  // the plane, and its first element
    Index vectors, column; // those of the plane, and which one it is
    Index sample, step, step_columns;

    __device__ Place(const Batch &b)
        : channel(blockIdx.x), spatial(b.spatial), vectors(b.vectors), step_columns(b.step_columns) {
        Index before = take(channel, (unsigned)b.parts) * (Index)b.length;
        const Index all = (Index)b.samples * vectors;
        end = before < all ? min((Index)b.length, all - before) : 0;
        before += threadIdx.x;
        column = take(before, vectors);
        sample = (Index)b.channels * spatial;
        start = before * sample + channel * spatial;
        step = (Index)b.step_planes * sample;
    }

    // The first element of the vector, which may belong to the plane before.
    __device__ Index first() const { return start / count * count + column * count; }

    __device__ void advance() {
        start += step;
        column += step_columns;
        if (column >= vectors) {
            column -= vectors;
            start += sample;
        }
    }
};

// Calls `use` for each of this thread's vectors from `place` on, with those of all tensors, a bit for each element that is the
// channel's, the index of the first one, and what `more` has loaded for it.
template <typename T, typename By, int tensors, typename More, typename Use>
__device__ inline void for_each_vector(Place<T, By> place, const T *const (&from)[tensors], More more, Use use) {
    typedef typename By::Index Index;
    const unsigned count = place.count, at_once = tensors == 1 ? 4 : 2;
    for (Index at = threadIdx.x; at < place.end; at += at_once * THREADS) {
        Few<T> few[at_once][tensors];
        unsigned bits[at_once], others[at_once];
        Index firsts[at_once];
#pragma unroll
        for (unsigned n = 0; n < at_once; n++) {
            const Index first = firsts[n] = place.first(), behind = place.start + place.spatial;
            const bool exists = at + n * THREADS < place.end && first < behind;
            bits[n] = (1u << (By::spans ? min(behind - first, (Index)count) : count)) - 1;
            if (By::spans && first < place.start) bits[n] &= ~0u << (place.start - first);
            if (!exists) bits[n] = 0;
#pragma unroll
            for (int i = 0; i < tensors; i++) few[n][i].load(from[i] + (exists ? first : 0), By::is_vector);
            others[n] = more(exists ? first : 0);
            place.advance();
        }
#pragma unroll
        for (unsigned n = 0; n < at_once; n++) {
            if (bits[n]) use(few[n], bits[n], firsts[n], others[n]);
        }
    }
}

template <typename T, typename By, int tensors, typename Use>
__device__ inline void for_each_vector(Place<T, By> place, const T *const (&from)[tensors], Use use) {
    for_each_vector(place, from, [](auto) { return 0u; },
                    [&](const Few<T>(&few)[tensors], unsigned bits, auto, unsigned) { use(few, bits); });
}

// Loops over those elements of a vector that are the channel's.
#define FOR_EACH_OF_CHANNEL(T, By, bits, k) \
    FOR_EACH_OF(T, By::is_vector, k) if (!By::spans || (bits) >> k & 1)

// Of this block's part of a channel: the sums of the distances from the channel's first element, and of their squares; from zero, unless
// they are `centred`.
template <typename T, typename By>
__device__ inline void sum_moments(const Batch &b, const T *__restrict__ x, bool centred, double *pair) {
    typedef typename Element<T>::Real Real;
    const Place<T, By> place(b);
    // A thread takes the distances from its own first element, or from the one before that.
    Real origin = 0, sum = 0, squares = 0;
    double shift = 0;
    unsigned count = 0;
    if (centred && threadIdx.x < place.end) {
        origin = Element<T>::load(x[min(max(place.first(), place.start), place.start + place.spatial - 1)]);
        shift = origin - first_of(b, x, place.channel);
    }
    for_each_vector(place, {x}, [&](const Few<T>(&few)[1], unsigned bits) {
        count += __popc(bits);
        FOR_EACH_OF_CHANNEL(T, By, bits, k) {
            const Real distance = few[0].at[k] - origin;
            sum += distance;
            squares += distance * distance;
        }
    });
    reduce_block<Add, Add>(sum + count * shift, squares + shift * (2 * (double)sum + count * shift), pair);
}

// tensors: x, and pairs (f64) for each channel and part: see above. numbers[9]: whether they are centred.
template <typename T, typename By> __device__ inline void moments_of(const Arguments &by) {
    sum_moments<T, By>(BATCH, TENSOR(const T, 0), by.numbers[9], TENSOR(double, 1) + 2 * blockIdx.x);
}
CHANNELS(moments)

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
    if (momentum == 0) return; // an infinite newest value would leave a NaN
    put<Real>(running, dtype, i, get<Real>(running, dtype, i) * (1 - momentum) + newest * momentum);
}

// The sums of the pairs of a channel's parts, for all threads of a warp.
__device__ inline void add_pairs(const Batch &b, const double *pairs, unsigned long long channel, double &first,
                                 double &second) {
    first = second = 0;
    for (unsigned long long part = threadIdx.x % 32; part < b.parts; part += 32) {
        first += pairs[2 * (channel * b.parts + part)];
        second += pairs[2 * (channel * b.parts + part) + 1];
    }
    for (int other = 16; other > 0; other /= 2) {
        first += __shfl_xor_sync(~0u, first, other);
        second += __shfl_xor_sync(~0u, second, other);
    }
}

// Where the statistics come from, numbers[10].
#define OF_BATCH 0   // tensors 0 and 6: the pairs of `moments`, and x
#define GIVEN 1      // tensors 0, 6 and 7: means, variances and the number of values
#define OF_RUNNING 2 // the running statistics

// From the sums of a batch's distances: a channel's mean and variance.
template <typename T>
__device__ inline void from_sums(const Arguments &by, unsigned long long channel, double &middle, double &squares) {
    const double count = BATCH.samples * BATCH.spatial, mean = by.numbers[11] ? middle / count : 0;
    squares = squares / count - mean * mean;
    if (squares < 0) squares = 0; // rounded
    middle = by.numbers[11] ? first_of(BATCH, TENSOR(const T, 6), channel) + mean : 0;
}

// What follows from a channel's statistics: see `statistics`.
template <typename T>
__device__ inline void put_statistics(const Arguments &by, unsigned long long channel, double middle, double squares,
                                      double count) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const unsigned long long dtypes = by.numbers[9];
    const Real mean = middle, variance = squares, momentum = by.reals[1];
    const Real inverse = 1 / sqrt(variance + Real(by.reals[0]));
    const Real weight = by.tensors[2] ? get<Real>(by.tensors[2], dtypes, channel) : 1;
    const Real bias = by.tensors[3] ? get<Real>(by.tensors[3], dtypes >> 4, channel) : 0;
    const Real rows[5] = {mean, variance, inverse, weight * inverse, bias};
    for (int row = 0; row < 5; row++) TENSOR(Real, 1)[row * b.channels + channel] = rows[row];
    if (by.numbers[10] == OF_RUNNING || !by.tensors[5]) return;
    if (by.numbers[11]) mix(by.tensors[4], dtypes >> 8, channel, mean, momentum);
    mix<Real>(by.tensors[5], dtypes >> 12, channel, variance * (count / (count - 1)), momentum);
}

// tensors: see above; the result (5, channels): mean, variance, 1 / deviation, scale and shift; weight and bias, or null for 1 and
// 0; running mean and variance, or null. numbers[9]: the dtypes of the last four; numbers[11]: whether the batch is centred, and
// the running mean updated too; reals: eps, momentum. Unless they are the statistics, running statistics are updated. One warp per
// channel.
template <typename T> __device__ inline void statistics(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const unsigned long long channel = thread_in_grid() / 32, dtypes = by.numbers[9];
    if (channel >= b.channels) return;
    double count = b.samples * b.spatial, middle = 0, squares = 0;
    if (by.numbers[10] == OF_BATCH) add_pairs(b, TENSOR(const double, 0), channel, middle, squares);
    if (threadIdx.x % 32) return;
    if (by.numbers[10] == OF_BATCH) {
        from_sums<T>(by, channel, middle, squares);
    } else if (by.numbers[10] == GIVEN) {
        middle = TENSOR(const Real, 0)[channel];
        squares = TENSOR(const Real, 6)[channel];
        count = *TENSOR(const Real, 7);
    } else {
        middle = get<Real>(by.tensors[4], dtypes >> 8, channel);
        squares = get<Real>(by.tensors[5], dtypes >> 12, channel);
    }
    put_statistics<T>(by, channel, middle, squares, count);
}
LAYER(statistics)

// tensors and numbers as of `statistics` of a batch, without pairs. One block per channel.
template <typename T, typename By> __device__ inline void batch_statistics_of(const Arguments &by) {
    __shared__ double pair[2];
    sum_moments<T, By>(BATCH, TENSOR(const T, 6), by.numbers[11], pair);
    if (threadIdx.x > 0) return;
    double middle = pair[0], squares = pair[1];
    from_sums<T>(by, blockIdx.x, middle, squares);
    put_statistics<T>(by, blockIdx.x, middle, squares, BATCH.samples * BATCH.spatial);
}
CHANNELS(batch_statistics)

// tensors: x, and pairs (f64) for each channel and part: the part's sum, and 0.
template <typename T, typename By> __device__ inline void channel_sums_of(const Arguments &by) {
    typename Element<T>::Real sum = 0;
    for_each_vector(Place<T, By>(BATCH), {TENSOR(const T, 0)}, [&](const Few<T>(&few)[1], unsigned bits) {
        FOR_EACH_OF_CHANNEL(T, By, bits, k) sum += few[0].at[k];
    });
    reduce_block<Add, Add>(sum, 0, TENSOR(double, 1) + 2 * blockIdx.x);
}
CHANNELS(channel_sums)

// tensors: x, pairs (f64) for each channel and part: Σ dy and Σ dy · (x − mean); dy, mean, and null or scale and shift of a
// normalisation with a ReLU behind it, which lets dy through where its input was positive.
template <typename T, typename By> __device__ inline void gradient_sums_of(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const Place<T, By> place(b);
    const unsigned channel = place.channel;
    const bool gate = by.tensors[4];
    const Real mean = TENSOR(const Real, 3)[channel];
    const Real scale = gate ? TENSOR(const Real, 4)[channel] : 0, shift = gate ? TENSOR(const Real, 5)[channel] : 0;
    Real plain = 0, weighted = 0;
    const T *const from[2] = {TENSOR(const T, 0), TENSOR(const T, 2)};
    for_each_vector(place, from, [&](const Few<T>(&few)[2], unsigned bits) {
        FOR_EACH_OF_CHANNEL(T, By, bits, k) {
            const Real distance = few[0].at[k] - mean, dy = few[1].at[k];
            const Real gradient = gate ? gated(distance * scale + shift, dy) : dy;
            plain += gradient;
            weighted += gradient * distance;
        }
    });
    reduce_block<Add, Add>(plain, weighted, TENSOR(double, 1) + 2 * blockIdx.x);
}
CHANNELS(gradient_sums)

// tensors: x, pairs, dy and mean as of `gradient_sums`, for a normalisation to which a tensor is added before the ReLU; the mask of
// what the ReLU has let through, with a byte for numbers[9] elements; and what the ReLU leaves of dy, the gradient of the added one.
template <typename T, typename By> __device__ inline void add_relu_gradient_of(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Place<T, By> place(BATCH);
    const Real mean = TENSOR(const Real, 3)[place.channel];
    Real plain = 0, weighted = 0;
    const T *const from[2] = {TENSOR(const T, 0), TENSOR(const T, 2)};
    const unsigned char *mask = TENSOR(const unsigned char, 4);
    const unsigned per = by.numbers[9];
    T *to = TENSOR(T, 5);
    const auto load_mask = [=](typename By::Index first) { return passed(mask, per, Place<T, By>::count, first); };
    const auto use = [&](const Few<T>(&few)[2], unsigned bits, typename By::Index first, unsigned through) {
        Few<T> gradients;
        FOR_EACH_OF_CHANNEL(T, By, bits, k) {
            gradients.at[k] = through >> k & 1 ? few[1].at[k] : 0;
            plain += gradients.at[k];
            weighted += gradients.at[k] * (few[0].at[k] - mean);
        }
        // The elements around those of the channel are other blocks'.
        if (bits + 1 == 1u << place.count) {
            gradients.store(to + first, By::is_vector);
        } else {
            FOR_EACH_OF_CHANNEL(T, By, bits, k) to[first + k] = Element<T>::store(gradients.at[k]);
        }
    };
    for_each_vector(place, from, load_mask, use);
    reduce_block<Add, Add>(plain, weighted, TENSOR(double, 1) + 2 * blockIdx.x);
}
CHANNELS(add_relu_gradient)

// tensors: the pairs of `channel_sums`, and the sums of their first numbers over the parts. One warp per channel.
template <typename T> __device__ inline void sums_totals(const Arguments &by) {
    const Batch &b = BATCH;
    const unsigned long long channel = thread_in_grid() / 32;
    if (channel >= b.channels) return;
    double sum, unused;
    add_pairs(b, TENSOR(const double, 0), channel, sum, unused);
    if (threadIdx.x % 32 == 0) TENSOR(T, 1)[channel] = Element<T>::store(sum);
}
LAYER(sums_totals)

// tensors: the pairs of `gradient_sums`, or null if the sums are given; (4, channels): Σ dy and Σ dy · (x − mean), then a and b of
// `input_gradient`; the gradients of weight and bias, or null; 1 / deviation; the number of values, or null for the batch's; scale.
// numbers[9]: the dtypes of both gradients; numbers[10]: whether the mean was subtracted; numbers[11]: whether the statistics are
// constants. One warp per channel.
template <typename T> __device__ inline void gradient_totals(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const unsigned long long channel = thread_in_grid() / 32, dtypes = by.numbers[9];
    if (channel >= b.channels) return;
    Real *rows = TENSOR(Real, 1) + channel;
    double first, second;
    if (by.tensors[0]) add_pairs(b, TENSOR(const double, 0), channel, first, second);
    if (threadIdx.x % 32) return;
    if (by.tensors[0]) {
        rows[0] = first;
        rows[b.channels] = second;
    }
    const Real plain = rows[0], weighted = rows[b.channels], inverse = TENSOR(const Real, 4)[channel];
    const Real count = by.tensors[5] ? *TENSOR(const Real, 5) : Real(b.samples * b.spatial);
    if (by.tensors[2]) put<Real>(by.tensors[2], dtypes, channel, weighted * inverse);
    if (by.tensors[3]) put<Real>(by.tensors[3], dtypes >> 4, channel, plain);
    const Real scale = TENSOR(const Real, 6)[channel];
    rows[2 * b.channels] = by.numbers[11] || !by.numbers[10] ? 0 : plain / count * scale;
    rows[3 * b.channels] = by.numbers[11] ? 0 : weighted / count * scale * (inverse * inverse);
}
LAYER(gradient_totals)

// The vectors that a thread maps.
#define MAPPED 2

// Fills `to` with what `function` makes of the inputs' elements and the numbers of their channel; and `mask`, unless it is null, with a
// byte for each vector, which has a bit for each element: whether it is positive.
template <typename T, typename By, int inputs, int rows, typename Function>
__device__ inline void map(const Batch &b, const T *const (&from)[inputs],
                           const typename Element<T>::Real *const (&numbers)[rows], T *to, unsigned char *mask,
                           Function function) {
    typedef typename Element<T>::Real Real;
    typedef typename By::Index Index;
    const unsigned count = By::is_vector ? Few<T>::most : 1;
    const Index channels = b.channels, spatial = b.spatial, end = (Index)b.samples * channels * spatial;
    const Index begin = ((Index)blockIdx.x * MAPPED * THREADS + threadIdx.x) * count;
    Index rest = begin, column = take(rest, spatial), channel = take(rest, channels);
    Few<T> few[MAPPED][inputs];
    // Of the channel of the vector's first elements, `split` of them, and of the next one.
    Real first[MAPPED][rows], second[MAPPED][rows];
    unsigned split[MAPPED];
#pragma unroll
    for (int n = 0; n < MAPPED; n++) {
        const Index at = begin + n * THREADS * count, next = channel + 1 == channels ? 0 : channel + 1;
#pragma unroll
        for (int i = 0; i < inputs; i++) few[n][i].load(from[i] + (at < end ? at : 0), By::is_vector);
        split[n] = By::spans ? min(spatial - column, (Index)count) : count;
#pragma unroll
        for (int row = 0; row < rows; row++) {
            first[n][row] = numbers[row][channel];
            second[n][row] = By::spans && split[n] < count ? numbers[row][next] : first[n][row];
        }
        column += (Index)b.step_columns;
        channel += (Index)b.step_planes;
        if (column >= spatial) {
            column -= spatial;
            channel++;
        }
        if (channel >= channels) channel -= channels;
    }
#pragma unroll
    for (int n = 0; n < MAPPED; n++) {
        const Index at = begin + n * THREADS * count;
        if (at >= end) return;
        Few<T> result;
        unsigned positive = 0;
        FOR_EACH_OF(T, By::is_vector, k) {
            Real values[inputs], of_channel[rows];
            for (int i = 0; i < inputs; i++) values[i] = few[n][i].at[k];
            for (int row = 0; row < rows; row++) {
                of_channel[row] = By::spans && k >= split[n] ? second[n][row] : first[n][row];
            }
            result.at[k] = function(values, of_channel);
            positive |= (result.at[k] > 0) << k;
        }
        result.store(to + at, By::is_vector);
        if (mask) mask[at / count] = positive;
    }
}

// tensors: x, y, mean, scale, shift, and null or z: y = (x − mean) × scale + shift (+ z), with a ReLU if numbers[9]; and with z, null or
// a mask of the positive results.
template <typename T, typename By> __device__ inline void normalise_of(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const bool relu = by.numbers[9];
    const T *x = TENSOR(const T, 0), *z = TENSOR(const T, 5);
    const Real *const numbers[3] = {TENSOR(const Real, 2), TENSOR(const Real, 3), TENSOR(const Real, 4)};
    // NaN stays NaN.
    const auto after = [=](Real value) { return relu && value < 0 ? 0 : value; };
    if (z) {
        map<T, By>(BATCH, {x, z}, numbers, TENSOR(T, 1), TENSOR(unsigned char, 6), [=](const Real(&of)[2], const Real(&c)[3]) {
            return after((of[0] - c[0]) * c[1] + c[2] + of[1]);
        });
    } else {
        map<T, By>(BATCH, {x}, numbers, TENSOR(T, 1), nullptr, [=](const Real(&of)[1], const Real(&c)[3]) {
            return after((of[0] - c[0]) * c[1] + c[2]);
        });
    }
}
CHANNELS(normalise)

// tensors: x, dx, mean, scale, a, b, dy, and null or the shift of a normalisation with a ReLU behind it:
// dx = scale × dy − a − (x − mean) × b.
template <typename T, typename By> __device__ inline void input_gradient_of(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const bool gate = by.tensors[7];
    const Real *mean = TENSOR(const Real, 2), *shift = gate ? TENSOR(const Real, 7) : mean;
    map<T, By>(BATCH, {TENSOR(const T, 0), TENSOR(const T, 6)},
           {mean, TENSOR(const Real, 3), TENSOR(const Real, 4), TENSOR(const Real, 5), shift}, TENSOR(T, 1), nullptr,
           [=](const Real(&of)[2], const Real(&c)[5]) {
               const Real distance = of[0] - c[0];
               const Real gradient = gate ? gated(distance * c[1] + c[4], of[1]) : of[1];
               return c[1] * gradient - c[2] - distance * c[3];
           });
}
CHANNELS(input_gradient)
