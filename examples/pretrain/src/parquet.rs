//! Columns of Parquet files, which become files of tokens once per host: in these, a run finds each sample at once.
use crate::tokens::{Format, Width, broken, header};
use candle_ddp::{Context, Error, ProcessGroup, Result};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, DataType};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

/// The number of rows that are read at a time.
const ROWS: usize = 1024;

/// How a column becomes tokens.
#[derive(Clone, Debug)]
pub struct Column {
    /// The column of texts, or of lists of tokens.
    pub name: String,
    /// The file of the tokenizer for texts. Without one, each byte is a token.
    pub tokenizer: Option<PathBuf>,
    /// Tokens must be below this.
    pub vocabulary: usize,
    /// The token that follows each row.
    pub end_of_text: u32,
}

impl Column {
    /// Returns `paths`, which have this format, with a file of tokens in `cache` for each Parquet file. The first rank of each host writes the files that are
    /// missing, while the others wait, at most for the time-out of the group. Every rank calls this.
    ///
    /// # Errors
    /// The error of the rank that cannot write, and [`Error::RankFailed`] on the others; [`Error::InvalidArgument`] without a cache.
    pub fn files(
        &self,
        pg: &ProcessGroup,
        paths: &[PathBuf],
        format: Format,
        cache: Option<&Path>,
    ) -> Result<Vec<(PathBuf, Format)>> {
        let is_parquet = |path: &Path| path.extension().is_some_and(|extension| extension == "parquet");
        let files = paths.iter().map(|path| match is_parquet(path) {
            false => Ok((path.clone(), format)),
            true => {
                let writer = (pg.local_rank() == 0).then(|| format!("{}-{}", pg.rank(), std::process::id()));
                Ok((self.file(path, cache, writer)?, Format::LlmC))
            }
        });
        let own: Result<Vec<_>> = files.collect();
        let told = pg.all_gather_object(&own.as_ref().err().map(ToString::to_string));
        let own = own?;
        match told?.into_iter().enumerate().find_map(|(rank, reason)| Some((rank, reason?))) {
            Some((rank, reason)) => Err(Error::RankFailed { rank, reason }),
            None => Ok(own),
        }
    }

    fn file(&self, path: &Path, cache: Option<&Path>, writer: Option<String>) -> Result<PathBuf> {
        let Some(cache) = cache else {
            let reason = format!("it must name a folder for the tokens of {}", path.display());
            return Err(Error::invalid("--cache", reason));
        };
        let file = cache.join(self.file_name(path)?);
        if let Some(writer) = writer.filter(|_| !file.exists()) {
            let writing = || format!("writing {}", file.display());
            std::fs::create_dir_all(cache).with_context(writing)?;
            // Ranks of several hosts may share the folder, and a file must be there as a whole.
            let part = cache.join(format!("{}.{writer}.part", self.file_name(path)?));
            let written = self.convert(path, &part);
            let renamed = written.and_then(|()| std::fs::rename(&part, &file).with_context(writing));
            renamed.inspect_err(|_| drop(std::fs::remove_file(&part)))?;
        }
        Ok(file)
    }

    /// Another file, or another column, has another name.
    fn file_name(&self, path: &Path) -> Result<String> {
        let state = |path: &Path| {
            let reading = || format!("opening {}", path.display());
            let whole = path.canonicalize().with_context(reading)?;
            let metadata = path.metadata().with_context(reading)?;
            Ok::<_, Error>((whole, metadata.len(), metadata.modified().with_context(reading)?))
        };
        let tokenizer = self.tokenizer.as_deref().map(state).transpose()?;
        let mut hasher = DefaultHasher::new();
        (state(path)?, tokenizer, &self.name, self.vocabulary, self.end_of_text).hash(&mut hasher);
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        Ok(format!("{stem}-{:016x}.bin", hasher.finish()))
    }

    /// Writes the tokens of a Parquet file to `to`, in llm.c's format.
    ///
    /// # Errors
    /// [`Error::Io`] with the file's path if it cannot be read, has no such column, a token that is not below the vocabulary, or no token.
    pub fn convert(&self, path: &Path, to: &Path) -> Result<()> {
        let wrong = |error: ParquetError| broken(path, &error.to_string());
        let reader = File::open(path).with_context(|| format!("opening {}", path.display()))?;
        let reader = SerializedFileReader::new(reader).map_err(wrong)?;
        let columns = reader.metadata().file_metadata().schema_descr().columns();
        // A list is the column of its elements.
        let named = |path: &[String]| path.first().is_some_and(|first| *first == self.name);
        let Some(index) = columns.iter().position(|column| named(column.path().parts())) else {
            let names = columns.iter().map(|column| column.path().string()).collect::<Vec<_>>().join(", ");
            return Err(broken(path, &format!("it must have the column {:?}, but its columns are {names}", self.name)));
        };
        let (levels, is_text) = (columns[index].max_def_level(), columns[index].max_rep_level() == 0);
        let tokenizer = self.tokenizer.as_deref().map(open).transpose()?;
        let mut output = Output::create(self, path, to)?;
        for group in 0..reader.num_row_groups() {
            let group = reader.get_row_group(group).map_err(wrong)?;
            match group.get_column_reader(index).map_err(wrong)? {
                ColumnReader::ByteArrayColumnReader(mut column) if is_text => loop {
                    let texts = rows(&mut column, levels).map_err(wrong)?;
                    if texts.is_empty() {
                        break;
                    }
                    // A text that is null has no bytes.
                    let bytes = |row: &Vec<ByteArray>| row.first().map_or(Vec::new(), |text| text.data().to_vec());
                    let texts: Vec<Vec<u8>> = texts.iter().map(bytes).collect();
                    output.texts(&texts, tokenizer.as_ref())?;
                },
                ColumnReader::Int32ColumnReader(mut column) if !is_text => loop {
                    let rows = rows(&mut column, levels).map_err(wrong)?;
                    if rows.is_empty() {
                        break;
                    }
                    rows.iter().try_for_each(|row| output.row(row.iter().map(|token| i64::from(*token))))?;
                },
                ColumnReader::Int64ColumnReader(mut column) if !is_text => loop {
                    let rows = rows(&mut column, levels).map_err(wrong)?;
                    if rows.is_empty() {
                        break;
                    }
                    rows.iter().try_for_each(|row| output.row(row.iter().copied()))?;
                },
                _ => {
                    let reason = format!("the column {:?} must have texts, or lists of integers", self.name);
                    return Err(broken(path, &reason));
                }
            }
        }
        output.finish()
    }
}

