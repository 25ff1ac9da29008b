// Rows that the threads of a warp or of a block share.

// How many vectors of a row a thread keeps in registers; LOADS in launches.rs is the same.
#define HELD 8

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

// This thread's vectors of a row from index `i` on, in registers.
template <typename T, int COUNT> struct Vectors {
    Neighbours<T, Few<T>::most> vectors[COUNT];

    __device__ Vectors(const T *row, const Span &of, unsigned long long i) {
        IS_GLOBAL(row);
        _Pragma("unroll") for (int n = 0; n < COUNT; n++, i += of.lanes * Few<T>::most)
            if (i < of.tail) vectors[n] = *reinterpret_cast<const Neighbours<T, Few<T>::most> *>(row + i);
    }

    __device__ Few<T> operator[](int n) const {
        Few<T> few;
        for (int k = 0; k < Few<T>::most; k++) few.at[k] = Element<T>::load(vectors[n].at[k]);
        return few;
    }
};

// A row, whose first vectors stay in registers; each thread keeps its own.
template <typename T> struct Row {
    const T *from;
    Vectors<T, HELD> held;

    __device__ Row(const T *tensor, const Span &of, unsigned long long count)
        : from(tensor + of.row * count), held(from, of, of.head + of.lane * Few<T>::most) {}

    __device__ Few<T> operator[](unsigned long long i) const {
        Few<T> few;
        few.load(from + i, false);
        return few;
    }
};

template <int COUNT, typename Body, typename T, typename... Others>
__device__ inline void for_each_vector(const Span &of, unsigned long long i, Body body, const Vectors<T, COUNT> &row,
                                       const Vectors<Others, COUNT> &...others) {
    _Pragma("unroll") for (int n = 0; n < COUNT; n++, i += of.lanes * Few<T>::most)
        if (i < of.tail) body(Several(), i, row[n], others[n]...);
}

// Calls `body` for this thread's elements of rows with one span: `Several` or `One`, the index of the first, and a `Few` of each row.
template <typename Body, typename T, typename... Others>
__device__ inline void for_each_of_row(const Span &of, Body body, const Row<T> &row, const Row<Others> &...others) {
    const int more = HELD / 2; // vectors that are loaded before the first is used
    unsigned long long i = of.head + of.lane * Few<T>::most;
    for_each_vector(of, i, body, row.held, others.held...);
    for (i += HELD * of.lanes * Few<T>::most; i < of.tail; i += more * of.lanes * Few<T>::most)
        for_each_vector(of, i, body, Vectors<T, more>(row.from, of, i), Vectors<Others, more>(others.from, of, i)...);
    for (i = of.lane; i < of.head; i += of.lanes) body(One(), i, row[i], others[i]...);
    for (i = of.tail + of.lane; i < of.count; i += of.lanes) body(One(), i, row[i], others[i]...);
}

// Reduces `value` over the threads of a row, for all of them. Each call in a kernel has its own `CALL`, and so its own memory.
template <int CALL, typename Op, typename Real> __device__ inline Real reduce_row(const Span &of, Real value) {
    __shared__ Real warps[THREADS / WARP];
    value = reduce_warp<Op>(value);
    if (of.lanes == WARP) return value;
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = value;
    __syncthreads();
    value = warps[0];
    for (unsigned i = 1; i < THREADS / WARP; i++) value = Op::of(value, warps[i]);
    return value;
}
