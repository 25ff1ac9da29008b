//! The options of a backward pass.
use candle_core::backprop::GradStore;

/// How [`backward_with`](crate::backward_with) averages gradients, of which micro-batch, and whether it adds them to others.
#[derive(Debug, Default)]
pub struct Backward<'a> {
    /// The number of samples, tokens or pixels of this rank over which the loss is a sum. The gradients are then those of the mean
    /// over all samples of all ranks, `Σ loss / Σ count`. It may also be a sum of weights. A rank without samples gives a loss of
    /// 0 and a count of 0; such a loss need not depend on the model, unless that has sharded blocks. Default: None, and the gradients are the mean of the ranks'
    /// gradients, in which a sample counts more on a rank that has few.
    ///
    /// Under [`no_sync`](crate::DistributedDataParallel::no_sync) the counts accumulate with the gradients, so micro-batches of
    /// different sizes need no division. The count travels with the gradients, and needs no separate call; on a GPU the call
    /// waits for the sum of the counts. In a [`join`](crate::DistributedDataParallel::join), ranks without inputs count nothing,
    /// whatever the options. A [communication hook](crate::comm_hook) must return a mean over the ranks, as those here do; with a
    /// local one, each rank divides by its own count. A [`GradScaler`](crate::amp::GradScaler) scales the sum; since gradients of a
    /// sum are larger, its scale settles lower. The mean loss itself is a quotient of two sums:
    /// [`all_reduce_scalars`](crate::ProcessGroup::all_reduce_scalars).
    pub count: Option<f64>,
    /// The number of the micro-batch whose loss this is, under [virtual ranks](crate::InitOptions::virtual_ranks), and None without.
    /// In each step, a rank computes its [`micro_batches`](crate::DistributedDataParallel::micro_batches), in their order, as a
    /// [loader](crate::data::DataLoader::micro_batches) gives them. The last one returns the mean gradients over all micro-batches of all ranks, with
    /// the same bits on any number of ranks, and none but those of the models' parameters. The others return a store without
    /// gradients, with which an [`Optimizer`](crate::optim::Optimizer) of this crate refuses to make a step. (candle_nn's AdamW would
    /// count one.)
    pub micro_batch: Option<usize>,
    /// Gradients to which the new ones are added: for one step after several losses, as PyTorch's `loss.backward()` adds to
    /// `parameter.grad`. Start with the result of `backward`, or with `GradStore::default()`. The sums are then in this store, and in
    /// the one that the call returns; after an error, this store is as before. Every call averages its own gradients. Under
    /// [`no_sync`](crate::DistributedDataParallel::no_sync) it leaves them with the model, and the next call without the guard averages
    /// and adds their sum. Gradients of tensors that are not variables are not added. Default: None.
    pub into: Option<&'a mut GradStore>,
}
