//! The cores that each worker may run on: torchrun's `--numa-binding`.
use crate::error::{Error, Result};
use clap::ValueEnum;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The numbers of logical processors.
pub(crate) type Cpus = BTreeSet<usize>;

/// The binding of a worker, in torchrun's words. All its processors are near its GPU; without GPUs, the workers are
/// distributed evenly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Binding {
    /// All processors of a NUMA node.
    Node,
    /// All processors of the node's socket.
    Socket,
    /// Cores of the node that no other worker has.
    Exclusive,
    /// The processors of the node that share a last-level cache.
    CoreComplex,
}

/// Parses a value of `--numa-binding`.
pub(crate) fn parse(text: &str) -> Result<Binding, String> {
    Binding::from_str(text, false).map_err(|_| "expected node, socket, exclusive or core-complex".into())
}

fn refuse(reason: String) -> Error {
    Error::usage("--numa-binding", reason)
}

/// Keeps this thread, and with it the processes that it starts, on some processors, until it is dropped.
pub(crate) struct OnCpus(CpuSet);

impl OnCpus {
    pub(crate) fn of(cpus: &CpuSet) -> std::io::Result<Self> {
        let before = sched_getaffinity(None)?;
        sched_setaffinity(None, cpus)?;
        Ok(Self(before))
    }
}

impl Drop for OnCpus {
    fn drop(&mut self) {
        // At worst, ddprun itself, which has little to do, stays there.
        let _ = sched_setaffinity(None, &self.0);
    }
}

/// The processors that this process may use.
pub(crate) fn allowed() -> rustix::io::Result<Cpus> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

/// These processors, as the system takes them.
pub(crate) fn cpu_set(cpus: impl IntoIterator<Item = usize>) -> CpuSet {
    let mut set = CpuSet::new();
    cpus.into_iter().for_each(|cpu| set.set(cpu));
    set
}

/// Returns the processors of each of `workers` workers. `gpus` are the numbers of their GPUs; none if there are no GPUs.
pub(crate) fn bind(binding: Binding, workers: usize, gpus: Option<&[usize]>) -> Result<Vec<CpuSet>> {
    let allowed = allowed().map_err(|error| Error::io("reading the processors of ddprun", error))?;
    let system = System { root: Path::new("/"), allowed: &allowed };
    Ok(system.bind(binding, workers, gpus)?.into_iter().map(cpu_set).collect())
}

/// A machine, as its file systems show it.
struct System<'a> {
    root: &'a Path,
    /// The processors that this process may use.
    allowed: &'a Cpus,
}

