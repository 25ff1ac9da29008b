//! The permutation that `torch.randperm(n, generator=g)` draws on the CPU, number for number.
//!
//! PyTorch fills its Mersenne Twister (mt19937) from the low 32 bits of the seed, and shuffles in one of two ways:
//! Fisher–Yates with 32-bit draws below [`LARGE`] elements, and the "inside-out" variant with 64-bit draws from there.
use super::indices::Indices;

/// The number of elements from which PyTorch draws 64 bits, so that `% n` does not favour small indices: `UINT32_MAX / 20`.
const LARGE: usize = (u32::MAX / 20) as usize;

/// The permutation of `0..n` that `torch.randperm(n, generator=torch.Generator().manual_seed(seed))` returns on the
/// CPU. Only the low 32 bits of `seed` count, as in PyTorch. A negative seed of PyTorch's is `seed as u64` here.
pub fn randperm(n: usize, seed: u64) -> impl ExactSizeIterator<Item = usize> + Clone {
    permutation(n, seed).at_places(0..n)
}

/// The same, in half the memory where the indices fit in 32 bits.
pub(super) fn permutation(n: usize, seed: u64) -> Indices {
    let mut random = Mt19937::new(seed as u32);
    match u32::try_from(n) {
        Ok(_) if n < LARGE => {
            let mut indices: Vec<u32> = (0..n as u32).collect();
            for i in 0..n.saturating_sub(1) {
                let draw = random.next_u32() % (n - i) as u32;
                indices.swap(i, i + draw as usize);
            }
            Indices::Narrow(indices)
        }
        Ok(_) => Indices::Narrow(inside_out(n, &mut random, |index| index as u32)),
        Err(_) => Indices::Wide(inside_out(n, &mut random, |index| index as u64)),
    }
}

/// Fisher–Yates, building the permutation as it goes.
fn inside_out<T: Copy>(n: usize, random: &mut Mt19937, index: impl Fn(usize) -> T) -> Vec<T> {
    let mut indices = Vec::with_capacity(n);
    for i in 0..n {
        let draw = (random.next_u64() % (i as u64 + 1)) as usize;
        indices.push(index(i));
        indices.swap(i, draw);
    }
    indices
}

const STATE: usize = 624;
const SHIFT: usize = 397;

/// The 32-bit Mersenne Twister of Matsumoto and Nishimura, as `std::mt19937` defines it.
struct Mt19937 {
    state: [u32; STATE],
    next: usize,
}

impl Mt19937 {
    fn new(seed: u32) -> Self {
        let mut state = [seed; STATE];
        for i in 1..STATE {
            let previous = state[i - 1];
            state[i] = 1_812_433_253_u32.wrapping_mul(previous ^ (previous >> 30)).wrapping_add(i as u32);
        }
        Self { state, next: STATE }
    }

    fn next_u32(&mut self) -> u32 {
        if self.next == STATE {
            self.refill();
        }
        let mut word = self.state[self.next];
        self.next += 1;
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c_5680;
        word ^= (word << 15) & 0xefc6_0000;
        word ^ (word >> 18)
    }

    /// Two draws, the first one on top.
    fn next_u64(&mut self) -> u64 {
        let high = u64::from(self.next_u32());
        (high << 32) | u64::from(self.next_u32())
    }

    fn refill(&mut self) {
        for i in 0..STATE {
            let word = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % STATE] & 0x7fff_ffff);
            let twist = if word & 1 == 0 { 0 } else { 0x9908_b0df };
            self.state[i] = self.state[(i + SHIFT) % STATE] ^ (word >> 1) ^ twist;
        }
        self.next = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_twister_is_the_standard_one() {
        // The C++ standard fixes the 10 000th draw of a default-seeded std::mt19937.
        let mut random = Mt19937::new(5489);
        let draw = (0..10_000).map(|_| random.next_u32()).last();
        assert_eq!(draw, Some(4_123_659_995));
    }

    #[test]
    fn both_widths_draw_the_same() {
        let narrow = inside_out(1000, &mut Mt19937::new(3), |index| index as u32);
        let wide = inside_out(1000, &mut Mt19937::new(3), |index| index as u64);
        assert!(narrow.iter().map(|&index| u64::from(index)).eq(wide.iter().copied()));
        let permutation = Indices::Wide(wide.clone());
        assert_eq!(permutation.len(), 1000);
        assert!(permutation.iter().map(|index| index as u64).eq(wide.iter().copied()));
        assert_eq!(permutation.get(0), Some(wide[0] as usize));
        assert_eq!(permutation.get(1000), None);
    }
}
