//! Translating one function: its declarations, statements and operands.
use super::module::{Function, Space, Variable};
use super::parse::{Instruction, Operand, Statement, statements};
use super::translate::{Program, literal};
use super::types::Type;
use super::{arithmetic, compare, control, convert, memory};
use std::collections::HashMap;
use std::fmt::Write;

pub(super) struct Body<'p, 'm> {
    pub(super) program: &'p mut Program<'m>,
    pub(super) entry: bool,
    /// Parameters, local arrays, and shared variables of this function.
    variables: HashMap<&'m str, Variable<'m>>,
    pub(super) targets: HashMap<&'m str, Vec<&'m str>>,
    code: String,
}

impl<'p, 'm> Body<'p, 'm> {
    /// Returns the code between the braces, and the closing one.
    pub(super) fn translate(program: &'p mut Program<'m>, function: &'m Function<'m>) -> Result<String, String> {
        let variables = function.results.iter().chain(&function.parameters);
        let variables = variables.map(|variable| (variable.name, variable.clone())).collect();
        let code = "uint32_t carry = 0;\n".to_string();
        let mut body = Self { program, entry: function.entry, variables, targets: HashMap::new(), code };
        let statements = statements(function.body.unwrap_or_default())?;
        for statement in &statements {
            if let Statement::Targets(name, labels) = statement {
                body.targets.insert(name, labels.clone());
            }
        }
        for (at, statement) in statements.iter().enumerate() {
            match statement {
                Statement::Open => {
                    body.code += "{\n";
                    for label in labels_of_block(&statements[at + 1..]) {
                        _ = writeln!(body.code, "__label__ L_{label};");
                    }
                }
                Statement::Close => body.code += "}\n",
                Statement::Label(name) => _ = writeln!(body.code, "L_{name}:;"),
                Statement::Declaration(text) => body.declare(text)?,
                Statement::Targets(..) => {}
                Statement::Instruction(instruction) => body.instruction(instruction)?,
            }
        }
        Ok(body.code + "}\n\n")
    }

    fn declare(&mut self, text: &'m str) -> Result<(), String> {
        if let Some(text) = text.strip_prefix(".reg") {
            return self.registers(text);
        }
        let space = Space::parse(text.trim_start_matches('.').split([' ', '\t', '.']).next().unwrap_or_default());
        if !matches!(space, Some(Space::Shared | Space::Local | Space::Parameter)) {
            return Err(format!("directive not supported: `{text}`"));
        }
        let variable = Variable::parse(text)?;
        if variable.space != Space::Shared {
            let (name, bytes, align) = (variable.name, variable.bytes(), variable.align);
            self.program.add_to_frame(bytes);
            _ = writeln!(self.code, "unsigned char V_{name}[{bytes}] __attribute__((aligned({align})));");
        }
        self.variables.insert(variable.name, variable);
        Ok(())
    }

    /// Declares registers, as in ` .b32 %r<10>, %x`.
    fn registers(&mut self, text: &str) -> Result<(), String> {
        let refuse = || format!("directive not supported: `.reg{text}`");
        let (ty, names) = text.trim().split_once(char::is_whitespace).ok_or_else(refuse)?;
        let ty = ty.strip_prefix('.').and_then(Type::parse).ok_or_else(refuse)?.c_bits();
        for name in names.split(',').map(str::trim) {
            let names = match name.trim_end_matches('>').split_once('<') {
                None => vec![register(name)],
                Some((name, count)) => {
                    let count: usize = count.parse().map_err(|_| refuse())?;
                    (0..count).map(|index| register(&format!("{name}{index}"))).collect()
                }
            };
            self.program.add_to_frame(8 * names.len());
            for name in names {
                _ = write!(self.code, "{ty} {name} = 0; ");
            }
        }
        self.code += "\n";
        Ok(())
    }

    fn instruction(&mut self, instruction: &Instruction<'m>) -> Result<(), String> {
        let translate = match instruction.name {
            "ld" | "ldu" | "st" | "mov" | "cvta" | "atom" | "red" | "prefetch" | "prefetchu" => memory::translate,
            "cvt" => convert::translate,
            "set" | "setp" | "selp" => compare::translate,
            "bra" | "brx" | "call" | "ret" | "exit" | "trap" | "bar" | "barrier" | "membar" | "fence" | "shfl"
            | "vote" | "activemask" | "redux" | "nanosleep" => control::translate,
            _ => arithmetic::translate,
        };
        let code = translate(instruction, self)?;
        _ = match instruction.guard {
            None => writeln!(self.code, "{code}"),
            Some((guard, false)) => writeln!(self.code, "if ({}) {{ {code} }}", register(guard)),
            Some((guard, true)) => writeln!(self.code, "if (!{}) {{ {code} }}", register(guard)),
        };
        Ok(())
    }

