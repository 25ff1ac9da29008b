//! Draws calls, makes them and checks their results.
use crate::check::{Expected, Part};
use crate::groups::Groups;
use crate::random::{Random, mix};
use candle_core::{DType, Tensor};
use candle_ddp::backend::Collective;
use candle_ddp::{ProcessGroup, ReduceOp, Result, Work};
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    AllReduce,
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Gather,
    Scatter,
    Ring,
    Barrier,
}

const KINDS: [Kind; 12] = [
    Kind::AllReduce,
    Kind::AllReduce,
    Kind::AllReduce,
    Kind::Broadcast,
    Kind::Reduce,
    Kind::AllGather,
    Kind::ReduceScatter,
    Kind::AllToAll,
    Kind::Gather,
    Kind::Scatter,
    Kind::Ring,
    Kind::Barrier,
];
const DTYPES: [DType; 7] = [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I64, DType::U32, DType::U8];
const OPS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Prod];
/// The number of calls of this rank that may be in flight.
const IN_FLIGHT: usize = 12;
/// A group is made anew after this many steps.
const RENEWAL: u64 = 500;

/// A call in flight, and the tensors that it works on.
struct InFlight {
    works: Vec<Work>,
    expected: Vec<Expected>,
    what: String,
}

pub(crate) struct Soak {
    rank: usize,
    random: Random,
    groups: Groups,
    in_flight: Vec<InFlight>,
    calls: u64,
    bytes: u64,
    kinds: BTreeMap<Kind, u64>,
    renewals: u64,
}

/// The part of a call on which all members of the group agree.
struct Plan {
    kind: Kind,
    dtype: DType,
    op: ReduceOp,
    /// Of each rank's part.
    count: usize,
    root: usize,
    view: bool,
    key: u64,
}

impl Soak {
    pub(crate) fn new(pg: &ProcessGroup, seed: u64) -> Result<Self> {
        let mut random = Random(seed);
        let groups = Groups::new(pg, &mut random)?;
        let mut soak = Self {
            rank: pg.rank(),
            random,
            groups,
            in_flight: Vec::new(),
            calls: 0,
            bytes: 0,
            kinds: BTreeMap::new(),
            renewals: 0,
        };
        soak.warm_up()?;
        Ok(soak)
    }

    /// Groups make a thread for a channel with the first call there that does not wait: all of them now.
    fn warm_up(&mut self) -> Result<()> {
        for kind in [Kind::AllReduce, Kind::Ring] {
            for group in self.groups.lasting().iter().filter_map(|group| group.member.as_ref()) {
                let plan = Plan { kind, dtype: DType::F32, op: ReduceOp::Sum, count: 9, root: 0, view: false, key: 0 };
                self.in_flight.push(start(group, &plan, false)?);
            }
        }
        self.finish()
    }

    /// The number of collectives of all groups so far, of those too that this rank does not belong to.
    pub(crate) fn calls(&self) -> u64 {
        self.calls
    }

