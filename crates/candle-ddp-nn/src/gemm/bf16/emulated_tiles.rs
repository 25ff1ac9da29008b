//! AMX-BF16 for tests on processors without it: a handler of illegal instructions that does what the manual says. It checks what
//! a processor would refuse.
use super::amx::{Config, is_there};
use super::tests::{blocks_meet, numbers, products_are_exact_up_to_sums};
use super::{Avx512, PackedRows, Product, Unit, WIDTH, multiply_packed};
use half::bf16;
use std::arch::x86_64::*;
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ptr::{null_mut, read_unaligned};
use std::sync::Once;

type Row = [u8; 64];

struct Tiles {
    config: Option<Config>,
    data: [[Row; 16]; 8],
}

thread_local! {
    static TILES: UnsafeCell<Tiles> = const { UnsafeCell::new(Tiles { config: None, data: [[[0; 64]; 16]; 8] }) };
}

/// The unit with tiles, which are emulated where the processor has none; `None` without AVX512-BF16, and where tiles are turned off: the
/// processor then does some of the instructions itself.
pub(crate) fn unit() -> Option<Avx512> {
    let unit = Avx512::detect().expect("CANDLE_DDP_AMX is valid")?;
    if !unit.is_by_row() {
        if is_there() {
            return None;
        }
        install();
    }
    Some(unit.with_tiles(true))
}

/// From now on, all threads of this process have tiles.
fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler touches only its thread's tiles, and the memory that the instruction names.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_illegal_instruction as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(libc::SIGILL, &action, null_mut()), 0);
        }
    });
}

fn refuse(why: &str) -> ! {
    eprintln!("illegal instruction: {why}");
    std::process::abort()
}

extern "C" fn on_illegal_instruction(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the system passes the registers of the thread.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let at = registers[libc::REG_RIP as usize] as *const u8;
    // SAFETY: the processor has read the instruction there.
    let length = TILES.with(|tiles| unsafe { step(&mut *tiles.get(), at, registers) });
    registers[libc::REG_RIP as usize] += length as i64;
}

/// Does the instruction at `at`, and returns its length.
///
/// # Safety
/// Its operands in memory must be valid.
unsafe fn step(tiles: &mut Tiles, at: *const u8, registers: &[i64; 23]) -> usize {
    // SAFETY: the longest of these instructions has ten bytes, and code follows them.
    let code = unsafe { read_unaligned(at.cast::<[u8; 10]>()) };
    let [0xc4, first, second, opcode, modrm, ..] = code else { refuse("not one of AMX") };
    if first & 0x1f != 2 || second & 0x84 != 0 {
        refuse("not one of AMX");
    }
    let is_memory = modrm >> 6 != 3;
    let (reg, rm, third) = (usize::from(modrm >> 3 & 7), usize::from(modrm & 7), usize::from(!second >> 3 & 15));
    match (second & 3, opcode, is_memory) {
        (0, 0x49, true) => {
            let (address, _, length) = operand(&code, registers);
            // SAFETY: as the caller says.
            let config = unsafe { read_unaligned(address as *const Config) };
            if !config.is_valid() {
                refuse("the shapes");
            }
            *tiles = Tiles { config: Some(config), data: [[[0; 64]; 16]; 8] };
            length
        }
        (0, 0x49, false) if modrm == 0xc0 => {
            tiles.config = None;
            5
        }
        (3, 0x49, false) => {
            tiles.shape(reg);
            tiles.data[reg] = [[0; 64]; 16];
            5
        }
        (2 | 3, 0x4b, true) if rm == 4 => {
            let ((rows, bytes), (start, distance, length)) = (tiles.shape(reg), operand(&code, registers));
            let data = &mut tiles.data[reg];
            if second & 3 == 3 {
                *data = [[0; 64]; 16];
            }
            for (row, data) in data.iter_mut().enumerate().take(rows) {
                let memory = (start + row as i64 * distance) as *mut u8;
                // SAFETY: as the caller says.
                unsafe {
                    match second & 3 {
                        3 => memory.copy_to(data.as_mut_ptr(), bytes),
                        _ => memory.copy_from(data.as_ptr(), bytes),
                    }
                }
            }
            length
        }
        (2, 0x5c, false) => {
            tiles.multiply(reg, rm, third);
            5
        }
        _ => refuse("not one of AMX-BF16"),
    }
}

