// Pooling, and other maps of planes.

// Windows along rows and columns of planes, which have less than 2^32 elements with their padding.
struct Windows {
    unsigned long long planes;
    unsigned long long input[2], output[2], kernel[2], stride[2], padding[2];
    unsigned long long vector; // inputs that a thread of the backward pass takes at once; in channels_last, channels
    unsigned long long channels; // in channels_last, where images are `planes` of pixels
};
#define WINDOWS (*reinterpret_cast<const Windows *>(by.numbers))

// Along an axis: input `tap` of window `index`, or for one in the padding the next input to it, which is in the same window.
__device__ inline unsigned inside(const Windows &w, int axis, unsigned index, unsigned tap) {
    const unsigned padded = index * (unsigned)w.stride[axis] + tap, padding = w.padding[axis];
    return min(padded < padding ? 0 : padded - padding, (unsigned)w.input[axis] - 1);
}

// Along an axis: the first tap of window `index` that is not padding.
__device__ inline unsigned first_tap(const Windows &w, int axis, unsigned index) {
    const unsigned start = index * (unsigned)w.stride[axis], padding = w.padding[axis];
    return start < padding ? padding - start : 0;
}

// `size`: of the windows, or 0 if it is not known.
template <typename T, unsigned size> __device__ inline void max_pool_of(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Windows &w = WINDOWS;
    const unsigned long long element = thread_in_grid();
    unsigned long long rest = element;
    const unsigned column = take(rest, w.output[1]), row = take(rest, w.output[0]), width = w.input[1];
    if (rest >= w.planes) return;
    const T *x = TENSOR(const T, 0) + rest * w.input[0] * width;
    unsigned best = inside(w, 0, row, 0) * width + inside(w, 1, column, 0);
    Real largest = Element<T>::load(x[best]);
    const unsigned rows = size ? size : w.kernel[0], columns = size ? size : w.kernel[1];
    for (unsigned i = 0; i < rows; i++) {
        for (unsigned j = 0; j < columns; j++) {
            const unsigned position = inside(w, 0, row, i) * width + inside(w, 1, column, j);
            const Real value = Element<T>::load(x[position]);
            if (value > largest || value != value) {
                largest = value;
                best = position;
            }
        }
    }
    TENSOR(T, 1)[element] = Element<T>::store(largest);
    TENSOR(unsigned, 2)[element] = best;
}

// tensors: x, y, and where in its plane each maximum is (u32). The first of equal maxima counts, and the last NaN. One
// thread per element of y. All loads of the usual windows are in flight together.
template <typename T> __device__ inline void max_pool(const Arguments &by) {
    if (WINDOWS.kernel[0] == 3 && WINDOWS.kernel[1] == 3) {
        max_pool_of<T, 3>(by);
    } else {
        max_pool_of<T, 0>(by);
    }
}
LAYER(max_pool)

// Along an axis: the windows that inputs from `at` to `last` are in, from `from` up to `to`.
__device__ inline void windows_of(const Windows &w, int axis, unsigned at, unsigned last, unsigned &from, unsigned &to) {
    const unsigned padded = at + (unsigned)w.padding[axis], kernel = w.kernel[axis], stride = w.stride[axis];
    from = padded < kernel ? 0 : (padded - kernel) / stride + 1;
    to = min((last + (unsigned)w.padding[axis]) / stride + 1, (unsigned)w.output[axis]);
}

