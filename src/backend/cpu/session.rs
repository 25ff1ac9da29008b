//! One running call: everything its algorithm needs to know, however the data travels.
use super::group::Group;
use super::hosts::Hosts;
use super::storage::Locking;
use super::transport_error::TransportError;
use crate::backend::call::{Channel, Header, Operation};
use crate::error::Failure;
use std::time::Instant;

/// A call, from its first byte to its last.
#[derive(Clone, Copy)]
pub(super) struct Session<'a> {
    pub(super) group: &'a Group,
    pub(super) channel: Channel,
    pub(super) header: Header,
    pub(super) deadline: Instant,
}

impl<'a> Session<'a> {
    pub(super) fn rank(&self) -> usize {
        self.group.rank
    }

    pub(super) fn world_size(&self) -> usize {
        self.group.world_size
    }

    pub(super) fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        self.group.peers()
    }

    pub(super) fn hosts(&self) -> &'a Hosts {
        &self.group.hosts
    }

    /// The header before the data that this rank sends.
    pub(super) fn outgoing_head(&self) -> [u8; Header::BYTES] {
        self.header.encode()
    }

    /// The header expected before incoming data.
    pub(super) fn incoming_head(&self) -> [u8; Header::BYTES] {
        let mut incoming = self.header;
        if incoming.call.operation == Operation::Recv {
            incoming.call.operation = Operation::Send;
        }
        incoming.encode()
    }

    /// How long this call waits for the locks of its tensors.
    pub(super) fn locking(&self) -> Locking<'a> {
        Locking { waits: &self.group.locks, deadline: self.deadline }
    }

    /// Passes on the result of moving bytes of a tensor on this rank; an error ends the group.
    pub(super) fn move_bytes(&self, result: Result<(), TransportError>) -> Result<(), Failure> {
        result.map_err(|error| self.failure(error))
    }
}
