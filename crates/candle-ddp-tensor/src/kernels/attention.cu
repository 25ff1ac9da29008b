// Attention, for some rows of some heads at a time: a row is a query of one of the heads that share keys and values.

struct Attention {
    unsigned long long first_item, first_row; // of the block of scores: (items, rows, keys)
    unsigned long long rows, keys;            // of the block; a causal query sees none of the keys behind these
    unsigned long long all_rows;              // group × queries, of an item
    unsigned long long queries, key_heads, group;
    unsigned long long is_causal;
    unsigned long long mask[4]; // its strides by sample, head, query and key; 0 where the same holds for all
    unsigned long long columns; // from one row of scores in memory to the next
    unsigned long long vector;  // keys that a thread processes at once: a whole vector, or one
};
#define ATTENTION (*reinterpret_cast<const Attention *>(by.numbers))

// Loops over this thread's keys, with the first of some. The last ones may lie behind `keys`, but not behind the row in memory.
#define FOR_EACH_KEY(key, keys) \
    for (unsigned long long key = threadIdx.x * a.vector; key < (keys); key += THREADS * a.vector)

// This block's row: where its numbers begin, and the numbers added to its scores.
template <typename Real> struct Row {
    unsigned long long scores, normaliser, seen;
    const Real *mask;
    unsigned long long step;

    __device__ Row(const Attention &a, const Real *masks) {
        unsigned long long item = blockIdx.x;
        const unsigned long long row = a.first_row + take(item, a.rows);
        item += a.first_item;
        unsigned long long member = row, sample = item;
        const unsigned long long query = take(member, a.queries), head = take(sample, a.key_heads) * a.group + member;
        scores = (unsigned long long)blockIdx.x * a.columns;
        normaliser = item * a.all_rows + row;
        seen = a.is_causal ? min(query + 1, a.keys) : a.keys;
        mask = masks ? masks + sample * a.mask[0] + head * a.mask[1] + query * a.mask[2] : masks;
        step = a.mask[3];
    }

    // The score of a key that the query sees, of its product with the query.
    __device__ Real score(Real product, Real scale, unsigned long long key) const {
        return mask ? product * scale + mask[key * step] : product * scale;
    }
};

// tensors: products of queries and keys in the dtype of the arithmetic, which are overwritten; weights, maybe in the same
// memory; log Σ e^score of each query; the mask to add to scores, or null. reals: the factor of products. One block
// per row. A query that sees nothing has zero weights and an infinite normaliser.
template <typename T> __device__ inline void attention_weights(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    __shared__ double pair[2];
    const Attention &a = ATTENTION;
    const Row<Real> row(a, TENSOR(const Real, 3));
    Real *scores = TENSOR(Real, 0) + row.scores;
    T *weights = TENSOR(T, 1) + row.scores;
    const Real scale = by.reals[0], nothing = __uint_as_float(0xff800000u);
    const bool is_vector = a.vector > 1;
    Few<T> few;
    Real largest = nothing;
    FOR_EACH_KEY(key, row.seen) {
        few.load(scores + key, is_vector);
        FOR_EACH_OF(T, is_vector, k) {
            const Real score = key + k < row.seen ? row.score(few.at[k], scale, key + k) : nothing;
            few.at[k] = score;
            if (score > largest || score != score) largest = score;
        }
        few.store(scores + key, is_vector);
    }
    reduce_block<Larger, Add>(largest, 0, pair);
    __syncthreads();
    const Real shift = pair[0];
    const bool sees = shift != nothing;
    Real part = 0;
    FOR_EACH_KEY(key, sees ? row.seen : 0) {
        few.load(scores + key, is_vector);
        FOR_EACH_OF(T, is_vector, k) {
            few.at[k] = exp(few.at[k] - shift);
            part += few.at[k];
        }
        few.store(scores + key, is_vector);
    }
    __syncthreads();
    reduce_block<Add, Add>(part, 0, pair);
    __syncthreads();
    const Real sum = pair[0], share = 1 / sum;
    FOR_EACH_KEY(key, a.keys) {
        const bool is_seen = sees && key < row.seen;
        if (is_seen) few.load(scores + key, is_vector);
        FOR_EACH_OF(T, is_vector, k) few.at[k] = is_seen ? few.at[k] * share : 0;
        few.store(weights + key, is_vector);
    }
    if (threadIdx.x == 0) TENSOR(Real, 2)[row.normaliser] = sees ? shift + log(sum) : -nothing;
}
LAYER(attention_weights)

