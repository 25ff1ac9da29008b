//! How ranks find each other: the environment a launcher sets, init methods, and key-value stores.
mod environment;
mod hash_store;
mod init_method;
mod prefix_store;
mod slurm;
mod store;
mod tcp_store;

pub use environment::{Environment, Launcher};
pub use hash_store::HashStore;
pub use init_method::{InitMethod, Location};
pub use prefix_store::PrefixStore;
pub use store::Store;
pub use tcp_store::{TcpStore, TcpStoreServer};
