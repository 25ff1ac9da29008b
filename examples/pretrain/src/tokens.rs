//! Files of tokens, as nanoGPT and llm.c write them. They are mapped into memory, so that ranks of a host share their pages.
use candle_ddp::{Context, Error, Result};
use clap::ValueEnum;
use memmap2::Mmap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// llm.c's header: 256 numbers of 4 bytes, of which the first three are the magic number, the version and the number of tokens.
const HEADER_BYTES: usize = 256 * 4;
const HEADERS: [(u32, u32, Width); 2] = [(20240520, 1, Width::U16), (20240801, 7, Width::U32)];

/// How a file of tokens is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// llm.c's if the file begins with one of its magic numbers, and otherwise u16.
    Auto,
    /// u16 without a header: nanoGPT's.
    U16,
    /// u32 without a header.
    U32,
    /// A header, and then u16 or u32: llm.c's.
    LlmC,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    U16 = 2,
    U32 = 4,
}

/// A file of tokens that is mapped into memory.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    file: File,
    map: Mmap,
    width: Width,
    /// The byte at which the first token begins.
    begin: usize,
    len: usize,
}

impl TokenFile {
    /// Opens a file.
    ///
    /// # Errors
    /// [`Error::Io`] with the file's path if it cannot be read, has no token, or has another header or length than the format requires.
    pub fn open(path: &Path, format: Format) -> Result<Self> {
        let opening = || format!("opening {}", path.display());
        let file = File::open(path).with_context(opening)?;
        if file.metadata().with_context(opening)?.len() == 0 {
            return Err(broken(path, "it must have tokens, but it is empty"));
        }
        // SAFETY: nobody may change the file while it is mapped. The documentation says so, and `read` compares its length.
        #[allow(unsafe_code)]
        let map = unsafe { Mmap::map(&file) }.with_context(opening)?;
        let (width, begin, promised) = match format {
            Format::U16 => (Width::U16, 0, None),
            Format::U32 => (Width::U32, 0, None),
            Format::Auto if !begins_with_magic(&map) => (Width::U16, 0, None),
            Format::Auto | Format::LlmC => {
                let (width, count) = parse_header(&map).map_err(|reason| broken(path, &reason))?;
                (width, HEADER_BYTES, Some(count))
            }
        };
        let (bytes, size) = (map.len() - begin, width as usize);
        if let Some(count) = promised.filter(|count| bytes != count * size) {
            let reason = format!(
                "it must have the {count} tokens of {size} bytes that its header announces, but {bytes} bytes follow the header: \
                 is it a part of a file?"
            );
            return Err(broken(path, &reason));
        }
        if bytes % size != 0 {
            let reason = format!("its size must be a multiple of {size} bytes, the size of a token, not {bytes}");
            return Err(broken(path, &reason));
        }
        if bytes == 0 {
            return Err(broken(path, "it must have tokens, but its header announces none"));
        }
        Ok(Self { path: path.to_path_buf(), file, map, width, begin, len: bytes / size })
    }

    /// The number of tokens.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The tokens at these places, each of which must be below `vocabulary`.
    ///
    /// # Errors
    /// [`Error::Io`] with the file's path for a place beyond its end, a token that is not below `vocabulary`, and a file that has become
    /// shorter since it was opened.
    pub fn read(&self, places: Range<usize>, vocabulary: usize) -> Result<Vec<u32>> {
        let tokens = self.all(places.clone())?.collect::<Vec<_>>();
        match tokens.iter().position(|token| *token as usize >= vocabulary) {
            None => Ok(tokens),
            Some(wrong) => {
                let (token, place) = (tokens[wrong], places.start + wrong);
                let reason = format!(
                    "token {place} must be below the size of the vocabulary, {vocabulary}, but it is {token}: is this the \
                     --vocabulary and the --format of the file?"
                );
                Err(broken(&self.path, &reason))
            }
        }
    }

    /// The tokens at these places, whatever they are.
    pub(crate) fn all(&self, places: Range<usize>) -> Result<impl Iterator<Item = u32>> {
        let size = self.width as usize;
        if places.start > places.end || places.end > self.len {
            let reason = format!("places must be within its {} tokens, not {places:?}", self.len);
            return Err(broken(&self.path, &reason));
        }
        // Pages behind the end of a file that was cut would end the process with SIGBUS.
        let now = self.file.metadata().with_context(|| format!("reading {}", self.path.display()))?.len();
        if now < self.map.len() as u64 {
            let reason = format!("it must keep its {} bytes while it is read, but it has {now} now", self.map.len());
            return Err(broken(&self.path, &reason));
        }
        let bytes = &self.map[self.begin + places.start * size..self.begin + places.end * size];
        let is_wide = self.width == Width::U32;
        Ok(bytes.chunks_exact(size).map(move |token| match (is_wide, token) {
            (true, &[a, b, c, d]) => u32::from_le_bytes([a, b, c, d]),
            (_, token) => u32::from(u16::from_le_bytes([token[0], token[1]])),
        }))
    }
}

fn number(map: &[u8], index: usize) -> Option<u32> {
    map.get(4 * index..4 * index + 4).map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

fn begins_with_magic(map: &[u8]) -> bool {
    number(map, 0).is_some_and(|first| HEADERS.iter().any(|(magic, ..)| *magic == first))
}

/// The width of the tokens, and their number.
fn parse_header(map: &[u8]) -> Result<(Width, usize), String> {
    let (Some(found), Some(version), Some(count), true) =
        (number(map, 0), number(map, 1), number(map, 2), map.len() >= HEADER_BYTES)
    else {
        return Err(format!("it must have a header of {HEADER_BYTES} bytes, but it has {} bytes", map.len()));
    };
    let Some((_, expected, width)) = HEADERS.iter().find(|(magic, ..)| *magic == found) else {
        let magics = HEADERS.map(|(magic, ..)| magic.to_string()).join(" or ");
        return Err(format!(
            "its magic number must be {magics}, not {found}: files without a header need --format u16 or u32"
        ));
    };
    if version != *expected {
        return Err(format!("the version of its header must be {expected}, not {version}"));
    }
    Ok((*width, count as usize))
}

/// The header of a file with so many tokens.
pub(crate) fn header(width: Width, count: u32) -> Vec<u8> {
    let fits = |(_, _, of): &&(u32, u32, Width)| *of == width;
    let numbers = HEADERS.iter().find(fits).map(|(magic, version, _)| [*magic, *version, count]);
    let mut header: Vec<u8> = numbers.iter().flatten().flat_map(|number| number.to_le_bytes()).collect();
    header.resize(HEADER_BYTES, 0);
    header
}

pub(crate) fn broken(path: &Path, reason: &str) -> Error {
    Error::io(path.display().to_string(), io::Error::new(io::ErrorKind::InvalidData, reason))
}
