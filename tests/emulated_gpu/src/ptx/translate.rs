//! Translating a kernel to a C program: the parts of the module that it needs, in the right order.
use super::body::Body;
use super::module::{Function, Module, Space, Variable};
use super::parse::{self, Operand};
use std::collections::HashMap;
use std::fmt::Write;

const ARITHMETIC: &str = include_str!("c/arithmetic.h");
const THREAD: &str = include_str!("c/thread.h");
const FIBRES: &str = include_str!("c/fibres.h");
const GRID: &str = include_str!("c/grid.h");

pub(super) struct Translation {
    pub(super) source: String,
    /// The size and offset of each parameter.
    pub(super) parameters: Vec<(usize, usize)>,
    /// The stack size of each thread in bytes, if threads wait for each other.
    pub(super) stack: Option<usize>,
}

/// The parts that are needed, as far as they are known.
pub(super) struct Program<'m> {
    pub(super) module: &'m Module<'m>,
    functions: Vec<&'m str>,
    globals: Vec<&'m Variable<'m>>,
    /// Offsets of the shared variables; `None` for the dynamic memory after them.
    shared: HashMap<&'m str, Option<usize>>,
    shared_size: usize,
    dynamic_align: usize,
    /// The bytes of local arrays and registers, all of which may be on the stack.
    frame: usize,
    /// Whether threads wait for each other.
    pub(super) fibres: bool,
    sites: usize,
}

impl<'m> Program<'m> {
    pub(super) fn need_function(&mut self, name: &str) -> Result<&'m Function<'m>, String> {
        let function = self.module.function(name).filter(|function| function.body.is_some() && !function.entry);
        let function = function.ok_or_else(|| format!("function not supported: `{name}` is not in the module"))?;
        if !self.functions.contains(&function.name) {
            self.functions.push(function.name);
        }
        Ok(function)
    }

    /// Returns a variable of the module if it can be used.
    pub(super) fn need_global(&mut self, name: &str) -> Result<Option<&'m Variable<'m>>, String> {
        let Some(variable) = self.module.variables.iter().find(|variable| variable.name == name) else {
            return Ok(None);
        };
        let constant = variable.space == Space::Constant || variable.initial.is_some();
        if variable.space != Space::Shared {
            // Each kernel has its own copy, so other kernels would not see changes.
            if variable.external || !constant || variable.elements.is_none() {
                return Err(format!("variable not supported: `{name}` is shared with others"));
            }
            if !self.globals.iter().any(|known| known.name == name) {
                self.globals.push(variable);
            }
        }
        Ok(Some(variable))
    }

    /// Returns the C expression for the offset of a shared variable.
    pub(super) fn need_shared(&mut self, variable: &Variable<'m>) -> String {
        let next = self.shared_size.next_multiple_of(variable.align);
        let offset = *self.shared.entry(variable.name).or_insert_with(|| {
            let offset = variable.elements.map(|_| next);
            match offset {
                Some(offset) => self.shared_size = offset + variable.bytes(),
                None => self.dynamic_align = self.dynamic_align.max(variable.align),
            }
            offset
        });
        offset.map_or("STATIC_SHARED".to_string(), |offset| offset.to_string())
    }

    pub(super) fn add_to_frame(&mut self, bytes: usize) {
        self.frame += bytes;
    }

    /// Returns a number that identifies this position in the program.
    pub(super) fn site(&mut self) -> usize {
        self.sites += 1;
        self.sites
    }
}

/// Translates the kernel `name`.
pub(super) fn translate(module: &Module, name: &str) -> Result<Translation, String> {
    let missing = || format!("the module has no kernel `{name}`");
    let kernel = module.function(name).filter(|function| function.entry).ok_or_else(missing)?;
    let mut program = Program {
        module,
        functions: Vec::new(),
        globals: Vec::new(),
        shared: HashMap::new(),
        shared_size: 0,
        dynamic_align: 1,
        frame: 0,
        fibres: false,
        sites: 0,
    };
    let mut parameters = Vec::new();
    let mut end = 0;
    for parameter in &kernel.parameters {
        let offset = usize::next_multiple_of(end, parameter.align);
        parameters.push((parameter.bytes(), offset));
        end = offset + parameter.bytes();
    }
    let mut code = "static void body(const struct thread *t, const unsigned char *parameters) {\n".to_string();
    for (parameter, (_, offset)) in kernel.parameters.iter().zip(&parameters) {
        _ = writeln!(code, "const unsigned char *const V_{} = parameters + {offset};", parameter.name);
    }
    code += &Body::translate(&mut program, kernel)?;
    let (mut declarations, mut functions) = (String::new(), String::new());
    let mut done = 0;
    while let Some(function) = program.functions.get(done) {
        let function = program.need_function(function)?;
        let head = head(function);
        _ = writeln!(declarations, "{head};");
        _ = write!(functions, "{head} {{\n{}", Body::translate(&mut program, function)?);
        done += 1;
    }
    let globals = program.globals.iter().map(|variable| global(variable)).collect::<Result<String, _>>()?;
    let shared_size = program.shared_size.next_multiple_of(program.dynamic_align);
    let stack = (1 << 15) + (2 * program.frame).next_multiple_of(1 << 12);
    let fibres = program.fibres;
    let settings = format!(
        "#define KERNEL \"{name}\"\n#define FIBRES {}\n#define STATIC_SHARED {shared_size}\n\
         #define PARAMETER_BYTES {end}\n#define STACK {stack}\n",
        i32::from(fibres)
    );
    let waiting = if fibres { FIBRES } else { "" };
    let source = [&settings, ARITHMETIC, THREAD, &globals, &declarations, &functions, &code, waiting, GRID].join("\n");
    Ok(Translation { source, parameters, stack: fibres.then_some(stack) })
}

fn head(function: &Function) -> String {
    let mut head = format!("static void F_{}(const struct thread *t", function.name);
    for variable in function.results.iter().chain(&function.parameters) {
        _ = write!(head, ", unsigned char *V_{}", variable.name);
    }
    head + ")"
}

/// Returns the definition of a variable of the module.
fn global(variable: &Variable) -> Result<String, String> {
    let refuse = || format!("cannot parse the value of `{}`", variable.name);
    let list = variable.initial.unwrap_or("").replace(['{', '}'], "");
    let mut values = String::new();
    for value in list.split(',').map(str::trim).filter(|value| !value.is_empty()) {
        let value = parse::number(value).ok_or_else(refuse)?;
        _ = write!(values, "{}, ", literal(&value, variable.ty.bits).ok_or_else(refuse)?);
    }
    let count = variable.elements.unwrap_or(1);
    Ok(format!(
        "static {} V_{}[{count}] __attribute__((aligned({}))) = {{{values}}};\n",
        variable.ty.c_bits(),
        variable.name,
        variable.align
    ))
}

/// Returns the bits of a literal number for a type with this number of bits.
pub(super) fn literal(number: &Operand, bits: usize) -> Option<String> {
    let value = match *number {
        Operand::Integer(value) => value,
        Operand::F32(value) if bits == 64 => f64::from(f32::from_bits(value)).to_bits(),
        Operand::F32(value) => u64::from(value),
        Operand::F64(value) if bits == 32 => u64::from((f64::from_bits(value) as f32).to_bits()),
        Operand::F64(value) => value,
        _ => return None,
    };
    let value = if bits < 64 { value & ((1 << bits) - 1) } else { value };
    Some(if bits > 32 { format!("{value:#x}ull") } else { format!("{value:#x}u") })
}
