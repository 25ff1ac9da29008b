//! DistributedDataParallel on GPUs.
use super::common::{Mlp, assert_close, buckets, fill, floats, tensor, var};
use candle_core::{DType, Device, IndexOp, Module, Tensor};
use candle_ddp::comm_hook::AllReduce;
use candle_ddp::{
    Buckets, DdpOptions, DistributedDataParallel, Precision, ProcessGroup, Result, Sharding, Unused, spawn,
};
use candle_nn::{Linear, Optimizer, SGD, VarBuilder, VarMap, linear};
use std::path::Path;

pub(crate) fn net(vb: VarBuilder) -> candle_core::Result<Mlp> {
    Mlp::new([4, 8, 2], ["a", "b"], vb)
}

pub(crate) const NAMES: [&str; 4] = ["a.weight", "a.bias", "b.weight", "b.bias"];
const STEPS: usize = 20;
const PER_RANK: usize = 5;

/// Trains twenty steps with tiny buckets, every second step accumulating two parts; returns the final parameters.
pub(crate) fn train(pg: &ProcessGroup, precision: Precision) -> Result<Vec<f32>> {
    let varmap = VarMap::new();
    let (bucket_cap_mb, first_bucket_mb, reduce_dtype) = (0.0001, 0.00005, Some(DType::F32));
    let options = DdpOptions {
        precision,
        buckets: Buckets { bucket_cap_mb, first_bucket_mb, reduce_dtype, ..Default::default() },
        ..Default::default()
    };
    let ddp = DistributedDataParallel::with_options(pg, &varmap, |vb| net(vb), options)?;
    fill(&varmap, 3);
    let mut optimizer = SGD::new(ddp.parameters(), 0.3)?;
    let mine = pg.rank() * PER_RANK..(pg.rank() + 1) * PER_RANK;
    let x = tensor(&[pg.world_size() * PER_RANK, 4], 1).i(mine)?.to_device(pg.device())?;
    let backward = |samples: std::ops::Range<usize>| {
        let y = ddp.forward(&x.i(samples)?)?.to_dtype(DType::F32)?;
        ddp.backward(&(y.sqr()?.sum_all()? / (2 * PER_RANK) as f64)?)
    };
    for step in 0..STEPS {
        let mut first = 0;
        if step % 2 == 1 {
            let _guard = ddp.no_sync();
            first = 2;
            backward(0..first)?;
        }
        optimizer.step(&backward(first..PER_RANK)?)?;
    }
    Ok(NAMES.map(|name| floats(&var(&varmap, name))).concat())
}

/// [`net`] with its first layer on the CPU, as a large embedding might be.
struct Split(Linear, Linear, Device);

impl Module for Split {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.1.forward(&self.0.forward(x)?.tanh()?.to_device(&self.2)?)
    }
}

/// Trains a model on two devices for as many steps as [`train`], with a communication hook if `hook` is set.
pub(crate) fn train_split(pg: &ProcessGroup, hook: bool) -> Result<Vec<f32>> {
    let varmap = VarMap::new();
    let options = DdpOptions { buckets: buckets(0.0001, 0.00005), ..Default::default() };
    let build = |vb: VarBuilder| {
        let on_cpu = vb.pp("a").set_device(Device::Cpu);
        // Buffers on the CPU are broadcast too.
        on_cpu.get_with_hints(3, "running_mean", candle_nn::Init::Const(0.))?;
        Ok::<_, candle_core::Error>(Split(linear(4, 8, on_cpu)?, linear(8, 2, vb.pp("b"))?, pg.device().clone()))
    };
    let sharded = DdpOptions { sharding: Sharding::Optimizer { ranks: None }, ..options.clone() };
    let refused =
        DistributedDataParallel::with_options(pg, &VarMap::new(), build, sharded).err().map(|error| error.to_string());
    assert!(refused.as_ref().is_some_and(|text| text.contains("needs all variables on one device")), "{refused:?}");
    let ddp = DistributedDataParallel::with_options(pg, &varmap, build, options)?;
    assert!(var(&varmap, "a.weight").device().is_cpu() && !var(&varmap, "b.weight").device().is_cpu());
    if hook {
        ddp.register_comm_hook(AllReduce::default())?;
    }
    fill(&varmap, 3);
    var(&varmap, "a.running_mean").set(&Tensor::full(pg.rank() as f32, 3, &Device::Cpu)?)?;
    let mut optimizer = SGD::new(ddp.parameters(), 0.3)?;
    let x = tensor(&[pg.world_size() * PER_RANK, 4], 1).i(pg.rank() * PER_RANK..(pg.rank() + 1) * PER_RANK)?;
    for _ in 0..STEPS {
        optimizer.step(&ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?)?)?;
    }
    assert_eq!(floats(&var(&varmap, "a.running_mean")), [0.; 3], "rank 0's");
    Ok(NAMES.map(|name| floats(&var(&varmap, name))).concat())
}

