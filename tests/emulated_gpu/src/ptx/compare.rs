//! Comparisons and selection.
use super::body::Body;
use super::parse::{Instruction, Operand};
use super::types::{Kind, Type};

pub(super) fn translate<'m>(i: &Instruction<'m>, body: &mut Body<'_, 'm>) -> Result<String, String> {
    let mut suffixes = i.suffixes();
    let ty = suffixes.take_type().filter(|ty| ty.lanes == 1).ok_or_else(|| i.unsupported())?;
    if i.name == "selp" {
        let (yes, no) = (body.bits(i.operand(1)?, ty)?, body.bits(i.operand(2)?, ty)?);
        let predicate = body.bits(i.operand(3)?, ty)?;
        return body.assign(i.operand(0)?, &format!("{predicate} ? {yes} : {no}"));
    }
    let result = if i.name == "set" { suffixes.take_type() } else { None };
    let flush = suffixes.take("ftz") && ty.bits == 32;
    let comparison = suffixes.take_one(|suffix| operator(suffix, ty)).ok_or_else(|| i.unsupported())?;
    let combine = suffixes.take_one(|suffix| match suffix {
        "and" => Some("&"),
        "or" => Some("|"),
        "xor" => Some("^"),
        _ => None,
    });
    if !suffixes.is_empty() {
        return Err(i.unsupported());
    }
    // hs, hi, ls and lo compare without signs, whatever the type.
    let ty = if ty.is_integer() && comparison.unsigned { Type { kind: Kind::Unsigned, ..ty } } else { ty };
    let (mut a, mut b) = (body.value(i.operand(1)?, ty)?, body.value(i.operand(2)?, ty)?);
    if flush {
        (a, b) = (format!("flush({a})"), format!("flush({b})"));
    }
    let fill = |c| match c {
        'A' => a.clone(),
        'B' => b.clone(),
        other => String::from(other),
    };
    let holds: String = comparison.text.chars().map(fill).collect();
    let with = match combine {
        Some(operator) => format!("{operator} ({})", body.bits(i.operand(3)?, Type::bits(8))?),
        None => String::new(),
    };
    let outcome = format!("({holds}) {with}");
    if i.name == "set" {
        let result = result.filter(|ty| ty.lanes == 1).ok_or_else(|| i.unsupported())?;
        let value = if result.is_float() { result.bits_of("1") } else { result.bits_of("-1") };
        return body.assign(i.operand(0)?, &format!("({outcome}) ? {value} : 0"));
    }
    match i.operand(0)? {
        Operand::Pair(first, second) => {
            let first = body.assign(first, "outcome_")?;
            let second = body.assign(second, "opposite_")?;
            let opposite = format!("(!({holds})) {with}");
            Ok(format!("{{ int outcome_ = {outcome}, opposite_ = {opposite}; {first} {second} }}"))
        }
        single => body.assign(single, &outcome),
    }
}

struct Comparison {
    text: &'static str,
    unsigned: bool,
}

fn operator(suffix: &str, ty: Type) -> Option<Comparison> {
    let float = ty.is_float();
    let (text, unsigned) = match suffix {
        "eq" => ("A == B", false),
        "ne" if float => ("A < B || A > B", false),
        "ne" => ("A != B", false),
        "lt" => ("A < B", false),
        "le" => ("A <= B", false),
        "gt" => ("A > B", false),
        "ge" => ("A >= B", false),
        "lo" if !float => ("A < B", true),
        "ls" if !float => ("A <= B", true),
        "hi" if !float => ("A > B", true),
        "hs" if !float => ("A >= B", true),
        // These are true if one of the operands is NaN.
        "equ" if float => ("!(A < B || A > B)", false),
        "neu" if float => ("A != B", false),
        "ltu" if float => ("!(A >= B)", false),
        "leu" if float => ("!(A > B)", false),
        "gtu" if float => ("!(A <= B)", false),
        "geu" if float => ("!(A < B)", false),
        "num" if float => ("A == A && B == B", false),
        "nan" if float => ("A != A || B != B", false),
        _ => return None,
    };
    Some(Comparison { text, unsigned })
}
