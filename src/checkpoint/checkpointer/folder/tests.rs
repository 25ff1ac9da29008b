use super::*;
use crate::checkpoint::checkpointer::index::Files;
use crate::state::FileHash;
use std::collections::BTreeSet;

fn names(folder: &Path) -> BTreeSet<String> {
    folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn expect(folder: &Path, expected: &[&str]) {
    assert_eq!(names(folder), expected.iter().map(|name| name.to_string()).collect());
}

/// A complete checkpoint of one part.
fn save(root: &Path, step: u64) -> Checkpoint {
    let started = Started::new(root, step).unwrap();
    let path = started.path.clone();
    fs::write(path.join("model.safetensors"), "weights").unwrap();
    let hashes = [("model.safetensors".to_string(), FileHash(1))].into();
    let files = Files { hashes, non_finite: None };
    let index = Index::new(&path, step, false, 1, &[("model".to_string(), false)], files).unwrap();
    started.finish(&index, &Progress::default()).unwrap();
    let Listing { whole, faulty } = Listing::of(root).unwrap();
    assert!(faulty.is_empty(), "{faulty:?}");
    whole.into_iter().find(|one| one.path == path).unwrap()
}

#[test]
fn names_are_told_from_those_of_others() {
    let name = |text: &str| Name::parse(OsStr::new(text));
    for (step, attempt, text) in [
        (7, 1, "step-00000007"),
        (7, 12, "step-00000007-12"),
        (123_456_789, 1, "step-123456789"),
        (0, 1, "step-00000000"),
    ] {
        let expected = Name { step, attempt };
        assert_eq!((name(text), expected.text().as_str()), (Some(expected), text));
    }
    for text in ["step-7", "step-000000007", "step-00000007-1", "step-00000007-", "step-", "step--0000007", "00000007"]
    {
        assert_eq!(name(text), None, "{text}");
    }
    assert!(name("step-00000007") < name("step-00000007-2") && name("step-00000007-2") < name("step-00000008"));
}

#[test]
fn a_checkpoint_is_whole_once_it_has_an_index() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("deep/down");
    assert!(Listing::of(&root).unwrap().whole.is_empty());
    let started = Started::new(&root, 7).unwrap();
    fs::write(started.path.join("model.safetensors"), "weights").unwrap();
    let Listing { whole, faulty } = Listing::of(&root).unwrap();
    assert!(whole.is_empty() && faulty.is_empty());
    // A running save is not a leftover.
    clean(&root);
    assert_eq!(names(&started.path).len(), 2);
    drop(started);
    expect(&root, &[]);
    let saved = save(&root, 7);
    expect(&saved.path, &["checkpoint.json", "model.safetensors"]);
    // The same step again.
    let again = save(&root, 7);
    expect(&root, &["step-00000007", "step-00000007-2"]);
    assert!(again.name > saved.name);
    assert_eq!(Listing::of(&root).unwrap().whole.len(), 2);
    clean(&root);
    expect(&root, &["step-00000007", "step-00000007-2"]);
    // Damaged checkpoints are reported.
    fs::remove_file(again.path.join("model.safetensors")).unwrap();
    let Listing { whole, faulty } = Listing::of(&root).unwrap();
    assert_eq!((whole.len(), faulty.len()), (1, 1));
    let missing = Fault::Damaged("model.safetensors is missing".to_string());
    assert_eq!((&faulty[0].path, &faulty[0].fault), (&again.path, &missing));
}

#[test]
fn leftovers_are_removed_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let temporary = |name: &str| format!(".{name}.0123456789abcdef.tmp");
    let make = |folder: &str, files: &[&str]| {
        fs::create_dir(root.join(folder)).unwrap();
        files.iter().for_each(|file| fs::write(root.join(folder).join(file), "left").unwrap());
    };
    let index = temporary(INDEX);
    let model = temporary("model.safetensors");
    // The leftovers of saves that were killed at their beginning, middle and end, and of a removal.
    make("step-00000001", &[]);
    make("step-00000002", &[&index, &model]);
    make("step-00000003", &[&index, "model.safetensors", "optimizer-00000-of-00002.safetensors"]);
    make("step-00000004", &[&model]);
    // With a file of the user's.
    make("step-00000005", &[&index, "model.safetensors", "notes.txt"]);
    // Folders and files that are not ours.
    make("step-00000006", &["model.safetensors"]);
    make("step-00000007", &["model.safetensors", &model]);
    make("step-8", &[&index, "model.safetensors"]);
    make("other", &[&index, "model.safetensors"]);
    fs::write(root.join("step-00000009"), "a file").unwrap();
    let kept = save(root, 10);
    let live = Started::new(root, 11).unwrap();
    clean(root);
    let others = ["step-00000006", "step-00000007", "step-8", "other", "step-00000009"];
    let stay = [&["step-00000005", "step-00000010", "step-00000011"], &others[..]].concat();
    expect(root, &stay);
    expect(&root.join("step-00000005"), &["notes.txt"]);
    expect(&root.join("step-00000006"), &["model.safetensors"]);
    expect(&root.join("step-00000007"), &["model.safetensors", &model]);
    expect(&root.join("other"), &[&index, "model.safetensors"]);
    expect(&kept.path, &["checkpoint.json", "model.safetensors"]);
    assert_eq!(names(&live.path).len(), 1);
    clean(&root.join("missing"));
}

#[test]
fn only_its_own_files_are_removed_with_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (save(folder.path(), 1), save(folder.path(), 2));
    fs::write(old.path.join("mine.safetensors"), "mine").unwrap();
    remove(&old).unwrap();
    expect(&old.path, &["mine.safetensors"]);
    remove(&new).unwrap();
    expect(folder.path(), &["step-00000001"]);
    assert!(remove(&new).unwrap_err().to_string().contains("removing"));
}
