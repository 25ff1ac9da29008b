//! Comparison of the kernels' arithmetic, without a GPU, with that of the CPU kernels.
mod norm;
#[path = "../../tests/common/skip.rs"]
mod skip;

use crate::kernels::host::Host;
use crate::kernels::table::{CHUNK, Entry, Table};
use crate::kernels::{Assignment, Extent, Kernel, Rule, Scalars, program};
use crate::optim::{FusedOptimizer, Moment, ParameterGroup, ParamsAdam, ParamsLamb, ParamsSgd, UpdateRule};
use crate::tensor::copy::assign;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var, WithDType};
use candle_nn::{Optimizer, ParamsAdamW};
use half::{bf16, f16};

/// Sizes below, at and above the boundaries of threads and chunks.
const SIZES: [usize; 9] = [1, 255, 0, 256, 257, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77];
const STEPS: u64 = 6;

/// Returns the machine that runs kernels on the CPU. Without a compiler for them, reports that `test` is skipped.
fn host(test: &str) -> Option<Host> {
    let host = Host::new();
    if host.is_none() {
        skip::skip(test, "it needs a C++ compiler, `c++`, and glibc");
    }
    host
}

/// Returns reproducible values in -1..1.
fn values(count: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f64 / (1u64 << 23) as f64 - 1.
    };
    (0..count).map(|_| next()).collect()
}

/// Consecutive tensors in one allocation, separated by guard elements that must not change.
struct Memory<E> {
    elements: Vec<E>,
    offsets: Vec<usize>,
}

impl<E: WithDType> Memory<E> {
    const GUARD: f64 = 77.;

    /// Tensors begin at arbitrary elements.
    fn new(tensors: impl Iterator<Item = Vec<f64>>) -> Self {
        Self::placed(tensors, 1)
    }

    /// Tensors begin at addresses that are multiples of `bytes`.
    fn placed(tensors: impl Iterator<Item = Vec<f64>>, bytes: usize) -> Self {
        let tensors: Vec<_> = tensors.collect();
        // It must not move.
        let most = tensors.iter().map(|tensor| tensor.len() + 3 + bytes).sum::<usize>() + 1;
        let (mut elements, mut offsets) = (Vec::with_capacity(most), Vec::new());
        for tensor in tensors {
            elements.extend([E::from_f64(Self::GUARD); 3]);
            while !(elements.as_ptr_range().start.wrapping_add(elements.len()) as usize).is_multiple_of(bytes) {
                elements.push(E::from_f64(Self::GUARD));
            }
            offsets.push(elements.len());
            elements.extend(tensor.into_iter().map(E::from_f64));
        }
        elements.push(E::from_f64(Self::GUARD));
        Self { elements, offsets }
    }

    fn zeros(sizes: &[usize]) -> Self {
        Self::new(sizes.iter().map(|size| vec![0.; *size]))
    }

    fn address(&mut self, number: usize) -> u64 {
        self.elements.as_mut_ptr().wrapping_add(self.offsets[number]) as u64
    }

    #[track_caller]
    fn get(&self, number: usize, size: usize) -> Vec<f64> {
        let from = self.offsets[number];
        let surroundings = [&self.elements[from - 3..from], &self.elements[from + size..][..1]].concat();
        assert!(surroundings.iter().all(|guard| guard.to_f64() == Self::GUARD), "written beyond tensor {number}");
        self.elements[from..from + size].iter().map(|value| value.to_f64()).collect()
    }
}

/// Returns gradients for `vars`; some have none.
fn grad_store(vars: &[Var], gradients: &[Option<Vec<f64>>]) -> GradStore {
    let mut store = Var::new(0f32, &Device::Cpu).unwrap().sqr().unwrap().backward().unwrap();
    for (var, gradient) in vars.iter().zip(gradients) {
        if let Some(gradient) = gradient {
            let gradient = Tensor::from_slice(gradient, gradient.len(), &Device::Cpu).unwrap();
            store.insert(var, gradient.to_dtype(var.dtype()).unwrap());
        }
    }
    store
}

fn scalars_of<R: UpdateRule>(rule: &R, moment: Moment) -> Scalars {
    rule.fused().unwrap().scalars(moment)
}

