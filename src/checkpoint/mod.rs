//! Checkpoints: weights under the model's own names, from this crate and from PyTorch, and the states of whole runs.
//!
//! [`save`] writes a safetensors file with the names of the `VarMap`. [`load`] reads such files, and those that
//! `torch.save` writes (`.pt`, `.pth`, `.bin`), into the variables of a model that has been built; it tells the
//! formats apart by a file's first bytes. It removes the prefixes that PyTorch's wrappers leave in names, `module.`
//! (DistributedDataParallel, DataParallel) and `_orig_mod.` (torch.compile).
//!
//! ```
//! use candle_core::{DType, Device};
//! use candle_ddp::checkpoint;
//! use candle_nn::{VarBuilder, VarMap, linear};
//!
//! # fn main() -> candle_ddp::Result<()> {
//! let varmap = VarMap::new();
//! let model = linear(4, 2, VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
//! # let file = std::env::temp_dir().join(format!("checkpoint-{}.safetensors", std::process::id()));
//! checkpoint::save(&varmap, &file)?;
//! checkpoint::load(&varmap, &file)?; // or a file from PyTorch
//! # std::fs::remove_file(&file).unwrap();
//! # Ok(())
//! # }
//! ```
//!
//! # Another head
//! A checkpoint whose head is for other classes loads with [`LoadOptions::skip`], one with other names with
//! [`LoadOptions::rename`]; the [`LoadReport`] says what was left out. To change the tensors themselves, [`read`]
//! them, and pass them to [`load_tensors`].
//!
//! # Pretrained models in several files, and adapters
//! [`Pretrained`] reads Hugging Face's folders tensor by tensor, as a `VarBuilder`. [`save_adapter`] and [`load_adapter`] have the files
//! of peft for what a [`LoraConfig`](crate::nn::LoraConfig) trains.
//!
//! # A whole run
//! A [`Checkpointer`] saves the model, the optimizer, the schedule and all other states of a run together, in the
//! background, and loads the newest checkpoint after a restart.
//!
//! # With several ranks
//! Every rank calls [`save_distributed`] and [`load_distributed`], which succeed on all ranks or fail on all. With
//! DistributedDataParallel the variables exist once the model is built; every rank then loads the same file.
//!
//! # Contents of a checkpoint
//! All variables, including buffers. The state of an optimizer has its own file (see [`StateDict`]).
//!
//! Booleans are read as `u8`. A tensor that cannot be read, such as one of a dtype that candle does not have, is an
//! error if the model has a variable of that name, or if all tensors are requested ([`read`]); otherwise it counts
//! like any other name.
//!
//! # Memory and trust
//! Tensors are read one by one: reading takes little more memory than they do. Contiguous tensors that share a
//! storage in a PyTorch file share memory here too.
//!
//! A pickle is read without running any of it, however deep it is. Many of its tensors may be views of the same
//! values: a file whose tensors would need more than 16 times its size in memory (and one MiB) is refused. The pickle
//! itself, which holds names and shapes, takes about a hundred times its own size while it is read.
mod adapter;
mod checkpointer;
mod distributed;
#[cfg(any(test, fuzzing))]
mod fuzz;
mod hashes;
mod save_pretrained;

pub use adapter::{load_adapter, read_adapter_config, save_adapter};
#[doc(inline)]
pub use candle_ddp_state::weights::{
    LoadOptions, LoadReport, Pretrained, load, load_tensors, load_with, read, save, save_tensors,
};
#[doc(inline)]
pub use candle_ddp_state::{Parts, PerRank, RankZero, Serde, StateDict};
#[cfg(any(test, fuzzing))]
pub(crate) use checkpointer::fuzz_index;
pub use checkpointer::{Checkpointer, CheckpointerOptions, SaveHandle};
pub use distributed::{load_distributed, save_distributed};
#[cfg(any(test, fuzzing))]
pub(crate) use fuzz::checkpoint_file as fuzz_checkpoint_file;
pub use save_pretrained::save_pretrained;
