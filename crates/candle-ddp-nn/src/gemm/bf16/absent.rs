//! In place of the instructions of x86-64, on other processors.
use super::{Source, Unit};
use half::bf16;

/// There is none.
#[derive(Clone, Copy)]
pub(crate) enum Avx512 {}

impl Avx512 {
    pub(crate) fn detect() -> candle_ddp_env::Result<Option<Self>> {
        Ok(None)
    }

    pub(crate) fn is_faster_than_f32(self) -> bool {
        match self {}
    }
}

impl Unit for Avx512 {
    fn transpose<E: Source>(self, _: &[E], _: usize, _: usize, _: usize, _: &mut [u32], _: usize) {
        match self {}
    }

    fn transpose_pairs(self, _: &[u32], _: usize, _: usize, _: usize, _: &mut [u32], _: usize) {
        match self {}
    }

    fn interleave<E: Source>(self, _: &[E], _: usize, _: usize, _: usize, _: &mut [u32], _: usize) {
        match self {}
    }

    fn tile(self, _: &[bf16], _: &[u32], _: usize, _: usize, _: usize, _: &mut [f32], _: usize, _: bool) {
        match self {}
    }

    fn pair(self, _: &[bf16], _: &[bf16], _: &mut [u32]) {
        match self {}
    }

    fn round(self, _: &[f32], _: f32, _: &mut [bf16]) {
        match self {}
    }
}
