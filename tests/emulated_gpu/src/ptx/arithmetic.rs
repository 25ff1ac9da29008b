//! Arithmetic, logic and shifts.
use super::body::Body;
use super::parse::{Instruction, Suffixes};
use super::types::{Kind, Type};

pub(super) fn translate<'m>(i: &Instruction<'m>, body: &mut Body<'_, 'm>) -> Result<String, String> {
    let mut suffixes = i.suffixes();
    let ty = suffixes.take_type().ok_or_else(|| i.unsupported())?;
    let result = match (i.name, ty.kind) {
        ("and" | "or" | "xor" | "not" | "shl" | "shf" | "bfi" | "brev" | "clz" | "popc" | "prmt" | "lop3", _) => {
            logic(i, ty, &mut suffixes, body)?
        }
        ("abs" | "neg", Kind::Float | Kind::Brain) => sign(i, ty, &mut suffixes, body)?,
        (_, Kind::Float | Kind::Brain) => floats(i, ty, &mut suffixes, body)?,
        (_, Kind::Unsigned | Kind::Signed | Kind::Bits) => return integers(i, ty, suffixes, body),
        _ => return Err(i.unsupported()),
    };
    if !suffixes.is_empty() {
        return Err(i.unsupported());
    }
    body.assign(i.operand(0)?, &result)
}

/// Clears or inverts the sign bits of all lanes.
fn sign<'m>(i: &Instruction<'m>, ty: Type, suffixes: &mut Suffixes, body: &mut Body<'_, 'm>) -> Result<String, String> {
    suffixes.take("ftz");
    let bits = body.bits(i.operand(1)?, ty)?;
    let signs = (0..ty.lanes).fold(0, |signs, lane| signs | 1_u64 << (ty.bits * (lane + 1) - 1));
    Ok(if i.name == "abs" { format!("{bits} & ~{signs:#x}ull") } else { format!("{bits} ^ {signs:#x}ull") })
}

fn floats<'m>(
    i: &Instruction<'m>,
    ty: Type,
    suffixes: &mut Suffixes,
    body: &mut Body<'_, 'm>,
) -> Result<String, String> {
    let rounding =
        suffixes.take_one(|suffix| ["rn", "rz", "rm", "rp"].contains(&suffix).then_some(suffix)).unwrap_or("rn");
    let flush = suffixes.take("ftz") && ty.bits == 32;
    let (saturate, relu, nan) = (suffixes.take("sat"), suffixes.take("relu"), suffixes.take("NaN"));
    // Approximate operations are exact here.
    suffixes.drop_all(|suffix| ["approx", "full"].contains(&suffix));
    let wide = if ty.bits == 64 { "f64" } else { "f32" };
    let mut operands = Vec::new();
    for operand in i.operands.iter().skip(1) {
        operands.push(body.lanes(operand, ty)?);
    }
    let mut lanes = Vec::new();
    for lane in 0..ty.lanes {
        let flushed = |operand: &Vec<String>| match flush {
            true => format!("flush({})", operand[lane]),
            false => operand[lane].clone(),
        };
        let arguments: Vec<String> = operands.iter().map(flushed).collect();
        let mut value = float(i.name, ty, rounding, nan, &arguments).ok_or_else(|| i.unsupported())?;
        if saturate {
            value = format!("saturate_{wide}({value})");
        }
        if relu {
            value = format!("max_{wide}_nan({value}, 0)");
        }
        lanes.push(if flush { format!("flush({value})") } else { value });
    }
    Ok(Body::join(ty, &lanes))
}

