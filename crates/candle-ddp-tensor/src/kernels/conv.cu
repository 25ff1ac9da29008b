// Convolutions: images into columns and back, for products of matrices, and direct kernels where each output channel
// sees a single input channel. x has the shape (n, ci, input), y (n, co, output), weights (co, ci / groups, kernel).
// `columns` have the shape (ci, kernel, images, output): the values by which each weight is multiplied. `outputs` have the shape
// (co, images, output). Both are for `images` images from `first` on.

struct Convolution {
    unsigned long long first, images, ci, co;
    unsigned long long input[2], output[2], kernel[2], stride[2], padding[2], dilation[2];
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
    return take(output, c.stride[axis]) == 0 && output < c.output[axis];
}

// tensors: x, columns. One thread per element of columns.
template <typename T> __device__ inline void im2col(const Arguments &by) {
    const Convolution &c = CONVOLUTION;
    const unsigned long long element = thread_in_grid();
    unsigned long long rest = element;
    const unsigned long long out_x = take(rest, c.output[1]), out_y = take(rest, c.output[0]);
    const unsigned long long image = take(rest, c.images);
    const unsigned long long tap_x = take(rest, c.kernel[1]), tap_y = take(rest, c.kernel[0]);
    if (rest >= c.ci) return;
    const unsigned long long y = seen(c, 0, out_y, tap_y), x = seen(c, 1, out_x, tap_x);
    const bool inside = y < c.input[0] && x < c.input[1];
    const unsigned long long plane = (c.first + image) * c.ci + rest;
    TENSOR(T, 1)[element] =
        inside ? TENSOR(const T, 0)[(plane * c.input[0] + y) * c.input[1] + x] : Element<T>::store(0);
}
LAYER(im2col)

// tensors: columns in the dtype of the arithmetic, x, bias or null. Adds each column up where it came from, and the bias.
// One thread per element of x.
template <typename T> __device__ inline void col2im(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Convolution &c = CONVOLUTION;
    const Real *columns = TENSOR(const Real, 0);
    const T *bias = TENSOR(const T, 2);
    const unsigned long long element = thread_in_grid();
    unsigned long long rest = element, out_y, out_x;
    const unsigned long long x = take(rest, c.input[1]), y = take(rest, c.input[0]), channel = take(rest, c.ci);
    if (rest >= c.images) return;
    Real sum = bias ? Element<T>::load(bias[channel]) : 0;
    for (unsigned long long tap_y = 0; tap_y < c.kernel[0]; tap_y++) {
        if (!seen_by(c, 0, y, tap_y, out_y)) continue;
        for (unsigned long long tap_x = 0; tap_x < c.kernel[1]; tap_x++) {
            if (!seen_by(c, 1, x, tap_x, out_x)) continue;
            const unsigned long long row = (channel * c.kernel[0] + tap_y) * c.kernel[1] + tap_x;
            sum += columns[((row * c.images + rest) * c.output[0] + out_y) * c.output[1] + out_x];
        }
    }
    TENSOR(T, 1)[c.first * c.ci * c.input[0] * c.input[1] + element] = Element<T>::store(sum);
}
LAYER(col2im)

// tensors: y, outputs. One thread per element of outputs.
template <typename T> __device__ inline void images_to_columns(const Arguments &by) {
    const Convolution &c = CONVOLUTION;
    const unsigned long long element = thread_in_grid(), pixels = c.output[0] * c.output[1];
    unsigned long long rest = element;
    const unsigned long long pixel = take(rest, pixels), image = take(rest, c.images);
    if (rest >= c.co) return;
    TENSOR(T, 1)[element] = TENSOR(const T, 0)[((c.first + image) * c.co + rest) * pixels + pixel];
}
LAYER(images_to_columns)

// tensors: outputs in the dtype of the arithmetic, y, bias or null. One thread per element of outputs.
template <typename T> __device__ inline void columns_to_images(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Convolution &c = CONVOLUTION;
    const T *bias = TENSOR(const T, 2);
    const unsigned long long element = thread_in_grid(), pixels = c.output[0] * c.output[1];
    unsigned long long rest = element;
    const unsigned long long pixel = take(rest, pixels), image = take(rest, c.images);
    if (rest >= c.co) return;
    const Real value = TENSOR(const Real, 0)[element];
    TENSOR(T, 1)[((c.first + image) * c.co + rest) * pixels + pixel] =
        Element<T>::store(bias ? value + Element<T>::load(bias[rest]) : value);
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

// tensors: x, weight, y, bias or null. One thread per element of y.
template <typename T> __device__ inline void depthwise_forward(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Convolution &c = CONVOLUTION;
    const T *bias = TENSOR(const T, 3);
    const unsigned long long element = thread_in_grid();
    unsigned long long rest = element;
    const unsigned long long out_x = take(rest, c.output[1]), out_y = take(rest, c.output[0]);
    const unsigned long long channel = take(rest, c.co);
    if (rest >= c.images) return;
    const T *plane = TENSOR(const T, 0) + (rest * c.ci + channel / (c.co / c.ci)) * c.input[0] * c.input[1];
    const T *weight = TENSOR(const T, 1) + channel * c.kernel[0] * c.kernel[1];
    Real sum = bias ? Element<T>::load(bias[channel]) : 0;
    for (unsigned long long tap_y = 0; tap_y < c.kernel[0]; tap_y++) {
        const unsigned long long y = seen(c, 0, out_y, tap_y);
        if (y >= c.input[0]) continue;
        for (unsigned long long tap_x = 0; tap_x < c.kernel[1]; tap_x++) {
            const unsigned long long x = seen(c, 1, out_x, tap_x);
            if (x >= c.input[1]) continue;
            sum += Element<T>::load(plane[y * c.input[1] + x]) *
                   Element<T>::load(weight[tap_y * c.kernel[1] + tap_x]);
        }
    }
    TENSOR(T, 2)[element] = Element<T>::store(sum);
}
LAYER(depthwise_forward)

// tensors: dy, weight, dx, bias or null. One thread per element of dx.
template <typename T> __device__ inline void depthwise_backward_data(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Convolution &c = CONVOLUTION;
    const T *dy = TENSOR(const T, 0), *weights = TENSOR(const T, 1), *bias = TENSOR(const T, 3);
    const unsigned long long element = thread_in_grid(), each = c.co / c.ci;
    unsigned long long rest = element, out_y, out_x;
    const unsigned long long x = take(rest, c.input[1]), y = take(rest, c.input[0]), channel = take(rest, c.ci);
    if (rest >= c.images) return;
    Real sum = bias ? Element<T>::load(bias[channel]) : 0;
    for (unsigned long long output = channel * each; output < (channel + 1) * each; output++) {
        const T *plane = dy + (rest * c.co + output) * c.output[0] * c.output[1];
        const T *weight = weights + output * c.kernel[0] * c.kernel[1];
        for (unsigned long long tap_y = 0; tap_y < c.kernel[0]; tap_y++) {
            if (!seen_by(c, 0, y, tap_y, out_y)) continue;
            for (unsigned long long tap_x = 0; tap_x < c.kernel[1]; tap_x++) {
                if (!seen_by(c, 1, x, tap_x, out_x)) continue;
                sum += Element<T>::load(plane[out_y * c.output[1] + out_x]) *
                       Element<T>::load(weight[tap_y * c.kernel[1] + tap_x]);
            }
        }
    }
    TENSOR(T, 2)[element] = Element<T>::store(sum);
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
