// Convolutions: images into columns and back, for products of matrices, and direct kernels where each output channel
// sees a single input channel. x has the shape (n, ci, input), y (n, co, output), weights (co, ci / groups, kernel).
// `columns` have the shape (ci, kernel, images, output): the values by which each weight is multiplied. `outputs` have the shape
// (co, images, output). Both are for `images` images from `first` on.

struct Convolution {
    unsigned long long first, images, ci, co;
    unsigned long long input[2], output[2], kernel[2], stride[2], padding[2], dilation[2];
    unsigned long long vector; // neighbouring elements that a thread writes: a whole vector, or one
};
#define CONVOLUTION (*reinterpret_cast<const Convolution *>(by.numbers))

// Along an axis: the input position that output position `at` sees through tap `tap`; not less than `size` for padding.
__device__ inline unsigned long long seen(const Convolution &c, int axis, unsigned long long at,
                                          unsigned long long tap) {
    return at * c.stride[axis] + tap * c.dilation[axis] - c.padding[axis];
}

// Along an axis: whether an output position sees input position `at` through tap `tap`, and which one.
__device__ inline bool seen_by(const Convolution &c, int axis, unsigned long long at, unsigned long long tap,
                               unsigned long long &output) {
    const unsigned long long padded = at + c.padding[axis], shift = tap * c.dilation[axis];
    if (padded < shift) return false;
    output = padded - shift;
    return (c.stride[axis] == 1 || take(output, c.stride[axis]) == 0) && output < c.output[axis];
}

// tensors: x, columns. One thread per vector of columns.
template <typename T> __device__ inline void im2col(const Arguments &by) {
    const Convolution &c = CONVOLUTION;
    const bool is_vector = c.vector > 1;
    const unsigned long long first = thread_in_grid() * c.vector;
    unsigned long long rest = first;
    const unsigned long long out_x = take(rest, c.output[1]), out_y = take(rest, c.output[0]);
    const unsigned long long image = take(rest, c.images);
    const unsigned long long tap_x = take(rest, c.kernel[1]), tap_y = take(rest, c.kernel[0]);
    if (rest >= c.ci) return;
    const unsigned long long y = seen(c, 0, out_y, tap_y), plane = (c.first + image) * c.ci + rest;
    Few<T> few;
    FOR_EACH_OF(T, is_vector, k) {
        const unsigned long long x = seen(c, 1, out_x + k, tap_x);
        const bool inside = y < c.input[0] && x < c.input[1];
        few.at[k] = inside ? Element<T>::load(TENSOR(const T, 0)[(plane * c.input[0] + y) * c.input[1] + x]) : 0;
    }
    few.store(TENSOR(T, 1) + first, is_vector);
}
LAYER(im2col)

// The bias of a channel, for each element of a vector.
template <typename T> __device__ inline Few<T> bias_of(const T *bias, unsigned long long channel, bool is_vector) {
    Few<T> few;
    FOR_EACH_OF(T, is_vector, k) few.at[k] = bias ? Element<T>::load(bias[channel]) : 0;
    return few;
}

// tensors: columns in the dtype of the arithmetic, x, bias or null. Adds each column up where it came from, and the bias.
// One thread per vector of x.
template <typename T> __device__ inline void col2im(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Convolution &c = CONVOLUTION;
    const bool is_vector = c.vector > 1;
    const unsigned long long first = thread_in_grid() * c.vector;
    unsigned long long rest = first, out_y, out_x;
    const unsigned long long x = take(rest, c.input[1]), y = take(rest, c.input[0]), channel = take(rest, c.ci);
    if (rest >= c.images) return;
    Few<T> sums = bias_of(TENSOR(const T, 2), channel, is_vector);
    for (unsigned long long tap_y = 0; tap_y < c.kernel[0]; tap_y++) {
        if (!seen_by(c, 0, y, tap_y, out_y)) continue;
        for (unsigned long long tap_x = 0; tap_x < c.kernel[1]; tap_x++) {
            const unsigned long long row = (channel * c.kernel[0] + tap_y) * c.kernel[1] + tap_x;
            const Real *line = TENSOR(const Real, 0) + ((row * c.images + rest) * c.output[0] + out_y) * c.output[1];
            FOR_EACH_OF(T, is_vector, k) if (seen_by(c, 1, x + k, tap_x, out_x)) sums.at[k] += line[out_x];
        }
    }
    sums.store(TENSOR(T, 1) + c.first * c.ci * c.input[0] * c.input[1] + first, is_vector);
}
LAYER(col2im)

