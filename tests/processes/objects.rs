//! Calls with objects, of ranks that are processes under the launcher.
//!
//! The processes are this test binary itself; an environment variable makes it a rank.
use crate::common::{assert_error, launch_test};
use candle_core::{DType, Var};
use candle_ddp::optim::{ParamsSgd, PeriodicModelAverager};
use candle_ddp::{Error, Failure, InitOptions, ProcessGroup, Result, StopSignals, init_process_group};
use rustix::process::{Signal, getpid, kill_process};
use std::cell::RefCell;
use std::path::Path;
use std::process::Output;
use std::time::Duration;

/// The variable that names a rank's job.
const JOB: &str = "CANDLE_DDP_TEST_OBJECTS_JOB";
const FOLDER: &str = "CANDLE_DDP_TEST_FOLDER";
const VICTIM: usize = 1;

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_of_another_test() -> Result<()> {
    // Ranks that still read an object when the launcher asks them to exit write down their error later.
    let stop_signals = StopSignals { sigterm: true, ..Default::default() };
    let timeout = Duration::from_secs(300);
    let pg = init_process_group(InitOptions { timeout, stop_signals, ..Default::default() })?;
    match std::env::var(JOB).unwrap().as_str() {
        "purposes" => purposes(&pg),
        "broadcast" => dies(&pg, |own| pg.broadcast_object(Some(own), 0).map(drop)),
        "gather" => dies(&pg, |own| pg.gather_object(own, 0).map(drop)),
        "all-gather" => dies(&pg, |own| pg.all_gather_object(own).map(drop)),
        "sends" => dies(&pg, |own| message(&pg, VICTIM, own)),
        "receives" => dies(&pg, |own| message(&pg, 0, own)),
        "flight" => {
            let parameters = vec![Var::zeros(4 << 20, DType::F32, pg.device())?];
            let averager = PeriodicModelAverager::new(&pg, 2, 0, ParamsSgd::default())?.streaming(1, 1, 0.)?;
            let averager = RefCell::new(averager);
            dies(&pg, |_| averager.borrow_mut().average_parameters(parameters.clone()).map(drop))
        }
        other => panic!("no such job: {other}"),
    }
}

/// Runs this test binary as `world_size` ranks of `job`.
fn run(job: &str, world_size: usize, folder: &Path) -> Output {
    let mut launcher = launch_test(module_path!(), world_size, &["--standalone", "--shutdown-timeout", "300"]);
    launcher.env(JOB, job).env(FOLDER, folder).env("RAYON_NUM_THREADS", "1").output().unwrap()
}

/// An object of three parts: 13 characters, so that parts begin with different ones.
fn large() -> String {
    "0123456789abc".repeat((130 << 20) / 13)
}

/// Ranks make calls for purposes that the other one has never had.
fn purposes(pg: &ProcessGroup) -> Result<()> {
    let result = match pg.rank() {
        0 => pg.all_gather_object(&1).map(drop),
        _ => pg.gather_object(&1, 0).map(drop),
    };
    assert_error(result, &["for all_gather_object", "for gather_object"]);
    Ok(())
}

/// Rank `from` sends an object to the first other one of ranks 0 and [`VICTIM`]; the third rank waits for them.
fn message(pg: &ProcessGroup, from: usize, object: &String) -> Result<()> {
    let to = VICTIM - from;
    match pg.rank() {
        rank if rank == from => pg.send_object(object, to),
        rank if rank == to => pg.recv_object::<String>(from).map(drop),
        _ => pg.barrier(),
    }
}

/// Ranks repeat a call with an object of three parts until the victim is killed; the others write down their errors.
fn dies(pg: &ProcessGroup, call: impl Fn(&String) -> Result<()>) -> Result<()> {
    let object = large();
    if pg.rank() == VICTIM {
        pg.barrier()?;
        // At a different point each time.
        std::thread::spawn(|| {
            std::thread::sleep(Duration::from_millis(u64::from(std::process::id() % 200)));
            kill_process(getpid(), Signal::KILL)
        });
        loop {
            call(&object)?;
        }
    }
    pg.barrier()?;
    let error = loop {
        if let Err(error) = call(&object) {
            break error;
        }
    };
    let Error::Group(Failure::PeerGone { peer: VICTIM, .. }) = &error else { panic!("{error:?}") };
    let file = Path::new(&std::env::var_os(FOLDER).unwrap()).join(pg.rank().to_string());
    std::fs::write(file, error.to_string()).unwrap();
    Ok(())
}

#[test]
fn an_error_names_the_purpose_of_a_call_that_its_rank_never_makes() {
    let output = run("purposes", 2, Path::new(""));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Within a large object, or while a fragment is in flight.
#[test]
fn every_survivor_names_a_killed_rank() {
    let jobs = [
        ("broadcast", "broadcast_object"),
        ("gather", "gather_object"),
        ("all-gather", "all_gather_object"),
        ("sends", "send_object"),
        ("receives", "send_object"),
        ("flight", "PeriodicModelAverager::average_parameters"),
    ];
    for (job, label) in jobs {
        let folder = tempfile::tempdir().unwrap();
        let output = run(job, 3, folder.path());
        let report = String::from_utf8_lossy(&output.stderr);
        assert!(report.contains("rank 1 failed first: it was killed by SIGKILL"), "{job}: {report}");
        for rank in [0, 2] {
            let error = std::fs::read_to_string(folder.path().join(rank.to_string()));
            let error = error.unwrap_or_else(|error| panic!("{job}: {error}: {report}"));
            assert!(error.starts_with("rank 1 is gone: its connection to rank "), "{job}: {error}");
            // Rank 2 may be the first to notice, and takes no part in a message.
            assert!(label == "send_object" || error.contains(&format!(" for {label}")), "{job}: {error}");
        }
    }
}