template <typename T, bool is_vector> __device__ inline void max_pool_backward_of(const Arguments &by) {
    const Windows &w = WINDOWS;
    const unsigned count = is_vector ? Few<T>::most : 1, width = w.input[1];
    unsigned long long rest = thread_in_grid();
    const unsigned long long first = rest * count;
    const unsigned column = take(rest, width / count) * count, row = take(rest, w.input[0]);
    if (rest >= w.planes) return;
    unsigned top, bottom, left, right;
    windows_of(w, 0, row, row, top, bottom);
    windows_of(w, 1, column, column + count - 1, left, right);
    const unsigned long long start = rest * w.output[0] * w.output[1];
    const T *__restrict__ dy = TENSOR(const T, 0) + start;
    const unsigned *__restrict__ positions = TENSOR(const unsigned, 2) + start;
    Few<T> sums = {};
    for (unsigned i = top; i < bottom; i++) {
#pragma unroll 4
        for (unsigned j = left; j < right; j++) {
            const unsigned window = i * (unsigned)w.output[1] + j, at = positions[window] - (row * width + column);
            const typename Element<T>::Real gradient = Element<T>::load(dy[window]);
            FOR_EACH_OF(T, is_vector, k) if (at == k) sums.at[k] += gradient;
        }
    }
    sums.store(TENSOR(T, 1) + first, is_vector);
}

// tensors: dy, dx, the positions of the maxima. One thread per vector of dx.
template <typename T> __device__ inline void max_pool_backward(const Arguments &by) {
    if (WINDOWS.vector > 1) {
        max_pool_backward_of<T, true>(by);
    } else {
        max_pool_backward_of<T, false>(by);
    }
}
LAYER(max_pool_backward)

// Windows of 3 × 3 that begin at every second column, one column before the first, as in the stem of a ResNet. Rows of x are whole
// vectors.

// tensors: x, y, and which tap of its window each maximum is (u8). Equal maxima and NaN count as above. A thread has as many neighbouring
// windows as a vector has elements; numbers `vector`: whether they are a vector of y.
template <typename T> __device__ inline void max_pool_halve(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Windows &w = WINDOWS;
    const unsigned most = Few<T>::most, width = w.input[1], windows = w.output[1];
    unsigned long long rest = thread_in_grid();
    const unsigned first = take(rest, (windows + most - 1) / most) * most, row = take(rest, w.output[0]);
    if (rest >= w.planes) return;
    const T *x = TENSOR(const T, 0) + rest * w.input[0] * width;
    const bool has_left = first > 0, has_first = 2 * first < width, has_second = 2 * first + most < width;
    unsigned lines[3];
    Real left[3];
    Few<T> vectors[3][2];
    _Pragma("unroll") for (unsigned i = 0; i < 3; i++) {
        lines[i] = inside(w, 0, row, i);
        const T *from = x + lines[i] * width;
        left[i] = Element<T>::load(from[has_left ? 2 * first - 1 : 0]);
        vectors[i][0].load(from + (has_first ? 2 * first : 0), true);
        vectors[i][1].load(from + (has_second ? 2 * first + most : 0), true);
    }
    const Real least = __uint_as_float(0xff800000u);
    Few<T> largest;
    Neighbours<unsigned char, Few<T>::most> taps;
    FOR_EACH_OF(T, true, k) {
        largest.at[k] = least;
        taps.at[k] = 3 * first_tap(w, 0, row) + (first + k == 0 ? 1 : 0);
    }
    _Pragma("unroll") for (unsigned i = 0; i < 3; i++) {
        const unsigned tap = 3 * (lines[i] + (unsigned)w.padding[0] - row * (unsigned)w.stride[0]);
        FOR_EACH_OF(T, true, k) {
            _Pragma("unroll") for (int j = 0; j < 3; j++) {
                const int at = 2 * k + j - 1;
                const bool exists = at < 0 ? has_left : at < (int)most ? has_first : has_second;
                const Real value = !exists ? least : at < 0 ? left[i] : vectors[i][at / most].at[at % most];
                if (value > largest.at[k] || value != value) {
                    largest.at[k] = value;
                    taps.at[k] = tap + j;
                }
            }
        }
    }
    const unsigned long long start = (rest * w.output[0] + row) * windows + first;
    T *y = TENSOR(T, 1) + start;
    unsigned char *to = TENSOR(unsigned char, 2) + start;
    if (w.vector > 1) {
        largest.store(y, true);
        *reinterpret_cast<Neighbours<unsigned char, Few<T>::most> *>(to) = taps;
        return;
    }
    FOR_EACH_OF(T, true, k) {
        if (first + k >= windows) break;
        y[k] = Element<T>::store(largest.at[k]);
        to[k] = taps.at[k];
    }
}
LAYER(max_pool_halve)

