// The sums and maps of channels.cu, with the same tensors and numbers, over the channels of a batch whose planes are single pixels:
// of images in channels_last each pixel is a sample. A block takes `vectors` neighbouring vectors of channels of `length` neighbouring
// samples. A thread has one vector, whose numbers it loads once, of some of these samples.

// Where this thread is.
template <typename T, typename By> struct Place {
    unsigned width, lines, line;    // threads side by side; samples that the block takes at once, and which one is this thread's
    unsigned long long channel;     // the vector's first one
    unsigned long long part, first; // of the samples, and this thread's first one
    unsigned long long end;         // 0 if there is no such channel

    __device__ Place(const Batch &b) : width(b.vectors), lines(THREADS / width), line(threadIdx.x / width), part(blockIdx.x) {
        const unsigned long long count = b.vector, vectors = b.channels / count;
        channel = (take(part, (vectors + width - 1) / width) * width + threadIdx.x % width) * count;
        first = part * b.length + line;
        end = channel < b.channels ? min(b.samples, (part + 1) * b.length) : 0;
    }

    // The number of this thread's samples.
    __device__ unsigned samples() const { return first < end ? (end - first + lines - 1) / lines : 0; }
};

// Calls `use` for each of this thread's samples, with the vectors of all tensors, the index of the first element, and what `more` has
// loaded for it.
template <typename T, typename By, int tensors, typename More, typename Use>
__device__ inline void for_each_sample(const Batch &b, const Place<T, By> &place, const T *const (&from)[tensors], More more,
                                       Use use) {
    const unsigned at_once = tensors == 1 ? 4 : 2;
    const unsigned long long step = place.lines * b.channels;
    unsigned long long element = place.first * b.channels + place.channel;
    for (unsigned long long at = place.first; at < place.end; at += at_once * place.lines, element += at_once * step) {
        Few<T> few[at_once][tensors];
        unsigned others[at_once];
#pragma unroll
        for (unsigned n = 0; n < at_once; n++) {
            const unsigned long long i = element + (at + n * place.lines < place.end ? n * step : 0);
#pragma unroll
            for (int t = 0; t < tensors; t++) few[n][t].load(from[t] + i, By::is_vector);
            others[n] = more(i);
        }
#pragma unroll
        for (unsigned n = 0; n < at_once; n++) {
            if (at + n * place.lines < place.end) use(few[n], element + n * step, others[n]);
        }
    }
}

template <typename T, typename By, int tensors, typename Use>
__device__ inline void for_each_sample(const Batch &b, const Place<T, By> &place, const T *const (&from)[tensors], Use use) {
    for_each_sample(b, place, from, [](auto) { return 0u; },
                    [&](const Few<T>(&few)[tensors], unsigned long long first, unsigned) { use(few, first); });
}

// Adds up the pairs of the threads with the same channels, into those of the block's part. The order is fixed.
template <typename T, typename By>
__device__ inline void add_samples(const Batch &b, const Place<T, By> &place, const double (&firsts)[Few<T>::most],
                                   const double (&seconds)[Few<T>::most], double *pairs) {
    __shared__ double sums[2][By::is_vector ? Few<T>::most : 1][THREADS];
    FOR_EACH_OF(T, By::is_vector, k) {
        sums[0][k][threadIdx.x] = firsts[k];
        sums[1][k][threadIdx.x] = seconds[k];
    }
    for (unsigned half = place.lines / 2; half > 0; half /= 2) {
        __syncthreads();
        if (place.line < half) {
            const unsigned other = threadIdx.x + half * place.width;
            FOR_EACH_OF(T, By::is_vector, k) {
                sums[0][k][threadIdx.x] += sums[0][k][other];
                sums[1][k][threadIdx.x] += sums[1][k][other];
            }
        }
    }
    if (place.line > 0 || place.channel >= b.channels) return;
    FOR_EACH_OF(T, By::is_vector, k) {
        double *pair = pairs + 2 * ((place.channel + k) * b.parts + place.part);
        pair[0] = sums[0][k][threadIdx.x];
        pair[1] = sums[1][k][threadIdx.x];
    }
}

