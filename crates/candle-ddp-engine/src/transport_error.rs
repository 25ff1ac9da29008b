use crate::call::Header;

/// The reason why data could not be sent to or received from a peer.
#[derive(Debug)]
pub(crate) enum TransportError {
    /// The deadline has passed while waiting for these peers.
    TimedOut { peers: Vec<usize> },
    /// The connection to a peer is closed.
    Closed { peer: usize, reason: String },
    /// A peer sent a different header than expected: it is in another call.
    Header { peer: usize, received: [u8; Header::BYTES] },
    /// The storage of a tensor was locked until the deadline, or until the group ended.
    Locked,
    /// An error of the system.
    System(String),
}