/// The address of the operand in memory without its index, the index times its scale, and the length of the instruction.
fn operand(code: &[u8; 10], registers: &[i64; 23]) -> (i64, i64, usize) {
    use libc::*;
    const ORDER: [i32; 16] = [
        REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI, REG_R8, REG_R9, REG_R10, REG_R11,
        REG_R12, REG_R13, REG_R14, REG_R15,
    ];
    let register = |low: u8, high: u8| registers[ORDER[usize::from(low & 7 | (!code[1] >> high & 1) << 3)] as usize];
    let (mode, rm) = (code[4] >> 6, code[4] & 7);
    let (base, index, after) = match rm {
        4 => (code[5], Some((code[5] >> 3, code[5] >> 6)), 6),
        _ => (rm, None, 5),
    };
    if mode == 0 && base & 7 == 5 {
        refuse("an operand without a base is not emulated");
    }
    let has_index = |(index, _): &(u8, u8)| index & 7 != 4 || !code[1] >> 6 & 1 != 0;
    let distance = index.filter(has_index).map_or(0, |(index, scale)| register(index, 6) << scale);
    let (offset, length) = match mode {
        0 => (0, after),
        1 => (i64::from(code[after] as i8), after + 1),
        _ => {
            (i64::from(i32::from_le_bytes([code[after], code[after + 1], code[after + 2], code[after + 3]])), after + 4)
        }
    };
    (register(base, 5) + offset, distance, length)
}

impl Tiles {
    /// The rows of a tile, and their bytes.
    fn shape(&self, tile: usize) -> (usize, usize) {
        match self.config.as_ref().map(|config| config.shape(tile)) {
            Some((rows, bytes)) if rows > 0 && bytes > 0 => (rows, bytes),
            _ => refuse("the tile has no shape"),
        }
    }

    /// Adds the product of the tiles `a` and `b` to `sum`.
    fn multiply(&mut self, sum: usize, a: usize, b: usize) {
        let [(rows, bytes), (a_rows, a_bytes), (b_rows, b_bytes)] = [sum, a, b].map(|tile| self.shape(tile));
        if (rows, bytes, a_bytes) != (a_rows, b_bytes, 4 * b_rows) || sum == a || sum == b || a == b {
            refuse("tiles that do not fit together");
        }
        for row in 0..rows {
            // SAFETY: a processor that multiplies bf16 has the instructions.
            let all = unsafe { add_product(&self.data[sum][row], &self.data[a][row], &self.data[b][..b_rows]) };
            // The columns that the tile does not have keep what is there.
            self.data[sum][row][..bytes].copy_from_slice(&all[..bytes]);
        }
    }
}

/// Adds the product of a row and all columns of a tile to `sums`. Both halves of the pairs have sums of their own, which are then added.
#[target_feature(enable = "avx512f")]
fn add_product(sums: &Row, row: &Row, tile: &[Row]) -> Row {
    let halves = |pairs: __m512i| {
        let upper = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32));
        [_mm512_slli_epi32::<16>(pairs), upper].map(|half| _mm512_castsi512_ps(half))
    };
    let mut products = [_mm512_setzero_ps(); 2];
    for (pair, columns) in row.chunks_exact(4).zip(tile) {
        let pair = i32::from_le_bytes([pair[0], pair[1], pair[2], pair[3]]);
        // SAFETY: a row has 64 bytes.
        let columns = unsafe { _mm512_loadu_si512(columns.as_ptr().cast()) };
        let (a, b) = (halves(_mm512_set1_epi32(pair)), halves(columns));
        products = [0, 1].map(|half| _mm512_fmadd_ps(a[half], b[half], products[half]));
    }
    let mut result = *sums;
    // SAFETY: as above.
    unsafe {
        let before = _mm512_loadu_ps(result.as_ptr().cast());
        let after = _mm512_add_ps(before, _mm512_add_ps(products[0], products[1]));
        _mm512_storeu_ps(result.as_mut_ptr().cast(), after);
    }
    result
}

