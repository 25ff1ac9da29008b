//! Open MPI's algorithm for non-blocking all-reduces between two ranks.
use crate::control_variable;
use std::ffi::{CStr, c_int};

/// Names the algorithm of MPI_Iallreduce. While it is `UNSET`, the library chooses.
const ALGORITHM: &CStr = c"coll_libnbc_iallreduce_algorithm";
const UNSET: c_int = 0;
/// Each rank reduces a part, and sends it to the others.
const RABENSEIFNER: c_int = 3;

/// Makes all-reduces between two ranks about as fast as MPI_Allreduce. Left alone, Open MPI's non-blocking function lets one
/// rank reduce all of the data while the other one waits.
///
/// The choice is the process's and must be the same on all ranks, so it is made only where the engine initialises MPI, before
/// any call. A choice of the user stays.
pub(crate) fn choose_algorithm(world_size: c_int, version: &str) {
    if world_size != 2 || !has_right_algorithms(version) {
        return;
    }
    let old = control_variable::update(ALGORITHM, |old| (old == UNSET).then_some(RABENSEIFNER));
    if old.is_none() {
        log::debug!("{version}: {} could not be set: all-reduces may be slower", ALGORITHM.to_string_lossy());
    }
}

/// Whether `version` is an Open MPI from 4.1.2 on. With this choice, earlier ones return wrong sums of very few numbers
/// (<https://github.com/open-mpi/ompi/issues/9385>).
fn has_right_algorithms(version: &str) -> bool {
    let Some(version) = version.strip_prefix("Open MPI v") else { return false };
    let mut numbers = version.split(|character: char| !character.is_ascii_digit()).map(str::parse::<u32>);
    let mut next = || numbers.next().and_then(Result::ok).unwrap_or_default();
    [next(), next(), next()] >= [4, 1, 2]
}

#[cfg(test)]
mod tests {
    use super::has_right_algorithms;

    #[test]
    fn versions_whose_algorithms_are_wrong_are_not_tuned() {
        for (version, expected) in [
            ("Open MPI v4.1.1, package: Open MPI, ident: 4.1.1", false),
            ("Open MPI v4.1.2, package: Open MPI, ident: 4.1.2", true),
            ("Open MPI v4.1.4, package: Debian OpenMPI", true),
            ("Open MPI v4.1.5a1, package: Open MPI", true),
            ("Open MPI v3.9.9", false),
            ("Open MPI v5.0.0", true),
            ("Open MPI v10.0", true),
            ("Open MPI", false),
            ("MPICH Version:\t4.0.2", false),
        ] {
            assert_eq!(has_right_algorithms(version), expected, "{version}");
        }
    }
}