/// Returns the value of one lane. f16 and bf16 are computed as f32 and rounded when they are written.
fn float(name: &str, ty: Type, rounding: &str, nan: bool, arguments: &[String]) -> Option<String> {
    let wide = if ty.bits == 64 { "f64" } else { "f32" };
    let f = if ty.bits == 64 { "" } else { "f" };
    let mode = match rounding {
        "rz" => "FE_TOWARDZERO",
        "rm" => "FE_DOWNWARD",
        _ => "FE_UPWARD",
    };
    let directed = rounding != "rn";
    let nan = if nan { "_nan" } else { "" };
    Some(match (name, arguments) {
        (_, [..]) if directed && ty.bits == 16 => return None,
        ("add", [a, b]) if directed && ty.bits == 32 => format!("narrow_{rounding}(odd_sum({a}, {b}))"),
        ("sub", [a, b]) if directed && ty.bits == 32 => format!("narrow_{rounding}(odd_sum({a}, -{b}))"),
        ("mul", [a, b]) if directed && ty.bits == 32 => format!("narrow_{rounding}((double){a} * {b})"),
        ("fma" | "mad", [a, b, c]) if directed && ty.bits == 32 => {
            format!("narrow_{rounding}(odd_sum((double){a} * {b}, {c}))")
        }
        ("div", [a, b]) if directed && ty.bits == 32 => {
            format!("narrow_{rounding}(directed_div({a}, {b}, 0, {mode}))")
        }
        ("rcp", [a]) if directed && ty.bits == 32 => format!("narrow_{rounding}(directed_div(1, {a}, 0, {mode}))"),
        ("sqrt", [a]) if directed && ty.bits == 32 => {
            format!("narrow_{rounding}(directed_sqrt({a}, 0, 0, {mode}))")
        }
        ("add" | "sub" | "mul" | "div", [a, b]) if directed => format!("directed_{name}({a}, {b}, 0, {mode})"),
        ("fma" | "mad", [a, b, c]) if directed => format!("directed_fma({a}, {b}, {c}, {mode})"),
        ("rcp", [a]) if directed => format!("directed_div(1, {a}, 0, {mode})"),
        ("sqrt", [a]) if directed => format!("directed_sqrt({a}, 0, 0, {mode})"),
        (_, [..]) if directed => return None,
        ("add", [a, b]) => format!("({a} + {b})"),
        ("sub", [a, b]) => format!("({a} - {b})"),
        ("mul", [a, b]) if ty.kind == Kind::Brain => format!("mul_bf16({a}, {b})"),
        ("mul", [a, b]) => format!("({a} * {b})"),
        ("div", [a, b]) => format!("({a} / {b})"),
        ("fma" | "mad", [a, b, c]) if ty.bits == 16 => format!("fma_16({a}, {b}, {c})"),
        ("fma" | "mad", [a, b, c]) => format!("fma{f}({a}, {b}, {c})"),
        ("min" | "max", [a, b]) => format!("{name}_{wide}{nan}({a}, {b})"),
        ("min" | "max", [a, b, c]) => format!("{name}_{wide}{nan}({name}_{wide}{nan}({a}, {b}), {c})"),
        ("copysign", [a, b]) => format!("copysign{f}({b}, {a})"),
        ("sqrt", [a]) => format!("sqrt{f}({a})"),
        ("rcp", [a]) => format!("(1 / {a})"),
        ("rsqrt", [a]) if ty.bits == 64 => format!("(1 / sqrt({a}))"),
        ("rsqrt", [a]) => format!("(float)(1 / sqrt({a}))"),
        ("ex2", [a]) => format!("exp2{f}({a})"),
        ("lg2", [a]) => format!("log2{f}({a})"),
        ("sin" | "cos" | "tanh", [a]) => format!("{name}{f}({a})"),
        _ => return None,
    })
}

fn integers<'m>(
    i: &Instruction<'m>,
    ty: Type,
    mut suffixes: Suffixes,
    body: &mut Body<'_, 'm>,
) -> Result<String, String> {
    let part = suffixes.take_one(|suffix| ["lo", "hi", "wide"].contains(&suffix).then_some(suffix));
    let carry = suffixes.take("cc") || ["addc", "subc", "madc"].contains(&i.name);
    if !suffixes.is_empty() {
        return Err(i.unsupported());
    }
    let signed = ty.kind == Kind::Signed;
    let double = format!("{}int{}_t", if signed { "" } else { "u" }, ty.bits * 2);
    let product_type = if part == Some("wide") { Type { bits: ty.bits * 2, ..ty } } else { ty };
    let mut arguments = Vec::new();
    for (index, operand) in i.operands.iter().enumerate().skip(1) {
        let ty = match (i.name, index) {
            ("mad", 3) => product_type,
            ("shr", 2) | ("bfe", 2 | 3) => Type { kind: Kind::Unsigned, bits: 32, lanes: 1 },
            _ => ty,
        };
        arguments.push(body.value(operand, ty)?);
    }
    let product = |a: &str, b: &str| match part {
        Some("lo") => Some(format!("({a} * {b})")),
        Some("hi") => Some(format!("({})((({double}){a} * {b}) >> {})", ty.c_memory(), ty.bits)),
        Some("wide") => Some(format!("(({double}){a} * {b})")),
        _ => None,
    };
    let most = ty.bits - 1;
    let sign = if signed { "S" } else { "U" };
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let value = match (i.name, &arguments[..]) {
        (_, arguments) if carry => return with_carry(i, ty, &product, arguments, body),
        ("add", [a, b]) => Some(format!("{a} + {b}")),
        ("sub", [a, b]) => Some(format!("{a} - {b}")),
        ("mul", [a, b]) => product(a, b),
        ("mad", [a, b, c]) => product(a, b).map(|product| format!("{product} + {c}")),
        ("div", [a, b]) => Some(format!("DIVIDE_{sign}({a}, {b})")),
        ("rem", [a, b]) => Some(format!("REMAINDER_{sign}({a}, {b})")),
        ("min", [a, b]) => Some(format!("{a} < {b} ? {a} : {b}")),
        ("max", [a, b]) => Some(format!("{a} > {b} ? {a} : {b}")),
        ("abs", [a]) => Some(format!("{a} < 0 ? -{a} : {a}")),
        ("neg", [a]) => Some(format!("-{a}")),
        ("sad", [a, b, c]) => Some(format!("({a} < {b} ? {b} - {a} : {a} - {b}) + {c}")),
        ("shr", [a, b]) if signed => Some(format!("{a} >> ({b} > {most} ? {most} : {b})")),
        ("shr", [a, b]) => Some(format!("{b} > {most} ? 0 : {a} >> {b}")),
        ("bfe", [a, b, c]) if signed => Some(format!("bit_field_s({a}, {b}, {c}, {})", ty.bits)),
        ("bfe", [a, b, c]) => Some(format!("bit_field_u({a}, {b}, {c})")),
        _ => None,
    };
    let value = value.ok_or_else(|| i.unsupported())?;
    body.assign(i.operand(0)?, &product_type.bits_of(&value))
}

