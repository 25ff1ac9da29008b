//! Loads, stores, atomic operations, and `mov`.
use super::body::Body;
use super::module::Space;
use super::parse::{Instruction, Operand, Suffixes};
use super::types::{Kind, Type};
use std::fmt::Write;

pub(super) fn translate<'m>(i: &Instruction<'m>, body: &mut Body<'_, 'm>) -> Result<String, String> {
    match i.name {
        "mov" => mov(i, body),
        "cvta" => cvta(i, body),
        "atom" | "red" => atomic(i, body),
        "prefetch" | "prefetchu" => Ok(String::new()),
        _ => load_or_store(i, body),
    }
}

/// Returns the state space, ignoring its scope (as in `shared::cta`).
fn space(suffixes: &mut Suffixes) -> Space {
    let found = suffixes.take_one(|suffix| match suffix {
        "shared::cluster" => None,
        _ => Space::parse(suffix.split("::").next().unwrap_or_default()),
    });
    found.unwrap_or(Space::Generic)
}

/// Returns whether the suffix only concerns caches or memory order, which need no emulation: all accesses are ordered.
fn unimportant(suffix: &str) -> bool {
    let known = [
        "nc", "ca", "cg", "cs", "cv", "lu", "wb", "wt", "weak", "relaxed", "acquire", "release", "acq_rel", "sc",
        "cta", "cluster", "gpu", "sys", "noftz",
    ];
    known.contains(&suffix) || (suffix.contains("::") && suffix.starts_with('L'))
}

/// Returns the C address of an access of this many bytes.
fn address<'m>(
    i: &Instruction<'m>,
    operand: &Operand<'m>,
    space: Space,
    bytes: usize,
    body: &mut Body<'_, 'm>,
) -> Result<String, String> {
    let Operand::Address(base, offset) = operand else { return Err(i.unsupported()) };
    let ty = Type { kind: Kind::Unsigned, bits: if space == Space::Shared { 32 } else { 64 }, lanes: 1 };
    let base = body.value(base, ty)?;
    let sum = if *offset == 0 { base } else { format!("{base} + {offset}") };
    Ok(match space {
        Space::Shared => format!("shared_at(t, {sum}, {bytes})"),
        Space::Parameter => format!("({sum})"),
        _ => format!("aligned({sum}, {bytes})"),
    })
}

fn load_or_store<'m>(i: &Instruction<'m>, body: &mut Body<'_, 'm>) -> Result<String, String> {
    let mut suffixes = i.suffixes();
    let ty = suffixes.take_type().filter(|ty| ty.kind != Kind::Predicate).ok_or_else(|| i.unsupported())?;
    let space = space(&mut suffixes);
    // Other threads may be waiting for the value to change.
    let strong = i.suffixes.iter().any(|suffix| ["volatile", "relaxed", "acquire", "release", "mmio"].contains(suffix));
    suffixes.drop_all(|suffix| unimportant(suffix) || suffix == "volatile" || suffix == "mmio");
    let count = suffixes.take_one(|suffix| match suffix {
        "v2" => Some(2),
        "v4" => Some(4),
        "v8" => Some(8),
        _ => None,
    });
    if !suffixes.is_empty() {
        return Err(i.unsupported());
    }
    let store = i.name == "st";
    let (location, registers) = if store { (i.operand(0)?, i.operand(1)?) } else { (i.operand(1)?, i.operand(0)?) };
    let registers = match registers {
        Operand::Vector(registers) => &registers[..],
        single => std::slice::from_ref(single),
    };
    if registers.len() != count.unwrap_or(1) {
        return Err(i.unsupported());
    }
    let location = address(i, location, space, ty.bytes() * registers.len(), body)?;
    let volatile = if strong { "volatile " } else { "" };
    let memory = format!("{volatile}{}", ty.c_memory());
    let mut code = format!("{{ uintptr_t at_ = {location}; ");
    for (index, register) in registers.iter().enumerate() {
        let at = format!("at_ + {}", index * ty.bytes());
        if store {
            let bits = body.bits(register, ty)?;
            _ = write!(code, "STORE({memory}, {at}, {bits}); ");
        } else if *register != Operand::Nothing {
            // The address may be in a register that is written.
            code += &body.assign(register, &format!("LOAD({memory}, {at})"))?;
        }
    }
    Ok(code + "}")
}

