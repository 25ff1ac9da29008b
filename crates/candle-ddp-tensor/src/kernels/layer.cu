// The kernels of layers: one launch for one operation, whose arguments are passed by value.

struct Arguments {
    void *tensors[8]; // null if there is none
    unsigned long long numbers[20];
    double reals[4];
};

// Defines the kernels `NAME_f32`, `NAME_f64`, `NAME_f16` and `NAME_bf16` from the template `NAME`.
#define LAYER(NAME)                                                                     \
    extern "C" __global__ void NAME##_f32(const Arguments by) { NAME<float>(by); }      \
    extern "C" __global__ void NAME##_f64(const Arguments by) { NAME<double>(by); }     \
    extern "C" __global__ void NAME##_f16(const Arguments by) { NAME<F16>(by); }        \
    extern "C" __global__ void NAME##_bf16(const Arguments by) { NAME<BF16>(by); }

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
