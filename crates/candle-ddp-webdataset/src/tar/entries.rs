//! The members of a tar file. Everything that their headers say is checked here, and nothing is read or allocated beyond the end of
//! the file or [`MOST_EXTENDED`].
use std::fmt::Display;
use std::io;
use std::ops::Range;
use tar::Header;

/// Everything in a tar file takes whole blocks.
const BLOCK: u64 = 512;
/// The most bytes that a member's extended header may have: its long name, or its PAX records. It is libarchive's limit.
const MOST_EXTENDED: u64 = 1 << 20;

/// Reads exactly the bytes from an offset on, which lie within the tar file.
pub(super) trait ReadAt {
    fn fill(&mut self, offset: u64, target: &mut [u8]) -> io::Result<()>;
}

impl ReadAt for &[u8] {
    fn fill(&mut self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        target.copy_from_slice(&self[offset as usize..][..target.len()]);
        Ok(())
    }
}

impl<R: ReadAt + ?Sized> ReadAt for &mut R {
    fn fill(&mut self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        (**self).fill(offset, target)
    }
}

/// A member with its extended headers.
pub(super) struct Entry {
    /// The offset of the first of its headers.
    pub(super) begin: u64,
    /// Its content.
    pub(super) data: Range<u64>,
    /// The offset of the next member.
    pub(super) end: u64,
    pub(super) path: Vec<u8>,
    /// Otherwise it is a folder, a link or the like.
    pub(super) is_file: bool,
}

/// The next thing in a tar file.
pub(super) enum Next {
    Entry(Entry),
    /// A block of zeros, with which a tar file ends.
    Zeros,
    /// Nothing.
    End,
}

/// A fault, and the byte at which it is.
#[derive(Debug)]
pub(super) enum Fault {
    /// The bytes cannot be read.
    Read(u64, io::Error),
    /// They are not what they should be.
    Content(u64, String),
}

impl Fault {
    pub(super) fn content(at: u64, reason: impl Display) -> Self {
        Self::Content(at, reason.to_string())
    }

    /// The same fault, with another clause.
    pub(super) fn and(self, clause: &str) -> Self {
        match self {
            Self::Content(at, reason) => Self::Content(at, format!("{reason}, {clause}")),
            read => read,
        }
    }
}

/// The members of a tar file, or of a part of one that begins with a header.
pub(super) struct Entries<R> {
    reader: R,
    len: u64,
    /// The offset of the next header.
    at: u64,
}

impl<R: ReadAt> Entries<R> {
    pub(super) fn new(reader: R, len: u64) -> Self {
        Self { reader, len, at: 0 }
    }

    /// The offset at which the next header should be.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    pub(super) fn next(&mut self) -> Result<Next, Fault> {
        let begin = self.at;
        let mut extended = Extended::default();
        loop {
            let at = self.at;
            let Some(header) = self.header()? else {
                if at != begin {
                    return Err(Fault::content(begin, format!("no file follows its extended header, at byte {at}")));
                }
                return Ok(if at == self.len { Next::End } else { Next::Zeros });
            };
            let kind = header.entry_type();
            let is_extended = kind.is_pax_local_extensions() || kind.is_gnu_longname() || kind.is_gnu_longlink();
            let size = size_of(&header).map_err(|reason| Fault::content(at, reason))?;
            if !is_extended && !kind.is_pax_global_extensions() {
                return self.member(begin, &header, extended.size.unwrap_or(size), extended.path).map(Next::Entry);
            }
            let records = self.extended_header(at, size)?;
            let added = match () {
                () if kind.is_gnu_longname() => extended.long_name(&records),
                () if kind.is_gnu_longlink() => Ok(()),
                () if kind.is_pax_local_extensions() => extended.pax(&records),
                () => check_global(&records),
            };
            added.map_err(|reason| Fault::content(at, reason))?;
        }
    }

    /// The next header; none at the end of the file, or if there is a block of zeros instead.
    fn header(&mut self) -> Result<Option<Header>, Fault> {
        let at = self.at;
        if at == self.len {
            return Ok(None);
        }
        if self.len.saturating_sub(at) < BLOCK {
            return Err(Fault::content(at, "it is truncated within this header. Copy it again"));
        }
        let mut header = Header::new_old();
        self.reader.fill(at, header.as_mut_bytes()).map_err(|error| Fault::Read(at, error))?;
        if header.as_bytes().iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        if !is_header(&header) {
            return Err(Fault::content(at, "its header is damaged: the checksum is wrong"));
        }
        self.at += BLOCK;
        Ok(Some(header))
    }

    /// The place of `size` bytes from here on, and moves to the header after them.
    fn data(&mut self, header: u64, size: u64) -> Result<Range<u64>, Fault> {
        let data = self.at..self.at.saturating_add(size);
        let end = data.end.checked_next_multiple_of(BLOCK).filter(|end| *end <= self.len);
        let Some(end) = end else {
            return Err(Fault::content(
                header,
                format!("it is truncated within the {size} bytes of this file. Copy it again"),
            ));
        };
        self.at = end;
        Ok(data)
    }

    fn extended_header(&mut self, at: u64, size: u64) -> Result<Vec<u8>, Fault> {
        if size > MOST_EXTENDED {
            let reason = format!("an extended header must have at most {MOST_EXTENDED} bytes, not {size}");
            return Err(Fault::content(at, reason));
        }
        let data = self.data(at, size)?;
        let mut records = vec![0; size as usize];
        self.reader.fill(data.start, &mut records).map_err(|error| Fault::Read(data.start, error))?;
        Ok(records)
    }

    fn member(&mut self, begin: u64, header: &Header, size: u64, path: Option<Vec<u8>>) -> Result<Entry, Fault> {
        let (at, kind) = (self.at - BLOCK, header.entry_type());
        if kind.is_gnu_sparse() {
            return Err(Fault::content(at, SPARSE));
        }
        match kind.as_byte() {
            b'M' => {
                return Err(Fault::content(at, "a file that continues in another archive: make shards of whole files"));
            }
            // Readers differ in whether bytes follow, so that the next header may be anywhere.
            b'1'..=b'6' if size != 0 => {
                return Err(Fault::content(at, format!("a link or a folder must have 0 bytes, not {size}")));
            }
            _ => {}
        }
        let data = self.data(at, size)?;
        let path = path.unwrap_or_else(|| header.path_bytes().into_owned());
        Ok(Entry { begin, data, end: self.at, path, is_file: kind.is_file() || kind.is_contiguous() })
    }
}

