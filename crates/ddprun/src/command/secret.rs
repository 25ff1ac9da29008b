//! The secret of a run: the user's, or one that ddprun makes.
use crate::console::message;
use crate::error::Result;
use candle_ddp_rendezvous::Secret;
use candle_ddp_rendezvous::secret::{FILE_VARIABLE, VARIABLE};
use std::process::Command;

/// The secret that the processes of a run prove to each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RunSecret {
    /// None.
    None,
    /// The user has given this secret to all machines. Only clients that know it are served.
    Given(Secret),
    /// A secret made for this run. The workers may be PyTorch's programs, which know no secrets: the store serves those
    /// as well, until a worker proves that it knows it.
    Made(Secret),
}

impl RunSecret {
    /// Takes the secret of this process's environment, or makes one if the run is on this machine alone.
    pub(crate) fn resolve(no_secret: bool, nodes: usize) -> Result<Self> {
        if no_secret {
            return Ok(Self::None);
        }
        match Secret::from_env()? {
            Some(secret) => Ok(Self::Given(secret)),
            None if nodes == 1 => Ok(Self::Made(Secret::random()?)),
            None => Ok(Self::None),
        }
    }

    pub(crate) fn get(&self) -> Option<&Secret> {
        match self {
            Self::None => None,
            Self::Given(secret) | Self::Made(secret) => Some(secret),
        }
    }

    /// Whether the store also serves clients that do not know the secret, with separate keys.
    pub(crate) fn has_guests(&self) -> bool {
        matches!(self, Self::Made(_))
    }

    /// Puts the secret, and no other, into the environment of a worker. Only the worker's user can read that.
    pub(crate) fn give(&self, worker: &mut Command) {
        worker.env_remove(FILE_VARIABLE);
        match self.get() {
            Some(secret) => worker.env(VARIABLE, secret.reveal()),
            None => worker.env_remove(VARIABLE),
        };
    }
}

/// Warns that a run over several machines has no secret, unless the user asked for that.
pub(crate) fn say_none(port: u16) {
    message(format_args!(
        "this run has no secret, so anyone who reaches port {port} can use its store: give all machines the same \
         secret in {VARIABLE}, or in a file named by {FILE_VARIABLE} (openssl rand -hex 32), or pass --no-secret"
    ));
}
