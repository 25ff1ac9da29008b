// Activations, sums of tensors, dropout, and rotations of pairs.

#define RELU 0
#define GELU 1
#define GELU_ERF 2
#define SILU 3
#define TANH 4

template <typename T> __device__ inline typename Element<T>::Real sigmoid(typename Element<T>::Real x) {
    if constexpr (sizeof(T) == 2) return __fdividef(1, 1 + exponential<T>(-x));
    else return 1 / (1 + exponential<T>(-x));
}

// √(8 / π), the coefficient of the cube in the approximation of gelu, √½, and 1 / √(2π).
#define GELU_SCALE Real(1.5957691216057308)
#define CUBE Real(0.044715)
#define ROOT_HALF Real(0.70710678118654752440)
#define DENSITY Real(0.39894228040143267794)

// Twice the argument of the hyperbolic tangent in gelu.
template <typename Real> __device__ inline Real gelu_argument(Real x) { return x * (1 + CUBE * x * x) * GELU_SCALE; }

template <typename Real> __device__ inline Real normal_cdf(Real x) { return erfc(-x * ROOT_HALF) / 2; }

// The elements of a thread: `vector` neighbours, a whole vector or one, of `count` elements.
struct Elements {
    unsigned long long count, vector;
};
#define ELEMENTS (*reinterpret_cast<const Elements *>(by.numbers))
#define FOR_ELEMENTS(T, i, is_vector)                                \
    const unsigned long long i = thread_in_grid() * ELEMENTS.vector; \
    const bool is_vector = ELEMENTS.vector > 1;                      \
    if (i >= ELEMENTS.count) return;

template <typename T>
__device__ inline typename Element<T>::Real activated(typename Element<T>::Real x, unsigned long long function) {
    switch (function) {
    case RELU: return x <= 0 ? 0 : x;
    case GELU: return x * sigmoid<T>(gelu_argument(x));
    case GELU_ERF: return x * normal_cdf(x);
    case SILU: return x * sigmoid<T>(x);
    case TANH: return tanh(x);
    }
    return x;
}

// tensors: x, y; numbers: `Elements`, and which function.
template <typename T> __device__ inline void activation(const Arguments &by) {
    FOR_ELEMENTS(T, i, is_vector)
    Few<T> few;
    few.load(TENSOR(const T, 0) + i, is_vector);
    FOR_EACH_OF(T, is_vector, k) few.at[k] = activated<T>(few.at[k], by.numbers[2]);
    few.store(TENSOR(T, 1) + i, is_vector);
}
LAYER(activation)

// `x`: for relu and tanh y.
template <typename T, typename Real>
__device__ inline Real activation_gradient(Real x, Real dy, unsigned long long function) {
    switch (function) {
    case RELU: return x <= 0 ? 0 : dy;
    case GELU: {
        const Real s = sigmoid<T>(gelu_argument(x)), slope = GELU_SCALE * (1 + 3 * CUBE * x * x);
        return dy * (s + x * s * (1 - s) * slope);
    }
    case GELU_ERF: return dy * (normal_cdf(x) + x * exp(x * x * Real(-0.5)) * DENSITY);
    case SILU: {
        const Real s = sigmoid<T>(x);
        return dy * s * (1 + x * (1 - s));
    }
    case TANH: return dy * (1 - x * x);
    }
    return dy;
}

// tensors: x (for relu and tanh y), dy, dx; numbers as above.
template <typename T> __device__ inline void activation_backward(const Arguments &by) {
    FOR_ELEMENTS(T, i, is_vector)
    Few<T> x, dy;
    x.load(TENSOR(const T, 0) + i, is_vector);
    dy.load(TENSOR(const T, 1) + i, is_vector);
    FOR_EACH_OF(T, is_vector, k) dy.at[k] = activation_gradient<T>(x.at[k], dy.at[k], by.numbers[2]);
    dy.store(TENSOR(T, 2) + i, is_vector);
}
LAYER(activation_backward)

// tensors: a, b, a + b; numbers: `Elements`, and the elements of b, which is repeated for all of a.
template <typename T> __device__ inline void add(const Arguments &by) {
    FOR_ELEMENTS(T, i, is_vector)
    unsigned long long repeats = i;
    Few<T> a, b;
    a.load(TENSOR(const T, 0) + i, is_vector);
    b.load(TENSOR(const T, 1) + take(repeats, by.numbers[2]), is_vector);
    FOR_EACH_OF(T, is_vector, k) a.at[k] = a.at[k] + b.at[k];
    a.store(TENSOR(T, 2) + i, is_vector);
}
LAYER(add)

// tensors: matrices, and their transposes. numbers: matrices, their rows and columns, and the elements of a thread: neighbours in
// the result, a whole vector or one.
template <typename T> __device__ inline void transpose(const Arguments &by) {
    const unsigned long long rows = by.numbers[1], columns = by.numbers[2], vector = by.numbers[3];
    unsigned long long rest = thread_in_grid();
    T *to = TENSOR(T, 1) + rest * vector;
    const unsigned long long row = take(rest, rows / vector) * vector, column = take(rest, columns);
    if (rest >= by.numbers[0]) return;
    const T *from = TENSOR(const T, 0) + (rest * rows + row) * columns + column;
    if (vector == 1) {
        *to = *from;
        return;
    }
    Neighbours<T, Few<T>::most> neighbours;
    for (int k = 0; k < Few<T>::most; k++) neighbours.at[k] = from[k * columns];
    put(reinterpret_cast<Neighbours<T, Few<T>::most> *>(to), neighbours);
}
LAYER(transpose)

