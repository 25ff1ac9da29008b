use super::*;
use candle_nn::init::{DEFAULT_KAIMING_NORMAL, DEFAULT_KAIMING_UNIFORM, FanInOut, NonLinearity, ONE};
use candle_nn::{conv2d, linear};

fn values(hint: Init, shape: &[usize]) -> Vec<f64> {
    let tensor = init(hint, 11, "layer.weight", shape, DType::F64, &Device::Cpu).unwrap();
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// Mean, variance, and the fourth moment about the mean in units of the squared variance.
fn moments(values: &[f64]) -> (f64, f64, f64) {
    let mean = |f: &dyn Fn(f64) -> f64| values.iter().map(|value| f(*value)).sum::<f64>() / values.len() as f64;
    let average = mean(&|x| x);
    let variance = mean(&|x| (x - average).powi(2));
    (average, variance, mean(&|x| (x - average).powi(4)) / variance.powi(2))
}

/// The Kolmogorov–Smirnov distance to a uniform distribution.
fn distance_to_uniform(values: &[f64], lo: f64, up: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let count = sorted.len() as f64;
    let distances =
        sorted.iter().enumerate().map(|(index, value)| ((value - lo) / (up - lo) - (index as f64 + 0.5) / count).abs());
    distances.fold(0., f64::max)
}

/// With 2^18 values, statistics deviate from the closed forms by a few thousandths.
const SHAPE: [usize; 4] = [64, 64, 8, 8];

#[test]
fn uniform_values_are_uniform_between_their_bounds() {
    use FanInOut::{FanIn, FanOut};
    let kaiming = |fan, non_linearity| Init::Kaiming { dist: NormalOrUniform::Uniform, fan, non_linearity };
    // PyTorch's kaiming_uniform_: bound = gain * sqrt(3 / fan).
    let cases: [(Init, [usize; 4], f64, f64); 6] = [
        (Init::Uniform { lo: -0.25, up: 0.75 }, SHAPE, -0.25, 0.75),
        (DEFAULT_KAIMING_UNIFORM, SHAPE, -(6f64 / 4096.).sqrt(), (6f64 / 4096.).sqrt()),
        (kaiming(FanIn, NonLinearity::Linear), [128, 32, 8, 8], -(3f64 / 2048.).sqrt(), (3f64 / 2048.).sqrt()),
        (
            kaiming(FanOut, NonLinearity::Tanh),
            [128, 32, 8, 8],
            -5. / 3. * (3f64 / 8192.).sqrt(),
            5. / 3. * (3f64 / 8192.).sqrt(),
        ),
        (kaiming(FanOut, NonLinearity::SELU), SHAPE, -0.75 * (3f64 / 4096.).sqrt(), 0.75 * (3f64 / 4096.).sqrt()),
        (
            kaiming(FanIn, NonLinearity::ExplicitGain(2.)),
            SHAPE,
            -2. * (3f64 / 4096.).sqrt(),
            2. * (3f64 / 4096.).sqrt(),
        ),
    ];
    for (hint, shape, lo, up) in cases {
        let values = values(hint, &shape);
        assert!(values.iter().all(|value| (lo..up).contains(value)), "{hint:?}");
        let (mean, variance, kurtosis) = moments(&values);
        let width = up - lo;
        assert!((mean - (lo + up) / 2.).abs() < 3e-3 * width, "{hint:?}: mean {mean}");
        assert!((variance * 12. / width.powi(2) - 1.).abs() < 1e-2, "{hint:?}: variance {variance}");
        assert!((kurtosis - 1.8).abs() < 2e-2, "{hint:?}: kurtosis {kurtosis}");
        // The distance exceeds 2 / sqrt(n) once in 1500 times; the seed is given.
        assert!(distance_to_uniform(&values, lo, up) < 2. / (values.len() as f64).sqrt(), "{hint:?}");
    }
}

#[test]
fn normal_values_are_normal() {
    let fan_out =
        Init::Kaiming { dist: NormalOrUniform::Normal, fan: FanInOut::FanOut, non_linearity: NonLinearity::Sigmoid };
    for (hint, shape, mean, stdev) in [
        (Init::Randn { mean: 3., stdev: 0.5 }, SHAPE, 3., 0.5),
        (DEFAULT_KAIMING_NORMAL, SHAPE, 0., (2f64 / 4096.).sqrt()),
        (fan_out, [128, 32, 8, 8], 0., (1f64 / 8192.).sqrt()),
    ] {
        let values = values(hint, &shape);
        let (found, variance, kurtosis) = moments(&values);
        assert!((found - mean).abs() < 8e-3 * stdev, "{hint:?}: mean {found}");
        assert!((variance / stdev.powi(2) - 1.).abs() < 8e-3, "{hint:?}: variance {variance}");
        assert!((kurtosis - 3.).abs() < 5e-2, "{hint:?}: kurtosis {kurtosis}");
        // The parts below the mean, and within one and two standard deviations.
        let part = |within: &dyn Fn(f64) -> bool| {
            values.iter().filter(|value| within((**value - mean) / stdev)).count() as f64 / values.len() as f64
        };
        for (part, expected) in
            [(part(&|x| x < 0.), 0.5), (part(&|x| x.abs() < 1.), 0.682_689), (part(&|x| x.abs() < 2.), 0.954_500)]
        {
            assert!((part - expected).abs() < 4e-3, "{hint:?}: {part} instead of {expected}");
        }
        // Neighbours, which come from one pair of numbers, are uncorrelated.
        let products = values.chunks_exact(2).map(|pair| (pair[0] - mean) * (pair[1] - mean) / stdev.powi(2));
        let covariance = products.sum::<f64>() / (values.len() / 2) as f64;
        assert!(covariance.abs() < 1e-2, "{hint:?}: covariance {covariance}");
    }
}

#[test]
fn constants_are_constant() {
    assert_eq!(values(Init::Const(0.), &[3]), [0.; 3]);
    assert_eq!(values(ONE, &[2]), [1.; 2]);
    assert_eq!(values(Init::Const(-2.5), &[2, 1]), [-2.5; 2]);
}

#[test]
fn values_depend_on_name_and_seed_and_not_on_the_order_of_requests() {
    let uniform = Init::Uniform { lo: 0., up: 1. };
    let build = |seed: u64, names: &[&str]| {
        let varmap = VarMap::new();
        let vb = var_builder(&varmap, seed, DType::F32, &Device::Cpu);
        names.iter().for_each(|name| drop(vb.get_with_hints((3, 2), name, uniform).unwrap()));
        move |name: &str| vb.get_unchecked(name).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    let (one, other) = (build(1, &["a", "b", "c"]), build(1, &["c", "a"]));
    assert_eq!((one("a"), one("c")), (other("a"), other("c")));
    assert_ne!(one("a"), one("b"));
    assert_ne!(one("a"), build(2, &["a"])("a"));
    // Another dtype has the same values, rounded.
    let half = init(uniform, 1, "a", (3, 2), DType::F16, &Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
    let half = half.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert!(half.iter().zip(one("a")).all(|(half, full)| (half - full).abs() < 1e-3));
}

#[test]
fn layers_get_their_variables_from_the_map() {
    let varmap = VarMap::new();
    let vb = || var_builder(&varmap, 5, DType::F32, &Device::Cpu);
    let first = linear(3, 2, vb().pp("fc")).unwrap();
    assert!(vb().contains_tensor("fc.weight") && !vb().contains_tensor("fc"));
    let again = linear(3, 2, vb().pp("fc")).unwrap();
    assert_eq!(first.weight().id(), again.weight().id());
    conv2d(3, 4, 3, Default::default(), vb().pp("conv")).unwrap();
    assert_eq!(varmap.all_vars().len(), 4);

    let error = vb().get((2, 2), "fc.weight").unwrap_err().to_string();
    assert!(error.contains("fc.weight is f32[2, 3] in the VarMap, but the model requested it as f32[2, 2]"), "{error}");
    assert!(vb().get_unchecked("absent").unwrap_err().to_string().contains("absent is not in the VarMap"));
    let error = init(ONE, 0, "count", 1, DType::I64, &Device::Cpu).unwrap();
    assert_eq!(error.to_vec1::<i64>().unwrap(), [1]);
    assert!(init(DEFAULT_KAIMING_NORMAL, 0, "count", 1, DType::I64, &Device::Cpu).is_err());
}
