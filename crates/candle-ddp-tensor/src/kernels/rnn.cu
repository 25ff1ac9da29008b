// The elementwise part of a step of LSTM and GRU, between products of matrices. A thread has one element of the states of one sequence.

// numbers
struct Step {
    // The first row of the step, and the number of its rows, which are those of the first sequences.
    unsigned long long start, count;
    // How many of the sequences had a step before, in the order of the pass.
    unsigned long long begun;
    // The rows of all steps, the sequences, and the elements of a state.
    unsigned long long rows, batch, hidden;
    // Whether c after each step is a result, too.
    unsigned long long cells;
};
#define STEP (*reinterpret_cast<const Step *>(by.numbers))

// Where a thread's element is.
struct Place {
    // Among those of all steps, among the states, and the first of its gates, of all steps and of this one.
    unsigned long long output, state, gates, product;
    bool begins;
};

__device__ inline bool find(const Step &s, unsigned long long gates, Place &p) {
    unsigned long long sequence = thread_in_grid();
    if (sequence >= s.count * s.hidden) return false;
    const unsigned long long at = take(sequence, s.hidden), row = s.start + sequence;
    p.output = row * s.hidden + at;
    p.state = sequence * s.hidden + at;
    p.gates = row * gates * s.hidden + at;
    p.product = sequence * gates * s.hidden + at;
    p.begins = sequence >= s.begun;
    return true;
}

template <typename Real> __device__ inline Real sigmoid(Real x) { return 1 / (1 + exp(-x)); }

// A bias of a gate, or 0.
template <typename T>
__device__ inline typename Element<T>::Real bias_of(const void *biases, const Step &s, const Place &p, int gate) {
    return biases ? Element<T>::load(static_cast<const T *>(biases)[gate * s.hidden + p.state % s.hidden]) : 0;
}

// The products of the input and of the state, with their biases.
#define OF_INPUT(gate) (TENSOR(const Real, 0)[p.gates + gate * s.hidden] + bias_of<T>(by.tensors[2], s, p, gate))
#define OF_STATE(gate) (TENSOR(const Real, 1)[p.product + gate * s.hidden] + bias_of<T>(by.tensors[3], s, p, gate))
#define ROWS (s.rows * s.hidden)
#define STATES (s.batch * s.hidden)

// tensors: x · W_ihᵀ of all steps; h · W_hhᵀ of this one, followed by c, (batch, hidden), without rounding; the biases, or null; the first h
// and c; the results: h after each step, the last h, the last c, and c after each step with `cells`; kept for the backward pass, or null:
// gates, earlier c, earlier h.
template <typename T> __device__ inline void lstm_step(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Step &s = STEP;
    Place p;
    if (!find(s, 4, p)) return;
    T *results = TENSOR(T, 6), *kept = TENSOR(T, 7);
    Real *cells = TENSOR(Real, 1) + 4 * STATES;
    const Real i = sigmoid(OF_INPUT(0) + OF_STATE(0)), f = sigmoid(OF_INPUT(1) + OF_STATE(1));
    const Real g = tanh(OF_INPUT(2) + OF_STATE(2)), o = sigmoid(OF_INPUT(3) + OF_STATE(3));
    const T earlier = p.begins ? TENSOR(const T, 4)[p.state] : results[ROWS + p.state];
    const Real before = p.begins ? Element<T>::load(TENSOR(const T, 5)[p.state]) : cells[p.state];
    const Real c = f * before + i * g;
    const T h = Element<T>::store(o * tanh(c));
    cells[p.state] = c;
    results[p.output] = results[ROWS + p.state] = h;
    results[ROWS + STATES + p.state] = Element<T>::store(c);
    if (s.cells) results[ROWS + 2 * STATES + p.output] = Element<T>::store(c);
    if (!kept) return;
    kept[p.gates] = Element<T>::store(i);
    kept[p.gates + s.hidden] = Element<T>::store(f);
    kept[p.gates + 2 * s.hidden] = Element<T>::store(g);
    kept[p.gates + 3 * s.hidden] = Element<T>::store(o);
    kept[4 * ROWS + p.output] = Element<T>::store(before);
    kept[5 * ROWS + p.output] = earlier;
}
LAYER(lstm_step)

