// The kernels of layers: one launch for one operation, whose arguments are passed by value.

struct Arguments {
    void *tensors[8]; // null if there is none
    unsigned long long numbers[20];
    double reals[4];
};

// Defines kernels like KERNELS in part.cu.
#define LAYER_KERNEL(NAME, TYPE, SUFFIX) \
    extern "C" __global__ void NAME##_##SUFFIX(const Arguments by) { NAME<TYPE>(by); }
// With so few registers that two blocks run on a multiprocessor at once.
#define LAYER_KERNEL_TWICE(NAME, TYPE, SUFFIX) \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME##_##SUFFIX(const Arguments by) { NAME<TYPE>(by); }
#ifdef ONLY
#define LAYER(NAME) DEFINED(LAYER_KERNEL, NAME, ONLY, SUFFIX)
#define LAYER_TWICE(NAME) DEFINED(LAYER_KERNEL_TWICE, NAME, ONLY, SUFFIX)
#else
#define LAYER(NAME) FOR_EACH_TYPE(LAYER_KERNEL, NAME)
#define LAYER_TWICE(NAME) FOR_EACH_TYPE(LAYER_KERNEL_TWICE, NAME)
#endif

// Tensor `index` of the arguments, with elements of type `TYPE`.
#define TENSOR(TYPE, index) static_cast<TYPE *>(by.tensors[index])

// The number of this thread in the grid.
__device__ inline unsigned long long thread_in_grid() {
    return (unsigned long long)blockIdx.x * THREADS + threadIdx.x;
}

// Replaces `index` by index / size and returns index % size. Divisions of 32 bits are much faster.
__device__ inline unsigned long long take(unsigned long long &index, unsigned long long size) {
    unsigned long long quotient = index >> 32 || size >> 32 ? index / size : (unsigned)index / (unsigned)size;
    unsigned long long rest = index - quotient * size;
    index = quotient;
    return rest;
}

__device__ inline unsigned take(unsigned &index, unsigned size) {
    const unsigned rest = index % size;
    index /= size;
    return rest;
}
