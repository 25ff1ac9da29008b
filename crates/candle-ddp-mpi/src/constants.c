/* What the crate `mpi` does not bind, because it is a macro with a cast. */
#include <mpi.h>

void *const candle_ddp_mpi_in_place = MPI_IN_PLACE;
