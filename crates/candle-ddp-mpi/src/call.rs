//! One call of the engine as functions of MPI on the memory of its tensors.
use crate::comm::{Comm, Request, TAG, int};
use crate::in_place::in_place;
use crate::library::MpiError;
use crate::reduction::{average, datatype, operation};
use candle_core::{DType, Tensor};
use candle_ddp::backend::{Collective, bytes_mut};
use candle_ddp::{Error, ReduceOp, Result};
use mpi::ffi::{
    MPI_Iallgather, MPI_Iallreduce, MPI_Ialltoall, MPI_Ialltoallv, MPI_Ibcast, MPI_Igather, MPI_Irecv, MPI_Ireduce,
    MPI_Ireduce_scatter_block, MPI_Iscatter, MPI_Isend,
};
use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

/// The pieces of a call that are in flight at a time.
const WINDOW: usize = 2;
/// The bytes of a piece of a call that moves data without changing it.
const MOVED: usize = 1 << 30;
/// Parts that lie between other parts stay whole.
const WHOLE: usize = usize::MAX;

/// The addresses of a call's only tensor, or of its output and input. They are null for a tensor that it lacks.
///
/// candle lends this memory only under a lock, which must not be held while other ranks are waited for: they may be waiting for
/// a call on another view of the same storage. So MPI reads and writes it without the lock. By the contract of
/// [`Communicator::start`](candle_ddp::backend::Communicator::start), nobody touches a call's tensors before it is over,
/// and a storage does not move while a tensor on it lives.
struct Memory([*mut c_void; 2]);

// SAFETY: addresses, which MPI uses on the thread that calls it.
unsafe impl Send for Memory {}

/// For each rank, the elements of its part, of which this rank has none, and where the part begins in the input and in the
/// output, which lacks this rank's part. MPI reads these until the call is over.
type Parts = [Box<[c_int]>; 3];

fn other_parts(rank: usize, world_size: usize, count: usize) -> Parts {
    let of_all = |of: &dyn Fn(usize) -> usize| (0..world_size).map(|peer| int(of(peer))).collect();
    [
        of_all(&|peer| if peer == rank { 0 } else { count }),
        of_all(&|peer| peer * count),
        of_all(&|peer| (peer - usize::from(peer > rank)) * count),
    ]
}

/// A call that was checked, and how far it is.
pub(crate) struct Call {
    /// Keeps the tensors alive. MPI uses their memory until the call is over.
    pub(crate) collective: Collective,
    memory: Memory,
    /// For an all-to-all whose output lacks this rank's own part.
    parts: Option<Parts>,
    rank: usize,
    world_size: usize,
    dtype: DType,
    /// The elements of each rank's part.
    count: usize,
    /// The elements of a piece.
    piece: usize,
    /// The number of pieces, and how many have been started.
    pieces: usize,
    started: usize,
    in_flight: VecDeque<Request>,
}

impl Call {
    /// `collective`, which has been checked, on rank `rank` of `world_size`.
    pub(crate) fn new(rank: usize, world_size: usize, collective: Collective, piece_bytes: usize) -> Result<Self> {
        use Collective::*;
        let (output, input, most_bytes) = match &collective {
            AllReduce { tensor, .. } | Reduce { tensor, .. } => (Some(tensor), None, piece_bytes),
            Broadcast { tensor, .. } | Send { tensor, .. } | Recv { tensor, .. } => (Some(tensor), None, MOVED),
            AllGather { output, input } | ReduceScatter { output, input, .. } | AllToAll { output, input } => {
                (Some(output), Some(input), WHOLE)
            }
            Gather { output, input, .. } => (output.as_ref(), Some(input), WHOLE),
            Scatter { output, input, .. } => (Some(output), input.as_ref(), WHOLE),
            Barrier => (None, None, WHOLE),
            other => {
                let hint = "this version of candle-ddp-mpi does not know it: update it with candle-ddp".to_string();
                return Err(Error::Unavailable { what: other.name().to_string(), hint });
            }
        };
        let part = [output, input].into_iter().flatten().min_by_key(|tensor| tensor.elem_count());
        // The only call without a tensor is made once.
        let (dtype, mut count) = part.map_or((DType::U8, 1), |part| (part.dtype(), part.elem_count()));
        let mut parts = None;
        if let AllToAll { output, input } = &collective {
            let lacks_own = output.elem_count() < input.elem_count();
            // Alone, a rank has no other parts, and Open MPI refuses an empty output.
            count /= if lacks_own { (world_size - 1).max(1) } else { world_size };
            parts = lacks_own.then(|| other_parts(rank, world_size, count));
        }
        let piece = (most_bytes / dtype.size_in_bytes()).min(count).max(1);
        // MPI also counts where the parts begin.
        let counted = if parts.is_some() { count * world_size } else { piece };
        if c_int::try_from(counted).is_err() {
            let operation = collective.name().to_string();
            let reason =
                format!("{counted} elements are too many for MPI, which counts to 2147483647: split the tensor");
            return Err(Error::InvalidTensor { rank, operation, reason });
        }
        let address = |tensor: Option<&Tensor>| {
            tensor.map_or(Ok(null_mut()), |tensor| bytes_mut(tensor, |bytes| bytes.as_mut_ptr().cast()))
        };
        let memory = Memory([address(output)?, address(input)?]);
        let (pieces, started, in_flight) = (count.div_ceil(piece), 0, VecDeque::new());
        Ok(Self { collective, memory, parts, rank, world_size, dtype, count, piece, pieces, started, in_flight })
    }

