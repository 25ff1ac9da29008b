// One launch processes many tensors: a table gives the address of each, and every block processes a chunk of one of
// them.

struct Part {
    unsigned long long first_chunk; // number of chunks in all previous parts
    unsigned long long count;       // elements
    void *parameter;                // or another tensor to write
    const void *gradient;           // or another tensor to read
    void *states[2];                // null if there is none
    unsigned long long numbers;     // which of the launch's sets of numbers is its own
};

// What kernels need beside the table, by value: while the tensors stay where they are, the table on the GPU stays as it is.
struct Sets {
    double numbers[32][12]; // their meaning depends on the kernel
};

// The numbers of a part, as the kernel's `Numbers`.
template <typename Numbers> __device__ inline const Numbers &numbers_of(const Part &part, const Sets &sets) {
    return *reinterpret_cast<const Numbers *>(sets.numbers[part.numbers]);
}

// Whether an update is left out. A verdict, which may be null, is a pair whose second number is finite otherwise.
__device__ inline bool is_left_out(const double *verdict) { return verdict && verdict[1] - verdict[1] != 0; }

// Elements in a chunk; the last chunk of a part may have fewer.
#define CHUNK 4096ull
// Threads in a block.
#define THREADS 256u

// Returns the part of this block's chunk. After the last of `count` parts the table has an entry of which only
// `first_chunk` is used. Parts without elements have no chunk.
__device__ inline const Part &part_of_block(const Part *parts, unsigned count) {
    unsigned low = 0, high = count;
    while (high - low > 1) {
        unsigned middle = low + (high - low) / 2;
        if (parts[middle].first_chunk <= blockIdx.x) low = middle;
        else high = middle;
    }
    return parts[low];
}

struct One { static const bool is_vector = false; };
struct Several { static const bool is_vector = true; };

// Calls `body` for this thread's elements of this block's chunk, with the index of the first of some: `Several`, a `Few<T>`, if all
// tensors of the part begin at multiples of 16, and `One` otherwise and for the rest. Neighbouring threads process neighbouring
// elements.
template <typename T, typename Body> __device__ inline void for_each_few(const Part &part, Body body) {
    const unsigned long long most = Few<T>::most;
    const unsigned long long from = (blockIdx.x - part.first_chunk) * CHUNK, to = min(part.count, from + CHUNK);
    const unsigned long long addresses = (unsigned long long)part.parameter | (unsigned long long)part.gradient |
                                         (unsigned long long)part.states[0] | (unsigned long long)part.states[1];
    unsigned long long rest = from;
    if (addresses % 16 == 0) {
        rest += (to - from) / most * most;
        for (unsigned long long i = from + threadIdx.x * most; i < rest; i += THREADS * most) body(Several(), i);
    }
    for (unsigned long long i = rest + threadIdx.x; i < to; i += THREADS) body(One(), i);
}

// Calls `body` for this thread's elements of this block's chunk of one tensor, which starts at `values`, with those of some: a `Few<T>`
// that `Several` or `One` describes, and the index of the first. A thread's vectors are all loaded before the first of them is used.
template <typename T, typename Body> __device__ inline void for_each_loaded(const Part &part, const T *values, Body body) {
    const unsigned most = Few<T>::most, vectors = CHUNK / (THREADS * most);
    const unsigned long long from = (blockIdx.x - part.first_chunk) * CHUNK, to = min(part.count, from + CHUNK);
    unsigned long long rest = from;
    if ((unsigned long long)values % 16 == 0) {
        rest += (to - from) / most * most;
        const unsigned long long first = from + threadIdx.x * most;
        InMemory<T, Few<T>::most> loaded[vectors];
        IS_GLOBAL(values);
        _Pragma("unroll") for (unsigned n = 0; n < vectors; n++) {
            const unsigned long long i = first + n * THREADS * most;
            if (i < rest) loaded[n] = *reinterpret_cast<const InMemory<T, Few<T>::most> *>(values + i);
        }
        _Pragma("unroll") for (unsigned n = 0; n < vectors; n++) {
            const unsigned long long i = first + n * THREADS * most;
            Few<T> few;
            few.template widen<T>(loaded[n]);
            if (i < rest) body(Several(), i, few);
        }
    }
    for (unsigned long long i = rest + threadIdx.x; i < to; i += THREADS) {
        Few<T> few;
        few.load(values + i, false);
        body(One(), i, few);
    }
}

// Defines the kernels `NAME_f32`, `NAME_f64`, `NAME_f16` and `NAME_bf16` from the template `NAME`, or only the one of the type
// ONLY with the suffix SUFFIX. All kernels take the same arguments: the table, the number of parts in it, their numbers, and memory
// for sums, a verdict, or null.
#define KERNEL(NAME, TYPE, SUFFIX)                                                                         \
    extern "C" __global__ void NAME##_##SUFFIX(const Part *p, unsigned n, const Sets sets, double *sums) { \
        NAME<TYPE>(p, n, sets, sums);                                                                      \
    }
#define FOR_EACH_TYPE(DEFINE, NAME) \
    DEFINE(NAME, float, f32) DEFINE(NAME, double, f64) DEFINE(NAME, F16, f16) DEFINE(NAME, BF16, bf16)
#ifdef ONLY
#define DEFINED(DEFINE, NAME, TYPE, SUFFIX) DEFINE(NAME, TYPE, SUFFIX)
#define KERNELS(NAME) DEFINED(KERNEL, NAME, ONLY, SUFFIX)
#else
#define KERNELS(NAME) FOR_EACH_TYPE(KERNEL, NAME)
#endif
