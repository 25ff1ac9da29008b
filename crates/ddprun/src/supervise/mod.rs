//! Starts the ranks of a run, watches over them, and decides what follows when one ends: on one machine, or together with those of
//! other nodes.
mod agent;
mod cause;
mod conclude;
mod consequence;
mod descendants;
mod environment;
mod events;
mod folder;
pub(crate) mod host_store;
mod hosts;
mod judgement;
mod lines;
mod members;
mod nodes;
mod output;
mod store;
mod supervisor;
mod terminal;
mod watch;
mod worker;

use crate::check::{self, Fitness};
use crate::command::{Cli, Config, Host, Processes, Program, RunSecret, secret};
use crate::console::message;
use crate::error::{Error, Result};
use crate::verdict::{How, Outcome as After, VERDICT, Verdict, Verdicts};
use crate::view::status::{RECORD, RunStatus, Source};
use crate::{child, numa};
use agent::Agent;
use candle_ddp_base::host::host_name;
use candle_ddp_env::PROCESS;
use candle_ddp_rendezvous::TcpStoreServer;
use events::Events;
use folder::RunFolder;
use rustix::thread::CpuSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::time::Duration;
use supervisor::{Outcome, Supervisor};
use watch::Watch;
use worker::{Exit, Starter};

/// How long output may stay unread at the end of a run that must end at once.
pub(crate) const UNREAD: Duration = Duration::from_secs(5);

/// The exit code, and how long to wait for a reader that has stopped reading the output.
pub(crate) struct End {
    pub(crate) code: u8,
    pub(crate) patience: Duration,
    /// With events, a signal also ends the wait.
    events: Option<Events>,
}

impl End {
    pub(crate) fn now(code: u8) -> Self {
        Self { code, patience: UNREAD, events: None }
    }

    pub(crate) fn done((): ()) -> Self {
        Self::now(0)
    }

    /// Whether a signal has ended the wait.
    pub(crate) fn interrupted(&self) -> bool {
        self.events.as_ref().is_some_and(Events::interrupted)
    }
}

/// Returns the error's text, with a hint if a resource of the system has run out.
pub(crate) fn describe(error: &Error) -> String {
    let hint = match error {
        Error::Library(candle_ddp_rendezvous::Error::Base(candle_ddp_base::Error::Io { error, .. })) => {
            worker::resource_hint(error)
        }
        _ => None,
    };
    hint.map_or_else(|| error.to_string(), |hint| format!("{error}. Hint: {hint}"))
}

/// Starts a run, or a check, on this machine or from here on others.
pub(crate) fn start(mut cli: Cli, is_check: bool) -> Result<End> {
    let Some(hosts) = &cli.ranks.hosts else {
        return execute(&Config { is_check, ..Config::resolve(cli, &Host::detect())? });
    };
    if !hosts::is_agent() {
        return hosts::run(&cli, hosts).map(End::now);
    }
    let workers = cli.ranks.node_rank.and_then(|node_rank| hosts.get(node_rank)?.workers);
    cli.ranks.nproc_per_node = workers.map_or(cli.ranks.nproc_per_node, Processes::Count);
    let (secret, variables) = hosts::follow()?;
    let config = Config::resolve(cli, &Host::detect())?;
    let secret = secret.map_or(config.secret, RunSecret::Given);
    execute(&Config { is_check, secret, agent: Some(variables), ..config })
}

fn execute(config: &Config) -> Result<End> {
    let program: OsString = match &config.program {
        Program::Path(path) => path.clone(),
        Program::Cargo(target) => match target.build()? {
            Ok(path) => path.into(),
            Err(status) => {
                let exit = status.signal().map_or(Exit::Code(status.code().unwrap_or(1)), Exit::Signal);
                return Ok(End::now(exit.code()));
            }
        },
    };
    let fitness = match config.options.check.map(|tolerance| check::of_this_machine(config, tolerance)).transpose() {
        Err(error) if config.rendezvous.is_some() => {
            message(describe(&error));
            // The others would wait for this machine, so it tells them.
            Err(if let Error::Unfit(reason) = error { reason } else { error.to_string() })
        }
        fitness => Ok(fitness?),
    };
    let events = Events::listen(&config.options.signals_to_handle)?;
    store::check_address(config)?;
    let (server, master_port) = store::host(config, &RunStatus::of(config))?;
    let source = server.as_ref().map(|server| {
        let secret = config.secret.get().cloned();
        Arc::new(Source::new(server, secret, RunStatus::of(config)))
    });
    if config.secret == RunSecret::None && !config.options.no_secret {
        secret::say_none(master_port);
    }
    let folder = RunFolder::create(config)?;
    run_workers(config, &program, &folder, (server, master_port, source), fitness, events).inspect_err(|error| {
        let verdict =
            Verdict { host: Some(host_name()), ..Verdict::now(How::NotStarted, error.exit_code(), describe(error)) };
        Verdicts::new(folder.kept(VERDICT), &config.run_id).add(verdict, After::Failed, 0);
    })
}