/// The facts about the next member that extended headers give.
#[derive(Default)]
struct Extended {
    path: Option<Vec<u8>>,
    size: Option<u64>,
    /// Which headers there were.
    has_long_name: bool,
    has_pax: bool,
}

impl Extended {
    fn long_name(&mut self, name: &[u8]) -> Result<(), String> {
        if std::mem::replace(&mut self.has_long_name, true) {
            return Err("a second long name for the same file".to_string());
        }
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        self.path = Some(name[..end].to_vec());
        Ok(())
    }

    fn pax(&mut self, records: &[u8]) -> Result<(), String> {
        if std::mem::replace(&mut self.has_pax, true) {
            return Err("second PAX records for the same file".to_string());
        }
        for record in (Records { rest: records }) {
            let (key, value) = record?;
            check_sparse(key)?;
            match key {
                // GNU's long name takes precedence.
                b"path" if !self.has_long_name => self.path = Some(value.to_vec()).filter(|path| !path.is_empty()),
                b"size" => self.size = pax_size(value)?,
                _ => {}
            }
        }
        Ok(())
    }
}

/// A global header is about all members after it. Its comments and times may be ignored, but not the rest.
fn check_global(records: &[u8]) -> Result<(), String> {
    for record in (Records { rest: records }) {
        let (key, _) = record?;
        check_sparse(key)?;
        if [&b"path"[..], b"size"].contains(&key) {
            let key = String::from_utf8_lossy(key);
            return Err(format!(
                "a global header must not give the {key} of all files: make the shard without --pax-option"
            ));
        }
    }
    Ok(())
}

const SPARSE: &str =
    "a sparse file, which is not supported: make the shard without --sparse (with bsdtar, with --no-read-sparse)";

/// The content of a sparse file is not the file.
fn check_sparse(key: &[u8]) -> Result<(), String> {
    let is_sparse = key.starts_with(b"GNU.sparse.") || [&b"SCHILY.realsize"[..], b"SUN.holesdata"].contains(&key);
    if is_sparse { Err(SPARSE.to_string()) } else { Ok(()) }
}

fn pax_size(value: &[u8]) -> Result<Option<u64>, String> {
    if value.is_empty() {
        return Ok(None);
    }
    let size = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
    size.map(Some).ok_or_else(|| format!("the size must be a number, not {:?}", String::from_utf8_lossy(value)))
}

/// PAX records, each `LENGTH KEY=VALUE\n`. A value may have any bytes.
struct Records<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Records<'a> {
    type Item = Result<(&'a [u8], &'a [u8]), String>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let record = first_record(self.rest);
        self.rest = record.map_or(&[], |(_, _, rest)| rest);
        Some(record.map(|(key, value, _)| (key, value)).ok_or_else(|| "its PAX records are damaged".to_string()))
    }
}

/// The key and the value of the first record, and the records after it.
fn first_record(records: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let digits = records.iter().position(|byte| *byte == b' ')?;
    let len: usize = std::str::from_utf8(&records[..digits]).ok()?.parse().ok()?;
    let (record, rest) = records.split_at_checked(len)?;
    let record = record.get(digits + 1..)?.strip_suffix(b"\n")?;
    let equals = record.iter().position(|byte| *byte == b'=')?;
    Some((&record[..equals], &record[equals + 1..], rest))
}

/// Whether a block is a header.
pub(super) fn is_header(header: &Header) -> bool {
    let bytes = header.as_bytes();
    let sum: u32 = bytes[..148].iter().chain(&bytes[156..]).map(|byte| u32::from(*byte)).sum();
    // The checksum itself counts as blanks.
    header.cksum().is_ok_and(|expected| expected == sum + 8 * 32)
}

fn size_of(header: &Header) -> Result<u64, String> {
    let field = header.as_old().size;
    // A binary number, of which the crate reads the last eight bytes.
    if field[0] & 0x80 != 0 && (field[0] != 0x80 || field[1..4] != [0; 3]) {
        return Err("the size of its file overflows, or is negative".to_string());
    }
    header.entry_size().map_err(|error| error.to_string())
}
