use std::ffi::c_void;

unsafe extern "C" {
    /// MPI_IN_PLACE: an address that is compared and never followed.
    #[link_name = "candle_ddp_mpi_in_place"]
    static IN_PLACE: InPlace;
}

#[repr(transparent)]
struct InPlace(*const c_void);

// SAFETY: the pointer is never followed.
unsafe impl Sync for InPlace {}

/// MPI_IN_PLACE.
pub(crate) fn in_place() -> *const c_void {
    // SAFETY: a constant of `constants.c`.
    unsafe { IN_PLACE.0 }
}
