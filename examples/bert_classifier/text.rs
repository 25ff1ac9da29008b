//! Sentences with their classes, and word pieces.
use super::requests;
use candle_core::{Device, Tensor};
use candle_ddp::data::Dataset;
use candle_ddp::seed::Generator;
use candle_ddp::{Context, Error, Result};
use std::collections::BTreeSet;
use std::path::Path;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::processors::bert::BertProcessing;
use tokenizers::{PaddingParams, Tokenizer, TruncationParams};

/// Of so many sentences, one is for validation.
const VALIDATE_EVERY: usize = 5;
const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];

/// Sentences, and the numbers of their classes.
pub(crate) struct Sentences(Vec<(String, u32)>);

impl Sentences {
    /// Reads a file in which each line has a class, a tab and a sentence; without a file, takes the requests. Returns the
    /// names of the classes in their order, the sentences for training, and those for validation.
    pub(crate) fn read(path: Option<&Path>) -> Result<(Vec<String>, Self, Self)> {
        let lines = match path {
            Some(path) => std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?,
            None => requests::lines(),
        };
        let path = path.unwrap_or(Path::new("requests.rs"));
        let failed = |reason| Error::DataFile { path: path.to_path_buf(), reason };
        let split = |(index, line): (usize, &'_ str)| match line.split_once('\t') {
            Some((class, sentence)) => Ok((class.to_string(), sentence.to_string())),
            None => Err(failed(format!("line {} has no tab between a class and a sentence", index + 1))),
        };
        let pairs = lines.lines().enumerate().map(split).collect::<Result<Vec<_>>>()?;
        let classes: BTreeSet<_> = pairs.iter().map(|(class, _)| class.clone()).collect();
        let classes: Vec<_> = classes.into_iter().collect();
        let number = |class| classes.partition_point(|other| *other < class) as u32;
        let mut train: Vec<_> = pairs.into_iter().map(|(class, sentence)| (sentence, number(class))).collect();
        if classes.len() < 2 || train.len() < VALIDATE_EVERY {
            let (classes, sentences) = (classes.len(), train.len());
            return Err(failed(format!(
                "it must have at least 2 classes and {VALIDATE_EVERY} sentences, and has {classes} and {sentences}"
            )));
        }
        // Shuffled, so that validation sees all classes, however the file is sorted; always in the same way.
        let mut random = Generator::new(0);
        (1..train.len()).rev().for_each(|last| train.swap(last, random.below(last as u64 + 1) as usize));
        let validation = train.split_off(train.len() - train.len() / VALIDATE_EVERY);
        Ok((classes, Self(train), Self(validation)))
    }

    /// Returns word pieces for these sentences: their words, in small letters, and their characters, of which other words
    /// consist.
    pub(crate) fn vocabulary(&self) -> String {
        let text = self.0.iter().map(|(sentence, _)| sentence.to_lowercase() + " ").collect::<String>();
        let characters = text.chars().filter(|character| !character.is_whitespace());
        let mut pieces: BTreeSet<String> = characters.flat_map(|c| [format!("{c}"), format!("##{c}")]).collect();
        pieces.extend(text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).map(str::to_string));
        SPECIAL.into_iter().map(str::to_string).chain(pieces).map(|piece| piece + "\n").collect()
    }
}

impl Dataset for Sentences {
    type Sample = (String, u32);

    fn len(&self) -> usize {
        self.0.len()
    }

    fn get(&self, index: usize, _: &mut Generator) -> Result<Self::Sample> {
        Ok(self.0[index].clone())
    }
}

/// Cuts sentences into BERT's word pieces.
#[derive(Clone)]
pub(crate) struct WordPieces(Tokenizer);

impl WordPieces {
    /// Of a vocabulary, one piece per line, for at most `max_length` tokens per sentence. Sentences are brought to small
    /// letters unless the vocabulary has words with capitals.
    pub(crate) fn new(vocabulary: &str, max_length: usize) -> Result<Self> {
        let pieces = WordPiece::read_bytes(vocabulary.as_bytes()).map_err(invalid)?;
        let special = |name: &str| match pieces.get(name) {
            Some(id) => Ok((name.to_string(), *id)),
            None => Err(invalid(format!("it has no {name}"))),
        };
        let (pad, cls, sep) = (special("[PAD]")?, special("[CLS]")?, special("[SEP]")?);
        let is_capital = |piece: &String| piece.chars().any(|c| c.is_ascii_uppercase()) && !piece.starts_with('[');
        let cased = pieces.keys().any(is_capital);

        let mut tokenizer = Tokenizer::new(WordPiece::builder().vocab(pieces).build().map_err(invalid)?);
        let normalizer = BertNormalizer::new(true, true, None, !cased);
        let truncation = TruncationParams { max_length, ..Default::default() };
        let padding = PaddingParams { pad_token: pad.0, pad_id: pad.1, ..Default::default() };
        tokenizer.with_normalizer(Some(normalizer)).map_err(invalid)?;
        tokenizer.with_pre_tokenizer(Some(BertPreTokenizer));
        tokenizer.with_post_processor(Some(BertProcessing::new(sep, cls)));
        tokenizer.with_truncation(Some(truncation)).map_err(invalid)?;
        tokenizer.with_padding(Some(padding));
        Ok(Self(tokenizer))
    }

    /// Returns the tokens u32[B, T], where T is the length of the longest sentence, a mask of this shape that is 0 for
    /// padding, and the classes u32[B].
    pub(crate) fn batch(&self, samples: Vec<(String, u32)>) -> Result<(Tensor, Tensor, Tensor)> {
        let (sentences, classes): (Vec<_>, Vec<_>) = samples.into_iter().unzip();
        let encoded = self.0.encode_batch_fast(sentences, true).map_err(invalid)?;
        let ids: Vec<_> = encoded.iter().map(|sentence| sentence.get_ids()).collect();
        let mask: Vec<_> = encoded.iter().map(|sentence| sentence.get_attention_mask()).collect();
        let cpu = &Device::Cpu;
        Ok((Tensor::new(ids, cpu)?, Tensor::new(mask, cpu)?, Tensor::new(classes, cpu)?))
    }
}

fn invalid(reason: impl ToString) -> Error {
    Error::InvalidArgument { argument: "the vocabulary", reason: reason.to_string() }
}
