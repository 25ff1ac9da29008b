// Copies with conversion: parameter = gradient × factor, or (parameter + gradient) × factor, in the arithmetic of the
// parameter.

struct CopyScalars {
    double factor;
    double accumulate; // whether to add to the old value, 0 or 1
};

template <typename T, typename From> __device__ inline void copy(const Part *parts, unsigned count) {
    typedef typename Element<T>::Real Real;
    const Part &part = part_of_block(parts, count);
    const CopyScalars &by = *reinterpret_cast<const CopyScalars *>(part.scalars);
    const Real factor = by.factor;
    const bool accumulate = by.accumulate != 0;
    T *to = static_cast<T *>(part.parameter);
    const From *from = static_cast<const From *>(part.gradient);
    FOR_EACH_ELEMENT(part, i) {
        const Real value = Element<From>::load(from[i]);
        to[i] = Element<T>::store((accumulate ? Element<T>::load(to[i]) + value : value) * factor);
    }
}

#define COPY_FROM(NAME, FROM)                                                                      \
    template <typename T> __device__ inline void NAME(const Part *p, unsigned n, double *) {       \
        copy<T, FROM>(p, n);                                                                       \
    }                                                                                              \
    KERNELS(NAME)
COPY_FROM(copy_from_f32, float)
COPY_FROM(copy_from_f64, double)
COPY_FROM(copy_from_f16, F16)
COPY_FROM(copy_from_bf16, BF16)
