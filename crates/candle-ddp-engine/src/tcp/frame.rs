//! The messages of monitors on the control connections.
use crate::error::Failure;
use crate::failure::CallCounts;
use crate::gone::Fate;
use crate::question::Question;
use crate::tcp::handshake::Kind;
use candle_ddp_base::wire::{Reader, Writer};
use candle_ddp_rendezvous::json::encode;

/// One message on a control connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    /// The sender leaves in good order, after this many calls.
    Goodbye(CallCounts),
    /// The group has failed for this reason.
    Abort(Failure),
    /// The sender has read the reader's goodbye or abort.
    Ack,
    /// Asks the reader.
    Query { id: u64, question: Question },
    /// The reply to the query of the same `id`: the report of `rank`, the sender or another rank of its host.
    Answer { id: u64, rank: usize, report: Vec<u8> },
    /// Asks the reader, a higher rank, to make a connection of this kind.
    Call { kind: Kind },
    /// Another rank of the sender's host has left or ended.
    News { rank: usize, fate: Fate },
}

impl Frame {
    /// Encodes the frame with its length in front.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.u32(0);
        match self {
            Self::Goodbye(counts) => counts.encode(writer.u8(0)),
            Self::Abort(failure) => {
                writer.u8(1).bytes(&encode(failure));
            }
            Self::Ack => {
                writer.u8(2);
            }
            Self::Query { id, question } => {
                writer.u8(3).u64(*id).u8(*question as u8);
            }
            Self::Answer { id, rank, report } => {
                writer.u8(4).u64(*id).u32(*rank as u32).bytes(report);
            }
            Self::Call { kind } => {
                writer.u8(5).u8(*kind as u8);
            }
            Self::News { rank, fate } => {
                let (number, last) = fate.encode();
                writer.u8(6).u32(*rank as u32).u8(number).u64(last);
            }
        }
        let mut bytes = writer.0;
        let length = (bytes.len() - 4) as u32;
        bytes[..4].copy_from_slice(&length.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        Some(match reader.u8()? {
            0 => Self::Goodbye(CallCounts::decode(&mut reader)?),
            1 => Self::Abort(serde_json::from_slice(reader.0).ok()?),
            2 => Self::Ack,
            3 => Self::Query { id: reader.u64()?, question: *Question::ALL.get(usize::from(reader.u8()?))? },
            4 => Self::Answer { id: reader.u64()?, rank: reader.rank()?, report: reader.0.to_vec() },
            5 => Self::Call { kind: *Kind::ALL.get(usize::from(reader.u8()?))? },
            6 => Self::News { rank: reader.rank()?, fate: Fate::decode(reader.u8()?, reader.u64()?)? },
            _ => return None,
        })
    }
}

/// Splits the bytes of a control connection into frames.
#[derive(Default)]
pub(crate) struct FrameReader {
    buffer: Vec<u8>,
}

/// A peer sent bytes that are not a frame.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Malformed;

impl FrameReader {
    /// Larger than the texts and calls of any frame, whose sizes are limited.
    const LIMIT: usize = 256 * 1024;

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next complete frame.
    pub(crate) fn next(&mut self) -> Result<Option<Frame>, Malformed> {
        let Some((length, rest)) = self.buffer.split_first_chunk() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > Self::LIMIT {
            return Err(Malformed);
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let frame = Frame::decode(body).ok_or(Malformed)?;
        self.buffer.drain(..4 + length);
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_ddp_testing::Random;

    #[test]
    fn frames_arrive_in_any_pieces() {
        let frames = [
            Frame::Goodbye(CallCounts { collectives: 7, sent: 8, received: 9 }),
            Frame::Abort(Failure::PeerFailed { peer: 1, reason: "out of memory".into() }),
            Frame::Ack,
            Frame::Query { id: 3, question: Question::Standing },
            Frame::Answer { id: 3, rank: 6, report: vec![1, 2, 3] },
            Frame::Call { kind: Kind::Direct },
            Frame::News { rank: 5, fate: Fate::Left(1 << 40) },
            Frame::News { rank: 6, fate: Fate::Gone(Some(9)) },
            Frame::News { rank: 7, fate: Fate::Gone(None) },
        ];
        let bytes: Vec<u8> = frames.iter().flat_map(Frame::encode).collect();
        for piece in [1, 3, bytes.len()] {
            let (mut reader, mut read) = (FrameReader::default(), vec![]);
            for part in bytes.chunks(piece) {
                reader.push(part);
                while let Some(frame) = reader.next().unwrap() {
                    read.push(frame);
                }
            }
            assert_eq!(read, frames);
        }
    }

    #[test]
    fn no_bytes_make_the_reader_panic() {
        let mut random = Random(2);
        // Miri is a thousand times slower.
        for _ in 0..if cfg!(miri) { 4 } else { 1000 } {
            let (length, count) = (random.below(64) as u32, random.below(200) as usize);
            let mut reader = FrameReader::default();
            reader.push(&length.to_le_bytes());
            reader.push(&random.bytes(count));
            while let Ok(Some(_)) = reader.next() {}
        }
    }
}
