//! The wire format of PyTorch's c10d TCPStore, independent of sockets: little-endian, without framing; a text or value
//! is its length as u64 and its bytes. A request is a command byte and its fields.
use crate::secret::{NONCE, PROOF};
use std::fmt;

/// PyTorch prefixes users' keys with this, so that they do not collide with its own raw keys.
pub(super) const USER_KEYS: char = '/';
/// The value that VALIDATE must carry.
pub(super) const MAGIC: u32 = 0x3C85_F7CE;
/// The positive reply to CHECK, WAIT and BARRIER.
pub(super) const READY: u8 = 0;
/// The negative reply to CHECK.
pub(super) const NOT_READY: u8 = 1;
/// The reply to CANCEL_WAIT.
pub(super) const WAIT_CANCELED: u8 = 1;

/// The nonce of the PING by which a client asks the server to prove itself. A server without a secret sends it back, like
/// any other nonce. Clients otherwise use the ids of processes, which are smaller.
pub(super) const OFFER: u32 = 0xCDD9_0001;
/// The reply to [`OFFER`] of a server with a secret; its random number follows.
pub(super) const CHALLENGE: u32 = 0xCDD9_0002;
/// The reply to the first PING of a client that offers no proof, if the server requires one.
pub(super) const SECRET_NEEDED: u32 = 0xCDD9_0003;
/// The replies to PROVE: the server's own proof follows, or nothing.
pub(super) const PROVEN: u8 = 1;
pub(super) const REFUSED: u8 = 0;
/// The roles of the two ends in their proofs.
pub(super) const CLIENT: &str = "candle-ddp store client";
pub(super) const SERVER: &str = "candle-ddp store server";

/// The maximum length of a key in bytes (PyTorch's limit).
pub(super) const MAX_KEY: usize = 8192;
/// The maximum length of a value in bytes (PyTorch's limit).
pub(super) const MAX_VALUE: usize = 8 << 20;
/// The maximum number of keys in a request (PyTorch's limit).
pub(super) const MAX_COUNT: usize = 131_072;
/// The maximum total size of a request's or reply's fields in bytes.
pub(super) const MAX_MESSAGE: usize = 256 << 20;

/// The command bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Command {
    Validate,
    Set,
    CompareSet,
    Get,
    Add,
    Check,
    Wait,
    NumKeys,
    Delete,
    Append,
    MultiGet,
    MultiSet,
    CancelWait,
    Ping,
    QueuePush,
    QueuePop,
    QueueLen,
    ListKeys,
    Barrier,
    /// Not one of PyTorch's, like the next one.
    Prove = 0xDD,
    LastWill = 0xDE,
}

/// PyTorch's commands in the order of their bytes, from 0.
const COMMANDS: [Command; 19] = {
    use Command::*;
    [
        Validate, Set, CompareSet, Get, Add, Check, Wait, NumKeys, Delete, Append, MultiGet, MultiSet, CancelWait,
        Ping, QueuePush, QueuePop, QueueLen, ListKeys, Barrier,
    ]
};

/// The commands that PyTorch's server does not have.
const OWN_COMMANDS: [Command; 2] = [Command::Prove, Command::LastWill];

/// The fields that follow a command byte.
#[derive(Clone, Copy)]
enum Kind {
    Key,
    Value,
    U32,
    I64,
    /// 32 bytes without a length.
    Block,
}

