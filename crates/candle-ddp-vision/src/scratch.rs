//! Memory that each thread keeps from one image to the next.
//!
//! Images are large enough for an allocator to return their memory to the system, which then costs page faults with every
//! image.
use crate::Result;
use crate::error::{data_file, reading};
use fast_image_resize::Resizer;
use rustix::fs::OFlags;
use std::cell::{Cell, RefCell};
use std::fs::{File, FileType};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// The size of the largest buffer that is kept, in bytes.
const LARGEST: usize = 32 << 20;

thread_local! {
    static FILE: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
    static PIXELS: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
    static RESIZER: RefCell<Resizer> = RefCell::new(Resizer::new());
}

/// Reads a regular file for `decode`. Other files may have no end, or keep the reader waiting for it.
pub(super) fn read<T>(path: &Path, decode: impl FnOnce(&[u8]) -> T) -> Result<T> {
    let mut bytes = FILE.take();
    bytes.clear();
    let failed = |error| reading(path, error);
    // Without this flag, opening a FIFO waits for a writer.
    let flags = OFlags::NONBLOCK.bits() as i32;
    let mut file = File::options().read(true).custom_flags(flags).open(path).map_err(failed)?;
    let kind = file.metadata().map_err(failed)?.file_type();
    if !kind.is_file() {
        return Err(data_file(path, format!("it must be a regular file, and is {}", name_of(kind))));
    }
    file.read_to_end(&mut bytes).map_err(failed)?;
    let decoded = decode(&bytes);
    keep(&FILE, bytes);
    Ok(decoded)
}

fn name_of(kind: FileType) -> &'static str {
    if kind.is_dir() {
        "a folder"
    } else if kind.is_fifo() {
        "a FIFO"
    } else {
        "a device"
    }
}

/// Returns a buffer of this length with arbitrary bytes.
pub(super) fn pixels(len: usize) -> Vec<u8> {
    let kept = PIXELS.take();
    // The image may leave the thread with its buffer: it must not take much more memory than it needs.
    if kept.capacity() < len || kept.capacity() / 2 > len {
        keep(&PIXELS, kept);
        return vec![0; len];
    }
    let mut buffer = kept;
    buffer.resize(len, 0);
    buffer
}

/// Keeps a buffer for [`pixels`].
pub(super) fn give_back(buffer: Vec<u8>) {
    keep(&PIXELS, buffer);
}

/// Keeps the larger one of this buffer and the buffer kept so far, unless it is too large.
fn keep(place: &'static std::thread::LocalKey<Cell<Vec<u8>>>, buffer: Vec<u8>) {
    let kept = place.take();
    let is_better = (kept.capacity() + 1..=LARGEST).contains(&buffer.capacity());
    place.set(if is_better { buffer } else { kept });
}

/// Runs `work` with this thread's resizer, which has its own buffers.
pub(super) fn with_resizer<T>(work: impl FnOnce(&mut Resizer) -> T) -> T {
    RESIZER.with_borrow_mut(|resizer| {
        let done = work(resizer);
        if resizer.size_of_internal_buffers() > LARGEST {
            resizer.reset_internal_buffers();
        }
        done
    })
}
