//! Integer variables by which the MPI library can be configured while it runs, through MPI's tools interface.
use mpi::ffi::{
    MPI_T_cvar_get_index, MPI_T_cvar_handle, MPI_T_cvar_handle_alloc, MPI_T_cvar_handle_free, MPI_T_cvar_read,
    MPI_T_cvar_write, MPI_T_finalize, MPI_T_init_thread, RSMPI_THREAD_MULTIPLE,
};
use std::ffi::{CStr, c_int};
use std::mem::MaybeUninit;

/// Gives the value of the variable `name`, which must be one integer, to `change`, and sets the value that this returns.
/// Returns the old value; None if the library has no such variable, or does not let it be read or set.
pub(crate) fn update(name: &CStr, change: impl FnOnce(c_int) -> Option<c_int>) -> Option<c_int> {
    let mut provided = 0;
    // SAFETY: it may be called at any time, as often as MPI_T_finalize.
    if unsafe { MPI_T_init_thread(RSMPI_THREAD_MULTIPLE, &raw mut provided) } != 0 {
        return None;
    }
    let old = update_initialised(name, change);
    // SAFETY: no handle is left.
    unsafe { MPI_T_finalize() };
    old
}

fn update_initialised(name: &CStr, change: impl FnOnce(c_int) -> Option<c_int>) -> Option<c_int> {
    let (mut index, mut count, mut old) = (0, 0, 0);
    let mut handle = MaybeUninit::<MPI_T_cvar_handle>::uninit();
    // SAFETY: the name ends with a zero byte, and MPI writes to integers and a handle that live. The variable belongs to no
    // object of MPI.
    let is_allocated = unsafe {
        MPI_T_cvar_get_index(name.as_ptr(), &raw mut index) == 0
            && MPI_T_cvar_handle_alloc(index, std::ptr::null_mut(), handle.as_mut_ptr(), &raw mut count) == 0
    };
    if !is_allocated {
        return None;
    }
    // SAFETY: the handle has just been allocated.
    let mut handle = unsafe { handle.assume_init() };
    let update = || {
        // SAFETY: the variable is one integer, which the caller promises of its name.
        if count != 1 || unsafe { MPI_T_cvar_read(handle, (&raw mut old).cast()) } != 0 {
            return None;
        }
        match change(old) {
            // SAFETY: as above.
            Some(new) => (unsafe { MPI_T_cvar_write(handle, (&raw const new).cast()) } == 0).then_some(old),
            None => Some(old),
        }
    };
    let result = update();
    // SAFETY: nobody uses the handle after this.
    unsafe { MPI_T_cvar_handle_free(&raw mut handle) };
    result
}