// Numbers of the thread's channels; zeros if there is no such channel, or no tensor.
template <typename T, typename By>
__device__ inline Few<T> of_channels(const Batch &b, const Place<T, By> &place, const void *numbers) {
    Few<T> few = {};
    if (numbers && place.channel < b.channels) {
        few.load(static_cast<const typename Element<T>::Real *>(numbers) + place.channel, By::is_vector);
    }
    return few;
}

// Defines the kernel that is `NAME_of` for what a thread takes at once.
#define PIXELS(NAME)                                                         \
    template <typename T> __device__ inline void NAME(const Arguments &by) { \
        if (BATCH.vector == 1) {                                             \
            NAME##_of<T, One>(by);                                           \
        } else {                                                             \
            NAME##_of<T, Several>(by);                                       \
        }                                                                    \
    }                                                                        \
    LAYER(NAME)

// As `moments`.
template <typename T, typename By> __device__ inline void pixel_moments_of(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const T *x = TENSOR(const T, 0);
    const Place<T, By> place(b);
    const unsigned samples = place.samples();
    // A thread takes the distances from its own first sample.
    Few<T> origin = {}, sum = {}, squares = {};
    double firsts[Few<T>::most], seconds[Few<T>::most], shifts[Few<T>::most] = {};
    if (by.numbers[9] && samples) {
        origin.load(x + place.first * b.channels + place.channel, By::is_vector);
        FOR_EACH_OF(T, By::is_vector, k) shifts[k] = origin.at[k] - first_of(b, x, place.channel + k);
    }
    for_each_sample(b, place, {x}, [&](const Few<T>(&few)[1], auto) {
        FOR_EACH_OF(T, By::is_vector, k) {
            const Real distance = few[0].at[k] - origin.at[k];
            sum.at[k] += distance;
            squares.at[k] += distance * distance;
        }
    });
    FOR_EACH_OF(T, By::is_vector, k) {
        const double shift = shifts[k];
        firsts[k] = sum.at[k] + samples * shift;
        seconds[k] = squares.at[k] + shift * (2 * (double)sum.at[k] + samples * shift);
    }
    add_samples(b, place, firsts, seconds, TENSOR(double, 1));
}
PIXELS(pixel_moments)

// As `channel_sums`.
template <typename T, typename By> __device__ inline void pixel_sums_of(const Arguments &by) {
    const Batch &b = BATCH;
    const Place<T, By> place(b);
    Few<T> sum = {};
    for_each_sample(b, place, {TENSOR(const T, 0)}, [&](const Few<T>(&few)[1], auto) {
        FOR_EACH_OF(T, By::is_vector, k) sum.at[k] += few[0].at[k];
    });
    double firsts[Few<T>::most], seconds[Few<T>::most] = {};
    FOR_EACH_OF(T, By::is_vector, k) firsts[k] = sum.at[k];
    add_samples(b, place, firsts, seconds, TENSOR(double, 1));
}
PIXELS(pixel_sums)

template <typename T, typename By>
__device__ inline void add_gradient_sums(const Batch &b, const Place<T, By> &place, const Few<T> &plain,
                                         const Few<T> &weighted, double *pairs) {
    double firsts[Few<T>::most], seconds[Few<T>::most];
    FOR_EACH_OF(T, By::is_vector, k) {
        firsts[k] = plain.at[k];
        seconds[k] = weighted.at[k];
    }
    add_samples(b, place, firsts, seconds, pairs);
}

// As `gradient_sums`.
template <typename T, typename By> __device__ inline void pixel_gradient_sums_of(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const Place<T, By> place(b);
    const bool gate = by.tensors[4];
    const Few<T> mean = of_channels(b, place, by.tensors[3]), scale = of_channels(b, place, by.tensors[4]);
    const Few<T> shift = of_channels(b, place, by.tensors[5]);
    Few<T> plain = {}, weighted = {};
    for_each_sample(b, place, {TENSOR(const T, 0), TENSOR(const T, 2)}, [&](const Few<T>(&few)[2], auto) {
        FOR_EACH_OF(T, By::is_vector, k) {
            const Real distance = few[0].at[k] - mean.at[k], dy = few[1].at[k];
            const Real gradient = gate ? gated(distance * scale.at[k] + shift.at[k], dy) : dy;
            plain.at[k] += gradient;
            weighted.at[k] += gradient * distance;
        }
    });
    add_gradient_sums(b, place, plain, weighted, TENSOR(double, 1));
}
PIXELS(pixel_gradient_sums)

