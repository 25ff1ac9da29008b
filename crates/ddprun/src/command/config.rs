//! The meaning of a command line: fills in defaults and refuses contradictions.
use super::cargo::CargoTarget;
use super::cli::Cli;
use super::hosts::Variables;
use super::layout::{Layout, Topology};
use super::options::Options;
use super::processes::Host;
use super::secret::RunSecret;
use super::terms::{Pace, Terms, version};
use crate::error::{Error, Result, refuse};
use crate::time;
use candle_ddp_base::MOST_RANKS;
use candle_ddp_env::PROCESS;
use candle_ddp_rendezvous::loopback;
use std::ffi::OsString;
use std::net::{Ipv6Addr, SocketAddr};
use std::time::SystemTime;

/// torchrun's default port. All machines of a run must agree on it beforehand.
const DEFAULT_MASTER_PORT: u16 = 29500;
/// torchrun's default port with `--rdzv-backend c10d`.
const DEFAULT_ENDPOINT_PORT: u16 = 29400;

/// How the nodes of a run on several machines meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Rendezvous {
    /// The settings that all nodes must have in common.
    pub(crate) terms: Terms,
    pub(crate) pace: Pace,
    /// `--rdzv-backend static`: the number of nodes is fixed, and each knows its rank. Otherwise `c10d`.
    pub(crate) is_static: bool,
}

/// The program that every worker runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Program {
    /// A file, or a name to look up in PATH.
    Path(OsString),
    /// A cargo target, which is built first.
    Cargo(CargoTarget),
}

/// The complete configuration of a run, made from a [`Cli`] by [`Config::resolve`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Config {
    /// The program that every worker runs.
    pub(crate) program: Program,
    /// The program's arguments.
    pub(crate) args: Vec<OsString>,
    /// The ranks of the run. With `--rdzv-backend c10d`, nodes get other ranks when they meet.
    pub(crate) topology: Topology,
    /// How the nodes meet; `None` on a single machine.
    pub(crate) rendezvous: Option<Rendezvous>,
    /// The address of the store.
    pub(crate) master_addr: String,
    /// The store's port; `None` for a free one.
    pub(crate) master_port: Option<u16>,
    /// The run's id.
    pub(crate) run_id: String,
    /// Threads per worker; `None` for a single worker.
    pub(crate) threads: Option<usize>,
    /// The GPU of each worker, as CUDA_VISIBLE_DEVICES names it, if each worker is to see only one.
    pub(crate) virtual_devices: Option<Vec<String>>,
    /// The secret that the processes of the run prove to each other.
    pub(crate) secret: RunSecret,
    /// Where metrics are served.
    pub(crate) metrics: Option<SocketAddr>,
    /// Options that act as they were typed.
    pub(crate) options: Options,
    /// Whether the workers are those of `ddprun check`.
    pub(crate) is_check: bool,
    /// If another ddprun has started this one (`--hosts`), the variables that it gives to the workers (`--env`).
    pub(crate) agent: Option<Variables>,
}

impl Config {
    /// The local rank that a worker is told.
    pub(crate) fn shown_local_rank(&self, local_rank: usize) -> usize {
        if self.virtual_devices.is_some() { 0 } else { local_rank }
    }

    /// Resolves `cli` on `host`.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Usage`] if options are invalid, unsupported or contradictory.
    pub(crate) fn resolve(cli: Cli, host: &Host) -> Result<Self> {
        refuse_what_is_not_supported(&cli)?;
        let is_static = is_static(&cli)?;
        let (min_nodes, max_nodes) = node_range(&cli, is_static)?;
        let topology = topology(&cli, host, max_nodes, is_static)?;
        let (master_addr, master_port) = master(&cli, max_nodes, is_static)?;
        let local = topology.local_world_size();
        let options = cli.options.clone();
        let filter = options.local_ranks_filter.as_ref().and_then(|ranks| ranks.last().copied());
        let named = [
            ("--redirects", options.redirects.last_named()),
            ("--tee", options.tee.last_named()),
            ("--local-ranks-filter", filter),
        ];
        for (option, last) in named {
            if let Some(rank) = last.filter(|&rank| rank >= local) {
                let reason = format!("names local rank {rank}, but --nproc-per-node is {local}");
                return refuse(option, reason);
            }
        }
        let run_id = match &cli.ranks.run_id {
            Some(id) if id.is_empty() || id.starts_with('.') || id.contains(|c: char| c == '/' || c.is_control()) => {
                let reason = format!("{id:?} cannot be the name of a folder: use letters, digits, - and _");
                return refuse("--run-id", reason);
            }
            Some(id) => id.clone(),
            None if max_nodes > 1 => "none".into(),
            None => format!("{}-{}", time::compact(SystemTime::now()), std::process::id()),
        };
        let visible = PROCESS.raw("CUDA_VISIBLE_DEVICES");
        let virtual_devices = cli.virtual_local_rank.then(|| virtual_devices(visible.as_deref(), local)).transpose()?;
        let threads = (local > 1).then(|| host.threads_each(local));
        let secret = RunSecret::resolve(options.no_secret, max_nodes)?;
        let metrics = metrics(&options)?;
        let pace = Pace::parse(cli.ranks.rdzv_conf.as_deref().unwrap_or_default())?;
        let terms = Terms {
            run_id: run_id.clone(),
            min_nodes,
            max_nodes,
            max_restarts: options.max_restarts,
            version: version(),
        };
        let rendezvous = (max_nodes > 1).then_some(Rendezvous { terms, pace, is_static });
        let (program, args) = program(cli)?;
        Ok(Self {
            program,
            args,
            topology,
            rendezvous,
            master_addr,
            master_port,
            run_id,
            threads,
            virtual_devices,
            secret,
            metrics,
            options,
            is_check: false,
            agent: None,
        })
    }
}

