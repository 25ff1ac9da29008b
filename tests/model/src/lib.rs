//! The eventcount and the streams of slots of the shared-memory engine, compiled from the engine's own files, on top of
//! loom's threads, atomics and cells instead of the processor's. Loom runs a test once for every order in which its threads
//! may run, and for every value that a load may return by the memory model of C11. It fails when all threads sleep, when two
//! threads access a cell without an order between them, and when an assertion does not hold.
//!
//! Replaced parts of `backend/cpu/shm`: the segment (words and cells instead of mapped memory), the slot (a cell, so that
//! reading a slot too early or writing it too soon is noticed), the futex (without its time limit: a lost wake-up is a
//! deadlock), and the spinning before a sleep, which changes no memory.
#![cfg(test)]

mod backend {
    pub(crate) mod call {
        /// Headers of one word instead of ten.
        pub(crate) struct Header;

        impl Header {
            pub(crate) const BYTES: usize = 4;

            pub(crate) fn agree(expected: &[u8; 4], received: &[u8; 4]) -> bool {
                expected == received
            }
        }
    }

    pub(crate) mod cpu {
        #[path = "../../../../../src/backend/cpu/transport_error.rs"]
        #[allow(dead_code)]
        pub(crate) mod transport_error;

        pub(crate) mod shm {
            #[path = "../../../../../../src/backend/cpu/shm/eventcount.rs"]
            mod eventcount;
            #[path = "../../../../../../src/backend/cpu/shm/layout.rs"]
            #[allow(dead_code)]
            mod layout;
            #[path = "../../../../../../src/backend/cpu/shm/stream.rs"]
            #[allow(dead_code)]
            mod stream;

            mod segment;
            mod slot;
            mod spin;
            mod sync;

            mod properties;
        }
    }
}
