//! Texts that travel as numbers: of labels, of shapes, and of the places from which the program calls. A rank knows the texts of
//! its own calls. It learns the texts of other ranks' calls from their reports, when something has failed.
use crate::panic::lock;
use candle_ddp_base::hash::fnv1a_32;
use candle_ddp_base::wire::{Reader, Writer};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

/// Far more than programs have. Further ones have no text.
const MOST: usize = 1 << 16;

/// The most bytes of a report's texts. Every text among them is shorter than the longest one that is sent, and reports with a thousand calls
/// fit into the letters of a host's ranks.
const ROOM: usize = 16 << 10;

static TEXTS: Mutex<BTreeMap<u32, String>> = Mutex::new(BTreeMap::new());

/// The number of a text; never 0.
pub(crate) const fn code(text: &str) -> u32 {
    let hash = fnv1a_32(text.as_bytes());
    if hash == 0 { 1 } else { hash }
}

/// Learns the text of a number. If another text has the number, a warning says so, and that one stays.
pub(crate) fn learn(code: u32, text: String) {
    if let Some((first, second)) = learn_in(&mut lock(&TEXTS), code, text) {
        log::warn!(
            "{first:?} and {second:?} have the same number, {code:08x}: messages show the first for both, and ranks of which one does \
             the first and another one the second may not be told apart. Rename one of them"
        );
    }
}

/// Returns the known text and the new one if they have the same number.
fn learn_in(texts: &mut BTreeMap<u32, String>, code: u32, text: String) -> Option<(String, String)> {
    match texts.get(&code) {
        Some(known) if *known != text => return Some((known.clone(), text)),
        None if texts.len() < MOST => _ = texts.insert(code, text),
        _ => {}
    }
    None
}

pub(crate) fn is_known(code: u32) -> bool {
    lock(&TEXTS).contains_key(&code)
}

pub(crate) fn known(code: u32) -> Option<String> {
    lock(&TEXTS).get(&code).cloned()
}

/// Writes the texts of these numbers for other ranks, the most important ones first, as far as there is room.
pub(crate) fn encode(codes: impl IntoIterator<Item = u32>, writer: &mut Writer) {
    let (mut seen, mut room) = (BTreeSet::new(), ROOM);
    let known = codes.into_iter().filter(|code| seen.insert(*code)).filter_map(|code| Some((code, known(code)?)));
    let texts: Vec<(u32, String)> = known
        .filter(|(_, text)| {
            let left = room.checked_sub(8 + text.len());
            room = left.unwrap_or(room);
            left.is_some()
        })
        .collect();
    writer.u32(texts.len() as u32);
    for (code, text) in &texts {
        writer.u32(*code).text(text);
    }
}

/// Learns the texts that another rank has [written](encode).
pub(crate) fn decode(reader: &mut Reader) -> Option<()> {
    for _ in 0..reader.u32()? {
        learn(reader.u32()?, reader.text()?);
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_texts_with_the_same_number_are_noticed() {
        let mut texts = BTreeMap::new();
        assert_eq!(learn_in(&mut texts, 7, "a".to_string()), None);
        assert_eq!(learn_in(&mut texts, 7, "a".to_string()), None);
        assert_eq!(learn_in(&mut texts, 7, "b".to_string()), Some(("a".to_string(), "b".to_string())));
        assert_eq!(learn_in(&mut texts, 8, "b".to_string()), None);
        assert_eq!(texts[&7], "a");
    }

    #[test]
    fn the_texts_of_a_report_have_little_room_and_the_first_ones_come_first() {
        let text = |index: usize| format!("{index:05000}");
        let codes: Vec<u32> = (0..5).map(|index| code(&text(index))).collect();
        codes.iter().enumerate().for_each(|(index, code)| learn(*code, text(index)));
        let long = "x".repeat(ROOM);
        learn(code(&long), long.clone());
        let unknown = code("a text that nobody knows");
        let mut writer = Writer::default();
        encode([unknown, codes[3], codes[3], code(&long), codes[1], codes[4], codes[0]], &mut writer);
        assert!(writer.0.len() <= 4 + ROOM);
        let mut reader = Reader(&writer.0);
        assert_eq!(reader.u32(), Some(3));
        for index in [3, 1, 4] {
            assert_eq!((reader.u32(), reader.text()), (Some(codes[index]), Some(text(index))));
        }
        assert!(reader.0.is_empty());
    }
}
