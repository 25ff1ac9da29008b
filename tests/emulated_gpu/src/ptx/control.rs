//! Branches, calls, barriers, and operations on warps.
use super::body::Body;
use super::parse::{Instruction, Operand, Suffixes};
use super::types::{Kind, Type};

pub(super) fn translate<'m>(i: &Instruction<'m>, body: &mut Body<'_, 'm>) -> Result<String, String> {
    let mut suffixes = i.suffixes();
    let suffixes = &mut suffixes;
    let code = match i.name {
        "bra" => {
            suffixes.take("uni");
            format!("goto L_{};", name(i, 0)?)
        }
        "brx" => switch(i, suffixes, body)?,
        "call" => {
            suffixes.take("uni");
            call(i, body)?
        }
        "ret" => {
            suffixes.take("uni");
            "return;".to_string()
        }
        "exit" if body.entry => "return;".to_string(),
        "trap" => "fail(\"trap\");".to_string(),
        "bar" | "barrier" => barrier(i, suffixes, body)?,
        "membar" | "fence" => {
            suffixes.drop_all(|_| true);
            "__atomic_thread_fence(__ATOMIC_SEQ_CST);".to_string()
        }
        "nanosleep" => {
            suffixes.take("u32");
            String::new()
        }
        "shfl" => shuffle(i, suffixes, body)?,
        "vote" => vote(i, suffixes, body)?,
        // Threads may diverge at any time, so the calling thread may be alone.
        "activemask" => {
            suffixes.take("b32");
            body.assign(i.operand(0)?, "(uint32_t)1 << lane_of(t)")?
        }
        "redux" => redux(i, suffixes, body)?,
        _ => return Err(i.unsupported()),
    };
    if suffixes.is_empty() { Ok(code) } else { Err(i.unsupported()) }
}

fn name<'m>(i: &Instruction<'m>, index: usize) -> Result<&'m str, String> {
    match i.operand(index)? {
        Operand::Name(name) => Ok(name),
        _ => Err(i.unsupported()),
    }
}

/// `brx.idx index, targets`
fn switch<'m>(i: &Instruction<'m>, suffixes: &mut Suffixes, body: &mut Body<'_, 'm>) -> Result<String, String> {
    suffixes.take("uni");
    let labels = body.targets.get(name(i, 1)?).filter(|_| suffixes.take("idx")).ok_or_else(|| i.unsupported())?;
    let cases: String =
        labels.iter().enumerate().map(|(index, label)| format!("case {index}: goto L_{label}; ")).collect();
    let index = body.value(i.operand(0)?, WORD)?;
    Ok(format!("switch ({index}) {{ {cases} default: fail(\"a branch to nowhere\"); }}"))
}

/// `call (results), function, (parameters)`, with or without the lists.
fn call<'m>(i: &Instruction<'m>, body: &mut Body<'_, 'm>) -> Result<String, String> {
    let (mut function, mut arguments) = (None, Vec::new());
    for operand in &i.operands {
        match operand {
            Operand::List(list) => arguments.extend(list),
            Operand::Name(name) if function.is_none() => function = Some(*name),
            _ => return Err(i.unsupported()),
        }
    }
    let function = function.ok_or_else(|| i.unsupported())?;
    let mut names = Vec::new();
    for argument in arguments {
        match argument {
            Operand::Name(name) => names.push(format!("V_{name}")),
            _ => return Err(i.unsupported()),
        }
    }
    if function == "__assertfail" && names.len() == 5 {
        return Ok(format!("assertion_failed({});", names[..3].join(", ")));
    }
    let callee = body.program.need_function(function)?;
    if callee.results.len() + callee.parameters.len() != names.len() {
        return Err(i.unsupported());
    }
    names.insert(0, "t".to_string());
    Ok(format!("F_{function}({});", names.join(", ")))
}

const WORD: Type = Type { kind: Kind::Unsigned, bits: 32, lanes: 1 };

