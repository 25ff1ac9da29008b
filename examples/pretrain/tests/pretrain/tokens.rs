//! Files of tokens that are whole, and files that are not.
use crate::files::{file, u16s, u32s};
use candle_ddp::Result;
use candle_ddp::data::Dataset;
use candle_ddp::seed::Generator;
use pretrain::{Cut, Format, TokenFile, Tokens};
use std::path::{Path, PathBuf};

/// llm.c's header.
fn header(magic: u32, version: u32, count: u32) -> Vec<u8> {
    let mut header = u32s([magic, version, count]);
    header.resize(1024, 0);
    header
}

const GPT2: u32 = 20240520;
const LLAMA3: u32 = 20240801;

fn all(path: &Path, format: Format) -> Vec<u32> {
    let file = TokenFile::open(path, format).unwrap();
    file.read(0..file.len(), 200_000).unwrap()
}

#[test]
fn every_format_gives_its_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, parts: [Vec<u8>; 2]| file(folder.path(), name, &parts.concat());
    let raw = write("raw.bin", [vec![], u16s([7, 50256, 65535])]);
    assert_eq!(all(&raw, Format::Auto), [7, 50256, 65535]);
    assert_eq!(all(&raw, Format::U16), [7, 50256, 65535]);
    let wide = write("wide.bin", [vec![], u32s([7, 128_000])]);
    assert_eq!(all(&wide, Format::U32), [7, 128_000]);
    let gpt2 = write("gpt2.bin", [header(GPT2, 1, 3), u16s([50256, 1, 2])]);
    let llama3 = write("llama3.bin", [header(LLAMA3, 7, 2), u32s([128_000, 5])]);
    for format in [Format::Auto, Format::LlmC] {
        assert_eq!(all(&gpt2, format), [50256, 1, 2]);
        assert_eq!(all(&llama3, format), [128_000, 5]);
    }
    // Without a header, these are the tokens.
    assert_eq!(all(&gpt2, Format::U16).len(), 512 + 3);
}

#[test]
fn a_broken_file_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let cases: [(&str, Vec<u8>, Format, &str); 11] = [
        ("empty", vec![], Format::Auto, "it must have tokens, but it is empty"),
        ("odd", vec![1, 2, 3], Format::Auto, "its size must be a multiple of 2 bytes, the size of a token, not 3"),
        ("odd_wide", vec![1; 6], Format::U32, "its size must be a multiple of 4 bytes, the size of a token, not 6"),
        (
            "truncated",
            [header(GPT2, 1, 3), u16s([1, 2])].concat(),
            Format::Auto,
            "3 tokens of 2 bytes that its header announces, but 4 bytes follow",
        ),
        (
            "longer",
            [header(LLAMA3, 7, 1), u32s([1, 2])].concat(),
            Format::Auto,
            "1 tokens of 4 bytes that its header announces, but 8 bytes follow",
        ),
        ("version", header(GPT2, 7, 0), Format::Auto, "the version of its header must be 1, not 7"),
        ("version3", header(LLAMA3, 1, 0), Format::LlmC, "the version of its header must be 7, not 1"),
        ("magic", header(20240326, 1, 0), Format::LlmC, "its magic number must be 20240520 or 20240801, not 20240326"),
        ("short_header", u32s([GPT2, 1, 9]), Format::Auto, "it must have a header of 1024 bytes, but it has 12 bytes"),
        ("tiny", vec![1, 2], Format::LlmC, "it must have a header of 1024 bytes, but it has 2 bytes"),
        ("none", header(GPT2, 1, 0), Format::Auto, "it must have tokens, but its header announces none"),
    ];
    for (name, bytes, format, reason) in cases {
        let path = file(folder.path(), name, &bytes);
        let error = TokenFile::open(&path, format).unwrap_err().to_string();
        assert!(error.starts_with(&path.display().to_string()) && error.contains(reason), "{name}: {error}");
    }
    let missing = folder.path().join("missing.bin");
    let error = TokenFile::open(&missing, Format::Auto).unwrap_err().to_string();
    assert!(error.contains("opening") && error.contains("missing.bin"), "{error}");
}

