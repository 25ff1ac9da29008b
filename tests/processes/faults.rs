//! A rank of `scripts/fault_matrix.py`: it trains under the launcher, and has a fault at a given moment.
//!
//! The script starts this test binary, plans the fault in environment variables, and causes from outside the faults that a
//! process cannot cause itself. Both report their progress to each other by files in a folder.
use crate::common::{fill, floats, going_on, tensor};
use candle_core::{Device, Module, Tensor};
use candle_ddp::checkpoint::StateDict;
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::{DistributedDataParallel, InitOptions, ProcessGroup, ReduceOp, Result, init_process_group};
use candle_ddp_state::placement::Spread;
use candle_ddp_state::state::{PutInPlace, Saved, Share};
use candle_nn::{Func, VarBuilder, VarMap, func, linear};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::collections::HashMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

/// `FAULT MOMENT RANK`; unset in a test's own process.
const PLAN: &str = "CANDLE_DDP_TEST_FAULT";
const FOLDER: &str = "CANDLE_DDP_TEST_FOLDER";
/// The group's time-out in seconds.
const TIMEOUT: &str = "CANDLE_DDP_TEST_TIMEOUT";
/// The rank that comes to the rendezvous after the fault.
const LATE: &str = "CANDLE_DDP_TEST_LATE";

/// Faults that are limits of the process, or of its disk.
const LIMITS: [&str; 3] = ["descriptors", "memory", "disk"];

const STEPS: u64 = 4;
/// The steps at which the faults happen.
const FORWARD: u64 = 2;
const CHECKPOINT: u64 = 3;

/// The planned fault, and the progress so far.
struct Plan {
    fault: String,
    moment: String,
    victim: usize,
    rank: usize,
    folder: PathBuf,
    step: AtomicU64,
    /// Files that take up the descriptors of this process.
    descriptors: Mutex<Vec<File>>,
    /// Limits of this process, to be restored.
    limits: Mutex<Vec<(Resource, Rlimit)>>,
}

impl Plan {
    fn of_environment() -> Self {
        let plan = std::env::var(PLAN).unwrap();
        let [fault, moment, victim] = plan.split(' ').collect::<Vec<_>>()[..] else { panic!("{PLAN}={plan}") };
        Self {
            fault: fault.to_string(),
            moment: moment.to_string(),
            victim: victim.parse().unwrap(),
            rank: std::env::var("RANK").unwrap().parse().unwrap(),
            folder: std::env::var_os(FOLDER).unwrap().into(),
            step: AtomicU64::new(0),
            descriptors: Mutex::default(),
            limits: Mutex::default(),
        }
    }

    fn tell(&self, name: &str, text: &str) {
        let unfinished = self.folder.join(format!("unfinished{}", self.rank));
        std::fs::write(&unfinished, text).unwrap();
        std::fs::rename(unfinished, self.folder.join(name)).unwrap();
    }

    fn is_told(&self, name: &str) -> bool {
        self.folder.join(name).exists()
    }