enum Layout {
    Fixed(&'static [Kind]),
    /// A count n as u64, then n repetitions of these fields.
    Repeated(&'static [Kind]),
}

impl Command {
    fn layout(self) -> Layout {
        use Kind::{Block, I64, Key, U32, Value};
        match self {
            Self::Validate | Self::Ping => Layout::Fixed(&[U32]),
            Self::Set | Self::Append | Self::QueuePush => Layout::Fixed(&[Key, Value]),
            Self::LastWill => Layout::Fixed(&[Value]),
            Self::CompareSet => Layout::Fixed(&[Key, Value, Value]),
            Self::Get | Self::Delete | Self::QueuePop | Self::QueueLen => Layout::Fixed(&[Key]),
            Self::Add | Self::Barrier => Layout::Fixed(&[Key, I64]),
            Self::NumKeys | Self::CancelWait | Self::ListKeys => Layout::Fixed(&[]),
            Self::Prove => Layout::Fixed(&[Block, Block]),
            Self::Check | Self::Wait | Self::MultiGet => Layout::Repeated(&[Key]),
            Self::MultiSet => Layout::Repeated(&[Key, Value]),
        }
    }
}

/// A client's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Validate(u32),
    Set {
        key: Vec<u8>,
        value: Vec<u8>,
    },
    CompareSet {
        key: Vec<u8>,
        expected: Vec<u8>,
        desired: Vec<u8>,
    },
    Get(Vec<u8>),
    Add {
        key: Vec<u8>,
        amount: i64,
    },
    Check(Vec<Vec<u8>>),
    Wait(Vec<Vec<u8>>),
    NumKeys,
    Delete(Vec<u8>),
    Append {
        key: Vec<u8>,
        value: Vec<u8>,
    },
    MultiGet(Vec<Vec<u8>>),
    MultiSet(Vec<(Vec<u8>, Vec<u8>)>),
    CancelWait,
    Ping(u32),
    QueuePush {
        key: Vec<u8>,
        value: Vec<u8>,
    },
    QueuePop(Vec<u8>),
    QueueLen(Vec<u8>),
    ListKeys,
    Barrier {
        key: Vec<u8>,
        world_size: i64,
    },
    /// The client's random number, and its proof for the server's.
    Prove {
        nonce: [u8; NONCE],
        proof: [u8; PROOF],
    },
    /// The request to execute when this client's connection closes: the bytes of a COMPARE_SET or QUEUE_PUSH; no bytes
    /// revoke it.
    LastWill(Vec<u8>),
}

/// Appends the length of `bytes` and then `bytes`.
pub(super) fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    out.extend_from_slice(bytes);
}

/// Appends an integer of 8 bytes.
pub(super) fn put_i64(out: &mut Vec<u8>, number: i64) {
    out.extend_from_slice(&number.to_le_bytes());
}

impl Request {
    /// The last will that consists of these bytes.
    pub(super) fn of_will(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut decoder = Decoder::default();
        decoder.feed(bytes);
        match (decoder.next()?, decoder.rest()) {
            (Some(request @ (Self::CompareSet { .. } | Self::QueuePush { .. })), []) => Ok(request),
            _ => Err(Malformed("a last will that is neither COMPARE_SET nor QUEUE_PUSH".to_string())),
        }
    }

    /// Appends the request's bytes to `out`.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let keys = |out: &mut Vec<u8>, command: Command, keys: &[Vec<u8>]| {
            out.push(command as u8);
            put_i64(out, keys.len() as i64);
            keys.iter().for_each(|key| put_bytes(out, key));
        };
        let fields = |out: &mut Vec<u8>, command: Command, fields: &[&[u8]]| {
            out.push(command as u8);
            fields.iter().for_each(|field| put_bytes(out, field));
        };
        match self {
            Self::Validate(magic) => {
                out.push(Command::Validate as u8);
                out.extend_from_slice(&magic.to_le_bytes());
            }
            Self::Set { key, value } => fields(out, Command::Set, &[key, value]),
            Self::CompareSet { key, expected, desired } => fields(out, Command::CompareSet, &[key, expected, desired]),
            Self::Get(key) => fields(out, Command::Get, &[key]),
            Self::Add { key, amount } => {
                fields(out, Command::Add, &[key]);
                put_i64(out, *amount);
            }
            Self::Check(list) => keys(out, Command::Check, list),
            Self::Wait(list) => keys(out, Command::Wait, list),
            Self::NumKeys => out.push(Command::NumKeys as u8),
            Self::Delete(key) => fields(out, Command::Delete, &[key]),
            Self::Append { key, value } => fields(out, Command::Append, &[key, value]),
            Self::MultiGet(list) => keys(out, Command::MultiGet, list),
            Self::MultiSet(pairs) => {
                out.push(Command::MultiSet as u8);
                put_i64(out, pairs.len() as i64);
                for (key, value) in pairs {
                    put_bytes(out, key);
                    put_bytes(out, value);
                }
            }
            Self::CancelWait => out.push(Command::CancelWait as u8),
            Self::Ping(nonce) => {
                out.push(Command::Ping as u8);
                out.extend_from_slice(&nonce.to_le_bytes());
            }
            Self::QueuePush { key, value } => fields(out, Command::QueuePush, &[key, value]),
            Self::QueuePop(key) => fields(out, Command::QueuePop, &[key]),
            Self::QueueLen(key) => fields(out, Command::QueueLen, &[key]),
            Self::ListKeys => out.push(Command::ListKeys as u8),
            Self::Barrier { key, world_size } => {
                fields(out, Command::Barrier, &[key]);
                put_i64(out, *world_size);
            }
            Self::Prove { nonce, proof } => {
                out.push(Command::Prove as u8);
                out.extend_from_slice(nonce);
                out.extend_from_slice(proof);
            }
            Self::LastWill(request) => fields(out, Command::LastWill, &[request]),
        }
    }
}

