//! Muon for matrices, also those of convolutions and experts, with AdamW for all other parameters.
use super::kernel::Fused;
use super::parameters::ParameterGroup;
use super::rule::{UpdateRule, fraction, not_negative};
use super::{FusedOptimizer, ParamsAdamW};
use crate::error::describe;
use crate::nn::{autocast_off, matmul, matmul_sums};
use crate::variables::Parameters;
use crate::{Error, Result};
use candle_core::{DType, Tensor, Var, WithDType};
use candle_ddp_tensor::borrow::{slice_tensor, with_slice};
use candle_ddp_tensor::{Element, accumulator, dispatch, vectorise};
use rayon::prelude::*;

/// Options of [`Muon`](super::Muon) for matrices, with the meaning and defaults of PyTorch's `torch.optim.Muon`.
///
/// As its authors' Muon, it takes the kernel of a convolution, of shape (o, i, h, w), for a matrix of shape (o, i h w), and updates each
/// matrix of a stack, such as a stack of experts (e, rows, columns), by itself.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamsMuon {
    /// Learning rate. Default: 0.001.
    pub lr: f64,
    /// Subtracted from the parameter, times the learning rate and the parameter. Default: 0.1.
    pub weight_decay: f64,
    /// Decay rate of the mean of the gradients. Default: 0.95.
    pub momentum: f64,
    /// Whether the update is a mean of gradient and momentum. Default: true.
    pub nesterov: bool,
    /// The coefficients a, b and c of an iteration, X ← a X + (b XXᵀ + c (XXᵀ)²) X. Default: 3.4445, -4.775 and 2.0315.
    pub ns_coefficients: [f64; 3],
    /// The least norm by which the update is divided before the first iteration. Default: 1e-7.
    pub eps: f64,
    /// The number of iterations. Default: 5.
    pub ns_steps: usize,
    /// How the learning rate depends on the shape of a matrix. Default: [`AdjustLr::Original`].
    pub adjust_lr: AdjustLr,
}

/// The factor of the learning rate for a matrix of A rows and B columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdjustLr {
    /// √max(1, A / B).
    Original,
    /// 0.2 √max(A, B), with which the learning rate and weight decay of AdamW can be kept.
    MatchRmsAdamw,
    /// √(A / B).
    SpectralUnclamped,
}

impl Default for ParamsMuon {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            weight_decay: 0.1,
            momentum: 0.95,
            nesterov: true,
            ns_coefficients: [3.4445, -4.775, 2.0315],
            eps: 1e-7,
            ns_steps: 5,
            adjust_lr: AdjustLr::Original,
        }
    }
}

/// The options of a group of parameters of [`Muon`](super::Muon).
#[derive(Clone, Debug)]
pub enum MuonGroup {
    /// The parameters are matrices, kernels of convolutions or stacks of matrices, which Muon updates.
    Muon(ParamsMuon),
    /// AdamW updates the parameters.
    AdamW(ParamsAdamW),
}

impl FusedOptimizer<MuonGroup> {
    /// Muon for matrices, AdamW for all other parameters and for those whose names `by_adamw` accepts. These should be embeddings and
    /// the last layer. They are two groups, Muon's first, each with its own learning rate. [`Debug`](std::fmt::Debug) lists the parameters of
    /// each. Under [sharding](crate::Sharding), each matrix of Muon and its state belong to one rank, so that it takes the time of one rank to
    /// update it.
    ///
    /// Kernels of convolutions and stacks of matrices are AdamW's here. [`from_groups`](Self::from_groups) gives them to Muon, in a group of
    /// [`MuonGroup::Muon`].
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// use candle_ddp::nn::linear;
    /// use candle_ddp::optim::{Muon, Optimizer, ParamsAdamW, ParamsMuon};
    ///
    /// # fn main() -> candle_ddp::Result<()> {
    /// let varmap = VarMap::new();
    /// let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    /// let (hidden, head) = (linear(4, 8, vb.pp("hidden"))?, linear(8, 2, vb.pp("head"))?);
    ///
    /// let (muon, adamw) = (ParamsMuon { lr: 0.02, ..Default::default() }, ParamsAdamW { lr: 0.003, ..Default::default() });
    /// let mut optimizer = Muon::with_adamw(&varmap, muon, adamw, |name| name.starts_with("head"))?;
    ///
    /// let y = head.forward(&hidden.forward(&Tensor::ones((3, 4), DType::F32, &Device::Cpu)?)?.relu()?)?;
    /// optimizer.step(&y.sqr()?.mean_all()?.backward()?)?; // under DDP: ddp.backward(&loss)
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new).
    pub fn with_adamw(
        parameters: impl Into<Parameters>,
        muon: ParamsMuon,
        adamw: ParamsAdamW,
        by_adamw: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        let Parameters { variables, named } = parameters.into();
        Self::of_groups(groups(variables, muon, adamw, by_adamw), named)
    }
}

