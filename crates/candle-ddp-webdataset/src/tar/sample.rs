//! One sample of a tar file.
use super::entries::{Entries, Fault, Next};
use super::names::split;
use std::fmt;
use std::ops::Range;

/// The files of one sample of [`TarShards`](super::TarShards).
#[derive(Clone, PartialEq, Eq)]
pub struct TarSample {
    key: String,
    /// The part of the shard that has its files.
    bytes: Vec<u8>,
    files: Vec<(String, Range<usize>)>,
}

impl TarSample {
    /// The files of a part of a shard, or where in it which error is.
    pub(super) fn parse(bytes: Vec<u8>) -> Result<Self, Fault> {
        let (mut sample_key, mut files): (Option<Vec<u8>>, Vec<_>) = (None, Vec::new());
        let mut entries = Entries::new(&bytes[..], bytes.len() as u64);
        loop {
            let entry = match entries.next()? {
                Next::Entry(entry) => entry,
                Next::End => break,
                Next::Zeros => {
                    return Err(Fault::content(entries.at(), "zeros, where a file of the sample should begin"));
                }
            };
            let Some((key, name)) = split(&entry.path).filter(|_| entry.is_file) else { continue };
            match &sample_key {
                Some(first) if *first != key => {
                    let (first, key) = (String::from_utf8_lossy(first), String::from_utf8_lossy(key));
                    return Err(Fault::content(
                        entry.begin,
                        format!("a file of the sample {key} follows those of {first}"),
                    ));
                }
                Some(_) => {}
                None => sample_key = Some(key.to_vec()),
            }
            // It fits into memory, since it is there.
            files
                .push((String::from_utf8_lossy(name).into_owned(), entry.data.start as usize..entry.data.end as usize));
        }
        let Some(key) = sample_key else { return Err(Fault::content(0, "no sample begins here")) };
        let key = String::from_utf8_lossy(&key).into_owned();
        Ok(Self { key, bytes, files })
    }

    /// The path that its files share, up to the first dot of their names.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The content of the file whose name continues with `name` after the first dot: `jpg`, or `seg.png`.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.files().find(|(found, _)| *found == name).map(|(_, content)| content)
    }

    /// The names, after the first dot, and contents of all files, in the order of the shard.
    pub fn files(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.files.iter().map(|(name, range)| (name.as_str(), &self.bytes[range.clone()]))
    }
}

impl fmt::Debug for TarSample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes: Vec<(&str, usize)> = self.files().map(|(name, content)| (name, content.len())).collect();
        f.debug_struct("TarSample").field("key", &self.key).field("files", &sizes).finish_non_exhaustive()
    }
}
