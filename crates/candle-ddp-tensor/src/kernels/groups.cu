// Normalisation of each sample's groups of channels, by the kernels of channels.cu: for `moments`, the groups of all samples are the
// channels of a single sample, and for `gradient_sums` and the maps, their planes are. The kernels here go from groups to planes.

// The parameters' dtypes, groups of a sample, and channels of a group.
struct Groups {
    unsigned long long dtypes, groups, channels;
};
#define GROUPS (*reinterpret_cast<const Groups *>(by.numbers + 9))

// A channel's parameter, or `otherwise` if there is none.
template <typename Real>
__device__ inline Real parameter_of(const void *from, unsigned long long dtype, unsigned long long channel, Real otherwise) {
    return from ? get<Real>(from, dtype, channel) : otherwise;
}

// tensors: the pairs of `moments`; the result (3, planes): mean, scale and shift; weight and bias, or null; 1 / deviation of each group;
// x. reals: eps. The batch's channels are groups. One warp per group.
template <typename T> __device__ inline void group_statistics(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const Groups &g = GROUPS;
    const unsigned long long group = thread_in_grid() / 32, planes = b.channels * g.channels;
    if (group >= b.channels) return;
    double distance, squares;
    add_pairs(b, TENSOR(const double, 0), group, distance, squares);
    // From the sums of distances.
    distance /= b.spatial;
    squares = squares / b.spatial - distance * distance;
    if (squares < 0) squares = 0; // rounded
    const Real mean = first_of(b, TENSOR(const T, 5), group) + distance;
    const Real inverse = 1 / sqrt(Real(squares) + Real(by.reals[0]));
    if (threadIdx.x % 32 == 0) TENSOR(Real, 4)[group] = inverse;
    for (unsigned long long i = threadIdx.x % 32; i < g.channels; i += 32) {
        const unsigned long long channel = group % g.groups * g.channels + i;
        Real *plane = TENSOR(Real, 1) + group * g.channels + i;
        plane[0] = mean;
        plane[planes] = parameter_of<Real>(by.tensors[2], g.dtypes, channel, 1) * inverse;
        plane[2 * planes] = parameter_of<Real>(by.tensors[3], g.dtypes >> 4, channel, 0);
    }
}
LAYER(group_statistics)

// tensors: the pairs of `gradient_sums`; the result (4, planes): Σ dy, Σ dy · x̂ for the normalised x̂, a and b of `input_gradient`;
// weight, or null; 1 / deviation of each group. The batch's channels are planes. One warp per group.
template <typename T> __device__ inline void group_gradients(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const Groups &g = GROUPS;
    const unsigned long long group = thread_in_grid() / 32, planes = b.channels;
    if (group >= planes / g.channels) return;
    const Real inverse = TENSOR(const Real, 3)[group];
    Real *rows = TENSOR(Real, 1) + group * g.channels;
    double plain = 0, weighted = 0;
    for (unsigned long long i = 0; i < g.channels; i++) {
        const unsigned long long channel = group % g.groups * g.channels + i;
        double dy, products;
        add_pairs(b, TENSOR(const double, 0), group * g.channels + i, dy, products);
        products *= inverse;
        const Real weight = parameter_of<Real>(by.tensors[2], g.dtypes, channel, 1);
        plain += dy * weight;
        weighted += products * weight;
        if (threadIdx.x % 32) continue;
        rows[i] = dy;
        rows[planes + i] = products;
    }
    const double count = (double)g.channels * b.spatial;
    for (unsigned long long i = threadIdx.x % 32; i < g.channels; i += 32) {
        rows[2 * planes + i] = plain / count * inverse;
        rows[3 * planes + i] = weighted / count * inverse * inverse;
    }
}
LAYER(group_gradients)

// tensors: the result of `group_gradients`, and the gradients of weight and bias, of the dtypes numbers[9]. One thread per channel.
template <typename T> __device__ inline void group_totals(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Batch &b = BATCH;
    const unsigned long long channel = thread_in_grid(), dtypes = by.numbers[9], planes = b.samples * b.channels;
    if (channel >= b.channels) return;
    const Real *rows = TENSOR(const Real, 0);
    double weight = 0, bias = 0;
    for (unsigned long long plane = channel; plane < planes; plane += b.channels) {
        bias += rows[plane];
        weight += rows[planes + plane];
    }
    put<Real>(by.tensors[1], dtypes, channel, weight);
    put<Real>(by.tensors[2], dtypes >> 4, channel, bias);
}
LAYER(group_totals)
