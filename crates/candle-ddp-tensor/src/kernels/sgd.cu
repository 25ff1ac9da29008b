// Stochastic gradient descent. State: the direction; none without momentum.

struct SgdScalars {
    double lr, decay, scale; // the gradient: gradient × scale + parameter × decay
    double momentum, share;  // direction = direction × momentum + gradient × share
    double nesterov;         // whether to use Nesterov momentum, 0 or 1
};

template <typename T> __device__ inline void sgd(const Part *parts, unsigned count, const Sets &sets, double *verdict) {
    if (is_left_out(verdict)) return;
    typedef typename Element<T>::Real Real;
    const Part &part = part_of_block(parts, count);
    const SgdScalars &by = numbers_of<SgdScalars>(part, sets);
    const Real lr = by.lr, decay = by.decay, scale = by.scale, momentum = by.momentum, share = by.share;
    const bool nesterov = by.nesterov != 0;
    T *parameter = static_cast<T *>(part.parameter);
    const T *gradients = static_cast<const T *>(part.gradient);
    Real *directions = static_cast<Real *>(part.states[0]);
    for_each_few<T>(part, [&](auto size, unsigned long long i) {
        const bool is_vector = size.is_vector;
        Few<T> values, few, direction;
        values.load(parameter + i, is_vector);
        few.load(gradients + i, is_vector);
        if (directions) direction.load(directions + i, is_vector);
        FOR_EACH_OF(T, is_vector, k) {
            const Real gradient = plus_decay(few.at[k] * scale, values.at[k], decay);
            Real step = gradient;
            if (directions) {
                direction.at[k] = direction.at[k] * momentum + gradient * share;
                step = nesterov ? gradient + direction.at[k] * momentum : direction.at[k];
            }
            values.at[k] = values.at[k] - step * lr;
        }
        if (directions) direction.store(directions + i, is_vector);
        values.store(parameter + i, is_vector);
    });
}
KERNELS(sgd)
