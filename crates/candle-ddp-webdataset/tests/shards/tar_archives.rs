//! `TarShards` of archives that GNU tar and bsdtar have made, and of those that are not whole.
use candle_ddp_testing::Random;
use candle_ddp_testing::tar_files::{files, shard};
use candle_ddp_webdataset::{Error, Result, TarSample, TarShards};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use tempfile::{TempDir, tempdir};

fn golden(name: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)).unwrap()
}

/// A folder with a shard.
struct Made(TempDir);

impl Made {
    fn new() -> Self {
        Self(tempdir().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("a.tar")
    }

    /// The shard with this content, opened for the first time.
    fn open(&self, content: &[u8]) -> Result<TarShards> {
        let _ = fs::remove_file(self.0.path().join("a.tar.index"));
        fs::write(self.path(), content).unwrap();
        TarShards::new([self.path()])
    }

    /// Changes the content behind the back of its index.
    fn change(&self, content: &[u8]) {
        let modified = fs::metadata(self.path()).unwrap().modified().unwrap();
        fs::write(self.path(), content).unwrap();
        set_modified(&self.path(), modified);
    }
}

fn set_modified(path: &Path, time: SystemTime) {
    fs::File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
}

/// All samples with their files, or the first error.
fn all(shards: Result<TarShards>) -> Result<Vec<(String, Vec<String>)>> {
    let shards = shards?;
    let of_sample = |sample: TarSample| {
        let files = sample.files().map(|(name, content)| format!("{name}={}", String::from_utf8_lossy(content)));
        (sample.key().to_string(), files.collect())
    };
    (0..shards.num_samples()).map(|index| shards.sample(index).map(of_sample)).collect()
}

fn refused<T: std::fmt::Debug>(result: Result<T>, what: &str, texts: &[&str]) {
    match result {
        Err(Error::DataFile { reason, .. }) => {
            assert!(texts.iter().all(|text| reason.contains(text)), "{what}: {reason}")
        }
        other => panic!("{what}: {other:?}"),
    }
}

#[test]
fn sparse_files_are_refused() {
    let made = Made::new();
    for name in ["gnu", "bsdtar", "posix_0.0", "posix_0.1", "posix_1.0"] {
        refused(all(made.open(&golden(&format!("sparse_{name}.tar")))), name, &["at byte ", "sparse file", "--sparse"]);
    }
}

#[test]
fn pax_records_are_read() {
    let made = Made::new();
    let long = format!("o/folder/{}", "long".repeat(40));
    let mut expected = [
        (long, vec!["cls=3", "txt=a"]),
        ("o/folder/n\u{fffd}\u{fffd}".to_string(), vec!["cls=4", "txt=b"]),
        ("o/plain".to_string(), vec!["cls=5", "txt=c"]),
    ];
    expected.sort();
    for name in ["pax_gnu.tar", "pax_bsdtar.tar"] {
        let mut found = all(made.open(&golden(name))).unwrap();
        found.iter_mut().for_each(|(_, files)| files.sort());
        found.sort();
        assert!(
            found.iter().zip(&expected).all(|(found, expected)| found.0 == expected.0 && found.1 == expected.1),
            "{found:?}"
        );
        assert_eq!(found.len(), 3);
    }
}

/// A header and its content. The size in the header is `size`.
fn member(kind: u8, name: &str, size: u64, content: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_ustar();
    header.set_path(name).unwrap();
    header.set_mode(0o644);
    header.set_size(size);
    header.set_entry_type(tar::EntryType::new(kind));
    header.set_cksum();
    let mut bytes = [header.as_bytes(), content].concat();
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

fn extended(kind: u8, content: &[u8]) -> Vec<u8> {
    member(kind, "extended", content.len() as u64, content)
}

fn archive(members: &[Vec<u8>]) -> Vec<u8> {
    [members.concat(), vec![0; 1024]].concat()
}

#[test]
fn what_records_say_counts() {
    let made = Made::new();
    let file = |size| member(b'0', "b.txt", size, b"hello");
    let read = |members: &[Vec<u8>]| all(made.open(&archive(members))).map(|mut samples| samples.remove(0));
    let hello = |key: &str| (key.to_string(), vec!["txt=hello".to_string()]);
    let records = |text: &[u8]| extended(b'x', text);
    assert_eq!(read(&[file(5)]).unwrap(), hello("b"));
    assert_eq!(read(&[records(b"10 size=5\n"), file(0)]).unwrap(), hello("b"));
    assert_eq!(read(&[records(b"14 path=c.txt\n19 comment=\xff\n\0\n\n x\n"), file(5)]).unwrap(), hello("c"));
    // The last one counts, an empty one deletes, and GNU's long name takes precedence.
    assert_eq!(read(&[records(b"14 path=c.txt\n14 path=d.txt\n"), file(5)]).unwrap(), hello("d"));
    assert_eq!(read(&[records(b"14 path=c.txt\n8 path=\n8 size=\n"), file(5)]).unwrap(), hello("b"));
    assert_eq!(read(&[records(b"14 path=c.txt\n"), extended(b'L', b"e.txt\0"), file(5)]).unwrap(), hello("e"));
    assert_eq!(read(&[extended(b'g', b"14 comment=hi\n"), member(b'7', "b.txt", 5, b"hello")]).unwrap(), hello("b"));

    let refuses =
        |members: &[Vec<u8>], text: &str| refused(all(made.open(&archive(members))), text, &["at byte ", text]);
    refuses(&[extended(b'g', b"10 size=5\n"), file(5)], "global header must not give the size");
    refuses(&[extended(b'g', b"14 path=c.txt\n"), file(5)], "global header must not give the path");
    refuses(&[extended(b'g', b"22 GNU.sparse.major=1\n"), file(5)], "sparse");
    refuses(&[records(b"24 SCHILY.realsize=9999\n"), file(5)], "sparse");
    for damaged in [&b"10 size=5"[..], b"99 size=5\n", b"x\n", b"8 size=5\n", b"2 \n", b"99999999999999999999 a=b\n"] {
        refuses(&[records(damaged), file(5)], "PAX records are damaged");
    }
    refuses(&[records(b"11 size=-5\n"), file(5)], "must be a number");
    refuses(&[records(b"10 size=5\n"), records(b"10 size=5\n"), file(5)], "second PAX records");
    refuses(&[records(b"29 size=18446744073709551615\n"), file(5)], "truncated");
    refuses(&[records(b"10 size=5\n")], "no file follows");
    refuses(&[member(b'x', "x", 1 << 40, b""), file(5)], "at most 1048576 bytes");
    refuses(&[member(b'2', "b.txt", 5, b"hello")], "a link or a folder must have 0 bytes");
    refuses(&[member(b'M', "b.txt", 5, b"hello")], "another archive");
    let mut negative = file(5);
    negative[124..136].copy_from_slice(&[0xff; 12]);
    let sum: u32 = negative[..512]
        .iter()
        .enumerate()
        .map(|(at, byte)| if (148..156).contains(&at) { 32 } else { u32::from(*byte) })
        .sum();
    negative[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    refuses(&[negative], "overflows, or is negative");
}

/// Each sample of `files` has a header and a block for each of its two files: 2048 bytes.
fn whole(made: &Made) -> Vec<u8> {
    shard(&made.path(), &files(0..4));
    fs::read(made.path()).unwrap()
}

#[test]
fn no_sample_comes_without_one_of_its_files() {
    let made = Made::new();
    let whole = whole(&made);
    let good = all(made.open(&whole)).unwrap();
    for first in (0..whole.len() - 1024).step_by(1024) {
        for blocks in 1..4 {
            let mut damaged = whole.clone();
            let end = (first + 512 * blocks).min(whole.len());
            damaged[first..end].fill(0);
            // Before there is an index. Zeros up to the end make it an archive of fewer files.
            let found = all(made.open(&damaged));
            match end >= whole.len() - 1024 {
                true => assert!(found.is_ok_and(|found| found.len() <= good.len())),
                false => refused(found, &format!("{blocks} from {first}"), &[&format!("at byte {first}: ")]),
            }
            // After that, wherever they are.
            let opened = made.open(&whole).unwrap();
            made.change(&damaged);
            for (index, expected) in good.iter().enumerate() {
                match opened.sample(index) {
                    Ok(sample) => {
                        assert_eq!(sample.files().count(), expected.1.len(), "{blocks} from {first}: {expected:?}")
                    }
                    Err(error) => assert!(error.to_string().contains("a.tar.index"), "{error}"),
                }
            }
            let sample = opened.sample(first / 2048);
            refused(sample, &format!("{blocks} from {first}"), &["says otherwise", "has changed"]);
        }
    }
}

#[test]
fn nothing_but_zeros_follows_the_end() {
    let made = Made::new();
    let whole = whole(&made);
    let good = all(made.open(&whole)).unwrap();
    for zeros in [0, 1, 511, 10_000, 200_000] {
        assert_eq!(all(made.open(&[&whole[..], &vec![0; zeros]].concat())).unwrap(), good, "{zeros}");
    }
    // One block of zeros ends it as well.
    assert_eq!(all(made.open(&whole[..whole.len() - 512])).unwrap(), good);
    let another = ["another archive seems to begin", "tar --concatenate"];
    refused(made.open(&[&whole[..], &whole].concat()), "cat", &another);
    refused(made.open(&[&whole[..], &[0; 70_144], &whole].concat()), "cat", &["at byte 8192: ", another[0]]);
    refused(made.open(&[&whole[..], b"garbage"].concat()), "garbage", &["at byte 8192: ", "more than zeros"]);
    refused(made.open(&[&whole[..], &[0; 99_999], &[1]].concat()), "garbage", &["more than zeros", "byte 109215"]);
}

/// Flipped bits in headers are errors. Flipped bits in contents and in PAX records, which have no checksum, may not show, and do no
/// harm.
#[test]
fn a_damaged_archive_is_an_error_or_whole() {
    let made = Made::new();
    let mut random = Random(7);
    for name in ["pax_gnu.tar", "pax_bsdtar.tar", "sparse_posix_1.0.tar"] {
        let content = golden(name);
        let samples = all(made.open(&content)).ok();
        for _ in 0..200 {
            let mut damaged = content.clone();
            let (place, kind) = (random.below(content.len() as u64) as usize, random.below(3));
            match kind {
                0 => damaged[place] ^= 1 << random.below(8),
                1 => damaged.truncate(place),
                _ => damaged[place / 512 * 512..place / 512 * 512 + 512].fill(0),
            }
            let Ok(found) = all(made.open(&damaged)) else { continue };
            let samples = samples.as_ref().expect("a sparse file was read");
            let shape = |samples: &[(String, Vec<String>)]| {
                samples.iter().map(|(key, files)| (key.clone(), files.len())).collect::<Vec<_>>()
            };
            assert!(kind == 0 || shape(&found) == shape(samples), "{found:?}");
        }
    }
}

#[test]
fn an_index_is_of_one_shard() {
    let folder = tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    // Of the same size and time, so that only their names differ.
    let time = SystemTime::now();
    for (name, first) in [("a.tar", "x"), ("b.tar", "y")] {
        shard(
            &path(name),
            &[(format!("{first}.txt"), name), ("z.txt".to_string(), name), (format!("{first}{first}.cls"), name)],
        );
        set_modified(&path(name), time);
    }
    let open = |name: &str| TarShards::new([path(name)]);
    let (a, b) = (all(open("a.tar")).unwrap(), all(open("b.tar")).unwrap());
    let made = fs::read(path("a.tar.index")).unwrap();
    fs::copy(path("b.tar.index"), path("a.tar.index")).unwrap();
    assert_eq!(all(open("a.tar")).unwrap(), a);
    assert_eq!(fs::read(path("a.tar.index")).unwrap(), made);
    // Nor does a file go over somebody else's.
    for foreign in [&b"my own list"[..], b"d"] {
        fs::write(path("b.tar.index"), foreign).unwrap();
        refused(open("b.tar"), "foreign", &["is none", "TarShards::with_index_folder"]);
        assert_eq!(fs::read(path("b.tar.index")).unwrap(), foreign);
    }
    // A folder of indices, for shards of the same name.
    let indices = tempdir().unwrap();
    let other = tempdir().unwrap();
    fs::rename(path("b.tar"), other.path().join("a.tar")).unwrap();
    for _ in 0..2 {
        for (folder, expected) in [(&folder, &a), (&other, &b)] {
            let shards = TarShards::with_index_folder([folder.path().join("a.tar")], &indices);
            assert_eq!(all(shards).unwrap(), *expected);
        }
    }
    assert_eq!(fs::read_dir(indices.path()).unwrap().count(), 2);
}
