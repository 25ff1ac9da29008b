//! One running call: everything its algorithm needs to know, however the data travels.
use crate::arrival::Arrival;
use crate::call::{Channel, Header};
use crate::error::Failure;
use crate::group::Group;
use crate::hosts::Hosts;
use crate::memory::Locking;
use crate::operation::Operation;
use crate::transport_error::TransportError;
use std::time::Instant;

/// A call, from its first byte to its last.
#[derive(Clone, Copy)]
pub(crate) struct Session<'a> {
    pub(crate) group: &'a Group,
    pub(crate) channel: Channel,
    pub(crate) header: Header,
    pub(crate) deadline: Instant,
    pub(crate) arrival: &'a Arrival,
}

impl<'a> Session<'a> {
    pub(crate) fn rank(&self) -> usize {
        self.group.rank
    }

    pub(crate) fn world_size(&self) -> usize {
        self.group.world_size
    }

    pub(crate) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        self.group.peers()
    }

    pub(crate) fn hosts(&self) -> &'a Hosts {
        &self.group.hosts
    }

    /// The header before the data that this rank sends.
    pub(crate) fn outgoing_head(&self) -> [u8; Header::BYTES] {
        self.header.encode()
    }

    /// The header expected before incoming data.
    pub(crate) fn incoming_head(&self) -> [u8; Header::BYTES] {
        let mut incoming = self.header;
        if incoming.call.operation == Operation::Recv {
            incoming.call.operation = Operation::Send;
        }
        incoming.encode()
    }

    /// How long this call waits for the locks of its tensors.
    pub(crate) fn locking(&self) -> Locking<'a> {
        Locking { waits: &self.group.locks, deadline: self.deadline }
    }

    /// Passes on the result of moving bytes of a tensor on this rank; an error ends the group.
    pub(crate) fn move_bytes(&self, result: Result<(), TransportError>) -> Result<(), Failure> {
        result.map_err(|error| self.failure(error))
    }
}
