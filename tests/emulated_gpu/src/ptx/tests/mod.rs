//! Kernels that use the features of real kernels; see `kernels.ptx`.
use super::{Kernel, entries};
use half::{bf16, f16};
use std::process::Command;

const KERNELS: &str = include_str!("kernels.ptx");

trait Argument {
    fn bytes(&self) -> Vec<u8>;
}

impl<T> Argument for &mut [T] {
    fn bytes(&self) -> Vec<u8> {
        (self.as_ptr() as u64).to_le_bytes().to_vec()
    }
}

impl Argument for f32 {
    fn bytes(&self) -> Vec<u8> {
        self.to_le_bytes().to_vec()
    }
}

impl Argument for u32 {
    fn bytes(&self) -> Vec<u8> {
        self.to_le_bytes().to_vec()
    }
}

fn run(ptx: &str, name: &str, blocks: u32, threads: u32, shared: u32, arguments: &[&dyn Argument]) {
    let kernel = Kernel::load(ptx, name).unwrap();
    let arguments: Vec<_> = arguments.iter().map(|argument| argument.bytes()).collect();
    let sizes: Vec<_> = arguments.iter().map(Vec::len).collect();
    assert_eq!(kernel.parameter_sizes(), sizes);
    // SAFETY: the slices are as long as the kernels expect.
    unsafe { kernel.run([blocks, 1, 1], [threads, 1, 1], shared, &arguments) }
}

/// Returns numbers of all magnitudes, and special ones.
fn bits(count: usize) -> impl Iterator<Item = u32> {
    let mut state = 1_u64;
    (0..count).map(move |_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 32) as u32
    })
}

#[test]
fn names_of_kernels() {
    let names = entries(KERNELS);
    assert_eq!(names[..3], ["axpy", "halves", "conversions"]);
    assert_eq!(names.len(), KERNELS.matches("\n.visible .entry").count());
    assert_eq!(entries("// .entry none(\n.entry one (\n"), ["one"]);
}

#[test]
fn predicates_and_branches() {
    let mut x: Vec<f32> = (0..1000).map(|i| (i % 7) as f32 - 3.).collect();
    let mut y: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let n = 990_u32;
    run(KERNELS, "axpy", 4, 256, 0, &[&&mut x[..], &&mut y[..], &2.5_f32, &n]);
    for i in 0..1000 {
        let expected = if i >= 990 {
            i as f32
        } else if x[i] < 0. {
            0.
        } else {
            2.5 * x[i] + i as f32
        };
        assert_eq!(y[i], expected, "{i}");
    }
}

#[test]
fn arithmetic_of_16_bits() {
    let count = 1 << 16;
    let (mut a, mut b): (Vec<u16>, Vec<u16>) = bits(count).map(|bits| (bits as u16, (bits >> 16) as u16)).unzip();
    let mut out = vec![0_u16; 8 * count];
    run(KERNELS, "halves", 256, 256, 0, &[&&mut a[..], &&mut b[..], &&mut out[..]]);
    for i in 0..count {
        // In f64, sums and products of these are rounded at most once, when they are converted to 16 bits.
        let (x, y) = (f16::from_bits(a[i]).to_f64(), f16::from_bits(b[i]).to_f64());
        let results = [x + y, x - y, x * y];
        for (index, expected) in results.into_iter().enumerate() {
            let (found, expected) = (f16::from_bits(out[8 * i + index]), f16::from_f64(expected));
            assert!(found == expected || (found.is_nan() && expected.is_nan()), "f16 {index}: {x} {y}: {found}");
        }
        let (x, y) = (bf16::from_bits(a[i]).to_f64(), bf16::from_bits(b[i]).to_f64());
        for (index, expected) in [x + y, x - y, x * y].into_iter().enumerate() {
            let (found, expected) = (bf16::from_bits(out[8 * i + 4 + index]), bf16::from_f64(expected));
            assert!(found == expected || (found.is_nan() && expected.is_nan()), "bf16 {index}: {x} {y}: {found}");
        }
    }
}

#[test]
fn fused_operations_round_once() {
    // a * b + a is so close to the middle between two numbers that rounding to f32 first gives the wrong one.
    let f16s = [(0x2ed1, 0x7523), (0x2e81, 0x79cc), (0x2f7f, 0x783c), (0x2e5f, 0x74a6)];
    let rounded = [2242., 4828., 4062., 1895.];
    // 1.5 * 131 = 196.5, times 2^30 and 2^60: for the latter, f64 does not represent the sum either.
    let [large, larger] = [30, 60].map(|exponent| (131. * 2_f32.powi(exponent), 197. * 2_f32.powi(exponent)));
    let bf16s = [large, larger].map(|(b, _)| (bf16::from_f32(1.5).to_bits(), bf16::from_f32(b).to_bits()));
    let (mut a, mut b): (Vec<u16>, Vec<u16>) = f16s.into_iter().chain(bf16s).unzip();
    let mut out = vec![0_u16; 8 * a.len()];
    run(KERNELS, "halves", 1, 6, 0, &[&&mut a[..], &&mut b[..], &&mut out[..]]);
    for (index, (a, b)) in f16s.into_iter().enumerate() {
        let (x, y) = (f16::from_bits(a).to_f64(), f16::from_bits(b).to_f64());
        let found = f16::from_bits(out[8 * index + 3]).to_f64();
        assert_eq!(found, rounded[index], "{x} {y}");
        let twice = f16::from_f32((x * y + x) as f32).to_f64();
        assert!(found != twice && (found - (x * y + x)).abs() < (twice - (x * y + x)).abs(), "{x} {y}");
    }
    assert_eq!(bf16::from_bits(out[8 * 4 + 7]).to_f32(), large.1);
    assert_eq!(bf16::from_bits(out[8 * 5 + 7]).to_f32(), larger.1);
}

