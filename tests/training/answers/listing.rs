//! The functions of `docs/public-api*.txt` that take tensors.
use std::collections::BTreeSet;

const LISTINGS: [&str; 5] = [
    "docs/public-api.txt",
    "docs/public-api-data.txt",
    "docs/public-api-nn.txt",
    "docs/public-api-tensor.txt",
    "docs/public-api-vision.txt",
];

/// Types that are tensors, or have some.
const TYPES: [&str; 8] = [
    "Tensor",
    "P2pOp",
    "Collective",
    "AttentionOptions",
    "CrossEntropyOptions",
    "LinearCrossEntropyOptions",
    "LSTMState",
    "GRUState",
];

/// The paths of the functions, each with an argument.
pub(super) fn arguments() -> BTreeSet<(String, String)> {
    let mut all = BTreeSet::new();
    for listing in LISTINGS {
        for line in super::read(listing).lines() {
            let (path, item) = line.split_once(": ").unwrap();
            let module = ["ModuleT", "Module", "RNN"].into_iter().find(|name| item.contains(&format!("{name} for ")));
            match module.filter(|_| item.starts_with("impl")) {
                Some("RNN") => {
                    let methods =
                        [("step", "input"), ("step", "state"), ("seq", "input"), ("states_to_tensor", "states")];
                    let seq_init = [("seq_init", "input"), ("seq_init", "init_state")];
                    let all_of = methods.into_iter().chain(seq_init);
                    all.extend(all_of.map(|(name, argument)| (format!("{path}::{name}"), argument.to_string())));
                }
                Some("Module") => drop(all.insert((format!("{path}::forward"), "xs".to_string()))),
                Some(_) => drop(all.insert((format!("{path}::forward_t"), "xs".to_string()))),
                None if item.starts_with("pub ") => {
                    for (name, argument) in functions(item) {
                        let is_free = path.ends_with(&format!("::{name}"));
                        let path = if is_free { path.to_string() } else { format!("{path}::{name}") };
                        all.insert((path, argument));
                    }
                }
                None => {}
            }
        }
    }
    all
}

/// The functions of an item with their arguments of [`TYPES`].
fn functions(item: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (start, _) in item.match_indices("fn ") {
        // Not the end of another word, nor `fn(…)`, the type.
        if start > 0 && !item[..start].ends_with(' ') {
            continue;
        }
        let rest = &item[start + 3..];
        let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        let Some(arguments) = in_parentheses(&rest[name.len()..]) else { continue };
        for argument in split(arguments) {
            let Some((argument, kind)) = argument.split_once(": ") else { continue };
            let is_closure =
                ["impl Fn", "&mut dyn Fn", "impl CustomOp", "F"].iter().any(|start| kind.starts_with(start));
            let words = kind.split(|c: char| !c.is_alphanumeric()).any(|word| TYPES.contains(&word));
            // A batch of tensors of any form.
            if !is_closure && (words || kind == "B") {
                found.push((name.clone(), argument.trim().to_string()));
            }
        }
    }
    found
}

/// The text in the first parentheses, behind the generic parameters.
fn in_parentheses(text: &str) -> Option<&str> {
    let (mut angles, mut depth, mut start) = (0, 0, None);
    let mut before = ' ';
    for (index, c) in text.char_indices() {
        match c {
            '<' if depth == 0 => angles += 1,
            '>' if depth == 0 && before != '-' => angles -= 1,
            '(' if angles == 0 => {
                start = start.or(Some(index + 1));
                depth += 1;
            }
            ')' if angles == 0 => {
                depth -= 1;
                if depth == 0 {
                    return Some(&text[start?..index]);
                }
            }
            _ => {}
        }
        before = c;
    }
    None
}

/// Splits at the commas outside of all brackets.
fn split(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts, mut before) = (0, 0, Vec::new(), ' ');
    for (index, c) in text.char_indices() {
        match c {
            '(' | '<' | '[' => depth += 1,
            ')' | ']' => depth -= 1,
            '>' if before != '-' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(text[start..index].trim());
                start = index + 1;
            }
            _ => {}
        }
        before = c;
    }
    parts.push(text[start..].trim());
    parts
}

/// The documentation of each public function, or function of a trait, with this name in the source.
pub(super) fn documentation(source: &str, name: &str) -> Vec<String> {
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let declares = |line: &&str| {
        let line = line.strip_prefix("pub ").unwrap_or(line);
        [format!("fn {name}("), format!("fn {name}<")].iter().any(|start| line.starts_with(start.as_str()))
    };
    let above = |index: usize| {
        let mut text: Vec<&str> =
            lines[..index].iter().rev().take_while(|line| line.starts_with(['/', '#'])).copied().collect();
        text.reverse();
        text.into_iter().filter_map(|line| line.strip_prefix("///")).collect::<String>()
    };
    let found = lines.iter().enumerate().filter(|(_, line)| declares(line)).map(|(index, _)| above(index));
    // The implementations of a trait are not documented again.
    found.filter(|text| !text.is_empty()).collect()
}
