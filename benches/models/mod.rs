//! The models of the benches, built as in any candle program.
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Activation, Conv2dConfig, Init, ParamsAdamW, Sequential, VarBuilder, conv2d, linear, seq};

/// A model and the shape of its input.
pub(crate) struct Model {
    /// The name in the results.
    pub(crate) name: &'static str,
    /// The function that builds it.
    pub(crate) build: fn(VarBuilder) -> Result<Sequential>,
    input: &'static [usize],
}

/// The models that are measured.
pub(crate) const MODELS: &[Model] = &[
    Model { name: "MLP 6×1024, batch 256", build: mlp, input: &[256, 1024] },
    Model { name: "convnet, batch 32", build: convnet, input: &[32, 3, 32, 32] },
    // It computes nearly nothing, so its times are the cost of a parameter.
    Model { name: "20,000 parameters of 8 elements", build: many_small, input: &[1] },
];

/// Small models of the same kind, for smoke tests.
pub(crate) const SMOKE_MODELS: &[Model] = &[
    Model { name: "MLP 6×1024, batch 1", build: mlp, input: &[1, 1024] },
    Model { name: "convnet, batch 1", build: convnet, input: &[1, 3, 32, 32] },
];

impl Model {
    /// Returns a normally distributed input.
    pub(crate) fn input(&self) -> Result<Tensor> {
        Tensor::randn(0f32, 1., self.input, &Device::Cpu)
    }
}

/// The dtype of all models.
pub(crate) const DTYPE: DType = DType::F32;

/// A learning rate at which nothing overflows, however many steps are measured.
pub(crate) fn adamw() -> ParamsAdamW {
    ParamsAdamW { lr: 1e-5, ..Default::default() }
}

/// Returns a cheap loss: the mean square of the outputs.
pub(crate) fn loss(outputs: &Tensor) -> Result<Tensor> {
    outputs.sqr()?.mean_all()
}

fn mlp(vb: VarBuilder) -> Result<Sequential> {
    (0..6).try_fold(seq(), |layers, layer| Ok(layers.add(linear(1024, 1024, vb.pp(layer))?).add(Activation::Relu)))
}

fn many_small(vb: VarBuilder) -> Result<Sequential> {
    let parameter = |index| vb.get_with_hints(8, &format!("p{index}"), Init::Const(1.));
    let parameters = (0..20_000).map(parameter).collect::<Result<Vec<_>>>()?;
    Ok(seq().add_fn(move |x| Tensor::cat(&parameters, 0)?.broadcast_mul(x)))
}

fn convnet(vb: VarBuilder) -> Result<Sequential> {
    let padded = Conv2dConfig { padding: 1, ..Default::default() };
    let convolutions = [(3, 32), (32, 64), (64, 128)].into_iter().enumerate();
    let layers = convolutions.into_iter().try_fold(seq(), |layers, (layer, (inputs, outputs))| {
        let convolution = conv2d(inputs, outputs, 3, padded, vb.pp(format!("conv{layer}")))?;
        Ok::<_, candle_core::Error>(layers.add(convolution).add(Activation::Relu).add_fn(|x| x.max_pool2d(2)))
    })?;
    Ok(layers.add_fn(|x| x.flatten_from(1)).add(linear(2048, 256, vb.pp("fc0"))?).add(Activation::Relu).add(linear(
        256,
        10,
        vb.pp("fc1"),
    )?))
}
