// The kernels of layers: one launch for one operation, whose arguments are passed by value.

struct Arguments {
    void *tensors[8]; // null if there is none
    unsigned long long numbers[20];
    double reals[4];
};

// Defines kernels like KERNELS in part.cu.
#define LAYER_KERNEL(NAME, TYPE, SUFFIX) \
    extern "C" __global__ void NAME##_##SUFFIX(const Arguments by) { NAME<TYPE>(by); }
#ifdef ONLY
#define LAYER(NAME) DEFINED(LAYER_KERNEL, NAME, ONLY, SUFFIX)
#else
#define LAYER(NAME) FOR_EACH_TYPE(LAYER_KERNEL, NAME)
#endif

// As much as a thread loads or stores at once, from an address that is a multiple of its size.
struct alignas(16) Words { unsigned words[4]; };
template <typename T> struct alignas(16) Vector { T at[16 / sizeof(T)]; };

// A thread's neighbouring elements in the dtype of the arithmetic: a vector, or one.
template <typename T> struct Few {
    typedef typename Element<T>::Real Real;
    static const int most = 16 / sizeof(T);
    Real at[most];

    __device__ void load(const T *from, bool is_vector) {
        if (!is_vector) {
            at[0] = Element<T>::load(*from);
            return;
        }
        const Vector<T> vector = *reinterpret_cast<const Vector<T> *>(from);
        for (int k = 0; k < most; k++) at[k] = Element<T>::load(vector.at[k]);
    }

    __device__ void store(T *to, bool is_vector) const {
        if (!is_vector) {
            *to = Element<T>::store(at[0]);
            return;
        }
        Vector<T> vector;
        for (int k = 0; k < most; k++) vector.at[k] = Element<T>::store(at[k]);
        *reinterpret_cast<Vector<T> *>(to) = vector;
    }
};

// Loops over the elements of a `Few`.
#define FOR_EACH_OF(T, is_vector, k) \
    _Pragma("unroll") for (int k = 0; k < Few<T>::most; k++) if (k == 0 || (is_vector))

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
