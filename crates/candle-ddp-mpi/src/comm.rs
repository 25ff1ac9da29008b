//! Communicators of MPI, requests, and the functions that this crate calls on them.
use crate::library::{Library, MpiError};
use mpi::ffi::{
    MPI_Cancel, MPI_Comm, MPI_Comm_dup, MPI_Comm_free, MPI_Comm_rank, MPI_Comm_set_errhandler, MPI_Comm_size,
    MPI_Comm_split, MPI_Comm_split_type, MPI_Get_count, MPI_Ibarrier, MPI_Irecv, MPI_Isend, MPI_Request, MPI_Status,
    MPI_Test, RSMPI_ANY_SOURCE, RSMPI_COMM_NULL, RSMPI_COMM_TYPE_SHARED, RSMPI_COMM_WORLD, RSMPI_ERRORS_RETURN,
    RSMPI_INFO_NULL, RSMPI_REQUEST_NULL, RSMPI_STATUS_IGNORE, RSMPI_UINT8_T, RSMPI_UNDEFINED,
};
use std::ffi::c_int;
use std::mem::ManuallyDrop;

type Result<T> = std::result::Result<T, MpiError>;

/// A rank or a count as MPI takes it; the callers have checked that it fits.
pub(crate) fn int(value: usize) -> c_int {
    c_int::try_from(value).unwrap_or(c_int::MAX)
}

/// A communicator, whose errors are returned.
#[derive(Clone, Copy)]
pub(crate) struct Comm {
    raw: MPI_Comm,
    pub(crate) library: &'static Library,
}

// SAFETY: MPI's handles are valid on every thread.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Sync for Comm {}

impl Comm {
    pub(crate) fn world(library: &'static Library) -> Self {
        // SAFETY: a constant.
        Self { raw: unsafe { RSMPI_COMM_WORLD }, library }
    }

    /// A communicator of the program.
    pub(crate) fn of(library: &'static Library, raw: MPI_Comm) -> Self {
        Self { raw, library }
    }

    pub(crate) fn raw(self) -> MPI_Comm {
        self.raw
    }

    /// This process's rank, and the number of ranks.
    pub(crate) fn place(self) -> Result<(usize, usize)> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: the communicator is valid, and the integers live.
        self.library.call("MPI_Comm_rank", || unsafe { MPI_Comm_rank(self.raw, &raw mut rank) })?;
        // SAFETY: as above.
        self.library.call("MPI_Comm_size", || unsafe { MPI_Comm_size(self.raw, &raw mut size) })?;
        Ok((usize::try_from(rank).unwrap_or_default(), usize::try_from(size).unwrap_or_default()))
    }

    fn made(self, operation: &'static str, make: impl FnOnce(*mut MPI_Comm) -> c_int) -> Result<Option<Self>> {
        // SAFETY: a constant.
        let null = unsafe { RSMPI_COMM_NULL };
        let mut raw = null;
        self.library.call(operation, || make(&raw mut raw))?;
        if raw == null {
            return Ok(None);
        }
        // SAFETY: the communicator has just been made.
        let set = || unsafe { MPI_Comm_set_errhandler(raw, RSMPI_ERRORS_RETURN) };
        self.library.call("MPI_Comm_set_errhandler", set)?;
        Ok(Some(Self { raw, ..self }))
    }

    fn some(operation: &'static str, made: Option<Self>) -> Result<Self> {
        made.ok_or_else(|| MpiError { operation, text: "it returned MPI_COMM_NULL".to_string() })
    }

    /// A communicator of the same ranks. All ranks must call it.
    pub(crate) fn duplicate(self) -> Result<Self> {
        const NAME: &str = "MPI_Comm_dup";
        // SAFETY: the communicator is valid.
        Self::some(NAME, self.made(NAME, |made| unsafe { MPI_Comm_dup(self.raw, made) })?)
    }

    /// A communicator of the ranks that give a `place`, in the order of their places. All ranks must call it.
    pub(crate) fn split(self, place: Option<usize>) -> Result<Option<Self>> {
        // SAFETY: a constant.
        let (color, key) = place.map_or((unsafe { RSMPI_UNDEFINED }, 0), |place| (0, int(place)));
        // SAFETY: the communicator is valid.
        self.made("MPI_Comm_split", |made| unsafe { MPI_Comm_split(self.raw, color, key, made) })
    }

    /// A communicator of the ranks on this host. All ranks must call it.
    pub(crate) fn of_host(self) -> Result<Self> {
        const NAME: &str = "MPI_Comm_split_type";
        // SAFETY: the communicator is valid.
        let make = |made| unsafe { MPI_Comm_split_type(self.raw, RSMPI_COMM_TYPE_SHARED, 0, RSMPI_INFO_NULL, made) };
        Self::some(NAME, self.made(NAME, make)?)
    }

    /// Frees a communicator that has no call in flight.
    pub(crate) fn free(mut self) -> Result<()> {
        // SAFETY: nobody uses the communicator after this.
        self.library.call("MPI_Comm_free", || unsafe { MPI_Comm_free(&raw mut self.raw) })
    }

    pub(crate) fn start_barrier(self) -> Result<Request> {
        // SAFETY: the communicator is valid.
        self.start("MPI_Ibarrier", |request| unsafe { MPI_Ibarrier(self.raw, request) })
    }

    /// Starts a function of MPI.
    pub(crate) fn start(
        self,
        operation: &'static str,
        start: impl FnOnce(*mut MPI_Request) -> c_int,
    ) -> Result<Request> {
        // SAFETY: a constant.
        let mut raw = unsafe { RSMPI_REQUEST_NULL };
        self.library.call(operation, || start(&raw mut raw))?;
        Ok(Request { raw, operation, library: self.library })
    }
}

