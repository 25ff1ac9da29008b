//! A PyTorch program under ddprun. Skipped where PyTorch is not installed.
use crate::{Place, Ran};
use std::process::Command;

const SCRIPT: &str = r#"
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
model(torch.full((2, 4), float(rank + 1))).sum().backward()
weights = [torch.empty_like(model.module.weight) for _ in range(world)]
dist.all_gather(weights, model.module.weight.detach())
assert all(torch.equal(weight, weights[0]) for weight in weights)
print("rank", rank, "of", world, model.module.weight.grad[0].tolist(), flush=True)
dist.destroy_process_group()
"#;

#[test]
fn a_pytorch_ddp_program_runs_under_ddprun() {
    let python = std::env::var("CANDLE_DDP_PYTHON").unwrap_or_else(|_| "python3".into());
    let probe = Command::new(&python).args(["-c", "import torch.distributed"]).output();
    if !probe.is_ok_and(|probe| probe.status.success()) {
        println!("SKIPPED: {python} has no PyTorch (set CANDLE_DDP_PYTHON to one that has)");
        return;
    }
    let place = Place::new();
    std::fs::write(place.path("train.py"), SCRIPT).unwrap();
    let ran = Ran::new(&mut place.ddprun(&["--nproc-per-node", "2", &python, "train.py"]));
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    // Gradients of the sum over two rows of ones and of twos: 2 and 4; their mean is 3.
    let line = |rank| format!("rank {rank} of 2 [3.0, 3.0, 3.0, 3.0]");
    assert_eq!(ran.sorted(), [line(0), line(1)]);
}
