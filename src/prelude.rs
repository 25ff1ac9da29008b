//! The names that most programs use: `use candle_ddp::prelude::*;`.
//!
//! It has what `examples/train.rs` and the quick start use of this crate and of candle, apart from layers and random data: take those
//! from [`nn`](crate::nn) and [`seed`](crate::seed). `Optimizer` is this crate's trait. `docs/migrating.md` lists the names.
#[doc(no_inline)]
pub use crate::checkpoint::{self, Checkpointer, CheckpointerOptions, Parts, StateDict};
#[doc(no_inline)]
pub use crate::data::{DataLoader, LoaderOptions, Remainder, SamplerOptions, TensorDataset};
#[doc(no_inline)]
pub use crate::nn::no_grad;
#[doc(no_inline)]
pub use crate::optim::{AdamW, Optimizer, ParamsAdamW, ParamsWarmupCosine, WarmupCosine};
#[doc(no_inline)]
pub use crate::{
    DistributedDataParallel, InitOptions, ProcessGroup, ReduceOp, Result, StopSignals, init_process_group,
};
#[doc(no_inline)]
pub use candle_core::{D, DType, Device, Tensor};
#[doc(no_inline)]
pub use candle_nn::{VarBuilder, VarMap};

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    /// The names after each `pub use` of this file.
    fn names() -> BTreeSet<&'static str> {
        let (source, _) = include_str!("prelude.rs").split_once("#[cfg(test)]").unwrap();
        let uses = source.split("pub use ").skip(1).map(|rest| rest.split_once(';').unwrap().0);
        let last = |path: &'static str| path.rsplit("::").next().unwrap();
        uses.flat_map(|path| match path.split_once("::{") {
            None => vec![last(path)],
            Some((module, names)) => {
                let names = names.trim_end_matches('}').split(',').map(str::trim).filter(|name| !name.is_empty());
                names.map(|name| if name == "self" { last(module) } else { name }).collect()
            }
        })
        .collect()
    }

    #[test]
    fn it_has_what_the_examples_use() {
        let (train, minimal) = (include_str!("../examples/train.rs"), include_str!("../examples/minimal.rs"));
        let imports = train.lines().filter(|line| line.starts_with("use candle_ddp::") && !line.contains("::nn::"));
        assert_eq!(imports.collect::<Vec<_>>(), ["use candle_ddp::prelude::*;", "use candle_ddp::seed::Generator;"]);
        let words = |text: &'static str| text.split(|c: char| !c.is_alphanumeric() && c != '_');
        let used: BTreeSet<&str> = words(train).chain(words(minimal)).collect();
        // The trait is used by its methods.
        assert_eq!(names().difference(&used).collect::<Vec<_>>(), [&"Optimizer"]);
    }

    #[test]
    fn the_guide_lists_every_name() {
        let guide = include_str!("../docs/migrating.md");
        let (_, section) = guide.split_once("\n## The prelude\n").unwrap();
        let (section, _) = section.split_once("\n## ").unwrap();
        let rows = section.lines().filter(|line| line.starts_with("| `")).map(|line| line.split('|').nth(2).unwrap());
        let listed: BTreeSet<&str> = rows.flat_map(|names| names.split('`').skip(1).step_by(2)).collect();
        assert!(names().contains("no_grad") && names().contains("checkpoint"), "{:?}", names());
        assert_eq!(listed, names());
    }
}
