//! The output of `NCCL_DEBUG=INFO` about communicators: their beginnings and ends, in NCCL's words.
use super::communicator::Communicator;
use super::ffi::Wishes;
use super::lock;
use std::fs::File;
use std::io::{Write, stdout};
use std::sync::{Mutex, OnceLock};

static LOG: OnceLock<Option<Mutex<Box<dyn Write + Send>>>> = OnceLock::new();

/// A communicator can be used.
pub(super) fn init(communicator: &Communicator) {
    let at = at(communicator);
    let Wishes { blocks, least_blocks, net_name, traffic_class, .. } = communicator.wishes;
    let config = format!("minCTAs {least_blocks} maxCTAs {blocks} netName {net_name} trafficClass {traffic_class}");
    write(communicator, &format!("ncclCommInitRankConfig {at} commId {} {config} - Init COMPLETE", communicator.hub));
}

/// A communicator has ended; `how` is `Abort` or `Destroy`.
pub(super) fn end(communicator: &Communicator, how: &str) {
    write(communicator, &format!("{} - {how} COMPLETE", at(communicator)));
}

fn at(communicator: &Communicator) -> String {
    let Communicator { rank, size, peer_info, .. } = communicator;
    format!("comm {communicator:p} rank {rank} nranks {size} cudaDev {} busId 0", peer_info.device)
}

fn write(communicator: &Communicator, text: &str) {
    if let Some(log) = LOG.get_or_init(open) {
        let Communicator { peer_info, .. } = communicator;
        // At once, since the process may be killed.
        let line = format!("{}:{} [{}] NCCL INFO {text}\n", peer_info.host, std::process::id(), peer_info.device);
        let _ = lock(log).write_all(line.as_bytes());
    }
}

/// The file that `NCCL_DEBUG_FILE` names, or the standard output.
fn open() -> Option<Mutex<Box<dyn Write + Send>>> {
    let level = std::env::var("NCCL_DEBUG").ok()?;
    if !["INFO", "TRACE"].contains(&level.to_uppercase().as_str()) {
        return None;
    }
    let file = std::env::var("NCCL_DEBUG_FILE").ok().and_then(|name| {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        File::create(name.replace("%p", &std::process::id().to_string()).replace("%h", host.trim())).ok()
    });
    Some(Mutex::new(file.map_or_else(|| Box::new(stdout()) as Box<dyn Write + Send>, |file| Box::new(file))))
}
