//! Feeds the CPU engine arbitrary bytes on its connections; run by `crate::fuzzing`.
use super::frame::{Frame, FrameReader, Malformed};
use super::handshake::Handshake;
use super::shm::PeerInfo;
use crate::backend::call::Header;

/// The first byte selects what the others are.
pub(crate) fn mesh(data: &[u8]) {
    let Some((kind, bytes)) = data.split_first() else { return };
    match kind % 4 {
        0 => frames(bytes),
        1 => {
            if let Ok(handshake) = Handshake::decode(&padded::<{ Handshake::BYTES }>(bytes)) {
                assert_eq!(Handshake::decode(&handshake.encode()), Ok(handshake));
            }
        }
        2 => {
            if let Some(header) = Header::decode(&padded(bytes)) {
                assert_eq!(Header::decode(&header.encode()), Some(header));
                // As for messages.
                assert!(!header.call.to_string().is_empty());
                assert_eq!(header.call.describe_both(&header.call).0, header.call.describe_both(&header.call).1);
            }
        }
        _ => {
            if let Some(info) = PeerInfo::decode(bytes) {
                assert_eq!(PeerInfo::decode(&info.encode()), Some(info));
            }
        }
    }
}

/// `bytes`, or zeros where there are none.
fn padded<const N: usize>(bytes: &[u8]) -> [u8; N] {
    std::array::from_fn(|index| bytes.get(index).copied().unwrap_or(0))
}

/// The first byte gives the size of the pieces in which the others arrive.
fn frames(data: &[u8]) {
    let Some((piece, bytes)) = data.split_first() else { return };
    let whole = read(std::iter::once(bytes));
    assert_eq!(read(bytes.chunks(usize::from(*piece).max(1))), whole, "it depends on how bytes are split");
    for frame in whole.0 {
        let encoded = frame.encode();
        let (again, end) = read(std::iter::once(&encoded[..]));
        assert_eq!((again.len(), &end), (1, &Ok(())), "{frame:?} is encoded as something else");
        // Longer texts than a rank sends are cut off.
        if encoded.len() < 1 << 12 {
            assert_eq!(again, [frame]);
        }
    }
}

fn read<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> (Vec<Frame>, Result<(), Malformed>) {
    let (mut reader, mut frames) = (FrameReader::default(), Vec::new());
    for piece in pieces {
        reader.push(piece);
        loop {
            match reader.next() {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => return (frames, Err(error)),
            }
        }
    }
    (frames, Ok(()))
}
