//! Which algorithm Open MPI takes for all-reduces. Other libraries have no such variable.
use crate::{control_variable, launch};
use candle_ddp::Result;
use candle_ddp::backend::Communicator;
use candle_ddp_mpi::mpi::{self, Threading};
use candle_ddp_mpi::{MpiCommunicator, MpiOptions};
use std::ffi::c_int;

const UNSET: c_int = 0;
const RABENSEIFNER: c_int = 3;
const RECURSIVE_DOUBLING: c_int = 4;

/// Checks the algorithm that an engine is going to have.
fn expect(algorithm: c_int) -> Result<()> {
    let engine = MpiCommunicator::world(MpiOptions::default())?;
    let found = control_variable::update(c"coll_libnbc_iallreduce_algorithm", |_| None);
    let library = mpi::environment::library_version().unwrap();
    assert_eq!(found, library.starts_with("Open MPI").then_some(algorithm), "rank {} of {library}", engine.rank());
    Ok(())
}

#[test]
fn two_ranks_share_the_reduction() {
    launch::ranks("tuning::two_ranks_share_the_reduction", 2, || expect(RABENSEIFNER));
}

#[test]
fn more_ranks_leave_the_choice_to_the_library() {
    launch::ranks("tuning::more_ranks_leave_the_choice_to_the_library", 3, || expect(UNSET));
}

#[test]
fn the_choice_of_the_user_stays() {
    let choice = [("OMPI_MCA_coll_libnbc_iallreduce_algorithm", "4")];
    launch::ranks_in(&choice, "tuning::the_choice_of_the_user_stays", 2, || expect(RECURSIVE_DOUBLING));
}

#[test]
fn a_program_that_initialises_mpi_keeps_the_choice() {
    launch::ranks("tuning::a_program_that_initialises_mpi_keeps_the_choice", 2, || {
        let _universe = mpi::initialize_with_threading(Threading::Multiple);
        expect(UNSET)
    });
}
