//! Initial values from a seed, under DistributedDataParallel.
use crate::common::{floats, ranks};
use candle_core::{DType, Device};
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, Precision, seed};
use candle_nn::init::DEFAULT_KAIMING_NORMAL;
use candle_nn::{Linear, VarBuilder, VarMap, batch_norm, linear};

/// On each rank: the variables by name.
fn build(world_size: usize, options: DdpOptions) -> Vec<Vec<(String, Vec<f32>)>> {
    ranks(world_size, |pg| {
        let net = |vb: VarBuilder| -> Result<(Linear, Linear), Error> {
            // The ranks would otherwise differ only in the values that candle draws.
            batch_norm(3, 1e-5, vb.pp("bn"))?;
            Ok((linear(7, 5, vb.pp("a"))?, linear(5, 2, vb.pp("b"))?))
        };
        let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), net, options.clone())?;
        Ok(ddp.named_parameters().into_iter().map(|(name, var)| (name, floats(&var))).collect())
    })
}

#[test]
fn initial_values_do_not_depend_on_the_run_or_the_world_size() {
    let seeded = |seed| DdpOptions { init_seed: Some(seed), ..Default::default() };
    let one = build(1, seeded(3)).remove(0);
    for rank in build(3, seeded(3)) {
        assert_eq!(rank, one);
    }
    // The variables are f32, whatever dtype the model computes in.
    let precision = Precision::Half { param_dtype: DType::BF16, buffer_dtype: None };
    assert_eq!(build(2, DdpOptions { precision, ..seeded(3) })[1], one);
    let values = |name: &str| one.iter().find(|(other, _)| other == name).unwrap().1.clone();
    let expected = seed::init(DEFAULT_KAIMING_NORMAL, 3, "a.weight", (5, 7), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(values("a.weight"), floats(&expected));
    assert_eq!(values("bn.weight"), [1.0; 3]);
    let other = build(1, seeded(4)).remove(0);
    assert!(other.iter().zip(&one).all(|((name, a), (_, b))| (a != b) != name.starts_with("bn")), "{other:?}");
    // Without a seed, candle draws random values.
    assert_ne!(build(1, DdpOptions::default()), build(1, DdpOptions::default()));
}
