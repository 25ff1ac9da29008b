// The bias of a linear layer: a row for all rows of a matrix, and the sums of a matrix's columns.

// tensors: y of (rows, columns) elements, and the row. numbers: rows, columns, and the columns of a thread: a whole vector, or one.
template <typename T> __device__ inline void repeat_row(const Arguments &by) {
    const unsigned long long vector = by.numbers[2];
    unsigned long long row = thread_in_grid();
    const unsigned long long column = take(row, by.numbers[1] / vector) * vector;
    if (row >= by.numbers[0]) return;
    T *y = TENSOR(T, 0) + row * by.numbers[1] + column;
    const T *from = TENSOR(const T, 1) + column;
    typedef Neighbours<T, Few<T>::most> Vector;
    if (vector > 1) *reinterpret_cast<Vector *>(y) = *reinterpret_cast<const Vector *>(from);
    else *y = *from;
}
LAYER(repeat_row)

// How many neighbouring columns, or vectors of them, a block sums.
#define COLUMNS 32u

struct Matrix {
    unsigned long long rows, columns;
    unsigned long long part;             // rows that a block sums
    unsigned long long from_sums, to_sums; // whether tensor 0 and tensor 1 have the dtype of the arithmetic, not that of the layer
    unsigned long long vector;             // columns of a thread: a whole vector, or one
};

// tensors: the matrix, and the sums of its columns: a row of them for each part of the rows. One block per part and
// COLUMNS columns or vectors.
template <typename T> __device__ inline void sum_columns(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    __shared__ Few<T> sums[THREADS];
    const Matrix &m = *reinterpret_cast<const Matrix *>(by.numbers);
    unsigned long long part = blockIdx.x;
    const unsigned long long tile = take(part, (m.columns / m.vector + COLUMNS - 1) / COLUMNS);
    const unsigned long long column = (tile * COLUMNS + threadIdx.x % COLUMNS) * m.vector;
    const unsigned long long end = min(m.rows, (part + 1) * m.part);
    const bool is_vector = m.vector > 1;
    Few<T> sum = {};
    if (column < m.columns) {
        for (unsigned long long row = part * m.part + threadIdx.x / COLUMNS; row < end; row += THREADS / COLUMNS) {
            const unsigned long long at = row * m.columns + column;
            Few<T> few;
            if (m.from_sums) few.load(TENSOR(const Real, 0) + at, is_vector);
            else few.load(TENSOR(const T, 0) + at, is_vector);
            FOR_EACH_OF(T, is_vector, k) sum.at[k] += few.at[k];
        }
    }
    sums[threadIdx.x] = sum;
    for (unsigned half = THREADS / 2; half >= COLUMNS; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half)
            FOR_EACH_OF(T, is_vector, k) sums[threadIdx.x].at[k] += sums[threadIdx.x + half].at[k];
    }
    if (threadIdx.x >= COLUMNS || column >= m.columns) return;
    sum = sums[threadIdx.x];
    if (m.to_sums) sum.store(TENSOR(Real, 1) + part * m.columns + column, is_vector);
    else sum.store(TENSOR(T, 1) + column, is_vector);
}
LAYER(sum_columns)
