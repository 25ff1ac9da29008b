//! MPI begins with the first engine and ends with the process.
use crate::library::Library;
use crate::retired;
use candle_ddp::{Error, Result};
use mpi::ffi::{MPI_Finalize, MPI_Finalized};
use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

unsafe extern "C" {
    safe fn atexit(function: extern "C" fn()) -> c_int;
}

/// A group of this process has failed: MPI may still be waiting for other ranks.
static FAILED: AtomicBool = AtomicBool::new(false);

/// The library, which is initialised unless the program has done so.
pub(crate) fn library() -> Result<&'static Library> {
    static LIBRARY: OnceLock<std::result::Result<Library, String>> = OnceLock::new();
    let register = || match atexit(at_exit) {
        0 => Ok(()),
        _ => Err("the system takes no more functions for the end of the program (atexit)".to_string()),
    };
    let library = LIBRARY.get_or_init(|| Library::initialise(register)).as_ref();
    library.map_err(|hint| Error::Unavailable { what: "MPI".to_string(), hint: hint.clone() })
}

/// Notes that a group of this process has failed.
pub(crate) fn failed() {
    FAILED.store(true, Ordering::Relaxed);
}

/// Ends MPI with the process. MPI_Finalize waits for the other ranks, so it must not be called while one of them waits for
/// this rank. The launcher ends all ranks once one has ended without it; this leaves them the time to say why they fail.
extern "C" fn at_exit() {
    const TIME: Duration = Duration::from_secs(1);
    if FAILED.load(Ordering::Relaxed) {
        std::thread::sleep(TIME);
        return;
    }
    let mut finalised = 0;
    // SAFETY: the function may be called at any time.
    unsafe { MPI_Finalized(&raw mut finalised) };
    if finalised == 0 {
        retired::end_all();
        // SAFETY: MPI has been initialised, and the groups of this process have been left.
        unsafe { MPI_Finalize() };
    }
}
