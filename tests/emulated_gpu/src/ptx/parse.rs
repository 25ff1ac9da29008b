//! Parsing the body of a function into statements: labels, declarations, instructions and their operands.
use super::types::Type;

#[derive(Debug)]
pub(super) enum Statement<'a> {
    Open,
    Close,
    Label(&'a str),
    /// `.reg`, `.local`, `.shared`, `.param`
    Declaration(&'a str),
    /// `name: .branchtargets a, b`
    Targets(&'a str, Vec<&'a str>),
    Instruction(Instruction<'a>),
}

#[derive(Debug)]
pub(super) struct Instruction<'a> {
    /// The predicate that guards it, and whether it is negated.
    pub(super) guard: Option<(&'a str, bool)>,
    pub(super) name: &'a str,
    pub(super) suffixes: Vec<&'a str>,
    pub(super) operands: Vec<Operand<'a>>,
    /// The source text.
    pub(super) text: &'a str,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Operand<'a> {
    /// A register, a variable, a label or a function.
    Name(&'a str),
    /// A variable's address plus an offset.
    Sum(&'a str, i64),
    Integer(u64),
    /// The bits of `0f3F800000`.
    F32(u32),
    F64(u64),
    Not(&'a str),
    Address(Box<Operand<'a>>, i64),
    Vector(Vec<Operand<'a>>),
    List(Vec<Operand<'a>>),
    Pair(Box<Operand<'a>>, Box<Operand<'a>>),
    /// `_`: the result is not needed.
    Nothing,
}

/// The suffixes of an instruction's name, removed one by one; any that remain are unsupported.
pub(super) struct Suffixes<'a>(Vec<&'a str>);

impl<'a> Suffixes<'a> {
    pub(super) fn take(&mut self, word: &str) -> bool {
        let found = self.0.iter().position(|suffix| *suffix == word);
        found.map(|at| self.0.remove(at)).is_some()
    }

    pub(super) fn take_one<T>(&mut self, choose: impl Fn(&'a str) -> Option<T>) -> Option<T> {
        let (at, chosen) = self.0.iter().enumerate().find_map(|(at, suffix)| Some((at, choose(suffix)?)))?;
        self.0.remove(at);
        Some(chosen)
    }

    /// Takes the type at the end.
    pub(super) fn take_type(&mut self) -> Option<Type> {
        let ty = Type::parse(self.0.last()?)?;
        self.0.pop();
        Some(ty)
    }

    pub(super) fn drop_all(&mut self, unimportant: impl Fn(&str) -> bool) {
        self.0.retain(|suffix| !unimportant(suffix));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<'a> Instruction<'a> {
    pub(super) fn suffixes(&self) -> Suffixes<'a> {
        Suffixes(self.suffixes.clone())
    }

    pub(super) fn unsupported(&self) -> String {
        let words: Vec<_> = self.text.split_whitespace().collect();
        format!("instruction not supported: `{}`", words.join(" "))
    }

    pub(super) fn operand(&self, index: usize) -> Result<&Operand<'a>, String> {
        self.operands.get(index).ok_or_else(|| self.unsupported())
    }

    fn parse(text: &'a str) -> Result<Self, String> {
        let refuse = || format!("cannot parse `{text}`");
        let (guard, rest) = match text.strip_prefix('@') {
            None => (None, text),
            Some(rest) => {
                let (guard, rest) = rest.trim_start().split_once(char::is_whitespace).ok_or_else(refuse)?;
                let positive = guard.trim_start_matches('!');
                (Some((positive, positive.len() < guard.len())), rest.trim_start())
            }
        };
        let end = rest.find(|c: char| c.is_whitespace() || "{[(".contains(c)).unwrap_or(rest.len());
        let (words, operands) = rest.split_at(end);
        let mut words = words.split('.');
        let name = words.next().unwrap_or_default();
        let operands = split_top(operands).into_iter().map(operand).collect::<Option<_>>().ok_or_else(refuse)?;
        Ok(Self { guard, name, suffixes: words.collect(), operands, text })
    }
}

pub(super) fn statements(body: &str) -> Result<Vec<Statement<'_>>, String> {
    let mut statements = Vec::new();
    let mut rest = body.trim_start();
    while let Some(first) = rest.chars().next() {
        if first == '{' || first == '}' {
            statements.push(if first == '{' { Statement::Open } else { Statement::Close });
            rest = rest[1..].trim_start();
            continue;
        }
        if rest.split_whitespace().next() == Some(".loc") {
            rest = rest.split_once('\n').map_or("", |(_, rest)| rest).trim_start();
            continue;
        }
        if let Some(end) = label(rest) {
            let (name, behind) = (&rest[..end], rest[end..].trim_start()[1..].trim_start());
            rest = behind;
            if let Some(list) = behind.strip_prefix(".branchtargets") {
                let (list, behind) = list.split_once(';').ok_or("missing `;` after `.branchtargets`")?;
                statements.push(Statement::Targets(name, list.split(',').map(str::trim).collect()));
                rest = behind.trim_start();
            } else {
                statements.push(Statement::Label(name));
            }
            continue;
        }
        let (text, behind) = rest.split_once(';').ok_or_else(|| format!("missing `;` after `{rest}`"))?;
        rest = behind.trim_start();
        let text = text.trim_end();
        if text.starts_with('.') && !text.starts_with(".pragma") {
            statements.push(Statement::Declaration(text));
        } else if !text.is_empty() && !text.starts_with('.') {
            statements.push(Statement::Instruction(Instruction::parse(text)?));
        }
    }
    Ok(statements)
}

fn in_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || "_$%".contains(c)
}

/// Returns the end of the label's name, if there is a label here.
fn label(text: &str) -> Option<usize> {
    let end = text.find(|c| !in_name(c))?;
    let behind = text[end..].trim_start();
    (end > 0 && behind.starts_with(':') && !behind.starts_with("::")).then_some(end)
}

/// Splits at commas that are not in brackets.
fn split_top(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'{' | b'[' | b'(' => depth += 1,
            b'}' | b']' | b')' => depth -= 1,
            b',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts.into_iter().map(str::trim).filter(|part| !part.is_empty()).collect()
}

fn operand(text: &str) -> Option<Operand<'_>> {
    let within = |close| Some(text[1..].strip_suffix(close)?.trim());
    let list = |text| split_top(text).into_iter().map(operand).collect::<Option<Vec<_>>>();
    Some(match text.chars().next()? {
        '{' => Operand::Vector(list(within('}')?)?),
        '(' => Operand::List(list(within(')')?)?),
        '[' => {
            let (base, offset) = sum(within(']')?)?;
            Operand::Address(Box::new(operand(base)?), offset)
        }
        '!' => Operand::Not(text[1..].trim_start()),
        '_' if text.len() == 1 => Operand::Nothing,
        '0'..='9' | '-' => number(text)?,
        _ => {
            if let Some((first, second)) = text.split_once('|') {
                return Some(Operand::Pair(Box::new(operand(first.trim())?), Box::new(operand(second.trim())?)));
            }
            match sum(text)? {
                (name, _) if !name.chars().all(|c| in_name(c) || c == '.') => return None,
                (name, 0) => Operand::Name(name),
                (name, offset) => Operand::Sum(name, offset),
            }
        }
    })
}

/// `name+8`, `name+-8`, `name-8`, `name`.
fn sum(text: &str) -> Option<(&str, i64)> {
    let Some(at) = text.find(['+', '-']).filter(|at| *at > 0) else { return Some((text, 0)) };
    let (base, offset) = text.split_at(at);
    match number(offset.trim_start_matches('+').trim())? {
        Operand::Integer(offset) => Some((base.trim(), offset as i64)),
        _ => None,
    }
}

pub(super) fn number(text: &str) -> Option<Operand<'_>> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits.trim_start()),
        None => (false, text),
    };
    let radix = |digits: &str, radix| u64::from_str_radix(digits.trim_end_matches('U'), radix).ok();
    let magnitude = match digits.get(..2).unwrap_or_default() {
        "0f" | "0F" => return radix(&digits[2..], 16).map(|bits| Operand::F32(bits as u32)),
        "0d" | "0D" => return radix(&digits[2..], 16).map(Operand::F64),
        "0x" | "0X" => radix(&digits[2..], 16)?,
        "0b" | "0B" => radix(&digits[2..], 2)?,
        _ if digits.contains('.') => {
            let value: f64 = text.parse().ok()?;
            return Some(Operand::F64(value.to_bits()));
        }
        _ if digits.len() > 1 && digits.starts_with('0') => radix(&digits[1..], 8)?,
        _ => radix(digits, 10)?,
    };
    Some(Operand::Integer(if negative { magnitude.wrapping_neg() } else { magnitude }))
}
