//! Random programs with several groups and threads, whose ranks are late as they like: only those that a planted swap keeps from
//! ending have an error.
use super::SOON;
use crate::common::Made;
use candle_core::{DType, Device, Module, ModuleT, Tensor, Var};
use candle_ddp::data::{DataLoader, LoaderOptions};
use candle_ddp::nn::{BatchNorm, Linear, batch_norm, gelu, linear, no_grad, sync_batch_norm};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::seed::Generator;
use candle_ddp::{
    Block, DdpOptions, DistributedDataParallel, Error, Failure, P2pOp, ProcessGroup, ReduceOp, Result, Sharding,
    SpawnOptions, Work, block, spawn_with,
};
use candle_ddp_testing::Random;
use candle_nn::{VarBuilder, VarMap};
use std::ops::RangeInclusive;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How many random programs run, or which.
const PROGRAMS: &str = "CANDLE_DDP_TEST_PROGRAMS";
/// So many run at a time.
const AT_A_TIME: usize = 6;
const BY_DEFAULT: u64 = 9;
const CALLS: usize = 25;
const WIDTH: usize = 6;
/// A message that is larger than the shared memory through which it goes.
pub(super) const LARGE: usize = 4 << 20;

#[test]
fn random_programs_have_an_error_only_if_their_ranks_wait_for_each_other() {
    let left = Mutex::new(numbers(BY_DEFAULT));
    let next = || left.lock().unwrap().next();
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some(seed) = next() {
                    Program::new(seed).run();
                }
            });
        }
    });
}

/// The numbers of the programs that a test runs.
pub(super) fn numbers(by_default: u64) -> RangeInclusive<u64> {
    let programs = std::env::var(PROGRAMS).unwrap_or_else(|_| by_default.to_string());
    let (first, last) = programs.split_once("..").unwrap_or(("1", &programs));
    first.parse().unwrap()..=last.parse().unwrap()
}

/// The model that a program trains.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Trained {
    None,
    /// With the statistics of all ranks.
    Copies,
    /// Parts of so many ranks; there are copies of them if more ranks train.
    Parts(usize),
}

/// Why the ranks of a program wait for each other.
#[derive(Clone, Copy, Debug)]
enum Planted {
    /// A rank makes its calls in two groups in another order.
    Swap,
    /// A rank makes a differentiable call where the others make another one.
    Companion,
    /// A rank waits for a message.
    Message,
    /// A rank makes a group.
    Group,
    /// Two ranks send each other what is too large to be on its way without them.
    Messages,
}

/// A program that all ranks run alike, but for their sleeps and for what is planted.
#[derive(Clone, Copy)]
pub(super) struct Program {
    seed: u64,
    world_size: usize,
    trained: Trained,
    planted: Option<(Planted, usize)>,
}