/// A function of MPI in flight.
pub(crate) struct Request {
    raw: MPI_Request,
    operation: &'static str,
    library: &'static Library,
}

// SAFETY: MPI's handles are valid on every thread.
unsafe impl Send for Request {}

impl Request {
    /// Whether it is over. An error of the function is returned here.
    pub(crate) fn test(&mut self) -> Result<bool> {
        // SAFETY: the request and the flag live, and MPI allows MPI_STATUS_IGNORE.
        self.test_with(|raw, flag| unsafe { MPI_Test(raw, flag, RSMPI_STATUS_IGNORE) })
    }

    fn test_with(&mut self, test: impl FnOnce(*mut MPI_Request, *mut c_int) -> c_int) -> Result<bool> {
        let (mut flag, raw) = (0, &raw mut self.raw);
        self.library.call(self.operation, || test(raw, &raw mut flag))?;
        Ok(flag != 0)
    }

    /// Whether MPI has said that it is over. After an error it may be in flight.
    fn is_over(&self) -> bool {
        // SAFETY: a constant.
        self.raw == unsafe { RSMPI_REQUEST_NULL }
    }
}

/// Memory that a function of MPI reads or writes. It is freed only once that function is known to be over.
struct Lent<T> {
    request: Request,
    memory: ManuallyDrop<T>,
}

impl<T> Lent<T> {
    fn new(memory: T, start: impl FnOnce(&mut T) -> Result<Request>) -> Result<Self> {
        let mut memory = ManuallyDrop::new(memory);
        match start(&mut memory) {
            Ok(request) => Ok(Self { request, memory }),
            // MPI has not begun.
            Err(error) => {
                drop(ManuallyDrop::into_inner(memory));
                Err(error)
            }
        }
    }
}

impl<T> Drop for Lent<T> {
    fn drop(&mut self) {
        if self.request.is_over() {
            // SAFETY: nobody uses the memory after this.
            unsafe { ManuallyDrop::drop(&mut self.memory) }
        }
    }
}

/// The tag of all messages: those of the program and those of the engine have communicators of their own.
pub(crate) const TAG: c_int = 0;

/// A message of the engine itself to another rank, in flight.
pub(crate) struct Notice(Lent<Box<[u8]>>);

