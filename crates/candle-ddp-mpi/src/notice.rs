//! Messages between the engines of a group besides the program's data: how many calls a rank had made when it left, or
//! why the group has failed.
use crate::comm::Notices;
use candle_ddp::Failure;

/// A notice to one other rank.
#[derive(Debug, PartialEq)]
pub(crate) enum Notice {
    /// The sender leaves after so many collectives, messages to the receiver, and messages from the receiver.
    Left([u64; 3]),
    /// The group has failed.
    Failed(Failure),
}

impl Notice {
    pub(crate) fn encode(&self) -> Box<[u8]> {
        match self {
            Self::Left(counts) => counts.iter().flat_map(|count| count.to_le_bytes()).collect(),
            Self::Failed(failure) => {
                // JSON, which begins with a brace. Failures cut their texts.
                let mut bytes = serde_json::to_vec(failure).unwrap_or_default();
                bytes.truncate(Notices::LONGEST);
                bytes.into()
            }
        }
    }

    /// The notice that rank `peer` sent.
    pub(crate) fn decode(peer: usize, bytes: &[u8]) -> Self {
        if let (24, ([first, second, third], [])) = (bytes.len(), bytes.as_chunks()) {
            return Self::Left([first, second, third].map(|count| u64::from_le_bytes(*count)));
        }
        let unclear = || Failure::PeerFailed { peer, reason: "its reason could not be read".to_string() };
        Self::Failed(serde_json::from_slice(bytes).unwrap_or_else(|_| unclear()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_can_be_encoded_and_decoded() {
        let failure = Failure::PeerFailed { peer: 1, reason: "no data".to_string() };
        for notice in [Notice::Left([1, 1 << 40, 3]), Notice::Failed(failure)] {
            assert_eq!(Notice::decode(1, &notice.encode()), notice);
        }
        let Notice::Failed(failure) = Notice::decode(2, b"{") else { panic!() };
        assert_eq!(failure.to_string(), "rank 2 ended the group: its reason could not be read");
    }
}