fn refuse_what_is_not_supported(cli: &Cli) -> Result<()> {
    if cli.module {
        return refuse("--module", "ddprun runs programs as they are: use `ddprun … python -m MODULE`");
    }
    // An empty value is torchrun's default and matches what ddprun does.
    if cli.local_addr.as_deref().is_some_and(|text| !text.is_empty()) {
        return refuse("--local-addr", "ranks detect their own addresses: omit this option");
    }
    Ok(())
}

/// Where metrics are served.
fn metrics(options: &Options) -> Result<Option<SocketAddr>> {
    let Options { metrics_addr, metrics_port, .. } = options;
    match metrics_port {
        Some(port) => Ok(Some(SocketAddr::new(metrics_addr.unwrap_or(loopback()), *port))),
        None if metrics_addr.is_some() => {
            refuse("--metrics-addr", "needs --metrics-port: give the port of the metrics as well")
        }
        None => Ok(None),
    }
}

/// The GPU of each of `workers` workers, given the value of CUDA_VISIBLE_DEVICES, if it is set.
fn virtual_devices(visible: Option<&str>, workers: usize) -> Result<Vec<String>> {
    let Some(list) = visible else { return Ok((0..workers).map(|gpu| gpu.to_string()).collect()) };
    let devices: Vec<String> = list.split(',').map(|device| device.trim().to_owned()).collect();
    if list.trim().is_empty() || devices.len() < workers {
        let reason = format!("each of {workers} workers needs its own GPU, but CUDA_VISIBLE_DEVICES is {list:?}");
        return refuse("--virtual-local-rank", reason);
    }
    Ok(devices.into_iter().take(workers).collect())
}

/// Whether the nodes meet as in torchrun's static rendezvous.
fn is_static(cli: &Cli) -> Result<bool> {
    match cli.ranks.rdzv_backend.as_deref() {
        None | Some("" | "static") => Ok(true),
        Some("c10d") => Ok(false),
        Some(other) => refuse("--rdzv-backend", format!("{other:?} is not supported: use static or c10d")),
    }
}

/// The smallest and the largest number of nodes.
fn node_range(cli: &Cli, is_static: bool) -> Result<(usize, usize)> {
    let text = cli.ranks.nnodes.as_str();
    let (least, most) = text.split_once(':').unwrap_or((text, text));
    match (least.trim().parse::<usize>(), most.trim().parse::<usize>()) {
        (Ok(least), Ok(most)) if least > 0 && least < most && is_static => {
            let needs = "needs --rdzv-backend c10d and --rdzv-endpoint HOST[:PORT] on every node";
            refuse("--nnodes", format!("the range {text} {needs}"))
        }
        (Ok(least), Ok(most)) if least > 0 && least <= most => Ok((least, most)),
        _ => refuse("--nnodes", format!("{text:?} must be a positive number of machines, or MIN:MAX")),
    }
}

