//! What monitors tell each other on the control connections.
use crate::backend::call::Call;
use crate::backend::wire::{Reader, Writer};
use crate::error::Failure;

/// One message on a control connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// I leave in good order.
    Goodbye(ShutdownNotice),
    /// The group is over, for this reason.
    Abort(Failure),
    /// I have read your goodbye, or your abort.
    Ack,
    /// Where are you, and what did you call at `sequence`?
    Query { id: u64, sequence: u64 },
    /// The reply to the query of the same `id`.
    Answer { id: u64, answer: Answer },
}

/// How far a rank that leaves has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ShutdownNotice {
    /// Its last collective.
    pub(super) last: u64,
    /// How many messages it has sent to the reader, point to point.
    pub(super) sent: u64,
    /// How many it has received from the reader.
    pub(super) received: u64,
}

/// Where a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// The collective that it is in, or its last one.
    pub(super) current: u64,
    /// What that was; `None` before the first.
    pub(super) current_call: Option<Call>,
    /// What it called at the sequence number in question, if it has come so far and still knows.
    pub(super) asked_call: Option<Call>,
    /// It is held up by the lock of a tensor's storage.
    pub(super) waits_for_lock: bool,
}

impl Frame {
    /// The frame with its length in front.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.u32(0);
        match self {
            Self::Goodbye(ShutdownNotice { last, sent, received }) => {
                writer.u8(0).u64(*last).u64(*sent).u64(*received);
            }
            Self::Abort(failure) => failure.encode(writer.u8(1)),
            Self::Ack => {
                writer.u8(2);
            }
            Self::Query { id, sequence } => {
                writer.u8(3).u64(*id).u64(*sequence);
            }
            Self::Answer { id, answer } => {
                writer.u8(4).u64(*id).u64(answer.current);
                for call in [answer.current_call, answer.asked_call] {
                    match call {
                        Some(call) => call.encode(writer.u8(1)),
                        None => {
                            writer.u8(0);
                        }
                    }
                }
                writer.u8(u8::from(answer.waits_for_lock));
            }
        }
        let mut bytes = writer.0;
        let length = (bytes.len() - 4) as u32;
        bytes[..4].copy_from_slice(&length.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        fn optional_call(reader: &mut Reader) -> Option<Option<Call>> {
            if reader.u8()? == 0 { Some(None) } else { Call::decode(reader).map(Some) }
        }
        let mut reader = Reader(bytes);
        Some(match reader.u8()? {
            0 => Self::Goodbye(ShutdownNotice { last: reader.u64()?, sent: reader.u64()?, received: reader.u64()? }),
            1 => Self::Abort(Failure::decode(&mut reader)?),
            2 => Self::Ack,
            3 => Self::Query { id: reader.u64()?, sequence: reader.u64()? },
            4 => Self::Answer {
                id: reader.u64()?,
                answer: Answer {
                    current: reader.u64()?,
                    current_call: optional_call(&mut reader)?,
                    asked_call: optional_call(&mut reader)?,
                    waits_for_lock: reader.u8()? != 0,
                },
            },
            _ => return None,
        })
    }
}

/// Cuts the bytes of a control connection into frames.
#[derive(Default)]
pub(super) struct FrameReader {
    buffer: Vec<u8>,
}

/// A peer sent what is no frame.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Malformed;

impl FrameReader {
    /// A frame is a few texts of limited length.
    const LIMIT: usize = 256 * 1024;

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next complete frame.
    pub(super) fn next(&mut self) -> Result<Option<Frame>, Malformed> {
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
    use crate::backend::call::Operation;
    use proptest::prelude::*;

    #[test]
    fn frames_survive_their_journey_in_any_pieces() {
        let call = Call::bare(Operation::Barrier);
        let frames = [
            Frame::Goodbye(ShutdownNotice { last: 7, sent: 8, received: 9 }),
            Frame::Abort(Failure::PeerFailed { peer: 1, reason: "out of memory".into() }),
            Frame::Ack,
            Frame::Query { id: 3, sequence: 4 },
            Frame::Answer {
                id: 3,
                answer: Answer { current: 5, current_call: Some(call), asked_call: None, waits_for_lock: true },
            },
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

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), length in 0_u32..64) {
            let mut reader = FrameReader::default();
            reader.push(&length.to_le_bytes());
            reader.push(&bytes);
            while let Ok(Some(_)) = reader.next() {}
        }
    }
}
