//! AdamW in mixed precision reads gradients of 16 bits as they are.
use super::on_gpu;
use crate::common::{fill, floats, skip, tensor};
use candle_core::{DType, Device};
use candle_ddp::checkpoint::StateDict;
use candle_ddp::optim::{FusedOptimizer, Optimizer, ParamsAdamW, ParamsSgd, UpdateRule};
use candle_ddp::{Backend, Buckets, DdpOptions, DistributedDataParallel, InitOptions, Precision, init_process_group};
use candle_ddp_testing::take_counts;
use candle_nn::{Linear, Module, VarBuilder, VarMap, linear};

/// How often the emulated GPU did each operation.
type Counts = Vec<(String, usize)>;

/// The parameters and the state after three steps, and what the last one asked for.
fn train<R: UpdateRule>(
    gpu: &Device,
    param_dtype: DType,
    keep_low_precision_grads: bool,
    rule: R,
) -> (Vec<Vec<f32>>, Option<Counts>) {
    let device = Some(gpu.clone());
    let pg = init_process_group(InitOptions { backend: Backend::Single, device, ..Default::default() }).unwrap();
    let precision = Precision::Half { param_dtype, buffer_dtype: None };
    let options = DdpOptions {
        precision,
        buckets: Buckets { keep_low_precision_grads, ..Default::default() },
        ..Default::default()
    };
    // Odd sizes, so that later slices of the bucket begin between vectors.
    type Net = [Linear; 2];
    let build =
        |vb: VarBuilder| -> candle_core::Result<Net> { Ok([linear(9, 5, vb.pp("a"))?, linear(5, 3, vb.pp("b"))?]) };
    let varmap = VarMap::new();
    let ddp = DistributedDataParallel::with_options(&pg, &varmap, build, options).unwrap();
    fill(&varmap, 7);
    let mut optimizer = FusedOptimizer::new(&ddp, rule).unwrap();
    let mut asked = None;
    for step in 0..3 {
        let x = tensor(&[4, 9], step).to_dtype(param_dtype).unwrap().to_device(gpu).unwrap();
        let y = ddp.call(|[a, b]| b.forward(&a.forward(&x)?)).unwrap();
        take_counts();
        let loss = y.to_dtype(DType::F32).unwrap().sqr().unwrap().mean_all().unwrap();
        let grads = ddp.backward(&loss).unwrap();
        let dtype = grads.get(&ddp.parameters()[0]).unwrap().dtype();
        assert_eq!(dtype, if keep_low_precision_grads { param_dtype } else { DType::F32 });
        optimizer.step(&grads).unwrap();
        asked = take_counts();
    }
    let mut state: Vec<_> = optimizer.state_dict().unwrap().into_iter().collect();
    state.sort_by(|a, b| a.0.cmp(&b.0));
    let tensors = ddp
        .parameters()
        .into_iter()
        .map(|var| var.as_tensor().clone())
        .chain(state.into_iter().map(|(_, tensor)| tensor));
    (tensors.map(|tensor| floats(&tensor)).collect(), asked)
}

#[test]
fn adam_takes_gradients_of_16_bits_and_the_results_are_the_same() {
    const TEST: &str = "adam_takes_gradients_of_16_bits_and_the_results_are_the_same";
    on_gpu(TEST, |gpu| {
        for dtype in [DType::BF16, DType::F16] {
            let (converted, before) = train(gpu, dtype, false, ParamsAdamW::default());
            let (kept, now) = train(gpu, dtype, true, ParamsAdamW::default());
            assert_eq!(kept, converted, "{dtype:?}");
            // SGD has no such kernel, and converts.
            let sgd = || ParamsSgd { momentum: 0.9, ..Default::default() };
            assert_eq!(train(gpu, dtype, true, sgd()).0, train(gpu, dtype, false, sgd()).0, "{dtype:?}");
            let (Some(before), Some(now)) = (before, now) else {
                return skip(TEST, "only an emulated GPU counts operations");
            };
            let count = |asked: &[(String, usize)], part: &str| -> usize {
                asked.iter().filter(|(name, _)| name.contains(part)).map(|(_, count)| count).sum()
            };
            assert_eq!(count(&now, "adam_from_"), 1, "{now:?}");
            assert_eq!(count(&before, "cast") - count(&now, "cast"), 1, "{before:?}, {now:?}");
            assert!(count(&before, "allocation") > count(&now, "allocation"), "{before:?}, {now:?}");
        }
    });
}
