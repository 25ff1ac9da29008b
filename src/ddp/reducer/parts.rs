//! The results of a backward pass, some buckets at a time.
use super::Reducer;
use crate::Result;
use crate::ddp::reduction::Reduction;
use candle_core::Tensor;
use std::ops::Range;

impl Reducer {
    /// Whether a bucket has all that a step with its gradients needs. In the first pass it has not, since some parameter may turn out to
    /// be unused; hooks and shards send their flags after all buckets.
    pub(crate) fn has_parts(&self) -> bool {
        let state = self.lock();
        state.trained && matches!(state.reduction, Reduction::AllReduce)
    }

    pub(crate) fn bucket_count(&self) -> usize {
        self.lock().buckets.len()
    }

    /// [`finalize_backward`](Self::finalize_backward) for these buckets, which follow the last call's. Returns the gradients of the
    /// parameters that a rank used; where only the GPU knows that, with a verdict that is bad if no rank did.
    pub(crate) fn finalize_buckets(&self, numbers: Range<usize>) -> Result<Vec<(usize, Tensor, Option<Tensor>)>> {
        self.with_part(|part| {
            let mut state = self.lock();
            let mut gradients = Vec::new();
            for number in numbers.clone() {
                let bucket = &state.buckets[number];
                bucket.finish(number, self.trace())?;
                if number == 0 {
                    self.groups.main().carry_stop(bucket.stop_flag()?);
                }
                let converted = bucket.converted(&state.parameters, 1.)?;
                let is_unsure = |index: &usize| !part.used[*index];
                let asks = bucket.members.iter().any(is_unsure);
                let on_gpu = bucket.tensor.device().is_cuda();
                let verdicts = (asks && on_gpu).then(|| bucket.verdicts()).transpose()?;
                let used = (asks && !on_gpu).then(|| bucket.used()).transpose()?;
                for (slot, (index, gradient)) in bucket.members.iter().zip(converted).enumerate() {
                    let verdicts = verdicts.as_ref().filter(|_| is_unsure(index));
                    let verdict = verdicts.map(|all| all.narrow(0, slot, 2)).transpose()?;
                    if !is_unsure(index) || verdict.is_some() || used.as_ref().is_some_and(|used| used[slot]) {
                        gradients.push((*index, gradient, verdict));
                    }
                }
            }
            if numbers.end == state.buckets.len() {
                state.clear_accumulated();
            }
            Ok(gradients)
        })
    }
}