fn atomic<'m>(i: &Instruction<'m>, body: &mut Body<'_, 'm>) -> Result<String, String> {
    let mut suffixes = i.suffixes();
    let ty = suffixes.take_type().ok_or_else(|| i.unsupported())?;
    let space = space(&mut suffixes);
    suffixes.drop_all(unimportant);
    let names = ["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"];
    let name = suffixes.take_one(|suffix| names.contains(&suffix).then_some(suffix)).ok_or_else(|| i.unsupported())?;
    if !suffixes.is_empty() || ![2, 4, 8].contains(&ty.bytes()) {
        return Err(i.unsupported());
    }
    let first = usize::from(i.name == "atom");
    let location = address(i, i.operand(first)?, space, ty.bytes(), body)?;
    let operand = i.operand(first + 1)?;
    let (old, new): (Vec<String>, Vec<String>) = match ty.lanes {
        1 => (vec![ty.value("old")], body.lanes(operand, ty)?),
        _ => (vec![ty.value("old"), ty.value(&format!("old >> {}", ty.bits))], body.lanes(operand, ty)?),
    };
    let mut lanes = Vec::new();
    for (old, new) in old.iter().zip(&new) {
        lanes.push(match name {
            "add" => format!("{old} + {new}"),
            "exch" => new.clone(),
            "min" if ty.is_integer() => format!("{old} < {new} ? {old} : {new}"),
            "max" if ty.is_integer() => format!("{old} > {new} ? {old} : {new}"),
            "and" if ty.is_integer() => format!("{old} & {new}"),
            "or" if ty.is_integer() => format!("{old} | {new}"),
            "xor" if ty.is_integer() => format!("{old} ^ {new}"),
            "inc" if ty.is_integer() => format!("{old} >= {new} ? 0 : {old} + 1"),
            "dec" if ty.is_integer() => format!("{old} == 0 || {old} > {new} ? {new} : {old} - 1"),
            "cas" if ty.is_integer() => {
                let replacement = body.value(i.operand(first + 2)?, ty)?;
                format!("{old} == {new} ? {replacement} : {old}")
            }
            _ => return Err(i.unsupported()),
        });
    }
    let value = Body::join(ty, &lanes);
    let exchange = format!("ATOMIC({}, {location}, {value})", ty.c_bits());
    if first == 0 {
        return Ok(format!("(void){exchange};"));
    }
    let extended = if ty.kind == Kind::Signed { format!("({}){exchange}", ty.c_memory()) } else { exchange };
    body.assign(i.operand(0)?, &extended)
}

/// Moves between a register, a constant or an address and a register; or between a register and its parts.
fn mov<'m>(i: &Instruction<'m>, body: &mut Body<'_, 'm>) -> Result<String, String> {
    let mut suffixes = i.suffixes();
    let ty = suffixes.take_type().filter(|_| suffixes.is_empty()).ok_or_else(|| i.unsupported())?;
    let whole = Type::bits(ty.bytes() * 8);
    match (i.operand(0)?, i.operand(1)?) {
        (Operand::Vector(parts), value) => {
            let value = body.bits(value, ty)?;
            let part = ty.bytes() * 8 / parts.len();
            let mut code = format!("{{ {} whole_ = {value}; ", whole.c_bits());
            for (index, register) in parts.iter().enumerate() {
                let bits = Type::bits(part).value(&format!("whole_ >> {}", index * part));
                code += &body.assign(register, &bits)?;
            }
            Ok(code + " }")
        }
        (register, Operand::Vector(parts)) => {
            let part = Type::bits(ty.bytes() * 8 / parts.len());
            let mut joined = Vec::new();
            for (index, operand) in parts.iter().enumerate() {
                joined.push(format!("({}){} << {}", whole.c_bits(), body.value(operand, part)?, index * part.bits));
            }
            body.assign(register, &joined.join(" | "))
        }
        (register, value) => {
            let bits = body.bits(value, ty)?;
            body.assign(register, &bits)
        }
    }
}

/// Only shared addresses, which are offsets, differ from generic ones.
fn cvta<'m>(i: &Instruction<'m>, body: &mut Body<'_, 'm>) -> Result<String, String> {
    let mut suffixes = i.suffixes();
    suffixes.take_type().ok_or_else(|| i.unsupported())?;
    let to = suffixes.take("to");
    let space = space(&mut suffixes);
    if !suffixes.is_empty() || space == Space::Generic {
        return Err(i.unsupported());
    }
    let bits = body.bits(i.operand(1)?, Type::bits(64))?;
    let address = match (space, to) {
        (Space::Shared, true) => format!("{bits} - (uintptr_t)t->shared"),
        (Space::Shared, false) => format!("(uintptr_t)t->shared + (uint32_t)({bits})"),
        _ => bits,
    };
    body.assign(i.operand(0)?, &address)
}
