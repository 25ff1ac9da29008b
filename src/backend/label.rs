//! The purposes of this crate's own collectives, as messages show them: `all_gather(i64[1]) for save_distributed`.
pub(crate) use candle_ddp_engine::Label;
use std::sync::Once;

macro_rules! labels {
    ($($name:ident = $text:literal;)*) => {
        $(pub(crate) const $name: Label = Label::of($text);)*

        const TEXTS: &[&str] = &[$($text),*];
    };
}

labels! {
    BROADCAST_OBJECT = "broadcast_object";
    ALL_GATHER_OBJECT = "all_gather_object";
    GATHER_OBJECT = "gather_object";
    SCATTER_OBJECT = "scatter_object";
    SEND_OBJECT = "send_object";
    MESH = "mesh";
    ALL_GATHER_VARIED = "all_gather_varied";
    ALL_REDUCE_SCALARS = "all_reduce_scalars";
    DDP_NEW = "DistributedDataParallel::new";
    DDP_HOOK = "register_comm_hook";
    DDP_BUFFERS = "rank 0's variables, which DistributedDataParallel broadcasts";
    DDP_ORDER = "the order of DistributedDataParallel's buckets";
    DDP_REPLICAS = "the comparison of DistributedDataParallel's replicas";
    DDP_NON_FINITE = "which gradient was not finite";
    DDP_USED = "the used flags of DistributedDataParallel's parameters";
    JOIN = "ddp.join (call no collectives inside)";
    JOIN_NEW = "join";
    JOIN_SYNC = "Joined::sync";
    LOADER_NEW = "DataLoader::new";
    BATCH_NORM = "SyncBatchNorm's statistics";
    BATCH_NORM_BACKWARD = "SyncBatchNorm's gradients";
    WITH_GRAD = "a collective with a gradient";
    WITH_GRAD_BACKWARD = "the gradient of a collective";
    ALL_TO_ALL_VARIED = "all_to_all_varied";
    UNSCALE = "GradScaler::unscale";
    STOP = "agree_on_stop";
    SPEED = "share_by_speed";
    AVERAGER = "PeriodicModelAverager::average_parameters";
    UPDATE_BN = "update_bn";
    OPTIMIZER_NEW = "FusedOptimizer::new";
    OPTIMIZER_STEP = "Optimizer::step";
    OPTIMIZER_NORM = "Optimizer::clip_grad_norm";
    OPTIMIZER_STATE = "an optimizer's state_dict";
    OPTIMIZER_SAVE = "Optimizer::save_distributed";
    OPTIMIZER_LOAD = "Optimizer::load_distributed";
    ELASTIC = "elastic::run's synchronisation of the state";
    ELASTIC_MIRROR = "the shards that elastic::State mirrors";
    SAVE = "save_distributed";
    SAVE_ADAPTER = "save_adapter";
    SAVE_PRETRAINED = "save_pretrained";
    LOAD = "load_distributed";
    CHECKPOINTER_NEW = "Checkpointer::new";
    CHECKPOINTER_SAVE = "Checkpointer::save";
    CHECKPOINTER_WRITE = "the background write of Checkpointer::save";
    CHECKPOINTER_LOAD = "Checkpointer::load_latest";
}

/// Makes the texts of all labels known to this process, which may hear of them from other ranks before it uses them.
pub(crate) fn register() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| TEXTS.iter().for_each(|text| _ = Label::register(*text)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_label_has_a_text_of_its_own() {
        register();
        for (index, text) in TEXTS.iter().enumerate() {
            assert_eq!(Label::of(text).text().as_deref(), Some(*text));
            assert!(TEXTS[..index].iter().all(|other| Label::of(other) != Label::of(text)), "{text}");
        }
    }
}
