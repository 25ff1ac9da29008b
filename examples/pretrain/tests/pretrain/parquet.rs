//! Columns of Parquet files.
use crate::files::{file, u16s};
use candle_ddp::Result;
use parquet::basic::{Compression, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, Int32Type, Int64Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedColumnWriter, SerializedFileWriter};
use parquet::schema::parser::parse_message_type;
use pretrain::{Column, Format, TokenFile};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Writes a file with a column and a row group for each of `groups`.
fn write<G>(
    path: &Path,
    schema: &str,
    compression: Compression,
    groups: &[G],
    column: impl Fn(&mut SerializedColumnWriter<'_>, &G),
) -> PathBuf {
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = WriterProperties::builder().set_compression(compression).build();
    let file = std::fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
    for group in groups {
        let mut row_group = writer.next_row_group().unwrap();
        let mut writer = row_group.next_column().unwrap().unwrap();
        column(&mut writer, group);
        writer.close().unwrap();
        row_group.close().unwrap();
    }
    writer.close().unwrap();
    path.to_path_buf()
}

const TEXT: &str = "message rows { optional binary text (STRING); }";
const LISTS: [&str; 2] = [
    "message rows { optional group ids (LIST) { repeated group list { optional int32 element; } } }",
    "message rows { optional group ids (LIST) { repeated group list { optional int64 element; } } }",
];

/// Texts, of which some are null.
fn texts(path: &Path, compression: Compression, groups: &[&[Option<&str>]]) -> PathBuf {
    write(path, TEXT, compression, groups, |column, texts| {
        let values: Vec<ByteArray> = texts.iter().flatten().map(|text| ByteArray::from(*text)).collect();
        let defined: Vec<i16> = texts.iter().map(|text| i16::from(text.is_some())).collect();
        column.typed::<ByteArrayType>().write_batch(&values, Some(&defined), None).unwrap();
    })
}

fn column(name: &str, vocabulary: usize, end_of_text: u32) -> Column {
    Column { name: name.to_string(), tokenizer: None, vocabulary, end_of_text }
}

fn tokens(column: &Column, path: &Path) -> Result<Vec<u32>> {
    let to = path.with_extension("bin");
    column.convert(path, &to)?;
    let file = TokenFile::open(&to, Format::LlmC)?;
    file.read(0..file.len(), column.vocabulary)
}

#[test]
fn texts_are_bytes_with_a_token_at_their_ends() {
    let folder = tempfile::tempdir().unwrap();
    let many = vec![Some("\u{e9}"); 3000];
    let groups: [&[Option<&str>]; 3] = [&[Some("ab"), None, Some("")], &many, &[Some("c")]];
    let expected = [vec![97, 98, 256], [195, 169, 256].repeat(3000), vec![99, 256]].concat();
    let zstd = Compression::ZSTD(ZstdLevel::default());
    for (name, compression) in [("snappy", Compression::SNAPPY), ("zstd", zstd), ("none", Compression::UNCOMPRESSED)] {
        let path = texts(&folder.path().join(name), compression, &groups);
        assert_eq!(tokens(&column("text", 257, 256), &path).unwrap(), expected, "{name}");
        // Tokens of 4 bytes.
        assert_eq!(tokens(&column("text", 100_000, 256), &path).unwrap(), expected, "{name}");
    }
}

#[test]
fn a_tokenizer_makes_tokens_of_texts() {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,"pre_tokenizer":
        {"type":"Whitespace"},"post_processor":null,"decoder":null,"model":{"type":"WordLevel","vocab":{"?":0,"one":1,"two":2},"unk_token":"?"}}"#;
    let tokenizer = Some(file(folder.path(), "tokenizer.json", tokenizer.as_bytes()));
    let path = texts(&folder.path().join("text"), Compression::SNAPPY, &[&[Some("two one"), None, Some("one three")]]);
    let column = Column { tokenizer, ..column("text", 4, 3) };
    assert_eq!(tokens(&column, &path).unwrap(), [2, 1, 3, 1, 0, 3]);
    let column = Column { tokenizer: Some(file(folder.path(), "broken.json", b"{")), ..column };
    let error = tokens(&column, &path).unwrap_err().to_string();
    assert!(error.contains("broken.json"), "{error}");
}

