// Normalisation of rows of whole vectors, which the threads of a few warps keep in registers. Each thread has the same columns of several
// rows, one after the other: it loads weight and bias once, and sums their gradients on the way. A block's sums become those of one part.

// A row's vectors that a thread keeps in registers, as they are in memory.
template <typename T> struct Kept { InMemory<T, Few<T>::most> vectors[HELD]; };

// This thread's columns, the same in several rows, which are `step` apart.
template <typename T> struct Columns {
    Span of; // its lanes
    unsigned long long row, step;
    unsigned end, first, distance; // of all columns; the thread's first column, and from one of its vectors to the next

    __device__ Columns(const Norm &norm) {
        of.lanes = norm.lanes;
        of.lane = threadIdx.x % of.lanes;
        row = (unsigned long long)blockIdx.x * (THREADS / of.lanes) + threadIdx.x / of.lanes;
        step = norm.parts * (THREADS / of.lanes);
        end = norm.size;
        first = of.lane * Few<T>::most;
        distance = of.lanes * Few<T>::most;
    }

    // Calls `body` with the number and the first column of each of this thread's vectors.
    template <typename Body> __device__ void for_each(Body body) const {
        _Pragma("unroll") for (int n = 0; n < HELD; n++) {
            const unsigned column = first + n * distance;
            if (column < end) body(n, column);
        }
    }

    __device__ Kept<T> load(const T *row) const {
        Kept<T> kept;
        IS_GLOBAL(row);
        for_each([&](int n, unsigned column) {
            kept.vectors[n] = *reinterpret_cast<const InMemory<T, Few<T>::most> *>(row + column);
        });
        return kept;
    }
};

template <typename T> __device__ inline Few<T> widened(const InMemory<T, Few<T>::most> &vector) {
    Few<T> few;
    few.template widen<T>(vector);
    return few;
}

// This thread's elements of weight or bias, in registers if they are narrow. Wide ones need twice as many, and are loaded for each row.
template <typename T, bool is_narrow> struct Parameter {
    const void *from;
    Kept<T> kept;

    __device__ Parameter(const void *from, const Columns<T> &columns) : from(from) {
        if (is_narrow && from) kept = columns.load(static_cast<const T *>(from));
    }

    __device__ Few<T> at(int n, unsigned column) const {
        if constexpr (!is_narrow) return parameter<T>(from, column, false, true);
        InMemory<T, Few<T>::most> vector = kept.vectors[n];
#ifdef __CUDA_ARCH__
        // The compiler would convert them before the loop over the rows, and keep the results, in twice as many registers.
        if constexpr (sizeof(T) == 2)
            for (int k = 0; k < Few<T>::most / 2; k++) asm volatile("" : "+r"(vector.at[k]));
#endif
        return widened<T>(vector);
    }
};

