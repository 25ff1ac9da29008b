// The bias of a linear layer: a row for all rows of a matrix, and the sums of a matrix's columns.

// tensors: y of (rows, columns) elements, and the row. numbers: rows, columns. One thread per element of y.
template <typename T> __device__ inline void repeat_row(const Arguments &by) {
    const unsigned long long element = thread_in_grid();
    unsigned long long row = element;
    const unsigned long long column = take(row, by.numbers[1]);
    if (row >= by.numbers[0]) return;
    TENSOR(T, 0)[element] = TENSOR(const T, 1)[column];
}
LAYER(repeat_row)

// How many neighbouring columns a block sums.
#define COLUMNS 32u

struct Matrix {
    unsigned long long rows, columns;
    unsigned long long part;             // rows that a block sums
    unsigned long long from_sums, to_sums; // whether tensor 0 and tensor 1 have the dtype of the arithmetic, not that of the layer
};

// tensors: the matrix, and the sums of its columns: a row of them for each part of the rows. One block per part and
// COLUMNS columns.
template <typename T> __device__ inline void sum_columns(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    __shared__ Real sums[THREADS];
    const Matrix &m = *reinterpret_cast<const Matrix *>(by.numbers);
    unsigned long long part = blockIdx.x;
    const unsigned long long tile = take(part, (m.columns + COLUMNS - 1) / COLUMNS);
    const unsigned long long column = tile * COLUMNS + threadIdx.x % COLUMNS;
    const unsigned long long end = min(m.rows, (part + 1) * m.part);
    Real sum = 0;
    if (column < m.columns) {
        for (unsigned long long row = part * m.part + threadIdx.x / COLUMNS; row < end; row += THREADS / COLUMNS) {
            const unsigned long long at = row * m.columns + column;
            sum += m.from_sums ? TENSOR(const Real, 0)[at] : Element<T>::load(TENSOR(const T, 0)[at]);
        }
    }
    sums[threadIdx.x] = sum;
    for (unsigned half = THREADS / 2; half >= COLUMNS; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x >= COLUMNS || column >= m.columns) return;
    sum = sums[threadIdx.x];
    if (m.to_sums) TENSOR(Real, 1)[part * m.columns + column] = sum;
    else TENSOR(T, 1)[column] = Element<T>::store(sum);
}
LAYER(sum_columns)
