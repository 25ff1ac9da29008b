//! The instructions of AVX512-BF16, and for products of panels AMX-BF16, where it is.
use super::transposed::transposed;
use super::{Block, LANES, Product, ROWS, Source, Unit, VECTORS, WIDTH, amx};
use candle_ddp_env::Result;
use half::bf16;
use std::arch::x86_64::*;
use std::mem::{MaybeUninit, transmute};
use std::sync::LazyLock;

/// Proof that this processor has AVX512-BF16.
#[derive(Clone, Copy)]
pub(crate) struct Avx512 {
    /// Whether it has AMX-BF16 too.
    has_tiles: bool,
}

impl Avx512 {
    /// The proof, if this processor has the instructions.
    ///
    /// # Errors
    /// Returns an error if the environment does not say clearly whether to use AMX.
    pub(crate) fn detect() -> Result<Option<Self>> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512bf16");
        Ok(has.then_some(Self { has_tiles: amx::detect()? }))
    }

    /// Whether they multiply bf16 in less time than f32's instructions multiply f32.
    pub(crate) fn is_faster_than_f32(self) -> bool {
        static VENDOR: LazyLock<[u32; 3]> = LazyLock::new(|| {
            let CpuidResult { ebx, edx, ecx, .. } = __cpuid(0);
            [ebx, edx, ecx]
        });
        is_faster_than_f32(VENDOR.map(u32::to_le_bytes).as_flattened(), self.has_tiles)
    }

    /// The same with or without AMX.
    #[cfg(test)]
    pub(super) fn with_tiles(self, has_tiles: bool) -> Self {
        Self { has_tiles }
    }
}

/// Intel's processors do `vdpbf16ps` at half the rate of f32's instructions, AMD's at the same rate.
pub(super) fn is_faster_than_f32(vendor: &[u8], has_tiles: bool) -> bool {
    has_tiles || vendor != b"GenuineIntel"
}

/// Checks that `from` has the lines, and `to` has room for the vectors of all of them at each of the places.
fn check<E>(from: &[E], last: usize, lines: usize, places: usize, to: &[u32], width: usize) {
    assert!(lines > 0 && places > 0 && last < from.len());
    assert!((places - 1) * width + lines.next_multiple_of(LANES) <= to.len());
}

impl Unit for Avx512 {
    fn rows(self) -> usize {
        if self.has_tiles { WIDTH } else { ROWS }
    }

    fn is_by_row(self) -> bool {
        self.has_tiles
    }

    fn block(self, depth: usize) -> Block {
        if self.has_tiles { amx::block(depth) } else { Block::OF_VECTORS }
    }

    fn multiply(self, product: Product, (result, distance): (&mut [f32], usize), accumulate: bool) {
        if !self.has_tiles {
            return product.by_tiles(self, (result, distance), accumulate);
        }
        amx::check(&product);
        assert!(product.columns <= distance && result.len() >= (product.a.count - 1) * distance + product.columns);
        // SAFETY: the processor has tiles, and the slices are long enough, as checked.
        unsafe { amx::multiply(product, result, distance, accumulate) };
    }

    fn multiply_rounded(
        self,
        product: Product,
        (to, distance): (&mut [MaybeUninit<bf16>], usize),
        bias: Option<&[bf16]>,
    ) {
        if !self.has_tiles {
            return product.rounded(self, (to, distance), bias);
        }
        amx::check(&product);
        assert!(product.columns <= distance && to.len() >= (product.a.count - 1) * distance + product.columns);
        assert!(bias.is_none_or(|bias| bias.len() >= product.columns));
        // SAFETY: the processor has tiles, and the slices are long enough, as checked.
        unsafe { amx::multiply_rounded(product, to, distance, bias) };
    }

    fn transpose<E: Source>(
        self,
        from: &[E],
        distance: usize,
        lines: usize,
        depth: usize,
        to: &mut [u32],
        width: usize,
    ) {
        assert!(lines <= LANES);
        check(from, (lines - 1) * distance + depth - 1, lines, depth.div_ceil(2), to, width);
        // SAFETY: the processor has the instructions, and the slices are long enough, as checked.
        unsafe { transpose(from.as_ptr(), distance, lines, depth, to.as_mut_ptr(), width) }
    }

    fn transpose_pairs(self, from: &[u32], distance: usize, lines: usize, pairs: usize, to: &mut [u32], width: usize) {
        assert!(lines <= LANES);
        check(from, (lines - 1) * distance + pairs - 1, lines, pairs, to, width);
        // SAFETY: the processor has the instructions, and the slices are long enough, as checked. Both types are numbers
        // without invalid values.
        unsafe { transpose::<bf16>(from.as_ptr().cast(), 2 * distance, lines, 2 * pairs, to.as_mut_ptr(), width) }
    }

