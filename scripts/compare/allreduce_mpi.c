/* In-place f32 all-reduce through MPI: the counterpart of the example `allreduce`, which measures in the same way and
 * prints the same JSON lines.
 *
 *   mpicc -O3 scripts/compare/allreduce_mpi.c -o allreduce_mpi
 *   mpirun -n 2 ./allreduce_mpi SECONDS_PER_BATCH BYTES...
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { BATCHES = 5, WARMUP = 3 };

/* Mean seconds of so many calls. */
static double batch(float *buffer, int count, int calls) {
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    for (int call = 0; call < calls; call++)
        MPI_Allreduce(MPI_IN_PLACE, buffer, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    return (MPI_Wtime() - start) / calls;
}

static int compare(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, world_size;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    for (int argument = 2; argument < argc; argument++) {
        size_t size = strtoull(argv[argument], NULL, 10);
        int count = (int)(size / sizeof(float));
        float *buffer = malloc(size);
        if (!buffer) {
            fprintf(stderr, "no memory for %zu bytes\n", size);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
        for (int i = 0; i < count; i++) buffer[i] = 1;
        MPI_Allreduce(MPI_IN_PLACE, buffer, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        long errors = 0;
        for (int i = 0; i < count; i++) errors += buffer[i] != (float)world_size;
        MPI_Allreduce(MPI_IN_PLACE, &errors, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);

        double estimate = batch(buffer, count, WARMUP), times[BATCHES];
        MPI_Allreduce(MPI_IN_PLACE, &estimate, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        double calls = atof(argv[1]) / estimate;
        calls = calls < 3 ? 3 : calls > 10000 ? 10000 : calls;
        for (int i = 0; i < BATCHES; i++) times[i] = batch(buffer, count, (int)calls);
        MPI_Allreduce(MPI_IN_PLACE, times, BATCHES, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        qsort(times, BATCHES, sizeof *times, compare);
        double median = times[BATCHES / 2], bandwidth = size / median / 1e9;
        if (rank == 0) {
            printf("{\"bytes\": %zu, \"world_size\": %d, \"time_us\": %.4f, \"algbw_gbps\": %.6g, "
                   "\"busbw_gbps\": %.6g, \"errors\": %ld}\n",
                   size, world_size, median * 1e6, bandwidth, bandwidth * 2 * (world_size - 1) / world_size, errors);
            fflush(stdout);
        }
        free(buffer);
    }
    MPI_Finalize();
    return 0;
}
