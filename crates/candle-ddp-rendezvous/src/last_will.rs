use candle_ddp_base::debug_fields;

/// A last will, which a [`Store`](super::Store) carries out when this process ends or this value is dropped; see
/// [`Store::last_will`](super::Store::last_will).
pub struct LastWill {
    withdraw: Box<dyn FnOnce() + Send + Sync>,
}

impl LastWill {
    /// The last will that `withdraw` revokes, and that the store carries out when `withdraw` is dropped without being called.
    pub fn new(withdraw: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self { withdraw: Box::new(withdraw) }
    }

    /// Revokes it.
    pub fn withdraw(self) {
        (self.withdraw)();
    }
}

debug_fields!(LastWill);
