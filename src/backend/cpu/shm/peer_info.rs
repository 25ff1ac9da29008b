//! What a rank tells the others about itself and its memory.
use candle_ddp_rendezvous::wire::{Reader, Writer};

/// One rank's info.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::backend::cpu) struct PeerInfo {
    /// The boot id of the running kernel, which is equal on ranks that share memory.
    pub(super) kernel: [u8; 16],
    /// `None` if this rank has no memory to offer, or uses TCP.
    pub(super) offer: Option<SegmentInfo>,
}

/// Memory that peers may map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SegmentInfo {
    pub(super) pid: u32,
    pub(super) fd: u32,
    /// A random part of the memory's name: a file with that name under the process and the descriptor is this very
    /// memory.
    pub(super) token: u128,
}

impl SegmentInfo {
    /// The name of the memory.
    pub(super) fn name(&self) -> String {
        name(self.token)
    }
}

pub(super) fn name(token: u128) -> String {
    format!("candle-ddp-{token:032x}")
}

impl PeerInfo {
    pub(super) const BYTES: usize = 16 + 1 + 4 + 4 + 16;

    pub(in crate::backend::cpu) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.bytes(&self.kernel);
        if let Some(SegmentInfo { pid, fd, token }) = &self.offer {
            writer.u8(1).u32(*pid).u32(*fd).bytes(&token.to_le_bytes());
        }
        writer.0.resize(Self::BYTES, 0);
        writer.0
    }

    pub(in crate::backend::cpu) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let kernel = reader.array()?;
        let offer = match reader.u8()? {
            0 => None,
            _ => {
                Some(SegmentInfo { pid: reader.u32()?, fd: reader.u32()?, token: u128::from_le_bytes(reader.array()?) })
            }
        };
        Some(Self { kernel, offer })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_infos_can_be_encoded_and_decoded() {
        let offer = SegmentInfo { pid: 7, fd: 8, token: 1 << 100 };
        for offer in [None, Some(offer)] {
            let info = PeerInfo { kernel: [3; 16], offer };
            let bytes = info.encode();
            assert_eq!((bytes.len(), PeerInfo::decode(&bytes)), (PeerInfo::BYTES, Some(info)));
        }
        assert_eq!(PeerInfo::decode(&[1; 20]), None);
    }
}
