use std::time::Duration;

/// How a thread waits: it spins, then lets other threads run, and at last sleeps.
#[derive(Default)]
pub(crate) struct Patience(u32);

impl Patience {
    pub(crate) fn pause(&mut self) {
        const SPINS: u32 = 500;
        const YIELDS: u32 = 20_000;
        self.0 = self.0.saturating_add(1);
        match self.0 {
            ..SPINS => std::hint::spin_loop(),
            SPINS..YIELDS => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(50)),
        }
    }
}
