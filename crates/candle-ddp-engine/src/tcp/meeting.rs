//! How the ranks of a group meet in the store: each publishes a card.
//!
//! A card has the rank's address, what must be the same on all ranks, what other ranks need to know to share its memory, and,
//! with a secret, a proof that its author knows it. The rank that comes last reads all cards, and publishes a table of who may
//! share memory with whom, in a few bytes for each rank, and one of addresses. The others read the first table and rank 0's card,
//! and the addresses if there are other hosts.
use crate::construction::Construction;
use crate::random::random_bytes;
use crate::rendezvous::secret::PROOF;
use crate::rendezvous::{absent_ranks, discard};
use crate::shm::{PeerInfo, Topic};
use crate::tcp::connector::Connector;
use crate::tcp::handshake::{By, Handshake, Kind, SAME_SECRET};
use crate::{Error, Result};
use candle_ddp_base::descriptors::{SHORTAGE_HINT, is_shortage};
use std::net::{SocketAddr, TcpListener};

/// The result of a rank's meeting with the others.
pub(crate) struct Met {
    /// The listener for ranks of other hosts.
    pub(crate) listener: TcpListener,
    /// The number that identifies the group: rank 0's.
    pub(crate) nonce: u64,
    /// By rank.
    pub(crate) infos: Vec<PeerInfo>,
}

/// A rank's description of itself for all others.
struct Card {
    address: SocketAddr,
    handshake: Handshake,
    info: PeerInfo,
}

/// The reason why a meeting fails although all ranks have come to it.
const ALL_THERE: &str = "all ranks have come, but one of them has not told the others in time how to reach each other: it has \
                         stopped, or lost its connection to the store. Look for the first error in the output of all ranks";
/// The number of ranks that have published their cards.
const COUNT: &str = "count";
/// The table of all ranks, once all have, or else [`FAILED`] and a rank that cannot be met, perhaps with the reason.
const COMPLETE: &str = "complete";
/// The addresses of all ranks, one in each line.
const ADDRESSES: &str = "addresses";
const FAILED: &str = "!";
const TWICE: &str = "two processes say that they are this rank: give each its own rank";

