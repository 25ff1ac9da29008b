//! DDP reports once, on rank 0, the parameters that no rank used.
use crate::common::ranks;
use crate::logger::{self, LOG};
use candle_core::{DType, Module, Tensor};
use candle_ddp::comm_hook::{CommHook, Fp16Compress, Noop};
use candle_ddp::optim::{ParamsAdamW, ZeroRedundancyOptimizer};
use candle_ddp::{DdpOptions, DistributedDataParallel, ProcessGroup, Result, nn};
use candle_nn::{Linear, VarBuilder, VarMap, linear};

struct Net {
    layers: [Linear; 3],
}

impl Net {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        let layer = |name: &str| linear(4, 4, vb.pp(name));
        Ok(Self { layers: [layer("first")?, layer("second")?, layer("third")?] })
    }
}

fn wrap(pg: &ProcessGroup) -> Result<DistributedDataParallel<Net>> {
    DistributedDataParallel::new(pg, &VarMap::new(), DType::F32, Net::new, DdpOptions::default())
}

/// Runs a step with this rank's layers.
fn step(ddp: &DistributedDataParallel<Net>, layers: &[usize]) -> Result<()> {
    let x = Tensor::ones((2, 4), DType::F32, ddp.process_group().device())?;
    let y = ddp.call(|net| layers.iter().try_fold(x, |x, layer| net.layers[*layer].forward(&x)))?;
    ddp.backward(&y.sqr()?.mean_all()?)?;
    Ok(())
}

/// Returns the warnings while two ranks run.
fn warnings(work: impl Fn(ProcessGroup) -> Result<()> + Sync) -> Vec<String> {
    LOG.0.lock().unwrap().clear();
    ranks(2, work).unwrap();
    let mut warnings = std::mem::take(&mut *LOG.0.lock().unwrap());
    // Several backward passes without a step are not what is looked at here.
    warnings.retain(|text| !text.contains("were dropped"));
    warnings
}

fn with_hook(hook: impl CommHook + Copy + Sync) -> Vec<String> {
    warnings(|pg| {
        let ddp = wrap(&pg)?;
        ddp.register_comm_hook(hook)?;
        step(&ddp, &[pg.rank()])
    })
}

/// A single test, because the log belongs to the process.
#[test]
fn parameters_that_no_rank_used_are_named_once() {
    let _turn = logger::collect();
    let third = "2 of 6 parameters had no gradient on any rank in the first synchronised backward pass: third.weight, \
                 third.bias. ";
    let expect_third = |warnings: Vec<String>| {
        assert!(warnings.len() == 1 && warnings[0].starts_with(third), "{warnings:?}");
        assert!(warnings[0].contains("layer_norm, rms_norm, softmax_last_dim and rope"), "{warnings:?}");
    };

    // Each rank uses a different layer, and no rank uses the third; layers used under no_sync count.
    expect_third(warnings(|pg| {
        let ddp = wrap(&pg)?;
        {
            let _guard = ddp.no_sync();
            step(&ddp, &[0])?;
        }
        step(&ddp, &[1])?;
        step(&ddp, &[0])
    }));
    expect_third(warnings(|pg| {
        let ddp = wrap(&pg)?;
        step(&ddp, &[pg.rank()])?;
        step(&ddp, &[2])
    }));
    expect_third(with_hook(Fp16Compress::default()));
    expect_third(warnings(|pg| {
        let ddp = wrap(&pg)?;
        let optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW::default())?;
        step(&ddp, &[pg.rank()])?;
        drop(optimizer);
        Ok(())
    }));

    // All layers are used, or the usage is unknown.
    assert_eq!(warnings(|pg| step(&wrap(&pg)?, &[pg.rank(), 2 * (1 - pg.rank()), 2])).len(), 0);
    assert_eq!(with_hook(Noop).len(), 0);

    // candle_nn's layer does not pass gradients on to the layers before it; this crate's layer does.
    for (ours, expected) in [(false, 1), (true, 0)] {
        let warnings = warnings(|pg| {
            let build = |vb: VarBuilder| {
                let norm: Box<dyn Module> = match ours {
                    true => Box::new(nn::layer_norm(4, 1e-5, vb.pp("norm"))?),
                    false => Box::new(candle_nn::layer_norm(4, 1e-5, vb.pp("norm"))?),
                };
                Ok::<_, candle_core::Error>((linear(4, 4, vb.pp("fc"))?, norm, linear(4, 1, vb.pp("head"))?))
            };
            let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), DType::F32, build, DdpOptions::default())?;
            let x = Tensor::ones((2, 4), DType::F32, pg.device())?;
            let y = ddp.call(|(fc, norm, head)| head.forward(&norm.forward(&fc.forward(&x)?)?))?;
            ddp.backward(&y.sqr()?.mean_all()?)?;
            Ok(())
        });
        assert_eq!(warnings.len(), expected, "{warnings:?}");
        assert!(warnings.iter().all(|text| text.starts_with("4 of 6 ")), "{warnings:?}");
    }
}
