//! Activations, embeddings, rotary embeddings and attention, compared with PyTorch and candle.
use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_ddp_nn::{
    AttentionOptions, LayerNorm, Linear, cross_entropy, dropout, embedding, gelu, gelu_erf, relu, rope,
    scaled_dot_product_attention, silu, softmax, tanh, transpose,
};
use candle_ddp_tensor::seed::Generator;
use candle_ddp_testing::{assert_close, assert_error, floats, tensor};
use candle_nn::{VarBuilder, VarMap};

fn refused(result: Result<Tensor>, text: &str) {
    assert_error(result, &[text]);
}

/// Several functions of this crate and of candle use the same result.
#[test]
fn gradients_of_several_uses_add_up() {
    let x = Var::from_tensor(&tensor(&[3, 8], 1)).unwrap();
    let run = |f: &dyn Fn(&Tensor) -> Result<Tensor>| {
        let grads = (f(&x).unwrap() * tensor(&[3, 8], 2)).unwrap().sum_all().unwrap().backward().unwrap();
        floats(grads.get(&x).unwrap())
    };
    let ours = run(&|x| {
        let h = silu(x)?;
        gelu(&h)? + ((softmax(&h, 1)? * &h)? + softmax(&(x + &h)?, 0)?)?
    });
    let candles = run(&|x| {
        let h = x.silu()?;
        h.gelu()? + ((candle_nn::ops::softmax(&h, 1)? * &h)? + candle_nn::ops::softmax(&(x + &h)?, 0)?)?
    });
    assert_close(&ours, &candles, 1e-5, "dx");
}

/// candle would add their gradients to zeros, and in 16 bits one number at a time.
#[test]
fn copies_of_views_stay_outside_of_candles_graph() {
    let x = Var::from_tensor(&tensor(&[2, 3, 4, 4], 1).to_dtype(DType::BF16).unwrap()).unwrap();
    let weight = Var::from_tensor(&tensor(&[4], 2).to_dtype(DType::BF16).unwrap()).unwrap();
    let of = |shape: (usize, usize)| Tensor::ones(shape, DType::BF16, &Device::Cpu).unwrap();
    type Run<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;
    let cases: [(&str, Run); 7] = [
        ("attention", &|x| scaled_dot_product_attention(x, x, x, AttentionOptions::default())),
        ("linear", &|x| Linear::new(of((5, 4)), None).forward(x)),
        ("softmax", &|x| softmax(x, 3)),
        ("layer_norm", &|x| LayerNorm::new(weight.as_tensor().clone(), weight.as_tensor().clone(), 1e-5).forward(x)),
        ("dropout", &|x| dropout(x, 0.5, &mut Generator::new(1))),
        ("cross_entropy", &|x| cross_entropy(x, &Tensor::zeros((2, 4, 4), DType::U32, &Device::Cpu)?)),
        ("rope", &|x| rope(x, &of((4, 2)), &of((4, 2)))),
    ];
    for (name, run) in cases {
        let views: [Run; 2] = [&|x| transpose(x, 2, 3), &|x| x.transpose(2, 3)];
        let [ours, candles] = views.map(|view| {
            let y = run(&view(&relu(&x).unwrap()).unwrap()).unwrap();
            let gradient = y.sum_all().unwrap().backward().unwrap().get(&x).unwrap().clone();
            let is_candles =
                |node: &&&Tensor| node.dtype() == DType::BF16 && !node.is_variable() && node.id() != y.id();
            (y.sorted_nodes().iter().filter(is_candles).count(), floats(&y), floats(&gradient))
        });
        assert_eq!((ours.0, &ours.1, &ours.2), (0, &candles.1, &candles.2), "{name}");
        assert!(candles.0 > 0, "{name}");
    }
}