fn topology(cli: &Cli, host: &Host, nodes: usize, is_static: bool) -> Result<Topology> {
    // Elsewhere, nodes get their ranks when they meet.
    let node_rank = cli.ranks.node_rank.filter(|_| is_static).unwrap_or(0);
    if node_rank >= nodes {
        return refuse("--node-rank", format!("{node_rank} must be between 0 and {} (--nnodes {nodes})", nodes - 1));
    }
    if nodes > 1 && cli.ranks.standalone {
        let reason = format!("means a single machine, but --nnodes is {}: omit one of the two", cli.ranks.nnodes);
        return refuse("--standalone", reason);
    }
    if nodes > 1 && is_static && cli.ranks.node_rank.is_none() {
        let reason = format!("is required with --nnodes {nodes}: 0 on the machine of --master-addr, 1 on the next …");
        return refuse("--node-rank", reason);
    }
    let local_world_size = host.count(cli.ranks.nproc_per_node)?;
    if nodes.checked_mul(local_world_size).is_none_or(|ranks| ranks > MOST_RANKS) {
        return refuse("--nnodes", format!("{nodes} × {local_world_size} ranks must be at most {MOST_RANKS}"));
    }
    Ok(Topology { layout: Layout::even(nodes, local_world_size), node_rank })
}

/// The address of the store, and its port unless any free one will do.
fn master(cli: &Cli, nodes: usize, is_static: bool) -> Result<(String, Option<u16>)> {
    if cli.ranks.standalone && (cli.ranks.master_port.is_some() || cli.ranks.master_addr.is_some()) {
        let reason = "uses a free port of this machine: omit it to set --master-addr or --master-port";
        return refuse("--standalone", reason);
    }
    // torchrun's `--standalone` ignores these as well.
    let endpoint = cli.ranks.rdzv_endpoint.as_deref().filter(|text| !text.is_empty() && !cli.ranks.standalone);
    if let Some(endpoint) = endpoint {
        return master_at(endpoint, nodes, is_static);
    }
    if !is_static && nodes > 1 {
        let reason =
            "is required with --rdzv-backend c10d: HOST[:PORT] of the node that hosts the store, on every node";
        return refuse("--rdzv-endpoint", reason);
    }
    if cli.ranks.master_port == Some(0) {
        return refuse("--master-port", "0 is not a port: omit this option on a single machine to get a free port");
    }
    let address = match cli.ranks.master_addr.as_deref().map(str::trim) {
        Some("") => {
            let reason = "is empty: give the name of machine 0, or omit this option on a single machine";
            return refuse("--master-addr", reason);
        }
        // Brackets are only for IPv6 addresses followed by a port.
        Some(address) if is_host(without_brackets(address)) => without_brackets(address).into(),
        Some(address) => {
            let reason = format!("{address:?} must be one name or address: give the port by --master-port");
            return refuse("--master-addr", reason);
        }
        None if nodes > 1 => {
            let reason =
                "is required for several machines: the name of machine 0, which all of them must be able to resolve";
            return refuse("--master-addr", reason);
        }
        None => loopback().to_string(),
    };
    let port = cli.ranks.master_port.or((nodes > 1).then_some(DEFAULT_MASTER_PORT));
    Ok((address, port))
}

fn without_brackets(address: &str) -> &str {
    address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(address)
}

/// Whether this can be a name, or an address without a port.
fn is_host(text: &str) -> bool {
    let is_word = !text.contains(|c: char| c.is_whitespace() || c.is_control());
    // An IPv6 address may name a network interface.
    is_word && !text.contains(':') || text.split('%').next().is_some_and(|address| address.parse::<Ipv6Addr>().is_ok())
}

/// The store's address from `--rdzv-endpoint HOST[:PORT]`.
fn master_at(endpoint: &str, nodes: usize, is_static: bool) -> Result<(String, Option<u16>)> {
    let wrong = |reason: &str| Error::usage("--rdzv-endpoint", format!("{endpoint:?} {reason}"));
    let (host, port) = match endpoint.rsplit_once(':') {
        // An IPv6 address without brackets has no port.
        Some((host, port)) if !host.contains(':') || host.ends_with(']') => (host, Some(port)),
        _ => (endpoint, None),
    };
    let host = without_brackets(host.trim());
    if host.is_empty() {
        return Err(wrong("has no host: give HOST or HOST:PORT"));
    }
    if !is_host(host) {
        return Err(wrong("is not HOST:PORT: write an IPv6 address with a port as [::1]:29501"));
    }
    let port = port.map(|port| port.parse::<u16>().map_err(|_| wrong("does not end with a port"))).transpose()?;
    let default = if is_static { DEFAULT_MASTER_PORT } else { DEFAULT_ENDPOINT_PORT };
    match port {
        Some(0) if nodes > 1 => Err(wrong("has port 0, which other nodes cannot know")),
        Some(0) => Ok((host.into(), None)),
        Some(port) => Ok((host.into(), Some(port))),
        None => Ok((host.into(), (nodes > 1).then_some(default))),
    }
}

