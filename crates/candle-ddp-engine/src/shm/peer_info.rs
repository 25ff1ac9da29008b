//! A rank's report to the others about itself and its memory.
use candle_ddp_base::wire::{Reader, Writer};
use std::collections::HashMap;

/// One rank's info.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerInfo {
    /// The host's identity.
    pub(super) kernel: [u8; 16],
    /// The namespaces and the user, which must also be equal if ranks are to open each other's files.
    pub(super) room: u64,
    /// Whether this rank shares memory; otherwise it uses TCP.
    pub(super) shares: bool,
}

/// The memory of a host, which its ranks map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MemoryInfo {
    pub(super) pid: u32,
    pub(super) fd: u32,
    /// A random part of the memory's name: a file with that name under the process and the descriptor is this very
    /// memory.
    pub(super) token: u128,
}

impl MemoryInfo {
    /// The name of the memory.
    pub(super) fn name(&self) -> String {
        name(self.token)
    }

    /// No text begins with this byte.
    const MARK: u8 = 1;

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.u8(Self::MARK).u32(self.pid).u32(self.fd).bytes(&self.token.to_le_bytes());
        writer.0
    }

    /// The memory, or `None` if these bytes are a text: why there is none.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        reader.u8().filter(|mark| *mark == Self::MARK)?;
        Some(Self { pid: reader.u32()?, fd: reader.u32()?, token: u128::from_le_bytes(reader.array()?) })
    }
}

pub(super) fn name(token: u128) -> String {
    format!("candle-ddp-{token:032x}")
}

impl PeerInfo {
    pub(crate) const BYTES: usize = 16 + 8 + 1;

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.bytes(&self.kernel).u64(self.room).u8(self.shares.into());
        writer.0
    }

    /// All ranks' infos in a few bytes for each: numbers take the place of kernels and rooms.
    pub(crate) fn encode_all(infos: &[Self]) -> Vec<u8> {
        let (mut kernels, mut rooms, mut writer) = (HashMap::new(), HashMap::new(), Writer::default());
        let number = |numbers: &mut HashMap<([u8; 16], u64), u32>, key| {
            let next = numbers.len() as u32;
            *numbers.entry(key).or_insert(next)
        };
        writer.u8(0);
        for info in infos {
            writer.u32(number(&mut kernels, (info.kernel, 0))).u32(number(&mut rooms, (info.kernel, info.room)));
            writer.u8(info.shares.into());
        }
        writer.0
    }

    /// The infos in which only equality counts. Ranks that are missing share nothing.
    pub(crate) fn decode_all(bytes: &[u8], world_size: usize) -> Vec<Self> {
        let mut reader = Reader(bytes.get(1..).unwrap_or_default());
        let mut next = || {
            let (kernel, room) = (reader.u32()?, reader.u32()?);
            Some(Self { kernel: u128::from(kernel).to_le_bytes(), room: room.into(), shares: reader.u8()? != 0 })
        };
        (0..world_size).map(|_| next().unwrap_or(Self { kernel: [0; 16], room: 0, shares: false })).collect()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        Some(Self { kernel: reader.array()?, room: reader.u64()?, shares: reader.u8()? != 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infos_can_be_encoded_and_decoded() {
        for shares in [false, true] {
            let info = PeerInfo { kernel: [3; 16], room: 1 << 60, shares };
            let bytes = info.encode();
            assert_eq!((bytes.len(), PeerInfo::decode(&bytes)), (PeerInfo::BYTES, Some(info)));
        }
        assert_eq!(PeerInfo::decode(&[1; 20]), None);
        let info = |kernel: u8, room, shares| PeerInfo { kernel: [kernel; 16], room, shares };
        let infos = [info(7, 1, true), info(8, 1, true), info(7, 1, false), info(7, 2, true)];
        let bytes = PeerInfo::encode_all(&infos);
        let mut decoded = PeerInfo::decode_all(&bytes, 5);
        assert_eq!((bytes.len(), decoded.pop().unwrap().shares), (1 + 4 * 9, false));
        for (index, one) in infos.iter().enumerate() {
            let same = |infos: &[PeerInfo]| {
                let one = &infos[index];
                infos.iter().map(|info| (info.kernel == one.kernel, info.room == one.room)).collect::<Vec<_>>()
            };
            // Rooms are on one kernel.
            let expected = same(&infos).into_iter().map(|(kernel, room)| (kernel, kernel && room)).collect::<Vec<_>>();
            assert_eq!((same(&decoded), decoded[index].shares), (expected, one.shares));
        }
        let memory = MemoryInfo { pid: 7, fd: 8, token: 1 << 100 };
        assert_eq!(MemoryInfo::decode(&memory.encode()), Some(memory));
        assert_eq!(MemoryInfo::decode(&[1; 20]), None);
        assert_eq!(MemoryInfo::decode(b"cannot create shared memory: too much of it"), None);
    }
}
