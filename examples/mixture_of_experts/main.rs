//! A mixture of experts: each rank owns some of the experts, and each token goes to the rank of the expert that its gate chooses.
//! The layers that all ranks have are DistributedDataParallel's; the experts are each in one place.
//!
//! ```text
//! cargo run --release --bin ddprun -- --nproc-per-node 2 --example mixture_of_experts
//! ```
//!
//! `with_grad().all_to_all_varied` takes the tokens to the experts, and their results back. Backward, gradients go the same ways.
//! An expert's gradient is then the sum of what all ranks' losses contribute, each the mean of its own tokens, while
//! DistributedDataParallel averages the others. So the experts' are divided by the number of ranks.
//!
//! ci: --steps 40
use candle_core::{D, DType, Module, Result, Tensor};
use candle_ddp::nn::{Linear, cat, linear, log_softmax, narrow, relu, softmax};
use candle_ddp::optim::{AdamW, Optimizer, ParamsAdamW};
use candle_ddp::seed::{Generator, var_builder};
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, Precision, ProcessGroup, ReduceOp, WithGrad};
use candle_nn::{VarBuilder, VarMap, loss};
use clap::Parser;

const WIDTH: usize = 8;
const HIDDEN: usize = 16;

/// Learn a function that is a different one in each part of its domain.
#[derive(Parser)]
struct Options {
    /// The number of steps.
    #[arg(long, default_value_t = 300)]
    steps: u64,
    /// The number of experts, of all ranks together: a multiple of the number of ranks.
    #[arg(long, default_value_t = 12)]
    experts: usize,
    /// Tokens per step, of all ranks together: a multiple of the number of ranks.
    #[arg(long, default_value_t = 96)]
    batch_size: usize,
    /// f32 or f64.
    #[arg(long, default_value = "f32")]
    dtype: DType,
}

/// What all ranks have.
struct Shared {
    gate: Linear,
    output: Linear,
}

/// One of the experts.
struct Expert {
    up: Linear,
    down: Linear,
}

impl Expert {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Self { up: linear(WIDTH, HIDDEN, vb.pp("up"))?, down: linear(HIDDEN, WIDTH, vb.pp("down"))? })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down.forward(&relu(&self.up.forward(x)?)?)
    }
}

/// Applies to each row of `x` the expert that it has in `chosen`, on the rank that owns it.
fn experts(
    all: &WithGrad,
    own: &[Expert],
    x: &Tensor,
    chosen: &[u32],
    world_size: usize,
) -> candle_ddp::Result<Tensor> {
    let count = own.len() * world_size;
    let of_expert = |expert| chosen.iter().filter(move |&&other| other as usize == expert).count();
    let rows: Vec<u32> = (0..count).map(|expert| of_expert(expert) as u32).collect();
    // Sorted by expert, and so by rank.
    let mut order: Vec<u32> = (0..chosen.len() as u32).collect();
    order.sort_by_key(|&row| chosen[row as usize]);
    let sorted = x.index_select(&Tensor::new(order.as_slice(), x.device())?, 0)?;
    let to: Vec<usize> = rows.chunks(own.len()).map(|rows| rows.iter().sum::<u32>() as usize).collect();
    let (received, from) = all.all_to_all_varied(&sorted, &to)?;
    // From each rank comes one block for each of this rank's experts, as long as these numbers say.
    let lengths = all.all_to_all(&Tensor::new(rows, x.device())?)?.to_vec1::<u32>()?;
    let mut start = 0;
    let mut blocks = Vec::new();
    for length in lengths {
        blocks.push((start, length as usize));
        start += length as usize;
    }
    // Each expert computes what it got from all ranks at once; then the blocks go back to their places.
    let mut results = vec![None; blocks.len()];
    for (index, expert) in own.iter().enumerate() {
        let mine: Vec<usize> = (index..blocks.len()).step_by(own.len()).filter(|&block| blocks[block].1 > 0).collect();
        let inputs = mine.iter().map(|&block| narrow(&received, 0, blocks[block].0, blocks[block].1));
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        if inputs.is_empty() {
            continue;
        }
        let outputs = expert.forward(&cat(&inputs.iter().collect::<Vec<_>>(), 0)?)?;
        let mut start = 0;
        for block in mine {
            results[block] = Some(narrow(&outputs, 0, start, blocks[block].1)?);
            start += blocks[block].1;
        }
    }
    let results: Vec<&Tensor> = results.iter().flatten().collect();
    let outputs = if results.is_empty() { received } else { cat(&results, 0)? };
    let (back, _) = all.all_to_all_varied(&outputs, &from)?;
    let mut place = vec![0u32; order.len()];
    for (at, &row) in order.iter().enumerate() {
        place[row as usize] = at as u32;
    }
    Ok(back.index_select(&Tensor::new(place, x.device())?, 0)?)
}

