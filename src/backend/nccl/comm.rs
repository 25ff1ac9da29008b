//! An owned NCCL communicator: creating it, waiting for it, splitting it, and ending it.
use super::NcclOptions;
use super::ffi::{self, Code};
use super::limit::{Ctas, number};
use super::status::{CallResult, NcclFailure, Status, Version, int, status, version};
use crate::error::Failure;
use crate::{Error, Result};
use candle_ddp_engine::device_group::{DeviceGroup, SuspectedFailure};
use cudarc::nccl::sys;
use std::ffi::{CString, c_char, c_int};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// The oldest version of NCCL that provides what this engine needs (`ncclCommSplit`), in NCCL's numbering.
pub(super) const OLDEST_VERSION: i32 = 21_800;
/// The first version whose configuration has a traffic class.
const TRAFFIC_CLASS: i32 = 22_600;
/// NCCL's variable that overrides whether communicators are blocking.
pub(super) const BLOCKING: &str = "NCCL_COMM_BLOCKING";
/// The color of a rank that takes part in a split, but belongs to none of the new communicators.
const NO_COLOR: c_int = -1;

/// NCCL's unique id, by which ranks find each other; one of them creates it.
pub(super) struct UniqueId(sys::ncclUniqueId);

impl UniqueId {
    /// Creates an id. From then on, this process listens on a port for the other ranks.
    pub(super) fn new() -> Result<Self, NcclFailure> {
        let mut id = sys::ncclUniqueId { internal: [0; 128] };
        // SAFETY: there is room for the id.
        status("ncclGetUniqueId", unsafe { ffi::ncclGetUniqueId(&raw mut id) })?;
        Ok(Self(id))
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        self.0.internal.iter().map(|byte| u8::from_ne_bytes(byte.to_ne_bytes())).collect()
    }

    /// Where the rank that made it waits for the others. NCCL keeps that as a `sockaddr` behind a number of eight bytes.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        const INET: u16 = 2;
        const INET6: u16 = 10;
        let bytes = self.to_bytes();
        let [a, b, high, low, ref rest @ ..] = bytes[8..] else { return None };
        let ip = match u16::from_ne_bytes([a, b]) {
            INET => IpAddr::from(*rest.first_chunk::<4>()?),
            INET6 => IpAddr::from(*rest.get(4..)?.first_chunk::<16>()?),
            _ => return None,
        };
        Some(SocketAddr::new(ip, u16::from_be_bytes([high, low])))
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: [u8; 128] = bytes.try_into().ok()?;
        // `c_char` has a sign on some processors.
        Some(Self(sys::ncclUniqueId { internal: bytes.map(|byte| c_char::from_ne_bytes([byte])) }))
    }
}

/// The error if communicators are blocking.
pub(super) fn blocking() -> NcclFailure {
    let reason = format!(
        "{BLOCKING}=1, in the environment or in nccl.conf, makes NCCL's calls wait for other ranks for ever, so that no failure \
         could end them: unset it"
    );
    NcclFailure::other("making a communicator", &reason)
}

/// The reason why waiting for NCCL ended early.
#[derive(Debug)]
pub(super) enum WaitError {
    /// NCCL failed.
    Nccl(NcclFailure),
    /// The group failed, or its time-out expired.
    Group(Failure),
}

impl From<NcclFailure> for WaitError {
    fn from(failure: NcclFailure) -> Self {
        Self::Nccl(failure)
    }
}

impl WaitError {
    /// Ends the group on all ranks. Returns the group's failure.
    pub(super) fn end_group(self, group: &DeviceGroup) -> Failure {
        match self {
            Self::Nccl(failure) => {
                // The peer that caused the error knows the root cause.
                group.suspect(SuspectedFailure::Broken(failure.to_string()));
                let unknown = || Failure::PeerFailed { peer: group.rank, reason: failure.to_string() };
                group.root_cause().unwrap_or_else(unknown)
            }
            Self::Group(failure) => group.fail(failure),
        }
    }

    /// The error if there is no group yet.
    pub(super) fn into_error(self, rank: usize) -> Error {
        match self {
            Self::Nccl(failure) => failure.into_error(rank),
            Self::Group(failure) => failure.into(),
        }
    }
}

/// Called repeatedly while waiting for NCCL; an error ends the wait.
pub(super) type CancellationCheck<'a> = &'a mut dyn FnMut() -> std::result::Result<(), Failure>;

/// The beginning of `ncclConfig_t`, as much as NCCL 2.18 knows and one field more. NCCL reads only `size` bytes of it,
/// and uses its defaults for the fields that newer versions append. So one program works with all of them.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    /// Without this field there would be four bytes of padding, which 2.26 takes for it.
    traffic_class: c_int,
}

