//! The CPU engine in all its arrangements: the conformance suite, and the guarantees of this engine alone.
#![allow(clippy::unwrap_used)] // a failed test may panic
mod across_groups;
mod batch;
#[path = "../common/mod.rs"]
mod common;
mod custom;
mod engine;
mod flight_recorder;
mod graphs;
mod locked;
mod monitored_barrier;
mod nccl;
mod objects;
mod process_group;
mod processes;
mod reproducible;
mod slices;
mod varied;

/// Defines one `#[test]` for each arrangement and case.
macro_rules! suite {
    ($($arrangement:ident),*: $cases:tt) => {
        $(suite!(@ $arrangement $cases);)*
    };
    (@ $arrangement:ident [$($case:path = $name:ident),* $(,)?]) => {
        mod $arrangement {
            $(
                #[test]
                fn $name() {
                    for engine in super::engine::$arrangement() {
                        $case(&engine);
                    }
                }
            )*
        }
    };
}

suite!(shared_memory, tcp, pairs, two_hosts, uneven_hosts: [
    crate::engine::Engine::conforms = conforms,
    crate::reproducible::bits_do_not_depend_on_an_elements_position = bits_do_not_depend_on_an_elements_position,
    crate::slices::overlapping_slices_are_refused_while_one_is_in_flight =
        overlapping_slices_are_refused_while_one_is_in_flight,
    crate::engine::dropping_the_communicator_waits_for_dropped_works =
        dropping_the_communicator_waits_for_dropped_works,
]);