// As `add_relu_gradient`.
template <typename T, typename By> __device__ inline void pixel_add_relu_gradient_of(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const Place<T, By> place(b);
    const Few<T> mean = of_channels(b, place, by.tensors[3]);
    Few<T> plain = {}, weighted = {};
    const T *const from[2] = {TENSOR(const T, 0), TENSOR(const T, 2)};
    const unsigned char *mask = TENSOR(const unsigned char, 4);
    const unsigned per = by.numbers[9];
    T *to = TENSOR(T, 5);
    const auto load_mask = [=](unsigned long long first) { return passed(mask, per, By::is_vector ? Few<T>::most : 1, first); };
    for_each_sample(b, place, from, load_mask, [&](const Few<T>(&few)[2], unsigned long long first, unsigned through) {
        Few<T> gradients;
        FOR_EACH_OF(T, By::is_vector, k) {
            gradients.at[k] = through >> k & 1 ? few[1].at[k] : 0;
            plain.at[k] += gradients.at[k];
            weighted.at[k] += gradients.at[k] * (few[0].at[k] - mean.at[k]);
        }
        gradients.store(to + first, By::is_vector);
    });
    add_gradient_sums(b, place, plain, weighted, TENSOR(double, 1));
}
PIXELS(pixel_add_relu_gradient)

// As `normalise`.
template <typename T, typename By> __device__ inline void pixel_normalise_of(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const Place<T, By> place(b);
    const bool relu = by.numbers[9];
    const T *x = TENSOR(const T, 0), *z = TENSOR(const T, 5);
    T *y = TENSOR(T, 1);
    unsigned char *mask = z ? TENSOR(unsigned char, 6) : nullptr;
    const Few<T> mean = of_channels(b, place, by.tensors[2]), scale = of_channels(b, place, by.tensors[3]);
    const Few<T> shift = of_channels(b, place, by.tensors[4]);
    const auto put_result = [&](const Few<T> &x, const auto &added, unsigned long long first) {
        Few<T> result;
        unsigned positive = 0;
        FOR_EACH_OF(T, By::is_vector, k) {
            const Real value = (x.at[k] - mean.at[k]) * scale.at[k] + shift.at[k] + added(k);
            result.at[k] = relu && value < 0 ? 0 : value; // NaN stays NaN
            positive |= (result.at[k] > 0) << k;
        }
        result.store(y + first, By::is_vector);
        if (mask) mask[first / (By::is_vector ? Few<T>::most : 1)] = positive;
    };
    if (z) {
        for_each_sample(b, place, {x, z}, [&](const Few<T>(&few)[2], unsigned long long first) {
            put_result(few[0], [&](int k) { return few[1].at[k]; }, first);
        });
    } else {
        for_each_sample(b, place, {x}, [&](const Few<T>(&few)[1], unsigned long long first) {
            put_result(few[0], [](int) { return Real(0); }, first);
        });
    }
}
PIXELS(pixel_normalise)

// As `input_gradient`.
template <typename T, typename By> __device__ inline void pixel_input_gradient_of(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const Place<T, By> place(b);
    const bool gate = by.tensors[7];
    T *dx = TENSOR(T, 1);
    const Few<T> mean = of_channels(b, place, by.tensors[2]), scale = of_channels(b, place, by.tensors[3]);
    const Few<T> of_a = of_channels(b, place, by.tensors[4]), of_b = of_channels(b, place, by.tensors[5]);
    const Few<T> shift = of_channels(b, place, by.tensors[7]);
    for_each_sample(b, place, {TENSOR(const T, 0), TENSOR(const T, 6)}, [&](const Few<T>(&few)[2], unsigned long long first) {
        Few<T> result;
        FOR_EACH_OF(T, By::is_vector, k) {
            const Real distance = few[0].at[k] - mean.at[k];
            const Real gradient = gate ? gated(distance * scale.at[k] + shift.at[k], few[1].at[k]) : few[1].at[k];
            result.at[k] = scale.at[k] * gradient - of_a.at[k] - distance * of_b.at[k];
        }
        result.store(dx + first, By::is_vector);
    });
}
PIXELS(pixel_input_gradient)
