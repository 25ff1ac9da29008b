//! What the CPU engine does when something goes wrong: every rank ends, in time, with an error that names the cause. The
//! same tests run over each kind of connection.
mod shared_memory;
mod tcp;
mod two_hosts;
