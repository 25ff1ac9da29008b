//! The state of generators, and the masks of dropout that follow from it.
use candle_core::{DType, Device, Tensor};
use candle_ddp_nn::dropout;
use candle_ddp_state::StateDict;
use candle_ddp_state::seed::Generator;

#[test]
fn masks_depend_on_seed_rank_and_state_only() {
    let ones = Tensor::ones(100, DType::F32, &Device::Cpu).unwrap();
    let mask = |generator: &mut Generator| dropout(&ones, 0.5, generator).unwrap().to_vec1::<f32>().unwrap();
    let (mut a, mut b) = (Generator::for_rank(3, 0), Generator::for_rank(3, 1));
    let first = mask(&mut a);
    assert!(first != mask(&mut b) && first == mask(&mut Generator::for_rank(3, 0)));
    let state = a.state_dict().unwrap();
    let second = mask(&mut a);
    assert!(first != second);
    let mut restored = Generator::for_rank(3, 0);
    restored.load_state_dict(&state).unwrap();
    assert_eq!(mask(&mut restored), second);
}
