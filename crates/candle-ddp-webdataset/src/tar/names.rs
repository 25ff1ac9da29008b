//! WebDataset's names.

/// A file's sample and the rest of its name: the path up to the first dot of the file name, and all after that dot. None for
/// files that belong to no sample: without a dot, or with one at the beginning of their name.
pub(super) fn split(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let name = path.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    let dot = path[name..].iter().position(|byte| *byte == b'.').filter(|dot| *dot > 0)?;
    Some((&path[..name + dot], &path[name + dot + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_split_at_the_first_dot_of_the_file_name() {
        for (path, expected) in [
            ("0001.jpg", Some(("0001", "jpg"))),
            ("a.b/c/0001.seg.png", Some(("a.b/c/0001", "seg.png"))),
            ("./0001.cls", Some(("./0001", "cls"))),
            ("0001.", Some(("0001", ""))),
            ("0001", None),
            ("a.b/0001", None),
            ("a/.hidden.jpg", None),
            ("", None),
        ] {
            let expected = expected.map(|(key, rest): (&str, &str)| (key.as_bytes(), rest.as_bytes()));
            assert_eq!(split(path.as_bytes()), expected, "{path}");
        }
    }
}
