// Adam and AdamW. States: the running means of the gradients and of their squares.

struct AdamScalars {
    double beta1, rate1, beta2, rate2; // moment = moment × beta + gradient × rate
    double step_size, root, eps;       // parameter -= mean × step_size / (sqrt(squares) × root + eps)
    double scale, coupled;             // gradient × scale + parameter × coupled
    double keep;                       // decoupled weight decay: parameter × keep
};

template <typename T> __device__ inline void adam(const Part *parts, unsigned count, double *) {
    typedef typename Element<T>::Real Real;
    const Part &part = part_of_block(parts, count);
    const AdamScalars &by = *reinterpret_cast<const AdamScalars *>(part.scalars);
    const Real beta1 = by.beta1, rate1 = by.rate1, beta2 = by.beta2, rate2 = by.rate2;
    const Real step_size = by.step_size, root = by.root, eps = by.eps;
    const Real scale = by.scale, coupled = by.coupled, keep = by.keep;
    T *parameter = static_cast<T *>(part.parameter);
    const T *gradients = static_cast<const T *>(part.gradient);
    Real *mean = static_cast<Real *>(part.states[0]), *squares = static_cast<Real *>(part.states[1]);
    FOR_EACH_ELEMENT(part, i) {
        const Real value = Element<T>::load(parameter[i]);
        const Real gradient = plus_decay(Element<T>::load(gradients[i]) * scale, value, coupled);
        const Real m = mean[i] * beta1 + gradient * rate1;
        const Real v = squares[i] * beta2 + gradient * gradient * rate2;
        mean[i] = m;
        squares[i] = v;
        parameter[i] = Element<T>::store(value * keep - m * step_size / (sqrt(v) * root + eps));
    }
}
KERNELS(adam)