/// The reason why bytes are not a valid request, or exceed a limit.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Malformed(pub(super) String);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

enum Field {
    Bytes(Vec<u8>),
    Number(u64),
}

/// A request of which only some fields have arrived.
struct Partial {
    command: Command,
    /// The number of repetitions of a repeated layout.
    count: Option<usize>,
    fields: Vec<Field>,
    /// The number of bytes in `fields`.
    size: usize,
}

/// Splits a stream of bytes into requests, however the bytes were split in transit.
///
/// Looks at each byte once. Memory grows only with received bytes: a length alone allocates nothing.
#[derive(Default)]
pub(super) struct Decoder {
    buffer: Vec<u8>,
    /// The number of consumed bytes in `buffer`.
    read: usize,
    partial: Option<Partial>,
}

impl Decoder {
    /// Adds bytes from the stream.
    pub(super) fn feed(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Drops consumed bytes.
    fn compact(&mut self) {
        self.buffer.drain(..self.read);
        self.read = 0;
        if self.buffer.capacity() > 1 << 16 && self.buffer.len() < self.buffer.capacity() / 4 {
            // A single large value must not occupy memory for the rest of the connection.
            self.buffer.shrink_to_fit();
        }
    }

    /// Returns the next complete request, or `None` if more bytes are needed. After an error the stream is unusable.
    pub(super) fn next(&mut self) -> Result<Option<Request>, Malformed> {
        let mut partial = match self.partial.take() {
            Some(partial) => partial,
            None => {
                let Some([byte]) = self.take::<1>() else {
                    self.compact();
                    return Ok(None);
                };
                let own = OWN_COMMANDS.into_iter().find(|command| *command as u8 == byte);
                let command = COMMANDS.get(usize::from(byte)).copied().or(own);
                let command = command.ok_or_else(|| Malformed(format!("unknown command {byte:#04x}")))?;
                Partial { command, count: None, fields: Vec::new(), size: 0 }
            }
        };
        loop {
            let kind = match partial.command.layout() {
                Layout::Fixed(kinds) => kinds.get(partial.fields.len()),
                Layout::Repeated(kinds) => match partial.count {
                    Some(count) if partial.fields.len() < count * kinds.len() => {
                        kinds.get(partial.fields.len() % kinds.len())
                    }
                    Some(_) => None,
                    None => {
                        let Some(count) = self.take() else { break };
                        partial.count = Some(bounded(u64::from_le_bytes(count), MAX_COUNT, "keys in one request")?);
                        continue;
                    }
                },
            };
            let field = match kind {
                None => return finish(partial).map(Some),
                Some(Kind::U32) => self.take().map(|bytes| Field::Number(u32::from_le_bytes(bytes).into())),
                Some(Kind::I64) => self.take().map(|bytes| Field::Number(u64::from_le_bytes(bytes))),
                Some(Kind::Block) => self.take::<32>().map(|bytes| Field::Bytes(bytes.to_vec())),
                Some(Kind::Key) => self.take_bytes(MAX_KEY, "bytes in a key")?,
                Some(Kind::Value) => self.take_bytes(MAX_VALUE, "bytes in a value")?,
            };
            let Some(field) = field else { break };
            if let Field::Bytes(bytes) = &field {
                partial.size += bytes.len();
                if partial.size > MAX_MESSAGE {
                    return Err(Malformed(format!("a request has more than {MAX_MESSAGE} bytes")));
                }
            }
            partial.fields.push(field);
        }
        self.partial = Some(partial);
        self.compact();
        Ok(None)
    }

    /// Returns the memory used, in bytes.
    pub(super) fn allocated(&self) -> usize {
        let fields = |partial: &Partial| partial.fields.capacity() * size_of::<Field>() + partial.size;
        self.buffer.capacity() + self.partial.as_ref().map_or(0, fields)
    }

    fn rest(&self) -> &[u8] {
        self.buffer.get(self.read..).unwrap_or_default()
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let bytes = *self.rest().first_chunk()?;
        self.read += N;
        Some(bytes)
    }

    fn take_bytes(&mut self, limit: usize, what: &str) -> Result<Option<Field>, Malformed> {
        let Some(length) = self.rest().first_chunk() else { return Ok(None) };
        let length = bounded(u64::from_le_bytes(*length), limit, what)?;
        let Some(bytes) = self.rest().get(8..8 + length) else { return Ok(None) };
        let bytes = bytes.to_vec();
        self.read += 8 + length;
        Ok(Some(Field::Bytes(bytes)))
    }
}

/// Checks a length from the wire against `limit`.
pub(super) fn bounded(length: u64, limit: usize, what: &str) -> Result<usize, Malformed> {
    usize::try_from(length)
        .ok()
        .filter(|length| *length <= limit)
        .ok_or_else(|| Malformed(format!("{length} {what}, but at most {limit} are allowed")))
}

fn finish(partial: Partial) -> Result<Request, Malformed> {
    let command = partial.command;
    let mut fields = partial.fields.into_iter();
    let lost = || Malformed(format!("{command:?} lacks a field"));
    let mut bytes = || match fields.next() {
        Some(Field::Bytes(bytes)) => Ok(bytes),
        _ => Err(lost()),
    };
    let mut keys = |count: Option<usize>| (0..count.unwrap_or(0)).map(|_| bytes()).collect::<Result<Vec<_>, _>>();
    Ok(match command {
        Command::Check => Request::Check(keys(partial.count)?),
        Command::Wait => Request::Wait(keys(partial.count)?),
        Command::MultiGet => Request::MultiGet(keys(partial.count)?),
        Command::MultiSet => Request::MultiSet(
            (0..partial.count.unwrap_or(0)).map(|_| Ok((bytes()?, bytes()?))).collect::<Result<Vec<_>, _>>()?,
        ),
        Command::Set => Request::Set { key: bytes()?, value: bytes()? },
        Command::Append => Request::Append { key: bytes()?, value: bytes()? },
        Command::QueuePush => Request::QueuePush { key: bytes()?, value: bytes()? },
        Command::LastWill => Request::LastWill(bytes()?),
        Command::CompareSet => Request::CompareSet { key: bytes()?, expected: bytes()?, desired: bytes()? },
        Command::Get => Request::Get(bytes()?),
        Command::Delete => Request::Delete(bytes()?),
        Command::QueuePop => Request::QueuePop(bytes()?),
        Command::QueueLen => Request::QueueLen(bytes()?),
        Command::NumKeys => Request::NumKeys,
        Command::CancelWait => Request::CancelWait,
        Command::ListKeys => Request::ListKeys,
        Command::Prove => {
            let block = |bytes: Vec<u8>| bytes.try_into().map_err(|_| lost());
            Request::Prove { nonce: block(bytes()?)?, proof: block(bytes()?)? }
        }
        Command::Add | Command::Barrier | Command::Validate | Command::Ping => {
            let key = if matches!(command, Command::Add | Command::Barrier) { bytes()? } else { Vec::new() };
            let Some(Field::Number(number)) = fields.next() else { return Err(lost()) };
            match command {
                Command::Add => Request::Add { key, amount: number as i64 },
                Command::Barrier => Request::Barrier { key, world_size: number as i64 },
                Command::Validate => Request::Validate(number as u32),
                _ => Request::Ping(number as u32),
            }
        }
    })
}

/// Returns a user's key in the form that the server uses.
pub(super) fn user_key(key: &str) -> Vec<u8> {
    format!("{USER_KEYS}{key}").into_bytes()
}
