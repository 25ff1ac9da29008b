//! The programs' own states: numbers, values that serde can write, and states behind a lock.
use super::loader::Loader;
use super::state_dict::forward;
use super::{Dict, PutInPlace, Saved, Share, StateDict, begin, list};
use crate::cbor;
use crate::panic::lock;
use crate::{Error, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::sync::{Arc, Mutex};

/// The key of a state with a single value.
const VALUE: &str = "value";

/// Numbers are saved bit for bit, including infinities and NaN. A number of another type in the file is an error.
macro_rules! numbers {
    ($($number:ty as $saved:ty),*) => {$(
        impl StateDict for $number {
            fn state_dict(&self) -> Result<Dict> {
                let mut dict = begin(stringify!($number))?;
                dict.insert(VALUE.to_string(), list(&[*self as $saved])?);
                Ok(dict)
            }

            fn load_state_dict(&mut self, state: &Dict) -> Result<()> {
                let mut loader = Loader::new(state, stringify!($number))?;
                let value = loader.list::<$saved>(VALUE, 1)?[0];
                loader.finish()?;
                *self = value as $number;
                Ok(())
            }
        }
    )*};
}

numbers!(f64 as f64, f32 as f32, u64 as i64, usize as i64, i64 as i64, u32 as u32, i32 as i32);

/// Makes a [`StateDict`] of anything that serde can write: options, lists, maps, structs. Numbers are saved exactly,
/// including NaN and infinities.
///
/// It is saved as CBOR (RFC 8949) with maps sorted by key: equal `HashMap`s have the same state on all ranks. A
/// `HashSet` has no such order; save a `BTreeSet` instead.
///
/// ```
/// use candle_ddp::checkpoint::{Serde, StateDict};
/// use std::collections::BTreeMap;
///
/// # fn main() -> candle_ddp::Result<()> {
/// let mut accuracies = Serde(BTreeMap::from([(100, 0.5)]));
/// let state = accuracies.state_dict()?;
/// accuracies.0.insert(200, 0.75);
/// accuracies.load_state_dict(&state)?;
/// assert_eq!(accuracies.0, [(100, 0.5)].into());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Serde<T>(pub T);

const SERDE: &str = "CBOR";

impl<T: Serialize + DeserializeOwned> StateDict for Serde<T> {
    /// # Errors
    /// [`Error::InvalidArgument`] for a value that could not be read again.
    fn state_dict(&self) -> Result<Dict> {
        let invalid = |reason: String| Error::invalid("value", format!("it cannot be saved: {reason}"));
        let bytes = cbor::encode(&self.0).map_err(invalid)?;
        cbor::decode::<T>(&bytes).map_err(invalid)?;
        let mut dict = begin(SERDE)?;
        dict.insert(VALUE.to_string(), list(&bytes)?);
        Ok(dict)
    }

    fn load_state_dict(&mut self, state: &Dict) -> Result<()> {
        let mut loader = Loader::new(state, SERDE)?;
        let bytes = loader.values::<u8>(VALUE)?;
        loader.finish()?;
        self.0 = cbor::decode(&bytes)
            .map_err(|reason| Error::parameter(VALUE, format!("it is a value of another type: {reason}")))?;
        Ok(())
    }
}

impl<S: StateDict + ?Sized> StateDict for Box<S> {
    forward!(self => (**self), (**self));

    fn share(&self) -> Result<Share> {
        (**self).share()
    }

    fn can_prepare(&self) -> bool {
        (**self).can_prepare()
    }

    fn prepare(&mut self, saved: Saved, rank: usize, world_size: usize) -> Result<PutInPlace<'_>> {
        (**self).prepare(saved, rank, world_size)
    }
}

/// For states that several parts of a program share, such as the [`Generator`](crate::seed::Generator) of dropout layers.
impl<S: StateDict + ?Sized> StateDict for Arc<Mutex<S>> {
    forward!(self => lock(self), lock(self));

    fn share(&self) -> Result<Share> {
        lock(self).share()
    }

    fn prepare(&mut self, saved: Saved, rank: usize, world_size: usize) -> Result<PutInPlace<'_>> {
        Ok(Box::new(move || lock(self).prepare(saved, rank, world_size)?()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seed::Generator;
    use std::collections::{BTreeMap, HashMap};
    use std::fmt::Debug;

    #[track_caller]
    fn check<S: StateDict + Debug>(saved: S, mut other: S) {
        other.load_state_dict(&saved.state_dict().unwrap()).unwrap();
        assert_eq!(format!("{other:?}"), format!("{saved:?}"));
    }

    #[test]
    fn values_are_saved_bit_for_bit() {
        for value in [f64::NEG_INFINITY, 0.1 + 0.2, -0.0, f64::NAN] {
            check(value, 1.0);
        }
        check(0.1f32, 1.0);
        check(u64::MAX, 1);
        check(usize::MAX, 1);
        check(i64::MIN, 1);
        check(u32::MAX, 1);
        check(i32::MIN, 1);
        check(Serde((1.5, "a".to_string(), vec![Some(2u8), None])), Serde(Default::default()));
        check(Serde((f64::NAN, Some(f64::NAN), vec![f32::NEG_INFINITY])), Serde(Default::default()));
        let generator = |offset| {
            let mut generator = Generator::new(7);
            generator.restore(7, 0, offset);
            Arc::new(Mutex::new(generator))
        };
        check(generator(3), generator(4));
        check(Box::new(generator(3)), Box::new(generator(4)));
    }

    /// Each `HashMap` has its own order.
    #[test]
    fn equal_maps_have_equal_states() {
        let map = || Serde((0..100).map(|key| (key.to_string(), f64::from(key))).collect::<HashMap<_, _>>());
        let bytes = |state: Dict| state[VALUE].to_vec1::<u8>().unwrap();
        assert_eq!(bytes(map().state_dict().unwrap()), bytes(map().state_dict().unwrap()));
        check(Serde(BTreeMap::from([((1, 2), "ab".to_string())])), Serde(BTreeMap::new()));
    }

    #[test]
    fn what_is_of_another_kind_is_refused() {
        let state = 1.5f64.state_dict().unwrap();
        assert!(
            1u64.load_state_dict(&state).unwrap_err().to_string().contains("it must be the state of u64, not of f64")
        );
        let text = Serde(vec![1.5]).state_dict().unwrap();
        let error = Serde(String::new()).load_state_dict(&text).unwrap_err().to_string();
        assert!(error.contains("a value of another type"), "{error}");
        let error = 1u64.prepare(Saved::Shards(vec![state.clone(), state]), 0, 2).err().unwrap().to_string();
        assert!(error.contains("as 2 shards"), "{error}");
    }
}