/// Compares parameters after a few steps. `E` is their dtype, `S` that of the states. Two groups alternate, and one
/// parameter has a gradient only in every second step.
fn trains_alike<E: WithDType, S: WithDType, R: UpdateRule>(host: &Host, groups: [R; 2], tolerance: f64) {
    let what = format!("{} {:?} {groups:?}", R::NAME, E::DTYPE);
    let start = |number: usize| values(SIZES[number], 100 + number as u64);
    let vars: Vec<Var> = (0..SIZES.len())
        .map(|number| {
            let values = Tensor::from_vec(start(number), SIZES[number], &Device::Cpu).unwrap();
            Var::from_tensor(&values.to_dtype(E::DTYPE).unwrap()).unwrap()
        })
        .collect();
    let group = |number: usize, options: &R| ParameterGroup {
        parameters: (number..SIZES.len()).step_by(2).map(|number| (number.to_string(), vars[number].clone())).collect(),
        options: options.clone(),
    };
    let mut optimizer = FusedOptimizer::from_groups(vec![group(0, &groups[0]), group(1, &groups[1])]).unwrap();

    let mut parameters = Memory::<E>::new((0..SIZES.len()).map(start));
    let mut states = [Memory::<S>::zeros(&SIZES), Memory::<S>::zeros(&SIZES)];
    let mut steps = [0; SIZES.len()];
    for step in 0..STEPS {
        let gradients: Vec<Option<Vec<f64>>> = (0..SIZES.len())
            .map(|number| (number != 1 || step % 2 == 0).then(|| values(SIZES[number], 1000 * step + number as u64)))
            .collect();
        optimizer.step(&grad_store(&vars, &gradients)).unwrap();

        let mut gradients_here = Memory::<E>::new(gradients.iter().map(|g| g.clone().unwrap_or_default()));
        let present: Vec<usize> = (0..SIZES.len()).filter(|number| gradients[*number].is_some()).collect();
        let mut entries: Vec<Entry> = present
            .iter()
            .map(|&number| {
                let mut addresses = [0; 2];
                let kept = groups[number % 2].states().len();
                for (address, state) in addresses.iter_mut().zip(&mut states).take(kept) {
                    *address = state.address(number);
                }
                Entry {
                    elements: SIZES[number],
                    parameter: parameters.address(number),
                    gradient: gradients_here.address(number),
                    states: addresses,
                    ..Default::default()
                }
            })
            .collect();
        let extent = program::measure(host, E::DTYPE, &entries).unwrap();
        let norm = program::read_extent(host, extent.as_ref()).unwrap().squares.sqrt();
        for (entry, &number) in entries.iter_mut().zip(&present) {
            steps[number] += 1;
            let options = &groups[number % 2];
            let gradient_scale =
                options.fused().unwrap().max_grad_norm().map_or(1., |max| if norm > max { max / norm } else { 1. });
            entry.scalars = scalars_of(options, Moment { step: steps[number], gradient_scale });
        }
        program::update_whole(host, groups[0].fused().unwrap().rule(), E::DTYPE, &entries).unwrap();
    }
    for (number, (var, size)) in vars.iter().zip(SIZES).enumerate() {
        let expected: Vec<f64> = var.to_dtype(DType::F64).unwrap().to_vec1().unwrap();
        let found = parameters.get(number, size);
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let error = (found - expected).abs();
            assert!(error <= tolerance * expected.abs().max(0.1), "{what} {number}[{index}]: {found}, not {expected}");
        }
        assert!(size == 0 || found != start(number), "{what} {number}: nothing was changed");
        for state in &states {
            state.get(number, size);
        }
    }
}

/// `tolerances` are those of f32, f64, f16 and bf16.
fn trains_alike_in_all_dtypes<R: UpdateRule>(host: &Host, groups: [R; 2], tolerances: [f64; 4]) {
    trains_alike::<f32, f32, R>(host, groups.clone(), tolerances[0]);
    trains_alike::<f64, f64, R>(host, groups.clone(), tolerances[1]);
    trains_alike::<f16, f32, R>(host, groups.clone(), tolerances[2]);
    trains_alike::<bf16, f32, R>(host, groups, tolerances[3]);
}

/// The operations are the same, one by one, so the results are bit-identical.
const EXACT: [f64; 4] = [0.; 4];

