//! A logger that records the warnings of a test's process.
#![allow(clippy::unwrap_used)] // a failed test may panic
use crate::common::ranks;
use candle_ddp::{ProcessGroup, Result};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

pub(crate) struct Log(pub(crate) Mutex<Vec<String>>);

impl log::Log for Log {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }
    fn log(&self, record: &log::Record) {
        if record.level() <= log::Level::Warn {
            self.0.lock().unwrap().push(record.args().to_string());
        }
    }
    fn flush(&self) {}
}

pub(crate) static LOG: Log = Log(Mutex::new(Vec::new()));

/// Collects the warnings of this process, for one test at a time.
pub(crate) fn collect() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    static SET: Once = Once::new();
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    SET.call_once(|| {
        log::set_logger(&LOG).unwrap();
        log::set_max_level(log::LevelFilter::Warn);
    });
    turn
}

/// Returns the result of `body`, and the warnings of this process meanwhile.
pub(crate) fn during<T>(body: impl FnOnce() -> T) -> (T, Vec<String>) {
    let _turn = collect();
    LOG.0.lock().unwrap().clear();
    let result = body();
    (result, std::mem::take(&mut *LOG.0.lock().unwrap()))
}

/// The warnings while two ranks run `program`.
pub(crate) fn of_two_ranks(program: impl Fn(ProcessGroup) -> Result<()> + Send + Sync) -> Vec<String> {
    during(|| ranks(2, program)).1
}
