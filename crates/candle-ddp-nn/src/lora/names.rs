//! Names of variables, and patterns for names of layers.

/// The names that peft gives the matrices of an adapter, within its layer: A and B.
pub(super) const MATRICES: [&str; 2] = ["lora_A.weight", "lora_B.weight"];

/// The same for an embedding.
pub(super) const OF_EMBEDDING: [&str; 2] = ["lora_embedding_A", "lora_embedding_B"];

/// The layer's name and the name within it.
pub(super) fn split(name: &str) -> (&str, &str) {
    name.rsplit_once('.').unwrap_or(("", name))
}

pub(super) fn join(module: &str, name: &str) -> String {
    if module.is_empty() { name.to_string() } else { format!("{module}.{name}") }
}

/// The layer's name if `name` is what `within` is called in it.
pub(super) fn module<'a>(name: &'a str, within: &str) -> Option<&'a str> {
    let module = name.strip_suffix(within)?;
    if module.is_empty() { Some(module) } else { module.strip_suffix('.') }
}

/// Whether `name` is one of an adapter's matrices.
pub(super) fn is_adapter(name: &str) -> bool {
    MATRICES.iter().chain(&OF_EMBEDDING).any(|within| module(name, within).is_some())
}

/// Whether `pattern` is the layer's name, or the end of it that follows a dot.
pub(super) fn fits(pattern: &str, module: &str) -> bool {
    let ends = module.match_indices('.').map(|(dot, _)| &module[dot + 1..]);
    [module].into_iter().chain(ends).any(|end| glob(pattern.as_bytes(), end.as_bytes()))
}

/// Whether the name of the layer, or of a group of layers that has it, ends with the pattern, as in peft: not only after a dot.
pub(super) fn contains(pattern: &str, module: &str) -> bool {
    let (groups, end) = (module.match_indices('.').map(|(dot, _)| &module[..dot]), format!("*{pattern}"));
    !pattern.is_empty() && [module].into_iter().chain(groups).any(|group| glob(end.as_bytes(), group.as_bytes()))
}

/// Whether `pattern`, in which `*` stands for any text, is the whole of `text`. The last `*` alone is tried again, so that the time is at
/// most the product of the lengths.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t, mut star) = (0, 0, None);
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(byte) if *byte == text[t] => (p, t) = (p + 1, t + 1),
            _ => match star {
                Some((at, taken)) => {
                    star = Some((at, taken + 1));
                    (p, t) = (at + 1, taken + 1);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_fit_whole_parts_of_names() {
        let layer = "model.layers.11.self_attn.q_proj";
        for pattern in ["q_proj", "self_attn.q_proj", layer, "layers.*.q_proj", "*_proj", "*", "layers.11.*", "q_*"] {
            assert!(fits(pattern, layer), "{pattern}");
        }
        for pattern in ["proj", "k_proj", "layers.1.*", "layers.1*1.q_proj", "self_attn", "model", "", "*q"] {
            assert!(!fits(pattern, layer), "{pattern}");
        }
        // peft: any(key.endswith(target) for target in modules_to_save), for the names of layers and of groups.
        for pattern in ["self_attn", "attn", "proj", "layers.*", "model", "q_proj", "11", "*attn"] {
            assert!(contains(pattern, layer), "{pattern}");
        }
        for pattern in ["", "q_pro", "layers.12", "self", "model."] {
            assert!(!contains(pattern, layer), "{pattern}");
        }
    }

    #[test]
    fn names_of_adapters_are_known() {
        assert_eq!(module("head.lora_A.weight", MATRICES[0]), Some("head"));
        assert_eq!(module("lora_A.weight", MATRICES[0]), Some(""));
        assert_eq!(module("headlora_A.weight", MATRICES[0]), None);
        assert!(is_adapter("a.b.lora_embedding_B") && !is_adapter("a.b.weight"));
    }
}