/// Muon's matrices, and all other parameters.
fn groups(
    variables: Vec<(String, Var)>,
    muon: ParamsMuon,
    adamw: ParamsAdamW,
    by_adamw: impl Fn(&str) -> bool,
) -> Vec<ParameterGroup<MuonGroup>> {
    let is_muons = |(name, var): &(String, Var)| var.rank() == 2 && !by_adamw(name);
    let (matrices, others) = variables.into_iter().partition(is_muons);
    vec![
        ParameterGroup { parameters: matrices, options: MuonGroup::Muon(muon) },
        ParameterGroup { parameters: others, options: MuonGroup::AdamW(adamw) },
    ]
}

impl UpdateRule for MuonGroup {
    const NAME: &'static str = "Muon";

    fn states(&self) -> &'static [&'static str] {
        match self {
            Self::Muon(_) => &["momentum_buffer"],
            Self::AdamW(options) => options.states(),
        }
    }

    fn check(&self) -> Result<()> {
        match self {
            Self::Muon(options) => options.check(),
            Self::AdamW(options) => options.check(),
        }
    }

    fn refuses(&self, parameter: &Var) -> Option<String> {
        let is_fit = matches!(self, Self::AdamW(_)) || parameter.rank() >= 2;
        let shape = describe(parameter.dtype(), parameter.shape());
        (!is_fit).then(|| {
            format!("it must be a matrix, a kernel or a stack of matrices for Muon, but is {shape}: put it into a group of MuonGroup::AdamW")
        })
    }

    fn learning_rate(&self) -> f64 {
        match self {
            Self::Muon(options) => options.lr,
            Self::AdamW(options) => options.lr,
        }
    }

    fn set_learning_rate(&mut self, learning_rate: f64) {
        match self {
            Self::Muon(options) => options.lr = learning_rate,
            Self::AdamW(options) => options.lr = learning_rate,
        }
    }

    fn update(&self, parameter: &Tensor, gradient: &Tensor, states: &mut [Tensor], step: u64) -> Result<Tensor> {
        match self {
            // Autocast would cast the products.
            Self::Muon(options) => autocast_off(|| options.update(parameter, gradient, states)),
            Self::AdamW(options) => options.update(parameter, gradient, states, step),
        }
    }

    fn fused(&self) -> Option<Fused<'_>> {
        match self {
            Self::Muon(_) => None,
            Self::AdamW(options) => options.fused(),
        }
    }
}

impl ParamsMuon {
    fn check(&self) -> Result<()> {
        not_negative("lr", self.lr)?;
        not_negative("weight_decay", self.weight_decay)?;
        fraction("momentum", self.momentum)?;
        not_negative("eps", self.eps)?;
        if self.ns_coefficients.iter().all(|coefficient| coefficient.is_finite()) {
            return Ok(());
        }
        let reason = format!("they must be finite, but are {:?}", self.ns_coefficients);
        Err(Error::invalid("ns_coefficients", reason))
    }

    fn update(&self, parameter: &Tensor, gradient: &Tensor, states: &mut [Tensor]) -> Result<Tensor> {
        let lerp = |from: &Tensor, to: &Tensor, share: f64| combined((from, 1. - share), (to, share));
        let momentum = lerp(gradient, &states[0], self.momentum)?;
        let update = if self.nesterov { lerp(gradient, &momentum, self.momentum)? } else { momentum.clone() };
        states[0] = momentum;
        let (matrices, rows, columns) = matrices(parameter)?;
        let stack = update.reshape((matrices, rows, columns))?;
        let orthogonal = (0..matrices).map(|index| self.orthogonalise(&stack.get(index)?));
        let orthogonal = Tensor::stack(&orthogonal.collect::<Result<Vec<_>>>()?, 0)?;
        let update = orthogonal.reshape(parameter.shape())?.to_dtype(parameter.dtype())?;
        let (rows, columns) = (rows as f64, columns as f64);
        let factor = match self.adjust_lr {
            AdjustLr::Original => (rows / columns).max(1.).sqrt(),
            AdjustLr::MatchRmsAdamw => 0.2 * rows.max(columns).sqrt(),
            AdjustLr::SpectralUnclamped => (rows / columns).sqrt(),
        };
        combined((parameter, 1. - self.lr * self.weight_decay), (&update, -self.lr * factor))
    }

