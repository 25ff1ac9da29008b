//! The purposes of this crate's own collectives, as messages show them: `all_gather(i64[1]) for save_distributed`.
use candle_ddp_engine::Label;
use std::sync::OnceLock;

/// The purpose of a feature's collectives, beside the code that makes them. Its text is known to this process once they are made, and ranks
/// that make others hear of it when something fails.
pub(crate) struct Purpose {
    text: &'static str,
    label: OnceLock<Label>,
}

impl Purpose {
    /// No other purpose has this text.
    pub(crate) const fn of(text: &'static str) -> Self {
        Self { text, label: OnceLock::new() }
    }

    /// Gives this label to the calls that `work` makes on this thread, unless they have one already.
    pub(crate) fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        self.label.get_or_init(|| Label::register(self.text)).during(work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;
    use std::path::Path;

    /// The texts of all purposes in the sources of `folder`.
    fn texts(folder: &Path, found: &mut Vec<String>) {
        for entry in folder.read_dir().unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                texts(&path, found);
            } else {
                let source = std::fs::read_to_string(&path).unwrap();
                let after = source.split(concat!("Purpose", "::of(")).skip(1);
                found.extend(after.map(|rest| rest.split('"').nth(1).unwrap().to_string()));
            }
        }
    }

    #[test]
    fn every_purpose_has_a_text_and_a_number_of_its_own() {
        let mut all = Vec::new();
        texts(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut all);
        assert!(all.len() > 20, "{all:?}");
        let mut labels = HashMap::new();
        for text in all {
            if let Some(other) = labels.insert(Label::register(text.as_str()), text.clone()) {
                panic!("{other:?} and {text:?} have the same number");
            }
        }
    }

    #[test]
    fn the_calls_of_a_purpose_have_its_label() {
        static OUTER: Purpose = Purpose::of("the purpose of a test");
        static INNER: Purpose = Purpose::of("the purpose of its part");
        let outer = OUTER.during(Label::current);
        assert_eq!(outer, Label::register("the purpose of a test"));
        assert_eq!(OUTER.during(|| INNER.during(Label::current)), outer);
        assert_ne!(INNER.during(Label::current), outer);
    }
}
