//! Other parts of training with DistributedDataParallel on GPUs, compared with the CPU.
use super::common::{assert_close, buckets, counted, fill, floats, tensor, var};
use super::training::{NAMES, net};
use crate::common::assert_error;
use candle_core::{DType, Device, IndexOp, Module, Tensor, Var};
use candle_ddp::comm_hook::{Bf16Compress, Fp16Compress, PowerSgd, PowerSgdOptions};
use candle_ddp::nn::{linear, no_grad};
use candle_ddp::optim::{self, AdamW, Ema, ParamsAdamW, PeriodicModelAverager};
use candle_ddp::{
    DdpOptions, DistributedDataParallel, Error, ProcessGroup, ReduceOp, Result, Sharding, WithGrad, backward_with,
    block, spawn,
};
use candle_nn::{Optimizer, SGD, VarBuilder, VarMap};

/// The tools under test, with tolerances for 16-bit arithmetic and for sums in another order.
pub(crate) const TOOLS: [(&str, f32); 10] = [
    ("fp16", 3e-3),
    ("bf16", 2e-2),
    ("PowerSGD", 1e-3),
    ("Ema", 1e-4),
    ("averager", 1e-4),
    ("weighted", 1e-4),
    ("varied", 1e-4),
    ("with_grad", 1e-4),
    ("sharded", 1e-4),
    ("hybrid", 1e-4),
];
const STEPS: usize = 6;
const PER_RANK: usize = 4;

/// Trains a few steps with the tool `tool`; returns the parameters and the tool's averages.
pub(crate) fn train(pg: &ProcessGroup, tool: &str) -> Result<Vec<f32>> {
    let varmap = VarMap::new();
    let mine = pg.rank() * PER_RANK..(pg.rank() + 1) * PER_RANK;
    let x = tensor(&[pg.world_size() * PER_RANK, 4], 1).i(mine)?.to_device(pg.device())?;
    match tool {
        "sharded" => return sharded(pg, &x, Sharding::Blocks { reshard_after_forward: true, ranks: None }),
        "hybrid" => return sharded(pg, &x, Sharding::Blocks { reshard_after_forward: true, ranks: Some(1) }),
        _ => {}
    }
    let loss = |y: Tensor| y.sqr()?.mean_all();
    let vars = |varmap: &VarMap| NAMES.map(|name| var(varmap, name));
    let values = |varmap: &VarMap| NAMES.map(|name| floats(&var(varmap, name))).concat();
    if tool == "averager" {
        let net = net(VarBuilder::from_varmap(&varmap, DType::F32, pg.device()))?;
        fill(&varmap, 3);
        let mut optimizer = SGD::new(vars(&varmap).to_vec(), 0.3)?;
        let mut averager = PeriodicModelAverager::new(pg, 2, 1, None)?;
        for _ in 0..STEPS {
            optimizer.step(&loss(net.forward(&x)?)?.backward()?)?;
            averager.average_parameters(&varmap)?;
        }
        return Ok(values(&varmap));
    }
    let options = DdpOptions { buckets: buckets(0.0001, 0.00005), ..Default::default() };
    let ddp = DistributedDataParallel::with_options(pg, &varmap, |vb| net(vb), options)?;
    fill(&varmap, 3);
    match tool {
        "fp16" => ddp.register_comm_hook(Fp16Compress::default())?,
        "bf16" => ddp.register_comm_hook(Bf16Compress::default())?,
        "PowerSGD" => {
            let options = PowerSgdOptions { start_iter: 2, min_compression_rate: 1.0, ..Default::default() };
            ddp.register_comm_hook(PowerSgd::new(options)?)?;
        }
        _ => {}
    }
    let functions = pg.with_grad()?;
    let mut optimizer = SGD::new(ddp.parameters(), 0.3)?;
    let mut ema = Ema::new(&ddp, 0.8)?;
    for step in 0..STEPS {
        if tool == "weighted" {
            // Another count on each rank and in each step.
            let count = 1 + pg.rank() + step % 2;
            let sum = ddp.forward(&x.narrow(0, 0, count)?)?.sqr()?.sum_all()?;
            optimizer.step(&backward_with(&sum, &[&ddp], counted(count as f64))?)?;
            continue;
        }
        if tool == "with_grad" {
            optimizer.step(&ddp.backward(&exchanged(&functions, pg, &ddp.forward(&x)?)?)?)?;
            continue;
        }
        optimizer.step(&ddp.backward(&loss(ddp.forward(&x)?)?)?)?;
        ema.update()?;
    }
    if tool == "varied" {
        let all = pg.all_gather_varied(&x.narrow(0, 0, 1 + pg.rank())?, 0)?;
        return Ok(all.iter().flat_map(floats).collect());
    }
    let averages = ema.averages()?;
    let averages = averages.iter().flat_map(|(_, average)| floats(average));
    Ok(values(&varmap).into_iter().chain(averages).collect())
}

