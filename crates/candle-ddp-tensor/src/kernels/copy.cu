// Copies with conversion: parameter = gradient × factor, or (parameter + gradient) × factor, in the arithmetic of the
// parameter.

struct CopyScalars {
    double factor;
    double accumulate; // whether to add to the old value, 0 or 1
};

template <typename T, typename From> __device__ inline void copy(const Part *parts, unsigned count, const Sets &sets) {
    typedef typename Element<T>::Real Real;
    const Part &part = part_of_block(parts, count);
    const CopyScalars &by = numbers_of<CopyScalars>(part, sets);
    const Real factor = by.factor;
    const bool accumulate = by.accumulate != 0;
    T *to = static_cast<T *>(part.parameter);
    const From *from = static_cast<const From *>(part.gradient);
    for_each_few<T>(part, [&](auto size, unsigned long long i) {
        Few<T> few, old;
        few.load(from + i, size.is_vector);
        if (accumulate) old.load(to + i, size.is_vector);
        FOR_EACH_OF(T, size.is_vector, k) {
            const Real value = few.at[k];
            few.at[k] = (accumulate ? old.at[k] + value : value) * factor;
        }
        few.store(to + i, size.is_vector);
    });
}

#define COPY_FROM(NAME, FROM)                                                                                  \
    template <typename T> __device__ inline void NAME(const Part *p, unsigned n, const Sets &sets, double *) { \
        copy<T, FROM>(p, n, sets);                                                                             \
    }                                                                                                          \
    KERNELS(NAME)
COPY_FROM(copy_from_f32, float)
COPY_FROM(copy_from_f64, double)
COPY_FROM(copy_from_f16, F16)
COPY_FROM(copy_from_bf16, BF16)