// The sum over a thread's vectors.
template <typename Real> __device__ inline Real sum_of(const Real (&parts)[HELD]) {
    return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

template <typename T, bool adds, bool is_narrow> __device__ inline void normalise_rows(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const unsigned long long rows = NORM.rows;
    const Columns<T> columns(NORM);
    const unsigned size = columns.end;
    const T *x = TENSOR(const T, 0);
    const bool has_bias = by.tensors[3], centred = NORM.centred;
    const Parameter<T, is_narrow> weight(by.tensors[2], columns), bias(by.tensors[3], columns);
    const Real elements = size, eps = by.reals[0];
    unsigned long long row = columns.row;
    Kept<T> next;
    if (row < rows) next = columns.load(x + row * size);
    // All threads of a block take part in the reductions of its rows.
    for (unsigned long long line = row - threadIdx.x / columns.of.lanes; line < rows; line += columns.step) {
        const bool exists = row < rows;
        Few<T> few[HELD];
        _Pragma("unroll") for (int n = 0; n < HELD; n++) few[n] = widened<T>(next.vectors[n]);
        if constexpr (adds) {
            Kept<T> others;
            if (exists) others = columns.load(TENSOR(const T, 5) + row * size);
            columns.for_each([&](int n, unsigned column) {
                const Few<T> other = widened<T>(others.vectors[n]);
                FOR_EACH_OF(T, true, k) few[n].at[k] = few[n].at[k] + other.at[k];
                const InMemory<T, Few<T>::most> sum = few[n].template narrow<T>();
                if (exists) put(TENSOR(T, 6) + row * size + column, sum);
                few[n] = widened<T>(sum);
            });
        }
        // While this row is normalised.
        if (row + columns.step < rows) next = columns.load(x + (row + columns.step) * size);
        Real mean = 0, parts[HELD] = {};
        if (centred) {
            columns.for_each([&](int n, unsigned) { FOR_EACH_OF(T, true, k) parts[n] += few[n].at[k]; });
            mean = reduce_row<0, Add>(columns.of, sum_of(parts)) / elements;
            _Pragma("unroll") for (int n = 0; n < HELD; n++) parts[n] = 0;
        }
        columns.for_each([&](int n, unsigned) {
            FOR_EACH_OF(T, true, k) {
                few[n].at[k] = few[n].at[k] - mean;
                parts[n] += few[n].at[k] * few[n].at[k];
            }
        });
        const Real scale = 1 / sqrt(reduce_row<1, Add>(columns.of, sum_of(parts)) / elements + eps);
        if (exists) {
            columns.for_each([&](int n, unsigned column) {
                const Few<T> w = weight.at(n, column);
                FOR_EACH_OF(T, true, k) few[n].at[k] = few[n].at[k] * scale * w.at[k];
                if (has_bias) {
                    const Few<T> b = bias.at(n, column);
                    FOR_EACH_OF(T, true, k) few[n].at[k] += b.at[k];
                }
                few[n].store(TENSOR(T, 1) + row * size + column, true);
            });
            if (columns.of.lane == 0) {
                TENSOR(double, 4)[2 * row] = mean;
                TENSOR(double, 4)[2 * row + 1] = scale;
            }
        }
        row += columns.step;
        // The next row's reduction has the memory of this one's, unless another was in between.
        if (!centred) __syncthreads();
    }
}

// tensors: x, y, weight, bias or null, the statistics. reals: eps. For rows that fit into registers.
template <typename T> __device__ inline void norm_rows(const Arguments &by) {
    if (NORM.is_narrow) normalise_rows<T, false, true>(by);
    else normalise_rows<T, false, false>(by);
}
LAYER_TWICE(norm_rows)

// The same for x plus tensor 5; tensor 6 becomes this sum.
template <typename T> __device__ inline void add_norm_rows(const Arguments &by) {
    if (NORM.is_narrow) normalise_rows<T, true, true>(by);
    else normalise_rows<T, true, false>(by);
}
LAYER_TWICE(add_norm_rows)

// Rows of elements in shared memory, in the dtype of the arithmetic. Neighbouring threads access neighbouring 16 bytes.
template <typename T> struct Shared {
    typedef typename Element<T>::Real Real;
    typedef Neighbours<Real, 16 / sizeof(Real)> Part;
    static const unsigned parts = sizeof(Few<T>) / sizeof(Part), vectors = HELD * THREADS;
    Part at[parts][vectors];

    __device__ void put(unsigned vector, const Few<T> &few) {
        for (int k = 0; k < Few<T>::most; k++) at[k * sizeof(Real) / sizeof(Part)][vector].at[k % (16 / sizeof(Real))] = few.at[k];
    }

    __device__ Few<T> get(unsigned vector) const {
        Few<T> few;
        for (unsigned part = 0; part < parts; part++) {
            const Part here = at[part][vector];
            for (int k = 0; k < 16 / sizeof(Real); k++) few.at[part * (16 / sizeof(Real)) + k] = here.at[k];
        }
        return few;
    }
};

template <typename T, bool adds> __device__ inline void gradients_of_rows(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    __shared__ Shared<T> shared;
    const unsigned long long rows = NORM.rows;
    const Columns<T> columns(NORM);
    const unsigned size = columns.end, lanes = columns.of.lanes, most = Few<T>::most;
    const double *statistics = TENSOR(const double, 4);
    const Real elements = size;
    const bool centred = NORM.centred;
    for (unsigned vector = threadIdx.x; vector < size / most; vector += THREADS)
        shared.put(vector, parameter<T>(by.tensors[2], vector * most, NORM.is_narrow, true));
    __syncthreads();
    Few<T> d_weight[HELD] = {}, d_bias[HELD] = {};
    unsigned long long row = columns.row;
    for (unsigned long long line = row - threadIdx.x / lanes; line < rows; line += columns.step) {
        const bool exists = row < rows;
        Kept<T> x, dy, others;
        Real mean = 0, scale = 0, sum = 0, weighted = 0; // sums of dy × weight, and of its products with the normalised values
        if (exists) {
            x = columns.load(TENSOR(const T, 0) + row * size);
            dy = columns.load(TENSOR(const T, 3) + row * size);
            if (adds) others = columns.load(TENSOR(const T, 6) + row * size);
            mean = statistics[2 * row];
            scale = statistics[2 * row + 1];
            columns.for_each([&](int n, unsigned) {
                const Few<T> value = widened<T>(x.vectors[n]), gradient = widened<T>(dy.vectors[n]);
                const Few<T> w = shared.get(columns.of.lane + n * lanes);
                FOR_EACH_OF(T, true, k) {
                    const Real normal = (value.at[k] - mean) * scale, d = gradient.at[k] * w.at[k];
                    d_weight[n].at[k] += gradient.at[k] * normal;
                    d_bias[n].at[k] += gradient.at[k];
                    sum += d;
                    weighted += d * normal;
                }
            });
        }
        sum = reduce_row<0, Add>(columns.of, sum);
        weighted = reduce_row<1, Add>(columns.of, weighted);
        if (exists) {
            const Real a = centred ? sum / elements : 0, b = weighted / elements * scale;
            columns.for_each([&](int n, unsigned column) {
                const Few<T> value = widened<T>(x.vectors[n]), gradient = widened<T>(dy.vectors[n]);
                const Few<T> w = shared.get(columns.of.lane + n * lanes);
                Few<T> few;
                FOR_EACH_OF(T, true, k)
                    few.at[k] = scale * (gradient.at[k] * w.at[k] - a - (value.at[k] - mean) * b);
                if constexpr (adds) {
                    const Few<T> other = widened<T>(others.vectors[n]);
                    few = widened<T>(few.template narrow<T>());
                    FOR_EACH_OF(T, true, k) few.at[k] = other.at[k] + few.at[k];
                }
                few.store(TENSOR(T, 1) + row * size + column, true);
            });
        }
        row += columns.step;
    }
    // The sums of the block's threads with the same columns, vector by vector.
    Few<T> *of_threads = reinterpret_cast<Few<T> *>(&shared);
    const unsigned width = lanes * most;
    Real *sums = TENSOR(Real, 5) + (unsigned long long)blockIdx.x * size;
    _Pragma("unroll") for (int n = 0; n < HELD; n++) {
        __syncthreads();
        of_threads[threadIdx.x] = d_weight[n];
        of_threads[THREADS + threadIdx.x] = d_bias[n];
        __syncthreads();
        for (unsigned i = threadIdx.x; i < 2 * width; i += THREADS) {
            const unsigned kind = i / width, column = i % width;
            const Real *lines = of_threads[kind * THREADS].at + column;
            double total = 0;
            for (unsigned line = 0; line < THREADS / lanes; line++) total += lines[line * width];
            if (n * width + column < size) sums[kind * NORM.parts * size + n * width + column] = total;
        }
    }
}

// tensors: x, dx, weight, dy, the statistics, and sums as those of norm_columns, whose parts are the blocks. For rows that fit into
// registers.
template <typename T> __device__ inline void norm_gradients(const Arguments &by) { gradients_of_rows<T, false>(by); }
LAYER_TWICE(norm_gradients)

// The same, and dx is added to tensor 6.
template <typename T> __device__ inline void add_norm_gradients(const Arguments &by) { gradients_of_rows<T, true>(by); }
LAYER_TWICE(add_norm_gradients)