// tensors: what `lstm_step` keeps; the gradients of h and c, (2, batch, hidden), without rounding, of which that of h is overwritten
// by a product afterwards; the gradient of the results; the gradient of both products.
template <typename T> __device__ inline void lstm_gradient(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Step &s = STEP;
    Place p;
    if (!find(s, 4, p)) return;
    const T *kept = TENSOR(const T, 0), *gradient = TENSOR(const T, 2);
    Real *states = TENSOR(Real, 1);
    T *gates = TENSOR(T, 3);
    const Real i = Element<T>::load(kept[p.gates]), f = Element<T>::load(kept[p.gates + s.hidden]);
    const Real g = Element<T>::load(kept[p.gates + 2 * s.hidden]), o = Element<T>::load(kept[p.gates + 3 * s.hidden]);
    const Real before = Element<T>::load(kept[4 * ROWS + p.output]), of_c = tanh(f * before + i * g);
    Real dh = p.begins ? Element<T>::load(gradient[ROWS + p.state]) : states[p.state];
    Real dc = p.begins ? Element<T>::load(gradient[ROWS + STATES + p.state]) : states[STATES + p.state];
    dh += Element<T>::load(gradient[p.output]);
    if (s.cells) dc += Element<T>::load(gradient[ROWS + 2 * STATES + p.output]);
    const Real d = dc + dh * o * (1 - of_c * of_c);
    gates[p.gates] = Element<T>::store(d * g * i * (1 - i));
    gates[p.gates + s.hidden] = Element<T>::store(d * before * f * (1 - f));
    gates[p.gates + 2 * s.hidden] = Element<T>::store(d * i * (1 - g * g));
    gates[p.gates + 3 * s.hidden] = Element<T>::store(dh * of_c * o * (1 - o));
    states[STATES + p.state] = d * f;
}
LAYER(lstm_gradient)

// As `lstm_step`, without c. Kept: gates, the new gate's product of the state, earlier h.
template <typename T> __device__ inline void gru_step(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Step &s = STEP;
    Place p;
    if (!find(s, 3, p)) return;
    T *results = TENSOR(T, 6), *kept = TENSOR(T, 7);
    const Real r = sigmoid(OF_INPUT(0) + OF_STATE(0)), z = sigmoid(OF_INPUT(1) + OF_STATE(1));
    const Real product = OF_STATE(2), n = tanh(OF_INPUT(2) + r * product);
    const T earlier = p.begins ? TENSOR(const T, 4)[p.state] : results[ROWS + p.state];
    results[p.output] = results[ROWS + p.state] = Element<T>::store((Element<T>::load(earlier) - n) * z + n);
    if (!kept) return;
    kept[p.gates] = Element<T>::store(r);
    kept[p.gates + s.hidden] = Element<T>::store(z);
    kept[p.gates + 2 * s.hidden] = Element<T>::store(n);
    kept[3 * ROWS + p.output] = Element<T>::store(product);
    kept[4 * ROWS + p.output] = earlier;
}
LAYER(gru_step)

// As `lstm_gradient`, without c. A product is added to the gradient of h afterwards. tensors[4]: the gradient of the state's product.
template <typename T> __device__ inline void gru_gradient(const Arguments &by) {
    typedef typename Element<T>::Real Real;
    const Step &s = STEP;
    Place p;
    if (!find(s, 3, p)) return;
    const T *kept = TENSOR(const T, 0), *gradient = TENSOR(const T, 2);
    Real *states = TENSOR(Real, 1);
    T *gates = TENSOR(T, 3) + p.gates, *recurrent = TENSOR(T, 4) + p.gates;
    const Real r = Element<T>::load(kept[p.gates]), z = Element<T>::load(kept[p.gates + s.hidden]);
    const Real n = Element<T>::load(kept[p.gates + 2 * s.hidden]);
    const Real product = Element<T>::load(kept[3 * ROWS + p.output]), earlier = Element<T>::load(kept[4 * ROWS + p.output]);
    Real dh = p.begins ? Element<T>::load(gradient[ROWS + p.state]) : states[p.state];
    dh += Element<T>::load(gradient[p.output]);
    const Real d = dh * (1 - z) * (1 - n * n);
    gates[0] = recurrent[0] = Element<T>::store(d * product * r * (1 - r));
    gates[s.hidden] = recurrent[s.hidden] = Element<T>::store(dh * (earlier - n) * z * (1 - z));
    gates[2 * s.hidden] = Element<T>::store(d);
    recurrent[2 * s.hidden] = Element<T>::store(d * r);
    states[p.state] = dh * z;
}
LAYER(gru_gradient)