impl System<'_> {
    fn read(&self, path: &str) -> Result<String> {
        let path = self.root.join(path);
        let text = std::fs::read_to_string(&path);
        text.map(|text| text.trim().to_owned()).map_err(|error| {
            refuse(format!("this system does not provide the location of its cores: {}: {error}", path.display()))
        })
    }

    fn cpus(&self, path: &str) -> Result<Cpus> {
        let text = self.read(path)?;
        parse_list(&text).ok_or_else(|| refuse(format!("{path} is not a list of processors: {text:?}")))
    }

    /// The processors of each NUMA node that this process may use.
    fn nodes(&self) -> Result<BTreeMap<usize, Cpus>> {
        let mut nodes = BTreeMap::new();
        for node in self.cpus("sys/devices/system/node/online")? {
            let cpus: Cpus = &self.cpus(&format!("sys/devices/system/node/node{node}/cpulist"))? & self.allowed;
            if !cpus.is_empty() {
                nodes.insert(node, cpus);
            }
        }
        Ok(nodes)
    }

    /// The node of a GPU, by its number in the order of the PCI bus.
    fn node_of_gpu(&self, gpu: usize) -> Result<usize> {
        let folder = self.root.join("proc/driver/nvidia/gpus");
        let entries = std::fs::read_dir(&folder).map_err(|error| refuse(format!("{}: {error}", folder.display())))?;
        let mut buses: Vec<String> =
            entries.flatten().map(|entry| entry.file_name().to_string_lossy().into()).collect();
        buses.sort();
        let bus = buses
            .get(gpu)
            .ok_or_else(|| refuse(format!("the driver lists {} GPUs, and none is GPU {gpu}", buses.len())))?;
        let node = self.read(&format!("sys/bus/pci/devices/{bus}/numa_node"))?;
        let nodes = self.nodes()?;
        match node.parse::<usize>() {
            Ok(node) => Ok(node),
            // The system does not provide it, which does not matter if there is one node.
            Err(_) if nodes.len() == 1 => Ok(nodes.into_keys().next().unwrap_or(0)),
            Err(_) => {
                Err(refuse(format!("the system does not provide the NUMA node of GPU {gpu} ({bus}): it says {node}")))
            }
        }
    }

    fn bind(&self, binding: Binding, workers: usize, gpus: Option<&[usize]>) -> Result<Vec<Cpus>> {
        let nodes = self.nodes()?;
        let numbers: Vec<usize> = nodes.keys().copied().collect();
        if numbers.is_empty() {
            return Err(refuse("ddprun may not use any processor of any NUMA node".into()));
        }
        let of_worker = |worker: usize| match gpus {
            Some(gpus) => self.node_of_gpu(gpus.get(worker).copied().unwrap_or(worker)),
            None => Ok(numbers[worker * numbers.len() / workers]),
        };
        let of_workers: Vec<usize> = (0..workers).map(of_worker).collect::<Result<_>>()?;
        let mut sets = Vec::with_capacity(workers);
        for (worker, node) in of_workers.iter().enumerate() {
            let cpus = nodes.get(node).ok_or_else(|| {
                refuse(format!("worker {worker} belongs to NUMA node {node}, where ddprun may not use any processor"))
            })?;
            let place = of_workers[..worker].iter().filter(|other| *other == node).count();
            let sharing = of_workers.iter().filter(|other| *other == node).count();
            sets.push(match binding {
                Binding::Node => cpus.clone(),
                Binding::Socket => self.socket(cpus, &nodes)?,
                Binding::Exclusive => self.exclusive(cpus, place, sharing)?,
                Binding::CoreComplex => {
                    let mut complexes: Vec<Cpus> = self.groups(cpus, "cache/index3/shared_cpu_list")?;
                    complexes.sort_by_key(|cpus| std::cmp::Reverse(cpus.len()));
                    complexes[place % complexes.len()].clone()
                }
            });
        }
        Ok(sets)
    }

    /// The processors of all nodes of the socket of `cpus`.
    fn socket(&self, cpus: &Cpus, nodes: &BTreeMap<usize, Cpus>) -> Result<Cpus> {
        let package = |cpu: usize| self.read(&format!("sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"));
        let own = cpus.first().map(|cpu| package(*cpu)).transpose()?;
        let mut socket = Cpus::new();
        for cpu in nodes.values().flatten() {
            if Some(package(*cpu)?) == own {
                socket.insert(*cpu);
            }
        }
        Ok(socket)
    }

    /// The part of the cores among `cpus` that worker `place` of the `sharing` workers gets.
    fn exclusive(&self, cpus: &Cpus, place: usize, sharing: usize) -> Result<Cpus> {
        let cores = self.groups(cpus, "topology/thread_siblings_list")?;
        if cores.len() < sharing {
            return Err(refuse(format!("{sharing} workers share a NUMA node of {} cores: start fewer", cores.len())));
        }
        let (start, end) = (place * cores.len() / sharing, (place + 1) * cores.len() / sharing);
        Ok(cores[start..end].iter().flatten().copied().collect())
    }

    /// `cpus`, divided into groups that share the list in the file `what` of each.
    fn groups(&self, cpus: &Cpus, what: &str) -> Result<Vec<Cpus>> {
        let mut groups: Vec<Cpus> = Vec::new();
        for cpu in cpus {
            if !groups.iter().any(|group| group.contains(cpu)) {
                groups.push(&self.cpus(&format!("sys/devices/system/cpu/cpu{cpu}/{what}"))? & cpus);
            }
        }
        Ok(groups)
    }
}

