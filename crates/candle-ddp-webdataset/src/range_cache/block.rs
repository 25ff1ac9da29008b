//! Blocks on the disk. The file of a block says which block it is, and has a hash for each part of its bytes: whatever else is
//! found under its name is not a block. A reader knows all lengths beforehand, and takes none from the file.
use crate::FileVersion;
use candle_ddp_base::file::replace_unsynced;
use candle_ddp_base::hash::content_64;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// How the file of every block begins. The number is the version of the format.
const MARK: &str = "candle-ddp block 1 ";
/// The end of the name of every block.
pub(super) const SUFFIX: &str = ".ddp-block";
/// The number of bytes that share a hash: the fewest that are read at a time.
const CHUNK: usize = 8 << 10;

/// A block of a version of a file, which may or may not be kept.
pub(super) struct Block {
    path: PathBuf,
    /// How its file begins: whose block it is.
    owner: Vec<u8>,
    /// How many bytes of the file it has.
    len: usize,
}

impl Block {
    /// The block `number` of a file's blocks of `block_bytes`. It must begin within the file.
    pub(super) fn new(folder: &Path, location: &str, version: &FileVersion, block_bytes: u64, number: u64) -> Self {
        let FileVersion { len, tag } = version;
        // As Rust's literals, the texts end where they seem to.
        let owner = format!("{MARK}{location:?} {tag:?} {len} {block_bytes} {number}\n").into_bytes();
        let path = folder.join(format!("{:016x}{SUFFIX}", content_64(&owner)));
        let left = len.saturating_sub(number.saturating_mul(block_bytes));
        Self { path, owner, len: left.min(block_bytes) as usize }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The block, if it is kept.
    pub(super) fn open(&self) -> Result<KeptBlock, Miss> {
        let mut head = vec![0; self.owner.len() + 8 * (self.len.div_ceil(CHUNK) + 1)];
        let mut file = File::open(&self.path)?;
        file.read_exact(&mut head)?;
        if !head.starts_with(&self.owner) {
            return Err(Miss::Bad("belongs to another file, or is no block".to_string()));
        }
        let (content, hash) = head.split_at(head.len() - 8);
        if content_64(content).to_le_bytes() != hash {
            return Err(Miss::Bad("is damaged at its beginning".to_string()));
        }
        let (hashes, _) = content[self.owner.len()..].as_chunks::<8>();
        Ok(self.kept(hashes.iter().map(|hash| u64::from_le_bytes(*hash)).collect()))
    }

    /// Writes the block. Other processes see all of it, or nothing.
    pub(super) fn write(&self, bytes: &[u8]) -> io::Result<(KeptBlock, u64)> {
        let hashes: Vec<u64> = bytes.chunks(CHUNK).map(content_64).collect();
        let mut head = self.owner.clone();
        head.extend(hashes.iter().flat_map(|hash| hash.to_le_bytes()));
        head.extend(content_64(&head).to_le_bytes());
        // If the system fails before the bytes are on the disk, the hashes tell.
        replace_unsynced(&self.path, |file| {
            file.write_all(&head)?;
            file.write_all(bytes)
        })?;
        Ok((self.kept(hashes), (head.len() + bytes.len()) as u64))
    }

    fn kept(&self, hashes: Vec<u64>) -> KeptBlock {
        let begin = (self.owner.len() + 8 * (hashes.len() + 1)) as u64;
        KeptBlock { path: self.path.clone(), begin, len: self.len, hashes }
    }
}

/// A block whose hashes have been read.
pub(super) struct KeptBlock {
    path: PathBuf,
    /// The offset of its bytes in its file.
    begin: u64,
    len: usize,
    hashes: Vec<u64>,
}

impl KeptBlock {
    /// Adds the bytes `range` of the block to `target`, if they are what was written. The range must lie within the block.
    pub(super) fn read(&self, range: Range<usize>, target: &mut Vec<u8>) -> Result<(), Miss> {
        let chunks = range.start / CHUNK..range.end.div_ceil(CHUNK);
        let begin = chunks.start * CHUNK;
        let mut bytes = vec![0; (chunks.end * CHUNK).min(self.len) - begin];
        File::open(&self.path)?.read_exact_at(&mut bytes, self.begin + begin as u64)?;
        for (number, (chunk, hash)) in chunks.clone().zip(bytes.chunks(CHUNK).zip(&self.hashes[chunks])) {
            if content_64(chunk) != *hash {
                return Err(Miss::Bad(format!("is damaged at byte {} of the block", number * CHUNK)));
            }
        }
        target.extend_from_slice(&bytes[range.start - begin..range.end - begin]);
        Ok(())
    }
}

/// The reason why a block cannot be read.
#[derive(Debug)]
pub(super) enum Miss {
    /// It is not kept.
    Absent,
    /// Its file is no such block: why.
    Bad(String),
}

impl From<io::Error> for Miss {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::NotFound => Self::Absent,
            ErrorKind::UnexpectedEof => Self::Bad("is cut off".to_string()),
            _ => Self::Bad(format!("cannot be read ({error})")),
        }
    }
}

/// Whether a file is a block, of whatever file.
pub(super) fn is_block(path: &Path) -> bool {
    let mut begin = [0; MARK.len()];
    File::open(path).and_then(|mut file| file.read_exact(&mut begin)).is_ok() && begin == *MARK.as_bytes()
}
