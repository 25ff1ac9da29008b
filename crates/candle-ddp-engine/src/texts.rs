//! Texts that travel as numbers: of labels, of shapes, and of the places from which the program calls. A rank knows the texts of
//! its own calls. It learns the texts of other ranks' calls from their reports, when something has failed.
use crate::panic::lock;
use candle_ddp_base::hash::fnv1a_32;
use std::collections::BTreeMap;
use std::sync::Mutex;

/// Far more than programs have. Further ones have no text.
const MOST: usize = 1 << 16;

static TEXTS: Mutex<BTreeMap<u32, String>> = Mutex::new(BTreeMap::new());

/// The number of a text; never 0.
pub(crate) const fn code(text: &str) -> u32 {
    let hash = fnv1a_32(text.as_bytes());
    if hash == 0 { 1 } else { hash }
}

pub(crate) fn learn(code: u32, text: impl FnOnce() -> String) {
    let mut texts = lock(&TEXTS);
    if !texts.contains_key(&code) && texts.len() < MOST {
        texts.insert(code, text());
    }
}

pub(crate) fn known(code: u32) -> Option<String> {
    lock(&TEXTS).get(&code).cloned()
}
