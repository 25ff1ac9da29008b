//! Plain candle in one process with the whole batch, against the golden training run of PyTorch's DDP on two ranks.
//! Differences here come from candle, not from DDP.
use candle_core::{DType, Device, Module, Result};
use candle_nn::{AdamW, Optimizer, SGD, VarBuilder, VarMap};

fn train<O: Optimizer>(name: &str, config: O::Config) -> Result<()> {
    let golden = crate::model::Golden::load()?;
    let varmap = VarMap::new();
    let net = crate::model::net(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
    golden.set_initial(&varmap)?;
    let mut optimizer = O::new(varmap.all_vars(), config)?;
    // The loss of the whole batch is the mean of the ranks' losses, since their batches have the same size.
    let expected: Vec<f32> = golden.get(&format!("{name}.losses")).mean(0)?.to_vec1()?;
    assert_eq!(expected.len(), crate::model::STEPS);
    for (step, expected) in expected.into_iter().enumerate() {
        let (images, labels) = golden.batch(step, 0, 1)?;
        let loss = candle_nn::loss::cross_entropy(&net.forward(&images)?, &labels)?;
        optimizer.backward_step(&loss)?;
        let loss: f32 = loss.to_scalar()?;
        assert!((loss - expected).abs() < 1e-5, "{name}, step {step}: {loss} instead of {expected}");
    }
    let difference = golden.difference(&varmap, name)?;
    println!("{name}: weights differ by at most {difference:.1e}");
    assert!(difference < 1e-5, "{name}: weights differ by {difference}");
    Ok(())
}

#[test]
fn sgd_trains_as_in_pytorch() -> Result<()> {
    train::<SGD>("sgd", crate::model::SGD_LEARNING_RATE)
}

#[test]
fn adamw_trains_as_in_pytorch() -> Result<()> {
    train::<AdamW>("adamw", crate::model::adamw())
}
