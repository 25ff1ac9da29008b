//! The launcher `ddprun`: starts the ranks of a program on one machine or several, with torchrun's options and environment.
//!
//! - If the launcher dies, for whatever reason, the kernel kills the workers. The launcher ends all other processes
//!   that they started, even detached ones. If the launcher is killed by SIGKILL, these survive; use `exec` in wrapper
//!   scripts.
//! - The first failure ends the other workers and decides the exit code. They get a second to exit by themselves, then
//!   SIGTERM, and SIGKILL after a grace period.
//! - Dedicated threads forward the output line by line. If it is not read, the workers block, as on a full pipe, but
//!   the launcher does not. If the launcher writes to a terminal, the workers see a pseudo-terminal, so that progress
//!   bars and colours work as if the program had been started by hand.
//! - The launcher on machine 0 hosts the rendezvous store, which outlives the workers (TORCHELASTIC_USE_AGENT_STORE). The
//!   launchers of several machines meet there (`nodes`).
//!
//! `Cli` is the command line as typed, `Config` is its meaning, and `run` executes it.
mod agent;
mod cargo;
mod check;
mod child;
mod cli;
mod config;
mod consequence;
mod console;
mod descendants;
mod environment;
mod error;
mod events;
mod folder;
mod host_store;
mod hosts;
mod judgement;
mod lines;
mod members;
mod metrics_server;
mod mode;
mod nodes;
mod numa;
mod options;
mod output;
mod page;
mod prefix;
mod printer;
mod processes;
mod ranks;
mod report;
mod root_cause;
mod secret;
mod signal;
mod status;
mod store;
mod streams;
mod supervisor;
mod tail;
mod terminal;
mod time;
mod tolerance;
mod torchfrtrace;
mod verdict;
mod watch;
mod worker;

use agent::Agent;
use candle_ddp_base::flight_record;
use candle_ddp_base::host::host_name;
use candle_ddp_env::PROCESS;
use candle_ddp_rendezvous::TcpStoreServer;
use cargo::Built;
use check::Fitness;
use clap::{CommandFactory, Parser};
use cli::Cli;
use config::{Config, Program};
use console::{Console, Target, message};
use error::{Error, Result, USAGE};
use events::Events;
use folder::RunFolder;
use mode::Mode;
use processes::Host;
use rustix::thread::CpuSet;
use secret::RunSecret;
use status::{RECORD, RunStatus, Source};
use std::ffi::{OsStr, OsString};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use supervisor::{Outcome, Supervisor};
use verdict::{How, Outcome as After, VERDICT, Verdict, Verdicts};
use watch::Watch;
use worker::{Exit, Starter};

/// How long output may stay unread at the end of a run that must end at once.
const UNREAD: Duration = Duration::from_secs(5);

/// The program `ddprun`: executes the command line of this process and returns when the run has ended.
pub fn main() -> ExitCode {
    if let Err(error) = child::unblock_signals() {
        message(format_args!("cannot unblock signals: {error}"));
    }
    match parse() {
        Ok(cli) => run(cli),
        Err(code) => code,
    }
}

/// Parses the command line of this process. On `Err`, it has shown help or an error; the value is the exit code.
fn parse() -> Result<Cli, ExitCode> {
    Cli::try_parse().map_err(|error| {
        // The text is lost if the stream has no reader.
        let _ = error.print();
        if error.use_stderr() {
            list_variables();
            Console::get().finish(UNREAD, || false);
        }
        ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(USAGE))
    })
}

/// Executes `cli` and reports errors to the user. Returns when all workers have ended.
///
/// Takes over the signals, child processes and output of this process. Call it from a thread that lives as long as the
/// process, such as the main thread, because the workers die with that thread.
fn run(mut cli: Cli) -> ExitCode {
    console::show_warnings();
    signal::survive_file_limits();
    let result = match cli.mode.take() {
        Some(Mode::MergeTraces { folder }) => merge_traces(&folder),
        Some(Mode::Explain { folder, torchfrtrace }) => explain(&folder, torchfrtrace.as_deref()),
        Some(Mode::Report { folder, output }) => show_run(&folder, output.as_deref()),
        Some(Mode::Status { address, no_secret, json }) => show_status(&address, no_secret, json),
        Some(Mode::Check(check)) => check::cli(*check).and_then(|cli| start(cli, true)),
        Some(Mode::HostStore(options)) => host_store::serve(*options).map(End::now),
        Some(Mode::CheckWorker(manner)) => check::work(&manner).map(End::now),
        None => start(cli, false),
    };
    let End { code, patience, events } = result.unwrap_or_else(|error| {
        message(describe(&error));
        if matches!(error, Error::Usage { .. }) {
            list_variables();
        }
        End::now(error.exit_code())
    });
    Console::get().finish(patience, || events.as_ref().is_some_and(Events::interrupted));
    ExitCode::from(code)
}

/// The exit code, and how long to wait for a reader that has stopped reading the output.
struct End {
    code: u8,
    patience: Duration,
    /// With events, a signal also ends the wait.
    events: Option<Events>,
}

impl End {
    fn now(code: u8) -> Self {
        Self { code, patience: UNREAD, events: None }
    }
}

/// Returns the error's text, with a hint if a resource of the system has run out.
fn describe(error: &Error) -> String {
    let hint = match error {
        Error::Library(candle_ddp_rendezvous::Error::Base(candle_ddp_base::Error::Io { error, .. })) => {
            worker::resource_hint(error)
        }
        _ => None,
    };
    hint.map_or_else(|| error.to_string(), |hint| format!("{error}. Hint: {hint}"))
}

