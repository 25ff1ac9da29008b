//! How ranks find each other: the environment a launcher sets, init methods, and key-value stores.
mod hash_store;
mod prefix_store;
mod store;

pub use hash_store::HashStore;
pub use prefix_store::PrefixStore;
pub use store::Store;
