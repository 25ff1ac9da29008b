//! Convolutions of each channel with its own kernel: loops over vectors instead of matrix products.
//!
//! A plane lies in a workspace in the type of arithmetic, with the zeros around it, in phases: those pixels together that a stride
//! separates. There a tap of the kernel sees, for all outputs of the plane as one line, a line that begins some distance away. So sums
//! stay in registers for all taps, also if rows are short. Between the rows of outputs are sums of pixels that belong to two rows,
//! which nothing reads; a number that is not finite reaches the gradients of all taps of its channel.
use super::geometry::Geometry;
use candle_ddp_tensor::{Element, Real};

/// The neighbours whose sums stay in registers.
const LANES: usize = 32;
/// The same for sums of products with `TAPS` taps at a time.
const TAP_LANES: usize = 16;
const TAPS: usize = 4;

/// Where a plane's pixels lie.
struct Plan {
    /// The distance between rows.
    pitch: usize,
    /// The elements of a phase without what the last vector reads beyond them.
    phase: usize,
    /// The outputs as one line.
    line: usize,
    /// Those of all phases, each as long as what is read of it.
    size: usize,
    /// For each tap its phase and its distance there.
    taps: Vec<(usize, usize)>,
}

impl Plan {
    fn new(geometry: &Geometry) -> Self {
        let Geometry { output, kernel, stride, dilation, .. } = *geometry;
        let reach = |axis: usize| output[axis] + (kernel[axis] - 1) * dilation[axis] / stride[axis];
        let (rows, pitch) = (reach(0), reach(1));
        let tap = |y: usize, x: usize| {
            let (y, x) = (y * dilation[0], x * dilation[1]);
            let phase = y % stride[0] * stride[1] + x % stride[1];
            (phase, y / stride[0] * pitch + x / stride[1])
        };
        let taps: Vec<_> = (0..kernel[0] * kernel[1]).map(|index| tap(index / kernel[1], index % kernel[1])).collect();
        let ahead = taps.iter().map(|(_, distance)| *distance).max().unwrap_or_default();
        let (line, phase) = (output[0] * pitch, rows * pitch);
        Self { pitch, phase, line, size: (line.next_multiple_of(LANES) + ahead).max(phase), taps }
    }

    /// The largest distance of a tap.
    fn ahead(&self) -> usize {
        self.taps.iter().map(|(_, distance)| *distance).max().unwrap_or_default()
    }

    /// For each row of a plane and each phase that has some of its pixels: the row, the first pixel, where it lies in the workspace, and
    /// how many there are. The next ones are a stride away, and in the workspace neighbours.
    #[inline(always)]
    fn each_row(&self, geometry: &Geometry, mut work: impl FnMut(usize, usize, usize, usize)) {
        let Geometry { input, stride, padding, .. } = *geometry;
        for row in 0..input[0] {
            let (y, above) = ((row + padding[0]) / stride[0], (row + padding[0]) % stride[0]);
            if (y + 1) * self.pitch > self.phase {
                continue;
            }
            for beside in 0..stride[1] {
                let first = (beside + stride[1] - padding[1] % stride[1]) % stride[1];
                let x = (first + padding[1]) / stride[1];
                let count = input[1].saturating_sub(first).div_ceil(stride[1]).min(self.pitch.saturating_sub(x));
                if count > 0 {
                    work(row, first, (above * stride[1] + beside) * self.size + y * self.pitch + x, count);
                }
            }
        }
    }

    /// Brings a plane into the workspace, whose other elements stay zero.
    #[inline(always)]
    fn load<T: Element>(&self, geometry: &Geometry, plane: &[T], work: &mut [T::Real]) {
        let (width, stride) = (geometry.input[1], geometry.stride[1]);
        self.each_row(geometry, |row, first, to, count| {
            let (from, to) = (&plane[row * width + first..(row + 1) * width], &mut work[to..to + count]);
            match stride {
                1 => to.iter_mut().zip(from).for_each(|(to, from)| *to = from.widen()),
                _ => to.iter_mut().zip(from.iter().step_by(stride)).for_each(|(to, from)| *to = from.widen()),
            }
        });
    }

