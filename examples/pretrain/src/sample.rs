//! Draws tokens from the model.
use crate::model::Model;
use candle_core::Tensor;
use candle_ddp::seed::Generator;
use candle_ddp::{DistributedDataParallel, Result, nn};

/// Draws `length` tokens that follow `first`. Every rank calls it, since the blocks of a sharded model are gathered, and gets the same.
///
/// # Errors
/// Those of the model's forward pass.
pub fn draw(
    ddp: &DistributedDataParallel<Model>,
    context: usize,
    first: u32,
    length: usize,
    seed: u64,
) -> Result<Vec<u32>> {
    let (mut tokens, mut random) = (vec![first], Generator::new(seed));
    for _ in 0..length {
        let seen = &tokens[tokens.len().saturating_sub(context)..];
        let seen = Tensor::new(seen, ddp.process_group().device())?.unsqueeze(0)?;
        let logits = nn::no_grad(|| ddp.call(|model| model.next(&seen)))?.to_vec1::<f32>()?;
        tokens.push(choose(&logits, random.uniform(0., 1.)));
    }
    tokens.remove(0);
    Ok(tokens)
}

/// A token, given a number drawn from 0..1.
fn choose(logits: &[f32], uniform: f64) -> u32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights = logits.iter().map(|logit| f64::from(logit - max).exp());
    let mut left = uniform * weights.clone().sum::<f64>();
    let drawn = weights.into_iter().position(|weight| {
        left -= weight;
        left < 0.
    });
    drawn.unwrap_or(logits.len() - 1) as u32
}