impl Program {
    pub(super) fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let (world_size, trained) = match random.below(8) {
            0 | 1 => (4, Trained::Parts(2)),
            2 => (3, Trained::Parts(3)),
            3 | 4 => (3, Trained::Copies),
            _ => (3, Trained::None),
        };
        let kinds = [Planted::Swap, Planted::Companion, Planted::Message, Planted::Group, Planted::Messages];
        // Connections hold more, nobody knows how much.
        let is_tcp = std::env::var("CANDLE_DDP_CPU_TRANSPORT").is_ok_and(|transport| transport == "tcp");
        let kinds = &kinds[..if is_tcp { 4 } else { 5 }];
        let (kind, guilty) =
            (kinds[random.below(kinds.len() as u64) as usize], random.below(world_size as u64) as usize);
        Self { seed, world_size, trained, planted: seed.is_multiple_of(4).then_some((kind, guilty)) }
    }

    /// The program for so many processes, without anything planted.
    pub(super) fn of_processes(self, world_size: usize) -> Self {
        let trained = match self.trained {
            Trained::Parts(_) => Trained::Parts(world_size / 2),
            other => other,
        };
        Self { world_size, trained, planted: None, ..self }
    }

    /// Runs the program on threads.
    fn run(self) {
        // When the last thread of a rank came to the place from which nobody continues, or ended.
        let stopped = Mutex::new(Instant::now());
        let options = SpawnOptions { world_size: self.world_size, timeout: 2 * SOON, ..Default::default() };
        let results = spawn_with(options, |pg| {
            let result = self.on(&pg, &|| *stopped.lock().unwrap() = Instant::now());
            Ok((result, Instant::now()))
        });
        let seed = self.seed;
        let results = results.unwrap_or_else(|error| panic!("program {seed}: {error}"));
        let stopped = *stopped.lock().unwrap();
        for (rank, (result, end)) in results.into_iter().enumerate() {
            match (result, self.planted) {
                (Ok(()), None) => {}
                (Err(error @ Error::Group(Failure::Desync { sequence: 0, .. })), Some(_)) => {
                    let took = end.saturating_duration_since(stopped);
                    println!("program {seed}, rank {rank}: after {took:?}: {error}");
                    assert!(took < SOON, "program {seed}, rank {rank}: {took:?}");
                }
                (result, planted) => panic!("program {seed}, {planted:?}, rank {rank}: {result:?}"),
            }
        }
    }

    /// Runs a rank of the program, which calls `stops` when one of its threads ends, or waits for ever.
    pub(super) fn on(self, pg: &ProcessGroup, stops: &(dyn Fn() + Sync)) -> Result<()> {
        let (world_size, mut random) = (self.world_size, Random(self.seed * 3));
        let second = pg.new_group(&(0..world_size).collect::<Vec<_>>())?.unwrap();
        // Each of two threads has groups to itself.
        let mut groups = [vec![Some(pg.clone()), Some(second.clone())], vec![]];
        for index in 0..5 {
            let first = random.below(world_size as u64) as usize;
            let count = 2 + random.below(world_size as u64 - 1) as usize;
            let ranks: Vec<usize> = (0..count).map(|offset| (first + offset) % world_size).collect();
            groups[index % 2].push(pg.new_group(&ranks)?);
        }
        let [mine, theirs] = groups;
        let late = Late(self.seed * 1000 + pg.rank() as u64 * 10, stops);
        let model = self.model(pg)?;
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let mut part = Part { groups: &theirs, model: None, planted: None, second: &second, pg };
                let ran = part.run(random.clone(), &late, 1);
                if ran.is_ok() {
                    stops();
                }
                ran
            });
            let mut own = random.clone();
            own.below(7);
            let mut part = Part { groups: &mine, model, planted: self.planted, second: &second, pg };
            let ran = part.run(own, &late, 2);
            let others = other.join().unwrap();
            ran.and(others)
        })
    }

    fn model(self, pg: &ProcessGroup) -> Result<Option<Model>> {
        let (norm, sharding) = match self.trained {
            Trained::None => return Ok(None),
            Trained::Copies => (Some(pg), Sharding::Off),
            Trained::Parts(ranks) => {
                let sharding = match self.seed % 3 {
                    2 => Sharding::Optimizer { ranks: Some(ranks) },
                    other => Sharding::Blocks { reshard_after_forward: other == 0, ranks: Some(ranks) },
                };
                (None, sharding)
            }
        };
        let options = DdpOptions { sharding, init_seed: Some(7), ..Default::default() };
        let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), |vb| Net::new(vb, norm), options)?;
        let optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
        Ok(Some(Model { ddp, optimizer }))
    }
}

/// The sleeps of a rank, and what it calls when one of its threads stops.
struct Late<'a>(u64, &'a (dyn Fn() + Sync));

/// The sleeps of a thread: of some milliseconds, and a few of seconds.
struct Sleeps {
    random: Random,
    long: usize,
}

impl Sleeps {
    fn new(seed: u64) -> Self {
        Self { random: Random(seed), long: 2 }
    }

    fn next(&mut self) -> Duration {
        Duration::from_millis(match self.random.below(40) {
            0 if self.long > 0 => {
                self.long -= 1;
                1500 + self.random.below(3500)
            }
            1..8 => self.random.below(50),
            _ => 0,
        })
    }

