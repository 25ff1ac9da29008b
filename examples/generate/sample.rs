//! Draws text from a model, character by character.
use crate::hash::Hash;
use crate::plain::{Gpt, next_logits};
use crate::vocabulary::Vocabulary;
use candle_core::{Device, Result};

/// How text is drawn.
pub(crate) struct Sampling {
    /// The number of characters.
    pub(crate) length: usize,
    /// The divisor of the logits: the smaller it is, the more often the likeliest character is drawn.
    pub(crate) temperature: f64,
    pub(crate) seed: u64,
}

impl Sampling {
    /// Returns `prompt` and its continuation, and the hash of all logits.
    pub(crate) fn run(
        &self,
        gpt: &Gpt,
        vocabulary: &Vocabulary,
        prompt: &str,
        device: &Device,
    ) -> Result<(String, Hash)> {
        let (mut text, mut hash, mut state) = (vocabulary.encode(prompt)?, Hash::new(), self.seed);
        for _ in 0..self.length {
            let logits = next_logits(gpt, &text, device)?;
            hash.add(&logits)?;
            text.push(self.draw(&logits.to_vec1::<f32>()?, uniform(&mut state)));
        }
        Ok((vocabulary.decode(&text), hash))
    }

    /// Returns a class, given a number drawn from 0..1.
    fn draw(&self, logits: &[f32], uniform: f64) -> u32 {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights = logits.iter().map(|logit| (f64::from(logit - max) / self.temperature).exp());
        let mut left = uniform * weights.clone().sum::<f64>();
        let drawn = weights.into_iter().position(|weight| {
            left -= weight;
            left < 0.
        });
        drawn.unwrap_or(logits.len() - 1) as u32
    }
}

/// Draws a number from 0..1 (SplitMix64).
fn uniform(state: &mut u64) -> f64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}
