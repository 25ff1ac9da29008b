// The moments of Adam and LAMB: the running means of the gradients and of their squares, which are a parameter's states.

// Updates the moments of this thread's elements by their gradients, which are of the type `From`, and calls `use` with each element and
// its moments. It may change the elements of the parameter, which are stored if `CHANGES`.
template <typename T, typename From, bool CHANGES, typename Scalars, typename Use>
__device__ inline void for_each_moments(const Part &part, const Scalars &by, Use use) {
    typedef typename Element<T>::Real Real;
    const Real beta1 = by.beta1, rate1 = by.rate1, beta2 = by.beta2, rate2 = by.rate2;
    const Real scale = by.scale, coupled = by.coupled;
    T *parameter = static_cast<T *>(part.parameter);
    const From *gradients = static_cast<const From *>(part.gradient);
    Real *mean = static_cast<Real *>(part.states[0]), *squares = static_cast<Real *>(part.states[1]);
    for_each_few<T>(part, [&](auto size, unsigned long long i) {
        const bool is_vector = size.is_vector;
        Few<T> values, few, m, v;
        values.load(parameter + i, is_vector);
        few.load(gradients + i, is_vector);
        m.load(mean + i, is_vector);
        v.load(squares + i, is_vector);
        FOR_EACH_OF(T, is_vector, k) {
            const Real gradient = plus_decay(few.at[k] * scale, values.at[k], coupled);
            m.at[k] = m.at[k] * beta1 + gradient * rate1;
            v.at[k] = v.at[k] * beta2 + gradient * gradient * rate2;
            use(values.at[k], m.at[k], v.at[k]);
        }
        m.store(mean + i, is_vector);
        v.store(squares + i, is_vector);
        if (CHANGES) values.store(parameter + i, is_vector);
    });
}
