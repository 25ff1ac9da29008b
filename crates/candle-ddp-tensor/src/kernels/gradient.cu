// Measuring and scaling gradients. `sums` has a pair (sum of squares, largest absolute value) for all parts together,
// followed by one pair per chunk. The largest value is NaN if an element is NaN.

template <typename Real> struct Extent {
    Real squares, largest;
    __device__ Extent() : squares(0), largest(0) {}
    __device__ void add(Real value) {
        squares += value * value;
        const Real size = fabs(value);
        if (size > largest || size != size) largest = size;
    }
    __device__ void put(double *sums) const {
        reduce_block<Add, Larger>(squares, largest, sums + 2 * (1ull + blockIdx.x));
    }
};

template <typename T> __device__ inline void measure(const Part *parts, unsigned count, double *sums) {
    const Part &part = part_of_block(parts, count);
    const T *values = static_cast<const T *>(part.gradient);
    Extent<typename Element<T>::Real> extent;
    FOR_EACH_ELEMENT(part, i) extent.add(Element<T>::load(values[i]));
    extent.put(sums);
}
KERNELS(measure)

// Run by one block.
extern "C" __global__ void total(const Part *parts, unsigned count, double *sums) {
    reduce_chunks<Add, Larger>(sums + 2, 0, parts[count].first_chunk, sums);
}

// Multiplies by scalars[0]. If `sums` is given, it receives the magnitude of the values before the multiplication.
template <typename T> __device__ inline void rescale(const Part *parts, unsigned count, double *sums) {
    typedef typename Element<T>::Real Real;
    const Part &part = part_of_block(parts, count);
    const Real factor = part.scalars[0];
    T *values = static_cast<T *>(part.parameter);
    Extent<Real> extent;
    FOR_EACH_ELEMENT(part, i) {
        const Real value = Element<T>::load(values[i]);
        extent.add(value);
        values[i] = Element<T>::store(value * factor);
    }
    if (sums) extent.put(sums);
}
KERNELS(rescale)

// Clamps values to the range from -scalars[0] to scalars[0]. NaN stays NaN.
template <typename T> __device__ inline void clamp(const Part *parts, unsigned count, double *) {
    typedef typename Element<T>::Real Real;
    const Part &part = part_of_block(parts, count);
    const Real limit = part.scalars[0];
    T *values = static_cast<T *>(part.parameter);
    FOR_EACH_ELEMENT(part, i) {
        const Real value = Element<T>::load(values[i]);
        values[i] = Element<T>::store(value < -limit ? -limit : value > limit ? limit : value);
    }
}
KERNELS(clamp)
