//! Adapters of low rank. `tests/training/lora.rs` of candle-ddp compares them with peft's.
use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_ddp_nn::{
    Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, ConvTranspose1dConfig, Embedding, Linear, LoraBias, LoraConfig,
    RNNOptions, StackedGRU, VarBuilder, VarMap, autocast, batch_norm, checkpoint, conv_transpose1d_no_bias, conv1d,
    conv2d, conv2d_no_bias, embedding, layer_norm, linear, linear_cross_entropy, no_grad,
};
use candle_ddp_testing::{assert_close, assert_error, fill, floats, tensor};
use std::collections::HashMap;

/// One layer of each kind, and a head that has the table of the embedding as its weight.
struct Net {
    embed: Embedding,
    line: Conv1d,
    image: Conv2d,
    fc: Linear,
    head: Linear,
}

impl Net {
    fn new(vb: VarBuilder) -> Result<Self> {
        let embed = embedding(7, 4, vb.pp("embed"))?;
        let head = Linear::new(embed.embeddings().clone(), None);
        let config = Conv1dConfig { padding: 1, dilation: 1, ..Default::default() };
        let image = Conv2dConfig { stride: 2, padding: 1, ..Default::default() };
        Ok(Self {
            embed,
            line: conv1d(4, 6, 3, config, vb.pp("parts.line"))?,
            image: conv2d(2, 4, 3, image, vb.pp("parts.image"))?,
            fc: linear(6, 4, vb.pp("parts.fc"))?,
            head,
        })
    }

    /// The hidden states of two sequences with one image each.
    fn hidden(&self, x: &Tensor) -> Result<Tensor> {
        let indices = Tensor::new(&[[1u32, 0, 6, 1, 3], [2, 2, 4, 0, 1]], x.device())?;
        let tokens = self.embed.forward(&indices)?.transpose(1, 2)?;
        let tokens = self.fc.forward(&self.line.forward(&tokens)?.transpose(1, 2)?.contiguous()?)?;
        tokens.broadcast_add(&self.image.forward(x)?.mean((2, 3))?.unsqueeze(1)?)
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.head.forward(&self.hidden(x)?)
    }
}

fn config(targets: &[&str]) -> LoraConfig {
    let target_modules = targets.iter().map(|target| target.to_string()).collect();
    LoraConfig { r: 2, lora_alpha: 3.0, target_modules, ..Default::default() }
}

fn all() -> LoraConfig {
    config(&["embed", "parts.*"])
}

fn builder(varmap: &VarMap, dtype: DType) -> VarBuilder<'static> {
    VarBuilder::from_varmap(varmap, dtype, &Device::Cpu)
}

fn image(dtype: DType) -> Tensor {
    tensor(&[2, 2, 4, 4], 9).to_dtype(dtype).unwrap()
}

/// A model with pretrained weights and trained adapters.
fn adapted(dtype: DType, config: &LoraConfig) -> (VarMap, VarMap, Net) {
    let (base, varmap) = (VarMap::new(), VarMap::new());
    Net::new(builder(&base, dtype)).unwrap();
    fill(&base, 3);
    let model = config.build(builder(&base, dtype), builder(&varmap, dtype), Net::new).unwrap();
    fill(&varmap, 5);
    (base, varmap, model)
}

fn tensors(varmaps: &[&VarMap]) -> HashMap<String, Tensor> {
    let all = varmaps.iter().flat_map(|varmap| varmap.data().lock().unwrap().clone());
    all.map(|(name, var)| (name, var.as_tensor().clone())).collect()
}

fn names(varmap: &VarMap) -> Vec<String> {
    let mut names: Vec<String> = tensors(&[varmap]).into_keys().collect();
    names.sort();
    names
}

