//! Autocast as an option of DistributedDataParallel, and what else it meets.
use crate::common::{assert_error, fill, ranks, reduced_in, tensor, try_ranks};
use candle_core::{DType, Device, Module, Result as CandleResult};
use candle_ddp::amp::{Autocast, autocast, autocast_off};
use candle_ddp::data_parallel::DataParallel;
use candle_ddp::nn::{Linear, add, autocast_mode, linear, no_grad};
use candle_ddp::{DdpOptions, DistributedDataParallel, Precision, ProcessGroup, Result};
use candle_nn::VarMap;

const BF16: Autocast = Autocast::Lists(DType::BF16);

fn options(autocast: Autocast) -> DdpOptions {
    DdpOptions { precision: Precision::Autocast(autocast), ..Default::default() }
}

fn model(pg: &ProcessGroup, options: DdpOptions) -> Result<DistributedDataParallel<Linear>> {
    DistributedDataParallel::with_options(pg, &VarMap::new(), |vb| linear(4, 2, vb), options)
}

#[test]
fn forward_passes_run_under_it() {
    ranks(2, |pg| {
        let (mut ddp, x) = (model(&pg, options(BF16))?, tensor(&[3, 4], 1));
        assert_eq!(ddp.forward(&x)?.dtype(), DType::BF16);
        assert_eq!(autocast_off(|| ddp.forward_t(&x, false))?.dtype(), DType::BF16);
        assert_eq!(no_grad(|| ddp.forward(&x))?.dtype(), DType::BF16);
        assert_eq!(ddp.call(|_| CandleResult::Ok(autocast_mode()))?, Some(BF16));
        assert_eq!(ddp.call_mut(|_| CandleResult::Ok(autocast_mode()))?, Some(BF16));
        let ddp = ddp.with_no_grad_model(|vb| linear(4, 2, vb))?;
        assert_eq!(no_grad(|| ddp.forward(&x))?.dtype(), DType::BF16);
        assert_eq!(autocast_mode(), None);
        let grads = ddp.backward(&ddp.forward(&x)?.to_dtype(DType::F32)?.sqr()?.sum_all()?)?;
        assert!(ddp.parameters().iter().all(|var| grads.get(var).unwrap().dtype() == DType::F32));
        // Without the option, the state of the thread holds.
        let plain = model(&pg, DdpOptions::default())?;
        assert_eq!(autocast(DType::BF16, || plain.forward(&x))?.dtype(), DType::BF16);
        assert_eq!(plain.forward(&x)?.dtype(), DType::F32);
        Ok(())
    });
}

#[test]
fn options_that_do_not_fit_are_refused_on_every_rank() {
    let error = |options: fn(usize) -> DdpOptions| {
        ranks(2, |pg| Ok(model(&pg, options(pg.rank())).map(drop).unwrap_err().to_string()))
    };
    for message in error(|_| options(Autocast::Lists(DType::F64))) {
        assert!(message.contains("autocast: its dtype must be F16 or BF16, not F64"), "{message}");
    }
    for message in error(|rank| options(if rank == 0 { BF16 } else { Autocast::Products(DType::BF16) })) {
        assert!(message.contains("precision: Autocast(Products(BF16))"), "{message}");
    }
    // Gradients may travel in 16 bits.
    ranks(2, |pg| {
        model(&pg, DdpOptions { precision: Precision::Autocast(BF16), ..reduced_in(Some(DType::BF16)) }).map(drop)
    });
}

#[test]
fn an_error_of_candles_about_two_dtypes_says_what_helps() {
    let run = |options: DdpOptions| {
        try_ranks(2, |pg| {
            let build = |vb| linear(4, 4, vb);
            let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, options.clone())?;
            // A residual connection by candle's own sum.
            let x = tensor(&[3, 4], 1);
            ddp.call(|net| &x + net.forward(&x)?)
        })
    };
    assert_error(run(options(BF16)), &["use `nn::add` for sums", "Autocast::Products"]);
    assert_eq!(run(options(Autocast::Products(DType::BF16))).unwrap()[0].dtype(), DType::F32);
}

#[test]
fn data_parallel_passes_it_on_to_its_threads() {
    let (varmap, device) = (VarMap::new(), Device::Cpu);
    let dp = DataParallel::new(&[device.clone(), device.clone()], &device, &varmap, |vb| linear(4, 2, vb)).unwrap();
    let y = autocast(DType::BF16, || dp.forward(&tensor(&[6, 4], 1))).unwrap();
    assert_eq!(y.dtype(), DType::BF16);
}

/// Both sums of the pass reach the weight once, in f32, as without autocast.
#[test]
fn a_shared_weight_is_averaged_once() {
    let run = |mode: Option<Autocast>| {
        ranks(2, |pg| {
            let options = mode.map(options).unwrap_or_default();
            let varmap = VarMap::new();
            let ddp = DistributedDataParallel::with_options(&pg, &varmap, |vb| linear(4, 4, vb), options)?;
            fill(&varmap, 1);
            let x = tensor(&[3, 4], pg.rank() as u64);
            let y = ddp.call(|net| add(&net.forward(&net.forward(&x)?)?, &net.forward(&x)?))?;
            let grads = ddp.backward(&y.to_dtype(DType::F32)?.sqr()?.sum_all()?)?;
            Ok(ddp.parameters().iter().map(|var| grads.get(var).unwrap().clone()).collect::<Vec<_>>())
        })
    };
    for (plain, cast) in run(None).iter().flatten().zip(run(Some(BF16)).iter().flatten()) {
        let largest = plain.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        let difference = (plain - cast).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(difference > 0.0 && difference < largest / 30.0, "{plain} and {cast}");
    }
}
