//! The generator of the process.
use super::Generator;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, LazyLock, Mutex};

/// The process's generator, from which dropout layers without their own draw: `torch.default_generator`.
///
/// It begins with a seed from the operating system, so that ranks draw different numbers. A program that wants the same numbers
/// in every run seeds it, by `candle_ddp::seed::seed_everything` or by assigning a [`Generator`]. Ranks that are threads of one process
/// share it, and draw in an order that differs from run to run: give their layers generators instead.
///
/// ```
/// use candle_ddp_tensor::seed::{Generator, default_generator};
///
/// *default_generator().lock().unwrap() = Generator::for_rank(42, 0);
/// ```
pub fn default_generator() -> Arc<Mutex<Generator>> {
    static GENERATOR: LazyLock<Arc<Mutex<Generator>>> =
        LazyLock::new(|| Arc::new(Mutex::new(Generator::new(RandomState::new().hash_one("default generator")))));
    Arc::clone(&GENERATOR)
}
