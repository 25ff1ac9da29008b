//! The MPI library: initialised once, and called so that its errors are values.
use crate::tuning::choose_algorithm;
use candle_ddp::Error;
use candle_ddp_base::panic::lock;
use mpi::ffi::{
    MPI_Comm_set_errhandler, MPI_Comm_size, MPI_Error_string, MPI_Finalized, MPI_Init_thread, MPI_Initialized,
    MPI_Query_thread, RSMPI_COMM_SELF, RSMPI_COMM_WORLD, RSMPI_ERRORS_RETURN, RSMPI_THREAD_MULTIPLE,
    RSMPI_THREAD_SERIALIZED,
};
use std::ffi::{c_char, c_int};
use std::fmt;
use std::sync::{Mutex, MutexGuard};

/// The initialised library.
pub(crate) struct Library {
    /// Its calls come one at a time unless it provides MPI_THREAD_MULTIPLE.
    pub(crate) serial: Option<Mutex<()>>,
}

/// An error of a function of MPI.
#[derive(Clone, Debug)]
pub(crate) struct MpiError {
    pub(crate) operation: &'static str,
    pub(crate) text: String,
}

impl fmt::Display for MpiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed: {}", self.operation, self.text)
    }
}

impl MpiError {
    /// The error of rank `rank`, whose group could not be made.
    pub(crate) fn of_rank(self, rank: usize) -> Error {
        Error::Engine { rank, operation: self.operation.to_string(), reason: self.text }
    }
}

impl Library {
    /// Initialises MPI, unless the program has done so, and calls `begun` then.
    pub(crate) fn initialise(
        begun: impl FnOnce() -> std::result::Result<(), String>,
    ) -> std::result::Result<Self, String> {
        let (mut initialised, mut finalised, mut level) = (0, 0, 0);
        // SAFETY: these functions may be called at any time, and write to integers that live.
        unsafe {
            MPI_Initialized(&raw mut initialised);
            MPI_Finalized(&raw mut finalised);
        }
        if finalised != 0 {
            return Err("the program has called MPI_Finalize, after which MPI cannot be used again".to_string());
        }
        if initialised != 0 {
            // SAFETY: MPI has been initialised, and not finalised.
            unsafe { MPI_Query_thread(&raw mut level) };
        } else {
            // SAFETY: it is called once, MPI has not been initialised, and null arguments are allowed.
            let code = unsafe {
                MPI_Init_thread(std::ptr::null_mut(), std::ptr::null_mut(), RSMPI_THREAD_MULTIPLE, &raw mut level)
            };
            if code != 0 {
                return Err(format!("MPI_Init_thread failed: {}", text_of(code)));
            }
            // Errors without a communicator of their own belong to one of these.
            // SAFETY: both communicators exist from now on.
            unsafe {
                MPI_Comm_set_errhandler(RSMPI_COMM_WORLD, RSMPI_ERRORS_RETURN);
                MPI_Comm_set_errhandler(RSMPI_COMM_SELF, RSMPI_ERRORS_RETURN);
            }
            tune();
            begun()?;
        }
        // SAFETY: constants.
        let (serialized, multiple) = unsafe { (RSMPI_THREAD_SERIALIZED, RSMPI_THREAD_MULTIPLE) };
        if level < serialized {
            return Err(format!(
                "it was initialised for one thread (level {level}), but calls come from several: initialise it with \
                 MPI_Init_thread and MPI_THREAD_MULTIPLE, or leave that to candle-ddp-mpi"
            ));
        }
        Ok(Self { serial: (level < multiple).then(Mutex::default) })
    }

    fn turn(&self) -> Option<MutexGuard<'_, ()>> {
        self.serial.as_ref().map(lock)
    }

    /// Calls a function of MPI, which returns its error code.
    pub(crate) fn call(
        &self,
        operation: &'static str,
        function: impl FnOnce() -> c_int,
    ) -> std::result::Result<(), MpiError> {
        let turn = self.turn();
        match function() {
            0 => Ok(()),
            code => {
                let text = text_of(code);
                drop(turn);
                Err(MpiError { operation, text })
            }
        }
    }
}

/// Chooses algorithms of the library, which has just been initialised.
fn tune() {
    let mut world_size = 0;
    // SAFETY: MPI has been initialised, and the integer lives.
    let code = unsafe { MPI_Comm_size(RSMPI_COMM_WORLD, &raw mut world_size) };
    if let (0, Ok(version)) = (code, mpi::environment::library_version()) {
        choose_algorithm(world_size, &version);
    }
}

/// MPI's description of an error.
fn text_of(code: c_int) -> String {
    // Longer than any library's MPI_MAX_ERROR_STRING.
    let (mut text, mut length) = (vec![0_u8; 8192], 0);
    // SAFETY: MPI_Error_string may be called for every code that MPI has returned, and writes fewer bytes than there are.
    let found = unsafe { MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &raw mut length) };
    let length = usize::try_from(length).unwrap_or_default().min(text.len());
    match found {
        // MPICH adds a stack of calls, one on each line.
        0 => String::from_utf8_lossy(&text[..length]).lines().map(str::trim).collect::<Vec<_>>().join("; "),
        _ => format!("error {code}"),
    }
}
