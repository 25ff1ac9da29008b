//! A reader of pickles, for the opcodes of protocol 2, which `torch.save` writes. It runs nothing: it represents an
//! object by its class and constructor arguments.
//!
//! Values refer to each other by index. So a dict that is mentioned twice is one dict with all its entries, a deeply
//! nested pickle needs no stack, and all values together take memory in proportion to the pickle.
use crate::checked::Checked;
use std::collections::HashMap;
use std::ops::Index;

/// The index of a value.
pub(crate) type Id = usize;

pub(crate) enum Value<'a> {
    Int(i64),
    Text(&'a str),
    Class {
        module: &'a str,
        name: &'a str,
    },
    Tuple(Vec<Id>),
    /// A list, whose elements are not needed.
    List,
    Dict(Vec<(Id, Id)>),
    /// The result of `callable(*args)`.
    Object {
        callable: Id,
        args: Id,
    },
    /// An object outside the pickle: in PyTorch's files, a storage.
    Persistent(Id),
    None,
    /// A boolean, a float, an integer of more than 64 bits, or a text that is not Unicode.
    Other,
}

pub(crate) struct Pickle<'a> {
    values: Vec<Value<'a>>,
    root: Id,
}

impl<'a> Pickle<'a> {
    pub(crate) fn parse(bytes: &'a [u8]) -> Checked<Self> {
        let length = bytes.len();
        let mut reader = Reader { rest: bytes, ..Default::default() };
        loop {
            let position = length - reader.rest.len();
            let finished = reader.step().map_err(|reason| format!("{reason}, at byte {position} of {length}"))?;
            if let Some(root) = finished {
                return Ok(Self { values: reader.values, root });
            }
        }
    }

    pub(crate) fn root(&self) -> Id {
        self.root
    }

    pub(crate) fn text(&self, id: Id) -> Option<&'a str> {
        match self[id] {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }
}

impl<'a> Index<Id> for Pickle<'a> {
    type Output = Value<'a>;

    fn index(&self, id: Id) -> &Value<'a> {
        &self.values[id]
    }
}

/// The stack machine that executes a pickle.
#[derive(Default)]
struct Reader<'a> {
    /// The bytes that have not been read yet.
    rest: &'a [u8],
    values: Vec<Value<'a>>,
    stack: Vec<Id>,
    /// The height of the stack at each mark.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

