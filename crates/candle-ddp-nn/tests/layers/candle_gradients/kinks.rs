//! Where a function has no derivative, candle and PyTorch choose differently.
use candle_core::{Device, Result, Tensor, Var};

#[test]
fn conventions_at_kinks() {
    let gradient = |x: &[f64], f: &dyn Fn(&Tensor) -> Result<Tensor>| {
        let x = Var::new(x, &Device::Cpu).unwrap();
        let grads = f(&x).unwrap().sum_all().unwrap().backward().unwrap();
        grads.get(&x).unwrap().to_vec1::<f64>().unwrap()
    };
    assert_eq!(gradient(&[-1., 0., 1.], &|x| x.relu()), [0., 1., 1.]); // PyTorch: 0 at 0
    assert_eq!(gradient(&[-1., 0., 1.], &|x| x.abs()), [-1., 1., 1.]); // PyTorch: 0 at 0
    assert_eq!(gradient(&[-1., 0., 2.], &|x| x.clamp(0f64, 1f64)), [0., 0.5, 0.]); // PyTorch: 1 at the bound
    assert_eq!(gradient(&[3., 1., 3.], &|x| x.max(0)), [1., 0., 1.]); // PyTorch: only one of the equal elements gets it
    assert!(gradient(&[0., 0.], &|x| x.norm()).iter().all(|x| x.is_nan())); // PyTorch: 0
    assert!(gradient(&[0.], &|x| x.powf(0.0))[0].is_nan()); // PyTorch: 0
}