/// Runs the workers until they have ended.
fn run_workers(
    config: &Config,
    program: &OsStr,
    folder: &RunFolder,
    (server, master_port, source): (Option<TcpStoreServer>, u16, Option<Arc<Source>>),
    fitness: Result<Option<Fitness>, String>,
    events: Events,
) -> Result<End> {
    let watch = if config.is_check { None } else { Watch::start(config, source.clone(), folder.kept(RECORD))? };
    let (intake, terminals, cpus) = (Some(events.forward()?), Vec::new(), cpus(config)?);
    let starter = Starter {
        config,
        topology: config.topology.clone(),
        program,
        is_joint_check: false,
        folder,
        master_port,
        is_bound: can_bind(),
        cpus,
        intake,
        terminals,
    };
    let mut supervisor = Supervisor::new(config.options.shutdown_timeout);
    let link = store::link(config, server.as_ref(), (master_port, fitness), &events)?;
    let mut agent = Agent::new(starter, server, source, link);
    // Before any output of workers.
    if !config.is_check {
        say_threads(config);
    }
    if !agent.is_linked() {
        agent.start_all(&[], &mut supervisor.workers)?;
    }
    let (outcome, remains) = supervisor.watch(&events, &mut agent);
    let patience = config.options.shutdown_timeout;
    let (code, patience) = match outcome {
        Outcome::Success if config.is_check => {
            (check::code(folder.error(0, 0), agent.starter.topology.node_rank), patience)
        }
        Outcome::Success => (0, patience),
        Outcome::Signalled(signal) => (supervisor.code_after(signal), patience.min(UNREAD)),
        Outcome::Failure(_) | Outcome::Elsewhere => {
            (conclude::conclude(&mut agent, &supervisor.workers, &remains, outcome), patience)
        }
    };
    match agent.failure.clone().filter(|_| matches!(outcome, Outcome::Signalled(_)) && code != 0) {
        Some(stopped) => agent.fail(stopped),
        None if code == 0 => agent.succeed(),
        None => {}
    }
    watch.iter().for_each(Watch::finish);
    agent.leave(supervisor.grace_left(), || events.interrupted());
    Ok(End { code, patience, events: Some(events) })
}

/// Whether the kernel can kill the workers when this process ends; warns if not.
fn can_bind() -> bool {
    child::can_bind_to_launcher()
        .inspect_err(|error| {
            message(format_args!(
                "the system forbids the call prctl ({error}), as some seccomp profiles do: if ddprun is killed by SIGKILL, its \
                 workers live on"
            ));
        })
        .is_ok()
}

/// The processors of each worker, if it is to be bound.
fn cpus(config: &Config) -> Result<Vec<CpuSet>> {
    let Some(binding) = config.options.numa_binding else { return Ok(Vec::new()) };
    let visible = PROCESS.raw("CUDA_VISIBLE_DEVICES");
    let listed = visible.map(|list| list.split(',').map_while(|gpu| gpu.trim().parse().ok()).collect::<Vec<usize>>());
    let workers = config.topology.local_world_size();
    let gpus = (Host::detect().gpus > 0).then(|| listed.unwrap_or_else(|| (0..workers).collect()));
    numa::bind(binding, workers, gpus.as_deref())
}

fn say_threads(config: &Config) {
    let set = environment::threads(config);
    if !set.is_empty() {
        let list: Vec<String> = set.iter().map(|(name, count)| format!("{name}={count}")).collect();
        let (cores, workers) = (Host::detect().cores, config.topology.local_world_size());
        message(format_args!("{} for each worker: {cores} cores shared by {workers}", list.join(" and ")));
    }
}
