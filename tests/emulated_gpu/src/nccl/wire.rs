//! The protocol between ranks and their hub. Each rank has two connections to the hub: one for data, in frames with a
//! header and a body, and one for everything else, in lines of text.
use super::{Code, Failure, failure};
use std::io::{Read, Result, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

/// Returns the address of a hub: a name that exists only in memory.
fn address(name: &str) -> Result<SocketAddr> {
    SocketAddr::from_abstract_name(name)
}

/// The prefix of the names of this process's hubs.
fn names_here() -> String {
    format!("emulated-nccl-{}-", std::process::id())
}

/// Whether a hub is in this process.
pub(super) fn is_here(name: &str) -> bool {
    name.starts_with(&names_here())
}

/// Returns a new hub's name and its listener.
pub(super) fn listen() -> Result<(String, UnixListener)> {
    let mut number = [0; 16];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut number)?;
    let name = format!("{}{:032x}", names_here(), u128::from_le_bytes(number));
    let listener = UnixListener::bind_addr(&address(&name)?)?;
    Ok((name, listener))
}

/// The beginning of every connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Greeting {
    pub(super) for_data: bool,
    pub(super) rank: usize,
    pub(super) size: usize,
    /// The rank's process.
    pub(super) process: u32,
}

impl Greeting {
    pub(super) fn connect(self, name: &str) -> Result<UnixStream> {
        let mut stream = UnixStream::connect_addr(&address(name)?)?;
        let words = [u32::from(self.for_data), self.rank as u32, self.size as u32, self.process];
        stream.write_all(words.map(u32::to_le_bytes).as_flattened())?;
        Ok(stream)
    }

    pub(super) fn read(stream: &mut UnixStream) -> Result<Self> {
        let mut bytes = [[0; 4]; 4];
        stream.read_exact(bytes.as_flattened_mut())?;
        let [for_data, rank, size, process] = bytes.map(u32::from_le_bytes);
        Ok(Self { for_data: for_data != 0, rank: rank as usize, size: size as usize, process })
    }
}

/// A line of text between a rank and the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// A rank joins, with its peer info.
    Join {
        device: i32,
        may_share: bool,
        host: String,
    },
    Split {
        color: i32,
        key: i32,
    },
    Finalize,
    /// A rank makes its first call.
    Connect,
    /// All ranks have joined.
    Ready,
    /// All ranks make their first call.
    Connected,
    Failed(Failure),
    /// The rank's position after a split: rank, size, and the name of the new hub.
    Child(Option<(usize, usize, String)>),
    Finalized,
    /// A rank ends its communicator.
    Destroy,
    /// All ranks of its host do.
    Destroyed,
    /// The ranks in the hub's process have finalized, so the hub may end.
    Orphaned,
}

impl Message {
    pub(super) fn send(&self, mut stream: &UnixStream) -> Result<()> {
        let text = match self {
            Self::Join { device, may_share, host } => {
                format!("join {device} {} {host}", u8::from(*may_share))
            }
            Self::Split { color, key } => format!("split {color} {key}"),
            Self::Finalize => "finalize".to_string(),
            Self::Connect => "connect".to_string(),
            Self::Ready => "ready".to_string(),
            Self::Connected => "connected".to_string(),
            Self::Failed(Failure { code, text }) => format!("failed {} {text}", *code as i32),
            Self::Child(None) => "childless".to_string(),
            Self::Child(Some((rank, size, name))) => format!("child {rank} {size} {name}"),
            Self::Finalized => "finalized".to_string(),
            Self::Destroy => "destroy".to_string(),
            Self::Destroyed => "destroyed".to_string(),
            Self::Orphaned => "orphaned".to_string(),
        };
        stream.write_all(format!("{}\n", text.replace('\n', " ")).as_bytes())
    }

    pub(super) fn parse(line: &str) -> Option<Self> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        let fields = |count| rest.splitn(count, ' ').collect::<Vec<_>>();
        Some(match (word, &fields(3)[..]) {
            ("join", [device, may_share, host]) => {
                Self::Join { device: device.parse().ok()?, may_share: *may_share == "1", host: host.to_string() }
            }
            ("split", [color, key]) => Self::Split { color: color.parse().ok()?, key: key.parse().ok()? },
            ("finalize", _) => Self::Finalize,
            ("connect", _) => Self::Connect,
            ("ready", _) => Self::Ready,
            ("connected", _) => Self::Connected,
            ("failed", _) => {
                let (code, text) = rest.split_once(' ')?;
                Self::Failed(failure(Code::from_number(code.parse().ok()?), text))
            }
            ("childless", _) => Self::Child(None),
            ("child", [rank, size, name]) => {
                Self::Child(Some((rank.parse().ok()?, size.parse().ok()?, name.to_string())))
            }
            ("finalized", _) => Self::Finalized,
            ("destroy", _) => Self::Destroy,
            ("destroyed", _) => Self::Destroyed,
            ("orphaned", _) => Self::Orphaned,
            _ => return None,
        })
    }
}

