//! The characters of a text.
use candle_core::{Result, bail};

/// Different characters, in order.
pub(crate) struct Vocabulary(Vec<char>);

impl Vocabulary {
    /// The characters that `text` has.
    pub(crate) fn of(text: &str) -> Self {
        let mut characters: Vec<char> = text.chars().collect();
        characters.sort_unstable();
        characters.dedup();
        Self(characters)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The number of each character of `text`.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let number = |character: char| match self.0.binary_search(&character) {
            Ok(number) => Ok(number as u32),
            Err(_) => bail!("the model does not know the character {character:?}"),
        };
        text.chars().map(number).collect()
    }

    /// The text of numbers, each of which is below [`len`](Self::len).
    pub(crate) fn decode(&self, numbers: &[u32]) -> String {
        numbers.iter().map(|&number| self.0[number as usize]).collect()
    }
}

impl std::fmt::Display for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|character| write!(f, "{character}"))
    }
}