#[test]
fn adam_and_adamw_match_the_cpu() {
    let Some(host) = host("adam_and_adamw_match_the_cpu") else { return };
    let options = ParamsAdamW { lr: 0.05, ..Default::default() };
    let other = ParamsAdamW { weight_decay: 0.3, beta1: 0.7, eps: 1e-3, ..options.clone() };
    trains_alike_in_all_dtypes(&host, [options, other], EXACT);
    let options = ParamsAdam { lr: 0.05, ..Default::default() };
    let other = ParamsAdam { weight_decay: 0.3, beta2: 0.9, ..options.clone() };
    trains_alike_in_all_dtypes(&host, [options, other], EXACT);
}

#[test]
fn sgd_matches_the_cpu() {
    let Some(host) = host("sgd_matches_the_cpu") else { return };
    let plain = ParamsSgd { lr: 0.1, weight_decay: 0.1, ..Default::default() };
    let momentum = ParamsSgd { momentum: 0.9, ..plain.clone() };
    let dampened = ParamsSgd { dampening: 0.4, ..momentum.clone() };
    let nesterov = ParamsSgd { nesterov: true, ..momentum.clone() };
    trains_alike_in_all_dtypes(&host, [plain, momentum], EXACT);
    trains_alike_in_all_dtypes(&host, [dampened, nesterov], EXACT);
}

#[test]
fn lamb_matches_the_cpu() {
    let Some(host) = host("lamb_matches_the_cpu") else { return };
    // The sums have a different order, so 16-bit parameters may be rounded differently.
    let tolerances = [1e-6, 1e-12, 2e-3, 1.6e-2];
    let options = ParamsLamb { lr: 0.05, ..Default::default() };
    let plain = ParamsLamb { weight_decay: 0., max_grad_norm: None, bias_correction: false, ..options.clone() };
    trains_alike_in_all_dtypes(&host, [options.clone(), plain.clone()], tolerances);
    let coupled = ParamsLamb { adam_w_mode: false, grad_averaging: false, ..options };
    let adapted = ParamsLamb { use_nvlamb: true, ..plain };
    trains_alike_in_all_dtypes(&host, [coupled, adapted], tolerances);
}

/// As under ZeRO, where the other part's sums come from another rank.
#[test]
fn lamb_in_two_parts_matches_lamb_in_one() {
    let Some(host) = host("lamb_in_two_parts_matches_lamb_in_one") else { return };
    let (size, cut) = (2 * CHUNK + 100, CHUNK + 31);
    let scalars = scalars_of(&ParamsLamb::default(), Moment { step: 3, gradient_scale: 0.5 });
    let update = |whole: bool| {
        let mut tensors = Memory::<f32>::new((0..4).map(|n| values(size, n + 1).into_iter().map(f64::abs).collect()));
        let mut part = |from: usize, to: usize| {
            let mut at = |number| tensors.address(number) + 4 * from as u64;
            let (parameter, gradient, states) = (at(0), at(1), [at(2), at(3)]);
            Entry { elements: to - from, parameter, gradient, states, scalars }
        };
        if whole {
            program::update_whole(&host, Rule::Lamb, DType::F32, &[part(0, size)]).unwrap();
        } else {
            let parts = [part(0, cut), part(cut, size)];
            let numbers = program::prepare(&host, Rule::Lamb, DType::F32, &parts).unwrap();
            let sums = program::read_sums(&host, numbers.as_ref(), 2).unwrap();
            let sums = [sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]];
            program::update(&host, Rule::Lamb, DType::F32, &parts, &[sums; 2]).unwrap();
        }
        tensors.get(0, size)
    };
    for (whole, parts) in update(true).into_iter().zip(update(false)) {
        assert!((whole - parts).abs() <= 1e-6 * whole.abs(), "{parts}, not {whole}");
    }
}

/// Returns the entries of a memory whose tensors are read and changed.
fn entries<E: WithDType>(memory: &mut Memory<E>, scalar: f64) -> Vec<Entry> {
    let entry = |(number, elements)| {
        let address = memory.address(number);
        let scalars = crate::kernels::scalars([scalar]);
        Entry { elements, parameter: address, gradient: address, scalars, ..Default::default() }
    };
    SIZES.into_iter().enumerate().map(entry).collect()
}

