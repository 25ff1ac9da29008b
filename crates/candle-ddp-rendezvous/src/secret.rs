//! The secret that the processes of a job share.
use crate::{Error, Result};
use candle_ddp_base::random::random_bytes;
use candle_ddp_base::warnings::warn_aloud;
use candle_ddp_env::PROCESS;
use hmac::digest::{Key, KeyInit};
use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Once};

/// The variable with the secret, and the one with the path of a file that holds it.
pub const VARIABLE: &str = "CANDLE_DDP_SECRET";
pub const FILE_VARIABLE: &str = "CANDLE_DDP_SECRET_FILE";

/// The minimum number of characters: 128 bits as hexadecimal digits.
const LEAST: usize = 32;
/// What to do about an invalid secret.
const HOW: &str = "make one with `openssl rand -hex 32`";

/// The secret of a job, by which its processes prove to each other that they belong to it.
///
/// `ddprun` makes one for each run and gives it to its workers in the environment variable `CANDLE_DDP_SECRET`. Where
/// processes are started in another way, or on several machines, the user gives all of them the same, in that variable or in
/// a file that `CANDLE_DDP_SECRET_FILE` names.
///
/// A secret is never sent. Both ends of a connection show that they know it by HMAC-SHA256 over random numbers that both
/// have chosen. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<str>);

/// The size of a random number that one end of a connection chooses.
pub const NONCE: usize = 32;
/// The size of a proof.
pub const PROOF: usize = 32;

impl Secret {
    /// A random secret of 256 bits.
    ///
    /// # Errors
    /// Returns [`Io`](candle_ddp_base::Error::Io) if the system has no random numbers.
    pub fn random() -> Result<Self> {
        Ok(Self::from_bytes(random_bytes::<32>()?))
    }

    fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes.map(|byte| format!("{byte:02x}")).concat().into())
    }

    /// The secret `text`, without surrounding spaces.
    ///
    /// # Errors
    /// Returns [`InvalidArgument`](candle_ddp_base::Error::InvalidArgument) if it has fewer than 32 characters, or several lines.
    pub fn new(text: &str) -> Result<Self> {
        Self::checked(text).map_err(|reason| Error::invalid("secret", reason))
    }

    /// The secret of the environment variable `CANDLE_DDP_SECRET`, or else of the file that `CANDLE_DDP_SECRET_FILE` names.
    /// An empty variable counts as unset.
    ///
    /// # Errors
    /// Returns [`Error::InvalidEnvironment`], without the value, if it has fewer than 32 characters or several lines, and
    /// [`Io`](candle_ddp_base::Error::Io) if the file cannot be read.
    pub fn from_env() -> Result<Option<Self>> {
        let invalid = |variable: &str, value: String, reason| {
            let variable = variable.to_string();
            Error::InvalidEnvironment { variable, value, reason }
        };
        if let Some(text) = PROCESS.text(VARIABLE) {
            let secret = Self::checked(&text);
            return secret.map(Some).map_err(|reason| invalid(VARIABLE, "(hidden)".to_string(), reason));
        }
        let Some(path) = PROCESS.path(FILE_VARIABLE) else { return Ok(None) };
        let text =
            read(&path).map_err(|error| Error::io(format!("reading {} ({FILE_VARIABLE})", path.display()), error))?;
        let shown = path.display().to_string();
        Self::checked(&text).map(Some).map_err(|reason| invalid(FILE_VARIABLE, shown, reason))
    }

    fn checked(text: &str) -> std::result::Result<Self, String> {
        let text = text.trim();
        match text.chars().count() {
            length if length < LEAST => {
                Err(format!("the secret has {length} characters, but must have at least {LEAST}: {HOW}"))
            }
            // Where lines are read, the others would be left out, and shown as something else.
            _ if text.contains(char::is_control) => {
                Err(format!("the secret must be a single line without control characters: {HOW}"))
            }
            // As it is read from a variable with other bytes.
            _ if text.contains('\u{fffd}') => Err(format!("the secret is not text: {HOW}")),
            _ => Ok(Self(text.into())),
        }
    }
}

#[doc(hidden)]
impl Secret {
    /// The text itself, for the environment of workers only.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    fn mac(&self, role: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
        // HMAC itself would do this with long keys only.
        let mut key = Key::<Hmac<Sha256>>::default();
        key[..32].copy_from_slice(&Sha256::digest(self.0.as_bytes()));
        let mut mac = <Hmac<Sha256> as KeyInit>::new(&key);
        for part in std::iter::once(&role.as_bytes()).chain(parts) {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }

    /// A proof that only an end of a connection that knows the secret can compute. `role` distinguishes the two ends,
    /// and all protocols; `parts` contain the random numbers of both ends.
    pub fn prove(&self, role: &str, parts: &[&[u8]]) -> [u8; PROOF] {
        self.mac(role, parts).finalize().into_bytes().into()
    }

    /// A secret that only those who know this one can derive from `parts`, and from which nobody can tell this one.
    /// `role` distinguishes it from all proofs.
    pub fn derive(&self, role: &str, parts: &[&[u8]]) -> Self {
        Self::from_bytes(self.prove(role, parts))
    }

    /// Whether `proof` is the other end's. Takes the same time for every wrong proof.
    pub fn verify(&self, role: &str, parts: &[&[u8]], proof: &[u8]) -> bool {
        self.mac(role, parts).verify_slice(proof).is_ok()
    }
}

/// Shows that there is a secret, but nothing of its value.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(hidden)")
    }
}

/// Reads the file of a secret. Warns if other users may read it too.
fn read(path: &Path) -> std::io::Result<String> {
    let (metadata, text) = (std::fs::metadata(path)?, std::fs::read_to_string(path)?);
    let mode = metadata.mode();
    if mode & 0o077 != 0 {
        let path = path.display();
        static SAID: Once = Once::new();
        SAID.call_once(|| {
            warn_aloud(format_args!(
                "other users can read the secret in {path} (mode {:o}): `chmod 600 {path}`",
                mode & 0o777
            ));
        });
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_shows_it() {
        let secret = Secret::random().unwrap();
        assert_eq!(format!("{secret:?} {:?}", Some(&secret)), "Secret(hidden) Some(Secret(hidden))");
        assert_eq!(secret.0.len(), 64);
        assert_ne!(secret, Secret::random().unwrap());
        let error = Secret::new("  correct horse battery staple \n").unwrap_err().to_string();
        assert!(error.contains("28 characters") && !error.contains("horse"), "{error}");
        assert_eq!(Secret::new(&format!(" {}\n", secret.0)).unwrap(), secret);
        for separator in ["\n", "\r\n", "\t", "\0", "\u{85}"] {
            let error = Secret::new(&format!("{}{separator}{}", secret.0, secret.0)).unwrap_err().to_string();
            assert!(error.contains("must be a single line") && !error.contains(&*secret.0), "{error}");
        }
    }

    #[test]
    fn a_proof_is_for_one_role_and_one_exchange() {
        let [secret, other] = [(); 2].map(|()| Secret::random().unwrap());
        let proof = secret.prove("client", &[b"ab", b"c"]);
        assert!(secret.verify("client", &[b"ab", b"c"], &proof));
        assert!(!other.verify("client", &[b"ab", b"c"], &proof));
        assert!(!secret.verify("server", &[b"ab", b"c"], &proof));
        assert!(!secret.verify("client", &[b"a", b"bc"], &proof));
        assert!(!secret.verify("client", &[b"ab", b"c"], &proof[..31]));
        assert!(!secret.verify("client", &[b"ab", b"c"], &[]));
    }
}