/// Tokens from number `first` on, and what is to be learned of them: one of several linear functions, by the largest coordinate.
fn batch(first: usize, count: usize, dtype: DType, pg: &ProcessGroup) -> Result<(Tensor, Tensor)> {
    let (mut inputs, mut targets) = (Vec::new(), Vec::new());
    for number in first..first + count {
        let mut generator = Generator::with_sequence(3, number as u64);
        let x: [f64; WIDTH] = std::array::from_fn(|_| generator.uniform(-1.0, 1.0));
        let largest = (0..WIDTH).max_by(|&a, &b| x[a].total_cmp(&x[b])).unwrap_or_default();
        targets.extend((0..WIDTH).map(|at| x[(at * (largest + 1) + largest) % WIDTH]));
        inputs.extend(x);
    }
    let tensor = |values| Tensor::from_vec(values, (count, WIDTH), pg.device())?.to_dtype(dtype);
    Ok((tensor(inputs)?, tensor(targets)?))
}

fn train(pg: &ProcessGroup, options: &Options) -> candle_ddp::Result<()> {
    let (rank, world_size) = (pg.rank(), pg.world_size());
    let (count, owned) = (options.batch_size / world_size, options.experts / world_size);
    let ddp_options =
        DdpOptions { init_seed: Some(0), precision: Precision::Pure(options.dtype), ..Default::default() };
    let build = |vb: VarBuilder| {
        let gate = linear(WIDTH, options.experts, vb.pp("gate"))?;
        Ok::<_, candle_core::Error>(Shared { gate, output: linear(WIDTH, WIDTH, vb.pp("output"))? })
    };
    let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), build, ddp_options)?;
    // An expert's first values follow from its name, whichever rank owns it.
    let mine = VarMap::new();
    let vb = var_builder(&mine, 0, options.dtype, pg.device());
    let own = (rank * owned..(rank + 1) * owned).map(|expert| Expert::new(vb.pp(format!("experts.{expert}"))));
    let own = own.collect::<Result<Vec<_>>>()?;
    let params = ParamsAdamW { lr: 1e-2, ..Default::default() };
    let (mut shared_optimizer, mut expert_optimizer) = (AdamW::new(&ddp, params.clone())?, AdamW::new(&mine, params)?);
    let all = pg.with_grad()?;
    for step in 1..=options.steps {
        let (x, y) = batch((step as usize * options.batch_size) + rank * count, count, options.dtype, pg)?;
        let loss = ddp.call(|shared| {
            let scores = shared.gate.forward(&x)?;
            let chosen = scores.argmax(D::Minus1)?;
            let share = softmax(&scores, 1)?.gather(&chosen.unsqueeze(1)?, 1)?;
            let mixed = experts(&all, &own, &x, &chosen.to_vec1()?, world_size)?.broadcast_mul(&share)?;
            // Gates that always choose the same expert are worse.
            let spread = log_softmax(&scores, 1)?.mean_all()?.neg()?;
            Ok::<_, Error>((loss::mse(&shared.output.forward(&(x.clone() + mixed)?)?, &y)? + (spread * 0.01)?)?)
        })?;
        let mut grads = ddp.backward(&loss)?;
        for var in mine.all_vars() {
            // An expert without tokens has no gradient.
            if let Some(sum) = grads.remove(&var) {
                grads.insert(&var, (sum / world_size as f64)?);
            }
        }
        shared_optimizer.step(&grads)?;
        expert_optimizer.step(&grads)?;
        if step % 20 == 0 || step == options.steps {
            let [mean] = pg.all_reduce_scalars([loss.to_dtype(DType::F64)?.to_scalar()?], ReduceOp::Avg)?;
            if rank == 0 {
                println!("step {step}: loss {mean:.13}");
            }
        }
    }
    Ok(())
}

fn main() -> candle_ddp::Result<()> {
    let options = Options::parse();
    candle_ddp::run(|pg| {
        for (name, number) in [("--experts", options.experts), ("--batch-size", options.batch_size)] {
            if number == 0 || number % pg.world_size() > 0 {
                let reason = format!("it must be a multiple of the number of ranks, {}, not {number}", pg.world_size());
                return Err(Error::InvalidArgument { argument: name, reason });
            }
        }
        train(pg, &options)
    })
}
