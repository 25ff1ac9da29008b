//! Objects and meshes with ranks that are processes under the launcher.
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
        "objects" => objects(&pg),
        "parts" => parts(&pg),
        "mesh" => mesh(&pg),
        "roots" => roots(&pg),
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

fn succeeds(job: &str, world_size: usize) {
    let output = run(job, world_size, Path::new(""));
    assert!(output.status.success(), "{job}: {}", String::from_utf8_lossy(&output.stderr));
}

/// An object of a rank; they have different sizes.
fn own(rank: usize) -> (String, Vec<f64>) {
    (format!("rank {rank}"), vec![f64::INFINITY; rank])
}

fn objects(pg: &ProcessGroup) -> Result<()> {
    let (rank, world_size) = (pg.rank(), pg.world_size());
    let all: Vec<_> = (0..world_size).map(own).collect();
    for root in 0..world_size {
        assert_eq!(pg.gather_object(&own(rank), root)?, (rank == root).then(|| all.clone()));
        assert_eq!(pg.scatter_object((rank == root).then_some(&all[..]), root)?, own(rank));
        assert_eq!(pg.broadcast_object((rank == root).then(|| own(root)).as_ref(), root)?, own(root));
    }
    // Around the ring, one rank first receives.
    let (next, last) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
    if rank == 0 {
        assert_eq!(pg.recv_object::<(String, Vec<f64>)>(last)?, own(last));
    }
    pg.send_object(&own(rank), next)?;
    if rank > 0 {
        assert_eq!(pg.recv_object::<(String, Vec<f64>)>(last)?, own(last));
    }
    assert_eq!(pg.all_gather_object(&own(rank))?, all);
    Ok(())
}

/// An object of three parts: 13 characters, so that parts begin with different ones.
fn large() -> String {
    "0123456789abc".repeat((130 << 20) / 13)
}

/// Objects that are sent in parts.
fn parts(pg: &ProcessGroup) -> Result<()> {
    let (rank, large, small) = (pg.rank(), large(), "small".to_string());
    assert!(pg.broadcast_object((rank == 1).then_some(&large), 1)? == large);
    match rank {
        0 => pg.send_object(&large, 1)?,
        _ => assert!(pg.recv_object::<String>(0)? == large),
    }
    let all = pg.gather_object([&large, &small][rank], 1)?;
    assert!(all.as_deref().is_none_or(|all| all[0] == large && all[1] == small));
    assert!(&pg.scatter_object(all.as_deref(), 1)? == [&large, &small][rank]);
    Ok(())
}

fn mesh(pg: &ProcessGroup) -> Result<()> {
    let (rank, mesh) = (pg.rank(), pg.mesh(&[2, 1, 2], &["replicate", "shard", "tensor"])?);
    assert_eq!(mesh.get_coordinate(), [rank / 2, 0, rank % 2]);
    assert_eq!(mesh.get_group("replicate")?.all_gather_object(&rank)?, [rank % 2, rank % 2 + 2]);
    assert_eq!(mesh.get_group("shard")?.all_gather_object(&rank)?, [rank]);
    assert_eq!(mesh.get_group("tensor")?.gather_object(&rank, 1)?, (rank % 2 == 1).then(|| vec![rank - 1, rank]));
    let data = mesh.slice(&["replicate", "shard"])?;
    assert_eq!((data.shape(), data.get_coordinate()), (vec![2, 1], vec![rank / 2, 0]));
    assert_eq!(data.flatten("data")?.get_group("data")?.all_gather_object(&rank)?, [rank % 2, rank % 2 + 2]);
    assert_eq!(mesh.flatten("all")?.get_group("all")?.scatter_object(Some(&[5, 6, 7, 8]), 0)?, rank + 5);
    Ok(())
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

/// Ranks name different roots, and both have an object.
fn roots(pg: &ProcessGroup) -> Result<()> {
    let (rank, object) = (pg.rank(), large());
    let errors = [
        pg.broadcast_object(Some(&1), rank).map(drop),
        pg.broadcast_object(Some(&object), rank).map(drop),
        pg.gather_object(&object, rank).map(drop),
        pg.scatter_object(Some(&[1, 2]), rank).map(drop),
    ];
    for error in errors {
        let text = error.unwrap_err().to_string();
        assert_eq!(text, "root: it must be the same on all ranks, but is 0 on rank 0, 1 on rank 1");
    }
    assert_eq!(pg.all_gather_object(&rank)?, [0, 1]);
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
fn objects_are_gathered_scattered_broadcast_sent_and_received() {
    succeeds("objects", 3);
}

#[test]
fn objects_may_be_larger_than_a_part() {
    succeeds("parts", 2);
}

#[test]
fn a_mesh_has_groups_slices_and_flat_dimensions() {
    succeeds("mesh", 4);
}

#[test]
fn ranks_that_name_different_roots_learn_of_it_at_once() {
    succeeds("roots", 2);
}

#[test]
fn an_error_names_the_purpose_of_a_call_that_its_rank_never_makes() {
    succeeds("purposes", 2);
}

#[test]
fn every_survivor_names_a_rank_killed_within_a_large_object() {
    let jobs = [
        ("broadcast", "broadcast_object"),
        ("gather", "gather_object"),
        ("all-gather", "all_gather_object"),
        ("sends", "send_object"),
        ("receives", "send_object"),
    ];
    for (job, label) in jobs {
        survivors_name_the_victim(job, label);
    }
}

#[test]
fn every_survivor_names_a_rank_killed_while_a_fragment_is_in_flight() {
    survivors_name_the_victim("flight", "PeriodicModelAverager::average_parameters");
}

fn survivors_name_the_victim(job: &str, label: &str) {
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
