//! Uses of a parameter while it has no memory.
use super::*;
use crate::common::{succeed, test_process};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{D, ModuleT, Var};
use candle_ddp::backend::{bytes, bytes_mut};
use candle_ddp::nn;
use candle_nn::ops;

/// Parameters outside of blocks, after a call of the model that gave them away, and tensors that have values.
struct Freed {
    w: Tensor,
    bias: Tensor,
    kernel: Tensor,
    kernel1: Tensor,
    x: Tensor,
    images: Tensor,
    rows: Tensor,
    ids: Tensor,
    mask: Tensor,
    group: ProcessGroup,
}

impl Freed {
    fn new(pg: &ProcessGroup) -> candle_ddp::Result<Self> {
        let build = |vb: VarBuilder| {
            let get = |shape: &[usize], name| vb.get_with_hints(shape, name, candle_nn::Init::Const(0.5));
            Ok::<_, candle_core::Error>([
                get(&[6, 6], "w")?,
                get(&[6], "bias")?,
                get(&[6, 6, 3, 3], "kernel")?,
                get(&[6, 6, 3], "kernel1")?,
            ])
        };
        let ddp = DistributedDataParallel::with_options(pg, &VarMap::new(), build, sharded())?;
        let [w, bias, kernel, kernel1] = no_grad(|| ddp.call(|all| Ok::<_, candle_core::Error>(all.clone())))?;
        let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu);
        Ok(Self {
            w,
            bias,
            kernel,
            kernel1,
            x: ones(&[6, 6])?,
            images: ones(&[2, 6, 6, 6])?,
            rows: ones(&[2, 6, 6])?,
            ids: Tensor::zeros((6, 6), DType::U32, &Device::Cpu)?,
            mask: Tensor::ones((6, 6), DType::U8, &Device::Cpu)?,
            group: pg.clone(),
        })
    }

    /// The first row of the identifiers.
    fn row(&self) -> Result<Tensor> {
        self.ids.get(0)
    }

    /// A layout that no product takes as it is.
    fn every_second(&self) -> Result<Tensor> {
        self.w.reshape((6, 3, 2))?.narrow(2, 0, 1)?.squeeze(2)
    }
}

type Use = fn(&Freed) -> candle_ddp::Result<()>;

macro_rules! uses {
    ($freed:ident: $($name:literal => $use:expr,)*) => {
        [$(($name, (|$freed: &Freed| { let _used = $use?; Ok(()) }) as Use)),*]
    };
}

