/* A tool for NVTX, as Nsight Systems is one: it writes ranges and marks to the file that NVTX_TEST_FILE names. The numbers are those of
 * nvtxDetail/nvtxTypes.h in NVTX 3. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { TABLE_OF_CALLBACKS = 1, MODULE_CORE = 1, MARK_A = 2, RANGE_PUSH_A = 9, RANGE_POP = 11 };
typedef void (*function)(void);
struct callbacks {
    size_t size;
    int (*module_functions)(int module, function ***functions, unsigned *size);
};

static FILE *file;
static void mark(const char *name) { fprintf(file, "mark %s\n", name); }
static int push(const char *name) { return fprintf(file, "push %s\n", name); }
static int pop(void) { return fprintf(file, "pop\n"); }

int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t)) {
    const struct callbacks *callbacks = export_table(TABLE_OF_CALLBACKS);
    function **functions;
    unsigned size;
    file = fopen(getenv("NVTX_TEST_FILE"), "a");
    if (!file || !callbacks->module_functions(MODULE_CORE, &functions, &size) || size <= RANGE_POP) return 0;
    setvbuf(file, NULL, _IOLBF, BUFSIZ);
    *functions[MARK_A] = (function)mark;
    *functions[RANGE_PUSH_A] = (function)push;
    *functions[RANGE_POP] = (function)pop;
    return 1;
}