// tensors: dy, dx, the taps of the maxima. A thread has a vector of dx; numbers `vector`: whether half a vector of dy is loaded at once.
template <typename T> __device__ inline void max_pool_halve_backward(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Windows &w = WINDOWS;
    const int half = Few<T>::most / 2;
    const unsigned windows = w.output[1];
    unsigned long long rest = thread_in_grid();
    const unsigned long long vector = rest;
    const unsigned left = take(rest, w.input[1] / Few<T>::most) * half, row = take(rest, w.input[0]);
    if (rest >= w.planes) return;
    unsigned top, bottom;
    windows_of(w, 0, row, row, top, bottom);
    // The window behind these has the last element as well.
    const bool has_next = left + half < windows;
    Few<T> sums = {};
    for (unsigned i = top; i < bottom; i++) {
        const unsigned tap = 3 * (row + (unsigned)w.padding[0] - i * (unsigned)w.stride[0]);
        const unsigned long long start = (rest * w.output[0] + i) * windows + left;
        const T *dy = TENSOR(const T, 0) + start;
        const unsigned char *taps = TENSOR(const unsigned char, 2) + start;
        Neighbours<T, half> gradients;
        Neighbours<unsigned char, half> found;
        if (w.vector > 1) {
            gradients = *reinterpret_cast<const Neighbours<T, half> *>(dy);
            found = *reinterpret_cast<const Neighbours<unsigned char, half> *>(taps);
        } else {
            _Pragma("unroll") for (int k = 0; k < half; k++) {
                gradients.at[k] = dy[k];
                found.at[k] = taps[k];
            }
        }
        const unsigned next = has_next ? half : 0;
        const Real gradient_of_next = Element<T>::load(dy[next]);
        const bool has_last = has_next && taps[next] == tap;
        _Pragma("unroll") for (int k = 0; k < half; k++) {
            const Real gradient = Element<T>::load(gradients.at[k]);
            const unsigned of = found.at[k] - tap;
            if (k > 0 && of == 0) sums.at[2 * k - 1] += gradient;
            if (of == 1) sums.at[2 * k] += gradient;
            if (of == 2) sums.at[2 * k + 1] += gradient;
        }
        if (has_last) sums.at[2 * half - 1] += gradient_of_next;
    }
    sums.store(TENSOR(T, 1) + vector * Few<T>::most, true);
}
LAYER(max_pool_halve_backward)

// In channels_last, a thread has a vector of a pixel's channels.

// Along an axis: input `tap` of window `index`; one of the padding is no input, and so at least as large as the input's size.
__device__ inline unsigned seen(const Windows &w, int axis, unsigned index, unsigned tap) {
    return index * (unsigned)w.stride[axis] + tap - (unsigned)w.padding[axis];
}