#[test]
fn conversions() {
    let special = [0.5, 1.5, -0.5, -2.5, 1e10, -1e10, 300., f32::NAN, f32::INFINITY, 65520., 65519.996, 1e-7, -0., 0.3];
    let mut x: Vec<f32> = special.into_iter().chain(bits(1000).map(f32::from_bits)).collect();
    let mut out = vec![0_u32; 12 * x.len()];
    run(KERNELS, "conversions", 1, x.len() as u32, 0, &[&&mut x[..], &&mut out[..]]);
    for (x, out) in x.into_iter().zip(out.chunks(12)) {
        let (narrow, brain) = (f16::from_f32(x), bf16::from_f32(x));
        let (narrow, brain) = if x.is_nan() { (0x7fff, 0x7fff) } else { (narrow.to_bits(), brain.to_bits()) };
        assert_eq!(out[..3], [u32::from(narrow), u32::from(brain), u32::from(narrow)], "{x}");
        let integers = [x.round_ties_even(), x.trunc(), x.floor(), x.ceil()].map(|rounded| rounded as i32 as u32);
        assert_eq!(out[3..7], integers, "{x}");
        assert_eq!(out[7], u32::from(x as u8), "{x}");
        assert_eq!(out[8], x as i8 as u32, "{x}");
        assert_eq!(out[9], x as i32 as i8 as u32, "{x}");
        assert_eq!(f32::from_bits(out[10]), if x.is_nan() { 0. } else { x.clamp(0., 1.) }, "{x}");
        assert_eq!(out[11], 1_f32.to_bits());
    }
}

fn block_sums(ptx: &str) -> bool {
    let mut x: Vec<f32> = (0..640).map(|i| (i % 13) as f32).collect();
    let mut out = [0_f32; 10];
    run(ptx, "block_sum", 10, 64, 256, &[&&mut x[..], &&mut out[..]]);
    x.chunks(64).zip(out).all(|(x, out)| x.iter().sum::<f32>() == out)
}

#[test]
fn blocks_add_in_shared_memory_and_a_missing_barrier_shows() {
    assert!(block_sums(KERNELS));
    let missing = KERNELS.replace("bar.sync 0;", "");
    assert!(!block_sums(&missing));
}

#[test]
fn turns_go_up_and_down() {
    let mut first = Vec::new();
    // Other tests launch kernels too, so the direction with which a launch begins is random.
    for _ in 0..100 {
        let mut out = vec![0_u32; 2 * 100];
        run(KERNELS, "turns", 1, 100, 0, &[&&mut out[..]]);
        let (up, down): (Vec<u32>, Vec<u32>) = ((0..100).collect(), (0..100).rev().collect());
        // Memory initially has all bits set.
        assert!(out == [&up[..], &down].concat() || out == [&down[..], &up].concat(), "{out:?}");
        first.push(out[0]);
    }
    assert!(first.contains(&0) && first.contains(&99), "{first:?}");
}

#[test]
fn lanes_of_a_warp() {
    let mut out = vec![0_u32; 256];
    run(KERNELS, "warp", 1, 32, 0, &[&&mut out[..]]);
    for (lane, out) in (0..32).zip(out.chunks(8)) {
        let lower = if lane >= 3 { lane - 3 } else { lane };
        let next = if lane % 8 == 7 { lane } else { lane + 1 };
        let fifth = lane / 16 * 16 + 5;
        assert_eq!(out[..7], [496, lower, u32::from(lane >= 3), next, fifth, 0xaaaa_aaaa, 1], "{lane}");
        let (before, behind) = (out[7] & 255, (out[7] >> 8) - 32);
        assert!([lane, 31 - lane].contains(&before) && behind == 31 - before, "{lane}: {before} {behind}");
    }
}

#[test]
fn atomic_operations_of_several_streams() {
    let mut out = vec![0_u64; 4];
    out[2] = 7;
    let address = out.as_mut_ptr() as usize;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(move || {
                // SAFETY: the array outlives the scope; until then only kernels access it.
                let out = unsafe { std::slice::from_raw_parts_mut(address as *mut u64, 4) };
                run(KERNELS, "atomics", 2000, 256, 0, &[&out]);
            });
        }
    });
    let (count, sum) = (out[0] as u32, (out[0] >> 32) as u32);
    let (sum_16, largest) = (out[1] as u16, (out[1] >> 32) as u32);
    assert_eq!((count, f32::from_bits(sum)), (2_048_000, 1_024_000.));
    // At this value, adding 1 is rounded away.
    assert_eq!((f16::from_bits(sum_16), largest), (f16::from_f32(2048.), 255));
    assert_eq!((out[2], out[3]), (9, 1));
}