    /// Sleeps or, now and then, calculates.
    fn late(&mut self) {
        let time = self.next();
        match self.random.below(4) {
            0 => {
                let end = Instant::now() + time.min(Duration::from_millis(50));
                while Instant::now() < end {
                    std::hint::spin_loop();
                }
            }
            _ => std::thread::sleep(time),
        }
    }
}

struct Net {
    stem: Linear,
    norm: Option<BatchNorm>,
    layers: Vec<Block<Linear>>,
}

impl Net {
    fn new(vb: VarBuilder, group: Option<&ProcessGroup>) -> candle_core::Result<Self> {
        let norm = group.map(|group| match group.world_size() {
            1 => batch_norm(WIDTH, 1e-5, vb.pp("norm")),
            _ => sync_batch_norm(group, WIDTH, 1e-5, vb.pp("norm")),
        });
        let layer = |index| block(vb.pp(format!("layers.{index}")), |vb| linear(WIDTH, WIDTH, vb));
        let layers = (0..2).map(layer).collect::<candle_core::Result<_>>()?;
        Ok(Self { stem: linear(3, WIDTH, vb.pp("stem"))?, norm: norm.transpose()?, layers })
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let x = self.stem.forward(x)?;
        let x = self.norm.as_ref().map_or(Ok(x.clone()), |norm| norm.forward_t(&x, true))?;
        self.layers.iter().try_fold(x, |x, layer| gelu(&layer.forward(&x)?))
    }
}

struct Model {
    ddp: DistributedDataParallel<Net>,
    optimizer: AdamW,
}

/// The calls of one thread.
struct Part<'a> {
    groups: &'a [Option<ProcessGroup>],
    model: Option<Model>,
    planted: Option<(Planted, usize)>,
    pg: &'a ProcessGroup,
    /// Another group of all ranks, of the thread that has the group of all ranks.
    second: &'a ProcessGroup,
}