fn gradients_in<E: WithDType>(host: &Host, exact: f64) {
    let numbers = |seed| SIZES.iter().enumerate().map(move |(number, size)| values(*size, seed + number as u64));
    let mut memory = Memory::<E>::new(numbers(5));
    let before: Vec<Vec<f64>> = (0..SIZES.len()).map(|number| memory.get(number, SIZES[number])).collect();
    let all = || before.iter().flatten().copied();
    let expected = Extent { squares: all().map(|x| x * x).sum(), largest: all().fold(0., |a, x| a.max(x.abs())) };
    let same = |found: Extent, what: &str| {
        assert!((found.squares - expected.squares).abs() <= 1e-6 * expected.squares, "{what}: {found:?} {expected:?}");
        assert_eq!(found.largest, expected.largest, "{what}");
    };

    let list = entries(&mut memory, 0.25);
    let extent = program::measure(host, E::DTYPE, &list).unwrap();
    same(program::read_extent(host, extent.as_ref()).unwrap(), "measure");
    let extent = program::rescale_measured(host, E::DTYPE, &list).unwrap();
    let Extent { squares, largest } = program::read_extent(host, extent.as_ref()).unwrap();
    same(Extent { squares: squares * 16., largest: largest * 4. }, "rescale");
    let compare = |memory: &Memory<E>, change: &dyn Fn(f64) -> f64| {
        for (number, before) in before.iter().enumerate() {
            for (found, before) in memory.get(number, before.len()).iter().zip(before) {
                assert!((found - change(*before)).abs() <= exact, "{found} out of {before}");
            }
        }
    };
    // Powers of two are exact, except where f16 becomes subnormal.
    compare(&memory, &|x| x * 0.25);
    program::change(host, Kernel::Rescale, E::DTYPE, &entries(&mut memory, 4.)).unwrap();
    compare(&memory, &|x| x);
    program::change(host, Kernel::Clamp, E::DTYPE, &entries(&mut memory, 0.5)).unwrap();
    compare(&memory, &|x| x.clamp(-0.5, 0.5));

    // Clipping scales by a factor that a kernel decides on, as if the host had.
    for (by_largest, most) in [(false, 3.), (true, 0.25), (false, 1e9), (true, 1e9)] {
        let [mut clipped, mut scaled] = [(); 2].map(|()| Memory::<E>::new(numbers(5)));
        let mut list = entries(&mut clipped, most);
        list.iter_mut().for_each(|entry| entry.scalars[1] = f64::from(by_largest));
        let extent = program::read_extent(host, program::clip(host, E::DTYPE, &list).unwrap().as_ref()).unwrap();
        same(extent, "clip");
        let factor = most / (if by_largest { extent.largest } else { extent.squares.sqrt() } + 1e-6);
        assert_eq!(factor < 1., most < 1e9);
        program::change(host, Kernel::Rescale, E::DTYPE, &entries(&mut scaled, factor.min(1.))).unwrap();
        for (number, size) in SIZES.into_iter().enumerate() {
            assert_eq!(clipped.get(number, size), scaled.get(number, size), "{by_largest}, {most}");
        }
    }

    // A single infinite or NaN element is found wherever it is, and clamped correctly.
    for (number, index) in [(0, 0), (1, 254), (4, 256), (7, CHUNK), (8, CHUNK + 1), (8, 3 * CHUNK + 76)] {
        for (bad, clamped) in [(f64::NAN, f64::NAN), (f64::INFINITY, 0.5), (f64::NEG_INFINITY, -0.5)] {
            let mut memory = Memory::<E>::new(numbers(5));
            let at = memory.offsets[number] + index;
            memory.elements[at] = E::from_f64(bad);
            let list = entries(&mut memory, 1.);
            let read = |numbers: Option<Vec<f64>>| program::read_extent(host, numbers.as_ref()).unwrap().largest;
            let found = [
                read(program::measure(host, E::DTYPE, &list).unwrap()),
                read(program::rescale_measured(host, E::DTYPE, &list).unwrap()),
            ];
            let right = |largest: f64| if bad.is_nan() { largest.is_nan() } else { largest == f64::INFINITY };
            assert!(found.into_iter().all(right), "{:?}: {bad} at {number}[{index}]: {found:?}", E::DTYPE);
            program::change(host, Kernel::Clamp, E::DTYPE, &entries(&mut memory, 0.5)).unwrap();
            let found = memory.elements[at].to_f64();
            assert!(found == clamped || (found.is_nan() && clamped.is_nan()), "{bad} clamped to {found}");
        }
    }
}