// Four numbers of Philox 4x32-10.
__device__ inline void philox(unsigned key[2], unsigned counter[4]) {
    for (int round = 0; round < 10; round++) {
        const unsigned long long first = 0xD2511F53ull * counter[0], second = 0xCD9E8D57ull * counter[2];
        const unsigned a = (unsigned)(second >> 32) ^ counter[1] ^ key[0];
        const unsigned c = (unsigned)(first >> 32) ^ counter[3] ^ key[1];
        counter[0] = a;
        counter[1] = (unsigned)second;
        counter[2] = c;
        counter[3] = (unsigned)first;
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
}

// tensors: x, y; numbers: elements; seed, sequence and offset of a `Draw` (seed/generator.rs); the number below which
// elements become zero; whether addresses allow to load 16 bytes at once; reals: the factor of the others. A thread takes 16 bytes, but at
// least the elements of one block of numbers; DROPPED in dropout.rs is the same.
template <typename T> __device__ inline void dropout(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const unsigned most = Few<T>::most, count = most < 4 ? 4 : most, blocks = count / 4;
    const unsigned long long thread = thread_in_grid(), position = by.numbers[3] + blocks * thread;
    if (count * thread >= by.numbers[0]) return;
    const unsigned long long left = by.numbers[0] - count * thread;
    const T *x = TENSOR(const T, 0) + count * thread;
    T *y = TENSOR(T, 1) + count * thread;
    const bool is_vector = by.numbers[5] && left >= count;
    Few<T> few[count / most] = {};
    if (is_vector) {
        _Pragma("unroll") for (unsigned v = 0; v < count / most; v++) few[v].load(x + v * most, true);
    } else {
        _Pragma("unroll") for (unsigned i = 0; i < count; i++)
            if (i < left) few[i / most].at[i % most] = Element<T>::load(x[i]);
    }
    const Real scale = by.reals[0];
    _Pragma("unroll") for (unsigned block = 0; block < blocks; block++) {
        unsigned key[2] = {(unsigned)by.numbers[1], (unsigned)(by.numbers[1] >> 32)};
        unsigned counter[4] = {(unsigned)(position + block), (unsigned)((position + block) >> 32), (unsigned)by.numbers[2],
                               (unsigned)(by.numbers[2] >> 32)};
        philox(key, counter);
        _Pragma("unroll") for (unsigned i = 0; i < 4; i++) {
            Real &value = few[(4 * block + i) / most].at[(4 * block + i) % most];
            value = counter[i] < (unsigned)by.numbers[4] ? 0 : value * scale;
        }
    }
    if (is_vector) {
        _Pragma("unroll") for (unsigned v = 0; v < count / most; v++) few[v].store(y + v * most, true);
    } else {
        _Pragma("unroll") for (unsigned i = 0; i < count; i++)
            if (i < left) y[i] = Element<T>::store(few[i / most].at[i % most]);
    }
}
LAYER(dropout)

// Vectors of `2 × half` elements, `second × third` of them in a sample.
struct Rotation {
    unsigned long long vectors, second, third, half;
    unsigned long long is_thd, is_interleaved, table; // elements of a sample's angles; 0 if all samples share them
    unsigned long long vector;                        // pairs of a thread: a whole vector, or one
};
#define ROTATION (*reinterpret_cast<const Rotation *>(by.numbers))

// tensors: x, cos, sin, y; reals: 1, or −1 to rotate back.
template <typename T> __device__ inline void rope(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Rotation &r = ROTATION;
    const bool is_vector = r.vector > 1, has_pairs = is_vector && r.is_interleaved;
    unsigned long long vector = thread_in_grid();
    const unsigned long long pair = take(vector, r.half / r.vector) * r.vector;
    if (vector >= r.vectors) return;
    unsigned long long sample = vector;
    const unsigned long long third = take(sample, r.third), second = take(sample, r.second);
    const unsigned long long angle = sample * r.table + (r.is_thd ? second : third) * r.half + pair;
    const unsigned long long first = 2 * vector * r.half + (r.is_interleaved ? 2 * pair : pair);
    const unsigned long long other = first + (r.is_interleaved ? r.vector : r.half);
    Few<T> left, right, cos, sin;
    left.load(TENSOR(const T, 0) + first, is_vector);
    right.load(TENSOR(const T, 0) + other, is_vector);
    cos.load(TENSOR(const T, 1) + angle, is_vector);
    sin.load(TENSOR(const T, 2) + angle, is_vector);
    const Real sign = by.reals[0];
    if (has_pairs) part_pairs(left, right);
    FOR_EACH_OF(T, is_vector, k) {
        const Real x0 = left.at[k], x1 = right.at[k], s = sin.at[k] * sign;
        left.at[k] = x0 * cos.at[k] - x1 * s;
        right.at[k] = x0 * s + x1 * cos.at[k];
    }
    if (has_pairs) join_pairs(left, right);
    left.store(TENSOR(T, 3) + first, is_vector);
    right.store(TENSOR(T, 3) + other, is_vector);
}
LAYER(rope)