impl Part<'_> {
    fn run(&mut self, mut random: Random, late: &Late, thread: u64) -> Result<()> {
        let mut sleeps = Sleeps::new(late.0 + thread);
        let mut in_flight: Vec<Work> = Vec::new();
        let last = self.planted.map_or(CALLS, |_| 5 + random.below(CALLS as u64 - 5) as usize);
        for _ in 0..last {
            let (index, kind, first) = (random.below(self.groups.len() as u64), random.below(13), random.below(2) == 0);
            let (size, workers) = (if random.below(8) == 0 { 600_000 } else { 700 }, random.below(3) as usize);
            sleeps.late();
            if matches!(kind, 10 | 11) {
                self.train(&mut sleeps, first)?;
                continue;
            }
            let Some(group) = &self.groups[index as usize] else { continue };
            let tensor = Tensor::full(1f32, size, group.device())?;
            let (rank, n) = (group.rank(), group.world_size());
            let (next, before) = ((rank + 1) % n, (rank + n - 1) % n);
            match kind {
                0 | 1 => in_flight.push(group.all_reduce_async(&tensor, ReduceOp::Sum)?),
                2 => group.broadcast(&tensor, usize::from(first))?,
                3 => group.barrier()?,
                4 => {
                    let received = tensor.zeros_like()?;
                    let send = P2pOp::Send { tensor: tensor.clone(), peer: next };
                    let recv = P2pOp::Recv { tensor: received, peer: before };
                    in_flight.push(group.batch_isend_irecv(&if first {
                        vec![send, recv]
                    } else {
                        vec![recv, send]
                    })?);
                }
                5 => {
                    // The messages go round.
                    let received = tensor.zeros_like()?;
                    if rank == 0 {
                        group.send(&tensor, next)?;
                        group.recv(&received, before)?;
                    } else {
                        group.recv(&received, before)?;
                        group.send(&tensor, next)?;
                    }
                }
                6 => {
                    let mut waited: Vec<Work> = std::mem::take(&mut in_flight);
                    if sleeps.random.below(2) == 0 {
                        waited.reverse();
                    }
                    waited.iter().try_for_each(Work::wait)?;
                }
                7 => self.differentiate(group, &mut sleeps)?,
                8 => Self::visit(group, &mut sleeps, first)?,
                9 => Self::load(group, &mut sleeps, workers)?,
                _ => group.all_reduce(&tensor, ReduceOp::Sum)?,
            }
        }
        if let Some((planted, guilty)) = self.planted {
            return self.wait_for_ever(planted, guilty, late);
        }
        in_flight.iter().try_for_each(Work::wait)
    }

    /// Calls in a group's companion, also in the backward pass.
    fn differentiate(&self, group: &ProcessGroup, sleeps: &mut Sleeps) -> Result<()> {
        let x = Var::ones(WIDTH, DType::F32, group.device())?;
        let y = group.with_grad()?.all_reduce(&x, ReduceOp::Avg)?;
        sleeps.late();
        let grads = y.sqr()?.sum_all()?.backward()?;
        assert!(grads.get(&x).is_some());
        Ok(())
    }

    /// Calls in a new group from a new thread.
    fn visit(group: &ProcessGroup, sleeps: &mut Sleeps, waits: bool) -> Result<()> {
        let fresh = group.new_group(&(0..group.world_size()).collect::<Vec<_>>())?.unwrap();
        let time = sleeps.next();
        std::thread::scope(|scope| {
            let visitor = scope.spawn(|| {
                std::thread::sleep(time);
                fresh.barrier()?;
                fresh.barrier()
            });
            let own = if waits { group.barrier() } else { Ok(()) };
            own.and(visitor.join().unwrap())
        })
    }

    /// Reads an epoch of samples.
    fn load(group: &ProcessGroup, sleeps: &mut Sleeps, num_workers: usize) -> Result<()> {
        let sleeps = Mutex::new(Sleeps::new(sleeps.random.below(1 << 40)));
        // They are slow to read.
        let samples = Made(4 * group.world_size(), move |index, _: &mut Generator| {
            let time = sleeps.lock().unwrap().next();
            std::thread::sleep(time);
            Ok(Tensor::full(index as f32, 3, &Device::Cpu)?)
        });
        let options = LoaderOptions { batch_size: 2, num_workers, ..Default::default() };
        let loader = DataLoader::new(samples, group, options)?;
        for batch in loader.iter() {
            group.all_reduce(&batch?, ReduceOp::Sum)?;
        }
        Ok(())
    }

    /// Trains a step, or evaluates.
    fn train(&mut self, sleeps: &mut Sleeps, trains: bool) -> Result<()> {
        let Some(Model { ddp, optimizer }) = &mut self.model else { return Ok(()) };
        let x = Tensor::full(self.pg.rank() as f32, (4, 3), self.pg.device())?;
        if !trains {
            no_grad(|| ddp.forward(&x))?;
            return Ok(());
        }
        let loss = ddp.forward(&x)?.sqr()?.mean_all()?;
        sleeps.late();
        let grads = ddp.backward(&loss)?;
        sleeps.late();
        optimizer.step(&grads)
    }

    /// Makes calls for which all ranks wait.
    fn wait_for_ever(&self, planted: Planted, guilty: usize, late: &Late) -> Result<()> {
        let (pg, is_guilty) = (self.pg, self.pg.rank() == guilty);
        let other = (guilty + 1) % pg.world_size();
        let x = Var::ones(WIDTH, DType::F32, pg.device())?;
        let companion = pg.with_grad()?;
        companion.all_reduce(&x, ReduceOp::Sum)?;
        let (first, second) = if is_guilty { (pg, self.second) } else { (self.second, pg) };
        pg.barrier()?;
        self.second.barrier()?;
        (late.1)();
        match planted {
            Planted::Companion if is_guilty => drop(companion.all_reduce(&x, ReduceOp::Sum)?),
            Planted::Message if is_guilty => pg.recv(&x.zeros_like()?, other)?,
            Planted::Group if is_guilty => drop(pg.new_group(&(0..pg.world_size()).collect::<Vec<_>>())?),
            Planted::Messages if is_guilty || pg.rank() == other => {
                pg.send(&Tensor::zeros(LARGE, DType::F32, pg.device())?, if is_guilty { other } else { guilty })?;
            }
            _ => first.barrier()?,
        }
        second.barrier()
    }
}
