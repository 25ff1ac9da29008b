//! The workspace of attention's backward pass by cuDNN grows with the pairs of queries and keys. Where it would be too large, samples,
//! or heads, are computed one after the other.
use super::on_gpu;
use super::operations::has_cudnns_attention;
use crate::common::{floats, new_var, skip, tensor, test_process};
use candle_core::{DType, Tensor, Var};
use candle_ddp::nn::{AttentionOptions, scaled_dot_product_attention, scaled_dot_product_attention_qkvpacked};
use candle_ddp_testing::take_counts;

const SAMPLES: usize = 2;
const HEADS: usize = 4;
const TOKENS: usize = 16;
/// Of one head, as the emulated cuDNN has it.
const WORKSPACE: usize = 2 * TOKENS * TOKENS + 12;

/// Prints, for heads side by side and for heads apart, of which two share their keys, how often cuDNN was called, and the gradients.
#[test]
#[ignore = "run by attention_is_computed_in_parts_that_fit"]
fn attention_in_parts() {
    let is_fast = std::env::var("CANDLE_DDP_CUDNN_ATTENTION").is_ok_and(|value| value == "fast");
    let backward = if is_fast { "attention backward in any order" } else { "attention backward" };
    on_gpu("attention_in_parts", |gpu| {
        let var = |shape: &[usize], seed| new_var(shape, seed, DType::BF16, gpu);
        let print = |what: &str, y: Tensor, vars: &[&Var]| {
            let dy = tensor(y.dims(), 9).to_dtype(DType::BF16).unwrap().to_device(gpu).unwrap();
            take_counts();
            let grads = (y * dy).unwrap().sum_all().unwrap().backward().unwrap();
            let Some(counts) = take_counts() else { return };
            let calls = counts.iter().find(|(name, _)| *name == backward).map_or(0, |(_, count)| *count);
            let bits = vars.iter().flat_map(|var| floats(grads.get(var).unwrap())).map(f32::to_bits);
            println!("{what}: {calls} calls: {:?}", bits.collect::<Vec<_>>());
        };
        let options = AttentionOptions { is_causal: true, ..Default::default() };
        let qkv = var(&[SAMPLES, TOKENS, 3 * HEADS * 8], 1);
        print("side by side", scaled_dot_product_attention_qkvpacked(&qkv, HEADS, options.clone()).unwrap(), &[&qkv]);
        let (q, k) = (var(&[SAMPLES, HEADS, TOKENS, 8], 2), var(&[SAMPLES, HEADS / 2, TOKENS, 8], 3));
        let v = var(&[SAMPLES, HEADS / 2, TOKENS, 16], 4);
        print("apart", scaled_dot_product_attention(&q, &k, &v, options).unwrap(), &[&q, &k, &v]);
    });
}

#[test]
fn attention_is_computed_in_parts_that_fit() {
    const TEST: &str = "attention_is_computed_in_parts_that_fit";
    on_gpu(TEST, |_| {
        if !has_cudnns_attention() || take_counts().is_none() {
            return skip(TEST, "only an emulated GPU counts the calls of cuDNN, with the feature `cudnn`");
        }
        let run = |workspace: usize, attention: &str| {
            let mut command = test_process(module_path!(), "attention_in_parts");
            command.env("CANDLE_DDP_CUDNN_WORKSPACE", workspace.to_string());
            let output = command.env("CANDLE_DDP_CUDNN_ATTENTION", attention).output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
            let of = |what: &str| {
                let line = text.lines().find_map(|line| line.split_once(what)?.1.strip_prefix(": "));
                let (calls, gradients) = line.unwrap().split_once(" calls: ").unwrap();
                (calls.parse::<usize>().unwrap(), gradients.to_string())
            };
            [of("side by side"), of("apart")]
        };
        let [(once, side_by_side), (apart_once, apart)] = run(SAMPLES * HEADS * WORKSPACE, "1");
        assert_eq!([once, apart_once], [1, 1]);
        // Room for three heads is used for two.
        for (heads, expected) in [(HEADS, [SAMPLES; 2]), (3, [2 * SAMPLES; 2]), (1, [SAMPLES * HEADS, 0])] {
            let [found, found_apart] = run(heads * WORKSPACE, "1");
            assert_eq!(found, (expected[0], side_by_side.clone()), "room for {heads} heads");
            assert_eq!(found_apart.0, expected[1], "room for {heads} heads");
            // Heads that share keys stay together, and run without cuDNN where there is no room for them.
            if expected[1] > 0 {
                assert_eq!(found_apart.1, apart, "room for {heads} heads");
            }
        }
        // Sums by atomic operations need no such workspace. The emulated cuDNN adds them up in the same order.
        assert_eq!(run(WORKSPACE, "fast"), [(1, side_by_side), (1, apart)]);
    });
}
