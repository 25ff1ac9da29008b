//! Flight records, read by PyTorch's own analyser.
//!
//! Needs PyTorch for the interpreter named by CANDLE_DDP_PYTHON (default: python3); otherwise skipped with a message.
use crate::common::ranks;
use candle_core::{DType, Device, Tensor};
use candle_ddp::{ProcessGroup, ReduceOp, Result};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

const MODULES: &str = "torch.distributed.flight_recorder";

/// Records the calls of `work` on `world` ranks and in the group that it returns, and returns PyTorch's reading of them.
fn analysed(
    python: &PathBuf,
    world: usize,
    work: impl Fn(&ProcessGroup) -> Result<Option<ProcessGroup>> + Send + Sync,
) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let (records, output) = (folder.path().join("records"), folder.path().join("pytorch"));
    ranks(world, |pg| {
        let _part = work(&pg)?;
        pg.write_flight_record(&records).map(drop)
    });
    let explain = |output: &Path| {
        let mut command = Command::new(crate::common::ddprun());
        command.arg("explain").arg(&records).arg("--torchfrtrace").arg(output).output().unwrap()
    };
    let text = String::from_utf8_lossy(&explain(&output).stderr).into_owned();
    assert!(text.contains(&format!("torchfrtrace {}", output.display())), "{text}");
    // PyTorch's analyser would read files of another run as well.
    let second = explain(&output);
    let text = String::from_utf8_lossy(&second.stderr);
    assert!(second.status.code() == Some(2) && text.contains("must be empty"), "{text}");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/interop/torchfrtrace.py");
    let read = Command::new(python).arg(script).arg(&output).output().unwrap();
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    serde_json::from_slice(&read.stdout).unwrap()
}

fn tensor(elements: usize) -> Tensor {
    Tensor::zeros(elements, DType::F32, &Device::Cpu).unwrap()
}

#[test]
fn pytorchs_analyser_matches_every_call() {
    let Some(python) = crate::pytorch::python_with("pytorchs_analyser_matches_every_call", MODULES) else { return };
    let found = analysed(&python, 3, |pg| {
        let rank = pg.rank();
        pg.all_reduce(&tensor(5), ReduceOp::Sum)?;
        pg.broadcast(&tensor(7), 1)?;
        pg.all_gather(&tensor(6), &tensor(2))?;
        pg.reduce_scatter(&tensor(2), &tensor(6), ReduceOp::Avg)?;
        pg.all_to_all(&tensor(6), &tensor(6))?;
        let on = |root: usize| (rank == root).then(|| tensor(6));
        pg.gather(on(1).as_ref(), &tensor(2), 1)?;
        pg.scatter(&tensor(2), on(0).as_ref(), 0)?;
        pg.barrier()?;
        // Messages in both directions, of which two ranks know.
        match rank {
            0 => [1, 2].into_iter().try_for_each(|peer| pg.send(&tensor(peer), peer))?,
            rank => pg.recv(&tensor(rank), 0)?,
        }
        match rank {
            0 => pg.recv(&tensor(4), 2)?,
            2 => pg.send(&tensor(4), 0)?,
            _ => {}
        }
        let part = pg.new_group(&[0, 2])?;
        part.iter().try_for_each(|part| part.all_reduce(&tensor(9), ReduceOp::Max))?;
        Ok(part)
    });
    let collectives = found["collectives"].as_array().unwrap();
    for collective in collectives {
        assert!(collective["passes"] == true && collective["missing"] == json!([]), "{collective}");
        assert!(collective["frames"][0].as_str().unwrap().ends_with("torchfrtrace.rs"), "{collective}");
    }
    let of = |group: &str| {
        let of_group = collectives.iter().filter(|collective| collective["group"].as_str().unwrap().starts_with(group));
        of_group.map(|collective| collective["name"].as_str().unwrap().to_string()).collect::<Vec<_>>()
    };
    // A message is one call of its two ranks; either names it.
    for (group, names) in [
        ("world: messages from 0 to 1", ["c10d:send 0->1", "c10d:recv 1<-0"]),
        ("world: messages from 2 to 0", ["c10d:send 1->0", "c10d:recv 0<-1"]),
    ] {
        assert!(matches!(&of(group)[..], [name] if names.contains(&name.as_str())), "{group}: {found}");
    }
    let names = of("world:default_pg");
    for name in
        ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "barrier"]
    {
        assert!(names.contains(&format!("c10d:{name}")), "{name}: {names:?}");
    }
    assert!(of("world/").contains(&"c10d:all_reduce".to_string()), "{found}");
}

#[test]
fn pytorchs_analyser_names_the_rank_that_did_not_come() {
    let Some(python) = crate::pytorch::python_with("pytorchs_analyser_names_the_rank_that_did_not_come", MODULES)
    else {
        return;
    };
    let found = analysed(&python, 3, |pg| {
        pg.barrier()?;
        if pg.rank() != 2 {
            // The group ends with the error; the record is written after it.
            let _ = pg.all_reduce(&tensor(5), ReduceOp::Sum);
        }
        Ok(None)
    });
    let last = found["collectives"].as_array().unwrap().last().unwrap();
    assert_eq!((&last["name"], &last["missing"]), (&json!("c10d:all_reduce"), &json!([2])), "{found}");
}