    /// Brings a plane of outputs into a line that begins at `start`, with zeros between the rows.
    #[inline(always)]
    fn load_outputs<T: Element>(&self, geometry: &Geometry, plane: &[T], line: &mut [T::Real]) {
        for (from, to) in plane.chunks_exact(geometry.output[1]).zip(line.chunks_mut(self.pitch)) {
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from.widen());
        }
    }
}

/// `start` plus the sum of taps: each of a line that begins where it says, times its factor.
#[inline(always)]
fn correlate<R: Real>(sums: &mut [R], work: &[R], start: R, taps: &[(usize, R)]) {
    for (block, sums) in sums.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        let mut sum = [start; LANES];
        for (first, factor) in taps {
            let Some(values) = work.get(first + block * LANES..).and_then(|values| values.first_chunk::<LANES>())
            else {
                continue;
            };
            for lane in 0..LANES {
                sum[lane] += values[lane] * *factor;
            }
        }
        *sums = sum;
    }
}

#[inline(always)]
pub(super) fn forward<T: Element>(
    geometry: &Geometry,
    x: &[T],
    weight: &[T::Real],
    bias: Option<&[T::Real]>,
    y: &mut [T],
) {
    let plan = Plan::new(geometry);
    let mut work = vec![T::Real::default(); plan.size * geometry.stride[0] * geometry.stride[1]];
    let mut line = vec![T::Real::default(); plan.line.next_multiple_of(LANES)];
    let planes = x.chunks_exact(geometry.input_pixels()).zip(y.chunks_exact_mut(geometry.output_pixels()));
    for (index, (x, y)) in planes.enumerate() {
        let channel = index % geometry.ci;
        plan.load(geometry, x, &mut work);
        let weight = &weight[channel * plan.taps.len()..][..plan.taps.len()];
        let taps =
            plan.taps.iter().zip(weight).map(|((phase, distance), factor)| (phase * plan.size + distance, *factor));
        let taps: Vec<_> = taps.collect();
        correlate(&mut line, &work, bias.map_or(T::Real::default(), |bias| bias[channel]), &taps);
        for (y, line) in y.chunks_exact_mut(geometry.output[1]).zip(line.chunks(plan.pitch)) {
            y.iter_mut().zip(line).for_each(|(y, value)| *y = T::narrow(*value));
        }
    }
}

#[inline(always)]
pub(super) fn backward_data<T: Element>(geometry: &Geometry, dy: &[T], weight: &[T::Real], dx: &mut [T::Real]) {
    let (plan, stride) = (Plan::new(geometry), geometry.stride);
    // Before the outputs are as many zeros as the furthest tap is away.
    let (ahead, length) = (plan.ahead(), plan.phase.next_multiple_of(LANES));
    let mut outputs = vec![T::Real::default(); ahead + length];
    let mut sums = vec![T::Real::default(); stride[0] * stride[1] * plan.size.max(length)];
    // The rows of outputs are taken in order, so the rows of the kernel come in reverse.
    let order =
        || (0..geometry.kernel[0]).rev().flat_map(|y| (0..geometry.kernel[1]).map(move |x| y * geometry.kernel[1] + x));
    let planes = dy.chunks_exact(geometry.output_pixels()).zip(dx.chunks_exact_mut(geometry.input_pixels()));
    for (index, (dy, dx)) in planes.enumerate() {
        plan.load_outputs(geometry, dy, &mut outputs[ahead..]);
        let weight = &weight[index % geometry.ci * plan.taps.len()..][..plan.taps.len()];
        for phase in 0..stride[0] * stride[1] {
            let taps = order().filter(|tap| plan.taps[*tap].0 == phase);
            let taps: Vec<_> = taps.map(|tap| (ahead - plan.taps[tap].1, weight[tap])).collect();
            // The next phase writes over what is longer than this one.
            correlate(&mut sums[phase * plan.size..][..length], &outputs, T::Real::default(), &taps);
        }
        plan.each_row(geometry, |row, first, from, count| {
            let to = &mut dx[row * geometry.input[1] + first..(row + 1) * geometry.input[1]];
            let from = &sums[from..from + count];
            match stride[1] {
                1 => to.iter_mut().zip(from).for_each(|(to, from)| *to = *from),
                stride => to.iter_mut().step_by(stride).zip(from).for_each(|(to, from)| *to = *from),
            }
        });
    }
}

