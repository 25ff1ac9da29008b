use super::*;
use std::ffi::OsStr;

fn prepare(path: &Path, value: u8) -> PreparedFile {
    PreparedFile::write(path, &Progress::default(), |file| file.write_all(&[value])).unwrap()
}

fn value(path: &Path) -> u8 {
    match std::fs::read(path).unwrap()[..] {
        [value] => value,
        ref other => panic!("{other:?}"),
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn only_a_commit_changes_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w");
    drop(prepare(&path, 1));
    assert!(names(folder.path()).is_empty());
    prepare(&path, 2).commit().unwrap();
    let prepared = prepare(&path, 3);
    assert_eq!(value(&path), 2);
    assert_eq!(names(folder.path()).len(), 2);
    drop(prepared);
    assert_eq!((value(&path), names(folder.path())), (2, vec!["w".to_string()]));
}

#[test]
fn what_was_written_can_be_replaced_before_the_commit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w");
    let write = |file: &mut dyn Rewrite| {
        file.write_all(b"0123")?;
        file.overwrite(1, b"ab")?;
        file.write_all(b"45")
    };
    PreparedFile::write(&path, &Progress::default(), write).unwrap().commit().unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"0ab345");
}

#[test]
fn leftovers_are_removed_and_what_is_being_written_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w");
    // A leftover, and names that others have given.
    let others =
        [".w.0123456789abcde.tmp", ".w.0123456789abcdef", ".w2.0123456789abcdef.tmp", "w.0123456789abcdef.tmp"];
    for name in others.iter().chain(&[".w.0123456789abcdef.tmp"]) {
        std::fs::write(folder.path().join(name), "left").unwrap();
    }
    std::fs::create_dir(folder.path().join(".w.1123456789abcdef.tmp")).unwrap();
    let live = prepare(&path, 1);
    let temporary = live.temporary.file_name().unwrap().to_str().unwrap().to_string();
    prepare(&path, 2).commit().unwrap();
    assert_eq!(value(&path), 2);
    let mut expected: Vec<_> = others.iter().map(|name| name.to_string()).collect();
    expected.extend(["w".to_string(), temporary, ".w.1123456789abcdef.tmp".to_string()]);
    expected.sort();
    assert_eq!(names(folder.path()), expected);
    live.commit().unwrap();
    assert_eq!(value(&path), 1);
}

/// Many at once, each of which looks for leftovers while others begin.
#[test]
fn writes_to_one_target_do_not_disturb_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w");
    std::thread::scope(|scope| {
        for number in 0..4 {
            let path = &path;
            scope.spawn(move || (0..25).for_each(|_| prepare(path, number).commit().unwrap()));
        }
    });
    assert!(value(&path) < 4);
    assert_eq!(names(folder.path()), ["w"]);
}

#[test]
fn a_write_that_is_called_off_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w");
    let progress = Progress::default();
    progress.cancel();
    let error = PreparedFile::write(&path, &progress, |file| file.write_all(&[1])).unwrap_err().to_string();
    assert!(error.contains("cancelled"), "{error}");
    assert!(names(folder.path()).is_empty());
}

#[test]
fn a_file_of_a_cache_appears_as_a_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("w");
    replace_unsynced(&path, |file| file.write_all(&[1])).unwrap();
    let failed = replace_unsynced(&path, |file| {
        file.write_all(&[2])?;
        assert_eq!((value(&path), names(folder.path()).len()), (1, 2));
        Err(io::Error::other("the disk is full"))
    });
    assert!(failed.is_err());
    assert_eq!((value(&path), names(folder.path())), (1, vec!["w".to_string()]));
}

#[test]
fn long_names_are_cut_between_characters() {
    let prefix = temporary::prefix;
    assert_eq!(prefix(OsStr::new("model.safetensors")), ".model.safetensors.");
    assert_eq!(prefix(OsStr::new(&"x".repeat(255))).len(), 102);
    assert_eq!(prefix(OsStr::new(&format!("x{}", "é".repeat(120)))), format!(".x{}.", "é".repeat(49)));
}

/// Who made the file may have made it readable for everybody.
#[test]
fn the_permissions_of_another_users_file_are_not_taken_for_a_name_that_nobody_chose() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.html");
    let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
    let replace = || PreparedFile::create_over_links(&path).unwrap().commit().unwrap();
    std::fs::write(&path, "").unwrap();
    let plain = mode();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
    replace();
    assert_eq!(mode(), 0o666);
    if std::os::unix::fs::chown(&path, Some(65534), None).is_err() {
        return candle_ddp_testing::skip("another user's file", "only root can give files away");
    }
    replace();
    assert_eq!(mode(), plain);
}

#[test]
fn only_names_with_a_number_are_those_of_ranks() {
    let found =
        ["rank0.x", "rank12.x", "rank.x", "rank+1.x", "rank1\n.x", "rank1", "a1.x"].map(|name| rank_in(name, ".x"));
    assert_eq!(found, [Some(0), Some(12), None, None, None, None, None]);
}