    /// Returns the space and the C address of a variable.
    pub(super) fn variable(&mut self, name: &str) -> Result<Option<(Space, String)>, String> {
        let variable = match self.variables.get(name) {
            Some(variable) => variable.clone(),
            None => match self.program.need_global(name)? {
                Some(variable) => variable.clone(),
                None => return Ok(None),
            },
        };
        let address = match variable.space {
            Space::Shared => self.program.need_shared(&variable),
            _ => format!("(uintptr_t)V_{}", variable.name),
        };
        Ok(Some((variable.space, address)))
    }

    /// Returns the bits of an operand, of all lanes. Registers are used as they are and may be wider.
    pub(super) fn bits(&mut self, operand: &Operand<'m>, ty: Type) -> Result<String, String> {
        match operand {
            Operand::Name(name) => {
                if let Some(special) = special(name) {
                    return Ok(special.to_string());
                }
                Ok(match self.variable(name)? {
                    Some((_, address)) => address,
                    None => register(name),
                })
            }
            Operand::Sum(name, offset) => match self.variable(name)? {
                Some((_, address)) => Ok(format!("({address} + {offset})")),
                None => Err(format!("operand not supported: `{name}` is not a variable")),
            },
            Operand::Not(name) => Ok(format!("!{}", register(name))),
            number => literal(number, ty.bytes() * 8).ok_or_else(|| format!("operand not supported: {number:?}")),
        }
    }

    /// Returns the value of an operand with one lane.
    pub(super) fn value(&mut self, operand: &Operand<'m>, ty: Type) -> Result<String, String> {
        Ok(ty.value(&self.bits(operand, ty)?))
    }

    /// Returns the values of the lanes of an operand.
    pub(super) fn lanes(&mut self, operand: &Operand<'m>, ty: Type) -> Result<Vec<String>, String> {
        let bits = self.bits(operand, ty)?;
        Ok(match ty.lanes {
            1 => vec![ty.value(&bits)],
            lanes => (0..lanes).map(|lane| ty.value(&format!("({bits}) >> {}", lane * ty.bits))).collect(),
        })
    }

    /// Combines the bits of all lanes.
    pub(super) fn join(ty: Type, lanes: &[String]) -> String {
        let shifted = lanes.iter().enumerate().map(|(lane, value)| match lane {
            0 => ty.bits_of(value),
            lane => format!("(uint32_t){} << {}", ty.bits_of(value), lane * ty.bits),
        });
        shifted.collect::<Vec<_>>().join(" | ")
    }

    /// Assigns `bits`, whose C type is signed if sign extension is needed.
    pub(super) fn assign(&mut self, operand: &Operand<'m>, bits: &str) -> Result<String, String> {
        match operand {
            Operand::Name(name) => Ok(format!("{} = {bits};", register(name))),
            Operand::Nothing => Ok(format!("(void)({bits});")),
            other => Err(format!("result not supported: {other:?}")),
        }
    }
}

/// Returns the labels of the block that begins here.
fn labels_of_block<'a>(statements: &[Statement<'a>]) -> Vec<&'a str> {
    let (mut labels, mut depth) = (Vec::new(), 0);
    for statement in statements {
        match statement {
            Statement::Open => depth += 1,
            Statement::Close if depth == 0 => break,
            Statement::Close => depth -= 1,
            Statement::Label(name) if depth == 0 => labels.push(*name),
            _ => {}
        }
    }
    labels
}

/// `%r1` and `r1` may both exist.
pub(super) fn register(name: &str) -> String {
    match name.strip_prefix('%') {
        Some(name) => format!("R_{name}"),
        None => format!("r_{name}"),
    }
}

fn special(name: &str) -> Option<&'static str> {
    Some(match name {
        "%tid.x" => "t->tid[0]",
        "%tid.y" => "t->tid[1]",
        "%tid.z" => "t->tid[2]",
        "%ntid.x" => "t->ntid[0]",
        "%ntid.y" => "t->ntid[1]",
        "%ntid.z" => "t->ntid[2]",
        "%ctaid.x" => "t->ctaid[0]",
        "%ctaid.y" => "t->ctaid[1]",
        "%ctaid.z" => "t->ctaid[2]",
        "%nctaid.x" => "t->nctaid[0]",
        "%nctaid.y" => "t->nctaid[1]",
        "%nctaid.z" => "t->nctaid[2]",
        "%laneid" => "lane_of(t)",
        "%warpid" => "(index_in_block(t) / 32)",
        "%nwarpid" => "warps_of(t)",
        "%lanemask_eq" => "((uint32_t)1 << lane_of(t))",
        "%lanemask_lt" => "(((uint32_t)1 << lane_of(t)) - 1)",
        "%lanemask_le" => "(((uint32_t)2 << lane_of(t)) - 1)",
        "%lanemask_gt" => "-((uint32_t)2 << lane_of(t))",
        "%lanemask_ge" => "-((uint32_t)1 << lane_of(t))",
        "%dynamic_smem_size" => "(t->shared_size - STATIC_SHARED)",
        "WARP_SZ" => "32u",
        _ => return None,
    })
}
