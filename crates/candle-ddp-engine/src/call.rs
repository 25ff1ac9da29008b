//! The description of a call, as it is sent before the data and shown in messages.
use crate::call_site::CallSite;
use crate::label::Label;
use crate::operation::Operation;
use crate::reduce_op::ReduceOp;
use crate::shape::ShapeCode;
use candle_ddp_base::wire::{Reader, Writer};
use std::fmt;

/// The element types that the engines move and reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// 32-bit floating point.
    F32,
    /// 64-bit floating point.
    F64,
    /// IEEE 16-bit floating point.
    F16,
    /// bfloat16.
    BF16,
    /// 64-bit integers.
    I64,
    /// 32-bit unsigned integers.
    U32,
    /// Bytes.
    U8,
}

impl Element {
    /// The supported dtypes, for messages.
    pub const SUPPORTED: &'static str = "f32, f64, f16, bf16, i64, u32, u8";
    /// All element types, in the order of their numbers.
    pub(crate) const ALL: [Self; 7] = [Self::F32, Self::F64, Self::F16, Self::BF16, Self::I64, Self::U32, Self::U8];

    /// Returns the name of the dtype, for example `f32`.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::I64 => "i64",
            Self::U32 => "u32",
            Self::U8 => "u8",
        }
    }

    /// The size of one element in bytes.
    #[inline]
    pub fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 => 8,
            Self::F32 | Self::U32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::U8 => 1,
        }
    }

    /// Whether this is a floating-point type.
    #[inline]
    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64 | Self::F16 | Self::BF16)
    }
}

const REDUCTIONS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Prod];

/// One call without its data: everything that must be equal on all ranks, except that a shape may say nothing, and that calls may
/// come from different places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// The operation.
    pub operation: Operation,
    /// `None` if no data moves.
    pub element: Option<Element>,
    /// How values are reduced, if they are.
    pub reduction: Option<ReduceOp>,
    /// The rank that has or gets everything, if there is one.
    pub root: Option<usize>,
    /// The number of elements of the tensor; with two tensors, of the smaller one (the input of an all-gather, the
    /// output of a reduce-scatter); for an all-to-all, of the input.
    pub count: u64,
    /// The purpose of the call.
    pub label: Label,
    /// The shape of the tensor whose elements are counted.
    pub shape: ShapeCode,
    /// The place in the program that makes the call.
    pub place: CallSite,
}

impl Call {
    /// The size of an encoded call in bytes.
    pub(crate) const BYTES: usize = Self::EXACT_BYTES + 8;
    /// The size of the part that must be equal on all ranks. The shape and the place follow.
    const EXACT_BYTES: usize = 20;
    const NONE: u8 = u8::MAX;

    /// A call that moves no data.
    #[inline]
    pub fn bare(operation: Operation) -> Self {
        let (label, shape, place) = (Label::NONE, ShapeCode::NONE, CallSite::NONE);
        Self { operation, element: None, reduction: None, root: None, count: 0, label, shape, place }
    }

    /// Whether `other` may be another rank's part of this call.
    pub(crate) fn matches(&self, other: &Self) -> bool {
        self.shape.agrees(other.shape) && *self == Self { shape: self.shape, place: self.place, ..*other }
    }

    pub(crate) fn encode(&self, writer: &mut Writer) {
        // These enums have no fields, so `as` gives their index in the `ALL` lists.
        writer.u8(self.operation as u8);
        writer.u8(self.element.map_or(Self::NONE, |element| element as u8));
        writer.u8(self.reduction.map_or(Self::NONE, |reduction| reduction as u8));
        writer.u8(0);
        writer.u32(self.root.map_or(u32::MAX, |root| root as u32));
        writer.u64(self.count).u32(self.label.code()).u32(self.shape.code()).u32(self.place.code());
    }

    pub(crate) fn decode(reader: &mut Reader) -> Option<Self> {
        fn pick<T: Copy>(code: u8, all: &[T]) -> Option<Option<T>> {
            if code == Call::NONE { Some(None) } else { all.get(usize::from(code)).copied().map(Some) }
        }
        let operation = *Operation::ALL.get(usize::from(reader.u8()?))?;
        let element = pick(reader.u8()?, &Element::ALL)?;
        let reduction = pick(reader.u8()?, &REDUCTIONS)?;
        if reader.u8()? != 0 {
            return None;
        }
        let root = Some(reader.u32()?).filter(|root| *root != u32::MAX).map(|root| root as usize);
        let (count, label) = (reader.u64()?, Label::from_code(reader.u32()?));
        let (shape, place) = (ShapeCode::from_code(reader.u32()?), CallSite::from_code(reader.u32()?));
        Some(Self { operation, element, reduction, root, count, label, shape, place })
    }