    fn interleave<E: Source>(
        self,
        from: &[E],
        distance: usize,
        lines: usize,
        depth: usize,
        to: &mut [u32],
        width: usize,
    ) {
        assert!(lines <= WIDTH);
        check(from, (depth - 1) * distance + lines - 1, lines, depth.div_ceil(2), to, width);
        // SAFETY: the processor has the instructions, and the slices are long enough, as checked.
        unsafe { interleave(from.as_ptr(), distance, lines, depth, to.as_mut_ptr(), width) }
    }

    fn tile(
        self,
        a: &[bf16],
        b: &[u32],
        rows: usize,
        columns: usize,
        pairs: usize,
        result: &mut [f32],
        distance: usize,
        accumulate: bool,
    ) {
        assert!((1..=ROWS).contains(&rows) && (1..=LANES * VECTORS).contains(&columns));
        assert!(a.len() >= 2 * rows * pairs && b.len() >= LANES * VECTORS * pairs);
        assert!(result.len() >= (rows - 1) * distance + columns);
        let (a, b, result) = (a.as_ptr().cast(), b.as_ptr(), result.as_mut_ptr());
        macro_rules! tiles {
            ($($rows:literal)*) => {
                match (rows, columns > LANES) {
                    $(
                        // SAFETY: the processor has the instructions, and the slices are long enough, as checked.
                        ($rows, true) => unsafe {
                            tile::<$rows, 2>(a, b, columns, pairs, result, distance, accumulate)
                        },
                        // SAFETY: as above.
                        ($rows, false) => unsafe {
                            tile::<$rows, 1>(a, b, columns, pairs, result, distance, accumulate)
                        },
                    )*
                    _ => {}
                }
            };
        }
        tiles!(1 2 3 4 5 6 7 8 9 10 11 12 13 14);
    }

    #[inline(always)]
    fn pair(self, first: &[bf16], second: &[bf16], to: &mut [u32]) {
        let count = first.len().min(second.len()).min(to.len());
        // SAFETY: the processor has the instructions, and all slices have `count` elements.
        unsafe { pair(first.as_ptr(), second.as_ptr(), to.as_mut_ptr(), count) };
    }

    fn round(self, from: &[f32], term: f32, to: &mut [bf16]) {
        let count = from.len().min(to.len());
        // SAFETY: the processor has the instructions, and both slices have `count` elements.
        unsafe { round(from.as_ptr(), term, to.as_mut_ptr(), count) };
    }
}

/// # Safety
/// `a` must be valid for `pairs` × `R` elements, `b` for `pairs` × 32, and `result` for `R` rows of `columns` ≤ 16 `V`
/// elements, `distance` apart.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn tile<const R: usize, const V: usize>(
    a: *const u32,
    b: *const u32,
    columns: usize,
    pairs: usize,
    result: *mut f32,
    distance: usize,
    accumulate: bool,
) {
    let mut sums = [[_mm512_setzero_ps(); V]; R];
    for pair in 0..pairs {
        let mut column = [_mm512_setzero_si512(); V];
        for (vector, column) in column.iter_mut().enumerate() {
            // SAFETY: `b` has 32 elements for each pair.
            *column = unsafe { _mm512_loadu_si512(b.add(pair * LANES * VECTORS + vector * LANES).cast()) };
        }
        for (row, sums) in sums.iter_mut().enumerate() {
            // SAFETY: `a` has `R` elements for each pair.
            let row = _mm512_set1_epi32(unsafe { a.add(pair * R + row).read_unaligned() } as i32);
            for (sum, column) in sums.iter_mut().zip(&column) {
                // SAFETY: both types are 512 bits of anything.
                let [row, column] = [row, *column].map(|pairs| unsafe { transmute::<__m512i, __m512bh>(pairs) });
                *sum = _mm512_dpbf16_ps(*sum, column, row);
            }
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        for (vector, sum) in sums.iter().enumerate() {
            let left = columns - vector * LANES;
            // SAFETY: the row has `columns` elements, and the masks leave out the rest of the vector.
            unsafe {
                let to = result.add(row * distance + vector * LANES);
                let mask = if left >= LANES { !0 } else { (1 << left) - 1 };
                let sum = if accumulate { _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), *sum) } else { *sum };
                if left >= LANES {
                    _mm512_storeu_ps(to, sum);
                } else {
                    _mm512_mask_storeu_ps(to, mask, sum);
                }
            }
        }
    }
}

