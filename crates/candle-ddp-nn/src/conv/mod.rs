//! Convolutions.
mod columns;
mod cpu;
mod cuda;
mod depthwise;
mod direct;
mod geometry;
mod operation;
mod parts;
mod products;
mod tile;
mod winograd;

use crate::BatchNorm;
use crate::lora::adapter::{self, Adapter};
use candle_core::{Module, Result, Tensor};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::function::argument;
pub use candle_nn::{Conv1dConfig, Conv2dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig};
use candle_nn::{Init, VarBuilder};
use operation::{Settings, convolution};

/// Defines a layer from its type, its config, and the conversion of the config to [`Settings`].
macro_rules! layer {
    ($(#[$doc:meta])* $Layer:ident, $Config:ident, $name:literal, $settings:expr) => {
        $(#[$doc])*
        #[derive(Clone, Debug)]
        pub struct $Layer {
            weight: Tensor,
            bias: Option<Tensor>,
            config: $Config,
        }

        impl $Layer {
            /// A layer with these parameters.
            pub fn new(weight: Tensor, bias: Option<Tensor>, config: $Config) -> Self {
                Self { weight, bias, config }
            }

            /// The config that the layer was made with.
            pub fn config(&self) -> &$Config {
                &self.config
            }

            /// The weight.
            pub fn weight(&self) -> &Tensor {
                &self.weight
            }

            /// The bias, of shape (output channels), if there is one.
            pub fn bias(&self) -> Option<&Tensor> {
                self.bias.as_ref()
            }

            fn settings(config: &$Config) -> Settings {
                $settings(config)
            }
        }

        impl Module for $Layer {
            /// # Errors
            /// Returns an error for an input of another rank, dtype or device than the weight, with another number of
            /// channels, or smaller than the kernel, and for a config that does not fit the weight.
            fn forward(&self, x: &Tensor) -> Result<Tensor> {
                let (bias, settings) = (self.bias.as_ref(), Self::settings(&self.config));
                match adapter::of(&self.weight) {
                    Some(adapter) => adapted(&adapter, $name, x, bias, settings),
                    None => convolution($name, x, &self.weight, bias, settings),
                }
            }
        }
    };
}

layer!(
    /// A convolution over images: `torch.nn.Conv2d`, and a drop-in for [`candle_nn::Conv2d`] with the same config and names
    /// in the `VarMap`. Made by [`conv2d`] and [`conv2d_no_bias`].
    ///
    /// Takes (N, C, H, W) and returns (N, out, H', W') with H' = (H + 2·padding − dilation·(kernel − 1) − 1) / stride
    /// + 1, in the dtype f32, f64, f16 or bf16; f16 and bf16 are multiplied and added in f32. The weight has the
    /// shape (out, in / groups, kernel, kernel). On the CPU it is computed as a matrix product, a block of output
    /// pixels at a time. The workspace is at most 2 MiB per thread, or the size that 512 pixels or one row of outputs
    /// need. On CUDA cuDNN computes it with the feature `cudnn`; otherwise cuBLAS products do or, if a group has one
    /// input channel, a kernel. The workspace is at most 64 MiB, or the size that one image needs. `cudnn_fwd_algo`
    /// has no effect: the algorithm is chosen once per shape.
    ///
    /// ```
    /// # use candle_core::{Device, Module, Result, Tensor};
    /// # fn main() -> Result<()> {
    /// use candle_ddp_nn::{Conv2d, Conv2dConfig};
    /// let x = Tensor::arange(0f32, 9., &Device::Cpu)?.reshape((1, 1, 3, 3))?;
    /// let weight = Tensor::new(&[[[[1f32, 1.], [1., 1.]]]], &Device::Cpu)?;
    /// let y = Conv2d::new(weight, None, Conv2dConfig::default()).forward(&x)?;
    /// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [8., 12., 20., 24.]);
    /// # Ok(())
    /// # }
    /// ```
    Conv2d,
    Conv2dConfig,
    "Conv2d",
    |config: &Conv2dConfig| Settings {
        stride: config.stride,
        padding: config.padding,
        output_padding: 0,
        dilation: config.dilation,
        groups: config.groups,
        transposed: false,
    }
);

layer!(
    /// A convolution over lines (N, C, L): `torch.nn.Conv1d`, and a drop-in for [`candle_nn::Conv1d`]. Made by
    /// [`conv1d`] and [`conv1d_no_bias`]. The weight has the shape (out, in / groups, kernel). In all else it is like
    /// [`Conv2d`].
    ///
    /// ```
    /// # use candle_core::{Device, Module, Result, Tensor};
    /// # fn main() -> Result<()> {
    /// use candle_ddp_nn::{Conv1d, Conv1dConfig};
    /// let x = Tensor::new(&[[[1f32, 2., 4., 8.]]], &Device::Cpu)?;
    /// let weight = Tensor::new(&[[[-1f32, 1.]]], &Device::Cpu)?;
    /// let y = Conv1d::new(weight, None, Conv1dConfig::default()).forward(&x)?;
    /// assert_eq!(y.to_vec3::<f32>()?, [[[1., 2., 4.]]]);
    /// # Ok(())
    /// # }
    /// ```
    Conv1d,
    Conv1dConfig,
    "Conv1d",
    |config: &Conv1dConfig| Settings {
        stride: config.stride,
        padding: config.padding,
        output_padding: 0,
        dilation: config.dilation,
        groups: config.groups,
        transposed: false,
    }
);

layer!(
    /// A transposed convolution over images: `torch.nn.ConvTranspose2d`, and a drop-in for [`candle_nn::ConvTranspose2d`]
    /// with the same config and names in the `VarMap`. Made by [`conv_transpose2d`] and [`conv_transpose2d_no_bias`].
    ///
    /// Takes (N, C, H, W) and returns (N, out, H', W') with H' = (H − 1)·stride − 2·padding + dilation·(kernel − 1) +
    /// output_padding + 1. The weight has the shape (in, out, kernel, kernel). Dtypes, devices and workspace are as
    /// in [`Conv2d`].
    ///
    /// ```
    /// # use candle_core::{Device, Module, Result, Tensor};
    /// # fn main() -> Result<()> {
    /// use candle_ddp_nn::{ConvTranspose2d, ConvTranspose2dConfig};
    /// let x = Tensor::new(&[[[[1f32, 2.]]]], &Device::Cpu)?;
    /// let weight = Tensor::new(&[[[[1f32, 10.]]]], &Device::Cpu)?;
    /// let config = ConvTranspose2dConfig { padding: 0, output_padding: 0, stride: 1, dilation: 1 };
    /// let y = ConvTranspose2d::new(weight, None, config).forward(&x)?;
    /// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [1., 12., 20.]);
    /// # Ok(())
    /// # }
    /// ```
    ConvTranspose2d,
    ConvTranspose2dConfig,
    "ConvTranspose2d",
    |config: &ConvTranspose2dConfig| Settings {
        stride: config.stride,
        padding: config.padding,
        output_padding: config.output_padding,
        dilation: config.dilation,
        groups: 1,
        transposed: true,
    }
);

layer!(
    /// A transposed convolution over lines (N, C, L): `torch.nn.ConvTranspose1d`, and a drop-in for
    /// [`candle_nn::ConvTranspose1d`]. Made by [`conv_transpose1d`] and [`conv_transpose1d_no_bias`]. The weight has
    /// the shape (in, out / groups, kernel). In all else it is like [`ConvTranspose2d`].
    ///
    /// ```
    /// # use candle_core::{Device, Module, Result, Tensor};
    /// # fn main() -> Result<()> {
    /// use candle_ddp_nn::{ConvTranspose1d, ConvTranspose1dConfig};
    /// let x = Tensor::new(&[[[1f32, 2.]]], &Device::Cpu)?;
    /// let weight = Tensor::new(&[[[1f32, 10.]]], &Device::Cpu)?;
    /// let config = ConvTranspose1dConfig { stride: 2, ..Default::default() };
    /// let y = ConvTranspose1d::new(weight, None, config).forward(&x)?;
    /// assert_eq!(y.to_vec3::<f32>()?, [[[1., 10., 2., 20.]]]);
    /// # Ok(())
    /// # }
    /// ```
    ConvTranspose1d,
    ConvTranspose1dConfig,
    "ConvTranspose1d",
    |config: &ConvTranspose1dConfig| Settings {
        stride: config.stride,
        padding: config.padding,
        output_padding: config.output_padding,
        dilation: config.dilation,
        groups: config.groups,
        transposed: true,
    }
);

/// The convolution whose weight has this adapter: one of few channels, and a pointwise one.
fn adapted(
    adapter: &Adapter,
    name: &'static str,
    x: &Tensor,
    bias: Option<&Tensor>,
    settings: Settings,
) -> Result<Tensor> {
    if settings.transposed || settings.groups != 1 {
        return Err(adapter.unsupported("a convolution that is transposed or has groups"));
    }
    let y = convolution(name, x, adapter.base(), bias, settings)?;
    let delta = adapter.multiplied(x, |x| {
        let [down, up] = adapter.matrices()?;
        let pointwise =
            Settings { stride: 1, padding: 0, output_padding: 0, dilation: 1, groups: 1, transposed: false };
        convolution(name, &adapter.scaled(&convolution(name, x, &down, None, settings)?)?, &up, None, pointwise)
    })?;
    adapter::sum(&y, &delta)
}

impl Conv2d {
    /// This convolution followed by `norm` in evaluation, as one convolution.
    ///
    /// # Errors
    /// [`InvalidArgument`](Error::Base), carried by candle's error, for a batch normalisation without parameters.
    pub fn absorb_bn(&self, norm: &BatchNorm) -> Result<Self> {
        adapter::refuse(&self.weight, "absorb_bn")?;
        let Some((scale, shift)) = norm.weight_and_bias() else {
            return Err(Error::invalid(
                "the batch normalisation that a convolution absorbs",
                "it must have parameters (`affine`)",
            )
            .into());
        };
        let scale = (scale / (norm.running_var() + norm.eps())?.sqrt()?)?;
        let mean = match &self.bias {
            None => norm.running_mean().clone(),
            Some(bias) => (norm.running_mean() - bias)?,
        };
        let weight = self.weight.broadcast_mul(&scale.reshape(((), 1, 1, 1))?)?;
        let bias = (shift - (scale * mean)?)?;
        Ok(Self { weight: argument(&weight), bias: Some(argument(&bias)), config: self.config })
    }
}

/// Two constructors of a layer, initialised as candle-nn's: with a bias and without.
macro_rules! constructors {
    ($Layer:ident, $Config:ident, $with:ident, $without:ident, $name:literal, $rank:literal, $init:expr) => {
        #[doc = concat!("A [`", $name, "`] with a bias, initialised as candle-nn's.")]
        ///
        /// # Errors
        /// Returns an error for an invalid config (a stride, dilation or kernel of 0, groups that do not divide the
        /// channels), and the errors of `vb`.
        pub fn $with(
            in_channels: usize,
            out_channels: usize,
            kernel_size: usize,
            config: $Config,
            vb: VarBuilder,
        ) -> Result<$Layer> {
            let layer = $without(in_channels, out_channels, kernel_size, config, vb.clone())?;
            let [_, init] = $init(in_channels, out_channels, kernel_size);
            let bias = vb.get_with_hints(out_channels, "bias", init)?;
            Ok($Layer { bias: Some(bias), ..layer })
        }

        #[doc = concat!("A [`", $name, "`] without a bias, initialised as candle-nn's.")]
        ///
        /// # Errors
        #[doc = concat!("As [`", stringify!($with), "`].")]
        pub fn $without(
            in_channels: usize,
            out_channels: usize,
            kernel_size: usize,
            config: $Config,
            vb: VarBuilder,
        ) -> Result<$Layer> {
            let settings = $Layer::settings(&config);
            settings.check($name, in_channels, out_channels, kernel_size)?;
            let [init, _] = $init(in_channels, out_channels, kernel_size);
            let mut shape = match settings.transposed {
                true => vec![in_channels, out_channels / settings.groups],
                false => vec![out_channels, in_channels / settings.groups],
            };
            shape.extend([kernel_size; $rank]);
            Ok($Layer::new(vb.get_with_hints(shape, "weight", init)?, None, config))
        }
    };
}

/// The initial values of the weight and of the bias.
fn kaiming(inputs: usize, _: usize, _: usize) -> [Init; 2] {
    [candle_nn::init::DEFAULT_KAIMING_NORMAL, uniform(inputs as f64)]
}

/// Uniform between ±1/√n.
fn uniform(n: f64) -> Init {
    let bound = 1. / n.sqrt();
    Init::Uniform { lo: -bound, up: bound }
}

constructors!(Conv1d, Conv1dConfig, conv1d, conv1d_no_bias, "Conv1d", 1, kaiming);
constructors!(Conv2d, Conv2dConfig, conv2d, conv2d_no_bias, "Conv2d", 2, kaiming);
constructors!(
    ConvTranspose1d,
    ConvTranspose1dConfig,
    conv_transpose1d,
    conv_transpose1d_no_bias,
    "ConvTranspose1d",
    1,
    |_, outputs: usize, kernel: usize| [uniform((outputs * kernel) as f64); 2]
);
constructors!(
    ConvTranspose2d,
    ConvTranspose2dConfig,
    conv_transpose2d,
    conv_transpose2d_no_bias,
    "ConvTranspose2d",
    2,
    |_, outputs: usize, kernel: usize| [uniform((outputs * kernel * kernel) as f64); 2]
);
