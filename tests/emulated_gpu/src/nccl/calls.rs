//! NCCL's functions for collectives, messages and groups.
#![allow(clippy::too_many_arguments)]
use super::communicator::Communicator;
use super::ffi::{answer, invalid, visit};
use super::handles::Handle;
use super::job::Queued;
use super::wire::{Call, Dtype, Kind, Op};
use super::{Code, failure, group};
use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupStart() -> c_int {
    answer(|| {
        group::start();
        Ok(Code::Success)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupEnd() -> c_int {
    answer(group::end)
}

/// The buffers of a call.
type Buffers = (*const c_void, *mut c_void);

/// Adds a call to the thread's group.
fn call(
    name: &'static str,
    kind: Kind,
    (send, receive): Buffers,
    (count, dtype): (usize, c_int),
    op: c_int,
    peer: c_int,
    (comm, stream): (Handle, *mut c_void),
) -> c_int {
    answer(|| {
        let visit = visit(comm, name)?;
        group::join(visit, |communicator| {
            communicator.check(name)?;
            let Communicator { rank, size, .. } = **communicator;
            let dtype = usize::try_from(dtype).ok().and_then(Dtype::from_number);
            let dtype = dtype.ok_or_else(|| invalid(format!("{name}: unknown data type")))?;
            let op = usize::try_from(op).ok().and_then(Op::from_number);
            let op = op.ok_or_else(|| invalid(format!("{name}: unknown reduction")))?;
            let peer = usize::try_from(peer).ok().filter(|peer| *peer < size);
            let peer = peer.ok_or_else(|| invalid(format!("{name}: no such rank")))?;
            let call = Call { kind, dtype, op, peer, count };
            if (call.given(rank, size) > 0 && send.is_null()) || (call.taken(rank, size) > 0 && receive.is_null()) {
                return Err(invalid(format!("{name}: a buffer is null")));
            }
            let unknown = || failure(Code::UnhandledCudaError, format!("{name}: no such stream"));
            let stream = crate::stream::find(stream).ok_or_else(unknown)?;
            // A collective without elements does nothing.
            let is_message = matches!(kind, Kind::Send | Kind::Recv);
            let queued = Queued { call, send: send.addr(), receive: receive.addr() };
            Ok((count > 0 || is_message).then_some((stream, queued)))
        })
    })
}

/// For calls without a reduction.
const NO_OP: c_int = 0;
/// For calls without a root.
const NO_ROOT: c_int = 0;

/// Functions that add a call, which consists of their buffers and the fields of its kind.
macro_rules! calls {
    ($($name:ident: $kind:ident($($buffer:ident: $Pointer:ty),*; $($own:ident),*) => $buffers:expr, $op:expr, $peer:expr;)*) => {
        $(
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(
                $($buffer: $Pointer,)*
                count: usize,
                dtype: c_int,
                $($own: c_int,)*
                comm: Handle,
                stream: *mut c_void,
            ) -> c_int {
                call(stringify!($name), Kind::$kind, $buffers, (count, dtype), $op, $peer, (comm, stream))
            }
        )*
    };
}

calls! {
    ncclAllReduce: AllReduce(send: *const c_void, receive: *mut c_void; op) => (send, receive), op, NO_ROOT;
    ncclBroadcast: Broadcast(send: *const c_void, receive: *mut c_void; root) => (send, receive), NO_OP, root;
    ncclReduce: Reduce(send: *const c_void, receive: *mut c_void; op, root) => (send, receive), op, root;
    ncclAllGather: AllGather(send: *const c_void, receive: *mut c_void;) => (send, receive), NO_OP, NO_ROOT;
    ncclReduceScatter: ReduceScatter(send: *const c_void, receive: *mut c_void; op) => (send, receive), op, NO_ROOT;
    ncclSend: Send(send: *const c_void; peer) => (send, null_mut()), NO_OP, peer;
    ncclRecv: Recv(receive: *mut c_void; peer) => (null(), receive), NO_OP, peer;
}
