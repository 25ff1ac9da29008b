//! `cvt`: conversions between types.
use super::body::Body;
use super::parse::Instruction;
use super::types::{Kind, Type};

pub(super) fn translate<'m>(i: &Instruction<'m>, body: &mut Body<'_, 'm>) -> Result<String, String> {
    let mut suffixes = i.suffixes();
    let (from, to) = (suffixes.take_type(), suffixes.take_type());
    let (from, to) = from.zip(to).ok_or_else(|| i.unsupported())?;
    let rounding = suffixes
        .take_one(|suffix| ["rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi"].contains(&suffix).then_some(suffix));
    let flush = suffixes.take("ftz") && (from.bits == 32 || to.bits == 32);
    let options = Options {
        rounding: rounding.unwrap_or("rn"),
        saturate: suffixes.take("sat"),
        relu: suffixes.take("relu"),
        finite: suffixes.take("satfinite"),
        flush,
    };
    let options = Some(options).filter(|_| suffixes.is_empty());
    let mut lanes = Vec::new();
    if to.lanes == 2 && from.lanes == 1 {
        // The last operand becomes the lowest lane.
        for operand in i.operands[1..].iter().rev() {
            lanes.push(body.value(operand, from)?);
        }
    } else {
        lanes = body.lanes(i.operand(1)?, from)?;
    }
    let convert = |value: &String| convert(value, from, to, options.as_ref()?);
    let converted = lanes.iter().map(convert).collect::<Option<Vec<_>>>().filter(|lanes| lanes.len() == to.lanes);
    let converted = converted.ok_or_else(|| i.unsupported())?;
    body.assign(i.operand(0)?, &Body::join(to, &converted))
}

struct Options<'a> {
    rounding: &'a str,
    saturate: bool,
    relu: bool,
    finite: bool,
    flush: bool,
}

/// Converts the value of one lane; [`Type::bits_of`] accepts the result.
fn convert(value: &str, from: Type, to: Type, options: &Options) -> Option<String> {
    let &Options { rounding, saturate, relu, finite, flush } = options;
    let eight = from.kind == Kind::Eight || to.kind == Kind::Eight;
    // GPUs only convert f32 to e4m3 and e4m3 to f16; `satfinite` is not supported for other types.
    if from.kind == Kind::Predicate || to.kind == Kind::Predicate || finite != (to.kind == Kind::Eight) {
        return None;
    }
    if eight {
        return (rounding == "rn" && !saturate && !relu).then(|| value.to_string());
    }
    match (from.is_float(), to.is_float()) {
        (false, false) if saturate => Some(clamp(value, from, to)),
        (false, false) => Some(value.to_string()),
        (false, true) => integer_to_float(value, from, to, rounding).map(|value| saturated(value, to, saturate)),
        (true, false) => {
            let value = if flush { format!("flush({value})") } else { value.to_string() };
            let rounded = to_integer(&value, from, rounding)?;
            // The result for NaN.
            let nan = match from.bits == 64 || to.bits == 64 {
                true => format!("({})1 << {}", to.c_memory(), to.bits - 1),
                false => "0".to_string(),
            };
            Some(format!("to_{}({rounded}, {nan})", to.name()))
        }
        (true, true) => {
            let mut value = if flush && from.bits == 32 { format!("flush({value})") } else { value.to_string() };
            if rounding.ends_with('i') {
                value = to_integer(&value, from, rounding)?;
            }
            // Saturation does not affect rounding, because every type represents 0 and 1.
            if relu {
                value = format!("max_{}_nan({value}, 0)", if from.bits == 64 { "f64" } else { "f32" });
            }
            let value = float_to_float(&saturated(value, from, saturate), from, to, rounding)?;
            Some(if flush && to.bits == 32 { format!("flush({value})") } else { value })
        }
    }
}

fn saturated(value: String, ty: Type, saturate: bool) -> String {
    if saturate { format!("saturate_{}({value})", if ty.bits == 64 { "f64" } else { "f32" }) } else { value }
}

fn to_integer(value: &str, from: Type, rounding: &str) -> Option<String> {
    let function = match rounding {
        "rni" => "rint",
        "rzi" => "trunc",
        "rmi" => "floor",
        "rpi" => "ceil",
        _ => return None,
    };
    Some(format!("{function}{}({value})", if from.bits == 64 { "" } else { "f" }))
}

fn float_to_float(value: &str, from: Type, to: Type, rounding: &str) -> Option<String> {
    let exact = to.bits > from.bits || (from == to);
    Some(match (to.kind, to.bits, rounding) {
        _ if exact => value.to_string(),
        (_, 32, "rn") => format!("(float){value}"),
        (_, 32, "rz" | "rm" | "rp") => format!("narrow_{rounding}({value})"),
        (_, 16, "rn") if from.bits == 64 => format!("odd_f32({value})"),
        (_, 16, "rn") => value.to_string(),
        // A number with 8 bits of mantissa is rounded to itself.
        (Kind::Brain, 16, "rz") if from.bits == 32 => format!("bf16(bf16_bits_rz({value}))"),
        _ => return None,
    })
}

fn integer_to_float(value: &str, from: Type, to: Type, rounding: &str) -> Option<String> {
    let signed = from.kind == Kind::Signed;
    // Exact for up to 32 bits.
    let double = match (from.bits, signed) {
        (64, true) => format!("odd_s64({value})"),
        (64, false) => format!("odd_u64({value})"),
        _ => format!("(double){value}"),
    };
    Some(match (to.bits, rounding) {
        (64, "rn") => format!("(double){value}"),
        (64, _) if from.bits <= 32 => format!("(double){value}"),
        (32, "rn") => format!("(float){value}"),
        (32, "rz" | "rm" | "rp") => format!("narrow_{rounding}({double})"),
        (16, "rn") => format!("odd_f32({double})"),
        _ => return None,
    })
}

/// Converts between integers with saturation.
fn clamp(value: &str, from: Type, to: Type) -> String {
    let limits = |ty: Type| match ty.kind {
        Kind::Signed => (-(1_i128 << (ty.bits - 1)), (1_i128 << (ty.bits - 1)) - 1),
        _ => (0, (1_i128 << ty.bits) - 1),
    };
    let ((from_least, from_most), (least, most)) = (limits(from), limits(to));
    let literal = |number: i128| if number < 0 { format!("({}ll - 1)", number + 1) } else { format!("{number}ull") };
    // Compare only with limits that values can exceed; these fit into the value's own type.
    let own = |number| format!("({}){}", from.c_memory(), literal(number));
    let mut result = value.to_string();
    if from_most > most {
        result = format!("{value} > {} ? {} : {result}", own(most), own(most));
    }
    if from_least < least {
        result = format!("{value} < {} ? {} : {result}", own(least), own(least));
    }
    format!("({result})")
}