    /// Starts the next pieces, as many as may be in flight. Returns whether the call is over.
    pub(crate) fn advance(&mut self, comm: Comm) -> std::result::Result<bool, MpiError> {
        loop {
            while self.started < self.pieces && self.in_flight.len() < WINDOW {
                let request = self.start(comm, self.started * self.piece)?;
                self.in_flight.push_back(request);
                self.started += 1;
            }
            let Some(request) = self.in_flight.front_mut() else { break };
            if !request.test()? {
                return Ok(false);
            }
            self.in_flight.pop_front();
        }
        self.finish();
        Ok(true)
    }

    /// Whether MPI may still use the tensors' memory.
    pub(crate) fn is_in_flight(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// How it reduces. A call that only moves data has no use for this.
    fn op(&self) -> ReduceOp {
        match self.collective {
            Collective::AllReduce { op, .. } | Collective::Reduce { op, .. } | Collective::ReduceScatter { op, .. } => {
                op
            }
            _ => ReduceOp::Sum,
        }
    }

    /// Starts the piece from element `from` on.
    fn start(&self, comm: Comm, from: usize) -> std::result::Result<Request, MpiError> {
        use Collective::*;
        macro_rules! start {
            ($function:ident($($argument:expr),*)) => {
                // SAFETY: the communicator is valid; the addresses and counts are those of tensors that have been checked and
                // live until the call is over, which nobody else touches until then; the datatype is theirs. The arrays of parts
                // live as long, and have an element for each rank.
                comm.start(stringify!($function), |request| unsafe { $function($($argument,)* comm.raw(), request) })
            };
        }
        let (count, kind, here) = (int(self.piece.min(self.count - from)), datatype(self.dtype), in_place());
        let [output, input] = self.memory.0.map(|address| address.wrapping_byte_add(from * self.dtype.size_in_bytes()));
        let op = operation(comm.library, self.dtype, self.op())?;
        match self.collective {
            AllReduce { .. } => start!(MPI_Iallreduce(here, output, count, kind, op)),
            Reduce { root, .. } if root == self.rank => {
                start!(MPI_Ireduce(here, output, count, kind, op, int(root)))
            }
            Reduce { root, .. } => start!(MPI_Ireduce(output, null_mut(), count, kind, op, int(root))),
            Broadcast { root, .. } => start!(MPI_Ibcast(output, count, kind, int(root))),
            AllGather { .. } => {
                let place = output.wrapping_byte_add(self.rank * self.count * self.dtype.size_in_bytes());
                let input = if input == place { here } else { input.cast_const() };
                start!(MPI_Iallgather(input, count, kind, output, count, kind))
            }
            ReduceScatter { .. } => start!(MPI_Ireduce_scatter_block(input, output, count, kind, op)),
            AllToAll { .. } => match &self.parts {
                None => start!(MPI_Ialltoall(input, count, kind, output, count, kind)),
                Some(parts) => {
                    let [counts, sent, received] = parts.each_ref().map(|of_ranks| of_ranks.as_ptr());
                    start!(MPI_Ialltoallv(input, counts, sent, kind, output, counts, received, kind))
                }
            },
            Gather { root, .. } => start!(MPI_Igather(input, count, kind, output, count, kind, int(root))),
            Scatter { root, .. } => start!(MPI_Iscatter(input, count, kind, output, count, kind, int(root))),
            Send { peer, .. } => start!(MPI_Isend(output, count, kind, int(peer), TAG)),
            Recv { peer, .. } => start!(MPI_Irecv(output, count, kind, int(peer), TAG)),
            // A barrier: `new` has refused the calls that are not known.
            _ => comm.start_barrier(),
        }
    }

    fn finish(&self) {
        let gets_result = !matches!(self.collective, Collective::Reduce { root, .. } if root != self.rank);
        if self.op() == ReduceOp::Avg && gets_result {
            // SAFETY: MPI is done with the call's memory, and nobody else touches it before the call is over.
            unsafe { average(self.dtype, self.memory.0[0], self.count, self.world_size) };
        }
    }

    /// Writes `all_reduce(f32[20])`.
    pub(crate) fn describe(&self) -> String {
        match self.collective {
            Collective::Barrier => "barrier()".to_string(),
            _ => format!("{}({}[{}])", self.collective.name(), self.dtype.as_str(), self.count),
        }
    }
}