const OF_CANDLE: &[(&str, Use)] = &uses![f:
    "add" => &f.x + &f.w,
    "sub itself" => f.w.sub(&f.w),
    "broadcast_mul" => f.rows.broadcast_mul(&f.bias),
    "broadcast_div" => f.w.broadcast_div(&f.bias),
    "minimum" => f.x.minimum(&f.w),
    "eq" => f.x.eq(&f.w),
    "lt a number" => f.w.lt(1.0),
    "affine" => f.w.affine(2., 1.),
    "sqr" => f.w.sqr(),
    "sqr of a view" => f.every_second()?.sqr(),
    "exp" => f.w.t()?.exp(),
    "gelu" => f.w.gelu(),
    "powf" => f.w.powf(2.),
    "elu" => f.w.elu(1.),
    "clamp" => f.w.clamp(0f32, 1f32),
    "sum_all" => f.w.sum_all(),
    "mean" => f.w.mean(0),
    "max" => f.w.max(D::Minus1),
    "argmax" => f.w.argmax(0),
    "var" => f.w.var(0),
    "log_sum_exp" => f.w.log_sum_exp(1),
    "cumsum" => f.w.cumsum(0),
    "arg_sort_last_dim" => f.w.arg_sort_last_dim(true),
    "matmul, left" => f.w.matmul(&f.x),
    "matmul, right" => f.x.matmul(&f.w),
    "matmul, transposed" => f.x.matmul(&f.w.t()?),
    "matmul, both" => f.w.matmul(&f.w),
    "matmul of a view" => f.x.matmul(&f.every_second()?),
    "broadcast_matmul" => f.rows.broadcast_matmul(&f.w),
    "dot" => f.bias.dot(&f.bias),
    "conv1d" => f.rows.conv1d(&f.kernel1, 1, 1, 1, 1),
    "conv1d, transposed" => f.rows.conv_transpose1d(&f.kernel1, 0, 0, 1, 1, 1),
    "conv2d" => f.images.conv2d(&f.kernel, 1, 1, 1, 1),
    "conv2d, as an image" => f.kernel.conv2d(&f.images.narrow(2, 0, 3)?.narrow(3, 0, 3)?, 1, 1, 1, 1),
    "conv2d, transposed" => f.images.conv_transpose2d(&f.kernel, 0, 0, 1, 1),
    "avg_pool2d" => f.kernel.avg_pool2d(2),
    "max_pool2d" => f.kernel.max_pool2d(2),
    "upsample_nearest2d" => f.kernel.upsample_nearest2d(6, 6),
    "index_select" => f.w.index_select(&f.row()?, 0),
    "embedding" => f.w.embedding(&f.row()?),
    "gather" => f.w.gather(&f.ids, 0),
    "scatter_add" => f.x.scatter_add(&f.ids, &f.w, 0),
    "index_add" => f.x.index_add(&f.row()?, &f.w, 0),
    "where_cond" => f.mask.where_cond(&f.w, &f.x),
    "where_cond, both" => f.mask.where_cond(&f.w, &f.w),
    "cat" => Tensor::cat(&[&f.w, &f.x], 0),
    "cat, in another dimension" => Tensor::cat(&[&f.w, &f.w], 1),
    "stack" => Tensor::stack(&[&f.w, &f.w], 0),
    "to_dtype" => f.w.to_dtype(DType::BF16),
    "contiguous" => f.w.t()?.contiguous(),
    "force_contiguous" => f.w.force_contiguous(),
    "reshape" => f.w.t()?.reshape(36),
    "a copy" => f.w.copy()?.sqr(),
    "to_vec2" => f.w.to_vec2::<f32>(),
    "to_vec1" => f.bias.to_vec1::<f32>(),
    "to_scalar" => f.bias.get(0)?.to_scalar::<f32>(),
    "slice_set" => f.x.copy()?.slice_set(&f.w, 0, 0),
    "slice_set into it" => f.w.slice_set(&f.x, 0, 0),
    "zero_set" => f.w.zero_set(),
    "slice_scatter" => f.x.slice_scatter(&f.w, 0, 0),
    "a variable of it" => Var::from_tensor(&f.w),
    "set" => Var::from_tensor(&f.x)?.set(&f.w),
    "quantize" => QTensor::quantize(&f.w, GgmlDType::F32),
    "backward" => f.w.sqr()?.sum_all()?.backward(),
    "softmax" => ops::softmax(&f.w, 1),
    "softmax_last_dim" => ops::softmax_last_dim(&f.w),
    "layer_norm" => ops::layer_norm(&f.x, &f.bias, &f.bias, 1e-5),
    "rms_norm" => ops::rms_norm(&f.x, &f.bias, 1e-5),
    "sigmoid" => ops::sigmoid(&f.w),
    "Linear" => candle_nn::Linear::new(f.w.clone(), Some(f.bias.clone())).forward(&f.x),
    "Embedding" => candle_nn::Embedding::new(f.w.clone(), 6).forward(&f.ids),
    "loss" => candle_nn::loss::cross_entropy(&f.w, &f.row()?),
];