/// The kind of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    AllReduce,
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    Send,
    Recv,
}

const KINDS: [Kind; 7] =
    [Kind::AllReduce, Kind::Broadcast, Kind::Reduce, Kind::AllGather, Kind::ReduceScatter, Kind::Send, Kind::Recv];

/// `ncclDataType_t`, without the 8-bit floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dtype {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    BF16,
}

const DTYPES: [Dtype; 10] = [
    Dtype::I8,
    Dtype::U8,
    Dtype::I32,
    Dtype::U32,
    Dtype::I64,
    Dtype::U64,
    Dtype::F16,
    Dtype::F32,
    Dtype::F64,
    Dtype::BF16,
];

impl Dtype {
    /// Converts NCCL's number.
    pub(super) fn from_number(number: usize) -> Option<Self> {
        DTYPES.get(number).copied()
    }

    fn bytes(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }
}

/// `ncclRedOp_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    Sum,
    Prod,
    Max,
    Min,
    Avg,
}

const OPS: [Op; 5] = [Op::Sum, Op::Prod, Op::Max, Op::Min, Op::Avg];

impl Op {
    /// Converts NCCL's number.
    pub(super) fn from_number(number: usize) -> Option<Self> {
        OPS.get(number).copied()
    }
}

/// The part of a call that all ranks must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Call {
    pub(super) kind: Kind,
    pub(super) dtype: Dtype,
    /// `Sum` if nothing is reduced.
    pub(super) op: Op,
    /// The root, or the other rank of a message; 0 if there is none.
    pub(super) peer: usize,
    /// The number of elements, as NCCL counts them for this call.
    pub(super) count: usize,
}

impl Call {
    pub(super) fn bytes(&self) -> usize {
        self.count * self.dtype.bytes()
    }

    /// Returns how many bytes rank `rank` contributes.
    pub(super) fn given(&self, rank: usize, size: usize) -> usize {
        match self.kind {
            Kind::AllReduce | Kind::Reduce | Kind::AllGather | Kind::Send => self.bytes(),
            Kind::ReduceScatter => self.bytes() * size,
            Kind::Broadcast if rank == self.peer => self.bytes(),
            Kind::Broadcast | Kind::Recv => 0,
        }
    }

    /// Returns how many bytes rank `rank` receives.
    pub(super) fn taken(&self, rank: usize, size: usize) -> usize {
        match self.kind {
            Kind::AllReduce | Kind::Broadcast | Kind::ReduceScatter | Kind::Recv => self.bytes(),
            Kind::AllGather => self.bytes() * size,
            Kind::Reduce if rank == self.peer => self.bytes(),
            Kind::Reduce | Kind::Send => 0,
        }
    }
}

/// The size of a call's header, which includes the index in its job; the body follows.
pub(super) const CALL_HEADER: usize = 24;

pub(super) fn call_header(index: usize, call: &Call) -> [u8; CALL_HEADER] {
    let words = [u64::from(index as u32) | (call.peer as u64) << 32, call.count as u64];
    let mut header = [0; CALL_HEADER];
    header[..16].copy_from_slice(words.map(u64::to_le_bytes).as_flattened());
    header[16..19].copy_from_slice(&[call.kind as u8, call.dtype as u8, call.op as u8]);
    header
}

/// Returns `None` if the header is invalid.
pub(super) fn parse_call(header: &[u8; CALL_HEADER]) -> Option<(usize, Call)> {
    let ([first, count, rest], _) = header.as_chunks::<8>() else { return None };
    let (first, count) = (u64::from_le_bytes(*first), u64::from_le_bytes(*count));
    let call = Call {
        kind: *KINDS.get(usize::from(rest[0]))?,
        dtype: *DTYPES.get(usize::from(rest[1]))?,
        op: *OPS.get(usize::from(rest[2]))?,
        peer: (first >> 32) as usize,
        count: usize::try_from(count).ok()?,
    };
    Some((first as u32 as usize, call))
}

/// The size of a reply's header: the call's index in its job, and the number of bytes that follow.
pub(super) const ANSWER_HEADER: usize = 16;

pub(super) fn answer_header(index: usize, bytes: usize) -> [u8; ANSWER_HEADER] {
    let mut header = [0; ANSWER_HEADER];
    header.copy_from_slice([index as u64, bytes as u64].map(u64::to_le_bytes).as_flattened());
    header
}

pub(super) fn read_answer_header(mut stream: &UnixStream) -> Result<(usize, usize)> {
    let mut header = [[0; 8]; 2];
    stream.read_exact(header.as_flattened_mut())?;
    let [index, bytes] = header.map(u64::from_le_bytes);
    Ok((index as usize, bytes as usize))
}
