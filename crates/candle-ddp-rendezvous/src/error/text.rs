//! How messages show the calls of ranks.
use candle_ddp_base::text::{Printable, ranks};
use std::fmt;

/// How the label of a bucket's collective begins.
pub const GRADIENTS: &str = "the gradients of ";

/// Two ranks that parted, with their calls: those with this number, or, with 0, calls of different groups.
pub(super) struct Parted<'a>(pub(super) u64, pub(super) (usize, &'a str), pub(super) (usize, &'a str));

impl fmt::Display for Parted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(sequence, (rank_a, call_a), (rank_b, call_b)) = *self;
        let [a, b] = [call_a, call_b].map(Printable);
        if sequence > 0 {
            let (differing, uneven) = (Differing(call_a, call_b), Uneven(call_a, call_b));
            return write!(
                f,
                "rank {rank_a} called {a} where rank {rank_b} called {b}, sequence {sequence}: all ranks of a group must make the \
                 same calls in the same order{differing}{uneven}"
            );
        }
        write!(
            f,
            "rank {rank_b} waits in {b}, rank {rank_a} in {a}: they wait for each other, and none of them can continue. Ranks must make \
             the calls of all their groups in the same order. Look for a call that only some ranks make, such as one inside `if rank == 0`"
        )?;
        if [call_a, call_b].iter().any(|call| call.contains(COMPANION)) {
            f.write_str(
                ". Sharded blocks, SyncBatchNorm and collectives with a gradient call in a companion of their group: all ranks must run \
                 them equally often and in the same order, also in an evaluation and in a step without samples",
            )?;
        }
        Ok(())
    }
}

/// How the names of groups begin that layers use.
const COMPANION: &str = " the companion of ";

/// The most likely remedy for two ranks whose calls differ.
pub(super) struct Differing<'a>(pub(super) &'a str, pub(super) &'a str);

impl fmt::Display for Differing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn operation(call: &str) -> &str {
            call.split_once('(').map_or(call, |(operation, _)| operation)
        }
        // `all_gather(f32[3]) for …` without the 3.
        fn without_count(call: &str) -> Option<(&str, &str)> {
            let (before, rest) = call.split_once('[')?;
            Some((before, rest.split_once(']')?.1))
        }
        fn has_shape(call: &str) -> bool {
            let size = call.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
            size.is_some_and(|(size, _)| size.contains(','))
        }
        let (a, b) = (operation(self.0), operation(self.1));
        if a == b && self.0 != self.1 && without_count(self.0) == without_count(self.1) {
            // `all_reduce(f32[2, 3])`: shapes are named if the numbers of elements are the same.
            f.write_str(match [self.0, self.1].into_iter().any(has_shape) {
                true => {
                    ". Its tensor must have the same shape on all ranks; if only the order of the elements matters, pass \
                     flatten_all()"
                }
                false => {
                    ". Its tensor must have the same number of elements on all ranks: pad it, or send values of different \
                     sizes with all_gather_object"
                }
            })
        } else if a != b && ![a, b].iter().any(|operation| ["send", "recv"].contains(operation)) {
            f.write_str(". Look for a call that only some ranks make, such as one inside `if rank == 0`")
        } else {
            Ok(())
        }
    }
}

/// Where the calls of ranks are in the program.
pub(super) struct Places<'a>(pub(super) &'a [(usize, String)]);

impl fmt::Display for Places<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut before = ". The call of";
        for (rank, place) in self.0 {
            write!(f, "{before} rank {rank} is at {}", Printable(place))?;
            before = ", that of";
        }
        Ok(())
    }
}

/// A hint for ranks whose calls differ. If one call averages gradients and the other does not, a rank may have ended
/// its loop early.
pub(super) struct Uneven<'a>(pub(super) &'a str, pub(super) &'a str);

impl fmt::Display for Uneven<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let averages = |call: &str| call.contains(&format!(" for {GRADIENTS}"));
        match averages(self.0) != averages(self.1) {
            true => f.write_str(
                ". If ranks have different numbers of batches, train inside `ddp.join`; a rank that has no samples in a step must \
                 not skip it, but call `backward_with(&zero, &[&ddp], Backward { count: Some(0.), .. })` where the others give their counts. \
                 With sharded blocks, all ranks must run the model equally often instead",
            ),
            false => Ok(()),
        }
    }
}

/// The ranks to which there is no connection; the others of the group if it is unknown which.
pub fn others(peers: &[usize]) -> String {
    if peers.is_empty() { "the others of its group".to_string() } else { format!("rank(s) {}", ranks(peers)) }
}