impl<'a> Reader<'a> {
    /// Executes an opcode; the last one returns the pickle's value.
    fn step(&mut self) -> Checked<Option<Id>> {
        match self.array::<1>()?[0] {
            // PROTO
            0x80 => match self.array()? {
                [0..=3] => {}
                [protocol] => return Err(format!("it has protocol {protocol}: write it with torch.save's own, 2")),
            },
            // STOP
            b'.' => return self.pop().map(Some),

            // BININT1, BININT2, BININT, LONG1, LONG4
            b'K' => self.int(1)?,
            b'M' => self.int(2)?,
            b'J' => {
                let value = i32::from_le_bytes(self.array()?);
                self.push(Value::Int(value.into()));
            }
            0x8a => {
                let [length] = self.array()?;
                self.long(length.into())?;
            }
            0x8b => {
                let length = u32::from_le_bytes(self.array()?);
                self.long(length as usize)?;
            }
            // BINFLOAT, NEWTRUE, NEWFALSE, NONE
            b'G' => {
                self.take(8)?;
                self.push(Value::Other);
            }
            0x88 | 0x89 => self.push(Value::Other),
            b'N' => self.push(Value::None),
            // BINUNICODE
            b'X' => {
                let length = u32::from_le_bytes(self.array()?);
                let text = self.take(length as usize)?;
                self.push(std::str::from_utf8(text).map_or(Value::Other, Value::Text));
            }
            // GLOBAL
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.push(Value::Class { module, name });
            }

            // MARK, POP, POP_MARK, DUP
            b'(' => self.marks.push(self.stack.len()),
            b'0' => {
                if self.pop().is_err() {
                    self.pop_to_mark()?;
                }
            }
            b'1' => {
                self.pop_to_mark()?;
            }
            b'2' => self.stack.push(self.top()?),
            // BINPUT, LONG_BINPUT, BINGET, LONG_BINGET
            opcode @ (b'q' | b'r') => {
                let key = self.memo_key(opcode == b'r')?;
                self.memo.insert(key, self.top()?);
            }
            opcode @ (b'h' | b'j') => {
                let key = self.memo_key(opcode == b'j')?;
                self.stack.push(*self.memo.get(&key).ok_or("it refers to a missing value")?);
            }

            // EMPTY_TUPLE, TUPLE, TUPLE1, TUPLE2, TUPLE3
            b')' => self.push(Value::Tuple(Vec::new())),
            b't' => {
                let items = self.pop_to_mark()?;
                self.push(Value::Tuple(items));
            }
            opcode @ 0x85..=0x87 => {
                let mut items = (0x85..=opcode).map(|_| self.pop()).collect::<Checked<Vec<_>>>()?;
                items.reverse();
                self.push(Value::Tuple(items));
            }
            // EMPTY_LIST, LIST, APPEND, APPENDS
            b']' => self.push(Value::List),
            b'l' => {
                self.pop_to_mark()?;
                self.push(Value::List);
            }
            b'a' => {
                self.pop()?;
                self.top()?;
            }
            b'e' => {
                self.pop_to_mark()?;
                self.top()?;
            }
            // EMPTY_DICT, DICT, SETITEM, SETITEMS
            b'}' => self.push(Value::Dict(Vec::new())),
            b'd' => {
                let items = self.pop_to_mark()?;
                self.push(Value::Dict(Vec::new()));
                self.set_items(&items)?;
            }
            b's' => {
                let (value, key) = (self.pop()?, self.pop()?);
                self.set_items(&[key, value])?;
            }
            b'u' => {
                let items = self.pop_to_mark()?;
                self.set_items(&items)?;
            }

            // REDUCE, NEWOBJ
            b'R' | 0x81 => {
                let (args, callable) = (self.pop()?, self.pop()?);
                self.push(match self.values[callable] {
                    Value::Class { module: "collections", name: "OrderedDict" | "defaultdict" } => {
                        Value::Dict(Vec::new())
                    }
                    _ => Value::Object { callable, args },
                });
            }
            // BUILD sets attributes, which are not needed.
            b'b' => {
                self.pop()?;
                self.top()?;
            }
            // BINPERSID
            b'Q' => {
                let id = self.pop()?;
                self.push(Value::Persistent(id));
            }
            opcode => return Err(format!("opcode {opcode:#04x} is unknown")),
        }
        Ok(None)
    }

    fn push(&mut self, value: Value<'a>) {
        self.stack.push(self.values.len());
        self.values.push(value);
    }

    /// The topmost value, which must be above the last mark.
    fn top(&self) -> Checked<Id> {
        let above = self.stack.get(self.marks.last().copied().unwrap_or(0)..);
        above.and_then(|above| above.last().copied()).ok_or_else(|| "its stack is empty".to_string())
    }

    fn pop(&mut self) -> Checked<Id> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn pop_to_mark(&mut self) -> Checked<Vec<Id>> {
        let mark = self.marks.pop().ok_or("a mark is missing")?;
        Ok(self.stack.split_off(mark))
    }

    /// Adds alternating keys and values to the dict on the stack. Any other object with items counts as an instance
    /// of a dict subclass.
    fn set_items(&mut self, items: &[Id]) -> Checked<()> {
        let target = self.top()?;
        if !items.len().is_multiple_of(2) {
            return Err("a key has no value".to_string());
        }
        let pairs = items.chunks_exact(2).map(|pair| (pair[0], pair[1]));
        match &mut self.values[target] {
            Value::Dict(entries) => entries.extend(pairs),
            object @ Value::Object { .. } => *object = Value::Dict(pairs.collect()),
            _ => return Err("an object other than a dict has items".to_string()),
        }
        Ok(())
    }

    fn take(&mut self, length: usize) -> Checked<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(length).ok_or("it ends too early")?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Checked<[u8; N]> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or("it ends too early")?;
        self.rest = rest;
        Ok(*taken)
    }

    fn line(&mut self) -> Checked<&'a str> {
        let length = self.rest.iter().position(|byte| *byte == b'\n').ok_or("it ends too early")?;
        let line = self.take(length + 1)?;
        std::str::from_utf8(&line[..length]).map_err(|_| "a class has no name".to_string())
    }

    fn memo_key(&mut self, long: bool) -> Checked<u32> {
        Ok(if long { u32::from_le_bytes(self.array()?) } else { self.array::<1>()?[0].into() })
    }

    /// An unsigned integer.
    fn int(&mut self, length: usize) -> Checked<()> {
        let value = self.take(length)?.iter().rev().fold(0, |value, byte| value << 8 | i64::from(*byte));
        self.push(Value::Int(value));
        Ok(())
    }

    /// An integer of any length in two's complement.
    fn long(&mut self, length: usize) -> Checked<()> {
        let bytes = self.take(length)?;
        let sign = bytes.last().map_or(0, |last| if *last < 0x80 { 0 } else { -1 });
        let value = bytes.iter().rev().fold(sign, |value, byte| value << 8 | i64::from(*byte));
        self.push(if length > 8 { Value::Other } else { Value::Int(value) });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_of_all_lengths_have_their_signs() {
        let int = |opcodes: &[u8]| {
            let bytes = [opcodes, b"."].concat();
            let pickle = Pickle::parse(&bytes).unwrap();
            match pickle[pickle.root()] {
                Value::Int(value) => Some(value),
                _ => None,
            }
        };
        assert_eq!(int(b"K\xff"), Some(255));
        assert_eq!(int(b"M\x01\xff"), Some(0xff01));
        assert_eq!(int(b"J\xfe\xff\xff\xff"), Some(-2));
        assert_eq!(int(b"\x8a\0"), Some(0));
        assert_eq!(int(b"\x8a\x01\xff"), Some(-1));
        assert_eq!(int(b"\x8a\x05\0\0\0\x80\0"), Some(1 << 31));
        assert_eq!(int(b"\x8a\x08\0\0\0\0\0\0\0\x80"), Some(i64::MIN));
        assert_eq!(int(b"\x8b\x02\0\0\0\x01\xff"), Some(-255));
        assert_eq!(int(b"\x8a\x09\0\0\0\0\0\0\0\0\x01"), None);
    }
}