// `size`: of the windows, or 0 if it is not known. The loads of a row of a window are in flight together.
template <typename T, unsigned size, bool is_vector> __device__ inline void max_pool_pixels_of(const Arguments &by) {
    const Windows &w = WINDOWS;
    const unsigned count = is_vector ? Few<T>::most : 1, rows = size ? size : w.kernel[0], columns = size ? size : w.kernel[1];
    unsigned long long rest = thread_in_grid();
    const unsigned long long first = rest * count, channel = take(rest, w.channels / count) * count;
    const unsigned column = take(rest, w.output[1]), row = take(rest, w.output[0]);
    if (rest >= w.planes) return;
    const T *x = TENSOR(const T, 0) + rest * w.input[0] * w.input[1] * w.channels + channel;
    const unsigned start = first_tap(w, 0, row) * columns + first_tap(w, 1, column);
    Few<T> largest;
    Neighbours<unsigned char, Few<T>::most> taps;
    FOR_EACH_OF(T, is_vector, k) {
        largest.at[k] = __uint_as_float(0xff800000u); // −∞
        taps.at[k] = start;
    }
    for (unsigned i = 0; i < rows; i++) {
        const unsigned line = seen(w, 0, row, i);
        if (line >= w.input[0]) continue;
        constexpr unsigned at_once = size ? size : 1;
        for (unsigned from = 0; from < columns; from += at_once) {
            Few<T> few[at_once];
            bool exists[at_once];
#pragma unroll
            for (unsigned n = 0; n < at_once; n++) {
                const unsigned at = seen(w, 1, column, from + n);
                exists[n] = at < w.input[1];
                few[n].load(x + ((unsigned long long)line * w.input[1] + (exists[n] ? at : 0)) * w.channels, is_vector);
            }
#pragma unroll
            for (unsigned n = 0; n < at_once; n++) {
                if (!exists[n]) continue;
                FOR_EACH_OF(T, is_vector, k) {
                    const typename Element<T>::Real value = few[n].at[k];
                    if (value > largest.at[k] || value != value) {
                        largest.at[k] = value;
                        taps.at[k] = i * columns + from + n;
                    }
                }
            }
        }
    }
    largest.store(TENSOR(T, 1) + first, is_vector);
    unsigned char *to = TENSOR(unsigned char, 2) + first;
    if (is_vector) *reinterpret_cast<Neighbours<unsigned char, Few<T>::most> *>(to) = taps;
    else *to = taps.at[0];
}

// tensors: x, y, and which tap of its window each maximum is (u8). The first of equal maxima counts, and the last NaN.
template <typename T> __device__ inline void max_pool_pixels(const Arguments &by) {
    const bool is_usual = WINDOWS.kernel[0] == 3 && WINDOWS.kernel[1] == 3;
    if (WINDOWS.vector == 1) max_pool_pixels_of<T, 0, false>(by);
    else if (is_usual) max_pool_pixels_of<T, 3, true>(by);
    else max_pool_pixels_of<T, 0, true>(by);
}
LAYER(max_pool_pixels)

// tensors: dy, dx, the taps of the maxima.
template <typename T> __device__ inline void max_pool_pixels_backward(const Arguments &by) {
    const Windows &w = WINDOWS;
    const unsigned count = w.vector, columns = w.kernel[1];
    const bool is_vector = count > 1;
    unsigned long long rest = thread_in_grid();
    const unsigned long long first = rest * count, channel = take(rest, w.channels / count) * count;
    const unsigned column = take(rest, w.input[1]), row = take(rest, w.input[0]);
    if (rest >= w.planes) return;
    unsigned top, bottom, left, right;
    windows_of(w, 0, row, row, top, bottom);
    windows_of(w, 1, column, column, left, right);
    Few<T> sums = {};
    for (unsigned i = top; i < bottom; i++) {
        const unsigned tap_row = row + (unsigned)w.padding[0] - i * (unsigned)w.stride[0];
#pragma unroll 2
        for (unsigned j = left; j < right; j++) {
            const unsigned tap = tap_row * columns + column + (unsigned)w.padding[1] - j * (unsigned)w.stride[1];
            const unsigned long long window = ((rest * w.output[0] + i) * w.output[1] + j) * w.channels + channel;
            const unsigned char *taps = TENSOR(const unsigned char, 2) + window;
            Few<T> dy;
            dy.load(TENSOR(const T, 0) + window, is_vector);
            Neighbours<unsigned char, Few<T>::most> found;
            if (is_vector) found = *reinterpret_cast<const Neighbours<unsigned char, Few<T>::most> *>(taps);
            else found.at[0] = *taps;
            FOR_EACH_OF(T, is_vector, k) if (found.at[k] == tap) sums.at[k] += dy.at[k];
        }
    }
    sums.store(TENSOR(T, 1) + first, is_vector);
}
LAYER(max_pool_pixels_backward)