#[inline(always)]
pub(super) fn backward_filter<T: Element>(geometry: &Geometry, x: &[T], dy: &[T], sum: &mut [T::Real]) {
    let plan = Plan::new(geometry);
    let mut work = vec![T::Real::default(); plan.size * geometry.stride[0] * geometry.stride[1]];
    let mut line = vec![T::Real::default(); plan.line.next_multiple_of(LANES)];
    let planes = x.chunks_exact(geometry.input_pixels()).zip(dy.chunks_exact(geometry.output_pixels()));
    let first = |tap: usize| plan.taps.get(tap).map_or(0, |(phase, distance)| phase * plan.size + distance);
    for (index, (x, dy)) in planes.enumerate() {
        plan.load(geometry, x, &mut work);
        plan.load_outputs(geometry, dy, &mut line);
        let sum = &mut sum[index % geometry.ci * plan.taps.len()..][..plan.taps.len()];
        for (group, sum) in sum.chunks_mut(TAPS).enumerate() {
            let firsts = std::array::from_fn(|tap| first(group * TAPS + tap));
            sum.iter_mut().zip(dots(&work, &line, firsts)).for_each(|(sum, dot)| *sum += dot);
        }
    }
}

/// Σ of the products of `line` with lines of `work`, from each of `firsts` on.
#[inline(always)]
fn dots<R: Real>(work: &[R], line: &[R], firsts: [usize; TAPS]) -> [R; TAPS] {
    let (line, _) = line.as_chunks::<TAP_LANES>();
    let [a, b, c, d] =
        firsts.map(|first| &work[first..][..line.len() * TAP_LANES].as_chunks::<TAP_LANES>().0[..line.len()]);
    // Sums in separate variables stay in registers.
    let [mut of_a, mut of_b, mut of_c, mut of_d] = [[R::default(); TAP_LANES]; TAPS];
    for ((((line, a), b), c), d) in line.iter().zip(a).zip(b).zip(c).zip(d) {
        for lane in 0..TAP_LANES {
            of_a[lane] += a[lane] * line[lane];
            of_b[lane] += b[lane] * line[lane];
            of_c[lane] += c[lane] * line[lane];
            of_d[lane] += d[lane] * line[lane];
        }
    }
    [of_a, of_b, of_c, of_d].map(|lanes| lanes.into_iter().fold(R::default(), |sum, lane| sum + lane))
}

#[cfg(test)]
mod tests {
    use super::super::geometry::positions;
    use super::*;
    use candle_core::WithDType;

    /// Strides, dilations and paddings along both axes, in all dtypes, against the definition.
    #[test]
    fn planes_are_convolved_with_their_kernels() {
        let mut geometries = Vec::new();
        for (input, kernel) in
            [([7, 5], [3, 3]), ([1, 90], [1, 31]), ([9, 40], [5, 2]), ([2, 1], [1, 1]), ([4, 37], [3, 4])]
        {
            for stride in [[1, 1], [2, 2], [1, 3], [3, 2]] {
                for padding in [[0, 0], [1, 2], [4, 3]] {
                    for dilation in [[1, 1], [2, 3]] {
                        let output = |axis: usize| {
                            positions(input[axis], kernel[axis], stride[axis], padding[axis], dilation[axis])
                        };
                        if let (Some(height), Some(width)) = (output(0), output(1)) {
                            let output = [height, width];
                            let (n, ci, co, groups) = (2, 3, 3, 3);
                            geometries.push(Geometry {
                                n,
                                ci,
                                co,
                                groups,
                                input,
                                output,
                                kernel,
                                stride,
                                padding,
                                dilation,
                            });
                        }
                    }
                }
            }
        }
        assert!(geometries.len() > 60);
        for geometry in &geometries {
            compare::<f64>(geometry, 1e-12);
            compare::<f32>(geometry, 1e-5);
            compare::<half::bf16>(geometry, 2e-2);
            compare::<half::f16>(geometry, 2e-3);
        }
    }

