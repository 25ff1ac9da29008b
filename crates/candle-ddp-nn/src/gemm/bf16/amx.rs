//! The tiles of AMX-BF16: matrices of up to 16 rows of 64 bytes, whose products are 8 times as many as those of AVX512-BF16 in
//! the same time.
//!
//! For each element of the result, the products of the first halves of all pairs are summed, and those of the second halves,
//! then both together for each 16 pairs. As in AVX512-BF16, numbers below 1.2e-38 count as zero.
use super::transposed::transposed;
use super::{LANES, Product, WIDTH, panels};
use candle_ddp_env::{PROCESS, Result};
use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::LazyLock;

/// The rows of a tile.
pub(super) const ROWS: usize = 16;
/// The pairs of a row of a tile.
const PAIRS: usize = 16;
/// Set to 0, products use AVX512-BF16 instead.
const VARIABLE: &str = "CANDLE_DDP_AMX";

/// Whether this processor has AMX-BF16 and the system lets this process use it.
pub(super) fn detect() -> Result<bool> {
    static IS_USABLE: LazyLock<Result<bool>> =
        LazyLock::new(|| Ok(PROCESS.switch(VARIABLE)?.unwrap_or(true) && is_there() && is_allowed()));
    IS_USABLE.clone()
}

fn is_there() -> bool {
    /// Bits of CPUID's leaf 7.
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    is_x86_feature_detected!("avx512f")
        && __get_cpuid_max(0).0 >= 7
        && __cpuid_count(7, 0).edx & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE
}

/// Asks Linux for the state of tiles, for all threads of this process. Other systems, and Linux before 5.16, refuse.
fn is_allowed() -> bool {
    const ARCH_PRCTL: u64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const XTILEDATA: u64 = 18;
    if !cfg!(target_os = "linux") {
        return false;
    }
    let result: i64;
    // SAFETY: this system call touches no memory of the process.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

/// The shapes of the eight tiles, as the instruction reads them.
#[repr(C, align(64))]
pub(super) struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes: [u16; 16],
    rows: [u8; 16],
}

impl Config {
    /// Tiles 0 and 1 have the results of `rows` rows, 2 to 4 the factors, and 5 to 7 the factors of the last pairs, if they are
    /// fewer than `PAIRS`.
    fn new(rows: usize, pairs: usize) -> Self {
        let last = pairs % PAIRS;
        let mut config = Self { palette: 1, start_row: 0, reserved: [0; 14], bytes: [0; 16], rows: [0; 16] };
        let mut set = |tile: usize, rows: usize, pairs: usize| {
            (config.rows[tile], config.bytes[tile]) = (rows as u8, 4 * pairs as u16);
        };
        (0..2).for_each(|tile| set(tile, rows, LANES));
        set(2, rows, PAIRS);
        (3..5).for_each(|tile| set(tile, PAIRS, LANES));
        if last > 0 {
            set(5, rows, last);
            (6..8).for_each(|tile| set(tile, last, LANES));
        }
        config
    }

    /// Whether the instruction takes it.
    #[cfg(test)]
    pub(super) fn is_valid(&self) -> bool {
        let Self { palette, start_row, reserved, bytes, rows } = self;
        let fits = |(bytes, rows): (&u16, &u8)| *bytes <= 64 && *rows <= 16 && (*bytes == 0) == (*rows == 0);
        let [tiles, none] = [0..8, 8..16].map(|range| bytes[range.clone()].iter().zip(&rows[range]));
        (*palette, *start_row, *reserved) == (1, 0, [0; 14])
            && tiles.clone().all(fits)
            && none.clone().all(|(bytes, rows)| (*bytes, *rows) == (0, 0))
    }

    /// The rows of a tile, and their bytes.
    #[cfg(test)]
    pub(super) fn shape(&self, tile: usize) -> (usize, usize) {
        (self.rows[tile].into(), self.bytes[tile].into())
    }
}