// Each output is a weighted sum of inputs, row by row and column by column. tensors: the input planes, the output planes,
// and two tables (f64), for rows and for columns. A table has for each output the number of the first of its terms, then
// the number of all terms, and then the terms: pairs of an input and its weight. numbers: planes, rows and columns of the
// input, rows and columns of the output, and the outputs of a thread: a whole vector, or one.
template <typename T> __device__ inline void resample(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const unsigned long long height = by.numbers[3], width = by.numbers[4], first = thread_in_grid() * by.numbers[5];
    const bool is_vector = by.numbers[5] > 1;
    unsigned long long rest = first;
    const unsigned long long column = take(rest, width), row = take(rest, height);
    if (rest >= by.numbers[0]) return;
    const T *x = TENSOR(const T, 0) + rest * by.numbers[1] * by.numbers[2];
    const double *rows = TENSOR(const double, 2), *columns = TENSOR(const double, 3);
    const double *row_terms = rows + height + 1, *column_terms = columns + width + 1;
    Few<T> totals;
    FOR_EACH_OF(T, is_vector, k) totals.at[k] = 0;
    const unsigned last_row = rows[row + 1];
    for (unsigned i = rows[row]; i < last_row; i++) {
        const T *line = x + (unsigned long long)row_terms[2 * i] * by.numbers[2];
        const Real row_weight = row_terms[2 * i + 1];
        FOR_EACH_OF(T, is_vector, k) {
            const unsigned last_column = columns[column + k + 1];
            Real sum = 0;
            for (unsigned j = columns[column + k]; j < last_column; j++) {
                const Real weight = column_terms[2 * j + 1];
                sum += Element<T>::load(line[(unsigned long long)column_terms[2 * j]]) * weight;
            }
            totals.at[k] += sum * row_weight;
        }
    }
    totals.store(TENSOR(T, 1) + first, is_vector);
}
LAYER(resample)

// As `resample`, in channels_last. numbers[0]: images; numbers[5]: the channels of a thread; numbers[6]: channels.
template <typename T> __device__ inline void resample_pixels(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const unsigned long long height = by.numbers[3], width = by.numbers[4], count = by.numbers[5], channels = by.numbers[6];
    const bool is_vector = count > 1;
    unsigned long long rest = thread_in_grid();
    const unsigned long long first = rest * count, channel = take(rest, channels / count) * count;
    const unsigned long long column = take(rest, width), row = take(rest, height);
    if (rest >= by.numbers[0]) return;
    const T *x = TENSOR(const T, 0) + rest * by.numbers[1] * by.numbers[2] * channels + channel;
    const double *rows = TENSOR(const double, 2), *columns = TENSOR(const double, 3);
    const double *row_terms = rows + height + 1, *column_terms = columns + width + 1;
    Few<T> totals = {};
    const unsigned last_row = rows[row + 1], first_column = columns[column], last_column = columns[column + 1];
    for (unsigned i = rows[row]; i < last_row; i++) {
        const T *line = x + (unsigned long long)row_terms[2 * i] * by.numbers[2] * channels;
        const Real row_weight = row_terms[2 * i + 1];
        Few<T> sum = {};
#pragma unroll 4
        for (unsigned j = first_column; j < last_column; j++) {
            const Real weight = column_terms[2 * j + 1];
            Few<T> few;
            few.load(line + (unsigned long long)column_terms[2 * j] * channels, is_vector);
            FOR_EACH_OF(T, is_vector, k) sum.at[k] += few.at[k] * weight;
        }
        FOR_EACH_OF(T, is_vector, k) totals.at[k] += sum.at[k] * row_weight;
    }
    totals.store(TENSOR(T, 1) + first, is_vector);
}
LAYER(resample_pixels)