/// The losses of a model whose parameters are spread over the ranks, and its output in an evaluation.
fn sharded(pg: &ProcessGroup, x: &Tensor, sharding: Sharding) -> Result<Vec<f32>> {
    let options = DdpOptions { sharding, init_seed: Some(5), ..Default::default() };
    let build = |vb: VarBuilder<'static>| {
        // Fewer elements than ranks, and more, in parts that are not equal.
        let layer = |(index, sizes): (usize, &[usize; 2])| block(vb.pp(index), |vb| linear(sizes[0], sizes[1], vb));
        let layers = [[4, 7], [7, 1], [1, 5]].iter().enumerate().map(layer);
        let layers = layers.collect::<candle_core::Result<Vec<_>>>()?;
        Ok::<_, candle_core::Error>((layers, linear(5, 1, vb.pp("head"))?))
    };
    let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), build, options)?;
    let mut optimizer = AdamW::new(&ddp, ParamsAdamW { lr: 0.01, ..Default::default() })?;
    let forward = || {
        ddp.call(|(layers, head)| {
            let y = layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x)?.tanh())?;
            head.forward(&y)
        })
    };
    let mut found = Vec::new();
    for _ in 0..STEPS {
        let loss = (forward()? - 1.)?.sqr()?.mean_all()?;
        found.push(loss.to_scalar()?);
        optim::Optimizer::step(&mut optimizer, &ddp.backward(&loss)?)?;
    }
    found.extend(floats(&no_grad(forward)?));
    Ok(found)
}

/// A loss of what all ranks have computed, by every collective with a gradient.
fn exchanged(functions: &WithGrad, pg: &ProcessGroup, y: &Tensor) -> Result<Tensor> {
    let (rank, world) = (pg.rank(), pg.world_size());
    let square = |y: Tensor| y.sqr()?.mean_all();
    let rows: Vec<usize> = (0..world).map(|peer| if peer == rank { PER_RANK - world + 1 } else { 1 }).collect();
    let all = functions.all_gather(y)?;
    let recv = |after| functions.recv(y.shape(), y.dtype(), (rank + world - 1) % world, after);
    let send = |after| functions.send(y, (rank + 1) % world, after);
    let message = if rank % 2 == 0 {
        let sent = send(None)?;
        square(recv(Some(&sent))?)?
    } else {
        let received = recv(None)?;
        let sent = send(Some(&received))?;
        (square(received)? + sent)?
    };
    let losses = [
        square(functions.reduce_scatter(&all, ReduceOp::Avg)?)?,
        square(functions.all_gather_varied(&y.narrow(0, 0, 1 + rank)?, 0)?)?,
        square(functions.all_reduce(y, ReduceOp::Sum)?)?,
        square(functions.broadcast(y, world - 1)?)?,
        square(functions.all_to_all_varied(y, &rows)?.0)?,
        message,
    ];
    Ok(Tensor::stack(&losses, 0)?.sum_all()?)
}

pub(crate) fn assert_like_the_cpu(tool: &str, tolerance: f32, reports: &[Vec<f32>]) {
    let expected = spawn(reports.len(), |pg| train(&pg, tool)).unwrap();
    for (rank, (found, expected)) in reports.iter().zip(&expected).enumerate() {
        assert_close(found, expected, tolerance, &format!("{tool}, rank {rank}"));
    }
}

/// A rank that calls the blocks of a sharded model in another order is found in the next pass.
pub(crate) fn refuse_other_blocks(pg: &ProcessGroup) {
    let build = |vb: VarBuilder<'static>| {
        let layer = |index| block(vb.pp(index), |vb| linear(4, 4, vb));
        (0..3).map(layer).collect::<candle_core::Result<Vec<_>>>()
    };
    let options =
        DdpOptions { sharding: Sharding::Blocks { reshard_after_forward: true, ranks: None }, ..Default::default() };
    let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), build, options).unwrap();
    let mut optimizer = AdamW::new(&ddp, ParamsAdamW::default()).unwrap();
    let x = tensor(&[2, 4], 1).to_device(pg.device()).unwrap();
    let mut pass = |order: &[usize]| {
        let y = ddp.call(|layers| order.iter().try_fold(x.clone(), |x, layer| layers[*layer].forward(&x)))?;
        optim::Optimizer::step(&mut optimizer, &ddp.backward(&y.sqr()?.mean_all()?)?)
    };
    let other: &[usize] = if pg.rank() == 0 { &[0, 1, 2] } else { &[2, 1, 0] };
    pass(&[0, 1, 2]).unwrap();
    pass(other).unwrap();
    let refused = pass(&[0, 1, 2]).unwrap_err().to_string();
    let order = if pg.rank() == 0 { "block 0, block 1, block 2" } else { "block 2, block 1, block 0" };
    assert!(refused.contains("different orders") && refused.contains(order), "{refused}");
    // The next pass is as it should be.
    pass(&[0, 1, 2]).unwrap();
    // After an evaluation as well.
    let evaluate = |order: &[usize]| {
        no_grad(|| ddp.call(|layers| order.iter().try_fold(x.clone(), |x, layer| layers[*layer].forward(&x))))
    };
    evaluate(&[0, 1, 2]).unwrap();
    evaluate(other).unwrap();
    assert_error(evaluate(&[0, 1, 2]), &["different orders", order]);
    evaluate(other).unwrap();
    assert_error(pass(&[0, 1, 2]), &["different orders", order]);
    pass(&[0, 1, 2]).unwrap();
}

/// Variables that are neither on the group's device nor on the CPU are refused by name.
pub(crate) fn refuse_variables_elsewhere(pg: &ProcessGroup) {
    let other = Device::new_cuda(0).unwrap();
    let here = ("here".to_string(), Var::zeros(3, DType::F32, pg.device()).unwrap());
    for name in ["elsewhere.weight", "elsewhere.running_mean"] {
        let elsewhere = (name.to_string(), Var::zeros(3, DType::F32, &other).unwrap());
        let vars = vec![here.clone(), elsewhere];
        let refused = DistributedDataParallel::from_vars(pg, (), vars, DdpOptions::default()).err();
        assert!(matches!(&refused, Some(Error::Parameter { parameter, .. }) if parameter == name), "{refused:?}");
    }
}
