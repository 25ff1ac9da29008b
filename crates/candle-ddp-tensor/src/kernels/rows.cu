// Rows that the threads of a few warps share, and columns, some of which a block sums.

// How many vectors of a row a thread keeps in registers, and loads at once; LOADS in launches.rs is the same.
#define HELD 4

// A thread's place in its row. Elements from `head` to `tail` are loaded as vectors, the others one by one. A thread behind the last row
// has no elements, but takes part in reductions.
struct Span {
    unsigned long long row, head, tail, count;
    unsigned lane, lanes;
};

__device__ inline Span span(unsigned long long rows, unsigned long long count, unsigned lanes) {
    const unsigned long long row = (unsigned long long)blockIdx.x * (THREADS / lanes) + threadIdx.x / lanes;
    if (row >= rows) count = 0;
    Span of = {row, count, count, count, threadIdx.x % lanes, lanes};
    return of;
}

// This thread's next vectors of a row from index `i` on.
template <typename T> struct Vectors {
    InMemory<T, Few<T>::most> vectors[HELD];

    __device__ Vectors(const T *row, const Span &of, unsigned long long i) {
        IS_GLOBAL(row);
        _Pragma("unroll") for (int n = 0; n < HELD; n++, i += of.lanes * Few<T>::most)
            if (i < of.tail) vectors[n] = *reinterpret_cast<const InMemory<T, Few<T>::most> *>(row + i);
    }

    __device__ Few<T> operator[](int n) const {
        Few<T> few;
        few.template widen<T>(vectors[n]);
        return few;
    }
};

// A row, whose first vectors stay in registers; each thread keeps its own.
template <typename T> struct Row {
    const T *from;
    Vectors<T> held;

    // `stride`: the elements from the beginning of one row to that of the next.
    __device__ Row(const T *tensor, const Span &of, unsigned long long stride)
        : from(tensor + of.row * stride), held(from, of, of.head + of.lane * Few<T>::most) {}

    __device__ Few<T> operator[](unsigned long long i) const {
        Few<T> few;
        few.load(from + i, false);
        return few;
    }
};

template <typename Body, typename T, typename... Others>
__device__ inline void for_each_vector(const Span &of, unsigned long long i, Body body, const Vectors<T> &row,
                                       const Vectors<Others> &...others) {
    _Pragma("unroll") for (int n = 0; n < HELD; n++, i += of.lanes * Few<T>::most)
        if (i < of.tail) body(Several(), i, row[n], others[n]...);
}

// Calls `several` for this thread's sets of at most HELD vectors of a row, and `one` for its other elements.
template <typename SeveralBody, typename OneBody, typename T>
__device__ inline void for_each_set(const Span &of, SeveralBody several, OneBody one, const Row<T> &row) {
    const unsigned step = HELD * of.lanes * Few<T>::most;
    unsigned long long i = of.head + of.lane * Few<T>::most;
    if (i < of.tail) several(i, row.held);
    for (i += step; i < of.tail; i += step) several(i, Vectors<T>(row.from, of, i));
    for (i = of.lane; i < of.head; i += of.lanes) one(row[i].at[0]);
    for (i = of.tail + of.lane; i < of.count; i += of.lanes) one(row[i].at[0]);
}

// Calls `body` for this thread's elements of rows with one span: `Several` or `One`, the index of the first, and a `Few` of each row.
template <typename Body, typename T, typename... Others>
__device__ inline void for_each_of_row(const Span &of, Body body, const Row<T> &row, const Row<Others> &...others) {
    const unsigned step = HELD * of.lanes * Few<T>::most;
    unsigned long long i = of.head + of.lane * Few<T>::most;
    for_each_vector(of, i, body, row.held, others.held...);
    for (i += step; i < of.tail; i += step)
        for_each_vector(of, i, body, Vectors<T>(row.from, of, i), Vectors<Others>(others.from, of, i)...);
    for (i = of.lane; i < of.head; i += of.lanes) body(One(), i, row[i], others[i]...);
    for (i = of.tail + of.lane; i < of.count; i += of.lanes) body(One(), i, row[i], others[i]...);
}

// The same for a row that is in memory only: a vector at a time, in few registers.
template <typename Body, typename T>
__device__ inline void for_each_few_of_row(const Span &of, const T *row, Body body) {
    const unsigned step = of.lanes * Few<T>::most;
    const auto load = [&](auto size, unsigned long long i) {
        Few<T> few;
        few.load(row + i, size.is_vector);
        body(size, i, few);
    };
    _Pragma("unroll 1") for (unsigned long long i = of.head + of.lane * Few<T>::most; i < of.tail; i += step) load(Several(), i);
    for (unsigned long long i = of.lane; i < of.head; i += of.lanes) load(One(), i);
    for (unsigned long long i = of.tail + of.lane; i < of.count; i += of.lanes) load(One(), i);
}

// Reduces `value` over the threads of a row, for all of them. Each call in a kernel has its own `CALL`, and so its own memory.
template <int CALL, typename Op, typename Real> __device__ inline Real reduce_row(const Span &of, Real value) {
    __shared__ Real warps[THREADS / WARP];
    value = reduce_warp<Op>(value);
    if (of.lanes == WARP) return value;
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = value;
    __syncthreads();
    const Real *of_row = warps + threadIdx.x / of.lanes * (of.lanes / WARP);
    value = of_row[0];
    for (unsigned i = 1; i < of.lanes / WARP; i++) value = Op::of(value, of_row[i]);
    return value;
}

// How many neighbouring columns, or vectors of them, a block sums; COLUMNS in launches.rs is the same. Each of its threads sums some
// rows of one.
#define COLUMNS 32u
#define LINES (THREADS / COLUMNS)

// Calls `add(to, from)` for threads with one column, until the first `columns` threads have the sums of all.
template <unsigned columns = COLUMNS, typename AddTo> __device__ inline void add_lines(AddTo add) {
    for (unsigned half = THREADS / 2; half >= columns; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) add(threadIdx.x, threadIdx.x + half);
    }
}