const OURS: &[(&str, Use)] = &uses![f:
    "matmul, right" => nn::matmul(&f.x, &f.w),
    "matmul, left" => nn::matmul(&f.w, &f.x),
    "matmul under autocast" => nn::autocast(DType::BF16, || nn::matmul(&f.x, &f.w)),
    "Linear" => Linear::new(f.w.clone(), Some(f.bias.clone())).forward(&f.x),
    "Linear, its bias" => Linear::new(f.x.clone(), Some(f.bias.clone())).forward(&f.x),
    "Linear under autocast" => nn::autocast(DType::BF16, || Linear::new(f.w.clone(), None).forward(&f.x)),
    "Embedding" => nn::Embedding::new(f.w.clone(), 6).forward(&f.ids),
    "Conv1d" => nn::Conv1d::new(f.kernel1.clone(), None, Default::default()).forward(&f.rows),
    "Conv2d" => nn::Conv2d::new(f.kernel.clone(), None, Default::default()).forward(&f.images),
    "Conv2d, its bias" => {
        nn::Conv2d::new(f.images.narrow(2, 0, 3)?.narrow(3, 0, 3)?, Some(f.bias.narrow(0, 0, 2)?), Default::default())
            .forward(&f.images)
    },
    "ConvTranspose2d" => nn::ConvTranspose2d::new(f.kernel.clone(), None, Default::default()).forward(&f.images),
    "LayerNorm" => LayerNorm::new(f.bias.clone(), f.bias.clone(), 1e-5).forward(&f.x),
    "RmsNorm" => nn::RmsNorm::new(f.bias.clone(), 1e-5).forward(&f.x),
    "GroupNorm" => nn::GroupNorm::new(f.bias.clone(), f.bias.clone(), 6, 2, 1e-5)?.forward(&f.images),
    "BatchNorm" => {
        let (mean, variance) = (f.x.get(0)?, f.x.get(1)?);
        nn::BatchNorm::new(6, mean, variance, f.bias.clone(), f.bias.clone(), 1e-5)?.forward_t(&f.images, false)
    },
    "add" => add(&f.x, &f.w),
    "add, repeated" => add(&f.rows, &f.bias),
    "gelu" => gelu(&f.w),
    "relu" => nn::relu(&f.w),
    "silu" => nn::silu(&f.w),
    "softmax" => nn::softmax(&f.w, 1),
    "cross_entropy" => nn::cross_entropy(&f.w, &f.row()?),
    "attention" => {
        let w = f.w.reshape((1, 1, 6, 6))?;
        nn::scaled_dot_product_attention(&w, &w, &w, Default::default())
    },
    "cat" => nn::cat(&[&f.x, &f.w], 0),
    "max_pool2d" => nn::max_pool2d(&f.kernel, 2, Default::default()),
    "avg_pool2d" => nn::avg_pool2d(&f.kernel, 2, Default::default()),
    "interpolate" => nn::interpolate(&f.kernel, 6, nn::InterpolateMode::Nearest),
    "checkpoint" => nn::checkpoint(&[&f.x], { let w = f.w.clone(); move |x| x[0].matmul(&w) }),
    "bytes" => bytes(&f.w, <[u8]>::len),
    "bytes_mut" => bytes_mut(&f.w, |bytes| bytes.len()),
    "all_reduce" => f.group.all_reduce(&f.w.detach(), candle_ddp::ReduceOp::Sum),
];

/// A fault ends the process, so it is a process for this test alone.
#[test]
fn no_function_reads_a_parameter_that_is_not_there() {
    succeed(&mut test_process(module_path!(), "every_function_gets_it"));
}

#[test]
#[ignore = "started by other tests"]
fn every_function_gets_it() {
    ranks(2, |pg| {
        let freed = Freed::new(&pg)?;
        let _shown = format!("{:?} {}", freed.w, freed.w);
        for (name, of_it) in OF_CANDLE {
            assert!(of_it(&freed).is_err(), "{name} of candle computed with nothing");
        }
        for (name, of_it) in OURS {
            let error = of_it(&freed).unwrap_err();
            let is_typed =
                matches!(&error, Error::InvalidArgument { argument, .. } if argument.contains("sharded model"));
            // The engine finds it when the call has begun.
            assert!(is_typed || (*name == "all_reduce" && matches!(error, Error::Group(_))), "{name}: {error:?}");
        }
        Ok(())
    });
}