    /// The numbers of its texts.
    pub(crate) fn codes(&self) -> [u32; 3] {
        [self.label.code(), self.shape.code(), self.place.code()]
    }

    /// Whether this rank lacks the text of the label, shape or place of this call, which is another rank's.
    pub(crate) fn lacks_text(&self) -> bool {
        let lacks_label = self.label != Label::NONE && self.label.text().is_none();
        let lacks_shape = self.shape != ShapeCode::NONE && self.shape.text().is_none();
        lacks_label || lacks_shape || (self.place != CallSite::NONE && self.place.text().is_none())
    }

    /// Includes the arguments that [`Display`](fmt::Display) leaves out: `all_reduce(f32[20], sum)`.
    fn in_full(&self) -> String {
        let reduction = self.reduction.map_or_else(String::new, |reduction| format!(", {reduction}"));
        let root = self.root.map_or_else(String::new, |root| format!(", root {root}"));
        self.with_arguments(&self.count.to_string(), &(reduction + &root))
    }

    /// The call with `size` in brackets: the number of elements, or the shape.
    fn with_arguments(&self, size: &str, further: &str) -> String {
        let name = self.operation.name();
        let call = match self.element {
            Some(element) => format!("{name}({}[{size}]{further})", element.name()),
            None => format!("{name}()"),
        };
        match self.label.text() {
            Some(label) => format!("{call} for {label}"),
            None => call,
        }
    }

    /// Describes two different calls, in full if their short forms are equal.
    pub(crate) fn describe_both(&self, other: &Self) -> (String, String) {
        let (a, b) = (self.to_string(), other.to_string());
        let differ_in_shape = self.count == other.count && !self.shape.agrees(other.shape);
        if differ_in_shape && let (Some(a), Some(b)) = (self.shape.text(), other.shape.text()) {
            return (self.with_arguments(&a, ""), other.with_arguments(&b, ""));
        }
        if a != b {
            return (a, b);
        }
        let (a, b) = (self.in_full(), other.in_full());
        if a != b || self.matches(other) {
            return (a, b);
        }
        // This rank does not know the text of one of them.
        let numbers = |call: &Self| match self.shape.agrees(other.shape) {
            true => format!(" (label {:08x})", call.label.code()),
            false => format!(" (shape {:08x})", call.shape.code()),
        };
        (a + &numbers(self), b + &numbers(other))
    }
}

/// Writes `all_reduce(f32[20])`, or `all_gather(i64[1]) for save_distributed`.
impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.with_arguments(&self.count.to_string(), ""))
    }
}

/// A queue of calls. Calls are numbered, and matched between ranks, within a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Channel {
    /// Calls of all ranks.
    Collectives,
    /// Messages to a rank.
    SendTo(usize),
    /// Messages from a rank.
    RecvFrom(usize),
}

/// The header before the data of one call, sent once for each pair of ranks and direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) sequence: u64,
    pub(crate) call: Call,
}