/// Parses a list such as `0-3,8`.
fn parse_list(text: &str) -> Option<Cpus> {
    let mut cpus = Cpus::new();
    for part in text.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sockets of two nodes each, with two cores of two threads in each node; a GPU on node 3, and one on node 0.
    fn machine() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: String, text: String| {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text + "\n").unwrap();
        };
        write("sys/devices/system/node/online".into(), "0-3".into());
        for node in 0..4 {
            let first = node * 2;
            write(
                format!("sys/devices/system/node/node{node}/cpulist"),
                format!("{first}-{},{}-{}", first + 1, first + 8, first + 9),
            );
        }
        for cpu in 0..16 {
            let (core, node) = (cpu % 8, cpu % 8 / 2);
            let cpu = format!("sys/devices/system/cpu/cpu{cpu}");
            write(format!("{cpu}/topology/physical_package_id"), format!("{}", node / 2));
            write(format!("{cpu}/topology/thread_siblings_list"), format!("{core},{}", core + 8));
            write(format!("{cpu}/cache/index3/shared_cpu_list"), format!("{core},{}", core + 8));
        }
        for (bus, node) in [("0000:01:00.0", "3"), ("0000:02:00.0", "0"), ("0000:03:00.0", "-1")] {
            std::fs::create_dir_all(folder.path().join("proc/driver/nvidia/gpus").join(bus)).unwrap();
            write(format!("sys/bus/pci/devices/{bus}/numa_node"), node.into());
        }
        folder
    }

    #[test]
    fn workers_get_the_cores_near_them() {
        let (folder, allowed) = (machine(), (0..16).collect());
        let system = System { root: folder.path(), allowed: &allowed };
        let bind = |binding, workers, gpus: Option<&[usize]>| -> Vec<Vec<usize>> {
            let sets = system.bind(binding, workers, gpus).unwrap();
            sets.into_iter().map(|cpus| cpus.into_iter().collect()).collect()
        };
        let node = |node: usize| vec![2 * node, 2 * node + 1, 2 * node + 8, 2 * node + 9];
        assert_eq!(bind(Binding::Node, 4, None), [node(0), node(1), node(2), node(3)]);
        assert_eq!(bind(Binding::Node, 2, None), [node(0), node(2)]);
        assert_eq!(bind(Binding::Node, 2, Some(&[0, 1])), [node(3), node(0)]);
        assert_eq!(bind(Binding::Socket, 1, Some(&[0])), [vec![4, 5, 6, 7, 12, 13, 14, 15]]);
        assert_eq!(bind(Binding::Exclusive, 2, Some(&[0, 0])), [vec![6, 14], vec![7, 15]]);
        assert_eq!(bind(Binding::CoreComplex, 3, Some(&[0, 0, 0])), [vec![6, 14], vec![7, 15], vec![6, 14]]);
    }

    #[test]
    fn what_is_not_known_is_an_error() {
        let (folder, allowed) = (machine(), (0..2).collect());
        let system = System { root: folder.path(), allowed: &allowed };
        let error =
            |workers, gpus: Option<&[usize]>, binding| system.bind(binding, workers, gpus).unwrap_err().to_string();
        assert!(error(1, Some(&[0]), Binding::Node).contains("NUMA node 3, where ddprun may not use"));
        assert!(error(3, None, Binding::Exclusive).contains("3 workers share a NUMA node of 2 cores"));
        assert!(error(1, Some(&[7]), Binding::Node).contains("none is GPU 7"));
        let all = (0..16).collect();
        let whole = System { root: folder.path(), allowed: &all };
        assert!(whole.bind(Binding::Node, 1, Some(&[2])).unwrap_err().to_string().contains("the NUMA node of GPU 2"));
        // With one node, that does not matter.
        assert_eq!(system.bind(Binding::Node, 1, Some(&[2])).unwrap()[0], allowed);
        let empty = tempfile::tempdir().unwrap();
        let nowhere = System { root: empty.path(), allowed: &allowed };
        assert!(nowhere.bind(Binding::Node, 1, None).unwrap_err().to_string().contains("does not provide"));
        assert_eq!(parse_list("0-2,7"), Some([0, 1, 2, 7].into()));
        assert_eq!(parse_list("x"), None);
    }
}
