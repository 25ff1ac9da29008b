// Arithmetic for translated kernels. Registers hold bits, which are converted to values of a type and back.
#include <fenv.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned __int128 uint128_t;
typedef __int128 int128_t;

static __attribute__((noreturn, noinline, cold)) void fail(const char *what) {
    fprintf(stderr, "emulated GPU: kernel %s: %s\n", KERNEL, what);
    fflush(stderr);
    abort();
}

// f32 and f64

static inline float f32(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t f32_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline double f64(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint64_t f64_bits(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

// f16 and bf16 are computed as f32 and rounded to the nearest value when they are written.

#if defined(__FLT16_MANT_DIG__) && (defined(__F16C__) || defined(__aarch64__))
static inline float f16(uint16_t bits) {
    _Float16 value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t f16_bits(float value) {
    if (value != value) return 0x7fff;
    _Float16 rounded = value;
    uint16_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    return bits;
}
#else
static inline float f16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
    if (magnitude >= 0x7c00) return f32(sign | 0x7f800000 | magnitude << 13);
    // The exponents' biases differ by 112. The product is exact, even for subnormal numbers.
    return f32(sign | f32_bits(f32(magnitude << 13) * 0x1p112f));
}

static inline uint16_t f16_bits(float value) {
    if (value != value) return 0x7fff;
    uint32_t bits = f32_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;
    // Below 2^-14, the sum is rounded to a multiple of 2^-24, as for subnormal numbers.
    if (magnitude < 0x38800000) return sign | (f32_bits(f32(magnitude) + 0.5f) - f32_bits(0.5f));
    return sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
}
#endif

static inline float bf16(uint16_t bits) { return f32((uint32_t)bits << 16); }

static inline uint16_t bf16_bits(float value) {
    if (value != value) return 0x7fff;
    uint32_t bits = f32_bits(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static inline uint16_t bf16_bits_rz(float value) { return value != value ? 0x7fff : f32_bits(value) >> 16; }

// Rounding to odd: a value between two numbers becomes the one whose last bit is set. Rounding the result again to at
// least two bits less is equivalent to rounding once.

static inline float odd_f32(double value) {
    float near = (float)value;
    if (near == value || value != value) return near;
    return f32((f32_bits(near) - (fabs(near) > fabs(value))) | 1);
}

static inline double odd_sum(double a, double b) {
    double sum = a + b, other = sum - a, error = (a - (sum - other)) + (b - other);
    if (error == 0 || !isfinite(sum)) return sum;
    return f64((f64_bits(sum) - ((error > 0) != (sum > 0))) | 1);
}

static inline double odd_u64(uint64_t value) {
    return value >> 53 ? (double)(value >> 11 << 11 | ((value & 0x7ff) != 0) << 11) : (double)value;
}

static inline double odd_s64(int64_t value) { return value < 0 ? -odd_u64(-(uint64_t)value) : odd_u64(value); }

static inline float narrow_rz(double value) {
    float near = (float)value;
    return fabs(near) > fabs(value) ? f32(f32_bits(near) - 1) : near;
}

static inline float narrow_rp(double value) {
    float near = (float)value;
    if (!(near < value)) return near;
    return near == 0 ? 0x1p-149f : f32(near > 0 ? f32_bits(near) + 1 : f32_bits(near) - 1);
}

static inline float narrow_rm(double value) { return -narrow_rp(-value); }

// Directed rounding of f64. It is rare, so the processor's mode may be changed each time.
#define DIRECTED(name, type, expression)                                                                               \
    static __attribute__((noinline)) type name(type a_, type b_, type c_, int mode) {                                  \
        volatile type a = a_, b = b_, c = c_;                                                                          \
        int before = fegetround();                                                                                     \
        fesetround(mode);                                                                                              \
        volatile type result = expression;                                                                             \
        fesetround(before);                                                                                            \
        return result;                                                                                                 \
    }
DIRECTED(directed_add, double, a + b)
DIRECTED(directed_sub, double, a - b)
DIRECTED(directed_mul, double, a *b)
DIRECTED(directed_div, double, a / b)
DIRECTED(directed_fma, double, fma(a, b, c))
DIRECTED(directed_sqrt, double, sqrt(a))

static inline double mul_bf16(double a, double b) { return odd_f32(a * b); }
static inline float fma_16(double a, double b, double c) { return odd_f32(odd_sum(a * b, c)); }

static inline float flush(float value) { return fabsf(value) < 0x1p-126f ? copysignf(0, value) : value; }

// Minimum and maximum; the negative zero is the smaller one.
#define CHOICE(name, type, before, sign)                                                                               \
    static inline type name(type a, type b) {                                                                          \
        if (a != a) return b;                                                                                          \
        if (b != b) return a;                                                                                          \
        return a before b || (a == b && sign signbit(a)) ? a : b;                                                      \
    }                                                                                                                  \
    static inline type name##_nan(type a, type b) { return a != a ? a : b != b ? b : name(a, b); }
CHOICE(min_f32, float, <, )
CHOICE(max_f32, float, >, !)
CHOICE(min_f64, double, <, )
CHOICE(max_f64, double, >, !)

static inline float saturate_f32(float value) { return value > 0 ? value < 1 ? value : 1 : 0; }
static inline double saturate_f64(double value) { return value > 0 ? value < 1 ? value : 1 : 0; }

// Converts a number that has already been rounded to an integer.
#define TO_INTEGER(name, type, smallest, largest, end)                                                                 \
    static inline type name(double value, type nan) {                                                                  \
        return value != value ? nan : value <= smallest ? (type)smallest : value >= end ? (type)largest : (type)value; \
    }
TO_INTEGER(to_u8, uint8_t, 0, UINT8_MAX, 255.0)
TO_INTEGER(to_s8, int8_t, INT8_MIN, INT8_MAX, 127.0)
TO_INTEGER(to_u16, uint16_t, 0, UINT16_MAX, 65535.0)
TO_INTEGER(to_s16, int16_t, INT16_MIN, INT16_MAX, 32767.0)
TO_INTEGER(to_u32, uint32_t, 0, UINT32_MAX, 4294967295.0)
TO_INTEGER(to_s32, int32_t, INT32_MIN, INT32_MAX, 2147483647.0)
TO_INTEGER(to_u64, uint64_t, 0, UINT64_MAX, 0x1p64)
TO_INTEGER(to_s64, int64_t, INT64_MIN, INT64_MAX, 0x1p63)

// e4m3: 4 bits of exponent, 3 of mantissa, no infinities.

static inline float e4m3(uint8_t bits) {
    int exponent = bits >> 3 & 15, mantissa = bits & 7;
    float magnitude = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    if ((bits & 0x7f) == 0x7f) magnitude = NAN;
    return bits & 0x80 ? -magnitude : magnitude;
}

static inline uint8_t e4m3_bits(float value) {
    if (value != value) return 0x7f;
    uint8_t sign = signbit(value) ? 0x80 : 0;
    float magnitude = fabsf(value);
    if (magnitude >= 448) return sign | 0x7e;
    int exponent = magnitude < 0x1p-6f ? -6 : ilogbf(magnitude);
    // Rounding up to the next exponent, or from subnormal to normal, carries into the exponent's bits.
    int units = (int)rintf(ldexpf(magnitude, 3 - exponent));
    return sign | (units + ((exponent + 6) << 3));
}

// Integers. Division by zero does not end a kernel.

#define DIVIDE_U(a, b) ((b) == 0 ? -1 : (a) / (b))
#define REMAINDER_U(a, b) ((b) == 0 ? (a) : (a) % (b))
#define DIVIDE_S(a, b) ((b) == 0 ? -1 : (b) == -1 ? -(a) : (a) / (b))
#define REMAINDER_S(a, b) ((b) == 0 ? (a) : (b) == -1 ? 0 : (a) % (b))

static inline uint64_t bit_field_u(uint64_t value, uint32_t at, uint32_t count) {
    at &= 255, count &= 255;
    value = at > 63 ? 0 : value >> at;
    return count > 63 ? value : value & (((uint64_t)1 << count) - 1);
}

static inline int64_t bit_field_s(int64_t value, uint32_t at, uint32_t count, uint32_t width) {
    at &= 255, count &= 255;
    if (count == 0) return 0;
    if (at + count > width) count = at < width ? width - at : 1;
    if (at >= width) at = width - 1;
    return (int64_t)((uint64_t)value << (64 - at - count)) >> (64 - count);
}

static inline uint64_t bit_insert(uint64_t field, uint64_t into, uint32_t at, uint32_t count, uint32_t width) {
    at &= 255, count &= 255;
    if (at >= width || count == 0) return into;
    uint64_t mask = (count > 63 ? ~(uint64_t)0 : ((uint64_t)1 << count) - 1) << at;
    return (into & ~mask) | (field << at & mask);
}

static inline uint64_t reverse_bits(uint64_t value, int width) {
    uint64_t result = 0;
    for (int bit = 0; bit < width; bit++) result |= (value >> bit & 1) << (width - 1 - bit);
    return result;
}

static inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selectors) {
    uint64_t bytes = (uint64_t)b << 32 | a;
    uint32_t result = 0;
    for (int byte = 0; byte < 4; byte++) {
        uint32_t selector = selectors >> 4 * byte, found = bytes >> 8 * (selector & 7) & 255;
        if (selector & 8) found = found & 128 ? 255 : 0;
        result |= found << 8 * byte;
    }
    return result;
}

static inline uint32_t logic_3(uint32_t a, uint32_t b, uint32_t c, int table) {
    uint32_t result = 0;
    for (int row = 0; row < 8; row++)
        if (table >> row & 1) result |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
    return result;
}
