// The bias of a linear layer: a row for all rows of a matrix, and the sums of a matrix's columns. And copies between rows that begin
// anywhere and rows that begin at multiples of 16.

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
    const auto add_rows = [&](auto *matrix) {
        // Several loads at a time, since each takes long.
        _Pragma("unroll 4") for (unsigned long long row = part * m.part + threadIdx.x / COLUMNS; row < end;
                                 row += LINES) {
            Few<T> few;
            few.load(matrix + row * m.columns + column, is_vector);
            FOR_EACH_OF(T, is_vector, k) sum.at[k] += few.at[k];
        }
    };
    if (column < m.columns) {
        if (m.from_sums) add_rows(TENSOR(const Real, 0));
        else add_rows(TENSOR(const T, 0));
    }
    sums[threadIdx.x] = sum;
    add_lines([&](unsigned to, unsigned from) {
        FOR_EACH_OF(T, is_vector, k) sums[to].at[k] += sums[from].at[k];
    });
    if (threadIdx.x >= COLUMNS || column >= m.columns) return;
    sum = sums[threadIdx.x];
    if (m.to_sums) sum.store(TENSOR(Real, 1) + part * m.columns + column, is_vector);
    else sum.store(TENSOR(T, 1) + column, is_vector);
}
LAYER(sum_columns)

// The 16 bytes at `from`, which is a multiple of `T`'s size: shifted out of the two vectors in memory that contain them.
template <typename T> __device__ inline Words words_at(const T *from) {
    const unsigned offset = reinterpret_cast<unsigned long long>(from) % 16;
    const Words *vectors = reinterpret_cast<const Words *>(reinterpret_cast<const char *>(from) - offset);
    const Words low = vectors[0];
    if (offset == 0) return low;
    const Words high = vectors[1];
    unsigned words[8];
    for (int k = 0; k < 4; k++) {
        words[k] = low.at[k];
        words[k + 4] = high.at[k];
    }
    // Shifts by constants, one for each bit of the offset, keep the words in registers.
    if (offset & 8)
        for (int k = 0; k < 6; k++) words[k] = words[k + 2];
    if (offset & 4)
        for (int k = 0; k < 5; k++) words[k] = words[k + 1];
    if (offset & 2)
        for (int k = 0; k < 4; k++) words[k] = words[k] >> 16 | words[k + 1] << 16;
    return Words{words[0], words[1], words[2], words[3]};
}

// tensors: from, to. numbers: rows; their columns; elements from the beginning of a row to that of the next in each tensor; columns
// of tensor 0 that may be read in its last row. A thread per vector that begins at a multiple of 16 in `to`, and one per row for the
// columns before and after these.
template <typename T> __device__ inline void move_columns(const Arguments &by) {
    const unsigned long long most = Few<T>::most, columns = by.numbers[1];
    unsigned long long row = thread_in_grid();
    const unsigned long long part = take(row, columns / most + 1);
    if (row >= by.numbers[0]) return;
    const T *from = TENSOR(const T, 0) + row * by.numbers[2];
    T *to = TENSOR(T, 1) + row * by.numbers[3];
    const unsigned long long before = (0 - reinterpret_cast<unsigned long long>(to)) % 16 / sizeof(T);
    const unsigned long long lead = min(before, columns), vectors = (columns - lead) / most;
    if (part == 0) {
        for (unsigned long long i = 0; i < lead; i++) to[i] = from[i];
        for (unsigned long long i = lead + vectors * most; i < columns; i++) to[i] = from[i];
        return;
    }
    if (part > vectors) return;
    const unsigned long long at = lead + (part - 1) * most;
    // The vectors that contain these columns may end behind the tensor.
    if (row + 1 == by.numbers[0] && at + 2 * most > by.numbers[4]) {
        for (unsigned long long i = at; i < at + most; i++) to[i] = from[i];
        return;
    }
    *reinterpret_cast<Words *>(to + at) = words_at(from + at);
}
LAYER(move_columns)