/// # Safety
/// [`detect`] must have returned true. There must be at most [`ROWS`] rows. `a` must have `rows` elements for each of `pairs`, `b` whole panels for all `columns`, and
/// `result` all its rows.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn multiply(product: Product) {
    let Product { a, rows, b, columns, pairs, result, distance, accumulate } = product;
    // SAFETY: `a` has `rows` elements for each pair.
    let a = unsafe { by_rows(a.as_ptr(), rows, pairs) };
    let config = Config::new(rows, pairs);
    // SAFETY: the processor has tiles, and the shapes are valid for the palette.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly)) };
    let mut narrow = [0f32; ROWS * WIDTH];
    for (columns, b) in panels(b, columns, pairs) {
        if columns.len() == WIDTH {
            // SAFETY: as above; the result has `WIDTH` more columns in each row.
            unsafe { tiles(&a, b, pairs, result[columns.start..].as_mut_ptr(), distance, accumulate) };
            continue;
        }
        let part = |row: usize| row * distance + columns.start..row * distance + columns.end;
        for (row, to) in narrow.chunks_exact_mut(WIDTH).enumerate().take(rows) {
            to[..columns.len()].copy_from_slice(&result[part(row)]);
        }
        // SAFETY: as above; `narrow` has room for `ROWS` rows.
        unsafe { tiles(&a, b, pairs, narrow.as_mut_ptr(), WIDTH, accumulate) };
        for (row, from) in narrow.chunks_exact(WIDTH).enumerate().take(rows) {
            result[part(row)].copy_from_slice(&from[..columns.len()]);
        }
    }
    // SAFETY: the processor has tiles. Without their contents, the system has less to save when it changes threads.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// A panel of rows, with all pairs of each side by side.
struct Rows {
    /// A multiple of `PAIRS`; those after the last are zero.
    distance: usize,
    values: Vec<u32>,
}

/// # Safety
/// `from` must be valid for `rows` ≤ 16 elements for each of `pairs`, and the processor must have AVX-512.
#[target_feature(enable = "avx512f")]
unsafe fn by_rows(from: *const u32, rows: usize, pairs: usize) -> Rows {
    let distance = pairs.next_multiple_of(PAIRS);
    let mut values = vec![0; rows * distance];
    let mask = if rows == LANES { !0 } else { (1 << rows) - 1 };
    for first in (0..pairs).step_by(PAIRS) {
        let mut block = [_mm512_setzero_si512(); PAIRS];
        for (pair, block) in block.iter_mut().enumerate().take(pairs - first) {
            // SAFETY: the mask leaves out all but the elements of the pair.
            *block = unsafe { _mm512_maskz_loadu_epi32(mask, from.add((first + pair) * rows).cast()) };
        }
        for (row, block) in transposed(block).into_iter().enumerate().take(rows) {
            // SAFETY: a row has 16 elements for each block.
            unsafe { _mm512_storeu_si512(values[row * distance + first..].as_mut_ptr().cast(), block) };
        }
    }
    Rows { distance, values }
}

/// The product of all rows of `a` with the `WIDTH` columns of `b`.
///
/// # Safety
/// The shapes of these rows and pairs must be loaded. `b` must have `WIDTH` elements for each of `pairs`, and `result` `WIDTH`
/// elements in each row of `a`, `distance` apart.
unsafe fn tiles(a: &Rows, b: &[u32], pairs: usize, result: *mut f32, distance: usize, accumulate: bool) {
    // SAFETY: full tiles are read `pairs / PAIRS` times, and the last ones if there are pairs left.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "test {accumulate:e}, {accumulate:e}",
            "jz 2f",
            "tileloadd tmm0, [{result} + {distance}]",
            "tileloadd tmm1, [{result} + {distance} + 64]",
            "2:",
            "test {full}, {full}",
            "jz 4f",
            "3:",
            "tileloadd tmm2, [{a} + {a_distance}]",
            "tileloadd tmm3, [{b} + {b_distance}]",
            "tileloadd tmm4, [{b} + {b_distance} + 64]",
            "tdpbf16ps tmm0, tmm2, tmm3",
            "tdpbf16ps tmm1, tmm2, tmm4",
            "add {a}, 64",
            "add {b}, 2048",
            "dec {full}",
            "jnz 3b",
            "4:",
            "test {last}, {last}",
            "jz 5f",
            "tileloadd tmm5, [{a} + {a_distance}]",
            "tileloadd tmm6, [{b} + {b_distance}]",
            "tileloadd tmm7, [{b} + {b_distance} + 64]",
            "tdpbf16ps tmm0, tmm5, tmm6",
            "tdpbf16ps tmm1, tmm5, tmm7",
            "5:",
            "tilestored [{result} + {distance}], tmm0",
            "tilestored [{result} + {distance} + 64], tmm1",
            a = inout(reg) a.values.as_ptr() => _,
            b = inout(reg) b.as_ptr() => _,
            full = inout(reg) pairs / PAIRS => _,
            last = in(reg) pairs % PAIRS,
            a_distance = in(reg) 4 * a.distance,
            b_distance = in(reg) 4 * WIDTH,
            result = in(reg) result,
            distance = in(reg) 4 * distance,
            accumulate = in(reg) u32::from(accumulate),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
