//! TensorBoard's event files: messages as records of TFRecord's format.
use super::appended::{Appended, is_shared, writing};
use super::message::{self, Value};
use crate::host::host_name;
use crate::{Context, Error, Result};
use crc::{CRC_32_ISCSI, Crc, Table};
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// CRC-32C.
static CRC: Crc<u32, Table<16>> = Crc::<u32, Table<16>>::new(&CRC_32_ISCSI);

#[derive(Debug)]
pub(super) struct Events {
    file: Appended,
    /// Locked, for other writers.
    _folder: File,
}

impl Events {
    /// A new file in `folder`, which is created if necessary. TensorBoard hides what older files there have from `purge_step` on, unless
    /// another writer is at one of them.
    pub(super) fn create(folder: &Path, purge_step: u64) -> Result<Self> {
        std::fs::create_dir_all(folder).with_context(|| writing(folder))?;
        // TensorBoard reads the files in the order of their names: this one must be the last, even if the clock of the host that
        // wrote the others is ahead, or two runs began in one second.
        let newest = newest(folder).with_context(|| writing(folder))?;
        let mut second = newest.map_or(0, |second| second + 1).max(wall_time() as u64);
        let open = File::open(folder).with_context(|| writing(folder))?;
        let is_shared = is_shared(&open, folder);
        let mut file = loop {
            match Appended::create_new(path(folder, second)) {
                Err(Error::Io { error, .. }) if error.kind() == ErrorKind::AlreadyExists => second += 1,
                created => break created?,
            }
        };
        let wall_time = wall_time();
        let mut first = record(&message::file_version(wall_time));
        if !is_shared {
            first.extend(record(&message::session_start(wall_time, purge_step)));
        }
        file.append(&first)?;
        Ok(Self { file, _folder: open })
    }

    pub(super) fn write(&mut self, step: u64, values: &[(&str, Value<'_>)]) -> Result<()> {
        self.file.append(&record(&message::summary(wall_time(), step, values)))
    }

    pub(super) fn flush(&self) -> Result<()> {
        self.file.flush()
    }
}

const PREFIX: &str = "events.out.tfevents.";

/// The name that PyTorch gives: the second, the host, the process and a number.
fn path(folder: &Path, second: u64) -> PathBuf {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    folder.join(format!("{PREFIX}{second:010}.{}.{}.{number}", host_name().replace('/', "_"), std::process::id()))
}

/// The second of the last file in the folder, if there is any. Numbers that are no times do not count.
fn newest(folder: &Path) -> std::io::Result<Option<u64>> {
    let mut newest = None;
    for entry in std::fs::read_dir(folder)? {
        let name = entry?.file_name();
        let second = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('.').next()?.parse().ok());
        newest = newest.max(second.filter(|second| *second < 9_999_999_999));
    }
    Ok(newest)
}

/// In seconds since 1970.
fn wall_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// The length, its checksum, the message, its checksum.
fn record(message: &[u8]) -> Vec<u8> {
    let len = (message.len() as u64).to_le_bytes();
    [&len[..], &masked(&len), message, &masked(message)].concat()
}

/// TFRecord masks checksums, in case the data has checksums itself.
fn masked(data: &[u8]) -> [u8; 4] {
    CRC.checksum(data).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}
