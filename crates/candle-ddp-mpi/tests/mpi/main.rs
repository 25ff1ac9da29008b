//! Each test starts itself again under mpirun, which is the one that the variable MPIRUN names.
#![allow(clippy::unwrap_used)]

mod conformance;
mod failures;
mod groups;
mod launch;
mod training;
mod tuning;

#[path = "../../src/control_variable.rs"]
mod control_variable;

#[path = "../../../../examples/digits/main.rs"]
#[allow(dead_code)]
mod digits;