impl Connector<'_> {
    /// Meets the other ranks. `info` is this rank's.
    pub(crate) fn meet(&self, info: PeerInfo) -> Result<Met> {
        self.meet_in_store(info).map_err(|error| match error {
            Error::StoreTimeout { operation, store, timeout, reason } => {
                let operation = format!("rank {} meets the others of its group: {operation}", self.own.rank);
                Error::StoreTimeout { operation, store, timeout, reason }
            }
            error => error,
        })
    }

    fn meet_in_store(&self, info: PeerInfo) -> Result<Met> {
        let refused = |error: std::io::Error| {
            let hint = if is_shortage(&error) { format!(" ({SHORTAGE_HINT})") } else { String::new() };
            Error::io(format!("rank {}: listening on {}{hint}", self.own.rank, self.address), error)
        };
        let listener = TcpListener::bind((self.address, 0)).map_err(refused)?;
        listener.set_nonblocking(true).map_err(refused)?;
        // All ranks of a large job call at the same moment; the standard library's queue holds 128.
        rustix::net::listen(&listener, 4096).map_err(|errno| refused(errno.into()))?;
        let address = listener.local_addr().map_err(refused)?;
        let nonce = u64::from_le_bytes(random_bytes()?);
        let own =
            self.publish(&Card { address, handshake: self.own.handshake(nonce, Kind::Control, By::Higher), info });
        let kept = self.store.compare_set(&key(self.own.rank), &[], &own)?;
        if kept != own {
            return Err(self.give_up(&format!("{} {TWICE}", self.own.rank), self.own.missing(&[self.own.rank], TWICE)));
        }
        // A rank of a world of another size would wait for ranks that never come.
        let seen = |error| self.give_up(&self.own.rank.to_string(), error);
        let first = self.cards(&[0])?.remove(0).map_err(seen)?;
        let world_size = self.own.config.world_size;
        if self.store.add(COUNT, 1)? == world_size as i64 {
            let cards = self.cards(&(0..world_size).collect::<Vec<_>>())?.into_iter().enumerate();
            let cards = cards.map(|(peer, card)| card.map_err(|error| self.give_up(&peer.to_string(), error)));
            let cards = cards.collect::<Result<Vec<_>>>()?;
            let addresses: String = cards.iter().map(|card| format!("{}\n", card.address)).collect();
            self.store.set(ADDRESSES, addresses.as_bytes())?;
            let infos: Vec<PeerInfo> = cards.into_iter().map(|card| card.info).collect();
            self.store.set(COMPLETE, &PeerInfo::encode_all(&infos))?;
        }
        self.await_all(&key, &(0..world_size).collect::<Vec<_>>(), &[COMPLETE.to_string()])?;
        let complete = self.store.get(COMPLETE)?;
        self.check(&complete)?;
        let infos = PeerInfo::decode_all(&complete, world_size);
        Ok(Met { listener, nonce: first.handshake.nonce, infos })
    }

    /// The addresses of all ranks.
    pub(crate) fn addresses(&self) -> Result<Vec<SocketAddr>> {
        let text = String::from_utf8_lossy(&self.store.get(ADDRESSES)?).into_owned();
        let addresses: Option<Vec<SocketAddr>> = text.lines().map(|line| line.parse().ok()).collect();
        let all = addresses.filter(|addresses| addresses.len() == self.own.config.world_size);
        all.ok_or_else(|| self.own.missing(&[], format!("the store holds {text:?} as the addresses of all ranks")))
    }

    /// The cards of the given ranks, or what is wrong with them.
    fn cards(&self, ranks: &[usize]) -> Result<Vec<Result<Card>>> {
        let texts = self.collect(&key, ranks)?;
        Ok(ranks.iter().zip(texts).map(|(rank, text)| self.read(*rank, &text)).collect())
    }

    /// Tells the others which rank cannot be met, and returns this rank's error.
    fn give_up(&self, what: &str, error: Error) -> Error {
        match self.store.set(COMPLETE, format!("{FAILED}{what}").as_bytes()) {
            Ok(()) => error,
            Err(unanswered) => unanswered,
        }
    }

    /// The error if a rank cannot be met.
    fn check(&self, complete: &[u8]) -> Result<()> {
        let Some(what) = complete.strip_prefix(FAILED.as_bytes()) else { return Ok(()) };
        let text = String::from_utf8_lossy(what);
        let (rank, reason) = text.split_once(' ').unwrap_or((&text, ""));
        let Ok(rank) = rank.parse() else { return Err(self.own.missing(&[], format!("the store says {text:?}"))) };
        if !reason.is_empty() {
            return Err(self.own.missing(&[rank], reason));
        }
        // This rank sees for itself.
        self.cards(&[rank])?.remove(0)?;
        Err(self
            .own
            .missing(&[rank], "another rank cannot connect to it: look for the error in the output of all ranks"))
    }

    /// Removes what this rank has published, once all ranks have read it.
    pub(crate) fn forget(&self) {
        discard(self.store, &key(self.own.rank));
        Topic::ALL.iter().for_each(|topic| discard(self.store, &topic.key(self.own.rank)));
        if self.own.rank == 0 {
            [COUNT, COMPLETE, ADDRESSES].iter().for_each(|key| discard(self.store, key));
        }
    }

    /// The values that the given ranks have published under `key`, once all are there.
    pub(crate) fn collect(&self, key: &dyn Fn(usize) -> String, ranks: &[usize]) -> Result<Vec<Vec<u8>>> {
        if ranks.is_empty() {
            return Ok(Vec::new());
        }
        let keys: Vec<String> = ranks.iter().map(|rank| key(*rank)).collect();
        self.await_all(key, ranks, &keys)?;
        self.store.multi_get(&keys.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Waits for `keys`, which are set when the given ranks have set their own keys.
    fn await_all(&self, key: &dyn Fn(usize) -> String, ranks: &[usize], keys: &[String]) -> Result<()> {
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        match self.store.wait_cancellable(&keys, Some(self.left()), &|| self.construction.check()) {
            Err(Error::StoreTimeout { operation, store, reason, .. }) => {
                let nth = |index: usize| key(ranks[index]);
                Err(match absent_ranks(self.store, 0..ranks.len(), &nth) {
                    Ok(absent) if absent.is_empty() => self.own.missing(&[], ALL_THERE),
                    Ok(absent) => {
                        let absent = absent.into_iter().map(|index| ranks[index]).collect();
                        Construction::missing(self.own.rank, absent, self.own.timeout)
                    }
                    // The store does not answer.
                    Err(_) => Error::StoreTimeout { operation, store, timeout: self.own.timeout, reason },
                })
            }
            result => Ok(result?),
        }
    }

    /// The text of a card: the address, and the rest in hexadecimal digits.
    fn publish(&self, card: &Card) -> Vec<u8> {
        let (handshake, info) = (card.handshake.encode(), card.info.encode());
        let proof = self.secret.as_ref().map_or([0; PROOF], |secret| secret.prove(ROLE, &[&handshake, &info]));
        let bytes = [&handshake[..], &info, &proof].concat();
        let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{} {digits}", card.address).into_bytes()
    }

    /// Reads the card of `peer`, whose options must be this rank's.
    fn read(&self, peer: usize, text: &[u8]) -> Result<Card> {
        let text = String::from_utf8_lossy(text);
        let (address, bytes) = parse(&text)
            .ok_or_else(|| self.own.missing(&[peer], format!("the store holds {text:?} as its address")))?;
        let handshake = Handshake::decode(&bytes).map_err(|error| self.own.missing(&[peer], error.describe()))?;
        let proved = bytes.split_at_checked(Handshake::BYTES).and_then(|(handshake, rest)| {
            let (info, proof) = rest.split_at_checked(PeerInfo::BYTES)?;
            let is_proved = self.secret.as_ref().is_none_or(|secret| secret.verify(ROLE, &[handshake, info], proof));
            Some((PeerInfo::decode(info)?, is_proved))
        });
        let (info, is_proved) = proved.ok_or_else(|| self.own.missing(&[peer], "its card is too short"))?;
        // Whether it has a secret at all is one of the options.
        if let Some(difference) = handshake.config.difference(&self.own.config) {
            return Err(self.own.missing(&[peer], difference));
        }
        if !is_proved {
            return Err(Error::Secret {
                operation: format!("connecting rank {}", self.own.rank),
                peer: format!("rank {peer} at {address}"),
                reason: format!("it has another secret than this rank: {SAME_SECRET}"),
            });
        }
        if handshake.rank != peer {
            return Err(self.own.missing(&[peer], format!("its card belongs to rank {}", handshake.rank)));
        }
        Ok(Card { address, handshake, info })
    }
}

/// The purpose of a card's proof.
const ROLE: &str = "candle-ddp engine card";

fn key(rank: usize) -> String {
    format!("addr/{rank}")
}

fn parse(text: &str) -> Option<(SocketAddr, Vec<u8>)> {
    let (address, digits) = text.split_once(' ')?;
    let digits = digits.as_bytes().chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok());
    Some((address.parse().ok()?, digits.collect::<Option<_>>()?))
}