// Where the images have a vector of `outputs`; `c.co` channels and more for a thread behind the last.
__device__ inline unsigned long long place_in_images(const Convolution &c, unsigned long long first, unsigned long long &channel) {
    const unsigned long long pixels = c.output[0] * c.output[1];
    channel = first;
    const unsigned long long pixel = take(channel, pixels), image = take(channel, c.images);
    return ((c.first + image) * c.co + channel) * pixels + pixel;
}

// tensors: y, outputs. One thread per vector of outputs.
template <typename T> __device__ inline void images_to_columns(const Arguments &by) {
    const Convolution &c = CONVOLUTION;
    const bool is_vector = c.vector > 1;
    const unsigned long long first = thread_in_grid() * c.vector;
    unsigned long long channel;
    const T *from = TENSOR(const T, 0) + place_in_images(c, first, channel);
    if (channel >= c.co) return;
    Few<T> few;
    few.load(from, is_vector);
    few.store(TENSOR(T, 1) + first, is_vector);
}
LAYER(images_to_columns)

// tensors: outputs in the dtype of the arithmetic, y, bias or null. One thread per vector of outputs.
template <typename T> __device__ inline void columns_to_images(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Convolution &c = CONVOLUTION;
    const bool is_vector = c.vector > 1;
    const unsigned long long first = thread_in_grid() * c.vector;
    unsigned long long channel;
    T *to = TENSOR(T, 1) + place_in_images(c, first, channel);
    if (channel >= c.co) return;
    const Few<T> bias = bias_of(TENSOR(const T, 2), channel, is_vector);
    Few<T> few;
    few.load(TENSOR(const Real, 0) + first, is_vector);
    FOR_EACH_OF(T, is_vector, k) few.at[k] += bias.at[k];
    few.store(to, is_vector);
}
LAYER(columns_to_images)

// tensors: planes (n, channels, elements), to which the bias, tensor 1, is added. numbers: n, channels, elements, and those of a
// thread: a whole vector, or one.
template <typename T> __device__ inline void add_bias(const Arguments &by) {
    const unsigned long long vector = by.numbers[3], first = thread_in_grid();
    unsigned long long rest = first;
    take(rest, by.numbers[2] / vector);
    const unsigned long long channel = take(rest, by.numbers[1]);
    if (rest >= by.numbers[0]) return;
    const typename Element<T>::Real bias = Element<T>::load(TENSOR(const T, 1)[channel]);
    T *values = TENSOR(T, 0) + first * vector;
    const bool is_vector = vector > 1;
    Few<T> few;
    few.load(values, is_vector);
    FOR_EACH_OF(T, is_vector, k) few.at[k] += bias;
    few.store(values, is_vector);
}
LAYER(add_bias)

// Output channel k sees input channel k / (co / ci) alone.

