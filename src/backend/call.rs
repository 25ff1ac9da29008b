//! What a rank called, as it is sent in front of the data and as it is written in messages.
use super::label::Label;
use super::wire::{Reader, Writer};
use crate::backend::ReduceOp;
use candle_core::DType;
use std::fmt;

/// The element types that the engines move and reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    F32,
    F64,
    F16,
    BF16,
    I64,
    U32,
    U8,
}

impl Element {
    /// The supported dtypes, for messages.
    pub(super) const SUPPORTED: &'static str = "f32, f64, f16, bf16, i64, u32, u8";
    const ALL: [Self; 7] = [Self::F32, Self::F64, Self::F16, Self::BF16, Self::I64, Self::U32, Self::U8];

    pub(super) fn of(dtype: DType) -> Option<Self> {
        Self::ALL.into_iter().find(|element| element.dtype() == dtype)
    }

    fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F64 => DType::F64,
            Self::F16 => DType::F16,
            Self::BF16 => DType::BF16,
            Self::I64 => DType::I64,
            Self::U32 => DType::U32,
            Self::U8 => DType::U8,
        }
    }

    /// Bytes of one element.
    pub(super) fn size(self) -> usize {
        self.dtype().size_in_bytes()
    }

    pub(super) fn is_float(self) -> bool {
        self.dtype().is_float()
    }
}

/// The kinds of calls. Their discriminants are sent to other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    /// The barrier at the end of a group's construction.
    Connect,
    AllReduce,
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Gather,
    Scatter,
    Send,
    Recv,
    Barrier,
}

impl Operation {
    const ALL: [Self; 12] = [
        Self::Connect,
        Self::AllReduce,
        Self::Broadcast,
        Self::Reduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::AllToAll,
        Self::Gather,
        Self::Scatter,
        Self::Send,
        Self::Recv,
        Self::Barrier,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::AllReduce => "all_reduce",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "all_to_all",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::Send => "send",
            Self::Recv => "recv",
            Self::Barrier => "barrier",
        }
    }
}

const REDUCTIONS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Prod];

/// One call, without its data: what all ranks must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Call {
    pub(super) operation: Operation,
    /// `None` where no data moves.
    pub(super) element: Option<Element>,
    pub(super) reduction: Option<ReduceOp>,
    pub(super) root: Option<usize>,
    /// Elements of the tensor. Where there are two tensors, elements of the one that is a part of the other (the input of an
    /// all-gather, the output of a reduce-scatter); of the input of an all-to-all.
    pub(super) count: u64,
    pub(super) label: Label,
}

impl Call {
    /// Bytes of an encoded call.
    pub(super) const BYTES: usize = 20;
    const NONE: u8 = u8::MAX;

    /// A call that moves no data.
    pub(super) fn bare(operation: Operation) -> Self {
        Self { operation, element: None, reduction: None, root: None, count: 0, label: Label::NONE }
    }

    pub(super) fn encode(&self, writer: &mut Writer) {
        // These enums have no fields, so `as` gives their index in the `ALL` lists.
        writer.u8(self.operation as u8);
        writer.u8(self.element.map_or(Self::NONE, |element| element as u8));
        writer.u8(self.reduction.map_or(Self::NONE, |reduction| reduction as u8));
        writer.u8(0);
        writer.u32(self.root.map_or(u32::MAX, |root| root as u32));
        writer.u64(self.count).u32(self.label.code());
    }

    pub(super) fn decode(reader: &mut Reader) -> Option<Self> {
        fn pick<T: Copy>(code: u8, all: &[T]) -> Option<Option<T>> {
            if code == Call::NONE { Some(None) } else { all.get(usize::from(code)).copied().map(Some) }
        }
        let operation = *Operation::ALL.get(usize::from(reader.u8()?))?;
        let element = pick(reader.u8()?, &Element::ALL)?;
        let reduction = pick(reader.u8()?, &REDUCTIONS)?;
        reader.u8()?;
        let root = Some(reader.u32()?).filter(|root| *root != u32::MAX).map(|root| root as usize);
        let (count, label) = (reader.u64()?, Label::from_code(reader.u32()?));
        Some(Self { operation, element, reduction, root, count, label })
    }

