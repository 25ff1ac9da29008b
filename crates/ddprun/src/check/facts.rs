//! Facts about a node: versions, limits, memory, ports and GPUs.
use super::gpus::{self, Gpu};
use crate::numa;
use candle_ddp_env::PROCESS;
use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// A node, as its first rank sees it. `None`: the system does not say.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Facts {
    pub(super) ddprun: String,
    pub(super) kernel: String,
    pub(super) cpu: String,
    /// Processors that ddprun may use.
    pub(super) cores: usize,
    /// The average number of threads that ran or waited for a processor in the last minute.
    pub(super) load: Option<f64>,
    /// Bytes of memory that can be had without swapping, also by the control group's limit.
    pub(super) memory: Option<u64>,
    /// Free bytes of /dev/shm.
    pub(super) shm: Option<u64>,
    /// Whether the system gives shared memory without a file (memfd).
    pub(super) memfd: bool,
    /// The hard limit of open files, up to which ddprun raises the soft one; `None`: unlimited.
    pub(super) nofile: Option<u64>,
    /// The limit of locked memory; `None`: unlimited.
    pub(super) memlock: Option<u64>,
    /// Ports that the system can still choose for connections.
    pub(super) ports: Option<u64>,
    pub(super) gpus: Vec<Gpu>,
    /// Why the GPUs cannot be listed, although the driver shows some.
    pub(super) gpu_error: Option<String>,
    pub(super) driver: Option<String>,
    pub(super) nccl: Option<String>,
    /// Whether there are InfiniBand or RoCE adapters, which need locked memory.
    pub(super) has_rdma: bool,
}

impl Facts {
    pub(super) fn of_this_node() -> Self {
        let uname = rustix::system::uname();
        let listed = gpus::list();
        Self {
            ddprun: env!("CARGO_PKG_VERSION").to_string(),
            kernel: uname.release().to_string_lossy().into_owned(),
            cpu: cpu(&read("/proc/cpuinfo")),
            cores: numa::allowed().unwrap_or_default().len(),
            load: read("/proc/loadavg").split_whitespace().next().and_then(|load| load.parse().ok()),
            memory: memory(),
            shm: rustix::fs::statvfs("/dev/shm").ok().map(|stat| stat.f_bavail.saturating_mul(stat.f_frsize)),
            memfd: rustix::fs::memfd_create("ddprun-check", rustix::fs::MemfdFlags::CLOEXEC).is_ok(),
            nofile: getrlimit(Resource::Nofile).maximum,
            memlock: getrlimit(Resource::Memlock).current,
            ports: ports(&read("/proc/sys/net/ipv4/ip_local_port_range"), &read("/proc/net/sockstat")),
            driver: listed.as_ref().ok().and_then(|gpus| gpus.first()).map(|gpu| gpu.driver.clone()),
            gpu_error: listed.as_ref().err().cloned(),
            gpus: listed.unwrap_or_default(),
            nccl: nccl(),
            has_rdma: std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut entries| entries.next().is_some()),
        }
    }
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// The first processor's name.
fn cpu(cpuinfo: &str) -> String {
    let mut lines = cpuinfo.lines().filter(|line| line.starts_with("model name"));
    let name = lines.next().and_then(|line| line.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_string(), |(_, name)| name.trim().to_string())
}

fn memory() -> Option<u64> {
    let available = available(&read("/proc/meminfo"))?;
    let number = |name: &str| read(&format!("/sys/fs/cgroup/{name}")).trim().parse::<u64>().ok();
    let left = number("memory.max").map(|most| most.saturating_sub(number("memory.current").unwrap_or(0)));
    Some(left.map_or(available, |left| left.min(available)))
}

fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

fn ports(range: &str, sockstat: &str) -> Option<u64> {
    let (first, last) = range.trim().split_once(char::is_whitespace)?;
    let all = (last.trim().parse::<u64>().ok()? + 1).checked_sub(first.parse().ok()?)?;
    let tcp: Vec<&str> = sockstat.lines().find(|line| line.starts_with("TCP:"))?.split_whitespace().collect();
    let of = |name: &str| {
        let at = tcp.iter().position(|word| *word == name)?;
        tcp.get(at + 1)?.parse::<u64>().ok()
    };
    Some(all.saturating_sub(of("inuse")? + of("tw").unwrap_or(0)))
}

/// The version in the name of NCCL's library, if the loader's usual places have one.
fn nccl() -> Option<String> {
    let path = PROCESS.raw("LD_LIBRARY_PATH").unwrap_or_default();
    let usual = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/local/cuda/lib64",
        "/usr/local/lib",
    ];
    let folders = path.split(':').filter(|folder| !folder.is_empty()).chain(usual);
    folders.map(|folder| Path::new(folder).join("libnccl.so.2")).find_map(|library| version_in_name(&library))
}

fn version_in_name(library: &Path) -> Option<String> {
    let file: PathBuf = std::fs::canonicalize(library).ok()?;
    let name = file.file_name()?.to_string_lossy().into_owned();
    Some(name.strip_prefix("libnccl.so.").map_or_else(|| name.clone(), str::to_string))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_says() {
        assert_eq!(cpu("processor\t: 0\nmodel name\t: AMD EPYC 9B14\n"), "AMD EPYC 9B14");
        assert_eq!(available("MemTotal: 9 kB\nMemAvailable:    4096 kB\n"), Some(4096 << 10));
        let sockstat = "sockets: used 9\nTCP: inuse 21 orphan 0 tw 4 alloc 30 mem 2\nUDP: inuse 1 mem 0\n";
        assert_eq!(ports("32768\t60999\n", sockstat), Some(28232 - 25));
        assert_eq!((available(""), ports("", sockstat), ports("32768\t60999\n", "")), (None, None, None));
        let facts = Facts::of_this_node();
        assert!(facts.cores > 0 && facts.memory.is_some() && !facts.kernel.is_empty(), "{facts:?}");
    }

    #[test]
    fn the_version_of_nccl_is_in_the_name_of_its_file() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("libnccl.so.2.28.9"), "").unwrap();
        let link = folder.path().join("libnccl.so.2");
        assert_eq!(version_in_name(&link), None);
        std::os::unix::fs::symlink("libnccl.so.2.28.9", &link).unwrap();
        assert_eq!(version_in_name(&link), Some("2.28.9".to_string()));
    }
}
