// Blocks whose threads wait for each other: each thread is a fibre with its own stack, and fibres take turns on the
// operating system thread that runs the kernel. A fibre runs until it has to wait; then the next fibre of its warp
// runs, then the next warp. When a barrier opens, the direction of the turns changes.
#include <stddef.h>
#if defined(__x86_64__) && !defined(EMULATED_GPU_UCONTEXT)
#define ASSEMBLY_SWITCH 1
#else
#define ASSEMBLY_SWITCH 0
#include <ucontext.h>
#endif

struct fibre {
    void *stack_pointer;
    struct thread thread;
    uint32_t lane;
    struct warp *warp;
    struct crew *crew;
#if !ASSEMBLY_SWITCH
    ucontext_t context;
#endif
};

struct warp {
    // One bit per lane: can run, has not ended, waits for other lanes of the warp.
    uint32_t ready, alive, waiting;
    int falling;
    // The operands and results of waiting lanes.
    int operation[32];
    uint32_t mask[32], value[32], b[32], c[32], inside;
};

struct barrier {
    // Threads that have arrived, threads that must arrive (0: all), and the position in the kernel.
    uint32_t arrived, expected, site;
    // Of the threads that have arrived, those whose predicate is true; and, at the opening of the barrier, all threads
    // and those.
    uint32_t trues, all_then, trues_then;
    uint32_t lanes[32];
};

struct crew {
    struct fibre *fibres;
    struct warp *warps;
    uint32_t size, warp_count, alive, current;
    int falling;
    const unsigned char *parameters;
    struct barrier barriers[16];
    struct fibre outside;
};

static struct fibre *fibre_of(const struct thread *t) {
    return (struct fibre *)((char *)t - offsetof(struct fibre, thread));
}

static void run_fibre(struct fibre *self);

#if ASSEMBLY_SWITCH
void emulated_gpu_switch(void **save, void *to);
void emulated_gpu_start(void);
// Callee-saved registers are pushed to the stack of the fibre that stops and popped from that of the fibre that
// resumes. A new fibre finds its pointer in r12.
__asm__(".text\n"
        ".hidden emulated_gpu_switch\n.globl emulated_gpu_switch\n.type emulated_gpu_switch, @function\n"
        "emulated_gpu_switch:\n"
        "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n    pushq %r15\n"
        "    movq %rsp, (%rdi)\n    movq %rsi, %rsp\n"
        "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n"
        "    ret\n"
        ".hidden emulated_gpu_start\n.globl emulated_gpu_start\n.type emulated_gpu_start, @function\n"
        "emulated_gpu_start:\n"
        "    movq %r12, %rdi\n    call *%rbx\n    ud2\n");

static void prepare(struct fibre *fibre, unsigned char *stack) {
    // Start the stacks at different offsets in a page, so that they do not compete for the same cache lines.
    uintptr_t top = (uintptr_t)stack + STACK - index_in_block(&fibre->thread) % 64 * 64;
    void **frame = (void **)top - 9;
    memset(frame, 0, 9 * sizeof *frame);
    frame[3] = fibre;
    frame[4] = (void *)run_fibre;
    frame[6] = (void *)emulated_gpu_start;
    fibre->stack_pointer = frame;
}

static inline void change(struct fibre *from, struct fibre *to) {
    emulated_gpu_switch(&from->stack_pointer, to->stack_pointer);
}
#else
static void start_fibre(unsigned high, unsigned low) {
    run_fibre((struct fibre *)(uintptr_t)((uint64_t)high << 32 | low));
}

static void prepare(struct fibre *fibre, unsigned char *stack) {
    getcontext(&fibre->context);
    fibre->context.uc_stack.ss_sp = stack;
    fibre->context.uc_stack.ss_size = STACK;
    fibre->context.uc_link = NULL;
    uint64_t self = (uintptr_t)fibre;
    makecontext(&fibre->context, (void (*)(void))start_fibre, 2, (unsigned)(self >> 32), (unsigned)self);
}

static inline void change(struct fibre *from, struct fibre *to) { swapcontext(&from->context, &to->context); }
#endif

static __attribute__((noreturn, noinline, cold)) void stuck(struct crew *crew) {
    char text[256];
    uint32_t at_shuffles = 0, at_barriers = 0;
    for (uint32_t warp = 0; warp < crew->warp_count; warp++)
        at_shuffles += __builtin_popcount(crew->warps[warp].waiting);
    for (int barrier = 0; barrier < 16; barrier++) at_barriers += crew->barriers[barrier].arrived;
    snprintf(text, sizeof text,
             "its threads wait for each other forever: of the %u threads of block (%u, %u, %u), %u have ended, %u "
             "wait at a barrier of the block, %u for others of their warp",
             crew->size, crew->fibres->thread.ctaid[0], crew->fibres->thread.ctaid[1], crew->fibres->thread.ctaid[2],
             crew->size - crew->alive, at_barriers, at_shuffles);
    fail(text);
}

