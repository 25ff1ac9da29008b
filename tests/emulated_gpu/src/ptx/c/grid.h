// Runs the grid on the calling thread, block by block.

__attribute__((visibility("default"))) void emulated_gpu_run(const struct launch *launch) {
    _Alignas(16) unsigned char parameters[PARAMETER_BYTES + 1];
    memcpy(parameters, launch->parameters, PARAMETER_BYTES);
    struct thread thread = {0};
    memcpy(thread.ntid, launch->block, sizeof thread.ntid);
    memcpy(thread.nctaid, launch->grid, sizeof thread.nctaid);
    thread.shared_size = STATIC_SHARED + launch->dynamic_shared;
    if (thread.shared_size) thread.shared = aligned_alloc(256, (thread.shared_size + 255) / 256 * 256);
#if FIBRES
    struct crew crew = {.size = launch->block[0] * launch->block[1] * launch->block[2], .parameters = parameters};
    crew.warp_count = (crew.size + 31) / 32;
    crew.fibres = malloc(crew.size * sizeof *crew.fibres);
    crew.warps = malloc(crew.warp_count * sizeof *crew.warps);
#endif
    for (thread.ctaid[2] = 0; thread.ctaid[2] < thread.nctaid[2]; thread.ctaid[2]++)
        for (thread.ctaid[1] = 0; thread.ctaid[1] < thread.nctaid[1]; thread.ctaid[1]++)
            for (thread.ctaid[0] = 0; thread.ctaid[0] < thread.nctaid[0]; thread.ctaid[0]++) {
                // Kernels must not rely on zeros.
                if (thread.shared_size) memset(thread.shared, 0xff, thread.shared_size);
#if FIBRES
                run_block(launch, &crew, thread);
#else
                for (thread.tid[2] = 0; thread.tid[2] < thread.ntid[2]; thread.tid[2]++)
                    for (thread.tid[1] = 0; thread.tid[1] < thread.ntid[1]; thread.tid[1]++)
                        for (thread.tid[0] = 0; thread.tid[0] < thread.ntid[0]; thread.tid[0]++)
                            body(&thread, parameters);
#endif
            }
#if FIBRES
    free(crew.fibres);
    free(crew.warps);
#endif
    free(thread.shared);
}