    /// The bytes of the tensors that this rank has passed to collectives.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn summary(&self) -> String {
        let kinds: Vec<String> = self.kinds.iter().map(|(kind, count)| format!("{count} {kind:?}")).collect();
        format!("All results were right: {}; {} groups were made and ended.", kinds.join(", "), self.renewals)
    }

    /// Makes one call, if this rank belongs to the group that makes it.
    pub(crate) fn step(&mut self) -> Result<()> {
        self.calls += 1;
        if self.calls.is_multiple_of(RENEWAL) {
            self.finish()?;
            self.groups.renew(&mut self.random)?;
            self.renewals += 1;
        }
        let random = &mut self.random;
        let group = self.groups.pick(random);
        let (ranks, member) = (group.ranks.clone(), group.member.clone());
        let kind = random.pick(&KINDS);
        let dtype = random.pick(&DTYPES);
        let op = match random.pick(&OPS) {
            ReduceOp::Avg if !dtype.is_float() => ReduceOp::Sum,
            op => op,
        };
        // Mostly small, up to 4 MiB of f32 once in a while.
        let bits = match random.below(1000) {
            0..880 => 11,
            880..995 => 16,
            _ => 20,
        };
        let bits = random.below(bits + 1);
        let count = random.below(1 << bits);
        let root = random.below(ranks.len());
        let (view, key) = (random.once_in(4), random.next());
        // Drawn by all, though each rank may do as it likes.
        let (waits, order) = (random.once_in(2), random.next() as usize);
        *self.kinds.entry(kind).or_default() += 1;
        let Some(group) = member else { return Ok(()) };
        let plan = Plan { kind, dtype, op, count, root, view, key };
        let call = start(&group, &plan, waits)?;
        self.bytes +=
            call.expected.iter().map(|tensor| (tensor.tensor.elem_count() * dtype.size_in_bytes()) as u64).sum::<u64>();
        if call.works.is_empty() {
            return self.check(&call);
        }
        self.in_flight.push(call);
        while self.in_flight.len() > IN_FLIGHT || !self.in_flight.is_empty() && order.is_multiple_of(7) {
            let call = self.in_flight.swap_remove((order ^ self.rank) % self.in_flight.len());
            self.complete(&call)?;
        }
        Ok(())
    }

    /// Waits for all calls in flight, and ends the newest group, so that the number of open connections does not depend on its size.
    pub(crate) fn rest(&mut self) -> Result<()> {
        self.groups.end_newest();
        self.finish()
    }

    /// Waits for all calls in flight.
    fn finish(&mut self) -> Result<()> {
        for call in std::mem::take(&mut self.in_flight) {
            self.complete(&call)?;
        }
        Ok(())
    }

    fn complete(&self, call: &InFlight) -> Result<()> {
        call.works.iter().try_for_each(Work::wait)?;
        self.check(call)
    }

    fn check(&self, call: &InFlight) -> Result<()> {
        call.expected.iter().try_for_each(|tensor| tensor.check(&call.what, self.rank))
    }
}

/// Makes the call of `plan`. With `waits`, it is over when this returns.
fn start(group: &ProcessGroup, plan: &Plan, waits: bool) -> Result<InFlight> {
    let Plan { kind, dtype, op, count, root, view, key } = *plan;
    let (rank, size) = (group.rank(), group.world_size());
    let is_reduced = matches!(kind, Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter);
    // What moves only may have any value; products need small ones.
    let op = if is_reduced { op } else { ReduceOp::Sum };
    let part = |from: usize, to: usize| Part::of(mix(key ^ (from as u64) << 8 ^ (to as u64) << 16), count, op);
    let from_all = |to: usize| (0..size).map(|from| part(from, to)).collect::<Vec<_>>();
    let to_all = |from: usize| (0..size).map(|to| part(from, to)).collect::<Vec<_>>();
    let blank = |parts: usize| vec![Part::blank(count); parts];
    let tensor = |before: &[Part], after: Vec<Part>| Expected::new(dtype, before, after, view);
    let kept = |parts: Vec<Part>| tensor(&parts.clone(), parts);
    let copy = |tensor: &Expected| tensor.tensor.clone();
    let is_root = rank == root;

    let mut expected: Vec<Expected> = Vec::new();
    let mut hold = |tensor: Result<Expected>| -> Result<Tensor> {
        let tensor = tensor?;
        let handle = copy(&tensor);
        expected.push(tensor);
        Ok(handle)
    };
    let collectives = match kind {
        Kind::AllReduce => {
            let tensor = hold(tensor(&[part(rank, 0)], vec![Part::reduced(&from_all(0), op)]))?;
            vec![Collective::AllReduce { tensor, op }]
        }
        Kind::Broadcast => {
            let tensor = hold(tensor(&[part(rank, 0)], vec![part(root, 0)]))?;
            vec![Collective::Broadcast { tensor, root }]
        }
        Kind::Reduce => {
            let after = if is_root { Part::reduced(&from_all(0), op) } else { part(rank, 0) };
            vec![Collective::Reduce { tensor: hold(tensor(&[part(rank, 0)], vec![after]))?, root, op }]
        }
        Kind::AllGather => {
            let output = hold(tensor(&blank(size), from_all(0)))?;
            vec![Collective::AllGather { output, input: hold(kept(vec![part(rank, 0)]))? }]
        }
        Kind::ReduceScatter => {
            let output = hold(tensor(&blank(1), vec![Part::reduced(&from_all(rank), op)]))?;
            vec![Collective::ReduceScatter { output, input: hold(kept(to_all(rank)))?, op }]
        }
        Kind::AllToAll => {
            let output = hold(tensor(&blank(size), from_all(rank)))?;
            vec![Collective::AllToAll { output, input: hold(kept(to_all(rank)))? }]
        }
        Kind::Gather => {
            let output = is_root.then(|| hold(tensor(&blank(size), from_all(0)))).transpose()?;
            vec![Collective::Gather { output, input: hold(kept(vec![part(rank, 0)]))?, root }]
        }
        Kind::Scatter => {
            let input = is_root.then(|| hold(kept(to_all(root)))).transpose()?;
            vec![Collective::Scatter { output: hold(tensor(&blank(1), vec![part(root, rank)]))?, input, root }]
        }
        Kind::Ring => {
            let (before, next) = ((rank + size - 1) % size, (rank + 1) % size);
            let sent = hold(kept(vec![part(rank, 0)]))?;
            let received = hold(tensor(&blank(1), vec![part(before, 0)]))?;
            vec![Collective::Send { tensor: sent, peer: next }, Collective::Recv { tensor: received, peer: before }]
        }
        Kind::Barrier => vec![Collective::Barrier],
    };
    let what = format!(
        "{kind:?} of {}[{count}], {op}, root {root}, view {view}, ranks {:?}",
        dtype.as_str(),
        group.global_ranks()
    );
    let (last, first) = match collectives.split_last() {
        Some((last, first)) => (last.clone(), first.to_vec()),
        None => return Ok(InFlight { works: Vec::new(), expected, what }),
    };
    let mut works = first.into_iter().map(|collective| start_named(group, &collective)).collect::<Result<Vec<_>>>()?;
    if waits {
        run_named(group, &last)?;
        works.drain(..).try_for_each(|work| work.wait())?;
    } else {
        works.push(start_named(group, &last)?);
    }
    Ok(InFlight { works, expected, what })
}

