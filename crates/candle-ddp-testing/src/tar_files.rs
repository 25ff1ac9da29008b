//! Tar shards for tests.
use std::fs::File;
use std::ops::Range;
use std::path::Path;

/// Writes a shard of these files.
pub fn shard<N: AsRef<str>, C: AsRef<[u8]>>(path: &Path, files: &[(N, C)]) {
    let mut tar = tar::Builder::new(File::create(path).unwrap());
    for (name, content) in files {
        let mut header = tar::Header::new_ustar();
        header.set_size(content.as_ref().len() as u64);
        tar.append_data(&mut header, name.as_ref(), content.as_ref()).unwrap();
    }
    tar.finish().unwrap();
}

/// The files of samples of these numbers: a text and a class.
pub fn files(samples: Range<usize>) -> Vec<(String, String)> {
    let files = samples.flat_map(|number| {
        [(format!("{number:05}.txt"), format!("content of {number:05}")), (format!("{number:05}.cls"), "3".to_string())]
    });
    files.collect()
}