#[test]
fn a_token_beyond_the_vocabulary_is_an_error_when_it_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path(), "tokens.bin", &u16s([1, 2, 300, 4]));
    let tokens = TokenFile::open(&path, Format::Auto).unwrap();
    assert_eq!(tokens.read(0..2, 256).unwrap(), [1, 2]);
    for vocabulary in [256, 300] {
        let error = tokens.read(1..4, vocabulary).unwrap_err().to_string();
        let reason =
            format!("tokens.bin: token 2 must be below the size of the vocabulary, {vocabulary}, but it is 300");
        assert!(error.contains(&reason), "{error}");
    }
    assert_eq!(tokens.read(1..4, 301).unwrap(), [2, 300, 4]);
}

#[test]
fn a_file_that_has_become_shorter_is_an_error_and_not_a_signal() {
    let folder = tempfile::tempdir().unwrap();
    let path = file(folder.path(), "shrinks.bin", &u16s(0..10_000));
    let tokens = TokenFile::open(&path, Format::Auto).unwrap();
    assert_eq!(tokens.read(9_998..10_000, 65536).unwrap(), [9_998, 9_999]);
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(10).unwrap();
    let error = tokens.read(9_998..10_000, 65536).unwrap_err().to_string();
    assert!(error.contains("shrinks.bin: it must keep its 20000 bytes while it is read, but it has 10 now"), "{error}");
}

fn cut(context: usize, end_of_text: Option<u32>) -> Cut {
    Cut { vocabulary: 1000, context, end_of_text }
}

fn open(paths: &[PathBuf], cut: Cut) -> Result<Tokens> {
    let files: Vec<_> = paths.iter().map(|path| (path, Format::Auto)).collect();
    Tokens::open("--data", &files, cut)
}

fn samples(paths: &[PathBuf], cut: Cut) -> Vec<Vec<u32>> {
    let tokens = open(paths, cut).unwrap();
    (0..tokens.len()).map(|index| tokens.get(index, &mut Generator::new(0)).unwrap()).collect()
}

#[test]
fn windows_predict_each_token_of_every_file_once() {
    let folder = tempfile::tempdir().unwrap();
    let first = file(folder.path(), "first.bin", &u16s(0..8));
    let second = file(folder.path(), "second.bin", &u16s(100..104));
    // The last token of the first file is in no window of four tokens.
    assert_eq!(samples(&[first, second], cut(3, None)), [[0, 1, 2, 3], [3, 4, 5, 6], [100, 101, 102, 103]]);
}

#[test]
fn documents_end_with_their_token_and_are_cut_at_the_context() {
    let folder = tempfile::tempdir().unwrap();
    let first = file(folder.path(), "first.bin", &u16s([1, 2, 9, 9, 3, 4, 5, 6, 9]));
    let second = file(folder.path(), "second.bin", &u16s([7, 8]));
    // A document without tokens is left out, and so is a single token at the end of a cut document.
    let expected = [vec![1, 2, 9], vec![3, 4, 5, 6], vec![7, 8]];
    assert_eq!(samples(&[first, second], cut(4, Some(9))), expected);
}

#[test]
fn files_without_samples_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let short = file(folder.path(), "short.bin", &u16s([1, 2, 3]));
    let error = |paths: &[PathBuf], cut| open(paths, cut).unwrap_err().to_string();
    let text = error(std::slice::from_ref(&short), cut(3, None));
    assert!(text.contains("short.bin: it must have more tokens than the context, 3, but it has 3"), "{text}");
    assert_eq!(error(&[], cut(3, None)), "--data: it must name at least one file");
    let ends = file(folder.path(), "ends.bin", &u16s([9, 9, 9]));
    assert_eq!(error(&[ends], cut(3, Some(9))), "--data: its files must have a document of at least two tokens");
}
