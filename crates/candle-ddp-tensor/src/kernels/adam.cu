// Adam and AdamW. States: the moments.

struct AdamScalars {
    double beta1, rate1, beta2, rate2; // moment = moment × beta + gradient × rate
    double step_size, root, eps;       // parameter -= mean × step_size / (sqrt(squares) × root + eps)
    double scale, coupled;             // gradient × scale + parameter × coupled
    double keep;                       // decoupled weight decay: parameter × keep
};

template <typename T, typename From>
__device__ inline void adam_by(const Part *parts, unsigned count, const Sets &sets, const double *verdict) {
    if (is_left_out(verdict)) return;
    typedef typename Element<T>::Real Real;
    const Part &part = part_of_block(parts, count);
    const AdamScalars &by = numbers_of<AdamScalars>(part, sets);
    const Real step_size = by.step_size, root = by.root, eps = by.eps, keep = by.keep;
    for_each_moments<T, From, true>(part, by, [&](Real &value, Real m, Real v) {
        value = value * keep - m * step_size / (sqrt(v) * root + eps);
    });
}

template <typename T> __device__ inline void adam(const Part *p, unsigned n, const Sets &sets, double *verdict) {
    adam_by<T, T>(p, n, sets, verdict);
}
KERNELS(adam)

// By gradients of another type than the parameter's, as they come out of mixed precision.
template <typename T> __device__ inline void adam_from_f16(const Part *p, unsigned n, const Sets &sets, double *verdict) {
    adam_by<T, F16>(p, n, sets, verdict);
}
KERNELS(adam_from_f16)

template <typename T> __device__ inline void adam_from_bf16(const Part *p, unsigned n, const Sets &sets, double *verdict) {
    adam_by<T, BF16>(p, n, sets, verdict);
}
KERNELS(adam_from_bf16)
