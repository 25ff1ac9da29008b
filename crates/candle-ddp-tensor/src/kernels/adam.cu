// Adam and AdamW. States: the running means of the gradients and of their squares.

struct AdamScalars {
    double beta1, rate1, beta2, rate2; // moment = moment × beta + gradient × rate
    double step_size, root, eps;       // parameter -= mean × step_size / (sqrt(squares) × root + eps)
    double scale, coupled;             // gradient × scale + parameter × coupled
    double keep;                       // decoupled weight decay: parameter × keep
};

template <typename T> __device__ inline void adam(const Part *parts, unsigned count, const Sets &sets, double *) {
    typedef typename Element<T>::Real Real;
    const Part &part = part_of_block(parts, count);
    const AdamScalars &by = numbers_of<AdamScalars>(part, sets);
    const Real beta1 = by.beta1, rate1 = by.rate1, beta2 = by.beta2, rate2 = by.rate2;
    const Real step_size = by.step_size, root = by.root, eps = by.eps;
    const Real scale = by.scale, coupled = by.coupled, keep = by.keep;
    T *parameter = static_cast<T *>(part.parameter);
    const T *gradients = static_cast<const T *>(part.gradient);
    Real *mean = static_cast<Real *>(part.states[0]), *squares = static_cast<Real *>(part.states[1]);
    for_each_few<T>(part, [&](auto size, unsigned long long i) {
        const bool is_vector = size.is_vector;
        Few<T> values, few, m, v;
        values.load(parameter + i, is_vector);
        few.load(gradients + i, is_vector);
        m.load(mean + i, is_vector);
        v.load(squares + i, is_vector);
        FOR_EACH_OF(T, is_vector, k) {
            const Real value = values.at[k];
            const Real gradient = plus_decay(few.at[k] * scale, value, coupled);
            m.at[k] = m.at[k] * beta1 + gradient * rate1;
            v.at[k] = v.at[k] * beta2 + gradient * gradient * rate2;
            values.at[k] = value * keep - m.at[k] * step_size / (sqrt(v.at[k]) * root + eps);
        }
        m.store(mean + i, is_vector);
        v.store(squares + i, is_vector);
        values.store(parameter + i, is_vector);
    });
}
KERNELS(adam)