    /// The orthogonal matrix that is nearest to `update`, approximately, in bf16: Newton and Schulz's iteration.
    fn orthogonalise(&self, update: &Tensor) -> Result<Tensor> {
        let (rows, columns) = update.dims2()?;
        let (narrow, wide) = (|x: Tensor| x.to_dtype(DType::BF16), |x: &Tensor| x.to_dtype(DType::F32));
        // The product of the shorter sides is the smaller matrix.
        let flip = |x: Tensor| if rows > columns { x.t()?.contiguous() } else { Ok(x) };
        let mut x = flip(narrow(update.clone())?)?;
        let norm = wide(&narrow(wide(&x)?.sqr()?.sum_all()?.sqrt()?)?)?.maximum(self.eps)?;
        x = narrow(wide(&x)?.broadcast_div(&norm)?)?;
        // On CPUs, as in PyTorch, not rounded before the sums. On GPUs, products of 16 bits are much faster.
        let product = |x: &Tensor, y: &Tensor, is_symmetric| match x.device().is_cpu() {
            true => matmul_sums(x, y, is_symmetric),
            false => wide(&matmul(x, y)?),
        };
        let [a, b, c] = self.ns_coefficients;
        for _ in 0..self.ns_steps {
            let gram = narrow(product(&x, &x.t()?, true)?)?;
            let polynomial = combined((&gram, b), (&product(&gram, &gram, true)?, c))?;
            x = combined((&x, a), (&product(&polynomial, &x, false)?, 1.))?;
        }
        Ok(flip(x)?)
    }
}

/// Two tensors of one shape, each times its factor, added up in the dtype of the second and rounded to that of the first.
fn combined((a, of_a): (&Tensor, f64), (b, of_b): (&Tensor, f64)) -> Result<Tensor> {
    let is_fast = a.device().is_cpu() && b.device().is_cpu() && b.dtype() == accumulator(a.dtype());
    if !is_fast || a.shape() != b.shape() {
        return Ok(((a.to_dtype(b.dtype())? * of_a)? + (b * of_b)?)?.to_dtype(a.dtype())?);
    }
    let (a, b) = (a.contiguous()?, b.contiguous()?);
    let values = dispatch!(a.dtype(), MuonGroup::NAME, T => with_slice::<T, _>(&a, |of| {
        with_slice::<<T as Element>::Real, _>(&b, |b| Ok(slice_tensor(sums((of, of_a), (b, of_b)), a.shape())))
    }));
    Ok(values?)
}

/// The number of elements that a thread takes at a time.
const BLOCK_ELEMENTS: usize = 1 << 14;

fn sums<T: Element>((a, of_a): (&[T], f64), (b, of_b): (&[T::Real], f64)) -> Vec<T> {
    let (of_a, of_b) = (T::Real::from_f64(of_a), T::Real::from_f64(of_b));
    let mut sums = vec![T::from_f64(0.); a.len()];
    let blocks =
        sums.par_chunks_mut(BLOCK_ELEMENTS).zip(a.par_chunks(BLOCK_ELEMENTS)).zip(b.par_chunks(BLOCK_ELEMENTS));
    blocks.for_each(|((sums, a), b)| {
        vectorise!(move || {
            for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
                *sum = T::narrow(a.widen() * of_a + *b * of_b);
            }
        });
    });
    sums
}

/// The number of matrices that Muon sees in a parameter, and their rows and columns.
fn matrices(parameter: &Tensor) -> Result<(usize, usize, usize)> {
    Ok(match *parameter.dims() {
        [matrices, rows, columns] => (matrices, rows, columns),
        // A matrix, or the kernel of a convolution.
        [rows, ref others @ ..] if !others.is_empty() => (1, rows, others.iter().product()),
        _ => return Err(Error::invalid("parameter", "it must be a matrix, a kernel or a stack of matrices")),
    })
}
