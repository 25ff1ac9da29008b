//! The eventcount and the streams of slots of the shared-memory engine, compiled from the engine's own files, on top of
//! loom's threads, atomics and cells instead of the processor's. Loom runs a test once for every order in which its threads
//! may run, and for every value that a load may return by the memory model of C11. It fails when all threads sleep, when two
//! threads access a cell without an order between them, and when an assertion does not hold.
//!
//! Replaced parts of `shm`: the segment (words and cells instead of mapped memory), the slot (a cell, so that
//! reading a slot too early or writing it too soon is noticed), the futex (without its time limit: a lost wake-up is a
//! deadlock), and the spinning before a sleep, which changes no memory.
#![cfg(test)]

mod call {
    /// Headers of one word instead of ten.
    pub(crate) struct Header;

    impl Header {
        pub(crate) const BYTES: usize = 4;

        pub(crate) fn agree(expected: &[u8; 4], received: &[u8; 4]) -> bool {
            expected == received
        }
    }
}

#[path = "../../src/transport_error.rs"]
#[allow(dead_code)]
mod transport_error;

mod shm {
    #[path = "../../../src/shm/eventcount.rs"]
    mod eventcount;
    #[path = "../../../src/shm/layout.rs"]
    #[allow(dead_code)]
    mod layout;
    #[path = "../../../src/shm/stream.rs"]
    #[allow(dead_code)]
    mod stream;

    mod segment;
    mod slot;
    mod spin;
    mod sync;

    mod properties;
}