    fn wait_for(&self, name: &str) {
        while !self.is_told(name) {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn is_victim(&self, moment: &str) -> bool {
        self.rank == self.victim && self.moment == moment
    }

    /// The moment has come.
    fn reach(&self) {
        self.tell("reached", "");
    }

    /// Causes the fault, if it is planned here.
    fn at(&self, moment: &str) -> candle_core::Result<()> {
        if !self.is_victim(moment) || LIMITS.contains(&self.fault.as_str()) {
            return Ok(());
        }
        self.reach();
        match self.fault.as_str() {
            "panic" => panic!("the fault that was asked for"),
            "exit" => std::process::exit(0),
            "error" => candle_core::bail!("the fault that was asked for"),
            // The script acts while the other ranks wait for this one; in the other moments, this one is in a call then.
            "outside" if ["construction", "forward", "comparison"].contains(&moment) => self.wait_for("go"),
            _ => {}
        }
        Ok(())
    }

    /// Takes away a resource of this process, if the fault is planned here.
    fn limit(&self, moment: &str) {
        if !self.is_victim(moment) || !LIMITS.contains(&self.fault.as_str()) {
            return;
        }
        self.reach();
        match self.fault.as_str() {
            "descriptors" => {
                // The hard limit too, to which ranks raise the soft one. It stays, as only root could lift it again.
                setrlimit(Resource::Nofile, Rlimit { current: Some(256), maximum: Some(256) }).unwrap();
                let mut taken = self.descriptors.lock().unwrap();
                taken.extend(std::iter::from_fn(|| File::open("/dev/null").ok()));
                if moment == "rendezvous" {
                    // A different number each time, so that different calls fail.
                    let kept = taken.len() - std::process::id() as usize % 16;
                    taken.truncate(kept);
                }
            }
            "memory" => self.set_limit(Resource::Fsize, 1000),
            // This rank's part is too large for the script's disk.
            _ => {}
        }
    }

    fn set_limit(&self, resource: Resource, limit: u64) {
        let before = getrlimit(resource);
        setrlimit(resource, Rlimit { current: Some(limit), maximum: before.maximum }).unwrap();
        self.limits.lock().unwrap().push((resource, before));
    }

    fn lift_limits(&self) {
        self.descriptors.lock().unwrap().clear();
        self.limits.lock().unwrap().drain(..).for_each(|(resource, limit)| setrlimit(resource, limit).unwrap());
    }
}

fn plan() -> &'static Plan {
    static GIVEN: OnceLock<Plan> = OnceLock::new();
    GIVEN.get_or_init(Plan::of_environment)
}

/// The `main` of ranks.
#[test]
#[ignore = "started by scripts/fault_matrix.py and by other tests"]
fn rank_of_the_fault_matrix() -> Result<()> {
    let ended = run(plan());
    plan().lift_limits();
    if let Err(error) = &ended {
        plan().tell(&format!("error{}", plan().rank), &error.to_string());
    }
    ended
}

fn run(plan: &Plan) -> Result<()> {
    let port = std::env::var("MASTER_PORT").unwrap();
    plan.tell(&format!("rank{}", plan.rank), &format!("{} {port}", std::process::id()));
    if std::env::var(LATE).is_ok_and(|late| late == plan.rank.to_string()) {
        plan.wait_for("go");
    }
    plan.at("rendezvous")?;
    plan.limit("rendezvous");
    let timeout = Duration::from_secs(std::env::var(TIMEOUT).unwrap().parse().unwrap());
    let pg = init_process_group(InitOptions { timeout, ..Default::default() })?;
    plan.lift_limits();
    pg.abort_on_error(|| train(&pg, plan))
}

/// Each rank's own part of a checkpoint. One that is to find no room on the disk has more.
struct Own(Tensor);

impl StateDict for Own {
    fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
        Ok(HashMap::from([("own".to_string(), self.0.clone())]))
    }

    fn load_state_dict(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
        self.0 = state["own"].clone();
        Ok(())
    }

    fn share(&self) -> Result<Share> {
        Ok(Share::new(Spread::Own, self.state_dict()?))
    }

    fn prepare(&mut self, saved: Saved, _: usize, _: usize) -> Result<PutInPlace<'_>> {
        let Saved::Shards(shards) = saved else { unreachable!("each rank has its own") };
        self.0 = shards[plan().rank]["own"].clone();
        Ok(Box::new(|| Ok(())))
    }
}

fn own(plan: &Plan, step: u64) -> Own {
    let elements = match plan.fault.as_str() {
        "disk" if plan.is_victim("checkpoint") && step == CHECKPOINT => 2 << 20,
        "disk" => 1 << 10,
        _ => 1 << 20,
    };
    Own(Tensor::full(step as f32, elements, &Device::Cpu).unwrap())
}

