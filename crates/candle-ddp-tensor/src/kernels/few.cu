// Loading and storing neighbouring elements at once.

// Neighbouring elements, which begin at an address that is a multiple of 16, or of their size if that is less.
template <typename T, int count> struct alignas(count * sizeof(T) < 16 ? count * sizeof(T) : 16) Neighbours { T at[count]; };

// As much as a thread loads or stores at once.
typedef Neighbours<unsigned, 4> Words;

// Elements of dtype `T` as they are in memory.
template <typename T, int count>
using InMemory = Neighbours<typename Element<T>::Memory, count * sizeof(T) / sizeof(typename Element<T>::Memory)>;

// Addresses that kernels read from memory could be those of shared memory, for all that the compiler knows.
#ifdef __CUDA_ARCH__
#define IS_GLOBAL(address) __builtin_assume(__isGlobal(address))
#else
#define IS_GLOBAL(address)
#endif

// Stores a vector in global memory. The compiler divides stores of 16 bytes into those of elements where these come from several
// branches.
template <typename Vector> __device__ inline void put(void *place, const Vector &vector) {
    Vector *to = static_cast<Vector *>(place);
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(Vector) >= sizeof(Words)) {
        const Words *words = reinterpret_cast<const Words *>(&vector);
        _Pragma("unroll") for (unsigned w = 0; w < sizeof(Vector) / sizeof(Words); w++) {
            const unsigned *at = words[w].at;
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                         :
                         : "l"(__cvta_generic_to_global(reinterpret_cast<Words *>(to) + w)), "r"(at[0]), "r"(at[1]),
                           "r"(at[2]), "r"(at[3])
                         : "memory");
        }
        return;
    }
#endif
    *to = vector;
}

// A thread's neighbouring elements in the arithmetic of dtype `T`: as many as 16 bytes hold, or one.
template <typename T> struct Few {
    typedef typename Element<T>::Real Real;
    static const int most = 16 / sizeof(T);
    Real at[most];

    // The elements in memory may have another dtype.
    template <typename From> __device__ void load(const From *from, bool is_vector) {
        IS_GLOBAL(from);
        if (!is_vector) {
            at[0] = Element<From>::load(*from);
            return;
        }
        const InMemory<From, most> vector = *reinterpret_cast<const InMemory<From, most> *>(from);
        widen<From>(vector);
    }

    template <typename From> __device__ void widen(const InMemory<From, most> &vector) {
        if constexpr (sizeof(From) == 2) {
            for (int k = 0; k < most; k += 2) {
                float first, second;
                to_f32<From>(vector.at[k / 2], first, second);
                at[k] = first;
                at[k + 1] = second;
            }
        } else {
            for (int k = 0; k < most; k++) at[k] = Element<From>::load(vector.at[k]);
        }
    }

    template <typename To> __device__ InMemory<To, most> narrow() const {
        InMemory<To, most> vector;
        if constexpr (sizeof(To) == 2) {
            for (int k = 0; k < most; k += 2) vector.at[k / 2] = to_pair<To>(at[k], at[k + 1]);
        } else {
            for (int k = 0; k < most; k++) vector.at[k] = Element<To>::store(at[k]);
        }
        return vector;
    }

    template <typename To> __device__ void store(To *to, bool is_vector) const {
        IS_GLOBAL(to);
        if (!is_vector) {
            *to = Element<To>::store(at[0]);
            return;
        }
        put(to, narrow<To>());
    }
};

// Of two neighbouring vectors: the first of each pair of elements into the first, the second into the other, and back.
template <typename T> __device__ inline void part_pairs(Few<T> &first, Few<T> &second) {
    const int most = Few<T>::most;
    const Few<T> both[2] = {first, second};
    for (int k = 0; k < most; k++) {
        first.at[k] = both[2 * k / most].at[2 * k % most];
        second.at[k] = both[2 * k / most].at[2 * k % most + 1];
    }
}

template <typename T> __device__ inline void join_pairs(Few<T> &first, Few<T> &second) {
    const int most = Few<T>::most;
    const Few<T> parts[2] = {first, second};
    for (int k = 0; k < most; k++) {
        first.at[k] = parts[k % 2].at[k / 2];
        second.at[k] = parts[k % 2].at[(most + k) / 2];
    }
}

// Loops over the elements of a `Few`.
#define FOR_EACH_OF(T, is_vector, k) \
    _Pragma("unroll") for (int k = 0; k < Few<T>::most; k++) if (k == 0 || (is_vector))
