//! Model files under autocast.
use crate::check::{parameters, spread, Check, Measured, Model};
use candle::backprop::GradStore;
use candle::{DType, Result, Tensor, Var};
use candle_nn::{autocast, Autocast, VarMap};

/// The tests of files that train under PyTorch's lists. In all others, operations of candle get two dtypes. (t5 has its own linear
/// layer, of candle's operations, so nothing in it is cast.)
const BY_LISTS: [&str; 5] =
    ["audio::encodec", "encoders::t5", "vision::efficientnet", "vision::mobileone", "vision::repvgg"];

/// The largest distance of gradients whose products have 8 bits of mantissa. rwkv_v5 and debertav2 reach 0.12.
const NEAR: f64 = 0.2;

/// Checks that the gradients under [`Autocast::Products`] are about those in f32, and under [`Autocast::Lists`] too, or an error.
pub fn check(check: &Check, model: Model) {
    let measured = Measured { varmap: VarMap::new(), check: &Check { dtype: DType::F32, ..*check }, model };
    measured.value().expect("the model runs in f32");
    let parameters = parameters(&measured.varmap);
    spread(&parameters, check.gain).unwrap();
    let plain = measured.loss().and_then(|loss| loss.backward()).unwrap();
    let run = |mode: Autocast| {
        let grads = autocast(mode, || measured.loss())?.backward()?;
        let distance = distance(&parameters, &plain, &grads)?;
        // A NaN is not near.
        let is_near = distance < NEAR;
        assert!(is_near, "under {mode:?} the gradients differ by {distance} of their norm");
        Ok::<_, candle::Error>(())
    };
    run(Autocast::Products(DType::BF16)).expect("only products have 16 bits");
    let is_listed = std::thread::current().name().is_some_and(|name| BY_LISTS.contains(&name));
    match run(Autocast::Lists(DType::BF16)) {
        Ok(()) => {
            assert!(is_listed, "this file trains under PyTorch's lists: add its test, and name it in docs/layers.md")
        }
        Err(error) => {
            let error = error.to_string();
            let is_of_dtypes = error.contains("dtype mismatch") || error.contains("upcasting is not supported");
            assert!(is_of_dtypes && !is_listed, "{error}");
        }
    }
}

/// The distance of all gradients, relative to their norm.
fn distance(parameters: &[(String, Var)], plain: &GradStore, other: &GradStore) -> Result<f64> {
    let square = |x: &Tensor| x.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar::<f64>();
    let (mut difference, mut norm) = (0., 0.);
    for (name, var) in parameters {
        match (plain.get(var), other.get(var)) {
            (Some(plain), Some(other)) => {
                assert_eq!(other.dtype(), DType::F32, "{name}");
                difference += square(&(plain - other)?)?;
                norm += square(plain)?;
            }
            (None, None) => {}
            (plain, _) => {
                panic!("{name} has a gradient only {} autocast", if plain.is_some() { "without" } else { "under" })
            }
        }
    }
    Ok((difference / norm).sqrt())
}
