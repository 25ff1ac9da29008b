use crate::backend::call::Header;

/// Why data did not get to or from a peer.
#[derive(Debug)]
pub(super) enum TransportError {
    /// The deadline has passed; these peers are being waited for.
    TimedOut { peers: Vec<usize> },
    /// The connection to a peer is closed.
    Closed { peer: usize, reason: String },
    /// A peer sent another header than expected: it is in another call.
    Header { peer: usize, received: [u8; Header::BYTES] },
    /// The storage of a tensor was locked until the deadline, or until the group ended.
    Locked,
    /// The system refused to wait.
    System(String),
}
