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

// Defines the kernels `NAME_f32`, `NAME_f64`, `NAME_f16` and `NAME_bf16` from the template `NAME`. All kernels take the
// same arguments: the table, the number of parts in it, and memory for sums or null.
#define KERNELS(NAME)                                                                                           \
    extern "C" __global__ void NAME##_f32(const Part *p, unsigned n, double *sums) { NAME<float>(p, n, sums); } \
    extern "C" __global__ void NAME##_f64(const Part *p, unsigned n, double *sums) { NAME<double>(p, n, sums); } \
    extern "C" __global__ void NAME##_f16(const Part *p, unsigned n, double *sums) { NAME<F16>(p, n, sums); }   \
    extern "C" __global__ void NAME##_bf16(const Part *p, unsigned n, double *sums) { NAME<BF16>(p, n, sums); }
