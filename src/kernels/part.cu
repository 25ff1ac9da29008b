// One launch works on many tensors: a table says where each is, and every block has a chunk of one of them.

struct Part {
    unsigned long long first_chunk; // how many chunks all parts before have
    unsigned long long count;       // elements
    void *parameter;                // or another tensor that is changed
    const void *gradient;           // or another tensor that is read
    void *states[2];                // null where there is none
    double scalars[12];             // what they mean, each kernel says
};

// Elements in a chunk; the last of a part has fewer.
#define CHUNK 4096ull
// Threads in a block.
#define THREADS 256u

// The part that this block's chunk belongs to. Behind the last of `count` parts the table has an entry of which only
// `first_chunk` counts. Parts without elements have no chunk.
__device__ inline const Part &part_of_block(const Part *parts, unsigned count) {
    unsigned low = 0, high = count;
    while (high - low > 1) {
        unsigned middle = low + (high - low) / 2;
        if (parts[middle].first_chunk <= blockIdx.x) low = middle;
        else high = middle;
    }
    return parts[low];
}

// For this thread's elements `i` of this block's chunk: neighbours belong to neighbouring threads.
#define FOR_EACH_ELEMENT(part, i)                                                             \
    for (unsigned long long i = (blockIdx.x - (part).first_chunk) * CHUNK + threadIdx.x,      \
                            end_of_chunk = min((part).count, i - threadIdx.x + CHUNK);        \
         i < end_of_chunk; i += THREADS)

// The kernels `NAME_f32`, `NAME_f64`, `NAME_f16` and `NAME_bf16` of the template `NAME`. All kernels take the same: the
// table, the number of parts in it, and room for sums, where they need that.
#define KERNELS(NAME)                                                                                           \
    extern "C" __global__ void NAME##_f32(const Part *p, unsigned n, double *sums) { NAME<float>(p, n, sums); } \
    extern "C" __global__ void NAME##_f64(const Part *p, unsigned n, double *sums) { NAME<double>(p, n, sums); } \
    extern "C" __global__ void NAME##_f16(const Part *p, unsigned n, double *sums) { NAME<F16>(p, n, sums); }   \
    extern "C" __global__ void NAME##_bf16(const Part *p, unsigned n, double *sums) { NAME<BF16>(p, n, sums); }
