//! The flight recorder: a rank's last calls, as files.
use crate::common::{ranks, try_ranks};
use candle_core::{DType, Tensor};
use candle_ddp::{ReduceOp, Result};
use serde_json::Value;
use std::path::Path;

fn read(folder: &Path, rank: usize) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join(format!("rank{rank}.flight.json"))).unwrap()).unwrap()
}

fn group<'a>(file: &'a Value, name: &str) -> &'a Value {
    file["groups"].as_array().unwrap().iter().find(|group| group["name"] == name).unwrap()
}

#[test]
fn the_calls_of_all_groups_are_written() {
    let folder = tempfile::tempdir().unwrap();
    ranks(3, |pg| {
        let tensor = Tensor::zeros(6, DType::F32, pg.device())?;
        pg.all_reduce_async(&tensor, ReduceOp::Max)?.wait()?;
        pg.all_reduce_scalars([1.], ReduceOp::Sum)?;
        let group = pg.new_group(&[2, 0])?;
        match (pg.rank(), &group) {
            (2, Some(group)) => group.send(&tensor, 1)?,
            (0, Some(group)) => group.recv(&tensor, 0)?,
            _ => pg.write_flight_record(folder.path()).map(drop)?,
        }
        pg.broadcast(&tensor, 1)?;
        // Both records go into the same file.
        pg.write_flight_record(folder.path())?;
        let path = pg.write_flight_record(folder.path())?;
        assert_eq!(path, folder.path().join(format!("rank{}.flight.json", pg.rank())));
        pg.barrier()
    });
    for rank in 0..3 {
        let file = read(folder.path(), rank);
        assert_eq!((&file["rank"], &file["world_size"], &file["version"]), (&rank.into(), &3.into(), &1.into()));
        let calls = group(&file, "world")["calls"].as_array().unwrap();
        let text = |call: &Value| {
            let field = |name: &str| call[name].as_str().map_or_else(|| call[name].to_string(), str::to_string);
            ["sequence", "operation", "dtype", "count", "reduction", "root", "label", "state"].map(field).join(" ")
        };
        let expected = [
            "1 all_reduce f32 6 max null null completed",
            "2 all_reduce f64 1 sum null all_reduce_scalars completed",
            "3 broadcast f32 6 null 1 null completed",
        ];
        assert_eq!(calls.iter().map(text).collect::<Vec<_>>(), expected);
        for call in calls {
            let times = ["scheduled_ns", "started_ns", "completed_ns"].map(|name| call[name].as_u64().unwrap());
            assert!(times[0] > 1_700_000_000_000_000_000 && times[0] <= times[1] && times[1] <= times[2], "{times:?}");
        }
    }
    let (sender, receiver) = (read(folder.path(), 2), read(folder.path(), 0));
    let message = |file| group(file, "world/group0")["calls"][0].clone();
    assert_eq!(group(&sender, "world/group0")["ranks"], serde_json::json!([2, 0]));
    assert_eq!((&message(&sender)["channel"], &message(&sender)["peer"]), (&"send".into(), &1.into()));
    assert_eq!((&message(&receiver)["channel"], &message(&receiver)["peer"]), (&"recv".into(), &0.into()));
    let files: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(files.len(), 3, "{files:?}");
}

#[test]
fn a_call_that_failed_is_written_as_such() {
    let folder = tempfile::tempdir().unwrap();
    let result: Result<Vec<()>> = try_ranks(2, |pg| {
        let tensor = Tensor::zeros(4, DType::F32, pg.device())?;
        let error = match pg.rank() {
            0 => pg.all_reduce(&tensor, ReduceOp::Sum),
            _ => pg.barrier(),
        };
        pg.write_flight_record(folder.path())?;
        error
    });
    result.unwrap_err();
    for (rank, operation) in [(0, "all_reduce"), (1, "barrier")] {
        let file = read(folder.path(), rank);
        let world = group(&file, "world");
        assert_eq!(
            (&world["calls"][0]["operation"], &world["calls"][0]["state"]),
            (&operation.into(), &"failed".into())
        );
        let failure = world["failure"].as_str().unwrap();
        assert!(failure.contains("rank 1 called barrier() where rank 0 called all_reduce(f32[4])"), "{failure}");
        let place = world["calls"][0]["place"].as_str().unwrap();
        assert!(place.contains("flight_recorder.rs:"), "{place}");
        assert!(failure.contains(&format!("rank {rank} is at {place}")), "{failure}");
    }
}