// Switches to the next fibre, and returns when it is the turn of `self` again.
static void pass_turn(struct fibre *self) {
    struct crew *crew = self->crew;
    struct warp *warp = &crew->warps[crew->current];
    for (uint32_t tried = 0; warp->ready == 0; tried++) {
        if (tried == crew->warp_count) {
            if (crew->alive != 0) stuck(crew);
            return change(self, &crew->outside);
        }
        if (crew->falling)
            crew->current = crew->current == 0 ? crew->warp_count - 1 : crew->current - 1;
        else
            crew->current = crew->current + 1 == crew->warp_count ? 0 : crew->current + 1;
        warp = &crew->warps[crew->current];
    }
    uint32_t lane = warp->falling ? 31 - __builtin_clz(warp->ready) : __builtin_ctz(warp->ready);
    warp->ready &= ~((uint32_t)1 << lane);
    struct fibre *next = &crew->fibres[crew->current * 32 + lane];
    if (next != self) change(self, next);
}

static void turn_around(struct crew *crew) {
    crew->falling = !crew->falling;
    crew->current = crew->falling ? crew->warp_count - 1 : 0;
    for (uint32_t warp = 0; warp < crew->warp_count; warp++) crew->warps[warp].falling = crew->falling;
}

static void open_if_complete(struct crew *crew, struct barrier *barrier) {
    if (barrier->arrived == 0 || barrier->arrived != (barrier->expected ? barrier->expected : crew->alive)) return;
    for (uint32_t warp = 0; warp < crew->warp_count; warp++) {
        crew->warps[warp].ready |= barrier->lanes[warp];
        barrier->lanes[warp] = 0;
    }
    barrier->all_then = barrier->arrived;
    barrier->trues_then = barrier->trues;
    barrier->arrived = barrier->trues = 0;
    turn_around(crew);
}

static void arrive(struct fibre *self, uint32_t barrier_number, uint32_t expected, uint32_t site, int predicate) {
    struct crew *crew = self->crew;
    if (barrier_number > 15) fail("a block has 16 barriers");
    struct barrier *barrier = &crew->barriers[barrier_number];
    if (barrier->arrived == 0) {
        barrier->expected = expected;
        barrier->site = site;
    } else if (barrier->expected != expected || (expected == 0 && barrier->site != site)) {
        fail("threads of a block wait at different barriers");
    }
    barrier->arrived++;
    barrier->trues += predicate != 0;
    barrier->lanes[self->warp - crew->warps] |= (uint32_t)1 << self->lane;
    open_if_complete(crew, barrier);
    pass_turn(self);
}

static void wait_for_block(const struct thread *t, uint32_t barrier, uint32_t expected, uint32_t site) {
    arrive(fibre_of(t), barrier, expected, site, 0);
}

static uint32_t reduce_over_block(const struct thread *t, uint32_t barrier, int predicate, uint32_t site,
                                  int operation) {
    struct fibre *self = fibre_of(t);
    arrive(self, barrier, 0, site, predicate);
    const struct barrier *opened = &self->crew->barriers[barrier];
    uint32_t trues = opened->trues_then;
    return operation == REDUCE_ADD ? trues : operation == REDUCE_OR ? trues != 0 : trues == opened->all_then;
}

static void finish_shuffle(struct warp *warp, uint32_t members) {
    uint32_t results[32], inside = 0;
    for (uint32_t left = members; left; left &= left - 1) {
        uint32_t lane = __builtin_ctz(left), b = warp->b[lane] & 31, c = warp->c[lane];
        uint32_t segment = c >> 8 & 31, first = lane & segment, last = first | (c & 31 & ~segment), from;
        int within;
        switch (warp->operation[lane]) {
        case SHUFFLE_UP: from = lane - b, within = (int)from >= (int)last; break;
        case SHUFFLE_DOWN: from = lane + b, within = from <= last; break;
        case SHUFFLE_BUTTERFLY: from = lane ^ b, within = from <= last; break;
        default: from = first | (b & ~segment), within = from <= last;
        }
        if (!within) from = lane;
        inside |= (uint32_t)within << lane;
        // The result is undefined for lanes that do not take part.
        results[lane] = members >> from & 1 ? warp->value[from] : 0xffffffff;
    }
    for (uint32_t left = members; left; left &= left - 1) {
        uint32_t lane = __builtin_ctz(left);
        warp->value[lane] = results[lane];
    }
    warp->inside = (warp->inside & ~members) | inside;
}

static void finish_vote(struct warp *warp, uint32_t members) {
    uint32_t ballot = 0;
    for (uint32_t left = members; left; left &= left - 1) {
        uint32_t lane = __builtin_ctz(left);
        ballot |= (uint32_t)(warp->value[lane] != 0) << lane;
    }
    for (uint32_t left = members; left; left &= left - 1) {
        uint32_t lane = __builtin_ctz(left);
        warp->value[lane] = ballot, warp->b[lane] = members;
    }
}