impl Header {
    /// The size of an encoded header in bytes.
    pub(crate) const BYTES: usize = 12 + Call::BYTES;
    const MAGIC: u32 = u32::from_le_bytes(*b"cddp");

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let mut writer = Writer(Vec::with_capacity(Self::BYTES));
        writer.u32(Self::MAGIC).u64(self.sequence);
        self.call.encode(&mut writer);
        let mut bytes = [0; Self::BYTES];
        bytes.copy_from_slice(&writer.0);
        bytes
    }

    /// Whether data with the header `received` belongs to the call with the header `expected`. If so, and the calls come from
    /// different places, that is [noted](CallSite::meet).
    pub(crate) fn agree(expected: &[u8; Self::BYTES], received: &[u8; Self::BYTES]) -> bool {
        if expected == received {
            return true;
        }
        let exact = ..Self::BYTES - Call::BYTES + Call::EXACT_BYTES;
        let last = |bytes: &[u8; Self::BYTES]| {
            let mut reader = Reader(&bytes[exact.end..]);
            Some((ShapeCode::from_code(reader.u32()?), CallSite::from_code(reader.u32()?)))
        };
        let (Some((our_shape, ours)), Some((their_shape, theirs))) = (last(expected), last(received)) else {
            return false;
        };
        if expected[exact] != received[exact] || !our_shape.agrees(their_shape) {
            return false;
        }
        if theirs != ours {
            CallSite::meet(theirs);
        }
        true
    }

    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
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
        for &operation in Operation::ALL {
            for (element, reduction, root) in [
                (None, None, None),
                (Some(Element::U8), Some(ReduceOp::Prod), Some(3)),
                (Some(Element::F32), None, Some(0)),
            ] {
                let header = Header {
                    sequence: 1 << 40,
                    call: Call {
                        operation,
                        element,
                        reduction,
                        root,
                        count: 1 << 50,
                        label: Label::register("save_distributed"),
                        shape: ShapeCode::of(&[2, 3]),
                        place: CallSite::from_code(7),
                    },
                };
                assert_eq!(Header::decode(&header.encode()), Some(header));
            }
        }
        assert!(Operation::ALL.iter().enumerate().all(|(index, operation)| *operation as usize == index));
        assert!(Element::ALL.into_iter().enumerate().all(|(index, element)| element as usize == index));
        assert!(REDUCTIONS.into_iter().enumerate().all(|(index, reduction)| reduction as usize == index));
        assert_eq!(Header::decode(&[7; Header::BYTES]), None);
        let mut unused = Header { sequence: 1, call: Call::bare(Operation::Barrier) }.encode();
        unused[15] = 1;
        assert_eq!(Header::decode(&unused), None);
    }

    #[test]
    fn calls_that_look_alike_are_described_in_full() {
        let sum = Call {
            element: Some(Element::F32),
            reduction: Some(ReduceOp::Sum),
            root: Some(0),
            count: 4,
            ..Call::bare(Operation::Reduce)
        };
        let other_root = Call { root: Some(1), ..sum };
        let (a, b) = sum.describe_both(&other_root);
        assert_eq!((a.as_str(), b.as_str()), ("reduce(f32[4], sum, root 0)", "reduce(f32[4], sum, root 1)"));
        let (a, b) = sum.describe_both(&Call { count: 5, ..sum });
        assert_eq!((a.as_str(), b.as_str()), ("reduce(f32[4])", "reduce(f32[5])"));
        let (a, b) = sum.describe_both(&Call { label: Label::register("save_distributed"), ..sum });
        assert_eq!((a.as_str(), b.as_str()), ("reduce(f32[4])", "reduce(f32[4]) for save_distributed"));
        let (a, b) = sum.describe_both(&Call { label: Label::from_code(0x1234), ..sum });
        assert_eq!(
            (a, b),
            (
                "reduce(f32[4], sum, root 0) (label 00000000)".into(),
                "reduce(f32[4], sum, root 0) (label 00001234)".into()
            )
        );
        let shaped = |dims: &[usize]| Call { shape: ShapeCode::of(dims), ..sum };
        let (a, b) = shaped(&[2, 3]).describe_both(&shaped(&[3, 2]));
        assert_eq!((a.as_str(), b.as_str()), ("reduce(f32[2, 3])", "reduce(f32[3, 2])"));
        let (a, b) = shaped(&[2, 3]).describe_both(&Call { shape: ShapeCode::from_code(3), ..sum });
        assert!(a.contains(" (shape ") && b.ends_with(" (shape 00000003)"), "{a}, {b}");
        let labelled = Call { label: Label::register("save_distributed"), ..sum };
        let (a, _) = labelled.describe_both(&Call { label: Label::register("save_distributed"), ..other_root });
        assert_eq!(a, "reduce(f32[4], sum, root 0) for save_distributed");
    }

    #[test]
    fn headers_agree_in_all_but_the_place_and_shapes_that_say_nothing() {
        let header = |sequence, dims: &[usize], place| {
            let (shape, place) = (ShapeCode::of(dims), CallSite::from_code(place));
            Header { sequence, call: Call { count: 6, shape, place, ..Call::bare(Operation::AllReduce) } }.encode()
        };
        let ours = header(4, &[2, 3], 7);
        for (theirs, agrees, met) in [
            (header(4, &[2, 3], 7), true, None),
            (header(4, &[6], 7), true, None),
            (header(4, &[2, 3], 8), true, Some(CallSite::from_code(8))),
            (header(4, &[3, 2], 7), false, None),
            (header(4, &[3, 2], 8), false, None),
            (header(5, &[2, 3], 7), false, None),
        ] {
            assert_eq!((Header::agree(&ours, &theirs), CallSite::take_met()), (agrees, met));
            let [a, b] = [&ours, &theirs].map(|bytes| Header::decode(bytes).unwrap());
            assert_eq!(a.call.matches(&b.call), agrees || a.sequence != b.sequence);
        }
    }
}
