//! Writes the files on SIGUSR1.
use crate::panic::lock;
use crate::{Error, Result};
use signal_hook::consts::SIGUSR1;
use signal_hook::iterator::Signals;
use std::sync::Mutex;

/// What is done on the signal. It returns false when there is nothing left to do.
type Action = Box<dyn Fn() -> bool + Send>;

/// The actions of all recorders of this process.
static ACTIONS: Mutex<Vec<Action>> = Mutex::new(Vec::new());

/// Calls `action` on every SIGUSR1, until it returns false. The handler, one for the process, only wakes a thread.
pub(super) fn on_sigusr1(action: Action) -> Result<()> {
    static IS_LISTENING: Mutex<bool> = Mutex::new(false);
    let mut is_listening = lock(&IS_LISTENING);
    if !*is_listening {
        let failed = |error| Error::io("installing a handler for SIGUSR1 (FlightRecorderOptions.on_sigusr1)", error);
        let mut signals = Signals::new([SIGUSR1]).map_err(failed)?;
        let body = move || {
            for _ in signals.forever() {
                lock(&ACTIONS).retain(|action| action());
            }
        };
        std::thread::Builder::new().name("ddp-sigusr1".to_string()).spawn(body).map_err(failed)?;
        *is_listening = true;
    }
    lock(&ACTIONS).push(action);
    Ok(())
}