/// The same model with adapters that are part of the weights, and how the weights' gradients become those of the adapters.
fn by_weights(
    config: &LoraConfig,
    base: &VarMap,
    varmap: &VarMap,
    loss: impl Fn(&Net) -> Tensor,
) -> (f32, HashMap<String, Tensor>) {
    let merged = config.merge(tensors(&[base, varmap])).unwrap();
    let vars: HashMap<String, Var> =
        merged.into_iter().map(|(name, tensor)| (name, Var::from_tensor(&tensor).unwrap())).collect();
    let weights = vars.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect();
    let loss = loss(&Net::new(VarBuilder::from_tensors(weights, DType::F64, &Device::Cpu)).unwrap());
    let grads = loss.backward().unwrap();
    let mut expected = HashMap::new();
    for (name, matrix) in tensors(&[varmap]) {
        let (module, which) = name.split_once(".lora_").unwrap();
        let gradient = grads.get(&vars[&format!("{module}.weight")]).unwrap();
        let of = |other: &str| tensors(&[varmap])[&format!("{module}.lora_{other}")].clone();
        let flat = |tensor: Tensor| tensor.flatten_from(1).unwrap();
        let gradient = match which {
            "A.weight" => flat(of("B.weight")).t().unwrap().matmul(&flat(gradient.clone())),
            "B.weight" => flat(gradient.clone()).matmul(&flat(of("A.weight")).t().unwrap()),
            "embedding_A" => of("embedding_B").t().unwrap().matmul(&gradient.t().unwrap()),
            _ => gradient.t().unwrap().matmul(&of("embedding_A").t().unwrap()),
        };
        let gradient = (gradient.unwrap() * config.scaling()).unwrap().reshape(matrix.shape()).unwrap();
        expected.insert(name, gradient);
    }
    (floats(&loss)[0], expected)
}

fn assert_like_weights(config: &LoraConfig, loss: impl Fn(&Net) -> Tensor) {
    let (base, varmap, model) = adapted(DType::F64, config);
    let result = loss(&model);
    let grads = result.backward().unwrap();
    let (expected, gradients) = by_weights(config, &base, &varmap, &loss);
    assert_close(&floats(&result), &[expected], 1e-6, "the loss");
    assert_eq!(gradients.len(), 8);
    for (name, expected) in gradients {
        let actual = grads.get(&varmap.data().lock().unwrap()[&name]).unwrap().clone();
        assert_eq!((actual.dims(), actual.dtype()), (expected.dims(), DType::F64), "{name}");
        assert_close(&floats(&actual), &floats(&expected), 1e-6, &name);
    }
    // Nothing else has a gradient.
    assert_eq!(grads.get_ids().count(), 8);
}

#[test]
fn layers_compute_and_train_as_if_adapters_were_part_of_weights() {
    for use_rslora in [false, true] {
        let config = LoraConfig { use_rslora, ..all() };
        assert_like_weights(&config, |net| net.forward(&image(DType::F64)).unwrap().sqr().unwrap().mean_all().unwrap());
    }
    assert_eq!(LoraConfig { r: 4, lora_alpha: 6.0, use_rslora: true, ..all() }.scaling(), 3.0);
}

#[test]
fn checkpoints_and_the_loss_of_a_head_know_adapters() {
    assert_like_weights(&all(), |net| {
        let layers = (net.fc.clone(), net.line.clone());
        let x = net.embed.forward(&Tensor::new(&[[1u32, 5, 6, 2]], &Device::Cpu).unwrap()).unwrap();
        let image = net.image.forward(&image(DType::F64)).unwrap().mean_all().unwrap();
        let hidden =
            checkpoint(&[&x], move |x| layers.0.forward(&layers.1.forward(&x[0].t()?)?.transpose(1, 2)?.contiguous()?));
        let targets = Tensor::new(&[[3u32, 0, 6, 1]], &Device::Cpu).unwrap();
        (linear_cross_entropy(&hidden.unwrap(), net.head.weight(), None, &targets).unwrap() + image).unwrap()
    });
}