/// The rows [1, 2], null, [], [3, null, 9] and [4], in which 9 is the last token of a text.
fn lists(folder: &Path, values: [i32; 5]) -> [PathBuf; 2] {
    let (defined, repeated) = ([3, 3, 0, 1, 3, 2, 3, 3], [0, 1, 0, 0, 0, 1, 1, 0]);
    let narrow = write(&folder.join("narrow"), LISTS[0], Compression::SNAPPY, &[()], |column, ()| {
        column.typed::<Int32Type>().write_batch(&values, Some(&defined), Some(&repeated)).unwrap();
    });
    let wide = write(&folder.join("wide"), LISTS[1], Compression::SNAPPY, &[()], |column, ()| {
        column.typed::<Int64Type>().write_batch(&values.map(i64::from), Some(&defined), Some(&repeated)).unwrap();
    });
    [narrow, wide]
}

#[test]
fn lists_of_integers_are_tokens() {
    let folder = tempfile::tempdir().unwrap();
    for path in lists(folder.path(), [1, 2, 3, 9, 4]) {
        assert_eq!(tokens(&column("ids", 10, 9), &path).unwrap(), [1, 2, 9, 3, 9, 4, 9]);
    }
}

#[test]
fn a_column_that_does_not_fit_is_an_error_that_names_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let text = texts(&folder.path().join("text.parquet"), Compression::SNAPPY, &[&[None, Some("a")]]);
    let empty = texts(&folder.path().join("empty.parquet"), Compression::SNAPPY, &[&[None]]);
    let [narrow, wide] = lists(folder.path(), [1, 2, 3, -4, 5]);
    let flat = "message rows { required int32 ids; }";
    let flat = write(&folder.path().join("flat"), flat, Compression::SNAPPY, &[()], |column, ()| {
        column.typed::<Int32Type>().write_batch(&[1], None, None).unwrap();
    });
    let broken = file(folder.path(), "broken.parquet", &u16s(0..20));
    let range = "the tokens of row 3 must be from 0 to below the size of the vocabulary, 10, but one is -4";
    let cases = [
        (&text, column("body", 257, 256), "it must have the column \"body\", but its columns are text"),
        (
            &text,
            column("text", 90, 256),
            "the tokens of row 1 must be from 0 to below the size of the vocabulary, 90, but one is 97",
        ),
        (&empty, column("text", 257, 256), "it must have from 1 to 2³² - 1 tokens, not 0"),
        (&narrow, column("ids", 10, 9), range),
        (&wide, column("ids", 10, 9), range),
        (&flat, column("ids", 10, 9), "the column \"ids\" must have texts, or lists of integers"),
        (&broken, column("ids", 10, 9), "Invalid Parquet file"),
    ];
    for (path, column, reason) in cases {
        let error = tokens(&column, path).unwrap_err().to_string();
        assert!(error.contains(&path.display().to_string()) && error.contains(reason), "{error}");
    }
}

#[test]
fn ranks_share_one_file_of_tokens_and_write_it_once() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let path = texts(&folder.path().join("some.parquet"), Compression::SNAPPY, &[&[Some("ab")]]);
    let raw = file(folder.path(), "raw.bin", &u16s([1]));
    let both = [path.clone(), raw.clone()];
    let column = column("text", 257, 256);
    let files = |cache: Option<&Path>| {
        candle_ddp::spawn(2, |pg| column.files(&pg, &both, Format::U16, cache)).map(|mut ranks| {
            assert_eq!(ranks[0], ranks[1]);
            ranks.remove(0)
        })
    };
    let first = files(Some(&cache)).unwrap();
    assert_eq!(first[1], (raw.clone(), Format::U16));
    let (written, format) = &first[0];
    assert_eq!((TokenFile::open(written, *format).unwrap().len(), std::fs::read_dir(&cache).unwrap().count()), (3, 1));
    // It is not written again, unless the Parquet file has changed.
    let time = written.metadata().unwrap().modified().unwrap();
    assert_eq!(files(Some(&cache)).unwrap(), first);
    assert_eq!(written.metadata().unwrap().modified().unwrap(), time);
    texts(&path, Compression::SNAPPY, &[&[Some("abcd")]]);
    assert_ne!(files(Some(&cache)).unwrap()[0].0, *written);
    // Every rank gets an error, and no part of a file remains.
    file(folder.path(), "some.parquet", b"no parquet");
    let error = files(Some(&cache)).unwrap_err().to_string();
    assert!(error.contains("some.parquet"), "{error}");
    assert_eq!(std::fs::read_dir(&cache).unwrap().count(), 2);
    let error = files(None).unwrap_err().to_string();
    assert!(error.contains("--cache: it must name a folder for the tokens of"), "{error}");
}