fn open(tokenizer: &Path) -> Result<Tokenizer> {
    Tokenizer::from_file(tokenizer).map_err(|error| broken(tokenizer, &error.to_string()))
}

/// The text of tokens.
pub(crate) fn text(tokenizer: &Path, tokens: &[u32]) -> Result<String> {
    open(tokenizer)?.decode(tokens, false).map_err(|error| broken(tokenizer, &error.to_string()))
}

/// The next rows of a column; none at its end. A row that is null has no value.
fn rows<T: DataType>(column: &mut ColumnReaderImpl<T>, levels: i16) -> parquet::errors::Result<Vec<Vec<T::T>>> {
    let (mut defined, mut repeated, mut values) = (Vec::new(), Vec::new(), Vec::new());
    let (_, _, count) = column.read_records(ROWS, Some(&mut defined), Some(&mut repeated), &mut values)?;
    let (mut rows, mut values) = (Vec::new(), values.into_iter());
    for level in 0..count {
        // Columns without repetition, or without nulls, have no such levels.
        if repeated.get(level).is_none_or(|repeated| *repeated == 0) {
            rows.push(Vec::new());
        }
        let is_value = defined.get(level).is_none_or(|defined| *defined == levels);
        if let (true, Some(row)) = (is_value, rows.last_mut()) {
            row.extend(values.next());
        }
    }
    Ok(rows)
}

/// A file of tokens that is being written.
struct Output<'a> {
    column: &'a Column,
    from: &'a Path,
    to: &'a Path,
    file: BufWriter<File>,
    width: Width,
    rows: usize,
    tokens: u64,
}

impl<'a> Output<'a> {
    fn create(column: &'a Column, from: &'a Path, to: &'a Path) -> Result<Self> {
        let width = if column.vocabulary <= 1 << 16 { Width::U16 } else { Width::U32 };
        let writing = || format!("writing {}", to.display());
        let mut file = BufWriter::new(File::create(to).with_context(writing)?);
        file.write_all(&header(width, 0)).with_context(writing)?;
        Ok(Self { column, from, to, file, width, rows: 0, tokens: 0 })
    }

    fn texts(&mut self, texts: &[Vec<u8>], tokenizer: Option<&Tokenizer>) -> Result<()> {
        let Some(tokenizer) = tokenizer else {
            return texts.iter().try_for_each(|text| self.row(text.iter().map(|byte| i64::from(*byte))));
        };
        let wrong =
            |error: &dyn std::fmt::Display| broken(self.from, &format!("texts after row {}: {error}", self.rows));
        let texts = texts.iter().map(|text| std::str::from_utf8(text)).collect::<std::result::Result<Vec<_>, _>>();
        let texts = texts.map_err(|error| wrong(&error))?;
        let encoded = tokenizer.encode_batch(texts, false).map_err(|error| wrong(&error))?;
        encoded.iter().try_for_each(|text| self.row(text.get_ids().iter().map(|token| i64::from(*token))))
    }

    /// Writes a row, with the token that ends it.
    fn row(&mut self, tokens: impl Iterator<Item = i64>) -> Result<()> {
        let (row, mut last) = (self.rows, None);
        self.rows += 1;
        for token in tokens {
            let fits = u32::try_from(token).ok().filter(|token| (*token as usize) < self.column.vocabulary);
            let Some(fitting) = fits else {
                let reason = format!(
                    "the tokens of row {row} must be from 0 to below the size of the vocabulary, {}, but one is {token}",
                    self.column.vocabulary
                );
                return Err(broken(self.from, &reason));
            };
            self.write(fitting)?;
            last = Some(fitting);
        }
        match last {
            Some(last) if last != self.column.end_of_text => self.write(self.column.end_of_text),
            _ => Ok(()),
        }
    }

    fn write(&mut self, token: u32) -> Result<()> {
        self.tokens += 1;
        let bytes = token.to_le_bytes();
        self.file.write_all(&bytes[..self.width as usize]).with_context(|| format!("writing {}", self.to.display()))
    }

    fn finish(mut self) -> Result<()> {
        let count = u32::try_from(self.tokens).ok().filter(|count| *count > 0);
        let Some(count) = count else {
            let reason = format!("it must have from 1 to 2³² - 1 tokens, not {}: divide it", self.tokens);
            return Err(broken(self.from, &reason));
        };
        let writing = || format!("writing {}", self.to.display());
        self.file.seek(SeekFrom::Start(0)).with_context(writing)?;
        self.file.write_all(&header(self.width, count)).with_context(writing)?;
        let file = self.file.into_inner().map_err(|error| error.into_error()).with_context(writing)?;
        file.sync_all().with_context(writing)
    }
}
