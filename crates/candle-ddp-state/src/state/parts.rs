//! Lists of the parts of a checkpoint.
use super::StateDict;

/// The parts of a run's state with their names: what a `Checkpointer` saves and loads, and what an elastic run commits
/// (`elastic::State`).
///
/// A program names its parts once, in a struct that has them:
///
/// ```
/// use candle_ddp::checkpoint::{Parts, StateDict};
/// use candle_ddp::optim::AdamW;
/// use candle_nn::VarMap;
///
/// struct Training {
///     varmap: VarMap,
///     optimizer: AdamW,
///     best_loss: f64,
/// }
///
/// impl Parts for Training {
///     fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
///         vec![("model", &mut self.varmap), ("optimizer", &mut self.optimizer), ("best_loss", &mut self.best_loss)]
///     }
/// }
/// ```
///
/// A name and a part are a list as well, and so are tuples and slices of lists:
///
/// ```
/// # use candle_ddp::checkpoint::{Checkpointer, Parts};
/// # fn save(checkpointer: &mut Checkpointer, mut training: impl Parts, mut varmap: candle_nn::VarMap) -> candle_ddp::Result<()> {
/// let mut best_loss = 0.5;
/// checkpointer.save(1, ("model", &mut varmap))?;
/// checkpointer.save(2, (("model", &mut varmap), ("best_loss", &mut best_loss)))?;
/// checkpointer.save(3, (&mut training, ("best_loss", &mut best_loss)))?;
/// # Ok(())
/// # }
/// ```
///
/// To save does not change a part, but the list is the one for loading, so it borrows its parts mutably. While something else
/// has borrowed a part, give another handle to it: clones of a `VarMap` or of an `Arc<Mutex<…>>` are the same state, a number or
/// a `LoaderState` can be copied. An iterator over a `DataLoader` does not borrow it.
pub trait Parts {
    /// The parts with their names. Each has its own name, without a slash, and every call must return the same ones.
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)>;
}

impl<P: Parts + ?Sized> Parts for &mut P {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        (**self).parts()
    }
}

/// One part.
impl<S: StateDict> Parts for (&str, &mut S) {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        vec![(self.0, &mut *self.1)]
    }
}

/// One part.
impl Parts for (&str, &mut dyn StateDict) {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        vec![(self.0, &mut *self.1)]
    }
}

impl<P: Parts> Parts for [P] {
    fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
        self.iter_mut().flat_map(P::parts).collect()
    }
}

macro_rules! tuples {
    ($first:ident $second:ident $($other:ident)*) => { tuples!(@ [$first $second] $($other)*); };
    (@ [$($list:ident)*] $next:ident $($other:ident)*) => {
        tuples!(@ [$($list)*]);
        tuples!(@ [$($list)* $next] $($other)*);
    };
    (@ [$($list:ident)*]) => {
        impl<$($list: Parts),*> Parts for ($($list,)*) {
            fn parts(&mut self) -> Vec<(&str, &mut dyn StateDict)> {
                #[allow(non_snake_case, reason = "each list has the name of its type")]
                let ($($list,)*) = self;
                let mut parts = Vec::new();
                $(parts.extend($list.parts());)*
                parts
            }
        }
    };
}

tuples!(A B C D E F G H I J K L);

#[cfg(test)]
mod tests {
    use super::*;

    fn names(mut parts: impl Parts) -> Vec<String> {
        parts.parts().into_iter().map(|(name, _)| name.to_string()).collect()
    }

    #[test]
    fn lists_of_lists_are_lists() {
        let (mut a, mut b, mut c) = (1., 2u64, vec![3., 4.]);
        let mut list: Vec<(&str, &mut dyn StateDict)> = c.iter_mut().map(|c| ("c", c as &mut dyn StateDict)).collect();
        assert_eq!(names((("a", &mut a), ("b", &mut b), &mut list[..])), ["a", "b", "c", "c"]);
        let mut pair = (("a", &mut a), ("b", &mut b));
        assert_eq!(names((&mut pair, ("c", &mut c[0]))), ["a", "b", "c"]);
        assert_eq!(names(pair), ["a", "b"]);
    }

    #[test]
    fn what_is_loaded_goes_into_the_part_itself() {
        let (mut a, mut b) = (1., 2.);
        let mut list = (("a", &mut a), ("b", &mut b));
        for (_, part) in list.parts() {
            part.load_state_dict(&7f64.state_dict().unwrap()).unwrap();
        }
        assert_eq!((a, b), (7., 7.));
    }
}
