//! Gradients that are not finite are an error that names rank and parameter.
use crate::common::{ranks, tensor};
use candle_core::{DType, Tensor};
use candle_ddp::amp::MixedPrecision;
use candle_ddp::comm_hook::AllReduce;
use candle_ddp::optim::{ParamsAdamW, ZeroRedundancyOptimizer};
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, Result};
use candle_nn::{Linear, Module, VarBuilder, VarMap, linear};

/// The errors of three ranks, where rank 1 multiplies the output of the first layer by `factor` in its second step.
fn errors(
    factor: f64,
    options: &DdpOptions,
    prepare: fn(&DistributedDataParallel<(Linear, Linear)>) -> Result<()>,
) -> Vec<String> {
    ranks(3, |pg| {
        let build = |vb: VarBuilder| Ok::<_, Error>((linear(3, 4, vb.pp("a"))?, linear(4, 2, vb.pp("b"))?));
        let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, options.clone())?;
        prepare(&ddp)?;
        for step in 0..3 {
            let factor = if (pg.rank(), step) == (1, 1) { factor } else { 1. };
            let x = tensor(&[5, 3], step);
            let loss = ddp.call(|(a, b)| -> Result<Tensor> {
                // The bias of b does not see the factor in its gradient; a's does.
                let hidden = a.forward(&x.to_dtype(a.weight().dtype())?)?;
                let scaled = (&hidden * factor)?;
                Ok((b.forward(&hidden)?.to_dtype(DType::F32)?.mean_all()?
                    + scaled.to_dtype(DType::F32)?.mean_all()?)?)
            })?;
            if let Err(error) = ddp.backward(&loss) {
                return Ok(error.to_string());
            }
        }
        Ok("no error".to_string())
    })
    .unwrap()
}

#[test]
fn the_rank_and_the_parameter_are_named_on_all_ranks() {
    let options = DdpOptions { nan_check: Some(true), ..Default::default() };
    let small = DdpOptions { bucket_cap_mb: 0., first_bucket_mb: 0., ..options.clone() };
    let half = DdpOptions {
        mixed_precision: Some(MixedPrecision { param_dtype: Some(DType::BF16), ..Default::default() }),
        ..options.clone()
    };
    for (factor, value) in [(f64::NAN, "a NaN"), (f64::INFINITY, "an infinity")] {
        for options in [&options, &small, &half] {
            for prepare in [(|_| Ok(())) as fn(&_) -> Result<()>, |ddp: &DistributedDataParallel<_>| {
                ddp.register_comm_hook(AllReduce::default())
            }] {
                for (rank, text) in errors(factor, options, prepare).iter().enumerate() {
                    let expected = format!("its gradient on rank 1 contains {value}");
                    assert!(text.contains("parameter a.") && text.contains(&expected), "rank {rank}: {text}");
                    assert_eq!(text.starts_with("rank 1 ended the group: backward failed: "), rank != 1, "{text}");
                }
            }
        }
    }
}

#[test]
fn without_the_option_nothing_is_checked() {
    let options = DdpOptions { nan_check: Some(false), ..Default::default() };
    assert_eq!(errors(f64::NAN, &options, |_| Ok(())), ["no error"; 3]);
    let checked = DdpOptions { nan_check: Some(true), ..Default::default() };
    assert_eq!(errors(1e30, &checked, |_| Ok(())), ["no error"; 3]);
}

#[test]
fn shards_are_checked_as_well() {
    let errors = ranks(2, |pg| {
        let options = DdpOptions { nan_check: Some(true), ..Default::default() };
        let build = |vb: VarBuilder| linear(3, 4, vb);
        let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, options)?;
        let _optimizer = ZeroRedundancyOptimizer::new(&ddp, ParamsAdamW::default())?;
        let loss = (ddp.forward(&tensor(&[5, 3], 1))?.mean_all()? * if pg.rank() == 1 { f64::NAN } else { 1. })?;
        Ok(ddp.backward(&loss).unwrap_err().to_string())
    });
    for text in errors.unwrap() {
        assert!(text.contains("its gradient on rank 1 contains a NaN"), "{text}");
    }
}
