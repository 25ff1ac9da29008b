//! The tiles of AMX-BF16: matrices of up to 16 rows of 64 bytes, whose products are 8 times as many as those of AVX512-BF16 in
//! the same time.
//!
//! For each element of the result, the products of the first halves of all pairs are summed, and those of the second halves,
//! then both together for each 16 pairs. As in AVX512-BF16, numbers below 1.2e-38 count as zero.
//!
//! A product of tiles takes the processor 16 cycles, and its sum is there after 52. So four sums are in flight: 32 rows times 32 columns,
//! for which each 32 of the depth need four loads and four products.
use super::{Block, LANES, Product, Rows, WIDTH};
use candle_ddp_env::{PROCESS, Result};
use half::bf16;
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::{MaybeUninit, transmute};
use std::ops::Range;
use std::ptr::null;
use std::sync::LazyLock;

/// The rows whose sums are in four tiles.
const ROWS: usize = 2 * LANES;
/// The bytes of a tile's row.
const BYTES: usize = 64;
/// Set to 0, products use AVX512-BF16 instead.
const VARIABLE: &str = "CANDLE_DDP_AMX";

/// Whether this processor has AMX-BF16 and the system lets this process use it.
pub(super) fn detect() -> Result<bool> {
    static IS_USABLE: LazyLock<Result<bool>> =
        LazyLock::new(|| Ok(PROCESS.switch(VARIABLE)?.unwrap_or(true) && is_there() && is_allowed()));
    IS_USABLE.clone()
}