    /// With the arguments that [`Display`](fmt::Display) leaves out: `all_reduce(f32[20], sum)`.
    fn in_full(&self) -> String {
        let reduction = self.reduction.map_or_else(String::new, |reduction| format!(", {reduction}"));
        let root = self.root.map_or_else(String::new, |root| format!(", root {root}"));
        self.with_arguments(&(reduction + &root))
    }

    fn with_arguments(&self, further: &str) -> String {
        let name = self.operation.name();
        let call = match self.element {
            Some(element) => format!("{name}({}[{}]{further})", element.dtype().as_str(), self.count),
            None => format!("{name}()"),
        };
        match self.label.text() {
            Some(label) => format!("{call} for {label}"),
            None => call,
        }
    }

    /// Describes two different calls, in full if their short forms are equal.
    pub(super) fn describe_both(&self, other: &Self) -> (String, String) {
        let (a, b) = (self.to_string(), other.to_string());
        if a == b { (self.in_full(), other.in_full()) } else { (a, b) }
    }
}

/// `all_reduce(f32[20])`, `all_gather(i64[1]) for save_distributed`
impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.with_arguments(""))
    }
}

/// A queue of calls: calls are numbered, and matched between ranks, within a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Channel {
    Collectives,
    SendTo(usize),
    RecvFrom(usize),
}

/// What is sent in front of the data of one call, once for each pair of ranks and direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) sequence: u64,
    pub(super) call: Call,
}

impl Header {
    /// Bytes of an encoded header.
    pub(super) const BYTES: usize = 12 + Call::BYTES;
    const MAGIC: u32 = u32::from_le_bytes(*b"cddp");

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let mut writer = Writer::default();
        writer.u32(Self::MAGIC).u64(self.sequence);
        self.call.encode(&mut writer);
        let mut bytes = [0; Self::BYTES];
        bytes.copy_from_slice(&writer.0);
        bytes
    }

    pub(super) fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let mut reader = Reader(bytes);
        if reader.u32()? != Self::MAGIC {
            return None;
        }
        Some(Self { sequence: reader.u64()?, call: Call::decode(&mut reader)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_can_be_encoded_and_decoded() {
        for operation in Operation::ALL {
            for (element, reduction, root) in [
                (None, None, None),
                (Some(Element::U8), Some(ReduceOp::Prod), Some(3)),
                (Some(Element::F32), None, Some(0)),
            ] {
                let header = Header {
                    sequence: 1 << 40,
                    call: Call { operation, element, reduction, root, count: 1 << 50, label: Label::SAVE },
                };
                assert_eq!(Header::decode(&header.encode()), Some(header));
            }
        }
        for (index, element) in Element::ALL.into_iter().enumerate() {
            assert_eq!((element as usize, Element::of(element.dtype())), (index, Some(element)));
        }
        assert!(REDUCTIONS.into_iter().enumerate().all(|(index, reduction)| reduction as usize == index));
        assert_eq!(Header::decode(&[7; Header::BYTES]), None);
    }

    #[test]
    fn calls_that_look_alike_are_described_in_full() {
        let sum = Call {
            operation: Operation::Reduce,
            element: Some(Element::F32),
            reduction: Some(ReduceOp::Sum),
            root: Some(0),
            count: 4,
            label: Label::NONE,
        };
        let other_root = Call { root: Some(1), ..sum };
        let (a, b) = sum.describe_both(&other_root);
        assert_eq!((a.as_str(), b.as_str()), ("reduce(f32[4], sum, root 0)", "reduce(f32[4], sum, root 1)"));
        let (a, b) = sum.describe_both(&Call { count: 5, ..sum });
        assert_eq!((a.as_str(), b.as_str()), ("reduce(f32[4])", "reduce(f32[5])"));
        let (a, b) = sum.describe_both(&Call { label: Label::SAVE, ..sum });
        assert_eq!((a.as_str(), b.as_str()), ("reduce(f32[4])", "reduce(f32[4]) for save_distributed"));
        let labelled = Call { label: Label::SAVE, ..sum };
        let (a, _) = labelled.describe_both(&Call { label: Label::SAVE, ..other_root });
        assert_eq!(a, "reduce(f32[4], sum, root 0) for save_distributed");
    }
}
