// Pooling, and other maps of planes.

// Windows along rows and columns of planes.
struct Windows {
    unsigned long long planes;
    unsigned long long input[2], output[2], kernel[2], stride[2], padding[2];
};
#define WINDOWS (*reinterpret_cast<const Windows *>(by.numbers))

// Along an axis: the inputs of window `index`, from `from` up to `to`.
__device__ inline void inside(const Windows &w, int axis, unsigned long long index, unsigned long long &from,
                              unsigned long long &to) {
    const unsigned long long start = index * w.stride[axis], end = start + w.kernel[axis];
    from = start < w.padding[axis] ? 0 : start - w.padding[axis];
    to = min(end < w.padding[axis] ? 0 : end - w.padding[axis], w.input[axis]);
}

// tensors: x, y, and where in its plane each maximum is (u32). The first of equal maxima counts, and the last NaN. One
// thread per element of y.
template <typename T> __device__ inline void max_pool(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Windows &w = WINDOWS;
    const unsigned long long element = thread_in_grid();
    unsigned long long rest = element, top, bottom, left, right;
    const unsigned long long column = take(rest, w.output[1]), row = take(rest, w.output[0]);
    if (rest >= w.planes) return;
    inside(w, 0, row, top, bottom);
    inside(w, 1, column, left, right);
    const T *x = TENSOR(const T, 0) + rest * w.input[0] * w.input[1];
    unsigned best = top * w.input[1] + left;
    Real largest = Element<T>::load(x[best]);
    for (unsigned long long i = top; i < bottom; i++) {
        for (unsigned long long j = left; j < right; j++) {
            const unsigned position = i * w.input[1] + j;
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
LAYER(max_pool)

// Along an axis: the windows that input `at` is in, from `from` up to `to`.
__device__ inline void windows_of(const Windows &w, int axis, unsigned long long at, unsigned long long &from,
                                  unsigned long long &to) {
    const unsigned long long position = at + w.padding[axis];
    from = position < w.kernel[axis] ? 0 : (position - w.kernel[axis]) / w.stride[axis] + 1;
    to = min(position / w.stride[axis] + 1, w.output[axis]);
}

// tensors: dy, dx, the positions of the maxima. One thread per element of dx.
template <typename T> __device__ inline void max_pool_backward(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Windows &w = WINDOWS;
    const unsigned long long element = thread_in_grid();
    unsigned long long rest = element, top, bottom, left, right;
    const unsigned long long column = take(rest, w.input[1]), row = take(rest, w.input[0]);
    if (rest >= w.planes) return;
    windows_of(w, 0, row, top, bottom);
    windows_of(w, 1, column, left, right);
    const unsigned long long start = rest * w.output[0] * w.output[1];
    const unsigned position = row * w.input[1] + column;
    Real sum = 0;
    for (unsigned long long i = top; i < bottom; i++) {
        for (unsigned long long j = left; j < right; j++) {
            const unsigned long long window = start + i * w.output[1] + j;
            if (TENSOR(const unsigned, 2)[window] == position) sum += Element<T>::load(TENSOR(const T, 0)[window]);
        }
    }
    TENSOR(T, 1)[element] = Element<T>::store(sum);
}
LAYER(max_pool_backward)

// Each output is a weighted sum of inputs, row by row and column by column. tensors: the input planes, the output planes,
// and two tables (f64), for rows and for columns. A table has for each output the number of the first of its terms, then
// the number of all terms, and then the terms: pairs of an input and its weight. numbers: planes, rows and columns of the
// input, rows and columns of the output. One thread per output.
template <typename T> __device__ inline void resample(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const unsigned long long height = by.numbers[3], width = by.numbers[4], element = thread_in_grid();
    unsigned long long rest = element;
    const unsigned long long column = take(rest, width), row = take(rest, height);
    if (rest >= by.numbers[0]) return;
    const T *x = TENSOR(const T, 0) + rest * by.numbers[1] * by.numbers[2];
    const double *rows = TENSOR(const double, 2), *columns = TENSOR(const double, 3);
    const unsigned first_row = rows[row], last_row = rows[row + 1];
    const unsigned first_column = columns[column], last_column = columns[column + 1];
    const double *row_terms = rows + height + 1, *column_terms = columns + width + 1;
    Real total = 0;
    for (unsigned i = first_row; i < last_row; i++) {
        const T *line = x + (unsigned long long)row_terms[2 * i] * by.numbers[2];
        Real sum = 0;
        for (unsigned j = first_column; j < last_column; j++) {
            const Real weight = column_terms[2 * j + 1];
            sum += Element<T>::load(line[(unsigned long long)column_terms[2 * j]]) * weight;
        }
        const Real weight = row_terms[2 * i + 1];
        total += sum * weight;
    }
    TENSOR(T, 1)[element] = Element<T>::store(total);
}
LAYER(resample)