fn copies<E: WithDType, F: WithDType>(host: &Host) {
    let numbers = |seed| move |(number, size): (usize, &usize)| values(*size, seed + number as u64);
    let tensor = |values: Vec<f64>, dtype| {
        Tensor::from_slice(&values, values.len(), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
    };
    for (factor, accumulate) in [(1., false), (0.3, false), (1., true), (-7., true)] {
        let mut sources = Memory::<F>::new(SIZES.iter().enumerate().map(numbers(1)));
        let mut destinations = Memory::<E>::new(SIZES.iter().enumerate().map(numbers(50)));
        let entry = |(number, elements)| {
            let (parameter, gradient) = (destinations.address(number), sources.address(number));
            let scalars = crate::kernels::scalars([factor, f64::from(accumulate)]);
            Entry { elements, parameter, gradient, scalars, ..Default::default() }
        };
        let entries: Vec<Entry> = SIZES.into_iter().enumerate().map(entry).collect();
        host.launches.set(0);
        program::change(host, Kernel::copy_from(F::DTYPE).unwrap(), E::DTYPE, &entries).unwrap();
        assert_eq!(host.launches.get(), 1);
        for (number, size) in SIZES.iter().enumerate() {
            let (destination, source) = (numbers(50)((number, size)), numbers(1)((number, size)));
            let (destination, source) = (&tensor(destination, E::DTYPE), &tensor(source, F::DTYPE));
            assign(&[Assignment { destination, source, factor, accumulate }]).unwrap();
            let expected: Vec<f64> = destination.to_dtype(DType::F64).unwrap().to_vec1().unwrap();
            let found = destinations.get(number, *size);
            assert_eq!(found, expected, "{:?} = {:?} × {factor}, {accumulate}", E::DTYPE, F::DTYPE);
        }
    }
}

#[test]
fn copies_convert_like_the_cpu() {
    fn from_all<E: WithDType>(host: &Host) {
        copies::<E, f32>(host);
        copies::<E, f64>(host);
        copies::<E, f16>(host);
        copies::<E, bf16>(host);
    }
    let Some(host) = host("copies_convert_like_the_cpu") else { return };
    from_all::<f32>(&host);
    from_all::<f64>(&host);
    from_all::<f16>(&host);
    from_all::<bf16>(&host);
}

#[test]
fn gradients_are_measured_and_changed() {
    let Some(host) = host("gradients_are_measured_and_changed") else { return };
    gradients_in::<f32>(&host, 0.);
    gradients_in::<f64>(&host, 0.);
    gradients_in::<f16>(&host, 1.3e-7);
    gradients_in::<bf16>(&host, 0.);
}

#[test]
fn empty_input_needs_no_launch() {
    let Some(host) = host("nothing_to_work_on_is_no_launch") else { return };
    for entries in [&[][..], &[Entry::default()]] {
        program::update_whole(&host, Rule::Lamb, DType::F32, entries).unwrap();
        program::update(&host, Rule::Lamb, DType::F32, entries, &[]).unwrap();
        program::change(&host, Kernel::Clamp, DType::F32, entries).unwrap();
        let sums = program::prepare(&host, Rule::Lamb, DType::F32, entries).unwrap();
        let sums = program::read_sums(&host, sums.as_ref(), entries.len()).unwrap();
        assert!(sums.iter().all(|sums| *sums == [0.; 2]));
        let extent = program::measure(&host, DType::F32, entries).unwrap();
        assert_eq!(program::read_extent(&host, extent.as_ref()).unwrap(), Extent::default());
    }
    assert_eq!(host.launches.get(), 0);
}

#[test]
fn the_number_of_launches_is_constant() {
    let Some(host) = host("the_number_of_launches_is_constant") else { return };
    let mut memory = [1, 2, 3].map(|seed| Memory::<f32>::new((0..40).map(|_| values(300, seed))));
    for count in [1, 40] {
        let entries: Vec<Entry> = (0..count)
            .map(|number| {
                let [a, b, c] = &mut memory;
                let (parameter, states) = (a.address(number), [b.address(number), c.address(number)]);
                Entry { elements: 300, parameter, gradient: parameter, states, ..Default::default() }
            })
            .collect();
        for (rule, launches) in [(Rule::Adam, 1), (Rule::Sgd, 1), (Rule::Lamb, 3)] {
            host.launches.set(0);
            program::update_whole(&host, rule, DType::F32, &entries).unwrap();
            assert_eq!(host.launches.get(), launches, "{rule:?} of {count} parameters");
        }
        host.launches.set(0);
        program::rescale_measured(&host, DType::F32, &entries).unwrap();
        assert_eq!(host.launches.get(), 2, "{count} gradients");
    }
}

/// Gradients that overflow only when they are divided by a tiny scale are found as well.
#[test]
fn an_overflow_of_the_multiplication_is_measured() {
    let Some(host) = host("an_overflow_of_the_multiplication_is_measured") else { return };
    for (factor, is_finite) in [(1e18, true), (1e20, false)] {
        let mut memory = Memory::<f32>::new([vec![0., -3e19, 1.]].into_iter());
        let (address, scalars) = (memory.address(0), crate::kernels::scalars([factor]));
        let entry = Entry { elements: 3, parameter: address, gradient: address, scalars, ..Default::default() };
        let sums = program::rescale_measured(&host, DType::F32, &[entry]).unwrap();
        let extent = program::read_extent(&host, sums.as_ref()).unwrap();
        assert_eq!(extent.largest.is_finite(), is_finite, "{factor}: {extent:?}");
    }
}

/// Comparison with the crate `half`. NaNs stay NaNs, possibly with different bits.
#[test]
fn numbers_of_16_bits_are_converted_exactly() {
    let Some(host) = host("numbers_of_16_bits_are_converted_exactly") else { return };
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    let (from_f16, from_bf16) = (host.widen("host_from_f16"), host.widen("host_from_bf16"));
    for bits in 0..=u16::MAX {
        assert!(same(from_f16(bits), f16::from_bits(bits).to_f32()), "f16 {bits:#x}: {}", from_f16(bits));
        assert!(same(from_bf16(bits), bf16::from_bits(bits).to_f32()), "bf16 {bits:#x}: {}", from_bf16(bits));
    }
    let (to_f16, to_bf16) = (host.narrow("host_to_f16"), host.narrow("host_to_bf16"));
    // Every sign and exponent, with fractions on, next to and between the rounding boundaries.
    let fractions =
        [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff, 0x3000, 0x7fff, 0x8000, 0x8001, 0x18000, 0x7f_ffff, 0x7f_f000];
    let borders = (0..512u32).flat_map(|top| fractions.map(|fraction| top << 23 | fraction));
    for bits in borders.chain((0..u32::MAX).step_by(4099)) {
        let value = f32::from_bits(bits);
        let (half, brain) = (f16::from_bits(to_f16(value)), bf16::from_bits(to_bf16(value)));
        assert!(same(half.to_f32(), f16::from_f32(value).to_f32()), "{value:e} ({bits:#x}) to f16: {half}");
        assert!(same(brain.to_f32(), bf16::from_f32(value).to_f32()), "{value:e} ({bits:#x}) to bf16: {brain}");
    }
}

#[test]
fn a_table_has_the_layout_of_part_cu() {
    let entry = |elements| Entry { elements, ..Default::default() };
    let table = Table::new(&[entry(CHUNK + 1), entry(0), entry(1)]).unwrap();
    assert_eq!((table.parts, table.chunks), (3, 3));
    let first_chunks: Vec<u64> = table.words.chunks(7).map(|part| part[0]).collect();
    assert_eq!(first_chunks, [0, 2, 2, 3]);
    // Each set of numbers once.
    let numbered = |number| Entry { scalars: crate::kernels::scalars([number]), ..entry(1) };
    let table =
        Table::new(&[numbered(0.), numbered(-0.), numbered(0.), numbered(f64::NAN), numbered(f64::NAN)]).unwrap();
    let sets: Vec<u64> = table.words.chunks(7).take(5).map(|part| part[6]).collect();
    assert_eq!(sets, [0, 1, 0, 2, 2]);
    let error = Table::new(&(0..33).map(|number| numbered(f64::from(number))).collect::<Vec<_>>()).unwrap_err();
    assert!(error.to_string().contains("sets of numbers"), "{error}");
    let error = Table::new(&[entry(usize::MAX)]).unwrap_err().to_string();
    assert!(error.contains("more elements than one kernel launch"), "{error}");
}