/// `bar.sync`, `barrier.sync`, `bar.red` of a block, `bar.warp.sync`.
fn barrier<'m>(i: &Instruction<'m>, suffixes: &mut Suffixes, body: &mut Body<'_, 'm>) -> Result<String, String> {
    body.program.fibres = true;
    if suffixes.take("warp") {
        suffixes.take("sync");
        let mask = body.value(i.operand(0)?, WORD)?;
        return Ok(format!("wait_for_warp(t, {mask});"));
    }
    suffixes.take("cta");
    suffixes.take("aligned");
    let site = body.program.site();
    if suffixes.take("sync") {
        let number = body.value(i.operand(0)?, WORD)?;
        let expected = match i.operands.get(1) {
            Some(count) => body.value(count, WORD)?,
            None => "0".to_string(),
        };
        return Ok(format!("wait_for_block(t, {number}, {expected}, {site});"));
    }
    let ty = suffixes.take_type().ok_or_else(|| i.unsupported())?;
    let operation = suffixes.take_one(|suffix| match suffix {
        "popc" => Some("REDUCE_ADD"),
        "and" => Some("REDUCE_AND"),
        "or" => Some("REDUCE_OR"),
        _ => None,
    });
    // With a number of threads, there would be four operands.
    let (true, Some(operation), 3) = (suffixes.take("red"), operation, i.operands.len()) else {
        return Err(i.unsupported());
    };
    let number = body.value(i.operand(1)?, WORD)?;
    let predicate = body.bits(i.operand(2)?, ty)?;
    body.assign(i.operand(0)?, &format!("reduce_over_block(t, {number}, {predicate}, {site}, {operation})"))
}

/// `shfl.sync.mode.b32 result|inside, value, b, c, mask`
fn shuffle<'m>(i: &Instruction<'m>, suffixes: &mut Suffixes, body: &mut Body<'_, 'm>) -> Result<String, String> {
    body.program.fibres = true;
    let mode = suffixes.take_one(|suffix| match suffix {
        "up" => Some("SHUFFLE_UP"),
        "down" => Some("SHUFFLE_DOWN"),
        "bfly" => Some("SHUFFLE_BUTTERFLY"),
        "idx" => Some("SHUFFLE_INDEX"),
        _ => None,
    });
    let (true, true, Some(mode)) = (suffixes.take("sync"), suffixes.take("b32"), mode) else {
        return Err(i.unsupported());
    };
    let mut arguments = Vec::new();
    for index in 1..5 {
        arguments.push(body.value(i.operand(index)?, WORD)?);
    }
    let (result, inside) = match i.operand(0)? {
        Operand::Pair(result, inside) => (&**result, &**inside),
        result => (result, &Operand::Nothing),
    };
    let (result, inside) = (body.assign(result, "shuffled_")?, body.assign(inside, "inside_")?);
    let shuffled = format!("shuffle(t, {mode}, {}, &inside_)", arguments.join(", "));
    Ok(format!("{{ int inside_; uint32_t shuffled_ = {shuffled}; {result} {inside} }}"))
}

/// `vote.sync.mode.type result, predicate, mask`
fn vote<'m>(i: &Instruction<'m>, suffixes: &mut Suffixes, body: &mut Body<'_, 'm>) -> Result<String, String> {
    body.program.fibres = true;
    suffixes.take_type();
    let mode = suffixes.take_one(|suffix| ["all", "any", "uni", "ballot"].contains(&suffix).then_some(suffix));
    let (true, Some(mode)) = (suffixes.take("sync"), mode) else { return Err(i.unsupported()) };
    let (predicate, mask) = (body.bits(i.operand(1)?, Type::bits(8))?, body.value(i.operand(2)?, WORD)?);
    let outcome = match mode {
        "all" => "ballot_ == members_",
        "any" => "ballot_ != 0",
        "uni" => "ballot_ == 0 || ballot_ == members_",
        _ => "ballot_",
    };
    let assign = body.assign(i.operand(0)?, outcome)?;
    Ok(format!("{{ uint32_t members_, ballot_ = vote(t, {mask}, {predicate}, &members_); {assign} }}"))
}

fn redux<'m>(i: &Instruction<'m>, suffixes: &mut Suffixes, body: &mut Body<'_, 'm>) -> Result<String, String> {
    body.program.fibres = true;
    let ty = suffixes.take_type().filter(|ty| ty.bits == 32 && ty.is_integer()).ok_or_else(|| i.unsupported())?;
    let signed = ty.kind == Kind::Signed;
    let operation = suffixes.take_one(|suffix| match suffix {
        "add" => Some("REDUCE_ADD"),
        "min" => Some(if signed { "REDUCE_SMIN" } else { "REDUCE_MIN" }),
        "max" => Some(if signed { "REDUCE_SMAX" } else { "REDUCE_MAX" }),
        "and" => Some("REDUCE_AND"),
        "or" => Some("REDUCE_OR"),
        "xor" => Some("REDUCE_XOR"),
        _ => None,
    });
    let (true, Some(operation)) = (suffixes.take("sync"), operation) else { return Err(i.unsupported()) };
    let (value, mask) = (body.value(i.operand(1)?, WORD)?, body.value(i.operand(2)?, WORD)?);
    body.assign(i.operand(0)?, &format!("reduce_over_warp(t, {operation}, {value}, {mask})"))
}
