//! What every engine must do, as one body of tests that is run for each engine.
#![allow(clippy::unwrap_used)] // a failed test may panic
#![allow(clippy::duplicate_mod)] // `failures` are the same tests over each kind of connection
#[path = "../common/mod.rs"]
mod common;
mod custom;
mod engine;
mod failures;
mod matrix;
mod nccl;
mod order;
mod process_group;
mod processes;
mod reproducible;
#[path = "../common/single.rs"]
mod single;
mod slices;

use engine::Engine;

/// One `#[test]` for each case and engine.
macro_rules! suite {
    ($($engine:ident),*: $cases:tt) => {
        $(suite!(@ $engine $cases);)*
    };
    (@ $engine:ident [$($module:ident :: $case:ident),* $(,)?]) => {
        mod $engine {
            $(
                #[test]
                fn $case() {
                    for engine in super::engine::$engine() {
                        super::$module::$case(&engine);
                    }
                }
            )*
        }
    };
}

suite!(shared_memory, tcp, pairs, two_hosts, uneven_hosts: [
    matrix::all_reduce,
    matrix::broadcast,
    matrix::reduce,
    matrix::all_gather,
    matrix::reduce_scatter,
    matrix::all_to_all,
    matrix::gather_and_scatter,
    matrix::send_and_recv,
    matrix::barrier,
    matrix::views_keep_their_surroundings,
    reproducible::bits_are_equal_on_all_ranks_and_from_run_to_run,
    reproducible::bits_do_not_depend_on_where_an_element_stands,
    order::works_are_carried_out_in_order_and_waited_for_out_of_order,
    order::dropped_works_are_carried_out,
    order::run_comes_after_what_was_started,
    order::messages_do_not_wait_for_collectives,
    order::large_messages_cross,
    order::a_barrier_holds_everybody_back,
    slices::halos_are_exchanged,
    slices::halves_are_reduced_in_two_groups_in_any_order,
    slices::overlapping_slices_are_refused_while_one_is_in_flight,
    slices::gathers_in_place,
]);

/// The worlds of the matrix.
const WORLDS: [usize; 5] = [1, 2, 3, 4, 7];

/// Runs `body` on every rank of worlds of all sizes.
fn in_all_worlds(engine: &Engine, body: impl Fn(&dyn candle_ddp::backend::Communicator) + Sync) {
    for world_size in WORLDS {
        engine.on_ranks(world_size, |communicator| body(communicator));
    }
}
