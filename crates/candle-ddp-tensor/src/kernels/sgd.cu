// Stochastic gradient descent. State: the direction; none without momentum.

struct SgdScalars {
    double lr, decay, scale; // the gradient: gradient × scale + parameter × decay
    double momentum, share;  // direction = direction × momentum + gradient × share
    double nesterov;         // whether to use Nesterov momentum, 0 or 1
};

template <typename T> __device__ inline void sgd(const Part *parts, unsigned count, double *) {
    typedef typename Element<T>::Real Real;
    const Part &part = part_of_block(parts, count);
    const SgdScalars &by = *reinterpret_cast<const SgdScalars *>(part.scalars);
    const Real lr = by.lr, decay = by.decay, scale = by.scale, momentum = by.momentum, share = by.share;
    const bool nesterov = by.nesterov != 0;
    T *parameter = static_cast<T *>(part.parameter);
    const T *gradients = static_cast<const T *>(part.gradient);
    Real *directions = static_cast<Real *>(part.states[0]);
    FOR_EACH_ELEMENT(part, i) {
        const Real value = Element<T>::load(parameter[i]);
        const Real gradient = plus_decay(Element<T>::load(gradients[i]) * scale, value, decay);
        Real step = gradient;
        if (directions) {
            const Real direction = directions[i] * momentum + gradient * share;
            directions[i] = direction;
            step = nesterov ? gradient + direction * momentum : direction;
        }
        parameter[i] = Element<T>::store(value - step * lr);
    }
}
KERNELS(sgd)
