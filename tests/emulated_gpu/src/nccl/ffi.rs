//! NCCL's functions for communicators.
use super::communicator::{Communicator, Visit};
use super::connection::{self, Slot};
use super::handles::{self, Handle};
use super::peer_info::{PeerInfo, Pretences, pretences};
use super::{Code, Outcome, failure, group, log, set_last_error};
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// `ncclUniqueId`: a number, the address of a socket as in NCCL, and the name of a hub, padded with zeros.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId {
    internal: [u8; 128],
}

/// Where the name begins.
const NAME: usize = 40;

impl UniqueId {
    pub(super) fn new(name: &str) -> Self {
        /// A `sockaddr` of the family `AF_INET`, with the address 127.0.0.1:1.
        const ADDRESS: [u8; 6] = [0, 1, 127, 0, 0, 1];
        let mut internal = [0; 128];
        internal[..8].copy_from_slice(b"emulated");
        internal[8..10].copy_from_slice(&2u16.to_ne_bytes());
        internal[10..16].copy_from_slice(&ADDRESS);
        internal[NAME..NAME + name.len()].copy_from_slice(name.as_bytes());
        Self { internal }
    }

    pub(super) fn name(&self) -> Option<&str> {
        let name = &self.internal[NAME..];
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        std::str::from_utf8(&name[..end]).ok().filter(|name| !name.is_empty())
    }
}

/// The beginning of `ncclConfig_t`, as far as it is used.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Config {
    pub(super) size: usize,
    pub(super) magic: c_uint,
    pub(super) version: c_uint,
    pub(super) blocking: c_int,
    pub(super) cga_cluster_size: c_int,
    pub(super) min_ctas: c_int,
    pub(super) max_ctas: c_int,
    pub(super) net_name: *const c_char,
    pub(super) split_share: c_int,
    /// Since 2.26. In a struct without this field, these are the bytes of padding at its end.
    pub(super) traffic_class: c_int,
}

const MAGIC: c_uint = 0xcafe_beef;
pub(super) const UNDEFINED: c_int = c_int::MIN;
const NO_COLOR: c_int = -1;

/// Runs the body of a function, returns its code and keeps the text of an error for `ncclGetLastError`.
pub(super) fn answer(body: impl FnOnce() -> Outcome<Code>) -> c_int {
    let outcome = catch_unwind(AssertUnwindSafe(body));
    let outcome = outcome.unwrap_or_else(|_| Err(failure(Code::InternalError, "a function panicked")));
    outcome.unwrap_or_else(|error| {
        set_last_error(&error.text);
        error.code
    }) as c_int
}

/// Returns the communicator of a handle, for use by the calling thread.
pub(super) fn visit(handle: Handle, call: &str) -> Outcome<Visit> {
    Ok(Visit::new(handles::find(handle, call)?, call))
}

pub(super) fn invalid(text: impl Into<String>) -> super::Failure {
    failure(Code::InvalidArgument, text)
}

/// What a configuration asks for.
#[derive(Clone, Copy)]
pub(super) struct Wishes {
    pub(super) blocking: bool,
    /// The number of blocks of each kernel.
    pub(super) blocks: usize,
    pub(super) least_blocks: c_int,
    pub(super) net_name: &'static str,
    pub(super) traffic_class: c_int,
}

impl Wishes {
    /// Of a communicator without a configuration.
    const DEFAULT: Self =
        Self { blocking: true, blocks: 32, least_blocks: UNDEFINED, net_name: "Socket", traffic_class: UNDEFINED };

    /// What the environment says counts more.
    fn overridden(self) -> Self {
        let Pretences { blocking, max_ctas, .. } = *pretences();
        Self { blocking: blocking.unwrap_or(self.blocking), blocks: max_ctas.unwrap_or(self.blocks), ..self }
    }
}