#[test]
fn adapters_have_pefts_names_and_begin_without_an_effect() {
    let (base, varmap) = (VarMap::new(), VarMap::new());
    let plain = Net::new(builder(&base, DType::F32)).unwrap();
    let before = tensors(&[&base]);
    let model = all().build(builder(&base, DType::F32), builder(&varmap, DType::F32), Net::new).unwrap();
    let x = image(DType::F32);
    assert_eq!(floats(&model.forward(&x).unwrap()), floats(&plain.forward(&x).unwrap()));
    let shapes: Vec<_> =
        names(&varmap).into_iter().map(|name| (tensors(&[&varmap])[&name].dims().to_vec(), name)).collect();
    let shapes: Vec<_> = shapes.iter().map(|(shape, name)| (name.as_str(), shape.as_slice())).collect();
    let expected: [(&str, &[usize]); 8] = [
        ("embed.lora_embedding_A", &[2, 7]),
        ("embed.lora_embedding_B", &[4, 2]),
        ("parts.fc.lora_A.weight", &[2, 6]),
        ("parts.fc.lora_B.weight", &[4, 2]),
        ("parts.image.lora_A.weight", &[2, 2, 3, 3]),
        ("parts.image.lora_B.weight", &[4, 2, 1, 1]),
        ("parts.line.lora_A.weight", &[2, 4, 3]),
        ("parts.line.lora_B.weight", &[6, 2, 1]),
    ];
    assert_eq!(shapes, expected);
    for (name, tensor) in tensors(&[&varmap]) {
        let largest = floats(&tensor).into_iter().fold(0f32, |largest, value| largest.max(value.abs()));
        let is_zero = name.ends_with("lora_B.weight") || name.ends_with("embedding_A");
        assert_eq!(largest == 0.0, is_zero, "{name}");
        if name.ends_with("lora_A.weight") {
            assert!(largest <= 1.0 / ((tensor.elem_count() / 2) as f32).sqrt(), "{name}: {largest}");
        }
    }
    for (name, tensor) in tensors(&[&base]) {
        assert_eq!(floats(&tensor), floats(&before[&name]), "{name}");
    }
}

#[test]
fn only_what_the_options_name_is_trained() {
    let trained = |config: LoraConfig| {
        let varmap = VarMap::new();
        Net::new(builder(&varmap, DType::F32)).unwrap();
        config.build(builder(&varmap, DType::F32), builder(&varmap, DType::F32), Net::new).unwrap();
        names(&varmap).into_iter().filter(|name| config.is_trained(name)).collect::<Vec<_>>()
    };
    let adapter = ["parts.fc.lora_A.weight", "parts.fc.lora_B.weight"];
    let fc = || config(&["fc"]);
    assert_eq!(trained(fc()), adapter);
    let biases = ["parts.fc.bias", "parts.image.bias", "parts.line.bias"];
    assert_eq!(trained(LoraConfig { bias: LoraBias::LoraOnly, ..fc() }), [&biases[..1], &adapter].concat());
    assert_eq!(trained(LoraConfig { bias: LoraBias::All, ..fc() }), [&biases[..1], &adapter, &biases[1..]].concat());
    let saved = trained(LoraConfig { modules_to_save: vec!["line".to_string()], ..fc() });
    assert_eq!(saved, [&adapter[..], &["parts.line.bias", "parts.line.weight"]].concat());
    let excluded = LoraConfig { exclude_modules: ["image", "line"].map(String::from).to_vec(), ..config(&["parts.*"]) };
    assert_eq!(trained(excluded), adapter);
}

/// A weight of 16 bits has adapters of f32, whose gradients are not rounded to 16 bits.
#[test]
fn bf16_models_and_autocast_train_adapters_of_f32() {
    let loss = |net: &Net, dtype| {
        net.forward(&image(dtype)).unwrap().to_dtype(DType::F32).unwrap().sqr().unwrap().mean_all().unwrap()
    };
    let (_, exact, model) = adapted(DType::F32, &all());
    let expected = loss(&model, DType::F32).backward().unwrap();
    let (_, narrow, in_bf16) = adapted(DType::BF16, &all());
    assert_eq!(in_bf16.forward(&image(DType::BF16)).unwrap().dtype(), DType::BF16);
    let rounded = loss(&in_bf16, DType::BF16).backward().unwrap();
    let casting =
        autocast(candle_ddp_nn::Autocast::Products(DType::BF16), || loss(&model, DType::F32)).backward().unwrap();
    for name in names(&exact) {
        let var = |varmap: &VarMap| varmap.data().lock().unwrap()[&name].clone();
        assert_eq!(var(&narrow).dtype(), DType::F32);
        let expected = floats(expected.get(&var(&exact)).unwrap());
        for (gradients, varmap) in [(&rounded, &narrow), (&casting, &exact)] {
            let actual = gradients.get(&var(varmap)).unwrap();
            assert_eq!(actual.dtype(), DType::F32);
            assert_close(&floats(actual), &expected, 0.05, &name);
        }
    }
}

