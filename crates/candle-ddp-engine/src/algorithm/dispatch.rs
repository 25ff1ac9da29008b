//! Turns a call and its operands into an operation of a data path.
use crate::call::{Call, Channel, Element};
use crate::error::Failure;
use crate::memory::Region;
use crate::operands::Operands;
use crate::operation::Operation;
use crate::reduction::Reduction;
use crate::session::Session;
use crate::transport_error::TransportError;

/// The collectives over one data path, on the bytes of tensors. Arguments and results are those of the [`Operation`]s.
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

/// Runs the call of `session` on `operands` over the data path of `by`.
pub(crate) fn dispatch(session: Session, operands: Operands, by: &mut dyn ByteCollectives) -> Result<(), Failure> {
    let Call { operation, element: Some(element), reduction, root, .. } = session.header.call else {
        return by.barrier();
    };
    let (ranks, locking) = (session.world_size(), session.locking());
    if let Err(reason) = operands.check(&session.header.call, session.rank(), ranks) {
        return Err(session.failure(TransportError::System(format!("{}: {reason}", session.header.call))));
    }
    let [output, input] = [operands.output, operands.input].map(|slice| slice.map(|slice| slice.region(locking)));
    let reduction = reduction.map(|op| Reduction { element, op, ranks });
    match (operation, output, input, reduction, root, session.channel) {
        (Operation::AllReduce, Some(data), _, Some(reduction), ..) => by.all_reduce(data, reduction),
        (Operation::Broadcast, Some(data), _, _, Some(root), _) => by.broadcast(data, root, element),
        (Operation::Reduce, Some(data), _, Some(reduction), Some(root), _) => by.reduce(data, root, reduction),
        (Operation::AllGather, Some(output), Some(input), ..) => by.all_gather(output, input, element),
        (Operation::ReduceScatter, Some(output), Some(input), Some(reduction), ..) => {
            by.reduce_scatter(output, input, reduction)
        }
        (Operation::AllToAll, Some(output), Some(input), ..) => by.all_to_all(output, input),
        (Operation::Gather, output, Some(input), _, Some(root), _) => by.gather(output, input, root),
        (Operation::Scatter, Some(output), input, _, Some(root), _) => by.scatter(output, input, root),
        (Operation::Send, _, Some(data), _, _, Channel::SendTo(peer)) => by.send(data, peer),
        (Operation::Recv, Some(data), _, _, _, Channel::RecvFrom(peer)) => by.recv(data, peer),
        _ => Err(session.failure(TransportError::System(format!("{operation:?} lacks an operand or an argument")))),
    }
}
