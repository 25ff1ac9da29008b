//! The small data sets of the example programs. A program that finds one in the user's cache takes it as it is, so that other
//! files need another version.
use std::fs;
use std::path::{Path, PathBuf};

#[path = "../../examples/cifar10_resnet18/small.rs"]
mod cifar10;
#[path = "../../examples/common/digits.rs"]
mod digits;
#[path = "../../examples/ade20k_deeplab/small.rs"]
mod drawings;
#[path = "../../examples/imagefolder_resnet/small.rs"]
mod folder;
#[path = "../../examples/common/pictures.rs"]
mod pictures;

/// Returns FNV-1a over the names and contents of all files in the folder.
fn hash(root: &Path) -> u64 {
    let (mut folders, mut files) = (vec![root.to_path_buf()], Vec::<PathBuf>::new());
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let (found_folders, found_files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
        folders.extend(found_folders);
        files.extend(found_files);
    }
    files.sort();
    let named = |file: &PathBuf| {
        let name = file.strip_prefix(root).unwrap().to_str().unwrap().replace('\\', "/");
        [name.into_bytes(), fs::read(file).unwrap()].concat()
    };
    let bytes = files.iter().flat_map(named);
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[test]
fn other_files_have_another_version() {
    type Write = fn(&Path) -> std::io::Result<()>;
    let sets: [(&str, Write, u32, (u32, u64)); 3] = [
        ("cifar10_resnet18", cifar10::write, cifar10::VERSION, (1, 0x4b24_8ce2_215a_0d43)),
        ("imagefolder_resnet", folder::write, folder::VERSION, (1, 0x1507_a94a_9f5f_ffb1)),
        ("ade20k_deeplab", drawings::write, drawings::VERSION, (1, 0xd98a_a840_a3f4_f787)),
    ];
    let found = sets.map(|(example, write, version, _)| {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path()).unwrap();
        (example, version, hash(folder.path()))
    });
    let expected = sets.map(|(example, _, _, (version, hash))| (example, version, hash));
    let advice = "where a small data set has become another, raise its version and change the hash here";
    assert_eq!(found, expected, "{advice}: {found:#x?}");
}
