// Records what a process has a GPU do: each kernel, copy and memset with its time and stream, and the number and time of the
// driver's calls. CUDA loads it into any program:
//
//     cc -O2 -shared -fPIC -I CUDA/include -o libgpu_trace.so scripts/compare/gpu_trace.c -L CUDA/lib64 -l:libcupti.so.13
//     GPU_TRACE=trace.tsv CUDA_INJECTION64_PATH=./libgpu_trace.so PROGRAM
//
// Written by rank 0 alone, when it exits: a line for each kernel (K), copy (C) and memset (S) with start and end in ns, stream,
// the number of the call that launched it, and name; and for each call (A) with start and end, thread, number and name.
#include <cupti.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static FILE *file;

static void CUPTIAPI more(uint8_t **buffer, size_t *size, size_t *records) {
  *size = 8 << 20;
  *records = 0;
  *buffer = aligned_alloc(8, *size);
}

static void write_record(CUpti_Activity *record) {
  switch (record->kind) {
  case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
    CUpti_ActivityKernel10 *kernel = (void *)record;
    fprintf(file, "K\t%lu\t%lu\t%u\t%u\t%s\n", kernel->start, kernel->end, kernel->streamId, kernel->correlationId, kernel->name);
    break;
  }
  case CUPTI_ACTIVITY_KIND_MEMCPY: {
    CUpti_ActivityMemcpy6 *copy = (void *)record;
    fprintf(file, "C\t%lu\t%lu\t%u\t%u\tcopy of kind %d\n", copy->start, copy->end, copy->streamId, copy->correlationId, copy->copyKind);
    break;
  }
  case CUPTI_ACTIVITY_KIND_MEMSET: {
    CUpti_ActivityMemset4 *set = (void *)record;
    fprintf(file, "S\t%lu\t%lu\t%u\t%u\tmemset\n", set->start, set->end, set->streamId, set->correlationId);
    break;
  }
  case CUPTI_ACTIVITY_KIND_DRIVER: {
    CUpti_ActivityAPI *call = (void *)record;
    const char *name = "?";
    cuptiGetCallbackName(CUPTI_CB_DOMAIN_DRIVER_API, call->cbid, &name);
    fprintf(file, "A\t%lu\t%lu\t%u\t%u\t%s\n", call->start, call->end, call->threadId, call->correlationId, name);
    break;
  }
  default:
    break;
  }
}

static void CUPTIAPI completed(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
  (void)context, (void)stream, (void)size;
  CUpti_Activity *record = NULL;
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) write_record(record);
  fflush(file);
  free(buffer);
}

static void finish(void) {
  cuptiActivityFlushAll(1);
}

// The driver calls this when it starts.
int InitializeInjection(void) {
  const char *path = getenv("GPU_TRACE"), *rank = getenv("RANK");
  if (!path || (rank && strcmp(rank, "0") != 0)) return 1;
  file = fopen(path, "w");
  if (!file) return 0;
  cuptiActivityRegisterCallbacks(more, completed);
  CUpti_ActivityKind kinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET,
                                CUPTI_ACTIVITY_KIND_DRIVER};
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
    CUptiResult result = cuptiActivityEnable(kinds[i]);
    if (result != CUPTI_SUCCESS) fprintf(stderr, "gpu_trace: kind %d is refused with %d\n", kinds[i], result);
  }
  // Some programs end without exit handlers.
  cuptiActivityFlushPeriod(200);
  atexit(finish);
  return 1;
}
