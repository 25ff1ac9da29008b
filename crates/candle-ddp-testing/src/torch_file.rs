//! Files like those of `torch.save`, made by hand.
use std::io::{Cursor, Write};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

/// A tensor of a dtype that has no class of storages, as `torch.save` writes it.
pub fn untyped(dtype: &str, offset: i32, shape: &[i32]) -> Vec<u8> {
    let strides: Vec<i32> = shape.iter().map(|_| 1).collect();
    let tensor = tensor("UntypedStorage", offset, shape, &strides, &global(&format!("torch\n{dtype}")));
    replace(&replace(&tensor, b"_rebuild_tensor_v2", b"_rebuild_tensor_v3"), b"torch\nUnt", b"torch.storage\nUnt")
}

/// The first `from` becomes `to`.
pub fn replace(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let position = bytes.windows(from.len()).position(|window| window == from).unwrap();
    [&bytes[..position], to, &bytes[position + from.len()..]].concat()
}

/// An archive as `torch.save` makes it, with this pickle and one storage.
pub fn archive(pickle: &[u8], storage: &[u8]) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    for (name, bytes) in [("archive/data.pkl", pickle), ("archive/data/0", storage)] {
        zip.start_file(name, options).unwrap();
        zip.write_all(bytes).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

/// A text.
pub fn text(text: &str) -> Vec<u8> {
    [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
}

/// A class or a function: `MODULE\nNAME`.
pub fn global(name: &str) -> Vec<u8> {
    [b"c", name.as_bytes(), b"\n"].concat()
}

/// A dict of these names and values.
pub fn dict(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let entries: Vec<u8> = entries.iter().flat_map(|(name, value)| [&text(name), *value].concat()).collect();
    [b"}(", &entries[..], b"u"].concat()
}

/// `torch.as_strided(storage, shape, strides, offset)`; `metadata` are further arguments of `_rebuild_tensor_v2`.
pub fn tensor(class: &str, offset: i32, shape: &[i32], strides: &[i32], metadata: &[u8]) -> Vec<u8> {
    let int = |value: i32| [b"J", &value.to_le_bytes()[..]].concat();
    let tuple = |values: &[i32]| [b"(".to_vec(), values.iter().flat_map(|v| int(*v)).collect(), b"t".to_vec()].concat();
    [
        global("torch._utils\n_rebuild_tensor_v2"),
        b"((".to_vec(),
        text("storage"),
        global(&format!("torch\n{class}")),
        text("0"),
        text("cpu"),
        int(4),
        b"tQ".to_vec(),
        int(offset),
        tuple(shape),
        tuple(strides),
        b"\x89}".to_vec(),
        metadata.to_vec(),
        b"tR".to_vec(),
    ]
    .concat()
}

/// The first `count` floats of the storage.
pub fn floats_of(count: i32) -> Vec<u8> {
    tensor("FloatStorage", 0, &[count], &[1], b"")
}

/// A whole pickle of this value.
pub fn pickle(value: &[u8]) -> Vec<u8> {
    [b"\x80\x02", value, b"."].concat()
}

/// The floats 0, 1, 2 and 3.
pub fn storage() -> Vec<u8> {
    (0..4).flat_map(|value| (value as f32).to_le_bytes()).collect()
}
