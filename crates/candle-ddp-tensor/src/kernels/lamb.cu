// LAMB, in three kernels: the moments, the sums of squares of each part, and the update, scaled by the resulting trust
// ratio. `sums` has a pair (parameter, update) for each part, followed by one pair per chunk.

struct LambScalars {
    double beta1, rate1, beta2, rate2; // moment = moment × beta + gradient × rate
    double scale, coupled;             // gradient × scale + parameter × coupled
    double inverse1, root2, eps, decay; // update: mean × inverse1 / (sqrt(squares) × root2 + eps) + parameter × decay
    double lr;
    double adapt; // whether to use the trust ratio, 0 or 1
};

// Computes the direction of a parameter's update.
template <typename Real> struct Direction {
    Real inverse1, root2, eps, decay;
    __device__ Direction(const LambScalars &by)
        : inverse1(by.inverse1), root2(by.root2), eps(by.eps), decay(by.decay) {}
    __device__ Real of(Real value, Real m, Real v) const {
        return plus_decay(m * inverse1 / (sqrt(v) * root2 + eps), value, decay);
    }
};

template <typename T> __device__ inline void lamb_moments(const Part *parts, unsigned count, const Sets &sets, double *sums) {
    typedef typename Element<T>::Real Real;
    const Part &part = part_of_block(parts, count);
    const LambScalars &by = numbers_of<LambScalars>(part, sets);
    const Direction<Real> direction(by);
    Real norm = 0, update_norm = 0;
    for_each_moments<T, T, false>(part, by, [&](Real value, Real m, Real v) {
        const Real update = direction.of(value, m, v);
        norm += value * value;
        update_norm += update * update;
    });
    const bool adapt = by.adapt != 0;
    reduce_block<Add, Add>(adapt ? norm : 0, adapt ? update_norm : 0, sums + 2ull * (count + blockIdx.x));
}
KERNELS(lamb_moments)

// One block per part.
extern "C" __global__ void lamb_sums(const Part *parts, unsigned count, const Sets, double *sums) {
    const Part *part = parts + blockIdx.x;
    reduce_chunks<Add, Add>(sums + 2ull * count, part[0].first_chunk, part[1].first_chunk, sums + 2ull * blockIdx.x);
}

// Computes the update again instead of storing it.
template <typename T> __device__ inline void lamb_update(const Part *parts, unsigned count, const Sets &sets, double *sums) {
    typedef typename Element<T>::Real Real;
    const Part &part = part_of_block(parts, count);
    const LambScalars &by = numbers_of<LambScalars>(part, sets);
    // A single thread does this, because many GPUs are slow in f64.
    __shared__ double trusted_rate;
    if (threadIdx.x == 0) {
        const double *pair = sums + 2 * (&part - parts);
        trusted_rate = by.lr * (pair[0] != 0 && pair[1] != 0 ? sqrt(pair[0] / pair[1]) : 1);
    }
    __syncthreads();
    const Real rate = trusted_rate;
    const Direction<Real> direction(by);
    T *parameter = static_cast<T *>(part.parameter);
    const Real *mean = static_cast<const Real *>(part.states[0]);
    const Real *squares = static_cast<const Real *>(part.states[1]);
    for_each_few<T>(part, [&](auto size, unsigned long long i) {
        const bool is_vector = size.is_vector;
        Few<T> values, m, v;
        values.load(parameter + i, is_vector);
        m.load(mean + i, is_vector);
        v.load(squares + i, is_vector);
        FOR_EACH_OF(T, is_vector, k) {
            values.at[k] = values.at[k] - direction.of(values.at[k], m.at[k], v.at[k]) * rate;
        }
        values.store(parameter + i, is_vector);
    });
}
KERNELS(lamb_update)