#[test]
fn dropout_acts_while_gradients_are_recorded() {
    let config = LoraConfig { lora_dropout: 0.5, ..config(&["fc"]) };
    let (_, _, model) = adapted(DType::F32, &config);
    let x = tensor(&[3, 6], 1);
    let evaluated = || no_grad(|| floats(&model.fc.forward(&x).unwrap()));
    assert_eq!(evaluated(), evaluated());
    assert_ne!(floats(&model.fc.forward(&x).unwrap()), floats(&model.fc.forward(&x).unwrap()));
}

#[test]
fn what_knows_no_adapters_says_so() {
    let (base, _, model) = adapted(DType::F32, &all());
    let refused = |result: Result<Tensor>, what: &str| assert_error(result, &[what, "has an adapter"]);
    // candle's own operations cannot be stopped in the forward pass.
    let y = (model.fc.weight() * 2.0).unwrap();
    assert!(floats(&y).iter().all(|value| value.is_nan()));
    refused(y.sum_all().unwrap().backward().map(|_| y), "parts.fc has an adapter");
    let norm = batch_norm(4, 1e-5, builder(&base, DType::F32).pp("norm")).unwrap();
    refused(model.image.absorb_bn(&norm).map(|conv| conv.weight().clone()), "absorb_bn");
    let build = |f: fn(VarBuilder) -> Result<Tensor>| {
        let varmap = VarMap::new();
        config(&["conv"]).build(builder(&varmap, DType::F32), builder(&varmap, DType::F32), |vb| f(vb.pp("conv")))
    };
    let transposed = |vb: VarBuilder| {
        conv_transpose1d_no_bias(2, 2, 3, ConvTranspose1dConfig::default(), vb)?.forward(&tensor(&[1, 2, 5], 1))
    };
    refused(build(transposed), "transposed");
    let groups = |vb: VarBuilder| {
        let config = Conv2dConfig { groups: 2, ..Default::default() };
        conv2d_no_bias(2, 2, 3, config, vb)?.forward(&image(DType::F32))
    };
    refused(build(groups), "groups");
}