/// The sums of both halves of 16 pairs, and then those of both together, as the manual of the instruction says.
fn sum_as_tiles_do(a: &[u32], b: &[u32], before: f32) -> f32 {
    let halves = |pair: u32| [pair << 16, pair & 0xffff_0000].map(f32::from_bits);
    a.chunks(16).zip(b.chunks(16)).fold(before, |sum, (a, b)| {
        let block = a.iter().zip(b).fold([0f32; 2], |sums, (a, b)| {
            let (a, b) = (halves(*a), halves(*b));
            [0, 1].map(|half| a[half].mul_add(b[half], sums[half]))
        });
        sum + (block[0] + block[1])
    })
}

/// Emulated where the processor has no tiles; skipped where it does not have AVX512-BF16 either.
#[test]
fn tiles_multiply_exactly_up_to_sums() {
    let Some(unit) = unit() else { return };
    products_are_exact_up_to_sums(unit);
    blocks_meet(unit);
    let shapes = [(32, 64, 32), (16, 32, 16), (5, 33, 1), (1, 7, 40), (49, 95, 15), (16, 95, 15), (73, 32, 17)];
    for (rows, columns, pairs) in shapes {
        let pack = |count: usize, seed: u64| -> Vec<u32> {
            numbers(2 * count, seed).chunks_exact(2).map(|two| super::pair(two[0], two[1])).collect()
        };
        let (a, b) = (pack(rows * pairs, 3), pack(usize::next_multiple_of(columns, WIDTH) * pairs, 4));
        let mut packed = PackedRows::default();
        packed.pack_pairs(unit, rows, pairs, |rows, lines, distance| {
            for (row, line) in rows.zip(lines.chunks_exact_mut(distance)) {
                line[..pairs].copy_from_slice(&a[row * pairs..][..pairs]);
            }
        });
        let columns_of_b = |column: usize| {
            let panel = &b[column / WIDTH * WIDTH * pairs..];
            panel.iter().skip(column % WIDTH).step_by(WIDTH).take(pairs).copied().collect::<Vec<_>>()
        };
        let wanted = |row: usize, column: usize, before: f32| {
            sum_as_tiles_do(&a[row * pairs..][..pairs], &columns_of_b(column), before)
        };
        let (distance, place) = (columns + 2, format!("{rows}×{columns}×{pairs}"));
        for accumulate in [false, true] {
            let mut result = vec![0.75; rows * distance];
            multiply_packed(unit, &packed, 0..pairs, (&b, columns), (&mut result, distance), accumulate, 1);
            for (at, found) in result.iter().enumerate() {
                let (row, column) = (at / distance, at % distance);
                let wanted = match column < columns {
                    true => wanted(row, column, if accumulate { 0.75 } else { 0.0 }),
                    false => 0.75,
                };
                assert_eq!(found.to_bits(), wanted.to_bits(), "row {row} and column {column} of {place}");
            }
        }
        let product = Product { a: packed.rows(), b: &b, distance: WIDTH * pairs, columns, pairs };
        let bias = numbers(columns, 5);
        for bias in [None, Some(&bias[..])] {
            let mut result = vec![MaybeUninit::new(bf16::ONE); rows * distance];
            unit.multiply_rounded(product, (&mut result, distance), bias);
            for (at, found) in result.iter().enumerate() {
                let (row, column) = (at / distance, at % distance);
                let bias = bias.and_then(|bias| bias.get(column)).map_or(0.0, |bias| bias.to_f32());
                let wanted = if column < columns { wanted(row, column, 0.0) + bias } else { 1.0 };
                // SAFETY: all were initialised.
                assert_eq!(
                    unsafe { found.assume_init() },
                    bf16::from_f32(wanted),
                    "row {row} and column {column} of {place}, rounded"
                );
            }
        }
    }
}
