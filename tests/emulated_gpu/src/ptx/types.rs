//! The types of instructions, and the C code that converts between their values and the bits of registers.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Unsigned,
    Signed,
    Bits,
    Float,
    /// bf16.
    Brain,
    /// e4m3.
    Eight,
    Predicate,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Type {
    pub(super) kind: Kind,
    /// The bits of each lane.
    pub(super) bits: usize,
    pub(super) lanes: usize,
}

impl Type {
    pub(super) fn parse(word: &str) -> Option<Self> {
        let (kind, bits, lanes) = match word {
            "pred" => (Kind::Predicate, 8, 1),
            "f16" => (Kind::Float, 16, 1),
            "f32" => (Kind::Float, 32, 1),
            "f64" => (Kind::Float, 64, 1),
            "f16x2" => (Kind::Float, 16, 2),
            "bf16" => (Kind::Brain, 16, 1),
            "bf16x2" => (Kind::Brain, 16, 2),
            "e4m3x2" => (Kind::Eight, 8, 2),
            _ => {
                let kind = match word.get(..1)? {
                    "u" => Kind::Unsigned,
                    "s" => Kind::Signed,
                    "b" => Kind::Bits,
                    _ => return None,
                };
                (kind, [8, 16, 32, 64].into_iter().find(|bits| word[1..] == bits.to_string())?, 1)
            }
        };
        Some(Self { kind, bits, lanes })
    }

    pub(super) fn bits(bits: usize) -> Self {
        Self { kind: Kind::Bits, bits, lanes: 1 }
    }

    pub(super) fn bytes(self) -> usize {
        self.bits * self.lanes / 8
    }

    pub(super) fn is_float(self) -> bool {
        matches!(self.kind, Kind::Float | Kind::Brain)
    }

    pub(super) fn is_integer(self) -> bool {
        matches!(self.kind, Kind::Unsigned | Kind::Signed | Kind::Bits)
    }

    /// Returns `f32`, `u16` and so on, for one lane.
    pub(super) fn name(self) -> String {
        let letter = match self.kind {
            Kind::Signed => "s",
            Kind::Unsigned | Kind::Bits => "u",
            Kind::Float => "f",
            Kind::Brain => "bf",
            Kind::Eight => return "e4m3".to_string(),
            Kind::Predicate => return "pred".to_string(),
        };
        format!("{letter}{}", self.bits)
    }

    /// Returns the C type of the bits of all lanes.
    pub(super) fn c_bits(self) -> String {
        if self.kind == Kind::Predicate { "int".to_string() } else { format!("uint{}_t", self.bytes() * 8) }
    }

    /// Returns the C type in memory, which is signed for signed types, so that values are sign-extended.
    pub(super) fn c_memory(self) -> String {
        if self.kind == Kind::Signed { format!("int{}_t", self.bits) } else { self.c_bits() }
    }

    /// Returns the value of one lane with these bits.
    pub(super) fn value(self, bits: &str) -> String {
        match self.kind {
            Kind::Signed => format!("(int{}_t)({bits})", self.bits),
            Kind::Unsigned | Kind::Bits => format!("(uint{}_t)({bits})", self.bits),
            Kind::Predicate => bits.to_string(),
            Kind::Float | Kind::Brain | Kind::Eight => format!("{}({bits})", self.name()),
        }
    }

    /// Returns the bits of one lane with this value.
    pub(super) fn bits_of(self, value: &str) -> String {
        match self.kind {
            Kind::Signed => format!("(int{}_t)({value})", self.bits),
            Kind::Unsigned | Kind::Bits => format!("(uint{}_t)({value})", self.bits),
            Kind::Predicate => format!("({value})"),
            Kind::Float | Kind::Brain | Kind::Eight => format!("{}_bits({value})", self.name()),
        }
    }
}