// tensors: x, weight, y, bias or null. One thread per vector of y.
template <typename T> __device__ inline void depthwise_forward(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Convolution &c = CONVOLUTION;
    const bool is_vector = c.vector > 1;
    const unsigned long long first = thread_in_grid() * c.vector;
    unsigned long long rest = first;
    const unsigned long long out_x = take(rest, c.output[1]), out_y = take(rest, c.output[0]);
    const unsigned long long channel = take(rest, c.co);
    if (rest >= c.images) return;
    const T *plane = TENSOR(const T, 0) + (rest * c.ci + channel / (c.co / c.ci)) * c.input[0] * c.input[1];
    const T *weights = TENSOR(const T, 1) + channel * c.kernel[0] * c.kernel[1];
    Few<T> sums = bias_of(TENSOR(const T, 3), channel, is_vector);
    for (unsigned long long tap_y = 0; tap_y < c.kernel[0]; tap_y++) {
        const unsigned long long y = seen(c, 0, out_y, tap_y);
        if (y >= c.input[0]) continue;
        for (unsigned long long tap_x = 0; tap_x < c.kernel[1]; tap_x++) {
            const Real weight = Element<T>::load(weights[tap_y * c.kernel[1] + tap_x]);
            FOR_EACH_OF(T, is_vector, k) {
                const unsigned long long x = seen(c, 1, out_x + k, tap_x);
                if (x < c.input[1]) sums.at[k] += Element<T>::load(plane[y * c.input[1] + x]) * weight;
            }
        }
    }
    sums.store(TENSOR(T, 2) + first, is_vector);
}
LAYER(depthwise_forward)

// tensors: dy, weight, dx, bias or null. One thread per vector of dx.
template <typename T> __device__ inline void depthwise_backward_data(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Convolution &c = CONVOLUTION;
    const bool is_vector = c.vector > 1;
    const unsigned long long first = thread_in_grid() * c.vector, each = c.co / c.ci;
    unsigned long long rest = first, out_y, out_x;
    const unsigned long long x = take(rest, c.input[1]), y = take(rest, c.input[0]), channel = take(rest, c.ci);
    if (rest >= c.images) return;
    Few<T> sums = bias_of(TENSOR(const T, 3), channel, is_vector);
    for (unsigned long long output = channel * each; output < (channel + 1) * each; output++) {
        const T *plane = TENSOR(const T, 0) + (rest * c.co + output) * c.output[0] * c.output[1];
        const T *weights = TENSOR(const T, 1) + output * c.kernel[0] * c.kernel[1];
        for (unsigned long long tap_y = 0; tap_y < c.kernel[0]; tap_y++) {
            if (!seen_by(c, 0, y, tap_y, out_y)) continue;
            for (unsigned long long tap_x = 0; tap_x < c.kernel[1]; tap_x++) {
                const Real weight = Element<T>::load(weights[tap_y * c.kernel[1] + tap_x]);
                FOR_EACH_OF(T, is_vector, k) {
                    if (seen_by(c, 1, x + k, tap_x, out_x))
                        sums.at[k] += Element<T>::load(plane[out_y * c.output[1] + out_x]) * weight;
                }
            }
        }
    }
    sums.store(TENSOR(T, 2) + first, is_vector);
}
LAYER(depthwise_backward_data)

// tensors: x, dy, the gradient of the weights. One block per weight.
template <typename T> __device__ inline void depthwise_backward_filter(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    __shared__ double pair[2];
    const Convolution &c = CONVOLUTION;
    const T *x = TENSOR(const T, 0), *dy = TENSOR(const T, 1);
    unsigned long long rest = blockIdx.x;
    const unsigned long long tap_x = take(rest, c.kernel[1]), tap_y = take(rest, c.kernel[0]), channel = rest;
    const unsigned long long source = channel / (c.co / c.ci), pixels = c.output[0] * c.output[1];
    Real sum = 0;
    for (unsigned long long i = threadIdx.x; i < c.images * pixels; i += THREADS) {
        unsigned long long image = i;
        const unsigned long long out_x = take(image, c.output[1]), out_y = take(image, c.output[0]);
        const unsigned long long in_y = seen(c, 0, out_y, tap_y), in_x = seen(c, 1, out_x, tap_x);
        if (in_y >= c.input[0] || in_x >= c.input[1]) continue;
        sum += Element<T>::load(x[((image * c.ci + source) * c.input[0] + in_y) * c.input[1] + in_x]) *
               Element<T>::load(dy[((image * c.co + channel) * c.output[0] + out_y) * c.output[1] + out_x]);
    }
    reduce_block<Add, Add>(sum, 0, pair);
    if (threadIdx.x == 0) TENSOR(T, 2)[blockIdx.x] = Element<T>::store(pair[0]);
}
LAYER(depthwise_backward_filter)