#[test]
fn wrong_options_and_layers_are_errors() {
    let error = |config: LoraConfig| {
        let varmap = VarMap::new();
        let build = |vb: VarBuilder| {
            layer_norm(4, 1e-5, vb.pp("norm"))?;
            vb.pp("codes").get_with_hints_dtype((2, 2), "weight", candle_ddp_nn::Init::Const(0.), DType::U8)?;
            Net::new(vb)
        };
        let vb = builder(&varmap, DType::F32);
        config.build(vb.clone(), vb, build).map(|_| ()).unwrap_err().to_string()
    };
    let expect = |config: LoraConfig, text: &str| {
        let error = error(config);
        assert!(error.contains(text), "{error}");
    };
    expect(LoraConfig { r: 0, ..all() }, "r: the rank of LoRA's adapters must be at least 1");
    expect(LoraConfig { lora_alpha: f64::NAN, ..all() }, "lora_alpha: it must be a finite number");
    expect(LoraConfig { lora_dropout: 1.0, ..all() }, "lora_dropout: it must be at least 0");
    expect(
        LoraConfig { task_type: Some("CAUSAL".to_string()), ..all() },
        "task_type: it must be one of SEQ_CLS, SEQ_2_SEQ_LM, CAUSAL_LM, TOKEN_CLS, QUESTION_ANS, FEATURE_EXTRACTION, which peft knows, \
         not \"CAUSAL\"",
    );
    expect(LoraConfig::default(), "target_modules: it must have the name of at least one layer");
    expect(
        config(&["fc", "q_proj"]),
        "no layer of the model fits the pattern \"q_proj\": its layers are codes, embed, norm",
    );
    let none = || vec!["nothing".to_string()];
    expect(LoraConfig { exclude_modules: none(), ..all() }, "exclude_modules: no layer");
    expect(LoraConfig { modules_to_save: none(), ..all() }, "modules_to_save: no layer");
    expect(LoraConfig { exclude_modules: vec!["*".to_string()], ..all() }, "it excludes every layer");
    expect(config(&["norm"]), "the weight of norm is f32[4]: a layer with an adapter must be linear");
    // Its weights have other names.
    let varmap = VarMap::new();
    let build = |config: LoraConfig| {
        config.build(builder(&varmap, DType::F32), builder(&varmap, DType::F32), |vb| {
            StackedGRU::new(4, 4, RNNOptions::default(), vb.pp("gru"))?;
            linear(4, 4, vb.pp("fc"))
        })
    };
    let error = build(config(&["gru", "fc"])).unwrap_err().to_string();
    assert!(error.contains("target_modules: gru has no tensor \"weight\": a layer with an adapter must be"), "{error}");
    build(LoraConfig { exclude_modules: vec!["gru".to_string()], ..config(&["*"]) }).unwrap();
    build(LoraConfig { modules_to_save: vec!["gru".to_string()], ..config(&["*"]) }).unwrap();
    expect(config(&["codes"]), "the weight of codes is u8[2, 2]: a weight with an adapter must be f32");
}

#[test]
fn a_trained_layer_is_not_initialised_anew() {
    let (base, varmap) = (VarMap::new(), VarMap::new());
    Net::new(builder(&base, DType::F32)).unwrap();
    let config = LoraConfig { modules_to_save: vec!["line".to_string()], ..config(&["fc"]) };
    let build = || config.build(builder(&base, DType::F32), builder(&varmap, DType::F32), Net::new);
    assert_error(build(), &["parts.line.weight would be trained"]);
    for (name, var) in base.data().lock().unwrap().iter().filter(|(name, _)| config.is_trained(name)) {
        varmap.data().lock().unwrap().insert(name.clone(), var.clone());
    }
    assert!(build().unwrap().line.weight().is_variable());
}

#[test]
fn only_whole_adapters_that_fit_are_merged() {
    let (base, varmap, _) = adapted(DType::F32, &all());
    let merge = |change: fn(&mut HashMap<String, Tensor>)| {
        let mut tensors = tensors(&[&base, &varmap]);
        change(&mut tensors);
        all().merge(tensors).map(|_| ()).unwrap_err().to_string()
    };
    let expect = |change: fn(&mut HashMap<String, Tensor>), text: &str| {
        let error = merge(change);
        assert!(error.contains(text), "{error}");
    };
    expect(|tensors| drop(tensors.remove("parts.fc.lora_A.weight")), "parts.fc, but not parts.fc.lora_A.weight");
    expect(|tensors| drop(tensors.remove("embed.lora_embedding_B")), "embed, but not embed.lora_embedding_B");
    expect(|tensors| drop(tensors.remove("parts.fc.weight")), "parts.fc, but not parts.fc.weight");
    expect(|tensors| tensors.retain(|name, _| !name.contains("lora")), "none of them belongs to an adapter");
    for wrong in [&[3, 6], &[2, 5], &[6, 2], &[12, 1], &[0, 6]] {
        let mut tensors = tensors(&[&base, &varmap]);
        tensors.insert("parts.fc.lora_A.weight".to_string(), tensor(wrong, 1));
        assert_error(all().merge(tensors), &["the weight of parts.fc is f32[4, 6], and its adapter is"]);
    }
    assert_error(LoraConfig { r: 4, ..all() }.merge(tensors(&[&base, &varmap])), &["the rank 4"]);
}