/// Returns what a configuration asks for; `otherwise` where it does not say.
///
/// # Safety
/// `config` must be null or point to a configuration.
unsafe fn wishes(config: *const Config, otherwise: Wishes) -> Outcome<Wishes> {
    if config.is_null() {
        return Ok(otherwise);
    }
    // SAFETY: guaranteed by the caller. Only the fields that every version of the struct has are read.
    let (size, magic) = unsafe { ((*config).size, (*config).magic) };
    if magic != MAGIC || size < size_of::<Config>() {
        return Err(invalid("the ncclConfig_t was not initialized"));
    }
    // SAFETY: guaranteed by the caller; the checks above show that the struct is initialized and long enough.
    let Config { blocking, min_ctas, max_ctas, net_name, traffic_class, version, .. } = unsafe { config.read() };
    if traffic_class != UNDEFINED && version < 22_600 {
        return Err(invalid(format!(
            "the ncclConfig_t has trafficClass = {traffic_class}, or it is padding that nobody wrote"
        )));
    }
    let blocking = match blocking {
        UNDEFINED => otherwise.blocking,
        0 => false,
        1 => true,
        other => return Err(invalid(format!("the ncclConfig_t has blocking = {other}"))),
    };
    let net_name = if net_name.is_null() {
        otherwise.net_name
    } else {
        // SAFETY: guaranteed by the caller.
        let name = unsafe { CStr::from_ptr(net_name) };
        let known = ["Socket", "IB"].into_iter().find(|known| name.to_str() == Ok(known));
        known.ok_or_else(|| failure(Code::InvalidUsage, format!("there is no network {name:?}")))?
    };
    let blocks = usize::try_from(max_ctas).unwrap_or(otherwise.blocks);
    Ok(Wishes { blocking, blocks, least_blocks: min_ctas, net_name, traffic_class }.overridden())
}

/// Writes what `value` returns to `target`, unless that is null.
///
/// # Safety
/// `target` must be null or point to memory for the value.
unsafe fn give<T>(target: *mut T, call: &str, value: impl FnOnce() -> Outcome<T>) -> Outcome<Code> {
    if target.is_null() {
        return Err(invalid(format!("{call}: null")));
    }
    // SAFETY: guaranteed by the caller.
    unsafe { target.write(value()?) };
    Ok(Code::Success)
}

