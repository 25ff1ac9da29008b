//! Saving and loading the states of a training run.
use super::Share;
use crate::placement::Spread;
use crate::state::file::{read_safetensors, write_safetensors};
use crate::{Error, Result};
use candle_core::{Device, Tensor, WithDType};
use std::collections::HashMap;
use std::path::Path;

/// Named tensors.
pub type Dict = HashMap<String, Tensor>;

/// A state that was read.
#[derive(Debug)]
pub enum Saved {
    Whole(Dict),
    /// In the order of the ranks that saved them.
    Shards(Vec<Dict>),
}

/// Puts a state in place that has been checked.
pub type PutInPlace<'a> = Box<dyn FnOnce() -> Result<()> + 'a>;

/// Something whose state can be saved and loaded: the variables of a model (`VarMap`), an optimizer, a learning-rate
/// schedule, an average of weights, a `GradScaler`, a random generator, a number. A `Checkpointer` saves several, with their
/// names ([`Parts`](crate::Parts)).
///
/// PyTorch's `Stateful`. A program's own states need two methods. For types that implement serde's traits,
/// [`Serde`](crate::Serde) has them already:
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_ddp::Result;
/// use candle_ddp::checkpoint::StateDict;
/// use std::collections::HashMap;
///
/// struct Queue(Tensor);
///
/// impl StateDict for Queue {
///     fn state_dict(&self) -> Result<HashMap<String, Tensor>> {
///         Ok(HashMap::from([("queue".to_string(), self.0.clone())]))
///     }
///
///     fn load_state_dict(&mut self, state: &HashMap<String, Tensor>) -> Result<()> {
///         self.0 = state["queue"].clone();
///         Ok(())
///     }
/// }
/// ```
pub trait StateDict {
    /// The state as named tensors. Tensors of parameters share storage with the live state and change with it.
    ///
    /// # Errors
    /// Returns an error if a part of the state cannot be named.
    fn state_dict(&self) -> Result<HashMap<String, Tensor>>;

    /// Loads a state. A state that does not fit is an error, and changes nothing. Gradients end here: a state is values.
    ///
    /// # Errors
    /// [`Error::Parameter`] names an entry that is missing, is surplus, or has another shape or dtype.
    fn load_state_dict(&mut self, state: &HashMap<String, Tensor>) -> Result<()>;

    /// Loads a state that a rank of the same run has in its memory, as after the death of another rank. `is_new`: all ranks have just
    /// made this anew, for a group that may have another size; otherwise some of them have it since the beginning of the run.
    #[doc(hidden)]
    fn take_over(&mut self, state: &HashMap<String, Tensor>, is_new: bool) -> Result<()> {
        let _ = is_new;
        self.load_state_dict(state)
    }

    /// The part of the state that this rank has. The default is a state that is the same on all ranks, which a `Checkpointer` checks. Ranks must
    /// agree on how the state is spread. The call does not communicate.
    #[doc(hidden)]
    fn share(&self) -> Result<Share> {
        Ok(Share::new(Spread::Replicate, self.state_dict()?))
    }

    /// Whether [`prepare`](Self::prepare) does everything that can fail.
    #[doc(hidden)]
    fn can_prepare(&self) -> bool {
        false
    }

    /// Checks a state whose tensors nobody else has, and returns what puts it in place as the state of rank `rank` of a world of
    /// `world_size`. This changes nothing before. A shard that this rank is known not to need may be empty. The call does not communicate.
    #[doc(hidden)]
    fn prepare(&mut self, saved: Saved, rank: usize, world_size: usize) -> Result<PutInPlace<'_>> {
        let _ = (rank, world_size);
        match saved {
            Saved::Whole(state) => Ok(Box::new(move || self.load_state_dict(&state))),
            Saved::Shards(shards) => {
                let reason = format!(
                    "it was saved as {} shards, one from each rank (of a ZeroRedundancyOptimizer, PerRank, or a Generator of for_rank), \
                     and cannot be loaded into a state that is the same on all ranks",
                    shards.len()
                );
                Err(Error::invalid("state", reason))
            }
        }
    }

    /// Writes the state to a safetensors file. A temporary file in the same folder is written first and then takes
    /// the file's name, so there is never half a file. Only one of several ranks should call this. It does not know
    /// whether the other ranks have failed: give the file a new name, and remember that name only after a `save_distributed` of the
    /// weights, as the training loop in `docs/checkpoints.md` does.
    ///
    /// # Errors
    /// As with [`state_dict`](Self::state_dict), and [`Error::Io`].
    fn save(&self, path: impl AsRef<Path>) -> Result<()>
    where
        Self: Sized,
    {
        write_safetensors(path.as_ref(), &self.state_dict()?)
    }

    /// Loads a file that [`save`](Self::save) wrote.
    ///
    /// # Errors
    /// As with [`load_state_dict`](Self::load_state_dict), and [`Error::Io`].
    fn load(&mut self, path: impl AsRef<Path>) -> Result<()>
    where
        Self: Sized,
    {
        self.load_state_dict(&read_safetensors(path.as_ref())?)
    }
}

/// The key of a state's kind.
pub const KIND: &str = "kind";

/// The beginning of a state of `kind`.
pub fn begin(kind: &str) -> Result<HashMap<String, Tensor>> {
    Ok(HashMap::from([(KIND.to_string(), list(kind.as_bytes())?)]))
}

/// Values of a state.
pub fn list<T: WithDType>(values: &[T]) -> Result<Tensor> {
    Ok(Tensor::from_slice(values, values.len(), &Device::Cpu)?)
}

/// A counter of a state.
pub fn count(value: u64) -> Result<Tensor> {
    list(&[value as i64])
}

/// The methods of a state that has a state in it.
macro_rules! forward {
    ($self:ident => $shared:expr, $exclusive:expr) => {
        fn state_dict(&$self) -> Result<Dict> {
            $shared.state_dict()
        }

        fn load_state_dict(&mut $self, state: &Dict) -> Result<()> {
            $exclusive.load_state_dict(state)
        }

        fn take_over(&mut $self, state: &Dict, is_new: bool) -> Result<()> {
            $exclusive.take_over(state, is_new)
        }
    };
}
pub(super) use forward;