fn program(cli: Cli) -> Result<(Program, Vec<OsString>)> {
    let Cli { example, bin, bench, package, features, profile, debug, command, .. } = cli;
    let profile = if debug { Some("dev".into()) } else { profile };
    let named = [("example", example), ("bin", bin), ("bench", bench)];
    if let Some((kind, name)) = named.into_iter().find_map(|(kind, name)| Some((kind, name?))) {
        return Ok((Program::Cargo(CargoTarget { name, kind, package, features, profile }), command));
    }
    if package.is_some() || !features.is_empty() || profile.is_some() {
        let reason = "configure a cargo build, but there is nothing to build: add --example NAME or --bin NAME";
        return refuse("--package, --features, --profile and --debug", reason);
    }
    let mut command = command.into_iter();
    let program = command.next().filter(|program| !program.is_empty());
    let missing = || Error::usage("PROGRAM", "is missing: give a program to run, or use --example NAME or --bin NAME");
    Ok((Program::Path(program.ok_or_else(missing)?), command.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::prefix::VARIABLE as PREFIX_VARIABLE;
    use clap::Parser;
    use std::collections::BTreeSet;
    use std::time::Duration;

    const HOST: Host = Host { cores: 8, gpus: 2 };

    fn resolve(args: &[&str]) -> Result<Config> {
        Config::resolve(Cli::try_parse_from([&["ddprun"], args].concat()).unwrap(), &HOST)
    }

    #[test]
    fn the_table_of_variables_has_those_of_all_options() {
        let command = <Cli as clap::CommandFactory>::command();
        let read: BTreeSet<&str> = command.get_arguments().filter_map(|arg| arg.get_env()?.to_str()).collect();
        let rows = candle_ddp_env::SECTIONS.iter().flat_map(|(_, rows)| *rows);
        let others = [PREFIX_VARIABLE, "CANDLE_DDP_RSH"];
        let is_option = |name: &&str| name.starts_with("PET_") || others.contains(name);
        let listed = rows.flat_map(|row| row.names).copied().filter(is_option).collect();
        assert_eq!(read, listed);
    }

    #[test]
    fn defaults() {
        let config = resolve(&["./train", "--epochs", "3", "--", "-x"]).unwrap();
        assert_eq!(config.program, Program::Path("./train".into()));
        assert_eq!(config.args, ["--epochs", "3", "--", "-x"]);
        assert_eq!(config.topology, Topology { layout: Layout::even(1, 1), node_rank: 0 });
        assert_eq!((config.master_addr.as_str(), config.master_port), ("127.0.0.1", None));
        assert_eq!((config.threads, config.options.shutdown_timeout), (None, Duration::from_secs(30)));
    }

    #[test]
    fn cargo_targets_take_their_arguments_after_two_dashes() {
        let config = resolve(&["--example", "digits", "-p", "a", "--features", "x,y", "--", "--epochs", "3"]).unwrap();
        assert_eq!(config.args, ["--epochs", "3"]);
        let Program::Cargo(target) = config.program else { panic!("{:?}", config.program) };
        assert_eq!((target.kind, target.name.as_str(), target.package.as_deref()), ("example", "digits", Some("a")));
    }

    #[test]
    fn ranks_of_several_machines() {
        let args = ["--nnodes=3", "--node_rank=2", "--nproc_per_node=gpu", "--master_addr=a", "./train"];
        let config = resolve(&args).unwrap();
        assert_eq!(config.topology.world_size(), 6);
        assert_eq!([0, 1].map(|local| config.topology.rank(local)), [4, 5]);
        assert_eq!((config.master_port, config.threads), (Some(29500), Some(4)));
        assert_eq!(config.run_id, "none");
    }

    #[test]
    fn endpoints() {
        let resolve = |endpoint: &str, nodes: &str| {
            let args = ["--nnodes", nodes, "--rdzv-backend=c10d", "--rdzv-endpoint", endpoint, "--rdzv-id=a", "x"];
            let config = resolve(&args).unwrap();
            (config.master_addr, config.master_port, config.rendezvous.map(|with| with.terms.min_nodes))
        };
        assert_eq!(resolve("node0", "1:2"), ("node0".into(), Some(29400), Some(1)));
        assert_eq!(resolve("[fd00::1]:7", "2"), ("fd00::1".into(), Some(7), Some(2)));
        assert_eq!(resolve("fd00::1", "2"), ("fd00::1".into(), Some(29400), Some(2)));
        // The usual command line for one machine.
        assert_eq!(resolve("localhost:0", "1"), ("localhost".into(), None, None));
    }
}
