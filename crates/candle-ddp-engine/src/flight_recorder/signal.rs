//! Writes the files on SIGUSR1.
use crate::panic::lock;
use crate::{Error, Result, thread};
use signal_hook::consts::SIGUSR1;
use signal_hook::iterator::Signals;
use std::sync::{Mutex, Weak};

/// A recorder that writes its file on the signal.
pub(super) trait Listener: Send + Sync {
    fn on_signal(&self);
}

/// The recorders of this process that write on the signal.
static RECORDERS: Mutex<Vec<Weak<dyn Listener>>> = Mutex::new(Vec::new());

/// Makes `recorder` write on every SIGUSR1 for as long as it lives. The process has one handler, which only wakes a
/// thread.
pub(super) fn on_sigusr1(recorder: Weak<dyn Listener>) -> Result<()> {
    static IS_LISTENING: Mutex<bool> = Mutex::new(false);
    let mut is_listening = lock(&IS_LISTENING);
    if !*is_listening {
        let failed = |error| Error::io("installing a handler for SIGUSR1 (FlightRecorderOptions.on_sigusr1)", error);
        let mut signals = Signals::new([SIGUSR1]).map_err(failed)?;
        let body = move || {
            for _ in signals.forever() {
                let recorders: Vec<_> = lock(&RECORDERS).iter().filter_map(Weak::upgrade).collect();
                recorders.iter().for_each(|recorder| recorder.on_signal());
            }
        };
        thread::spawn("ddp-sigusr1", body)?;
        *is_listening = true;
    }
    let mut recorders = lock(&RECORDERS);
    // Each generation of an elastic run has its own recorder.
    recorders.retain(|recorder| recorder.strong_count() > 0);
    recorders.push(recorder);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn recorders_that_are_gone_take_no_memory() {
        struct Recorder;
        impl Listener for Recorder {
            fn on_signal(&self) {}
        }
        let listen = || {
            let recorder: Arc<dyn Listener> = Arc::new(Recorder);
            on_sigusr1(Arc::downgrade(&recorder)).unwrap();
            recorder
        };
        (0..100).for_each(|_| drop(listen()));
        let _last = listen();
        // Tests that run at the same time may have some as well.
        let recorders = lock(&RECORDERS).len();
        assert!(recorders < 50, "{recorders}");
    }
}
