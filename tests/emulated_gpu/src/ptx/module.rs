//! Parsing the text of a module into functions and variables, without parsing the functions' bodies.
use super::types::Type;

/// A function or kernel. A function that is only declared has no body.
pub(super) struct Function<'a> {
    pub(super) name: &'a str,
    pub(super) entry: bool,
    pub(super) results: Vec<Variable<'a>>,
    pub(super) parameters: Vec<Variable<'a>>,
    pub(super) body: Option<&'a str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Space {
    Generic,
    Global,
    Constant,
    Shared,
    Local,
    Parameter,
}

impl Space {
    pub(super) fn parse(word: &str) -> Option<Self> {
        Some(match word {
            "global" => Self::Global,
            "const" => Self::Constant,
            "shared" => Self::Shared,
            "local" => Self::Local,
            "param" => Self::Parameter,
            _ => return None,
        })
    }
}

#[derive(Clone)]
pub(super) struct Variable<'a> {
    pub(super) name: &'a str,
    pub(super) space: Space,
    pub(super) ty: Type,
    pub(super) align: usize,
    /// `None` for an array of unknown length: dynamic shared memory.
    pub(super) elements: Option<usize>,
    pub(super) external: bool,
    pub(super) initial: Option<&'a str>,
}

impl<'a> Variable<'a> {
    /// Parses `.shared .align 4 .b8 name[16] = {1, 2}` and similar declarations.
    pub(super) fn parse(text: &'a str) -> Result<Self, String> {
        let refuse = || format!("cannot parse `{}`", text.trim());
        let (declaration, initial) = match text.split_once('=') {
            Some((declaration, initial)) => (declaration, Some(initial.trim())),
            None => (text, None),
        };
        let (declaration, dimensions) = match declaration.split_once('[') {
            Some((declaration, dimensions)) => (declaration, Some(dimensions)),
            None => (declaration, None),
        };
        let (mut space, mut ty, mut align, mut external, mut name) = (None, None, None, false, None);
        let mut words = declaration.split_whitespace();
        while let Some(word) = words.next() {
            match word.strip_prefix('.') {
                Some("extern") => external = true,
                Some("align") => align = words.next().and_then(|number| number.parse().ok()),
                // The space and alignment of a pointer's target: `.ptr .global .align 4`.
                Some("ptr") => name = words.by_ref().last(),
                Some("visible" | "weak" | "common" | "attribute") => {}
                Some(word) => {
                    space = space.or(Space::parse(word));
                    ty = ty.or(Type::parse(word));
                }
                None => name = Some(word),
            }
        }
        let elements = match dimensions {
            None => Some(1),
            Some(dimensions) if dimensions.trim_start().starts_with(']') => None,
            Some(dimensions) => {
                let lengths = dimensions.split(['[', ']']).map(str::trim).filter(|length| !length.is_empty());
                let lengths: Result<Vec<usize>, _> = lengths.map(str::parse).collect();
                Some(lengths.map_err(|_| refuse())?.iter().product())
            }
        };
        let (space, ty, name) = (space.ok_or_else(refuse)?, ty.ok_or_else(refuse)?, name.ok_or_else(refuse)?.trim());
        let align = align.unwrap_or(0).max(ty.bytes());
        Ok(Self { name, space, ty, align, elements, external, initial })
    }

    pub(super) fn bytes(&self) -> usize {
        self.ty.bytes() * self.elements.unwrap_or(0)
    }
}

#[derive(Default)]
pub(super) struct Module<'a> {
    pub(super) functions: Vec<Function<'a>>,
    pub(super) variables: Vec<Variable<'a>>,
}

