//! The first bytes on every connection, in both directions: who is there, and whether the two sides fit together.
use crate::backend::wire::{Reader, Writer};

/// What a connection is for. The discriminants are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Collectives.
    Data,
    /// `send` and `recv`.
    Direct,
    /// The monitors.
    Control,
}

impl Kind {
    pub(super) const ALL: [Self; 3] = [Self::Data, Self::Direct, Self::Control];
}

/// The identity of a rank on one of its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handshake {
    /// Drawn by rank 0 and read from the store: whoever knows it belongs to the group.
    pub(super) nonce: u64,
    pub(super) rank: usize,
    pub(super) kind: Kind,
    /// What must be the same on all ranks.
    pub(super) config: HandshakeConfig,
}

/// What must be the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HandshakeConfig {
    pub(super) world_size: usize,
    /// The options of the same names; `u64::MAX` where they are left to the engine.
    pub(super) segment: u64,
    pub(super) small: u64,
}

/// Bytes of another version of the protocol, or of something else.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum HandshakeError {
    Unknown,
    Version(u32),
}

impl Handshake {
    pub(super) const BYTES: usize = 48;
    const MAGIC: [u8; 4] = *b"cDDP";
    /// To be increased with every change to what is sent on any of the connections.
    const VERSION: u32 = 5;

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let mut writer = Writer::default();
        writer.bytes(&Self::MAGIC).u32(Self::VERSION).u64(self.nonce);
        writer.u32(self.rank as u32).u32(self.kind as u32).u64(self.config.world_size as u64);
        writer.u64(self.config.segment).u64(self.config.small);
        let mut bytes = [0; Self::BYTES];
        bytes.copy_from_slice(&writer.0);
        bytes
    }

    pub(super) fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, HandshakeError> {
        let mut reader = Reader(bytes);
        if reader.array() != Some(Self::MAGIC) {
            return Err(HandshakeError::Unknown);
        }
        match reader.u32() {
            Some(Self::VERSION) => {}
            Some(version) => return Err(HandshakeError::Version(version)),
            None => return Err(HandshakeError::Unknown),
        }
        let mut fields = || {
            let (nonce, rank, kind) = (reader.u64()?, reader.rank()?, *Kind::ALL.get(reader.rank()?)?);
            let world_size = usize::try_from(reader.u64()?).ok()?;
            let config = HandshakeConfig { world_size, segment: reader.u64()?, small: reader.u64()? };
            Some(Self { nonce, rank, kind, config })
        };
        fields().ok_or(HandshakeError::Unknown)
    }
}

impl HandshakeError {
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Unknown => "it is not a candle-ddp engine".into(),
            Self::Version(version) => format!(
                "it speaks version {version} of the engine's protocol, this rank version {}: run the same candle-ddp on \
                 all ranks",
                Handshake::VERSION
            ),
        }
    }
}

impl HandshakeConfig {
    /// The first difference, in words.
    pub(super) fn difference(&self, other: &Self) -> Option<String> {
        let fields = [
            ("world_size", self.world_size as u64, other.world_size as u64),
            ("segment_bytes", self.segment, other.segment),
            ("small_bytes", self.small, other.small),
        ];
        let (name, theirs, ours) = fields.into_iter().find(|(_, theirs, ours)| theirs != ours)?;
        let text = |value: u64| if value == u64::MAX { "the default".to_string() } else { value.to_string() };
        Some(format!("its {name} is {}, this rank's {}: all ranks must use the same", text(theirs), text(ours)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_handshake_can_be_encoded_and_decoded() {
        for (number, kind) in Kind::ALL.into_iter().enumerate() {
            let handshake = Handshake {
                nonce: 1 << 60,
                rank: 3,
                kind,
                config: HandshakeConfig { world_size: 5, segment: 6, small: 7 },
            };
            assert_eq!((kind as usize, Handshake::decode(&handshake.encode())), (number, Ok(handshake)));
            let mut newer = handshake.encode();
            newer[4] += 1;
            assert_eq!(Handshake::decode(&newer), Err(HandshakeError::Version(Handshake::VERSION + 1)));
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in prop::array::uniform32(any::<u8>())) {
            let mut handshake = [0; Handshake::BYTES];
            handshake[..32].copy_from_slice(&bytes);
            let _ = Handshake::decode(&handshake);
            handshake[..4].copy_from_slice(&Handshake::MAGIC);
            handshake[4..8].copy_from_slice(&Handshake::VERSION.to_le_bytes());
            let _ = Handshake::decode(&handshake);
        }
    }
}