/// Makes the call by its method, and waits for it.
fn run_named(group: &ProcessGroup, collective: &Collective) -> Result<()> {
    match collective {
        Collective::AllReduce { tensor, op } => group.all_reduce(tensor, *op),
        Collective::Broadcast { tensor, root } => group.broadcast(tensor, *root),
        Collective::Reduce { tensor, root, op } => group.reduce(tensor, *root, *op),
        Collective::AllGather { output, input } => group.all_gather(output, input),
        Collective::ReduceScatter { output, input, op } => group.reduce_scatter(output, input, *op),
        Collective::AllToAll { output, input } => group.all_to_all(output, input),
        Collective::Gather { output, input, root } => group.gather(output.as_ref(), input, *root),
        Collective::Scatter { output, input, root } => group.scatter(output, input.as_ref(), *root),
        Collective::Send { tensor, peer } => group.send(tensor, *peer),
        Collective::Recv { tensor, peer } => group.recv(tensor, *peer),
        Collective::Barrier => group.barrier(),
        _ => unreachable!("no other is drawn"),
    }
}

/// Makes the call by its method, without waiting for it.
fn start_named(group: &ProcessGroup, collective: &Collective) -> Result<Work> {
    match collective {
        Collective::AllReduce { tensor, op } => group.all_reduce_async(tensor, *op),
        Collective::Broadcast { tensor, root } => group.broadcast_async(tensor, *root),
        Collective::Reduce { tensor, root, op } => group.reduce_async(tensor, *root, *op),
        Collective::AllGather { output, input } => group.all_gather_async(output, input),
        Collective::ReduceScatter { output, input, op } => group.reduce_scatter_async(output, input, *op),
        Collective::AllToAll { output, input } => group.all_to_all_async(output, input),
        Collective::Gather { output, input, root } => group.gather_async(output.as_ref(), input, *root),
        Collective::Scatter { output, input, root } => group.scatter_async(output, input.as_ref(), *root),
        Collective::Send { tensor, peer } => group.isend(tensor, *peer),
        Collective::Recv { tensor, peer } => group.irecv(tensor, *peer),
        Collective::Barrier => group.barrier_async(),
        _ => unreachable!("no other is drawn"),
    }
}
