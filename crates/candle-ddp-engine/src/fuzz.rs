//! Feeds the CPU engine arbitrary bytes on its connections; run by the targets in `fuzz/`.
use crate::call::Header;
use crate::shm::PeerInfo;
use crate::tcp::frame::{Frame, FrameReader, Malformed};
use crate::tcp::handshake::Handshake;

/// The first byte selects what the others are.
pub fn mesh(data: &[u8]) {
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// The seeds that the fuzzer starts from, and the inputs that it has found since.
    #[test]
    fn no_seed_fails() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds/mesh");
        let files: Vec<_> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(!files.is_empty(), "{} is empty", folder.display());
        for file in files {
            println!("{}", file.display());
            super::mesh(&std::fs::read(&file).unwrap());
        }
    }
}