impl Config {
    /// With this, calls return at once, even if peers do not come.
    fn nonblocking(options: &NcclOptions, ctas: Ctas) -> Self {
        let [min_ctas, max_ctas] = ctas.numbers();
        let net_name = options.net_name.as_ref().and_then(|name| CString::new(name.as_str()).ok());
        // NCCL ignores the fields that this version did not have.
        let version = options.traffic_class.map_or(OLDEST_VERSION, |_| TRAFFIC_CLASS);
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: version.cast_unsigned(),
            blocking: 0,
            cga_cluster_size: number(options.cga_cluster_size),
            min_ctas,
            max_ctas,
            // It is never freed, since NCCL does not say how long it reads it.
            net_name: net_name.map_or(std::ptr::null(), |name| name.into_raw().cast_const()),
            split_share: number(None),
            traffic_class: number(options.traffic_class),
        }
    }
}

/// Refuses options that NCCL would ignore without a word. It refuses others itself.
pub(super) fn check(options: &NcclOptions) -> Result<()> {
    if options.net_name.as_ref().is_some_and(|name| name.contains('\0')) {
        return Err(Error::invalid("net_name", "it must be a name, such as Socket, or None"));
    }
    let version = version()?;
    if options.traffic_class.is_some() && version < TRAFFIC_CLASS {
        return Err(Error::Unavailable {
            what: format!("NcclOptions::traffic_class with NCCL {}", Version(version)),
            hint: format!("{} or later has it: install a newer libnccl.so.2, or set None", Version(TRAFFIC_CLASS)),
        });
    }
    Ok(())
}

/// A nonblocking communicator. `&mut self` ensures that one thread at a time uses it; the device's context must be
/// bound to that thread. Dropping it aborts it.
pub(super) struct Comm(pub(super) sys::ncclComm_t);

// SAFETY: NCCL's communicators belong to no thread; only simultaneous use is forbidden.
unsafe impl Send for Comm {}

impl Comm {
    /// Connects to the other ranks that were given the same id.
    pub(super) fn connect(
        id: &UniqueId,
        rank: usize,
        world_size: usize,
        options: &NcclOptions,
        ctas: Ctas,
        check: CancellationCheck,
    ) -> std::result::Result<Self, WaitError> {
        const CALL: &str = "ncclCommInitRankConfig";
        let mut config = Config::nonblocking(options, ctas);
        let mut comm: sys::ncclComm_t = std::ptr::null_mut();
        let (ranks, rank) = (int(CALL, world_size)?, int(CALL, rank)?);
        // SAFETY: `comm` is written before the call returns. `config` is a prefix of the struct that NCCL knows, says
        // so in its `size`, and is copied before the call returns.
        let begun = unsafe {
            ffi::ncclCommInitRankConfig(&raw mut comm, ranks, id.0, rank, (&raw mut config).cast::<sys::ncclConfig_t>())
        };
        let begun = status(CALL, begun);
        if comm.is_null() {
            begun?;
            return Err(NcclFailure::other(CALL, "NCCL made no communicator").into());
        }
        let mut comm = Self(comm);
        if begun? == Status::Done && world_size > 1 {
            return Err(blocking().into());
        }
        comm.settle(CALL, check)?;
        Ok(comm)
    }

    /// Creates a communicator of the ranks that are members, numbered in the order of `key`. All ranks must call it,
    /// and none may have calls in flight.
    pub(super) fn split(
        &mut self,
        member: bool,
        key: usize,
        (options, ctas): (&NcclOptions, Ctas),
        check: CancellationCheck,
    ) -> std::result::Result<Option<Self>, WaitError> {
        const CALL: &str = "ncclCommSplit";
        let (color, key) = (if member { 0 } else { NO_COLOR }, int(CALL, key)?);
        // One of NCCL's threads may write it until this communicator has settled. So it is not on the stack, and is not
        // freed if the wait ends early.
        let slot: *mut sys::ncclComm_t = Box::into_raw(Box::new(std::ptr::null_mut()));
        let mut config = Config::nonblocking(options, ctas);
        let config = (&raw mut config).cast::<sys::ncclConfig_t>();
        // SAFETY: the communicator is valid and settled, `slot` outlives the operation. `config` is a prefix of the struct that NCCL knows,
        // says so in its `size`, and is copied before the call returns.
        let begun = unsafe { ffi::ncclCommSplit(self.0, color, key, slot, config) };
        if let Err(failure) = status(CALL, begun) {
            // SAFETY: it came from `Box::into_raw`, and a call that was refused does nothing.
            drop(unsafe { Box::from_raw(slot) });
            return Err(failure.into());
        }
        self.settle(CALL, &mut *check)?;
        // SAFETY: it came from `Box::into_raw`, and NCCL is done with it.
        let comm = *unsafe { Box::from_raw(slot) };
        match (member, comm.is_null()) {
            (false, _) => Ok(None),
            (true, true) => Err(NcclFailure::other(CALL, "NCCL made no communicator").into()),
            (true, false) => {
                let mut comm = Self(comm);
                comm.settle(CALL, check)?;
                Ok(Some(comm))
            }
        }
    }

    /// Whether the last call is complete, or the error that has occurred since.
    pub(super) fn status(&mut self, operation: &'static str) -> CallResult {
        let mut state = Code::SUCCESS;
        // SAFETY: the communicator is valid, `state` is written before the call returns.
        let asked = unsafe { ffi::ncclCommGetAsyncError(self.0, &raw mut state) };
        status(operation, asked)?;
        status(operation, state)
    }