impl<'a> Module<'a> {
    /// `text` must be [without comments](without_comments).
    pub(super) fn parse(text: &'a str) -> Result<Self, String> {
        let mut module = Self::default();
        for item in items(text) {
            let head = item.split('{').next().unwrap_or_default();
            if word_in(head, ".entry") || word_in(head, ".func") {
                module.functions.push(function(item)?);
            } else if [".global", ".const", ".shared"].iter().any(|space| word_in(head, space)) {
                // Variables that cannot be parsed are skipped, so that kernels that do not need them can run.
                module.variables.extend(Variable::parse(item.trim_end_matches(';')));
            }
        }
        Ok(module)
    }

    pub(super) fn function(&self, name: &str) -> Option<&Function<'a>> {
        let mut found = self.functions.iter().filter(|function| function.name == name);
        let first = found.next()?;
        Some(if first.body.is_some() { first } else { found.find(|other| other.body.is_some()).unwrap_or(first) })
    }
}

fn word_in(text: &str, word: &str) -> bool {
    text.split_whitespace().any(|other| other == word)
}

/// Replaces line comments and block comments by spaces.
pub(super) fn without_comments(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['/', '"']) {
        let (before, from) = rest.split_at(at);
        result.push_str(before);
        let (length, keep) = if from.starts_with("//") {
            (from.find('\n').unwrap_or(from.len()), false)
        } else if from.starts_with("/*") {
            (from.find("*/").map_or(from.len(), |end| end + 2), false)
        } else if let Some(text) = from.strip_prefix('"') {
            (text.find('"').map_or(from.len(), |end| end + 2), true)
        } else {
            (1, true)
        };
        result.push_str(if keep { &from[..length] } else { " " });
        rest = &from[length..];
    }
    result.push_str(rest);
    result
}

/// Returns the top-level items of a module, without directives that end with the line (`.version`, `.target`, ...).
fn items(text: &str) -> Vec<&str> {
    let mut items = Vec::new();
    let (mut start, mut depth, mut quoted, mut initial) = (0, 0, false, false);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'"' => quoted = !quoted,
            _ if quoted => {}
            b'=' if depth == 0 => initial = true,
            b'{' => depth += 1,
            b'}' => depth -= 1,
            b'\n' if depth == 0 => {
                let word = text[start..at].split_whitespace().next();
                if matches!(word, None | Some(".version" | ".target" | ".address_size" | ".file" | ".loc")) {
                    start = at + 1;
                }
            }
            _ => {}
        }
        if depth == 0 && ((byte == b'}' && !initial) || byte == b';') && !quoted {
            items.push(text[start..=at].trim());
            (start, initial) = (at + 1, false);
        }
    }
    items
}

/// Returns the list of results, the function's name and the list of parameters.
fn name_and_lists(head: &str) -> Option<(&str, &str, &str)> {
    let at = head.find(".entry").map(|at| at + ".entry".len()).or_else(|| head.find(".func").map(|at| at + 5))?;
    let rest = head[at..].trim_start();
    let (results, rest) = match rest.strip_prefix('(') {
        Some(rest) => rest.split_once(')')?,
        None => ("", rest),
    };
    let rest = rest.trim_start();
    let end = rest.find(|c: char| c.is_whitespace() || "(;{".contains(c)).unwrap_or(rest.len());
    let (name, rest) = rest.split_at(end);
    let parameters =
        rest.trim_start().strip_prefix('(').and_then(|rest| rest.split_once(')')).map_or("", |list| list.0);
    Some((results, name, parameters))
}

fn function(item: &str) -> Result<Function<'_>, String> {
    let (head, body) = match item.split_once('{') {
        Some((head, body)) => (head, Some(body.trim_end().trim_end_matches('}'))),
        None => (item, None),
    };
    let (results, name, parameters) = name_and_lists(head).ok_or_else(|| format!("cannot parse `{head}`"))?;
    let list = |text| split_list(text).into_iter().map(Variable::parse).collect::<Result<Vec<_>, _>>();
    Ok(Function { name, entry: word_in(head, ".entry"), results: list(results)?, parameters: list(parameters)?, body })
}

fn split_list(text: &str) -> Vec<&str> {
    text.split(',').map(str::trim).filter(|part| !part.is_empty()).collect()
}
