//! File stores after a crash, after an earlier run, and with files of other users or kinds.
use candle_ddp_rendezvous::{FileStore, Store};
use candle_ddp_testing::{assert_error, test_process};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(120);

fn open(path: &Path) -> FileStore {
    FileStore::open(path, TIMEOUT).unwrap()
}

fn append(path: &Path, bytes: &[u8]) {
    OpenOptions::new().append(true).open(path).unwrap().write_all(bytes).unwrap();
}

#[test]
fn a_torn_change_never_happened() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let [one, two] = [open(&path), open(&path)];
    one.set("a", b"1").unwrap();
    let before = std::fs::read(&path).unwrap();
    one.set("b", b"a longer value").unwrap();
    let record = std::fs::read(&path).unwrap()[before.len()..].to_vec();
    two.wait(&["a", "b"], None).unwrap();
    let file = || OpenOptions::new().write(true).open(&path).unwrap();
    let whole = before.len() + record.len();
    // A writer may die after any number of bytes, and a host crash may leave zeros or garbage instead of data.
    let mut garbage = record.clone();
    *garbage.last_mut().unwrap() ^= 1;
    let torn = (1..record.len()).map(|cut| record[..cut].to_vec());
    for (round, torn) in torn.chain([vec![0; 5], vec![0xff; 64], garbage]).enumerate() {
        append(&path, &torn);
        let fresh = open(&path);
        for reader in [&one, &two, &fresh] {
            assert_eq!(reader.multi_get(&["a", "b"]).unwrap(), [&b"1"[..], b"a longer value"]);
            assert_eq!(reader.num_keys().unwrap(), 2);
        }
        let keeps = round % 2 == 0;
        // The next writer removes the torn record.
        let [writer, reader] = if keeps { [&one, &two] } else { [&two, &one] };
        writer.set("next", b"x").unwrap();
        assert_eq!(reader.get("next").unwrap(), b"x");
        writer.delete("next").unwrap();
        assert!(!reader.check(&["next"]).unwrap());
        assert!(!fresh.check(&["next"]).unwrap());
    }
    assert!(file().metadata().unwrap().len() > whole as u64);
}

#[test]
fn only_the_last_user_removes_the_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let [one, two] = [open(&path), open(&path)];
    one.set("a", b"1").unwrap();
    drop(one);
    assert_eq!(open(&path).get("a").unwrap(), b"1");
    drop(two);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_file_of_another_kind_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("thesis");
    std::fs::write(&path, "candle-ddp is a fine crate").unwrap();
    assert_error(FileStore::open(&path, TIMEOUT), &["exists and is not a store", "thesis"]);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "candle-ddp is a fine crate");
    assert_error(FileStore::open(folder.path().join("none/store"), TIMEOUT), &["none/store"]);
}

#[test]
fn only_its_owner_can_use_a_store() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let lock = folder.path().join("store.lock");
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    let store = open(&path);
    assert_eq!([mode(&path), mode(&lock)], [0o600; 2]);
    drop(store);
    // An empty file left by an earlier version is taken over and closed to other users.
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
    let store = open(&path);
    assert_eq!(mode(&path), 0o600);
    drop(store);
    // Neither file may be a link, because it could lead to any file of this user.
    let target = folder.path().join("target");
    for link in [&path, &lock] {
        std::fs::write(&target, "").unwrap();
        std::os::unix::fs::symlink(&target, link).unwrap();
        assert_error(FileStore::open(&path, TIMEOUT), &["is a symbolic link"]);
        assert_eq!(std::fs::read(&target).unwrap(), b"");
        for file in std::fs::read_dir(folder.path()).unwrap() {
            std::fs::remove_file(file.unwrap().path()).unwrap();
        }
    }
    // Only root can change a file's owner.
    std::fs::write(&path, "").unwrap();
    if std::os::unix::fs::chown(&path, Some(12_345), None).is_ok() {
        assert_error(FileStore::open(&path, TIMEOUT), &["belongs to user id 12345"]);
    }
}

#[test]
fn a_lock_that_is_never_freed_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = FileStore::open(&path, Duration::from_millis(100)).unwrap();
    let holder = File::open(&path).unwrap();
    holder.lock().unwrap();
    let start = Instant::now();
    let error = store.set("a", b"").unwrap_err().to_string();
    assert!(error.contains("holds the file's lock") && start.elapsed() < TIMEOUT / 2, "{error}");
    drop(holder);
    store.set("a", b"").unwrap();
}

/// A helper process rather than a test: sets a key in the file named by STORE, reports it, and never ends.
#[test]
#[ignore = "started by another test"]
fn user_process() {
    let store = open(Path::new(&std::env::var("STORE").unwrap()));
    store.set("stale", b"").unwrap();
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn leftovers_of_a_killed_run_are_cleared() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let mut command = test_process(module_path!(), "user_process");
    let mut run = command.env("STORE", &path).stdout(Stdio::null()).spawn().unwrap();
    while !path.exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let alive = open(&path);
    alive.wait(&["stale"], None).unwrap();
    drop(alive);
    run.kill().unwrap();
    run.wait().unwrap();
    assert!(path.exists(), "left over");
    append(&path, b"\x05half a change");
    let store = open(&path);
    assert!(!store.check(&["stale"]).unwrap());
    assert_eq!(store.num_keys().unwrap(), 0);
}

/// Users come and go all the time; each sees what the others set while it is there.
#[test]
fn coming_and_going() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let path = &path;
            scope.spawn(move || {
                for round in 0..2000 {
                    let store = open(path);
                    let key = format!("{thread} {round}");
                    store.set(&key, key.as_bytes()).unwrap();
                    let other = open(path);
                    assert_eq!(other.get(&key).unwrap(), key.as_bytes());
                }
            });
        }
    });
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