impl Notice {
    pub(crate) fn send(comm: Comm, peer: usize, bytes: Box<[u8]>) -> Result<Self> {
        let send = |bytes: &mut Box<[u8]>| {
            let (address, count) = (bytes.as_ptr(), int(bytes.len()));
            // SAFETY: the bytes live as long as the request.
            comm.start("MPI_Isend", |request| unsafe {
                MPI_Isend(address.cast(), count, RSMPI_UINT8_T, int(peer), TAG, comm.raw, request)
            })
        };
        Ok(Self(Lent::new(bytes, send)?))
    }

    pub(crate) fn is_over(&mut self) -> Result<bool> {
        self.0.request.test()
    }
}

/// Receives the other ranks' notices.
pub(crate) struct Notices {
    comm: Comm,
    /// MPI writes into it while the request is in flight.
    lent: Lent<Box<[u8]>>,
}

impl Notices {
    /// The size of the longest notice in bytes.
    pub(crate) const LONGEST: usize = 32 << 10;

    pub(crate) fn listen(comm: Comm) -> Result<Self> {
        let bytes = vec![0; Self::LONGEST].into_boxed_slice();
        Ok(Self { comm, lent: Lent::new(bytes, |bytes| Self::start(comm, bytes))? })
    }

    fn start(comm: Comm, bytes: &mut [u8]) -> Result<Request> {
        let (address, count) = (bytes.as_mut_ptr(), int(bytes.len()));
        // SAFETY: the bytes live as long as the request.
        comm.start("MPI_Irecv", |request| unsafe {
            MPI_Irecv(address.cast(), count, RSMPI_UINT8_T, RSMPI_ANY_SOURCE, TAG, comm.raw, request)
        })
    }

    /// The next notice and the rank that sent it, if one has arrived.
    pub(crate) fn next(&mut self) -> Result<Option<(usize, Vec<u8>)>> {
        let (mut status, mut count) = (std::mem::MaybeUninit::<MPI_Status>::zeroed(), 0);
        // SAFETY: the request and the flag live, and MPI writes the status.
        if !self.lent.request.test_with(|raw, flag| unsafe { MPI_Test(raw, flag, status.as_mut_ptr()) })? {
            return Ok(None);
        }
        // SAFETY: MPI's status is plain integers, for which zeros are valid.
        let status = unsafe { status.assume_init() };
        // SAFETY: the status is of a receive of bytes.
        let get = || unsafe { MPI_Get_count(&raw const status, RSMPI_UINT8_T, &raw mut count) };
        self.comm.library.call("MPI_Get_count", get)?;
        let bytes = self.lent.memory[..usize::try_from(count).unwrap_or_default().min(Self::LONGEST)].to_vec();
        self.lent.request = Self::start(self.comm, &mut self.lent.memory)?;
        Ok(Some((usize::try_from(status.MPI_SOURCE).unwrap_or_default(), bytes)))
    }

    /// Ends the receive that no notice will complete.
    pub(crate) fn end(mut self) -> Result<()> {
        let raw = &raw mut self.lent.request.raw;
        // SAFETY: the request is in flight.
        self.comm.library.call("MPI_Cancel", || unsafe { MPI_Cancel(raw) })?;
        // MPI completes the cancelled receive, and releases its buffer, before the end of this.
        while !self.lent.request.test()? {
            std::thread::yield_now();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn memory_that_mpi_may_use_is_never_freed() {
        let library: &'static Library = Box::leak(Box::new(Library { serial: None }));
        // SAFETY: a constant, and plain numbers or pointers that MPI never sees.
        let (over, unknown) = unsafe { (RSMPI_REQUEST_NULL, std::mem::zeroed()) };
        for (raw, kept) in [(over, 1), (unknown, 2)] {
            let memory = Arc::new(());
            let lent = Lent::new(memory.clone(), |_| Ok(Request { raw, operation: "MPI_Irecv", library }));
            drop(lent.ok());
            assert_eq!(Arc::strong_count(&memory), kept);
        }
        let memory = Arc::new(());
        let refused = |_: &mut _| Err(MpiError { operation: "MPI_Irecv", text: "no".to_string() });
        assert!(Lent::new(memory.clone(), refused).is_err());
        assert_eq!(Arc::strong_count(&memory), 1);
    }
}