    /// Waits until the communicator accepts the next call: spinning at first, since launches take microseconds.
    pub(super) fn settle(
        &mut self,
        operation: &'static str,
        check: CancellationCheck,
    ) -> std::result::Result<(), WaitError> {
        const SPINS: u32 = 200;
        const LONGEST: Duration = Duration::from_millis(1);
        let mut pause = Duration::from_micros(20);
        for round in 0.. {
            if self.status(operation)? == Status::Done {
                break;
            }
            check().map_err(WaitError::Group)?;
            if round < SPINS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(pause);
                pause = (pause * 2).min(LONGEST);
            }
        }
        Ok(())
    }

    /// Begins the end in good order: waits for calls in flight. Ranks of one host wait for each other.
    pub(super) fn finalize(&mut self, check: CancellationCheck) -> std::result::Result<(), WaitError> {
        // SAFETY: the communicator is valid.
        status("ncclCommFinalize", unsafe { ffi::ncclCommFinalize(self.0) })?;
        self.settle("ncclCommFinalize", &mut *check)?;
        // The time may be over for the next step, in which nothing ends the wait.
        check().map_err(WaitError::Group)
    }

    /// Frees a finalized communicator. From NCCL 2.31 on, this waits, without an end, until all ranks of this host do the same.
    pub(super) fn destroy(mut self) -> CallResult {
        let comm = std::mem::replace(&mut self.0, std::ptr::null_mut());
        // SAFETY: the communicator is valid and finalized, and nothing has it any more.
        status("ncclCommDestroy", unsafe { ffi::ncclCommDestroy(comm) })
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        if self.0.is_null() {
            return;
        }
        // SAFETY: the communicator is valid, and nothing has it any more. Kernels of its calls end.
        if let Err(failure) = status("ncclCommAbort", unsafe { ffi::ncclCommAbort(self.0) }) {
            log::debug!("{failure}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_can_be_encoded_and_decoded_and_differ() {
        let (a, b) = (UniqueId::new().unwrap().to_bytes(), UniqueId::new().unwrap().to_bytes());
        assert_ne!(a, b);
        assert_eq!(UniqueId::from_bytes(&a).unwrap().to_bytes(), a);
        assert!(UniqueId::from_bytes(&a[1..]).is_none());
        assert!(UniqueId::from_bytes(&a).unwrap().address().is_some());
    }

    #[test]
    fn an_id_has_the_address_of_its_rank() {
        let id = |sockaddr: &[u8]| {
            let mut bytes = [7; 128];
            bytes[8..8 + sockaddr.len()].copy_from_slice(sockaddr);
            UniqueId::from_bytes(&bytes).unwrap().address().map(|address| address.to_string())
        };
        let [inet, inet6] = [2u16, 10].map(u16::to_ne_bytes);
        let v4 = [&inet[..], &[0xa1, 0x0f, 172, 17, 0, 1]].concat();
        assert_eq!(id(&v4).as_deref(), Some("172.17.0.1:41231"));
        let v6 = [&inet6[..], &[0, 80, 0, 0, 0, 0, 0xfe, 0x80], &[0; 13], &[1]].concat();
        assert_eq!(id(&v6).as_deref(), Some("[fe80::1]:80"));
        assert_eq!(id(b"some other version's"), None);
    }

    #[test]
    fn a_configuration_has_the_limits_and_the_options() {
        let options = NcclOptions { cga_cluster_size: Some(2), ..Default::default() };
        let Config { min_ctas, max_ctas, cga_cluster_size, version, .. } =
            Config::nonblocking(&options, Ctas { least: Some(1), most: Some(4) });
        assert_eq!((min_ctas, max_ctas, cga_cluster_size, version), (1, 4, 2, 21_800));
        let name = Some("a\0b".to_string());
        assert!(check(&NcclOptions { net_name: name, ..Default::default() }).is_err());
    }

    /// The fields of the configuration have the same offsets as in the bindings.
    #[test]
    fn the_configuration_is_a_prefix_of_nccls() {
        use std::mem::offset_of;
        type Known = sys::ncclConfig_t;
        assert_eq!(offset_of!(Config, blocking), offset_of!(Known, blocking));
        assert_eq!(offset_of!(Config, max_ctas), offset_of!(Known, maxCTAs));
        assert_eq!(offset_of!(Config, net_name), offset_of!(Known, netName));
        assert_eq!(offset_of!(Config, split_share), offset_of!(Known, splitShare));
        assert_eq!(offset_of!(Config, traffic_class), offset_of!(Known, splitShare) + size_of::<c_int>());
        assert!(size_of::<Config>() <= size_of::<Known>());
        // There is no padding, whose bytes a later version might take for a field.
        assert_eq!(
            size_of::<Config>(),
            size_of::<usize>() + 2 * size_of::<u32>() + 6 * size_of::<c_int>() + size_of::<*const c_char>()
        );
    }
}