// tensors: products of queries and keys, and gradients of weights, both in the dtype of the arithmetic; weights, and
// gradients of products, each maybe in the memory of the former; normalisers; the mask to add to scores, or null. reals: the
// factor of products. One block per row.
template <typename T> __device__ inline void attention_gradients(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    __shared__ double pair[2];
    const Attention &a = ATTENTION;
    const Row<Real> row(a, TENSOR(const Real, 5));
    Real *scores = TENSOR(Real, 0) + row.scores;
    const Real *of_weights = TENSOR(const Real, 1) + row.scores;
    T *weights = TENSOR(T, 2) + row.scores, *gradients = TENSOR(T, 3) + row.scores;
    const Real scale = by.reals[0], normaliser = TENSOR(const Real, 4)[row.normaliser];
    const bool is_vector = a.vector > 1;
    Few<T> weight, few;
    Real part = 0;
    FOR_EACH_KEY(key, row.seen) {
        weight.load(scores + key, is_vector);
        few.load(of_weights + key, is_vector);
        FOR_EACH_OF(T, is_vector, k) {
            const bool is_seen = key + k < row.seen;
            weight.at[k] = is_seen ? exp(row.score(weight.at[k], scale, key + k) - normaliser) : 0;
            if (is_seen) part += weight.at[k] * few.at[k];
        }
        weight.store(scores + key, is_vector);
    }
    reduce_block<Add, Add>(part, 0, pair);
    __syncthreads();
    const Real mean = pair[0];
    FOR_EACH_KEY(key, a.keys) {
        weight.load(scores + key, is_vector);
        few.load(of_weights + key, is_vector);
        FOR_EACH_OF(T, is_vector, k) {
            const bool is_seen = key + k < row.seen;
            weight.at[k] = is_seen ? weight.at[k] : 0;
            few.at[k] = is_seen ? weight.at[k] * (few.at[k] - mean) * scale : 0;
        }
        weight.store(weights + key, is_vector);
        few.store(gradients + key, is_vector);
    }
}
LAYER(attention_gradients)

// Tensors with the heads of a token side by side (samples, tokens, parts, heads, size), and the parts by themselves
// (samples, heads, tokens, size).
struct Heads {
    unsigned long long samples, tokens, parts, heads, size;
    unsigned long long wide;   // the first part whose separate tensor has the dtype of the arithmetic
    unsigned long long vector; // elements that a thread copies
};
#define HEADS (*reinterpret_cast<const Heads *>(by.numbers))

// Where this thread's elements are: the part, and the places in both tensors.
struct Place {
    unsigned long long part, together, apart;
    bool exists;

    __device__ Place(const Heads &h) {
        const unsigned long long width = h.size / h.vector, number = thread_in_grid();
        unsigned long long rest = number;
        const unsigned long long column = take(rest, width), head = take(rest, h.heads);
        part = take(rest, h.parts);
        const unsigned long long token = take(rest, h.tokens);
        exists = rest < h.samples;
        together = number * h.vector;
        apart = (((rest * h.heads + head) * h.tokens + token) * width + column) * h.vector;
    }
};

// tensors: the heads side by side, and the parts, one after the other. One thread per vector.
template <typename T> __device__ inline void split_heads(const Arguments &by) {
    const Heads &h = HEADS;
    const Place at(h);
    if (!at.exists) return;
    const T *from = TENSOR(const T, 0) + at.together;
    T *to = TENSOR(T, 1) + at.part * (h.samples * h.heads * h.tokens * h.size) + at.apart;
    if (h.vector * sizeof(T) == sizeof(Words)) *reinterpret_cast<Words *>(to) = *reinterpret_cast<const Words *>(from);
    else *to = *from;
}
LAYER(split_heads)

// tensors: the heads side by side, and each part. One thread per vector; the vectors of wide parts are single elements.
template <typename T> __device__ inline void merge_heads(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Heads &h = HEADS;
    const Place at(h);
    if (!at.exists) return;
    T *to = TENSOR(T, 0) + at.together;
    const void *part = by.tensors[1 + at.part];
    if (at.part >= h.wide) {
        *to = Element<T>::store(static_cast<const Real *>(part)[at.apart]);
        return;
    }
    const T *from = static_cast<const T *>(part) + at.apart;
    if (h.vector * sizeof(T) == sizeof(Words)) *reinterpret_cast<Words *>(to) = *reinterpret_cast<const Words *>(from);
    else *to = *from;
}
LAYER(merge_heads)
