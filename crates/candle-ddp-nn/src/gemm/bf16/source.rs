//! The elements of a factor.
use half::bf16;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
#[cfg(target_arch = "x86_64")]
use std::mem::transmute;

/// bf16, or f32 that is rounded when it is packed.
pub(crate) trait Source: Copy + Send + Sync + 'static {
    fn rounded(self) -> bf16;

    /// Up to 32 neighbours, rounded.
    ///
    /// # Safety
    /// The processor must have AVX512-BF16, and `from` must be valid for the elements in the mask.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load_32(from: *const Self, mask: u32) -> __m512i;

    /// Up to 16 neighbours, rounded.
    ///
    /// # Safety
    /// As for `load_32`.
    #[cfg(target_arch = "x86_64")]
    unsafe fn load_16(from: *const Self, mask: u16) -> __m256i;
}

impl Source for bf16 {
    fn rounded(self) -> bf16 {
        self
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    #[inline]
    unsafe fn load_32(from: *const Self, mask: u32) -> __m512i {
        // SAFETY: as the caller promises.
        unsafe { _mm512_maskz_loadu_epi16(mask, from.cast()) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    #[inline]
    unsafe fn load_16(from: *const Self, mask: u16) -> __m256i {
        // SAFETY: as the caller promises.
        unsafe { _mm256_maskz_loadu_epi16(mask, from.cast()) }
    }
}

impl Source for f32 {
    fn rounded(self) -> bf16 {
        bf16::from_f32(self)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    #[inline]
    unsafe fn load_32(from: *const Self, mask: u32) -> __m512i {
        // SAFETY: as the caller promises; both types of the result are 512 bits of anything.
        unsafe {
            let first = _mm512_maskz_loadu_ps(mask as u16, from);
            let second = _mm512_maskz_loadu_ps((mask >> 16) as u16, from.wrapping_add(16));
            transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(second, first))
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    #[inline]
    unsafe fn load_16(from: *const Self, mask: u16) -> __m256i {
        // SAFETY: as the caller promises; both types of the result are 256 bits of anything.
        unsafe { transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, from))) }
    }
}
