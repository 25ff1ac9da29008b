//! Which variables are not trained.
use candle_ddp::{DistributedDataParallel, Error, Result};

/// Whether a variable's name begins with one of the prefixes, which end at a dot or at its end. They may leave `bert.` out.
pub(crate) fn is_frozen(name: &str, prefixes: &[String]) -> bool {
    let names = [name, name.strip_prefix("bert.").unwrap_or(name)];
    let begins =
        |name: &str, prefix| name.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    prefixes.iter().any(|prefix| names.iter().any(|name| begins(name, prefix.as_str())))
}

/// Fails if there is a prefix with which no name begins, such as one that was mistyped. Returns how many variables are frozen.
pub(crate) fn check<M>(ddp: &DistributedDataParallel<M>, prefixes: &[String]) -> Result<usize> {
    let frozen = ddp.named_frozen();
    for prefix in prefixes {
        if !frozen.iter().any(|(name, _)| is_frozen(name, std::slice::from_ref(prefix))) {
            let reason = format!(
                "no variable's name begins with {prefix:?}; names are bert.embeddings.word_embeddings.weight, \
                 bert.encoder.layer.0.output.dense.bias, bert.pooler.dense.bias, classifier.weight and others like these"
            );
            return Err(Error::InvalidArgument { argument: "--freeze", reason });
        }
    }
    Ok(frozen.len())
}
