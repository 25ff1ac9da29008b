//! Turns a collective on tensors into one on bytes.
use crate::backend::Collective;
use crate::backend::call::{Call, Element};
use crate::backend::cpu::reduction::Reduction;
use crate::backend::cpu::session::Session;
use crate::backend::cpu::storage::Region;
use crate::error::Failure;

/// The collectives over one data path, on the bytes of tensors. Arguments and results are those of [`Collective`].
pub(crate) trait ByteCollectives {
    fn all_reduce(&mut self, data: Region, reduction: Reduction) -> Result<(), Failure>;

    fn broadcast(&mut self, data: Region, root: usize, element: Element) -> Result<(), Failure>;

    fn reduce(&mut self, data: Region, root: usize, reduction: Reduction) -> Result<(), Failure>;

    fn all_gather(&mut self, output: Region, input: Region, element: Element) -> Result<(), Failure>;

    fn reduce_scatter(&mut self, output: Region, input: Region, reduction: Reduction) -> Result<(), Failure>;

    fn all_to_all(&mut self, output: Region, input: Region) -> Result<(), Failure>;

    /// `output` is given only on the root.
    fn gather(&mut self, output: Option<Region>, input: Region, root: usize) -> Result<(), Failure>;

    /// `input` is given only on the root.
    fn scatter(&mut self, output: Region, input: Option<Region>, root: usize) -> Result<(), Failure>;

    fn send(&mut self, data: Region, peer: usize) -> Result<(), Failure>;

    fn recv(&mut self, data: Region, peer: usize) -> Result<(), Failure>;

    /// Returns once all ranks have made the call.
    fn barrier(&mut self) -> Result<(), Failure>;
}

/// Runs the call of `session`, whose tensors are those of `collective`, over the data path of `by`.
pub(crate) fn dispatch(session: Session, collective: &Collective, by: &mut dyn ByteCollectives) -> Result<(), Failure> {
    let Call { element: Some(element), .. } = session.header.call else { return by.barrier() };
    let ranks = session.world_size();
    let reduction = |op: &_| Reduction { element, op: *op, ranks };
    let locking = session.locking();
    let region = |tensor| Region::of(tensor, locking);
    match collective {
        Collective::AllReduce { tensor, op } => by.all_reduce(region(tensor), reduction(op)),
        Collective::Broadcast { tensor, root } => by.broadcast(region(tensor), *root, element),
        Collective::Reduce { tensor, op, root } => by.reduce(region(tensor), *root, reduction(op)),
        Collective::AllGather { output, input } => by.all_gather(region(output), region(input), element),
        Collective::ReduceScatter { output, input, op } => {
            by.reduce_scatter(region(output), region(input), reduction(op))
        }
        Collective::AllToAll { output, input } => by.all_to_all(region(output), region(input)),
        Collective::Gather { output, input, root } => by.gather(output.as_ref().map(region), region(input), *root),
        Collective::Scatter { output, input, root } => by.scatter(region(output), input.as_ref().map(region), *root),
        Collective::Send { tensor, peer } => by.send(region(tensor), *peer),
        Collective::Recv { tensor, peer } => by.recv(region(tensor), *peer),
        Collective::Barrier => by.barrier(),
    }
}
