//! One call of the engine as functions of MPI on the memory of its tensors.
use crate::comm::{Comm, Request, int};
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

/// The pieces of a call that are in flight at a time.
const WINDOW: usize = 2;
/// The bytes of a piece of a call that moves data without changing it.
const MOVED: usize = 1 << 30;
/// The tag of the program's messages, which have their own communicator.
const TAG: c_int = 0;

/// The memory of a tensor, whose storage the call keeps alive.
///
/// candle lends it only under a lock, which must not be held while other ranks are waited for: they may be waiting for a
/// call on another view of the same storage. So MPI reads and writes it without the lock. By the contract of
/// [`Communicator::start`](candle_ddp::backend::Communicator::start), nobody touches a call's tensors before it is over,
/// and a storage does not move while a tensor on it lives.
#[derive(Clone, Copy)]
struct Memory(*mut u8);

// SAFETY: an address, which MPI uses on the thread that calls it.
unsafe impl Send for Memory {}

impl Memory {
    fn of(tensor: &Tensor) -> Result<Self> {
        bytes_mut(tensor, |bytes| Self(bytes.as_mut_ptr()))
    }

    fn at(self, byte: usize) -> *mut c_void {
        self.0.wrapping_add(byte).cast()
    }
}

enum Kind {
    AllReduce {
        tensor: Memory,
        op: ReduceOp,
    },
    Broadcast {
        tensor: Memory,
        root: usize,
    },
    Reduce {
        tensor: Memory,
        root: usize,
        op: ReduceOp,
    },
    /// Without an input, that is in its place in the output.
    AllGather {
        output: Memory,
        input: Option<Memory>,
    },
    ReduceScatter {
        output: Memory,
        input: Memory,
        op: ReduceOp,
    },
    AllToAll {
        output: Memory,
        input: Memory,
    },
    /// The same without this rank's own part.
    ExchangeParts {
        output: Memory,
        input: Memory,
        parts: Parts,
    },
    Gather {
        output: Option<Memory>,
        input: Memory,
        root: usize,
    },
    Scatter {
        output: Memory,
        input: Option<Memory>,
        root: usize,
    },
    Send {
        tensor: Memory,
        peer: usize,
    },
    Recv {
        tensor: Memory,
        peer: usize,
    },
    Barrier,
}

/// The elements of the other ranks' parts, in rank order. MPI reads these arrays until the call is over.
struct Parts {
    /// None for this rank.
    counts: Box<[c_int]>,
    /// Where they begin in the input, and in the output.
    sent: Box<[c_int]>,
    received: Box<[c_int]>,
}

impl Parts {
    /// Parts of `count` elements; None if there are too many elements for MPI to count.
    fn new(rank: usize, world_size: usize, count: usize) -> Option<Self> {
        c_int::try_from(count.checked_mul(world_size)?).ok()?;
        let of_all = |of: &dyn Fn(usize) -> usize| (0..world_size).map(|peer| int(of(peer))).collect();
        Some(Self {
            counts: of_all(&|peer| if peer == rank { 0 } else { count }),
            sent: of_all(&|peer| peer * count),
            received: of_all(&|peer| (peer - usize::from(peer > rank)) * count),
        })
    }
}

