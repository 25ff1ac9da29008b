//! A scaler that skips all steps says so.
use crate::logger::of_two_ranks;
use candle_core::{DType, Device, Var};
use candle_ddp::amp::{GradScaler, GradScalerOptions};

#[test]
fn a_scale_below_one_is_told_of_once_on_rank_0() {
    let warnings = of_two_ranks(|pg| {
        let var = Var::ones(2, DType::F32, &Device::Cpu)?;
        let finite = Var::ones(2, DType::F32, &Device::Cpu)?;
        let options = GradScalerOptions { init_scale: 4.0, ..Default::default() };
        let parameters = vec![("v".to_string(), finite.clone()), ("w".to_string(), var.clone())];
        let mut scaler = GradScaler::new(&pg, parameters, options)?;
        for _ in 0..5 {
            let infinite = var.sum_all()?.affine(f64::INFINITY, 0.)?;
            let mut grads = scaler.scale(&(finite.sum_all()? + infinite)?)?.backward()?;
            scaler.unscale(&mut grads)?;
            scaler.update()?;
        }
        Ok(())
    });
    assert!(warnings.len() == 1 && warnings[0].starts_with("GradScaler: the scale fell to 5e-1"), "{warnings:?}");
    assert!(
        warnings[0].contains("Lower the learning rate") && warnings[0].contains("OnNonFinite::Stop"),
        "{warnings:?}"
    );
    assert!(warnings[0].contains("even without scaling (first the gradient of w), and every"), "{warnings:?}");
}
