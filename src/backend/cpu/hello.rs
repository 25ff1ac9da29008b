//! The first words on every connection, in both directions: who is there, and whether the two sides fit together.
use super::wire::{Reader, Writer};

/// What a connection is for. The discriminants travel.
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

/// Who is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// Drawn by rank 0 and learnt from the store: who knows it belongs to the group.
    pub(super) nonce: u64,
    pub(super) rank: usize,
    pub(super) kind: Kind,
    /// What must be the same on all ranks.
    pub(super) terms: Terms,
}

/// What must be the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Terms {
    pub(super) world_size: usize,
    /// The options of the same names; `u64::MAX` where they are left to the engine.
    pub(super) segment: u64,
    pub(super) small: u64,
}

/// Bytes that open with another version of the protocol, or are none of ours.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stranger {
    Unknown,
    Version(u32),
}

impl Hello {
    pub(super) const BYTES: usize = 48;
    const MAGIC: [u8; 4] = *b"cDDP";
    /// To be raised with every change of what travels on any of the connections.
    const VERSION: u32 = 3;

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let mut writer = Writer::default();
        writer.bytes(&Self::MAGIC).u32(Self::VERSION).u64(self.nonce);
        writer.u32(self.rank as u32).u32(self.kind as u32).u64(self.terms.world_size as u64);
        writer.u64(self.terms.segment).u64(self.terms.small);
        let mut bytes = [0; Self::BYTES];
        bytes.copy_from_slice(&writer.0);
        bytes
    }

    pub(super) fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, Stranger> {
        let mut reader = Reader(bytes);
        if reader.array() != Some(Self::MAGIC) {
            return Err(Stranger::Unknown);
        }
        match reader.u32() {
            Some(Self::VERSION) => {}
            Some(version) => return Err(Stranger::Version(version)),
            None => return Err(Stranger::Unknown),
        }
        let mut fields = || {
            let (nonce, rank, kind) = (reader.u64()?, reader.rank()?, *Kind::ALL.get(reader.rank()?)?);
            let world_size = usize::try_from(reader.u64()?).ok()?;
            let terms = Terms { world_size, segment: reader.u64()?, small: reader.u64()? };
            Some(Self { nonce, rank, kind, terms })
        };
        fields().ok_or(Stranger::Unknown)
    }
}

impl Stranger {
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Unknown => "it is not a candle-ddp engine".into(),
            Self::Version(version) => format!(
                "it speaks version {version} of the engine's protocol, this rank version {}: run the same candle-ddp on \
                 all ranks",
                Hello::VERSION
            ),
        }
    }
}

impl Terms {
    /// What differs, if anything.
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
    fn a_hello_survives_its_journey() {
        for (number, kind) in Kind::ALL.into_iter().enumerate() {
            let hello = Hello { nonce: 1 << 60, rank: 3, kind, terms: Terms { world_size: 5, segment: 6, small: 7 } };
            assert_eq!((kind as usize, Hello::decode(&hello.encode())), (number, Ok(hello)));
            let mut newer = hello.encode();
            newer[4] += 1;
            assert_eq!(Hello::decode(&newer), Err(Stranger::Version(4)));
        }
    }

    proptest! {
        #[test]
        fn strangers_do_not_make_it_panic(bytes in prop::array::uniform32(any::<u8>())) {
            let mut hello = [0; Hello::BYTES];
            hello[..32].copy_from_slice(&bytes);
            let _ = Hello::decode(&hello);
            hello[..8].copy_from_slice(b"cDDP\x03\0\0\0");
            let _ = Hello::decode(&hello);
        }
    }
}
