// Included after the kernels: launching them, and conversions with their own tests.

typedef void (*Entry)(const Part *, unsigned, double *);
static Entry running;
static const Part *running_parts;
static unsigned running_count;
static double *running_sums;

static void fibre() {
    running(running_parts, running_count, running_sums);
    fibres[threadIdx.x].done = true;
}

extern "C" __global__ void host_launch(Entry kernel, unsigned blocks, unsigned threads, const Part *parts,
                                       unsigned count, double *sums) {
    running = kernel, running_parts = parts, running_count = count, running_sums = sums;
    fibres.resize(threads);
    for (unsigned block = 0; block < blocks; block++) {
        blockIdx.x = block;
        for (Fibre &fresh : fibres) {
            fresh.stack.resize(1 << 16);
            fresh.done = false;
            getcontext(&fresh.context);
            fresh.context.uc_stack.ss_sp = fresh.stack.data();
            fresh.context.uc_stack.ss_size = fresh.stack.size();
            fresh.context.uc_link = &turns;
            makecontext(&fresh.context, fibre, 0);
        }
        bool up = block % 2; // one of the two orders reveals a missing barrier
        for (unsigned left = threads; left > 0; up = !up) {
            left = 0;
            for (unsigned turn = 0; turn < threads; turn++) {
                threadIdx.x = up ? turn : threads - 1 - turn;
                if (fibres[threadIdx.x].done) continue;
                swapcontext(&turns, &fibres[threadIdx.x].context);
                left += !fibres[threadIdx.x].done;
            }
        }
    }
}

extern "C" __global__ unsigned short host_to_f16(float value) { return to_f16(value).bits; }
extern "C" __global__ unsigned short host_to_bf16(float value) { return to_bf16(value).bits; }
extern "C" __global__ float host_from_f16(unsigned short bits) { return to_f32(F16{bits}); }
extern "C" __global__ float host_from_bf16(unsigned short bits) { return to_f32(BF16{bits}); }
