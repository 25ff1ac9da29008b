//! Files of tensors that are there as a whole or not at all.
use crate::process_group::panic_message;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use std::collections::HashMap;
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Writes `tensors` as a safetensors file: to a temporary one in the same folder, which then takes its name.
pub(crate) fn write_safetensors(path: &Path, tensors: &HashMap<String, Tensor>) -> Result<()> {
    static FILES: AtomicU64 = AtomicU64::new(0);
    let Some(name) = path.file_name() else {
        return Err(Error::invalid("path", format!("{} does not name a file", path.display())));
    };
    for (name, tensor) in tensors {
        if matches!(tensor.dtype(), DType::F6E2M3 | DType::F6E3M2 | DType::F4 | DType::F8E8M0) {
            return Err(Error::parameter(name, format!("candle cannot write dtype {}", tensor.dtype().as_str())));
        }
    }
    let mut temporary = std::ffi::OsString::from(".");
    temporary.push(name);
    temporary.push(format!(".{}-{}.tmp", std::process::id(), FILES.fetch_add(1, Ordering::Relaxed)));
    let temporary = path.with_file_name(temporary);
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).map_or(PathBuf::from("."), PathBuf::from);
    let io = |source: std::io::Error| Error::io(format!("writing {}", path.display()), source);
    let write = || -> Result<()> {
        // The permissions that a new file has here: what writes the tensors would let only their owner read them.
        let permissions = File::create(&temporary).and_then(|file| file.metadata()).map_err(io)?.permissions();
        // candle panics where it cannot copy a tensor from its device.
        catch_unwind(AssertUnwindSafe(|| candle_core::safetensors::save(tensors, &temporary)))
            .map_err(|panic| panic_message(&*panic))
            .and_then(|saved| saved.map_err(|error| error.to_string()))
            .map_err(|reason| io(std::io::Error::other(reason)))?;
        let file = File::options().write(true).open(&temporary).map_err(io)?;
        file.set_permissions(permissions).and_then(|()| file.sync_all()).map_err(io)?;
        std::fs::rename(&temporary, path).map_err(io)?;
        File::open(&folder).and_then(|folder| folder.sync_all()).map_err(io)
    };
    write().inspect_err(|_| {
        // What is left of it is of no use to anybody; if it was never there, so much the better.
        let _ = std::fs::remove_file(&temporary);
    })
}

/// Reads a safetensors file.
pub(crate) fn read_safetensors(path: &Path) -> Result<HashMap<String, Tensor>> {
    let bytes = std::fs::read(path).map_err(|error| Error::io(format!("reading {}", path.display()), error))?;
    candle_core::safetensors::load_buffer(&bytes, &Device::Cpu)
        .map_err(|error| Error::invalid("path", format!("{} is not a safetensors file: {error}", path.display())))
}