/// # Safety
/// `from` must be valid for `lines` ≤ 16 lines of `depth` elements, `distance` apart, and `to` for 16 elements at each
/// multiple of `width`, one for each pair.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn transpose<E: Source>(
    from: *const E,
    distance: usize,
    lines: usize,
    depth: usize,
    to: *mut u32,
    width: usize,
) {
    let pairs = depth.div_ceil(2);
    for start in (0..pairs).step_by(LANES) {
        let left = depth - 2 * start;
        let mask = if left >= 2 * LANES { !0 } else { (1 << left) - 1 };
        let mut block = [_mm512_setzero_si512(); LANES];
        for (line, block) in block.iter_mut().enumerate().take(lines) {
            // SAFETY: the line has `left` more elements, and the mask leaves out the rest of the vector.
            *block = unsafe { E::load_32(from.add(line * distance + 2 * start), mask) };
        }
        let block = transposed(block);
        for (pair, block) in block.iter().enumerate().take(pairs - start) {
            // SAFETY: `to` has room for 16 elements at each of the pairs.
            unsafe { _mm512_storeu_si512(to.add((start + pair) * width).cast(), *block) };
        }
    }
}

/// # Safety
/// `from` must be valid for `depth` runs of `lines` ≤ 32 elements, `distance` apart, and `to` for whole vectors of 16 elements at each
/// multiple of `width`, one for each pair.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn interleave<E: Source>(
    from: *const E,
    distance: usize,
    lines: usize,
    depth: usize,
    to: *mut u32,
    width: usize,
) {
    let mask = |first: usize| if lines >= first + LANES { !0 } else { (1 << (lines - first)) - 1 };
    for pair in 0..depth.div_ceil(2) {
        for first in (0..lines).step_by(LANES) {
            // SAFETY: the mask leaves out what is beyond the lines.
            let load =
                |at: usize| unsafe { _mm512_cvtepu16_epi32(E::load_16(from.add(at * distance + first), mask(first))) };
            let mut both = load(2 * pair);
            if 2 * pair + 1 < depth {
                both = _mm512_or_si512(both, _mm512_slli_epi32::<16>(load(2 * pair + 1)));
            }
            // SAFETY: `to` has room for whole vectors of all lines at each of the pairs.
            unsafe { _mm512_storeu_si512(to.add(pair * width + first).cast(), both) };
        }
    }
}

/// # Safety
/// All pointers must be valid for `count` elements.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
unsafe fn pair(first: *const bf16, second: *const bf16, to: *mut u32, count: usize) {
    let paired = |first: __m256i, second: __m256i| {
        let [first, second] = [_mm512_cvtepu16_epi32(first), _mm512_cvtepu16_epi32(second)];
        _mm512_or_si512(first, _mm512_slli_epi32::<16>(second))
    };
    let whole = count / LANES * LANES;
    for start in (0..whole).step_by(LANES) {
        // SAFETY: all have 16 elements from `start` on.
        unsafe {
            let [first, second] = [first, second].map(|from| _mm256_loadu_si256(from.add(start).cast()));
            _mm512_storeu_si512(to.add(start).cast(), paired(first, second));
        }
    }
    if whole < count {
        let mask = (1 << (count - whole)) - 1;
        // SAFETY: the mask leaves out what is beyond `count`.
        unsafe {
            let [first, second] = [first, second].map(|from| _mm256_maskz_loadu_epi16(mask, from.add(whole).cast()));
            _mm512_mask_storeu_epi32(to.add(whole).cast(), mask, paired(first, second));
        }
    }
}

/// # Safety
/// Both pointers must be valid for `count` elements.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn round(from: *const f32, term: f32, to: *mut bf16, count: usize) {
    let term = _mm512_set1_ps(term);
    // SAFETY: both types are 256 bits of anything.
    let rounded =
        |from: __m512| unsafe { transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(_mm512_add_ps(from, term))) };
    let whole = count / LANES * LANES;
    for start in (0..whole).step_by(LANES) {
        // SAFETY: both have 16 elements from `start` on.
        unsafe { _mm256_storeu_si256(to.add(start).cast(), rounded(_mm512_loadu_ps(from.add(start)))) };
    }
    if whole < count {
        let mask = (1 << (count - whole)) - 1;
        // SAFETY: the mask leaves out what is beyond `count`.
        unsafe {
            let from = _mm512_maskz_loadu_ps(mask, from.add(whole));
            _mm256_mask_storeu_epi16(to.add(whole).cast(), mask, rounded(from));
        }
    }
}
