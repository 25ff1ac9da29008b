// Included after the kernels: launching them, and conversions with their own tests.

static void (*running)(const void *);
static const void *running_by;

static void fibre() {
    running(running_by);
    fibres[threadIdx.x].done = true;
}

static void run(void (*kernel)(const void *), const void *by, unsigned blocks, unsigned threads) {
    running = kernel, running_by = by;
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

struct Launch {
    void (*kernel)(const Part *, unsigned, const Sets, double *);
    const Part *parts;
    unsigned count;
    const Sets *sets;
    double *sums;
};

static void launched(const void *by) {
    const Launch &launch = *static_cast<const Launch *>(by);
    launch.kernel(launch.parts, launch.count, *launch.sets, launch.sums);
}

extern "C" __global__ void host_launch(void (*kernel)(const Part *, unsigned, const Sets, double *), unsigned blocks,
                                       unsigned threads, const Part *parts, unsigned count, const Sets *sets,
                                       double *sums) {
    const Launch launch = {kernel, parts, count, sets, sums};
    run(launched, &launch, blocks, threads);
}

struct LaunchByValue {
    void (*kernel)(const Arguments);
    const Arguments *by;
};

static void launched_by_value(const void *by) {
    const LaunchByValue &launch = *static_cast<const LaunchByValue *>(by);
    launch.kernel(*launch.by);
}

extern "C" __global__ void host_launch_by_value(void (*kernel)(const Arguments), unsigned blocks, unsigned threads,
                                                const Arguments *by) {
    const LaunchByValue launch = {kernel, by};
    run(launched_by_value, &launch, blocks, threads);
}

extern "C" __global__ unsigned short host_to_f16(float value) { return to_f16(value).bits; }
extern "C" __global__ unsigned short host_to_bf16(float value) { return to_bf16(value).bits; }
extern "C" __global__ float host_from_f16(unsigned short bits) { return to_f32(F16{bits}); }
extern "C" __global__ float host_from_bf16(unsigned short bits) { return to_f32(BF16{bits}); }