/// Ends a communicator, whose handle is no longer one.
fn end(visit: &Visit, comm: Handle, how: &str) -> Code {
    visit.0.end();
    visit.0.free();
    log::end(&visit.0, how);
    handles::remove(comm);
    Code::Success
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetLastError(_comm: Handle) -> *const c_char {
    super::last_error()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    answer(|| {
        // SAFETY: the caller provides memory for a number.
        unsafe { give(version, "ncclGetVersion", || Ok(pretences().version)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
    answer(|| {
        // SAFETY: the caller provides memory for an id.
        unsafe { give(id, "ncclGetUniqueId", || Ok(UniqueId::new(&connection::new_hub()?))) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(comm: *mut Handle, nranks: c_int, id: UniqueId, rank: c_int) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { ncclCommInitRankConfig(comm, nranks, id, rank, std::ptr::null_mut()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    comm: *mut Handle,
    nranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: *mut Config,
) -> c_int {
    answer(|| {
        // SAFETY: guaranteed by the caller.
        let wishes = unsafe { wishes(config, Wishes::DEFAULT.overridden()) }?;
        let (size, rank) = match (usize::try_from(nranks), usize::try_from(rank)) {
            (Ok(size), Ok(rank)) if rank < size && !comm.is_null() => (size, rank),
            _ => return Err(invalid(format!("ncclCommInitRankConfig: rank {rank} of {nranks} does not exist"))),
        };
        let hub = id.name().ok_or_else(|| invalid("ncclCommInitRankConfig: this is not an id"))?.to_string();
        let communicator = Communicator::new(hub, rank, size, PeerInfo::here(), wishes);
        let handle = handles::add(communicator.clone());
        // SAFETY: the caller provides memory for a communicator.
        unsafe { comm.write(handle) };
        let visit = Visit::new(communicator.clone(), "ncclCommInitRankConfig");
        group::join(visit, |communicator| {
            connection::start(communicator.clone());
            Ok(None)
        })
        .map_err(|error| {
            // SAFETY: the caller provides memory for a communicator.
            unsafe { comm.write(std::ptr::null_mut()) };
            connection::give_up(&communicator, handle, error)
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSplit(
    comm: Handle,
    color: c_int,
    key: c_int,
    newcomm: *mut Handle,
    config: *mut Config,
) -> c_int {
    answer(|| {
        let visit = visit(comm, "ncclCommSplit")?;
        visit.0.check("ncclCommSplit")?;
        if newcomm.is_null() || (color < 0 && color != NO_COLOR) {
            return Err(invalid(format!("ncclCommSplit: the color {color} is invalid, or newcomm is null")));
        }
        // SAFETY: guaranteed by the caller.
        let wishes = unsafe { wishes(config, visit.0.wishes) }?;
        // SAFETY: the caller provides memory for a communicator.
        unsafe { newcomm.write(std::ptr::null_mut()) };
        group::join(visit, |communicator| {
            connection::split(communicator, color, key, wishes, Slot(newcomm)).map(|()| None)
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(comm: Handle, error: *mut c_int) -> c_int {
    answer(|| {
        let visit = visit(comm, "ncclCommGetAsyncError")?;
        let code = || match visit.0.look() {
            code @ (Code::Success | Code::InProgress) => code as c_int,
            code => pretences().fail_with.unwrap_or(code as c_int),
        };
        // SAFETY: the caller provides memory for a code.
        unsafe { give(error, "ncclCommGetAsyncError", || Ok(code())) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommFinalize(comm: Handle) -> c_int {
    answer(|| {
        let visit = visit(comm, "ncclCommFinalize")?;
        visit.0.check("ncclCommFinalize")?;
        group::join(visit, |communicator| {
            connection::finalize(communicator);
            Ok(None)
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(comm: Handle) -> c_int {
    answer(|| {
        if comm.is_null() {
            return Ok(Code::Success);
        }
        let visit = visit(comm, "ncclCommDestroy")?;
        visit.0.check_ready("ncclCommDestroy")?;
        if !visit.0.is_finalizing() {
            connection::finalize(&visit.0);
            visit.0.await_settled()?;
        }
        if pretences().abort_at_end == Some(visit.0.number) {
            return Ok(end(&visit, comm, "Abort"));
        }
        if pretences().version >= 23_102 {
            connection::await_others_at_end(&visit.0)?;
        }
        Ok(end(&visit, comm, "Destroy"))
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(comm: Handle) -> c_int {
    answer(|| {
        if comm.is_null() {
            return Ok(Code::Success);
        }
        let visit = visit(comm, "ncclCommAbort")?;
        while pretences().stuck_aborts {
            std::thread::park();
        }
        visit.0.use_launcher();
        Ok(end(&visit, comm, "Abort"))
    })
}

/// Writes a property of a communicator to `target`.
///
/// # Safety
/// `target` must be null or point to memory for a number.
unsafe fn tell(comm: Handle, target: *mut c_int, call: &str, fact: impl FnOnce(&Communicator) -> usize) -> c_int {
    answer(|| {
        let visit = visit(comm, call)?;
        visit.0.check_ready(call)?;
        // SAFETY: guaranteed by the caller.
        unsafe { give(target, call, || Ok(fact(&visit.0) as c_int)) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCount(comm: Handle, count: *mut c_int) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { tell(comm, count, "ncclCommCount", |communicator| communicator.size) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommUserRank(comm: Handle, rank: *mut c_int) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { tell(comm, rank, "ncclCommUserRank", |communicator| communicator.rank) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCuDevice(comm: Handle, device: *mut c_int) -> c_int {
    // SAFETY: guaranteed by the caller.
    unsafe { tell(comm, device, "ncclCommCuDevice", |communicator| communicator.peer_info.device as usize) }
}
