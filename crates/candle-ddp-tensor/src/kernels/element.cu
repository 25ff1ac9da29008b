// Element types and the arithmetic on them. Conversions of 16-bit numbers are the GPU's instructions, which need no header of the
// CUDA toolkit, and written out for the CPU, and for GPUs that know no bf16.

struct F16 { unsigned short bits; };
struct BF16 { unsigned short bits; };

// Converts to f32, which represents every f16 and bf16 value exactly, and from f32 to the nearest value, ties to even.

__device__ inline float to_f32(F16 value) {
#ifdef __CUDA_ARCH__
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
#else
    unsigned sign = (value.bits & 0x8000u) << 16;
    unsigned rest = (value.bits & 0x7fffu) << 13;
    // Infinities and NaNs keep the largest exponent. For all other values, a multiplication corrects the exponent's
    // bias, which also handles subnormal numbers.
    if (rest >= 0x7c00u << 13) return __uint_as_float(sign | 0x7f800000u | rest);
    return __uint_as_float(sign | __float_as_uint(__uint_as_float(rest) * 5.192296858534828e33f)); // 2^112
#endif
}

__device__ inline F16 to_f16(float value) {
    F16 result;
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
#else
    unsigned bits = __float_as_uint(value);
    unsigned sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu, half;
    if (rest > 0x7f800000u) {
        half = 0x7e00u; // NaN
    } else if (rest >= 0x477ff000u) {
        half = 0x7c00u; // from 65520 on: infinity
    } else if (rest < 0x38800000u) {
        // Subnormal: near 0.5, f32 has the same spacing as f16 here, so the addition rounds correctly.
        half = __float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3f000000u;
    } else {
        half = (rest + 0xfffu + ((rest >> 13) & 1u) - (112u << 23)) >> 13;
    }
    result.bits = (unsigned short)(sign | half);
#endif
    return result;
}

__device__ inline float to_f32(BF16 value) { return __uint_as_float((unsigned)value.bits << 16); }

__device__ inline BF16 to_bf16(float value) {
    BF16 result;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
#else
    unsigned bits = __float_as_uint(value);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    result.bits = (unsigned short)((nan ? bits | 0x400000u : bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
    return result;
}

// Two neighbours in a word, the first in its lower half. GPUs convert both at once.

template <typename T> __device__ inline void to_f32(unsigned pair, float &first, float &second);

template <> __device__ inline void to_f32<F16>(unsigned pair, float &first, float &second) {
#ifdef __CUDA_ARCH__
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
        : "=f"(first), "=f"(second)
        : "r"(pair));
#else
    first = to_f32(F16{(unsigned short)pair});
    second = to_f32(F16{(unsigned short)(pair >> 16)});
#endif
}

template <> __device__ inline void to_f32<BF16>(unsigned pair, float &first, float &second) {
    first = __uint_as_float(pair << 16);
    second = __uint_as_float(pair & 0xffff0000u);
}

template <typename T> __device__ inline unsigned to_pair(float first, float second);

template <> __device__ inline unsigned to_pair<F16>(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
#else
    return to_f16(first).bits | (unsigned)to_f16(second).bits << 16;
#endif
}

template <> __device__ inline unsigned to_pair<BF16>(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
#else
    return to_bf16(first).bits | (unsigned)to_bf16(second).bits << 16;
#endif
}

// The type in which arithmetic is done, and the one that vectors in memory consist of: a word has two elements of 16 bits.
template <typename T> struct Element;

template <> struct Element<float> {
    typedef float Real;
    typedef float Memory;
    static __device__ float load(float value) { return value; }
    static __device__ float store(float value) { return value; }
};

template <> struct Element<double> {
    typedef double Real;
    typedef double Memory;
    static __device__ double load(double value) { return value; }
    static __device__ double store(double value) { return value; }
};

template <> struct Element<F16> {
    typedef float Real;
    typedef unsigned Memory;
    static __device__ float load(F16 value) { return to_f32(value); }
    static __device__ F16 store(float value) { return to_f16(value); }
};

template <> struct Element<BF16> {
    typedef float Real;
    typedef unsigned Memory;
    static __device__ float load(BF16 value) { return to_f32(value); }
    static __device__ BF16 store(float value) { return to_bf16(value); }
};

// 2^x by the GPU's approximation. A subnormal result becomes zero: without that, it takes three more instructions.
__device__ inline float power_of_two(float x) {
#ifdef __CUDA_ARCH__
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return exp2(x);
#endif
}

// e^x. For elements of 16 bits by the GPU's approximation, whose error of a few units in the last place of f32 is far below theirs.
template <typename T> __device__ inline typename Element<T>::Real exponential(typename Element<T>::Real x) {
    if constexpr (sizeof(T) == 2) return power_of_two(x * 1.44269504f);
    else return exp(x);
}

// Returns `sum` plus `value` times `decay`. Without decay, `value` is ignored, even if it is infinite.
template <typename Real> __device__ inline Real plus_decay(Real sum, Real value, Real decay) {
    return decay == 0 ? sum : sum + value * decay;
}
