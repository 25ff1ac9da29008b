// The environment of a kernel's thread: its indices and its block's memory. The kernel's translation follows.

struct launch {
    uint32_t grid[3], block[3];
    uint32_t dynamic_shared;
    const unsigned char *parameters;
    // STACK bytes for each thread of a block, for kernels with barriers.
    unsigned char *stacks;
    // Differs between launches.
    uint32_t turn;
};

struct thread {
    uint32_t tid[3], ntid[3], ctaid[3], nctaid[3];
    uint32_t shared_size;
    unsigned char *shared;
};

static inline uint32_t index_in_block(const struct thread *t) {
    return (t->tid[2] * t->ntid[1] + t->tid[1]) * t->ntid[0] + t->tid[0];
}

static inline uint32_t lane_of(const struct thread *t) { return index_in_block(t) % 32; }

static inline uint32_t warps_of(const struct thread *t) { return (t->ntid[0] * t->ntid[1] * t->ntid[2] + 31) / 32; }

static inline uintptr_t aligned(uintptr_t address, uint32_t size) {
    if (__builtin_expect(address % size != 0, 0)) fail("an address is not a multiple of the access's size");
    return address;
}

// Shared addresses are offsets; 64-bit arithmetic on them may have set higher bits.
static inline uintptr_t shared_at(const struct thread *t, uint32_t offset, uint32_t size) {
    if (__builtin_expect(offset > t->shared_size || t->shared_size - offset < size, 0))
        fail("an access is outside of the block's shared memory");
    return aligned((uintptr_t)t->shared + offset, size);
}

#define LOAD(type, address) (*(const type *)(address))
#define STORE(type, address, value) (*(type *)(address) = (value))

// Replaces the value at `address`, whose bits are `old`, by `value`, and returns the old value.
#define ATOMIC(type, address, value)                                                                                   \
    ({                                                                                                                 \
        type *where_ = (type *)(address), old = __atomic_load_n(where_, __ATOMIC_SEQ_CST), new_;                       \
        do new_ = (value);                                                                                             \
        while (!__atomic_compare_exchange_n(where_, &old, new_, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));               \
        old;                                                                                                           \
    })

static __attribute__((noreturn, noinline, cold)) void assertion_failed(const unsigned char *message,
                                                                      const unsigned char *file,
                                                                      const unsigned char *line) {
    char text[512];
    const char *words[2];
    uint32_t number;
    memcpy(&words[0], message, 8), memcpy(&words[1], file, 8), memcpy(&number, line, 4);
    snprintf(text, sizeof text, "assertion failed at %s:%u: %s", words[1], number, words[0]);
    fail(text);
}

#if FIBRES
enum { SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_BUTTERFLY, SHUFFLE_INDEX, VOTE, WARP_BARRIER, REDUCE };
enum { REDUCE_ADD, REDUCE_MIN, REDUCE_MAX, REDUCE_SMIN, REDUCE_SMAX, REDUCE_AND, REDUCE_OR, REDUCE_XOR };
static void wait_for_block(const struct thread *t, uint32_t barrier, uint32_t expected, uint32_t site);
static uint32_t reduce_over_block(const struct thread *t, uint32_t barrier, int predicate, uint32_t site,
                                  int operation);
static void wait_for_warp(const struct thread *t, uint32_t mask);
static uint32_t shuffle(const struct thread *t, int mode, uint32_t value, uint32_t b, uint32_t c, uint32_t mask,
                        int *inside);
static uint32_t vote(const struct thread *t, uint32_t mask, int predicate, uint32_t *members);
static uint32_t reduce_over_warp(const struct thread *t, int operation, uint32_t value, uint32_t mask);
#endif
