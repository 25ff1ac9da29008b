//! Who may use a server: how a client becomes a member of the job.
use super::output::Output;
use super::protocol::{CHALLENGE, CLIENT, MAGIC, Malformed, OFFER, PROVEN, REFUSED, Request, SECRET_NEEDED, SERVER};
use crate::Secret;
use crate::secret::NONCE;
use candle_ddp_base::random::random_bytes;

/// How far a client has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// It has sent nothing.
    Silent,
    /// It has sent VALIDATE, and there is a secret.
    Greeted,
    /// It was sent this random number, and must prove that it knows the secret.
    Challenged([u8; NONCE]),
    /// It does not know the secret. All such clients share a separate set of keys.
    Guest,
    /// It may use the job's keys.
    Member,
}

impl Standing {
    /// Whether it may make requests.
    pub(super) fn is_admitted(&self) -> bool {
        matches!(self, Self::Guest | Self::Member)
    }
}

/// Decides on clients.
pub(super) struct Gate {
    pub(super) secret: Option<Secret>,
    /// Whether clients without the secret are served too.
    pub(super) guests: bool,
}

impl Gate {
    /// Handles a request of the handshake. Returns any other request, if the client may make it. On an error, the
    /// client gets the content of `reply` and is closed.
    pub(super) fn pass(
        &self,
        standing: &mut Standing,
        request: Request,
        reply: &mut Output,
    ) -> Result<Option<Request>, Malformed> {
        match (*standing, request) {
            (_, Request::Ping(OFFER)) if self.secret.is_none() => {
                // The client's own error says the same.
                reply.put(&OFFER.to_le_bytes());
                let text =
                    "it has a secret, but this job has none: give all processes the same one (CANDLE_DDP_SECRET)";
                return Err(Malformed(text.to_string()));
            }
            (Standing::Guest | Standing::Member, request) => return Ok(Some(request)),
            (Standing::Silent, Request::Validate(MAGIC)) => {
                *standing = if self.secret.is_some() { Standing::Greeted } else { Standing::Member };
            }
            (Standing::Silent, request) => {
                return Err(Malformed(format!("it began with {} instead of VALIDATE", brief(&request))));
            }
            (Standing::Greeted, Request::Ping(OFFER)) => {
                let nonce = random_bytes().map_err(|error| Malformed(error.to_string()))?;
                reply.put(&CHALLENGE.to_le_bytes());
                reply.put(&nonce);
                *standing = Standing::Challenged(nonce);
            }
            (Standing::Greeted, request) if self.guests => {
                *standing = Standing::Guest;
                return Ok(Some(request));
            }
            (Standing::Greeted, request) => {
                if let Request::Ping(_) = request {
                    reply.put(&SECRET_NEEDED.to_le_bytes());
                }
                return Err(stranger());
            }
            (Standing::Challenged(own), Request::Prove { nonce, proof }) => match &self.secret {
                Some(secret) if secret.verify(CLIENT, &[&nonce, &own], &proof) => {
                    reply.put(&[PROVEN]);
                    reply.put(&secret.prove(SERVER, &[&nonce, &own]));
                    *standing = Standing::Member;
                }
                _ => {
                    reply.put(&[REFUSED]);
                    return Err(Malformed("it has another secret than this job".to_string()));
                }
            },
            (Standing::Challenged(_), request) => {
                return Err(Malformed(format!("it sent {} instead of its proof", brief(&request))));
            }
        }
        Ok(None)
    }
}

/// The error of a client that does not know the secret.
pub(super) fn stranger() -> Malformed {
    let text = "it does not have the job's secret. (PyTorch's programs never have: their ddprun needs --no-secret if other \
                programs of the job have a secret)";
    Malformed(text.to_string())
}

fn brief(request: &Request) -> String {
    format!("{request:?}").chars().take(60).collect()
}
