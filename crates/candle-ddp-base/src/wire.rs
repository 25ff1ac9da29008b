//! Encodes and decodes little-endian fields.

/// Appends fields to a buffer.
#[derive(Debug, Default)]
pub struct Writer(pub Vec<u8>);

impl Writer {
    /// Writes one byte.
    #[inline]
    pub fn u8(&mut self, value: u8) -> &mut Self {
        self.bytes(&[value])
    }

    /// Writes four bytes.
    #[inline]
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Writes eight bytes.
    #[inline]
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Writes bytes without their length.
    #[inline]
    pub fn bytes(&mut self, value: &[u8]) -> &mut Self {
        self.0.extend_from_slice(value);
        self
    }

    /// Writes text with its length in front, cut at `TEXT_LIMIT`.
    pub fn text(&mut self, value: &str) -> &mut Self {
        let value = cut(value);
        self.u32(value.len() as u32).bytes(value.as_bytes())
    }
}

/// The longest text that is sent, in bytes.
const TEXT_LIMIT: usize = 16 * 1024;

/// The part of a text that is sent.
pub fn cut(text: &str) -> &str {
    beginning(text, TEXT_LIMIT)
}

/// The beginning of `text`, at most `longest` bytes.
pub fn beginning(text: &str, longest: usize) -> &str {
    let mut end = text.len().min(longest);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Reads fields from the front of a buffer; returns `None` if the buffer is too short.
#[derive(Debug)]
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    /// Reads one byte.
    #[inline]
    pub fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    /// Reads four bytes.
    #[inline]
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    /// Reads eight bytes.
    #[inline]
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads a rank, of four bytes.
    pub fn rank(&mut self) -> Option<usize> {
        self.u32().map(|rank| rank as usize)
    }

    /// Reads `N` bytes.
    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk()?;
        self.0 = tail;
        Some(*head)
    }

    /// Reads text, with its length in front.
    pub fn text(&mut self) -> Option<String> {
        let length = self.u32()? as usize;
        let (head, tail) = self.0.split_at_checked(length)?;
        self.0 = tail;
        Some(String::from_utf8_lossy(head).into_owned())
    }
}
