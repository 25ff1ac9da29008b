//! The floating-point operations of a transformer.

/// The size of a transformer, from which follows how many floating-point operations training takes per token: PaLM's appendix B, and
/// nanoGPT's `estimate_mfu`.
///
/// ```
/// use candle_ddp::metrics::TransformerFlops;
///
/// // GPT-2: 124,439,808 parameters, of which 1024 · 768 are position embeddings. The token embedding is the head's weight as well.
/// let gpt2 = TransformerFlops { parameters: 123_653_376, layers: 12, heads: 12, head_dim: 64, context: 1024, ..Default::default() };
/// assert_eq!(gpt2.per_token(), 855_166_464.);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TransformerFlops {
    /// The trained parameters that a token is multiplied with.
    ///
    /// Count the weights of attention, of feed-forward layers, and of the head; biases and norms hardly matter. Leave out what is
    /// only looked up: position embeddings, and the token embedding unless the head shares its weights, which then count once. Of a
    /// mixture of experts, count the experts that one token goes through. Count all ranks' parts of a model that is sharded.
    pub parameters: usize,
    /// The frozen parameters that a token is multiplied with, between trained ones or after them, such as those below LoRA's
    /// adapters. They need no gradient of their own.
    pub frozen_parameters: usize,
    /// The number of layers with attention.
    pub layers: usize,
    /// The number of heads of the queries, also if keys and values have fewer.
    pub heads: usize,
    /// The length of a head's vectors.
    pub head_dim: usize,
    /// The number of tokens that a token sees: the length of the pieces, or of a sliding window.
    pub context: usize,
}

impl TransformerFlops {
    /// The floating-point operations per token of a forward and a backward pass: 6 per parameter, 4 per frozen parameter, and
    /// 12 · layers · heads · head_dim · context for attention.
    ///
    /// A multiplication and an addition are two operations. As in PaLM's formula, attention counts in full, although a causal mask needs
    /// half of it, and computing activations again for [`nn::checkpoint`](crate::nn::checkpoint) does not count: that would be
    /// hardware FLOPs utilization (HFU).
    pub fn per_token(&self) -> f64 {
        let [parameters, frozen, layers, heads, head_dim, context] =
            [self.parameters, self.frozen_parameters, self.layers, self.heads, self.head_dim, self.context]
                .map(|number| number as f64);
        6. * parameters + 4. * frozen + 12. * layers * heads * head_dim * context
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of nanoGPT's notebook transformer_sizing, for GPT-2 without biases.
    #[test]
    fn the_numbers_are_those_of_nanogpt() {
        let of = |parameters| {
            let gpt2 = TransformerFlops {
                parameters,
                layers: 12,
                heads: 12,
                head_dim: 64,
                context: 1024,
                ..Default::default()
            };
            1024. * gpt2.per_token()
        };
        // With all parameters, and with the weights of its products alone, which is its exact count.
        let (total, positions, norms) = (124_337_664, 786_432, 25 * 768);
        assert_eq!(of(total), 879_894_724_608.);
        assert_eq!(of(total - positions - norms), 874_944_921_600.);
        assert!((of(total - positions) / 874_944_921_600. - 1.).abs() < 2e-4);
    }

    /// Forward and the gradient of the input are two products; a frozen weight has no third.
    #[test]
    fn frozen_parameters_count_two_thirds() {
        let trained =
            TransformerFlops { parameters: 3000, layers: 2, heads: 4, head_dim: 8, context: 16, ..Default::default() };
        let lora = TransformerFlops { parameters: 300, frozen_parameters: 2700, ..trained };
        assert_eq!((trained.per_token(), lora.per_token()), (18_000. + 12_288., 1800. + 10_800. + 12_288.));
        assert_eq!(TransformerFlops::default().per_token(), 0.);
    }
}
