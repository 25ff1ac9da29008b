// Measuring and scaling gradients. `sums` has a pair (sum of squares, largest absolute value) for all parts together,
// followed by one pair per chunk. The largest value is NaN if an element is NaN.

template <typename Real> struct Extent {
    Real squares, largest;
    __device__ Extent() : squares(0), largest(0) {}
    __device__ void add(Real value) {
        squares += value * value;
        const Real size = fabs(value);
        if constexpr (sizeof(Real) == 4) {
            // The bits of absolute values are in their order, and those of NaN are the largest.
            const unsigned bits = __float_as_uint(size), others = __float_as_uint(largest);
            largest = __uint_as_float(bits > others ? bits : others);
        } else {
            if (size > largest || size != size) largest = size;
        }
    }
    __device__ void put(double *sums) const {
        reduce_block<Add, Larger>(squares, largest, sums + 2 * (1ull + blockIdx.x));
    }
};

template <typename T> __device__ inline void measure(const Part *parts, unsigned count, const Sets &, double *sums) {
    const Part &part = part_of_block(parts, count);
    Extent<typename Element<T>::Real> extent;
    for_each_loaded<T>(part, static_cast<const T *>(part.gradient), [&](auto size, unsigned long long, const Few<T> &few) {
        FOR_EACH_OF(T, size.is_vector, k) extent.add(few.at[k]);
    });
    extent.put(sums);
}
KERNELS(measure)

// Run by one block.
extern "C" __global__ void total(const Part *parts, unsigned count, const Sets, double *sums) {
    reduce_chunks<Add, Larger>(sums + 2, 0, parts[count].first_chunk, sums);
}

// Multiplies by the first number. If `sums` is given, it receives the magnitude of the values after the multiplication.
template <typename T> __device__ inline void rescale(const Part *parts, unsigned count, const Sets &sets, double *sums) {
    typedef typename Element<T>::Real Real;
    const Part &part = part_of_block(parts, count);
    const Real factor = numbers_of<double>(part, sets);
    T *values = static_cast<T *>(part.parameter);
    Extent<Real> extent;
    for_each_loaded<T>(part, values, [&](auto size, unsigned long long i, Few<T> few) {
        FOR_EACH_OF(T, size.is_vector, k) {
            few.at[k] = few.at[k] * factor;
            extent.add(few.at[k]);
        }
        few.store(values + i, size.is_vector);
    });
    if (sums) extent.put(sums);
}
KERNELS(rescale)

struct Clipping {
    double most;        // the greatest norm
    double is_infinity; // whether the norm is the largest absolute value, and not the root of the sum of squares
};

// Scales the values if their norm is too great, or NaN. `sums` begins with what `total` has made of `measure`; the norm goes behind that,
// where nobody needs the first chunk's pair any more.
template <typename T> __device__ inline void clip(const Part *parts, unsigned count, const Sets &sets, double *sums) {
    const Part &part = part_of_block(parts, count);
    const Clipping &by = numbers_of<Clipping>(part, sets);
    const double norm = by.is_infinity != 0 ? sums[1] : sqrt(sums[0]);
    if (blockIdx.x == 0 && threadIdx.x == 0) sums[2] = norm;
    const double coefficient = by.most / (norm + 1e-6);
    if (coefficient >= 1) return;
    const typename Element<T>::Real factor = coefficient;
    T *values = static_cast<T *>(part.parameter);
    for_each_loaded<T>(part, values, [&](auto size, unsigned long long i, Few<T> few) {
        FOR_EACH_OF(T, size.is_vector, k) few.at[k] = few.at[k] * factor;
        few.store(values + i, size.is_vector);
    });
}
KERNELS(clip)

// Clamps values to the range from the first number's negative to the number. NaN stays NaN.
template <typename T> __device__ inline void clamp(const Part *parts, unsigned count, const Sets &sets, double *) {
    typedef typename Element<T>::Real Real;
    const Part &part = part_of_block(parts, count);
    const Real limit = numbers_of<double>(part, sets);
    T *values = static_cast<T *>(part.parameter);
    for_each_loaded<T>(part, values, [&](auto size, unsigned long long i, Few<T> few) {
        FOR_EACH_OF(T, size.is_vector, k) {
            const Real value = few.at[k];
            few.at[k] = value < -limit ? -limit : value > limit ? limit : value;
        }
        few.store(values + i, size.is_vector);
    });
}
KERNELS(clamp)
