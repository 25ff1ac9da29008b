//! Launchers and programs of both worlds combined: a candle-ddp program under torchrun, a PyTorch program under ddprun.
use crate::common::{succeed, test_arguments};
use candle_core::{DType, Tensor};
use candle_ddp::{InitOptions, ReduceOp, init_process_group};
use std::path::Path;
use std::process::Command;

/// Set in rank processes: the folder to which they write their results.
const FOLDER: &str = "CANDLE_DDP_TEST_FOLDER";

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_of_another_test() {
    let folder = std::env::var(FOLDER).unwrap();
    let pg = init_process_group(InitOptions::default()).unwrap();
    let sum = Tensor::full(1f32 + pg.rank() as f32, 1000, pg.device()).unwrap();
    pg.all_reduce(&sum, ReduceOp::Sum).unwrap();
    let sum = sum.to_dtype(DType::F64).unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
    let text = format!("{sum} {} {}", pg.world_size(), pg.local_rank());
    std::fs::write(Path::new(&folder).join(format!("rank{}", pg.rank())), text).unwrap();
}

fn run(command: &mut Command) -> String {
    let [stdout, _] = succeed(command.env("OMP_NUM_THREADS", "1"));
    stdout
}

#[test]
fn a_candle_program_runs_under_torchrun() {
    let Some(python) = crate::pytorch::python("a_candle_program_runs_under_torchrun") else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut torchrun = Command::new(python);
    torchrun.args(["-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2"]);
    torchrun.arg(std::env::current_exe().unwrap()).args(test_arguments(module_path!(), "rank_of_another_test"));
    run(torchrun.env(FOLDER, folder.path()));
    for rank in 0..2 {
        let text = std::fs::read_to_string(folder.path().join(format!("rank{rank}"))).unwrap();
        assert_eq!(text, format!("3000 2 {rank}"));
    }
}

/// Trains one step with PyTorch's DDP over Gloo and checks the gradient.
const PYTORCH_PROGRAM: &str = r#"
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
model(torch.full((2, 3), rank + 1.0)).mean().backward()
expected = sum(r + 1.0 for r in range(world)) / world
assert torch.allclose(model.module.weight.grad, torch.full((1, 3), expected)), model.module.weight.grad
print("gradient averaged on rank", rank, "of", world, flush=True)
dist.barrier()
os._exit(0)  # PyTorch's own threads sometimes abort an interpreter that ends in good order
"#;

#[test]
fn a_pytorch_program_runs_under_ddprun() {
    let Some(python) = crate::pytorch::python("a_pytorch_program_runs_under_ddprun") else { return };
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("train.py");
    std::fs::write(&script, PYTORCH_PROGRAM).unwrap();
    let mut ddprun = Command::new(crate::common::ddprun());
    ddprun.args(["--standalone", "--nproc-per-node", "2"]).arg(python).arg(&script);
    let out = run(&mut ddprun);
    for rank in 0..2 {
        assert!(out.contains(&format!("gradient averaged on rank {rank} of 2")), "{out}");
    }
}

/// Rank 1 is killed in the middle of its first training.
const KILLED_ONCE: &str = r#"
import os, signal, torch, torch.distributed as dist
torch.set_num_threads(1)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
print(f"rank {rank} of {world} begins attempt {attempt}", flush=True)
for step in range(4):
    values = torch.full((1000,), rank + step + 1.0)
    dist.all_reduce(values)
    assert torch.all(values == sum(r + step + 1.0 for r in range(world))), values
    if (rank, step, attempt) == (1, 2, "0"):
        os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
print(f"rank {rank} of {world} ends attempt {attempt}", flush=True)
os._exit(0)  # PyTorch's own threads sometimes abort an interpreter that ends in good order
"#;

/// torchrun promises this. Whether it succeeds depends on luck: its ranks may find the keys of those that have ended.
#[test]
fn a_pytorch_program_whose_worker_was_killed_is_restarted() {
    let Some(python) = crate::pytorch::python("a_pytorch_program_whose_worker_was_killed_is_restarted") else { return };
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("train.py");
    std::fs::write(&script, KILLED_ONCE).unwrap();
    let mut ddprun = Command::new(crate::common::ddprun());
    ddprun.args(["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]).arg(python).arg(&script);
    let out = run(&mut ddprun);
    let mut lines: Vec<&str> = out.lines().collect();
    lines.sort_unstable();
    let expected = [
        "rank 0 of 2 begins attempt 0",
        "rank 0 of 2 begins attempt 1",
        "rank 0 of 2 ends attempt 1",
        "rank 1 of 2 begins attempt 0",
        "rank 1 of 2 begins attempt 1",
        "rank 1 of 2 ends attempt 1",
    ];
    assert_eq!(lines, expected);
}