pub(super) fn is_there() -> bool {
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
    /// Tiles 0 to 3 have the sums of 1 to [`ROWS`] rows, 4 and 5 the rows, and 6 and 7 the columns.
    fn new(rows: usize) -> Self {
        let mut config = Self { palette: 1, start_row: 0, reserved: [0; 14], bytes: [0; 16], rows: [0; 16] };
        let [first, second] = [rows.min(LANES), rows.saturating_sub(LANES)];
        for (tile, rows) in [first, first, second, second, first, second, LANES, LANES].into_iter().enumerate() {
            (config.rows[tile], config.bytes[tile]) = (rows as u8, if rows > 0 { BYTES as u16 } else { 0 });
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

/// The columns of a block, with which many rows are multiplied, take 1.2 MB of a second cache of 2 MiB.
const COLUMNS: usize = 600 << 10;

/// The largest block of a product of this depth: rows take half a megabyte, and columns 2 MB. So rows are packed once for most products.
pub(super) fn block(depth: usize) -> Block {
    let within = |elements: usize, most: usize| (elements / depth.max(1) / ROWS * ROWS).clamp(ROWS, most);
    Block { rows: within(1 << 18, 512), columns: within(1 << 20, 1 << 16), depth: 2048 }
}

/// Checks that the factors have all elements that a product reads.
pub(super) fn check(product: &Product) {
    let Product { a, b, distance, columns, pairs } = *product;
    assert!(a.count > 0 && pairs > 0 && columns > 0 && distance >= WIDTH * pairs);
    assert!(a.values.len() >= (a.count - 1) * a.distance + 2 * (a.first + pairs.next_multiple_of(LANES)));
    assert!(b.len() >= (columns.div_ceil(WIDTH) - 1) * distance + WIDTH * pairs);
}

/// # Safety
/// [`detect`] must have returned true, and the product must have passed [`check`]. `result` must have all rows and columns.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn multiply(product: Product, result: &mut [f32], distance: usize, accumulate: bool) {
    let mut narrow = Sums([0.0; ROWS * WIDTH]);
    let each = |factors: Factors, rows: Range<usize>, columns: Range<usize>| {
        if columns.len() == WIDTH {
            let result = result[rows.start * distance + columns.start..].as_mut_ptr();
            // SAFETY: the result has `WIDTH` more columns in each of the rows.
            return unsafe { factors.multiply(result, distance, accumulate) };
        }
        let part = |row: usize| row * distance + columns.start..row * distance + columns.end;
        for (row, to) in rows.clone().zip(narrow.0.chunks_exact_mut(WIDTH)) {
            to[..columns.len()].copy_from_slice(&result[part(row)]);
        }
        // SAFETY: `narrow` has room for `ROWS` rows.
        unsafe { factors.multiply(narrow.0.as_mut_ptr(), WIDTH, accumulate) };
        for (row, from) in rows.zip(narrow.0.chunks_exact(WIDTH)) {
            result[part(row)].copy_from_slice(&from[..columns.len()]);
        }
    };
    // SAFETY: as the caller promises.
    unsafe { each_block(product, each) };
}

/// # Safety
/// As for [`multiply`]; there must be a bias for each column if there are any.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn multiply_rounded(
    product: Product,
    to: &mut [MaybeUninit<bf16>],
    distance: usize,
    bias: Option<&[bf16]>,
) {
    let mut sums = Sums([0.0; ROWS * WIDTH]);
    let each = |factors: Factors, rows: Range<usize>, columns: Range<usize>| {
        let bias = bias.map(|bias| bias[columns.start..].as_ptr());
        let to = to[rows.start * distance + columns.start..].as_mut_ptr().cast();
        // SAFETY: `sums` has room for `ROWS` rows, and `to` and `bias` have these rows and columns.
        unsafe {
            factors.multiply(sums.0.as_mut_ptr(), WIDTH, false);
            round(&sums, rows.len(), columns.len(), bias, to, distance);
        }
    };
    // SAFETY: as the caller promises.
    unsafe { each_block(product, each) };
}

/// The sums of a block.
#[repr(align(64))]
struct Sums([f32; ROWS * WIDTH]);

/// Calls `each` with the factors, rows and columns of each block of up to [`ROWS`] rows and [`WIDTH`] columns, while tiles of that shape are
/// loaded.
///
/// # Safety
/// As for [`multiply`].
unsafe fn each_block(product: Product, mut each: impl FnMut(Factors, Range<usize>, Range<usize>)) {
    let Product { a, pairs, .. } = product;
    let (steps, left) = (pairs / LANES, pairs % LANES);
    // The last pairs of each panel, and zeros.
    let mut last = vec![[0u32; LANES * WIDTH]; if left > 0 { product.columns.div_ceil(WIDTH) } else { 0 }];
    for (to, (_, b)) in last.iter_mut().zip(product.panels()) {
        to[..left * WIDTH].copy_from_slice(&b[steps * LANES * WIDTH..][..left * WIDTH]);
    }
    let (whole, panels) = (a.count / ROWS * ROWS, product.columns.div_ceil(WIDTH));
    for (part, height) in [(0..whole, ROWS), (whole..a.count, a.count - whole)] {
        if part.is_empty() {
            continue;
        }
        let config = Config::new(height);
        // SAFETY: the processor has tiles, and the shapes are valid for the palette.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly)) };
        // Rows stay in the first cache, and columns in the second. The results of a few rows lie on fewer pages than those of a few columns.
        let block = (COLUMNS / (2 * pairs) / WIDTH).clamp(1, panels);
        let blocks =
            (0..panels).step_by(block).flat_map(|first| part.clone().step_by(height).map(move |row| (first, row)));
        for (first, row) in blocks {
            let values = &a.values[row * a.distance + 2 * a.first..];
            for (panel, (columns, b)) in product.panels().enumerate().skip(first).take(block) {
                if a.is_in_place {
                    // The next rows come to the second cache meanwhile.
                    let at = panel - first;
                    prefetch(a, row + height + at * height / block..row + height + (at + 1) * height / block, pairs);
                }
                let last = last.get(panel).map_or(null(), |last| last.as_ptr());
                // A block has at least one step.
                let (b, steps, last) = if steps == 0 { (last, 1, null()) } else { (b.as_ptr(), steps, last) };
                let (a, a_distance) = (values.as_ptr().cast(), 2 * a.distance);
                let factors = Factors { a, a_distance, has_second: height > LANES, b, steps, last };
                each(factors, row..row + height, columns);
            }
        }
    }
    // SAFETY: the processor has tiles. Without their contents, the system has less to save when it changes threads.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// Has the processor load these rows to its second cache, if there are so many.
fn prefetch(a: Rows, rows: Range<usize>, pairs: usize) {
    for row in rows.start..rows.end.min(a.count) {
        let start = row * a.distance + 2 * a.first;
        for line in a.values[start..start + 2 * pairs].chunks(2 * LANES) {
            // SAFETY: a prefetch of elements that are there.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
        }
    }
}

/// Where the factors of a block lie.
struct Factors {
    a: *const u8,
    /// In bytes.
    a_distance: usize,
    /// Whether there are more than [`LANES`] rows.
    has_second: bool,
    b: *const u32,
    /// How often [`LANES`] pairs of both are multiplied.
    steps: usize,
    /// The pairs of columns after these, and zeros up to [`LANES`]; null if there are none.
    last: *const u32,
}

impl Factors {
    /// # Safety
    /// The shape of this block must be loaded, and the factors must be there. `result` must have [`WIDTH`] elements in each row, `distance`
    /// apart.
    #[inline]
    unsafe fn multiply(self, result: *mut f32, distance: usize, accumulate: bool) {
        let Self { a, a_distance, has_second, b, steps, last } = self;
        /// The sums of a block, with the instructions and operands of its second rows if it has them.
        macro_rules! sums {
            ($zero:tt, $load:tt, $product:tt, $store:tt, $($operands:tt)*) => {
                asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    $zero,
                    "test {accumulate:e}, {accumulate:e}",
                    "jz 2f",
                    "tileloadd tmm0, [{result} + {distance}]",
                    "tileloadd tmm1, [{result} + {distance} + 64]",
                    $load,
                    "2:",
                    "tileloadd tmm4, [{a} + {a_distance}]",
                    "tileloadd tmm6, [{b} + {b_distance}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{b} + {b_distance} + 64]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    $product,
                    "add {a}, 64",
                    "add {b}, 2048",
                    "dec {steps}",
                    "jnz 2b",
                    "test {last}, {last}",
                    "jz 3f",
                    "mov {b}, {last}",
                    "xor {last:e}, {last:e}",
                    "mov {steps:e}, 1",
                    "jmp 2b",
                    "3:",
                    "tilestored [{result} + {distance}], tmm0",
                    "tilestored [{result} + {distance} + 64], tmm1",
                    $store,
                    a = inout(reg) a => _,
                    a_distance = in(reg) a_distance,
                    b = inout(reg) b => _,
                    b_distance = in(reg) 4 * WIDTH,
                    steps = inout(reg) steps => _,
                    last = inout(reg) last => _,
                    result = in(reg) result,
                    distance = in(reg) 4 * distance,
                    accumulate = in(reg) u32::from(accumulate),
                    $($operands)*
                    out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                )
            };
        }
        // SAFETY: as the caller promises; all loads are of the rows, columns and steps that are there.
        unsafe {
            if !has_second {
                return sums!("", "", "", "",);
            }
            sums!(
                "tilezero tmm2\ntilezero tmm3",
                "tileloadd tmm2, [{second} + {distance}]\ntileloadd tmm3, [{second} + {distance} + 64]",
                "tileloadd tmm5, [{a_second} + {a_distance}]\ntdpbf16ps tmm2, tmm5, tmm6\ntdpbf16ps tmm3, tmm5, tmm7\nadd {a_second}, 64",
                "tilestored [{second} + {distance}], tmm2\ntilestored [{second} + {distance} + 64], tmm3",
                a_second = inout(reg) a.add(LANES * a_distance) => _,
                second = in(reg) result.add(LANES * distance),
                out("tmm2") _, out("tmm3") _, out("tmm5") _,
            );
        }
    }
}

/// Rounds each of `sums` plus its column's bias.
///
/// # Safety
/// `to` must have `columns` elements in each of `rows` rows, `distance` apart, and `bias` as many if it is there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[inline]
unsafe fn round(sums: &Sums, rows: usize, columns: usize, bias: Option<*const bf16>, to: *mut bf16, distance: usize) {
    let mask = if columns >= WIDTH { !0 } else { (1u32 << columns) - 1 };
    let widened = |half: __m256i| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)));
    let bias = bias.map(|bias| {
        // SAFETY: the mask leaves out all but the columns.
        let bias = unsafe { _mm512_maskz_loadu_epi16(mask, bias.cast()) };
        [widened(_mm512_castsi512_si256(bias)), widened(_mm512_extracti64x4_epi64::<1>(bias))]
    });
    for (row, sums) in sums.0.as_chunks::<WIDTH>().0.iter().enumerate().take(rows) {
        // SAFETY: a row of sums has two vectors; the mask leaves out all but the columns, and both types are 512 bits of anything.
        unsafe {
            let mut halves = [0, LANES].map(|start| _mm512_loadu_ps(sums.as_ptr().add(start)));
            if let Some([first, second]) = bias {
                halves = [_mm512_add_ps(halves[0], first), _mm512_add_ps(halves[1], second)];
            }
            let rounded = transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(halves[1], halves[0]));
            let to = to.add(row * distance);
            // A masked store is slow on a page that nobody has written to yet.
            if columns >= WIDTH {
                _mm512_storeu_si512(to.cast(), rounded)
            } else {
                _mm512_mask_storeu_epi16(to.cast(), mask, rounded)
            }
        }
    }
}