static void finish_reduction(struct warp *warp, uint32_t members) {
    uint32_t lane = __builtin_ctz(members), sum = warp->value[lane], operation = warp->b[lane];
    for (uint32_t left = members & (members - 1); left; left &= left - 1) {
        uint32_t value = warp->value[__builtin_ctz(left)];
        switch (operation) {
        case REDUCE_ADD: sum += value; break;
        case REDUCE_MIN: sum = value < sum ? value : sum; break;
        case REDUCE_MAX: sum = value > sum ? value : sum; break;
        case REDUCE_SMIN: sum = (int32_t)value < (int32_t)sum ? value : sum; break;
        case REDUCE_SMAX: sum = (int32_t)value > (int32_t)sum ? value : sum; break;
        case REDUCE_AND: sum &= value; break;
        case REDUCE_OR: sum |= value; break;
        default: sum ^= value;
        }
    }
    for (uint32_t left = members; left; left &= left - 1) warp->value[__builtin_ctz(left)] = sum;
}

// Releases the lanes of `mask` if all of them that have not ended wait for the same operation.
static void join_if_complete(struct warp *warp, uint32_t mask, int operation) {
    uint32_t members = mask & warp->alive;
    if (members == 0 || (members & ~warp->waiting) != 0) return;
    for (uint32_t left = members; left; left &= left - 1) {
        uint32_t lane = __builtin_ctz(left);
        if (warp->mask[lane] != mask || warp->operation[lane] != operation) return;
    }
    if (operation <= SHUFFLE_INDEX) finish_shuffle(warp, members);
    if (operation == VOTE) finish_vote(warp, members);
    if (operation == REDUCE) finish_reduction(warp, members);
    warp->waiting &= ~members;
    warp->ready |= members;
    warp->falling = !warp->falling;
}

static uint32_t join_warp(struct fibre *self, int operation, uint32_t mask, uint32_t value, uint32_t b, uint32_t c) {
    struct warp *warp = self->warp;
    uint32_t lane = self->lane;
    if (!(mask >> lane & 1)) fail("a thread is not in the mask of the lanes that it waits for");
    warp->operation[lane] = operation;
    warp->mask[lane] = mask;
    warp->value[lane] = value;
    warp->b[lane] = b;
    warp->c[lane] = c;
    warp->waiting |= (uint32_t)1 << lane;
    join_if_complete(warp, mask, operation);
    pass_turn(self);
    return warp->value[lane];
}

static void wait_for_warp(const struct thread *t, uint32_t mask) {
    join_warp(fibre_of(t), WARP_BARRIER, mask, 0, 0, 0);
}

static uint32_t shuffle(const struct thread *t, int mode, uint32_t value, uint32_t b, uint32_t c, uint32_t mask,
                        int *inside) {
    struct fibre *self = fibre_of(t);
    uint32_t result = join_warp(self, mode, mask, value, b, c);
    *inside = self->warp->inside >> self->lane & 1;
    return result;
}

static uint32_t vote(const struct thread *t, uint32_t mask, int predicate, uint32_t *members) {
    struct fibre *self = fibre_of(t);
    uint32_t ballot = join_warp(self, VOTE, mask, predicate, 0, 0);
    *members = self->warp->b[self->lane];
    return ballot;
}

static uint32_t reduce_over_warp(const struct thread *t, int operation, uint32_t value, uint32_t mask) {
    return join_warp(fibre_of(t), REDUCE, mask, value, operation, 0);
}

// Threads that have ended are not waited for.
static void run_fibre(struct fibre *self) {
    struct crew *crew = self->crew;
    struct warp *warp = self->warp;
    body(&self->thread, crew->parameters);
    crew->alive--;
    warp->alive &= ~((uint32_t)1 << self->lane);
    for (uint32_t left = warp->waiting; left; left &= left - 1) {
        uint32_t lane = __builtin_ctz(left);
        if (warp->waiting >> lane & 1) join_if_complete(warp, warp->mask[lane], warp->operation[lane]);
    }
    for (int barrier = 0; barrier < 16; barrier++) open_if_complete(crew, &crew->barriers[barrier]);
    pass_turn(self);
    fail("a thread continued after its end");
}

static void run_block(const struct launch *launch, struct crew *crew, struct thread thread) {
    memset(crew->barriers, 0, sizeof crew->barriers);
    memset(crew->warps, 0, crew->warp_count * sizeof *crew->warps);
    crew->alive = crew->size;
    // One of the two directions reveals a missing barrier.
    crew->falling = (thread.ctaid[0] + thread.ctaid[1] + thread.ctaid[2] + launch->turn) % 2 == 0;
    turn_around(crew);
    for (uint32_t index = 0; index < crew->size; index++) {
        struct fibre *fibre = &crew->fibres[index];
        thread.tid[0] = index % thread.ntid[0];
        thread.tid[1] = index / thread.ntid[0] % thread.ntid[1];
        thread.tid[2] = index / thread.ntid[0] / thread.ntid[1];
        fibre->thread = thread;
        fibre->lane = index % 32;
        fibre->warp = &crew->warps[index / 32];
        fibre->warp->ready |= (uint32_t)1 << fibre->lane;
        fibre->warp->alive |= (uint32_t)1 << fibre->lane;
        fibre->crew = crew;
        prepare(fibre, launch->stacks + (size_t)index * STACK);
    }
    crew->outside.crew = crew;
    pass_turn(&crew->outside);
}