/// Additions and subtractions of multi-word numbers.
fn with_carry<'m>(
    i: &Instruction<'m>,
    ty: Type,
    product: &dyn Fn(&str, &str) -> Option<String>,
    arguments: &[&str],
    body: &mut Body<'_, 'm>,
) -> Result<String, String> {
    let unsigned = format!("uint{}_t", ty.bits);
    let double = format!("uint{}_t", ty.bits * 2);
    let (first, operator, second) = match (i.name, arguments) {
        ("add" | "addc", [a, b]) => (a.to_string(), '+', b),
        ("sub" | "subc", [a, b]) => (a.to_string(), '-', b),
        ("mad" | "madc", [a, b, c]) => (product(a, b).ok_or_else(|| i.unsupported())?, '+', c),
        _ => return Err(i.unsupported()),
    };
    let before = if i.name.ends_with('c') { format!("{operator} carry") } else { String::new() };
    let sum = format!("({double})({unsigned}){first} {operator} ({unsigned}){second} {before}");
    let assign = body.assign(i.operand(0)?, &format!("({unsigned})sum_"))?;
    let carry = if i.suffixes.contains(&"cc") { format!("carry = sum_ >> {} & 1;", ty.bits) } else { String::new() };
    Ok(format!("{{ {double} sum_ = {sum}; {assign} {carry} }}"))
}

fn logic<'m>(
    i: &Instruction<'m>,
    ty: Type,
    suffixes: &mut Suffixes,
    body: &mut Body<'_, 'm>,
) -> Result<String, String> {
    let unsigned = Type { kind: if ty.kind == Kind::Predicate { ty.kind } else { Kind::Unsigned }, ..ty };
    let word = Type { kind: Kind::Unsigned, bits: 32, lanes: 1 };
    let mut arguments = Vec::new();
    for (index, operand) in i.operands.iter().enumerate().skip(1) {
        let counts = matches!((i.name, index), ("shl", 2) | ("bfi", 3 | 4) | ("shf", 3) | ("lop3", 4));
        arguments.push(body.value(operand, if counts { word } else { unsigned })?);
    }
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let clamp = suffixes.take("clamp");
    let count = |c: &str| if clamp { format!("({c} > 32 ? 32 : {c})") } else { format!("({c} & 31)") };
    let (bits, width) = (ty.bits, unsigned.c_bits());
    let value = match (i.name, &arguments[..]) {
        ("and", [a, b]) => format!("{a} & {b}"),
        ("or", [a, b]) => format!("{a} | {b}"),
        ("xor", [a, b]) => format!("{a} ^ {b}"),
        ("not", [a]) if ty.kind == Kind::Predicate => format!("!{a}"),
        ("not", [a]) => format!("({width})~{a}"),
        ("shl", [a, b]) => format!("{b} > {} ? 0 : {a} << {b}", bits - 1),
        ("shf", [a, b, c]) if suffixes.take("l") && (suffixes.take("wrap") || clamp) => {
            format!("(((uint64_t){b} << 32 | {a}) << {}) >> 32", count(c))
        }
        ("shf", [a, b, c]) if suffixes.take("r") && (suffixes.take("wrap") || clamp) => {
            format!("(uint32_t)(((uint64_t){b} << 32 | {a}) >> {})", count(c))
        }
        ("bfi", [a, b, c, d]) => format!("bit_insert({a}, {b}, {c}, {d}, {bits})"),
        ("brev", [a]) => format!("reverse_bits({a}, {bits})"),
        ("clz", [a]) => format!("({a} == 0 ? {bits} : __builtin_clzll({a}) - {})", 64 - bits),
        ("popc", [a]) => format!("__builtin_popcountll({a})"),
        ("prmt", [a, b, c]) => format!("permute_bytes({a}, {b}, {c})"),
        ("lop3", [a, b, c, table]) => format!("logic_3({a}, {b}, {c}, {table})"),
        _ => return Err(i.unsupported()),
    };
    Ok(value)
}
