//! Finds the samples of a shard by its headers.
use super::entries::{Entries, Fault, Next, ReadAt, is_header};
use super::names::split;
use candle_ddp_base::hash::content_64;
use std::collections::HashSet;
use tar::Header;

/// Where each sample of a shard of `len` bytes begins, and how long it is. A shard that is not whole is an error: a missing file
/// of a sample would not show otherwise.
pub(super) fn scan(reader: &mut dyn ReadAt, len: u64) -> Result<Vec<[u64; 2]>, Fault> {
    let mut samples = Samples::default();
    let mut entries = Entries::new(&mut *reader, len);
    loop {
        let begin = entries.at();
        let entry = match entries.next() {
            Ok(Next::Entry(entry)) => entry,
            Ok(Next::Zeros) => break,
            Ok(Next::End) => return Err(samples.truncated(begin)),
            Err(Fault::Content(0, reason)) if entries.at() == 0 => {
                return Err(Fault::content(0, format!("{reason} (it must be a plain tar file, not a compressed one)")));
            }
            Err(fault) => return Err(fault),
        };
        if let Some((key, name)) = split(&entry.path).filter(|_| entry.is_file) {
            let added = samples.add(key, name, entry.begin, entry.end);
            added.map_err(|reason| Fault::content(entry.begin, reason))?;
        }
    }
    let end = entries.at();
    check_end(reader, end, len)?;
    Ok(samples.places)
}

/// After its end a tar file has zeros, if anything. Otherwise it ended too early, at zeros that overwrite headers, or it is several
/// archives.
fn check_end(reader: &mut dyn ReadAt, end: u64, len: u64) -> Result<(), Fault> {
    let mut piece = vec![0; 64 << 10];
    let mut at = end;
    while at < len {
        let piece = &mut piece[..(len - at).min(64 << 10) as usize];
        reader.fill(at, piece).map_err(|error| Fault::Read(at, error))?;
        if let Some(place) = piece.iter().position(|byte| *byte != 0) {
            let found = at + place as u64;
            let block = found / 512 * 512;
            let mut header = Header::new_old();
            let is_archive = block > end
                && block + 512 <= len
                && reader.fill(block, header.as_mut_bytes()).is_ok()
                && is_header(&header);
            let reason = match is_archive {
                true => format!(
                    "a block of zeros ends it, and at byte {block} another archive seems to begin. If they were joined with cat, \
                     use tar --concatenate, or give both as shards; otherwise it is damaged here: copy it again"
                ),
                false => format!(
                    "a block of zeros ends it, but at byte {found} there is more than zeros: it is damaged. Copy it again"
                ),
            };
            return Err(Fault::content(end, reason));
        }
        at += piece.len() as u64;
    }
    Ok(())
}

/// The samples that were found so far.
#[derive(Default)]
struct Samples {
    places: Vec<[u64; 2]>,
    key: Vec<u8>,
    /// The names of its files.
    names: HashSet<Vec<u8>>,
    /// Hashes of all keys.
    keys: HashSet<u64>,
}

impl Samples {
    /// Adds a file, from its header to its end.
    fn add(&mut self, key: &[u8], name: &[u8], begin: u64, end: u64) -> Result<(), String> {
        let shown = || String::from_utf8_lossy(key);
        match self.places.last_mut() {
            Some(last) if self.key == key => last[1] = end - last[0],
            _ => {
                if !self.keys.insert(content_64(key)) {
                    return Err(format!(
                        "another file of the sample {} was not next to this one: make the shard with tar --sort=name",
                        shown()
                    ));
                }
                self.places.push([begin, end - begin]);
                self.key = key.to_vec();
                self.names.clear();
            }
        }
        if !self.names.insert(name.to_vec()) {
            return Err(format!("the sample {} has two files .{}", shown(), String::from_utf8_lossy(name)));
        }
        Ok(())
    }

    fn truncated(&self, end: u64) -> Fault {
        let last = self.places.last().map_or(0, |[begin, _]| *begin);
        let reason = format!(
            "it is truncated: after the sample that begins here, a block of zeros should end it at byte {end}. Copy it again"
        );
        Fault::content(last, reason)
    }
}
