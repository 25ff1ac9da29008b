// One launch processes many tensors: a table gives the address of each, and every block processes a chunk of one of
// them.

struct Part {
    unsigned long long first_chunk; // number of chunks in all previous parts
    unsigned long long count;       // elements
    void *parameter;                // or another tensor to write
    const void *gradient;           // or another tensor to read
    void *states[2];                // null if there is none
    double scalars[12];             // their meaning depends on the kernel
};

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

// Loops over this thread's elements `i` of this block's chunk; neighbouring threads process neighbouring elements.
#define FOR_EACH_ELEMENT(part, i)                                                             \
    for (unsigned long long i = (blockIdx.x - (part).first_chunk) * CHUNK + threadIdx.x,      \
                            end_of_chunk = min((part).count, i - threadIdx.x + CHUNK);        \
         i < end_of_chunk; i += THREADS)

// Defines the kernels `NAME_f32`, `NAME_f64`, `NAME_f16` and `NAME_bf16` from the template `NAME`, or only the one of the type
// ONLY with the suffix SUFFIX. All kernels take the same arguments: the table, the number of parts in it, and memory for sums or
// null.
#define KERNEL(NAME, TYPE, SUFFIX)                                                                  \
    extern "C" __global__ void NAME##_##SUFFIX(const Part *p, unsigned n, double *sums) { NAME<TYPE>(p, n, sums); }
#define FOR_EACH_TYPE(DEFINE, NAME) \
    DEFINE(NAME, float, f32) DEFINE(NAME, double, f64) DEFINE(NAME, F16, f16) DEFINE(NAME, BF16, bf16)
#ifdef ONLY
#define DEFINED(DEFINE, NAME, TYPE, SUFFIX) DEFINE(NAME, TYPE, SUFFIX)
#define KERNELS(NAME) DEFINED(KERNEL, NAME, ONLY, SUFFIX)
#else
#define KERNELS(NAME) FOR_EACH_TYPE(KERNEL, NAME)
#endif
