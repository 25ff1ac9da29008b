//! `TarShards`: samples of tar files, their indices, and shards that are damaged or change.
use candle_ddp_testing::tar_files::{files, shard};
use candle_ddp_webdataset::{Error, Result, TarShards};
use std::fs;
use std::path::Path;
use tempfile::tempdir;

fn keys(shards: &TarShards) -> Vec<String> {
    (0..shards.num_samples()).map(|index| shards.sample(index).unwrap().key().to_string()).collect()
}

#[test]
fn files_of_a_sample_come_together() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("a.tar");
    let long = format!("{}/{}", "folder".repeat(20), "name".repeat(30));
    let mut tar = tar::Builder::new(fs::File::create(&path).unwrap());
    let mut add = |name: &str, content: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        tar.append_data(&mut header, name, content).unwrap();
    };
    add("README", b"belongs to no sample");
    add("x/0.jpg", &[7; 1000]);
    add("x/.hidden.jpg", b"nor does this");
    add("x/0.seg.png", &[]);
    add("x/notes", b"nor this");
    add("x/1.jpg", &[8; 512]);
    add(&format!("{long}.jpg"), b"long");
    add(&format!("{long}.cls"), b"3");
    let mut link = tar::Header::new_gnu();
    link.set_entry_type(tar::EntryType::Symlink);
    link.set_size(0);
    tar.append_link(&mut link, "2.jpg", "x/1.jpg").unwrap();
    tar.append_dir("folder.d", folder.path()).unwrap();
    tar.finish().unwrap();

    let shards = TarShards::new([&path]).unwrap();
    assert_eq!(keys(&shards), ["x/0", "x/1", &long]);
    let first = shards.sample(0).unwrap();
    assert_eq!(first.files().collect::<Vec<_>>(), [("jpg", &[7; 1000][..]), ("seg.png", &[])]);
    assert_eq!((first.get("jpg"), first.get("png")), (Some(&[7; 1000][..]), None));
    let last = shards.sample(2).unwrap();
    assert_eq!((last.get("jpg"), last.get("cls")), (Some(&b"long"[..]), Some(&b"3"[..])));
    assert!(matches!(shards.sample(3), Err(Error::InvalidArgument { argument: "index", .. })));
}

#[test]
fn shards_are_in_the_order_of_their_paths() {
    let folder = tempdir().unwrap();
    for (name, first, count) in [("b.tar", 3, 2), ("c.tar", 5, 0), ("a.tar", 0, 3), ("d.tar", 5, 1)] {
        shard(&folder.path().join(name), &files(first..first + count));
    }
    fs::write(folder.path().join("notes.txt"), "no shard").unwrap();
    let shards = TarShards::in_folder(folder.path()).unwrap();
    assert_eq!(keys(&shards), ["00000", "00001", "00002", "00003", "00004", "00005"]);
    assert_eq!(shards.samples_of_shards().collect::<Vec<_>>(), [0..3, 3..5, 5..5, 5..6]);
    let paths = ["d.tar", "a.tar", "b.tar"].map(|name| folder.path().join(name));
    assert_eq!(keys(&TarShards::new(paths).unwrap()), keys(&shards));
}

#[test]
fn an_index_is_made_once_and_again_if_it_is_damaged() {
    let (folder, indices) = (tempdir().unwrap(), tempdir().unwrap());
    let path = folder.path().join("a.tar");
    shard(&path, &files(0..20));
    let open = || TarShards::with_index_folder([&path], &indices).unwrap();
    let index = || {
        let mut files: Vec<_> = fs::read_dir(indices.path()).unwrap().map(|file| file.unwrap().path()).collect();
        assert_eq!(files.len(), 1, "{files:?}");
        files.remove(0)
    };
    // All ranks at once, in a folder that none has been in.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(open().num_samples(), 20));
        }
    });
    let (content, made) = (fs::read(index()).unwrap(), index().metadata().unwrap().modified().unwrap());
    assert_eq!(keys(&open()).len(), 20);
    assert_eq!(index().metadata().unwrap().modified().unwrap(), made);
    for damaged in
        [&content[..content.len() - 8], &content[..13], &[], &[&content[..40], &[1], &content[41..]].concat()]
    {
        fs::write(index(), damaged).unwrap();
        assert_eq!(keys(&open()).len(), 20);
        assert_eq!(fs::read(index()).unwrap(), content);
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    // By default, the index lies next to the shard.
    TarShards::new([&path]).unwrap();
    assert!(folder.path().join("a.tar.index").exists());
}

/// A fault of a shard, and its place.
fn assert_shard_error<T: std::fmt::Debug>(result: Result<T>, shard: &Path, texts: &[&str]) {
    match result {
        Err(Error::DataFile { path, reason }) => {
            assert_eq!(path, shard);
            assert!(texts.iter().all(|text| reason.contains(text)), "{reason}");
        }
        other => panic!("{texts:?}: {other:?}"),
    }
}