#[test]
fn activations_of_empty_and_integer_tensors() {
    for f in [relu, gelu, gelu_erf, silu, tanh] {
        assert_eq!(f(&tensor(&[3, 0], 1)).unwrap().dims(), [3, 0]);
        refused(f(&Tensor::zeros(3, DType::U32, &Device::Cpu).unwrap()), "U32");
        let y = f(&Tensor::new(&[f32::NAN, 1.0], &Device::Cpu).unwrap()).unwrap().to_vec1::<f32>().unwrap();
        assert!(y[0].is_nan() && !y[1].is_nan());
    }
}

#[test]
fn embedding_is_a_drop_in_for_candles() {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let (ours, candles) = (embedding(50, 6, vb.clone()).unwrap(), candle_nn::embedding(50, 6, vb).unwrap());
    assert_eq!(varmap.data().lock().unwrap().len(), 1, "the same name");
    let indices = Tensor::new(&[[1u32, 49, 1], [0, 1, 7]], &Device::Cpu).unwrap();
    let results = [ours.forward(&indices), candles.forward(&indices)].map(|y| {
        let y = y.unwrap();
        let grads = (&y * tensor(&[2, 3, 6], 3)).unwrap().sum_all().unwrap().backward().unwrap();
        [floats(&y), floats(grads.get(ours.embeddings()).unwrap())].concat()
    });
    assert_close(&results[0], &results[1], 1e-6, "embedding");
    refused(
        ours.forward(&Tensor::new(&[50u32], &Device::Cpu).unwrap()),
        "less than 50, the number of vectors in the table, but one is 50",
    );
    refused(ours.forward(&Tensor::new(&[-1i64], &Device::Cpu).unwrap()), "but one is -1");
    refused(ours.forward(&tensor(&[2], 1)), "u32, i64 or u8");
    assert_eq!(ours.forward(&Tensor::zeros((2, 0), DType::U32, &Device::Cpu).unwrap()).unwrap().dims(), [2, 0, 6]);
}

#[test]
fn bad_inputs_of_attention_are_refused() {
    let attend = |shapes: [&[usize]; 3], options| {
        let [q, k, v] = shapes.map(|shape| tensor(shape, 1));
        scaled_dot_product_attention(&q, &k, &v, options)
    };
    let all: [&[usize]; 3] = [&[1, 2, 3, 4], &[1, 2, 5, 4], &[1, 2, 5, 4]];
    let mask = |shape: &[usize]| Some(tensor(shape, 1));
    assert_eq!(attend([&[0, 2, 3, 4], &[0, 2, 5, 4], &[0, 2, 5, 6]], Default::default()).unwrap().dims(), [0, 2, 3, 6]);
    let nothing = attend([&[1, 2, 3, 4], &[1, 2, 0, 4], &[1, 2, 0, 4]], Default::default()).unwrap();
    assert_eq!(floats(&nothing), [0.0; 24]);
    refused(attend([&[1, 3, 3, 4], all[1], all[2]], Default::default()), "a multiple of H′");
    refused(attend([all[0], all[1], &[1, 2, 4, 4]], Default::default()), "f32[1, 2, 4, 4]");
    refused(attend([&[2, 3, 4], all[1], all[2]], Default::default()), "f32[2, 3, 4]");
    let with = |mask, is_causal| attend(all, AttentionOptions { mask, is_causal, ..Default::default() });
    refused(with(mask(&[3, 5]), true), "is_causal");
    refused(with(mask(&[3, 4]), false), "broadcast to [1, 2, 3, 5]");
    let wants = Var::from_tensor(&tensor(&[3, 5], 1)).unwrap().as_tensor().clone();
    refused(with(Some(wants), false), "detach");
}

#[test]
fn bad_inputs_of_rope() {
    let x = tensor(&[2, 3, 5, 8], 1);
    let (cos, sin) = (tensor(&[7, 4], 2), tensor(&[7, 4], 3));
    refused(rope(&x, &tensor(&[4, 4], 2), &tensor(&[4, 4], 2)), "T′ at least T");
    refused(rope(&x, &cos, &tensor(&[7, 3], 2)), "T′ at least T");
    refused(rope(&x, &cos, &sin.to_dtype(DType::F64).unwrap()), "all of one dtype");
}
