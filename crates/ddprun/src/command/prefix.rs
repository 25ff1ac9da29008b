//! The prefix of the lines that `--tee` shows.
use std::str::FromStr;

/// torchrun's variable with the template.
pub(crate) const VARIABLE: &str = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE";
/// torchrun's template.
pub(crate) const DEFAULT: &str = "[${role_name}${local_rank}]:";

/// Text with `${name}` or `$name` in it, and `$$` for `$`, as in Python's `string.Template`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Template(String);

type Value = fn(&Source<'_>) -> String;

/// The names in a template and what they stand for; the first three are torchrun's.
const NAMES: [(&str, Value); 6] = [
    ("role_name", |source| source.role_name.to_string()),
    ("local_rank", |source| source.local_rank.to_string()),
    ("rank", |source| source.rank.to_string()),
    ("host", |source| source.host.to_string()),
    ("group_rank", |source| source.group_rank.to_string()),
    ("restart_count", |source| source.restart_count.to_string()),
];

/// Whose lines they are.
#[derive(Default)]
pub(crate) struct Source<'a> {
    pub(crate) role_name: &'a str,
    pub(crate) local_rank: usize,
    pub(crate) rank: usize,
    pub(crate) host: &'a str,
    pub(crate) group_rank: usize,
    pub(crate) restart_count: u32,
}

impl FromStr for Template {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        filled(text, &Source::default()).map(|_| Self(text.to_string()))
    }
}

impl Template {
    /// The prefix of the lines of `source`.
    pub(crate) fn of(&self, source: &Source<'_>) -> String {
        // A template that cannot be filled has been refused.
        filled(&self.0, source).unwrap_or_default()
    }
}

/// The template with its names replaced; `Err` says which name is unknown.
fn filled(mut template: &str, source: &Source<'_>) -> Result<String, String> {
    let mut text = String::new();
    while let Some((before, rest)) = template.split_once('$') {
        text += before;
        if let Some(rest) = rest.strip_prefix('$') {
            text.push('$');
            template = rest;
            continue;
        }
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (name, after) = match rest.strip_prefix('{') {
            Some(rest) => rest.split_once('}').ok_or("${ has no }")?,
            None => rest.split_at(end),
        };
        let (_, value) = NAMES.iter().find(|(known, _)| *known == name).ok_or_else(|| {
            let names: Vec<String> = NAMES.iter().map(|(name, _)| format!("${{{name}}}")).collect();
            format!("${{{name}}} is unknown: use {}, or $$ for $", names.join(", "))
        })?;
        text += &value(source);
        template = after;
    }
    Ok(text + template)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: Source =
        Source { role_name: "trainer", local_rank: 1, rank: 5, host: "node2", group_rank: 2, restart_count: 3 };

    #[test]
    fn names_are_replaced() {
        for (template, expected) in [
            ("", ""),
            ("[${host} $rank]: ", "[node2 5]: "),
            (DEFAULT, "[trainer1]:"),
            ("$role_name$local_rank", "trainer1"),
            ("$$${group_rank}/${restart_count}$$rank", "$2/3$rank"),
        ] {
            assert_eq!(template.parse::<Template>().unwrap().of(&SOURCE), expected, "{template}");
        }
    }

    #[test]
    fn unknown_names_are_refused() {
        for (wrong, says) in
            [("${ranks}", "${ranks} is unknown: use ${role_name}, "), ("a$", "or $$ for $"), ("${rank", "no }")]
        {
            let error = wrong.parse::<Template>().unwrap_err();
            assert!(error.contains(says), "{wrong}: {error}");
        }
    }
}
