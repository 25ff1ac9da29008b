//! Detects gradients that were never used: a program ported from PyTorch may call `backward` twice and expect a sum.
use crate::Result;
use crate::ddp::model::parameter::Parameter;
use candle_core::DType;

/// Whether the first averaged gradients were `used`, None before there are any: looks for a variable that has changed since its replica was
/// last updated.
pub(in crate::ddp) fn look(used: &mut Option<bool>, parameters: &[Parameter]) -> Result<()> {
    if *used != Some(false) {
        return Ok(());
    }
    for parameter in parameters.iter().filter(|parameter| parameter.var.elem_count() > 0) {
        let Some(replica) = parameter.replica() else { continue };
        let differs = parameter.var.to_dtype(replica.dtype())?.ne(&replica.detach())?.to_dtype(DType::F32)?;
        if differs.sum_all()?.to_scalar::<f32>()? > 0. {
            *used = Some(true);
            break;
        }
    }
    Ok(())
}