#[test]
fn damaged_shards_are_named_with_the_place() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("a.tar");
    // Each sample takes a header and a block for each of its two files: 2048 bytes.
    shard(&path, &files(0..3));
    let whole = fs::read(&path).unwrap();
    let open = |content: &[u8]| {
        fs::write(&path, content).unwrap();
        TarShards::new([&path])
    };
    // Within a header, within a file, after a file, and at the very end.
    assert_shard_error(open(&whole[..4096 + 100]), &path, &["at byte 4096: "]);
    assert_shard_error(open(&whole[..4096 + 600]), &path, &["at byte 4096: it is truncated", "of this file"]);
    assert_shard_error(open(&whole[..4096]), &path, &["at byte 2048: it is truncated", "byte 4096"]);
    assert_shard_error(open(&whole[..6144]), &path, &["at byte 4096: it is truncated", "byte 6144"]);
    assert_shard_error(open(&[]), &path, &["at byte 0: it is truncated"]);
    let mut damaged = whole.clone();
    damaged[2048 + 3] ^= 1;
    assert_shard_error(open(&damaged), &path, &["at byte 2048: ", "checksum"]);
    assert_shard_error(open(&[31; 2000]), &path, &["at byte 0: ", "plain tar file"]);
    assert!(!folder.path().join("a.tar.index").exists());

    shard(&path, &[("0.jpg", b"1"), ("1.jpg", b"1"), ("0.cls", b"1")]);
    assert_shard_error(TarShards::new([&path]), &path, &["at byte 2048: ", "sample 0", "--sort=name"]);
    shard(&path, &[("0.jpg", b"1"), ("0.jpg", b"2")]);
    assert_shard_error(TarShards::new([&path]), &path, &["at byte 1024: ", "two files .jpg"]);

    let missing = folder.path().join("b.tar");
    assert_shard_error(TarShards::new([&missing]), &missing, &["No such file"]);
    let refused = |result: Result<TarShards>, text: &str| match result {
        Err(Error::InvalidArgument { reason, .. }) => assert!(reason.contains(text), "{reason}"),
        other => panic!("{text}: {other:?}"),
    };
    shard(&path, &[("README", b"1")]);
    refused(TarShards::new([&path]), "at least one sample");
    refused(TarShards::new([&path, &path]), "once, not twice");
    refused(TarShards::new([""; 0]), "at least one shard");
    refused(TarShards::in_folder(tempdir().unwrap()), "no file *.tar");
}

#[test]
fn a_shard_that_changes_is_an_error() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("a.tar");
    shard(&path, &files(0..3));
    let opened = TarShards::new([&path]).unwrap();
    let later = |seconds| {
        let time = std::time::SystemTime::now() + std::time::Duration::from_secs(seconds);
        fs::File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
    };
    later(10);
    let hint = folder.path().join("a.tar.index").display().to_string();
    assert_shard_error(opened.sample(1), &path, &["has changed", "written to"]);
    assert_shard_error(TarShards::new([&path]), &path, &["has changed", "written to", "remove", &hint]);
    shard(&path, &files(0..30));
    assert_shard_error(opened.sample(1), &path, &["has changed", "bytes and has"]);
    assert_shard_error(TarShards::new([&path]), &path, &["has changed", "bytes and has", &hint]);
    fs::remove_file(hint).unwrap();
    assert_eq!(TarShards::new([&path]).unwrap().num_samples(), 30);
}

#[test]
fn a_folder_with_compressed_shards_is_refused() {
    let folder = tempdir().unwrap();
    shard(&folder.path().join("0.tar"), &files(0..2));
    assert_eq!(TarShards::in_folder(folder.path()).unwrap().num_samples(), 2);
    for name in ["1.tar.gz", "1.tgz", "1.tar.zst", "1.TAR.GZ"] {
        fs::write(folder.path().join(name), "compressed").unwrap();
        let error = TarShards::in_folder(folder.path()).unwrap_err();
        assert!(matches!(&error, Error::InvalidArgument { argument: "folder", .. }), "{error:?}");
        assert!(error.to_string().contains(&format!("{name} is compressed")), "{error}");
        fs::remove_file(folder.path().join(name)).unwrap();
    }
}

/// Somebody else may have put it there.
#[test]
fn an_index_replaces_a_link() {
    let folder = tempdir().unwrap();
    let (path, other) = (folder.path().join("a.tar"), folder.path().join("other"));
    shard(&path, &files(0..2));
    for linked in ["", "ddp-tar2, but damaged"] {
        fs::write(&other, linked).unwrap();
        let index = folder.path().join("a.tar.index");
        let _ = fs::remove_file(&index);
        std::os::unix::fs::symlink(&other, &index).unwrap();
        TarShards::new([&path]).unwrap();
        assert_eq!(fs::read_to_string(&other).unwrap(), linked);
        assert!(index.symlink_metadata().unwrap().is_file());
    }
}