#[test]
fn calls_arrays_switches_and_bits() {
    let mut out = [0_u64; 32];
    run(KERNELS, "various", 1, 4, 0, &[&&mut out[..]]);
    for (index, (out, prime)) in out.chunks(8).zip([2_u64, 3, 5, 7]).enumerate() {
        let words: Vec<u32> = out.iter().flat_map(|word| [*word as u32, (*word >> 32) as u32]).collect();
        assert_eq!(words[..2], [prime as u32, 100 + index.min(2) as u32]);
        assert_eq!(out[1..3], [40 + prime, prime - 1]);
        assert_eq!(words[6..8], [6, u32::MAX]);
        assert_eq!(words[8..12], [0x7755_3311, 12 ^ 10 ^ 6, 3, 0]);
        assert_eq!(words[12..15], [-3_i32 as u32, u32::MAX, u32::MAX]);
    }
}

#[test]
fn unsupported_features_are_named() {
    let refused = |from: &str, to: &str, name: &str| {
        let ptx = KERNELS.replace(from, to);
        assert_ne!(ptx, KERNELS);
        Kernel::load(&ptx, name).map(|_| ()).unwrap_err()
    };
    let add = "add.s64 %rd4, %rd1, %rd3;";
    let error = refused(add, "mma.sync.aligned.m16n8k16 %rd4,\n\t%rd1, %rd3;", "axpy");
    assert_eq!(error, "instruction not supported: `mma.sync.aligned.m16n8k16 %rd4, %rd1, %rd3`");
    let error = refused(add, "add.loud.s64 %rd4, %rd1, %rd3;", "axpy");
    assert_eq!(error, "instruction not supported: `add.loud.s64 %rd4, %rd1, %rd3`");
    assert!(refused("twice, (param0)", "thrice, (param0)", "various").contains("`thrice` is not in the module"));
    let error = refused(".const .align 4 .u32 primes[4] = {2, 3, 5, 7}", ".global .u32 primes[4]", "various");
    assert!(error.contains("`primes` is shared"), "{error}");
    assert!(Kernel::load(KERNELS, "none").map(|_| ()).unwrap_err().contains("no kernel `none`"));
    // A function is not a kernel.
    assert!(Kernel::load(KERNELS, "twice").map(|_| ()).unwrap_err().contains("no kernel `twice`"));
}

const CHILD: &str = "EMULATED_GPU_TEST_CHILD";

/// Runs the test `name` in a child process; returns its output and whether it succeeded.
fn child(name: &str, variables: &[(&str, &str)]) -> (String, bool) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([&format!("ptx::tests::{name}"), "--exact", "--nocapture"]).env(CHILD, "1");
    let output = command.envs(variables.iter().copied()).output().unwrap();
    (String::from_utf8_lossy(&output.stderr).into_owned(), output.status.success())
}

/// Runs a kernel in a child process, which must end with a message that contains the kernel's name and `expected`.
fn ends_with(test: &str, kernel: &str, expected: &str, arguments: &[&dyn Argument]) {
    if std::env::var_os(CHILD).is_some() {
        return run(KERNELS, kernel, 1, 32, 0, arguments);
    }
    let (said, well) = child(test, &[]);
    assert!(!well && said.contains(&format!("kernel {kernel}: ")) && said.contains(expected), "{said}");
}

#[test]
fn deadlocks_are_reported() {
    let expected = "0 have ended, 31 wait at a barrier of the block, 1 for others of their warp";
    ends_with("deadlocks_are_reported", "apart", expected, &[]);
}

#[test]
fn threads_at_different_barriers_are_reported() {
    ends_with("threads_at_different_barriers_are_reported", "diverged", "wait at different barriers", &[]);
}

#[test]
fn accesses_outside_of_shared_memory_are_reported() {
    ends_with("accesses_outside_of_shared_memory_are_reported", "outside", "outside of the block's shared memory", &[]);
}

#[test]
fn misaligned_accesses_are_reported() {
    let mut numbers = [0_u64; 2];
    ends_with("misaligned_accesses_are_reported", "crooked", "not a multiple", &[&&mut numbers[..]]);
}

#[test]
fn a_missing_compiler_is_named() {
    if std::env::var_os(CHILD).is_some() {
        let error = Kernel::load(KERNELS, "axpy").map(|_| ()).unwrap_err();
        eprintln!("child: {error}");
        return;
    }
    let folder = std::env::temp_dir().join(format!("emulated-gpu-test-{}", std::process::id()));
    let variables = [("CC", "/no/compiler"), ("EMULATED_GPU_CACHE", folder.to_str().unwrap())];
    let (said, well) = child("a_missing_compiler_is_named", &variables);
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(well && said.contains("child: kernels need a C compiler; cannot start `/no/compiler`"), "{said}");
}