/// A call that was checked, and how far it is.
pub(crate) struct Call {
    /// Keeps the tensors alive. MPI uses their memory until the call is over.
    collective: Collective,
    kind: Kind,
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

fn too_large(rank: usize, collective: &Collective, tensor: &str, count: usize) -> Error {
    Error::InvalidTensor {
        rank,
        operation: collective.name().to_string(),
        reason: format!("{tensor} of {count} elements is too large for MPI, which counts to 2147483647: split it"),
    }
}

impl Call {
    /// `collective`, which has been checked, on rank `rank` of `world_size`.
    pub(crate) fn new(rank: usize, world_size: usize, collective: Collective, piece_bytes: usize) -> Result<Self> {
        let mut piece_bytes = piece_bytes;
        let mut moved = || piece_bytes = MOVED;
        let of = Memory::of;
        // Parts that lie between other parts stay whole.
        let mut is_whole = false;
        let (kind, part) = match &collective {
            Collective::AllReduce { tensor, op } => (Kind::AllReduce { tensor: of(tensor)?, op: *op }, Some(tensor)),
            Collective::Reduce { tensor, root, op } => {
                (Kind::Reduce { tensor: of(tensor)?, root: *root, op: *op }, Some(tensor))
            }
            Collective::Broadcast { tensor, root } => {
                moved();
                (Kind::Broadcast { tensor: of(tensor)?, root: *root }, Some(tensor))
            }
            Collective::Send { tensor, peer } => {
                moved();
                (Kind::Send { tensor: of(tensor)?, peer: *peer }, Some(tensor))
            }
            Collective::Recv { tensor, peer } => {
                moved();
                (Kind::Recv { tensor: of(tensor)?, peer: *peer }, Some(tensor))
            }
            Collective::AllGather { output, input } => {
                is_whole = true;
                let (output, part) = (of(output)?, of(input)?);
                let place = output.at(rank * input.elem_count() * input.dtype().size_in_bytes());
                (Kind::AllGather { output, input: (part.at(0) != place).then_some(part) }, Some(input))
            }
            Collective::ReduceScatter { output, input, op } => {
                is_whole = true;
                (Kind::ReduceScatter { output: of(output)?, input: of(input)?, op: *op }, Some(output))
            }
            Collective::AllToAll { output, input } => {
                is_whole = true;
                let count = input.elem_count();
                let kind = if output.elem_count() == count {
                    Kind::AllToAll { output: of(output)?, input: of(input)? }
                } else {
                    let parts = Parts::new(rank, world_size, count / world_size)
                        .ok_or_else(|| too_large(rank, &collective, "the input", count))?;
                    Kind::ExchangeParts { output: of(output)?, input: of(input)?, parts }
                };
                (kind, Some(input))
            }
            Collective::Gather { output, input, root } => {
                is_whole = true;
                let output = output.as_ref().map(of).transpose()?;
                (Kind::Gather { output, input: of(input)?, root: *root }, Some(input))
            }
            Collective::Scatter { output, input, root } => {
                is_whole = true;
                let input = input.as_ref().map(of).transpose()?;
                (Kind::Scatter { output: of(output)?, input, root: *root }, Some(output))
            }
            Collective::Barrier => (Kind::Barrier, None),
            other => {
                let hint = "this version of candle-ddp-mpi does not know it: update it with candle-ddp".to_string();
                return Err(Error::Unavailable { what: other.name().to_string(), hint });
            }
        };
        let dtype = part.map_or(DType::U8, Tensor::dtype);
        // The only call without a tensor is made once.
        let mut count = part.map_or(1, Tensor::elem_count);
        if let Kind::AllToAll { .. } | Kind::ExchangeParts { .. } = kind {
            count /= world_size;
        }
        // Alone, a rank has no other parts, and Open MPI refuses an empty output.
        if let Kind::ExchangeParts { .. } = kind
            && world_size == 1
        {
            count = 0;
        }
        let piece = if is_whole { count.max(1) } else { (piece_bytes / dtype.size_in_bytes()).max(1) };
        if c_int::try_from(piece).is_err() {
            return Err(too_large(rank, &collective, "a part", count));
        }
        let pieces = count.div_ceil(piece);
        let (started, in_flight) = (0, VecDeque::new());
        Ok(Self { collective, kind, rank, world_size, dtype, count, piece, pieces, started, in_flight })
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

    /// Starts the piece from element `from` on.
    fn start(&self, comm: Comm, from: usize) -> std::result::Result<Request, MpiError> {
        let (count, kind) = (int(self.piece.min(self.count - from)), datatype(self.dtype));
        let byte = from * self.dtype.size_in_bytes();
        let reduction = |op| operation(comm.library, self.dtype, op);
        let (raw, here) = (comm.raw(), in_place());
        // SAFETY, for all functions: the communicator is valid; the addresses and counts are those of tensors that have been
        // checked and live until the call is over, which nobody else touches until then; the datatype is theirs.
        match &self.kind {
            Kind::AllReduce { tensor, op } => {
                let op = reduction(*op)?;
                // SAFETY: see above.
                comm.start("MPI_Iallreduce", |request| unsafe {
                    MPI_Iallreduce(here, tensor.at(byte), count, kind, op, raw, request)
                })
            }
            Kind::Reduce { tensor, root, op } => {
                let op = reduction(*op)?;
                let (input, output) = match *root == self.rank {
                    true => (here, tensor.at(byte)),
                    false => (tensor.at(byte).cast_const(), std::ptr::null_mut()),
                };
                // SAFETY: see above.
                comm.start("MPI_Ireduce", |request| unsafe {
                    MPI_Ireduce(input, output, count, kind, op, int(*root), raw, request)
                })
            }
            // SAFETY: see above.
            Kind::Broadcast { tensor, root } => comm.start("MPI_Ibcast", |request| unsafe {
                MPI_Ibcast(tensor.at(byte), count, kind, int(*root), raw, request)
            }),
            Kind::AllGather { output, input } => {
                let input = input.map_or(here, |input| input.at(0).cast_const());
                // SAFETY: see above.
                comm.start("MPI_Iallgather", |request| unsafe {
                    MPI_Iallgather(input, count, kind, output.at(0), count, kind, raw, request)
                })
            }
            Kind::ReduceScatter { output, input, op } => {
                let op = reduction(*op)?;
                // SAFETY: see above.
                comm.start("MPI_Ireduce_scatter_block", |request| unsafe {
                    MPI_Ireduce_scatter_block(input.at(0), output.at(0), count, kind, op, raw, request)
                })
            }
            // SAFETY: see above.
            Kind::AllToAll { output, input } => comm.start("MPI_Ialltoall", |request| unsafe {
                MPI_Ialltoall(input.at(0), count, kind, output.at(0), count, kind, raw, request)
            }),
            Kind::ExchangeParts { output, input, parts: Parts { counts, sent, received } } => {
                let (counts, sent, received) = (counts.as_ptr(), sent.as_ptr(), received.as_ptr());
                // SAFETY: see above. The arrays have an element for each rank, and live until the call is over.
                comm.start("MPI_Ialltoallv", |request| unsafe {
                    let (input, output) = (input.at(0), output.at(0));
                    MPI_Ialltoallv(input, counts, sent, kind, output, counts, received, kind, raw, request)
                })
            }
            Kind::Gather { output, input, root } => {
                let output = output.map_or(std::ptr::null_mut(), |output| output.at(0));
                // SAFETY: see above.
                comm.start("MPI_Igather", |request| unsafe {
                    MPI_Igather(input.at(0), count, kind, output, count, kind, int(*root), raw, request)
                })
            }
            Kind::Scatter { output, input, root } => {
                let input = input.map_or(std::ptr::null(), |input| input.at(0).cast_const());
                // SAFETY: see above.
                comm.start("MPI_Iscatter", |request| unsafe {
                    MPI_Iscatter(input, count, kind, output.at(0), count, kind, int(*root), raw, request)
                })
            }
            // SAFETY: see above.
            Kind::Send { tensor, peer } => comm.start("MPI_Isend", |request| unsafe {
                MPI_Isend(tensor.at(byte), count, kind, int(*peer), TAG, raw, request)
            }),
            // SAFETY: see above.
            Kind::Recv { tensor, peer } => comm.start("MPI_Irecv", |request| unsafe {
                MPI_Irecv(tensor.at(byte), count, kind, int(*peer), TAG, raw, request)
            }),
            Kind::Barrier => comm.start_barrier(),
        }
    }

    fn finish(&self) {
        let output = match &self.kind {
            Kind::AllReduce { tensor, op: ReduceOp::Avg } => tensor,
            Kind::ReduceScatter { output, op: ReduceOp::Avg, .. } => output,
            Kind::Reduce { tensor, op: ReduceOp::Avg, root } if *root == self.rank => tensor,
            _ => return,
        };
        // SAFETY: MPI is done with the call's memory, and nobody else touches it before the call is over.
        unsafe { average(self.dtype, output.at(0), self.count, self.world_size) };
    }

    /// Writes `all_reduce(f32[20])`.
    pub(crate) fn describe(&self) -> String {
        match self.kind {
            Kind::Barrier => "barrier()".to_string(),
            _ => format!("{}({}[{}])", self.collective.name(), self.dtype.as_str(), self.count),
        }
    }
}