fn net(vb: VarBuilder) -> candle_core::Result<Func<'static>> {
    plan().limit("construction");
    plan().at("construction")?;
    let (first, last) = (linear(16, 64, vb.pp("in"))?, linear(64, 4, vb.pp("out"))?);
    Ok(func(move |x| {
        if plan().step.load(Ordering::Relaxed) == FORWARD {
            plan().limit("forward");
            plan().at("forward")?;
        }
        last.forward(&first.forward(x)?.tanh()?)
    }))
}

fn train(pg: &ProcessGroup, plan: &Plan) -> Result<()> {
    let mut varmap = VarMap::new();
    let ddp = DistributedDataParallel::new(pg, &varmap, net)?;
    if plan.fault == "descriptors" {
        plan.lift_limits();
    }
    fill(&varmap, 3);
    let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
    // It makes its own group.
    let mut checkpointer = going_on(pg, plan.folder.join("run"))?;
    plan.lift_limits();
    let mut mine = own(plan, 0);
    let loaded =
        checkpointer.load_latest((("model", &mut varmap), ("optimizer", &mut optimizer), ("own", &mut mine)))?;
    let first = loaded.unwrap_or(0);
    assert!(floats(&mine.0).iter().all(|value| *value == first as f32), "a mixture of checkpoints");
    plan.tell(&format!("loaded{}", plan.rank), &first.to_string());
    for step in first + 1..=STEPS {
        plan.step.store(step, Ordering::Relaxed);
        let x = tensor(&[8, 16], 10 * step + pg.rank() as u64).to_device(pg.device())?;
        optimizer.step(&ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?)?)?;
        if step == FORWARD {
            all_reduces(pg, plan)?;
        }
        plan.lift_limits();
        let mut mine = own(plan, step);
        if step == CHECKPOINT {
            plan.at("comparison")?;
            plan.limit("checkpoint");
        }
        let save =
            checkpointer.save(step, (("model", &mut varmap), ("optimizer", &mut optimizer), ("own", &mut mine)))?;
        if step == CHECKPOINT {
            plan.at("checkpoint")?;
        }
        save.wait()?;
        if step == CHECKPOINT && plan.is_victim("checkpoint") && plan.fault == "outside" {
            plan.wait_for("go");
        }
    }
    checkpointer.finish()?;
    let weights: Vec<f32> = ddp.parameters().iter().flat_map(|var| floats(var)).collect();
    let mut hasher = DefaultHasher::new();
    weights.iter().for_each(|value| value.to_bits().hash(&mut hasher));
    pg.barrier()?;
    let sum: f64 = weights.iter().map(|value| f64::from(value.abs())).sum();
    plan.tell(&format!("result{}", plan.rank), &format!("{:x} {sum}", hasher.finish()));
    Ok(())
}

/// All-reduces of 1 MiB until the fault has happened, with their results checked.
fn all_reduces(pg: &ProcessGroup, plan: &Plan) -> Result<()> {
    const ELEMENTS: usize = 1 << 18;
    const ROUND: usize = 3;
    let is_victim = plan.is_victim("all_reduce");
    let decides = if plan.moment == "all_reduce" { is_victim } else { plan.rank == 0 };
    let sum: usize = (0..pg.world_size()).sum();
    for round in 0.. {
        // The first element says that this round is the last.
        let over = decides && round > ROUND && (plan.fault != "outside" || !is_victim || plan.is_told("go"));
        let mut values = vec![plan.rank as f32; ELEMENTS];
        values[0] = f32::from(u8::from(over));
        let values = Tensor::from_vec(values, ELEMENTS, pg.device())?;
        if round == ROUND {
            plan.limit("all_reduce");
        }
        let work = pg.all_reduce_async(&values, ReduceOp::Sum)?;
        if round == ROUND {
            plan.at("all_reduce")?;
        }
        // After `wait`, a GPU may still read the contents left by a failed call.
        work.synchronize()?;
        let values = floats(&values);
        assert!(values[1..].iter().all(|value| *value == sum as f32), "a wrong number in round {round}");
        if values[0] > 0.0 {
            break;
        }
    }
    Ok(())
}