/// Lists the environment variables that may have set options, because the command line does not show them.
fn list_variables() {
    let command = Cli::command();
    let variables = command.get_arguments().filter_map(|argument| argument.get_env()?.to_str());
    let set: Vec<String> = variables.filter_map(|name| Some(format!("{name}={}", PROCESS.raw(name)?))).collect();
    if !set.is_empty() {
        message(format_args!("options also come from the environment: {}", set.join(" ")));
    }
}

fn merge_traces(folder: &Path) -> Result<End> {
    let (path, ranks, old) = candle_ddp_base::trace::merge_newest(folder)?;
    old.iter().for_each(|file| message(candle_ddp_base::trace::left_out(file)));
    message(format_args!("{} shows {ranks} ranks: open it at https://ui.perfetto.dev", path.display()));
    Ok(End::now(0))
}

fn explain(folder: &Path, torchfrtrace: Option<&Path>) -> Result<End> {
    let records = flight_record::read_folder(folder)?;
    message(flight_record::explain(&records));
    if let Some(output) = torchfrtrace {
        let (records, _) = flight_record::newest(&records);
        torchfrtrace::write(&records, output)?;
        let partial = if records.iter().any(|record| records.len() < record.world_size) {
            " --allow-incomplete-ranks"
        } else {
            ""
        };
        message(format_args!("PyTorch's analyser reads them with: torchfrtrace{partial} {}", output.display()));
    }
    Ok(End::now(0))
}

fn show_run(folder: &Path, output: Option<&Path>) -> Result<End> {
    let (path, notes) = page::write(folder, output)?;
    // Names of files may have line breaks.
    notes.iter().for_each(|note| message(tail::line(note)));
    message(format_args!("{} shows the run: open it in a browser", path.display()));
    Ok(End::now(0))
}

fn show_status(address: &str, no_secret: bool, json: bool) -> Result<End> {
    let text = status::of_run(address, no_secret, json)?;
    // The text is lost if stdout has no reader.
    let _ = Console::get().show(0, Target::Stdout, text.into_bytes());
    Ok(End::now(0))
}

/// Starts a run, or a check, on this machine or from here on others.
fn start(cli: Cli, is_check: bool) -> Result<End> {
    let is_agent = cli.ranks.hosts.is_some() && hosts::is_agent();
    if let Some(hosts) = cli.ranks.hosts.as_ref().filter(|_| !is_agent) {
        return hosts::run(&cli, hosts).map(End::now);
    }
    let secret = if is_agent { hosts::follow()? } else { None };
    let mut config = Config { is_check, is_agent, ..Config::resolve(cli, &Host::detect())? };
    config.secret = secret.map_or(config.secret, RunSecret::Given);
    execute(&config)
}

fn execute(config: &Config) -> Result<End> {
    let program: OsString = match &config.program {
        Program::Path(path) => path.clone(),
        Program::Cargo(target) => match target.build()? {
            Built::Executable(path) => path.into(),
            Built::Failed(status) => {
                let exit = status.signal().map_or(Exit::Code(status.code().unwrap_or(1)), Exit::Signal);
                return Ok(End::now(exit.code()));
            }
        },
    };
    let fitness = match config.options.check.map(|tolerance| check::of_this_machine(config, tolerance)).transpose() {
        Err(error) if config.rendezvous.is_some() => {
            message(describe(&error));
            // The others would wait for this machine, so it tells them.
            Err(error)
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
    fitness: Result<Option<Fitness>>,
    events: Events,
) -> Result<End> {
    let watch = if config.is_check { None } else { Watch::start(config, source.clone(), folder.kept(RECORD))? };
    let console = Console::get();
    let (intake, incoming) = output::intake().map_err(|error| Error::io("creating a pipe", error))?;
    events.forward(incoming)?;
    let (terminals, cpus) = (Vec::new(), cpus(config)?);
    let intake = Some(intake);
    let starter = Starter {
        config,
        topology: config.topology,
        program,
        is_joint_check: false,
        folder,
        master_port,
        console,
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
        agent.start_all(|worker| supervisor.workers.push(worker))?;
    }
    let (outcome, remains) = supervisor.watch(&events, &mut agent);
    let patience = config.options.shutdown_timeout;
    let (code, patience) = match outcome {
        Outcome::Success if config.is_check => (check::code(folder, agent.starter.topology.node_rank), patience),
        Outcome::Success => (0, patience),
        Outcome::Signalled(signal) => (supervisor.code_after(signal), patience.min(UNREAD)),
        Outcome::Failure(_) | Outcome::Elsewhere => {
            (report::report(&mut agent, &supervisor.workers, &remains, outcome), patience)
        }
    };
    match agent.failure().cloned().filter(|_| matches!(outcome, Outcome::Signalled(_)) && code != 0) {
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
    let workers = config.topology.local_world_size;
    let gpus = (Host::detect().gpus > 0).then(|| listed.unwrap_or_else(|| (0..workers).collect()));
    numa::bind(binding, workers, gpus.as_deref())
}

fn say_threads(config: &Config) {
    let set = environment::threads(config);
    if !set.is_empty() {
        let list: Vec<String> = set.iter().map(|(name, count)| format!("{name}={count}")).collect();
        let (cores, workers) = (config.cores, config.topology.local_world_size);
        message(format_args!("{} for each worker: {cores} cores shared by {workers}", list.join(" and ")));
    }
}