/// Trains with f32 variables and everything else in 16 bits.
pub(crate) fn train_mixed(pg: &ProcessGroup, dtype: DType) -> Result<Vec<f32>> {
    train(pg, Precision::Half { param_dtype: dtype, buffer_dtype: None })
}

/// Compares with plain candle on the CPU, trained on the whole batch.
pub(crate) fn assert_like_plain_candle(reports: &[Vec<f32>]) {
    let world_size = reports.len();
    let varmap = VarMap::new();
    let net = net(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu)).unwrap();
    fill(&varmap, 3);
    let mut optimizer = SGD::new(NAMES.map(|name| var(&varmap, name)).to_vec(), 0.3).unwrap();
    let x = tensor(&[world_size * PER_RANK, 4], 1);
    for _ in 0..STEPS {
        optimizer.backward_step(&net.forward(&x).unwrap().sqr().unwrap().mean_all().unwrap()).unwrap();
    }
    let expected = NAMES.map(|name| floats(&var(&varmap, name))).concat();
    assert!(reports.iter().all(|other| *other == reports[0]), "ranks must agree bit for bit");
    assert_close(&reports[0], &expected, 1e-4, &format!("{world_size} ranks"));
}

/// Compares with two ranks on the CPU; the tolerance allows for the different rounding of 16-bit numbers.
pub(crate) fn assert_like_the_cpu(dtype: DType, reports: &[Vec<f32>]) {
    let expected = spawn(reports.len(), |pg| train_mixed(&pg, dtype)).unwrap();
    assert!(reports.iter().all(|other| *other == reports[0]), "ranks must agree bit for bit");
    assert_close(&reports[0], &expected[0], if dtype == DType::BF16 { 2e-2 } else { 3e-3 }, dtype.as_str());
}

/// Checks that in the trace every all-reduce lies within its backward pass, by the GPU's times.
pub(crate) fn traced(pg: &ProcessGroup, folder: &Path) -> Result<()> {
    const PASSES: usize = 3;
    let trace = Some(folder.to_path_buf());
    let options = DdpOptions { trace, buckets: buckets(0.0001, 0.00005), ..Default::default() };
    let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), |vb| net(vb), options)?;
    let x = Tensor::ones((PER_RANK, 4), DType::F32, pg.device())?;
    for _ in 0..PASSES {
        ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?)?;
    }
    drop(ddp);
    let text = std::fs::read_to_string(folder.join(format!("rank{}.trace.json", pg.rank()))).unwrap();
    let events: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    let spans = |name: &str| -> Vec<[f64; 2]> {
        let named =
            events.iter().filter(|event| event["ph"] == "X" && event["name"].as_str().unwrap().starts_with(name));
        named.map(|event| [&event["ts"], &event["dur"]].map(|number| number.as_f64().unwrap())).collect()
    };
    let (passes, waits, reductions) = (spans("backward"), spans("wait for buckets"), spans("all-reduce of bucket"));
    assert_eq!((passes.len(), waits.len()), (PASSES, PASSES), "{text}");
    assert!(reductions.len() >= 2 * PASSES && reductions.len().is_multiple_of(PASSES), "{text}");
    // Microseconds.
    const SLACK: f64 = 500.0;
    for [start, duration] in reductions {
        let within = |(pass, wait): (&[f64; 2], &[f64; 2])| {
            duration > 0.0 && pass[0] - SLACK <= start && start + duration <= wait[0] + wait[1] + SLACK
        };
        assert!(passes.iter().zip(&waits).any(within), "{start} + {duration} is in no pass of {text}");
    }
    Ok(())
}

/// Each rank uses a layer that the other does not, and no rank uses a third layer.
pub(crate) fn unused(pg: &ProcessGroup) -> Result<()> {
    struct Branches([Linear; 3]);
    let build = |vb: VarBuilder| -> candle_core::Result<Branches> {
        Ok(Branches([linear(4, 4, vb.pp("0"))?, linear(4, 4, vb.pp("1"))?, linear(4, 4, vb.pp("2"))?]))
    };
    let varmap = VarMap::new();
    let options = DdpOptions { unused: Unused::Allow, ..Default::default() };
    let ddp = DistributedDataParallel::with_options(pg, &varmap, build, options)?;
    let x = Tensor::ones((2, 4), DType::F32, pg.device())?;
    for _ in 0..3 {
        let loss = ddp.call(|Branches(layers)| layers[pg.rank() % 2].forward(&x)?.sum_all())?;
        let grads = ddp.backward(&loss)?;
        for layer in 0..2 {
            // Two rows of ones, from one of two ranks.
            let gradient = grads.get(&var(&varmap, &format!("{layer}.bias"))).expect("a rank used it");
            assert_eq!(floats(gradient), [1.0; 4]);
        }
        assert!(grads.get(&var(&varmap, "2.weight")).is_none());
    }
    Ok(())
}