    fn compare<T: Element>(geometry: &Geometry, tolerance: f64) {
        let Geometry { n, ci, input, output, kernel, stride, padding, dilation, .. } = *geometry;
        let values = |count: usize, start: f64| -> Vec<T> {
            (0..count).map(|index| T::from_f64((index as f64 * 0.37 + start).sin())).collect()
        };
        let (pixels, outputs, taps) = (input[0] * input[1], output[0] * output[1], kernel[0] * kernel[1]);
        let (x, dy) = (values(n * ci * pixels, 0.0), values(n * ci * outputs, 1.0));
        let weight: Vec<T::Real> = values(ci * taps, 2.0).iter().map(|value| value.widen()).collect();
        let bias: Vec<T::Real> = values(ci, 3.0).iter().map(|value| value.widen()).collect();
        let mut y = vec![T::from_f64(f64::NAN); dy.len()];
        let mut dx = vec![T::Real::default(); x.len()];
        let mut d_weight = vec![T::Real::default(); weight.len()];
        forward(geometry, &x, &weight, Some(&bias), &mut y);
        backward_data(geometry, &dy, &weight, &mut dx);
        backward_filter(geometry, &x, &dy, &mut d_weight);
        let (mut of_y, mut of_x, mut of_weight) = (vec![0.0; y.len()], vec![0.0; x.len()], vec![0.0; weight.len()]);
        for plane in 0..n * ci {
            for at in 0..outputs {
                let to = plane * outputs + at;
                of_y[to] = bias[plane % ci].to_f64();
                for tap in 0..taps {
                    let seen = |axis: usize, at: usize, tap: usize| {
                        (at * stride[axis] + tap * dilation[axis])
                            .checked_sub(padding[axis])
                            .filter(|at| *at < input[axis])
                    };
                    let row = seen(0, at / output[1], tap / kernel[1]);
                    let column = seen(1, at % output[1], tap % kernel[1]);
                    if let (Some(row), Some(column)) = (row, column) {
                        let (from, factor) = (plane * pixels + row * input[1] + column, plane % ci * taps + tap);
                        of_y[to] += x[from].to_f64() * weight[factor].to_f64();
                        of_x[from] += dy[to].to_f64() * weight[factor].to_f64();
                        of_weight[factor] += dy[to].to_f64() * x[from].to_f64();
                    }
                }
            }
        }
        let compare = |ours: Vec<f64>, expected: Vec<f64>, what: &str| {
            for (at, (ours, expected)) in ours.iter().zip(&expected).enumerate() {
                let differs = (ours - expected).abs() > tolerance * (1.0 + expected.abs());
                assert!(!differs, "{what} {at} of {:?} {geometry:?}: {ours}, not {expected}", T::DTYPE);
            }
        };
        compare(y.iter().map(|value| value.to_f64()).collect(), of_y, "y");
        compare(dx.iter().map(|value| value.to_f64()).collect(), of_x, "dx");
        compare(d_weight.iter().map(|value| value.to_f64()).collect(), of_weight, "the weight's gradient");
    }

    /// A number that is not finite reaches those outputs and inputs that see it, and no others.
    #[test]
    fn outputs_that_do_not_see_nan_are_numbers() {
        let (input, output, kernel) = ([6, 7], [6, 7], [3, 3]);
        let pairs = ([1, 1], [1, 1], [1, 1]);
        let geometry = Geometry {
            n: 1,
            ci: 1,
            co: 1,
            groups: 1,
            input,
            output,
            kernel,
            stride: pairs.0,
            padding: pairs.1,
            dilation: pairs.2,
        };
        let (mut x, mut y, mut dx) = (vec![1f32; 42], vec![0f32; 42], vec![0f32; 42]);
        x[3 * 7] = f32::NAN;
        forward(&geometry, &x, &[1.0; 9], None, &mut y);
        backward_data(&geometry, &x, &[1.0; 9], &mut dx);
        for at in 0..42 {
            let sees = (2..5).contains(&(at / 7)) && at % 7 < 2;
            assert_eq!((y[at].is_nan(), dx[at].is_nan()), (sees, sees), "{at}");
        }
    }
}
