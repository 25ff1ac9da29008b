//! `ddprun host-store`: the store of a run on several nodes, on a machine without workers. Then any node may be lost.
use super::folder;
use super::nodes::Coordinator;
use super::store;
use super::watch::Watch;
use crate::command::{Cli, Config, Host, HostStore, Rendezvous, secret};
use crate::console::message;
use crate::error::{Error, Result, refuse};
use crate::signal;
use crate::verdict::{VERDICT, Verdicts};
use crate::view::status::{RECORD, RunStatus, Source};
use clap::Parser;
use signal_hook::flag::{register_conditional_default, register_usize};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};

/// Hosts the store until the run is over. Returns its exit code.
pub(crate) fn serve(options: HostStore) -> Result<u8> {
    let HostStore { ranks, max_restarts, no_secret, log_dir, metrics_port, metrics_addr } = options;
    let mut cli =
        Cli::try_parse_from(["ddprun", "true"]).map_err(|error| Error::usage("host-store", error.to_string()))?;
    cli.ranks = ranks;
    (cli.options.max_restarts, cli.options.no_secret) = (max_restarts, no_secret);
    (cli.options.metrics_port, cli.options.metrics_addr) = (metrics_port, metrics_addr);
    let config = Config::resolve(cli, &Host::detect())?;
    let Some(rendezvous @ Rendezvous { is_static: false, .. }) = &config.rendezvous else {
        let reason =
            "needs --rdzv-backend c10d, --rdzv-endpoint with an address of this machine, and the --nnodes of the run";
        return refuse("host-store", reason);
    };
    let (server, port) = store::host(&config, &RunStatus::of(&config))?;
    let Some(server) = server else {
        let reason = format!(
            "{}:{port} must be a free address of this machine: it belongs to another one, or a ddprun of the run hosts the store \
             already",
            config.master_addr
        );
        return refuse("--rdzv-endpoint", reason);
    };
    let secret = config.secret.get().cloned();
    if secret.is_none() && !no_secret {
        secret::say_none(port);
    }
    let folder = log_dir.map(|dir| folder::create_in(&dir, &config.run_id)).transpose()?;
    let in_folder = |name| folder.as_ref().map(|folder| folder.join(name));
    let source = Arc::new(Source::new(&server, secret.clone(), RunStatus::of(&config)));
    let watch = Watch::start(&config, Some(source), in_folder(RECORD))?;
    let verdicts = Verdicts::new(in_folder(VERDICT), &config.run_id);
    let signals = Some(note_signals(&config.options.signals_to_handle)?);
    let coordinator = Coordinator::start(&server, secret, rendezvous.clone(), verdicts, signals)?;
    message(format_args!(
        "this machine hosts the store of run {} at port {port}, and starts no workers",
        config.run_id
    ));
    let (code, reason) = coordinator.serve_alone();
    watch.iter().for_each(Watch::finish);
    message(reason);
    Ok(code)
}

/// Where the number of the first of these signals that this process receives is noted. A second one ends the process.
fn note_signals(ending: &[i32]) -> Result<Arc<AtomicUsize>> {
    let (first, is_second) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    for &number in ending.iter().filter(|&&number| !signal::is_ignored(number)) {
        let value = usize::try_from(number).unwrap_or_default();
        // In this order, since the handlers of a signal run in the order of their registration.
        register_conditional_default(number, Arc::clone(&is_second))
            .and_then(|_| register_usize(number, Arc::clone(&first), value))
            .and_then(|_| signal_hook::flag::register(number, Arc::clone(&is_second)))
            .map_err(|error| Error::io("handling signals", error))?;
    }
    Ok(first)
}
