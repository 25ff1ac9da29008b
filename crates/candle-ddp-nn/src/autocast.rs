//! Functions that cast their arguments: PyTorch's autocast.
use candle_core::op::BackpropOp;
use candle_core::{DType, Result, Tensor};
use candle_ddp_tensor::copy::snapshot_tensor;
use candle_ddp_tensor::function::{Function, apply_in};
use candle_ddp_tensor::{Error, MemoryFormat};
use std::cell::Cell;

/// Which functions cast their arguments, and to which dtype, [`F16`](DType::F16) or [`BF16`](DType::BF16).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Autocast {
    /// Each function casts by PyTorch's lists: products compute in the dtype and return it; softmax, norms and losses compute in f32 and
    /// return it; a sum has the wider dtype of its arguments. `torch.autocast`, and O1 of Apex.
    ///
    /// candle's own operations do not cast, and refuse arguments of two dtypes. A model in which they meet needs
    /// [`add`](crate::add()) for residual connections, [`matmul`](crate::matmul()) and [`cat`](crate::cat) in place of candle's,
    /// [`Tensor::to_dtype`], or [`Products`](Self::Products).
    Lists(DType),
    /// Products compute in the dtype, and their results have the dtype of their first argument: PyTorch's `fp32_precision = "bf16"`.
    /// No other function sees 16 bits, so any model of f32 can be trained with it.
    Products(DType),
}

impl Autocast {
    /// The dtype of products.
    fn dtype(self) -> DType {
        match self {
            Self::Lists(dtype) | Self::Products(dtype) => dtype,
        }
    }

    /// Refuses a dtype that is not of 16 bits.
    #[doc(hidden)]
    pub fn check(self) -> candle_ddp_tensor::Result<()> {
        match self.dtype() {
            DType::F16 | DType::BF16 => Ok(()),
            dtype => Err(Error::invalid("autocast", format!("its dtype must be F16 or BF16, not {dtype:?}"))),
        }
    }
}

/// [`Autocast::Lists`], as in `torch.autocast`.
impl From<DType> for Autocast {
    fn from(dtype: DType) -> Self {
        Self::Lists(dtype)
    }
}

thread_local! {
    static MODE: Cell<Option<Autocast>> = const { Cell::new(None) };
}

/// Runs `f` with functions that cast their arguments: `torch.autocast`. `mode` may be a dtype, which means [`Autocast::Lists`].
///
/// It casts nothing that is f64 or not a floating-point number. Gradients have the dtypes of the arguments before the casts, so those
/// of f32 parameters are f32. The backward pass should run outside: it uses the dtypes of the forward pass by itself, and
/// [`checkpoint`](crate::checkpoint) casts in its second run as in the first.
///
/// Regions may be nested; [`autocast_off`] inside of one casts nothing. The state ends with `f`, also if it panics. It belongs to
/// this thread: a thread that works for another one uses [`set_autocast`]. candle-ddp's `DataParallel` passes it on to its own
/// threads.
///
/// Each product casts its parameters when it runs, so a parameter may change at any time, also inside of the region; torch.autocast keeps
/// casts until its region ends. Linear layers, convolutions and [`matmul`](crate::matmul()) cast f32 weights again in the backward pass
/// instead of keeping the casts. On the CPU, linear layers round their weights while they multiply, and never cast them; their gradients
/// are sums in f32, not rounded to 16 bits.
///
/// ```
/// # use candle_core::{DType, Device, Module, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// # fn main() -> candle_core::Result<()> {
/// use candle_ddp_nn::{autocast, linear, softmax_last_dim};
/// # let varmap = VarMap::new();
/// # let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
/// let layer = linear(8, 4, vb)?;
/// let x = Tensor::ones((2, 8), DType::F32, &Device::Cpu)?;
/// let (y, weights) = autocast(DType::BF16, || {
///     let y = layer.forward(&x)?;
///     candle_core::Result::Ok((y.clone(), softmax_last_dim(&y)?))
/// })?;
/// assert_eq!((y.dtype(), weights.dtype()), (DType::BF16, DType::F32));
/// let grads = weights.sqr()?.sum_all()?.backward()?;
/// assert_eq!(grads.get(layer.weight()).unwrap().dtype(), DType::F32);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// A function that casts returns [`InvalidArgument`](Error::Base), carried by candle's error, if the dtype is neither f16 nor bf16.
pub fn autocast<T>(mode: impl Into<Autocast>, f: impl FnOnce() -> T) -> T {
    set_autocast(Some(mode.into()), f)
}

/// Runs `f` without casts, inside of [`autocast`] too: `torch.autocast(enabled=False)`.
pub fn autocast_off<T>(f: impl FnOnce() -> T) -> T {
    set_autocast(None, f)
}

/// Runs `f` under [`autocast`] or [`autocast_off`]. A thread that works for another thread passes that thread's [`autocast_mode`].
pub fn set_autocast<T>(mode: Option<Autocast>, f: impl FnOnce() -> T) -> T {
    let _restored = Restore(MODE.replace(mode));
    f()
}

/// How functions of this thread cast; None outside of [`autocast`].
pub fn autocast_mode() -> Option<Autocast> {
    MODE.get()
}

/// Gives the thread its earlier state back.
struct Restore(Option<Autocast>);

impl Drop for Restore {
    fn drop(&mut self) {
        MODE.set(self.0);
    }
}

/// The casts of a product.
pub(crate) struct Casts(Autocast);

impl Casts {
    /// None if a product of these arguments casts nothing.
    pub(crate) fn of_product<'a>(arguments: impl IntoIterator<Item = &'a Tensor>) -> Result<Option<Self>> {
        let Some(mode) = autocast_mode() else { return Ok(None) };
        mode.check()?;
        let changes = arguments.into_iter().any(|argument| is_cast(argument) && argument.dtype() != mode.dtype());
        Ok(changes.then_some(Self(mode)))
    }

    /// An argument in the dtype of the product. It is cast anew each time: candle does not tell when a tensor has been written to.
    pub(crate) fn of(&self, x: &Tensor) -> Result<Tensor> {
        if is_cast(x) { to_dtype(x, self.0.dtype()) } else { Ok(x.clone()) }
    }

    /// A parameter of a product that rounds it by itself if it is f32, in both passes, so that no graph holds the cast; otherwise as
    /// [`of`](Self::of).
    pub(crate) fn unrounded(&self, parameter: &Tensor) -> Result<Tensor> {
        if parameter.dtype() == DType::F32 { Ok(parameter.clone()) } else { self.of(parameter) }
    }

    /// The dtype in which a product computes with this argument.
    pub(crate) fn dtype_of(&self, x: &Tensor) -> DType {
        if is_cast(x) { self.0.dtype() } else { x.dtype() }
    }

    /// The result `y` of a product whose first argument was `x`.
    pub(crate) fn result(&self, y: Tensor, x: &Tensor) -> Result<Tensor> {
        match self.0 {
            Autocast::Products(_) if is_cast(x) => to_dtype(&y, x.dtype()),
            _ => Ok(y),
        }
    }
}

/// The argument of a function that computes in f32: softmax, norms.
pub(crate) fn wide(x: &Tensor) -> Result<Tensor> {
    if is_widened(x)? { to_dtype(x, DType::F32) } else { Ok(x.clone()) }
}

/// Whether [`wide`] casts this argument.
pub(crate) fn is_widened(x: &Tensor) -> Result<bool> {
    match autocast_mode() {
        Some(mode @ Autocast::Lists(_)) => {
            mode.check()?;
            Ok(is_cast(x) && x.dtype() != DType::F32)
        }
        _ => Ok(false),
    }
}

/// The arguments of a sum, in the wider of their dtypes; f32 for f16 and bf16.
pub(crate) fn widest(a: &Tensor, b: &Tensor) -> Result<[Tensor; 2]> {
    if is_mixed(&[a, b]) { Ok([wide(a)?, wide(b)?]) } else { Ok([a.clone(), b.clone()]) }
}

/// Whether the arguments have several dtypes, of those that autocast may change.
pub(crate) fn is_mixed(arguments: &[&Tensor]) -> bool {
    arguments.iter().all(|x| is_cast(x)) && arguments.windows(2).any(|two| two[0].dtype() != two[1].dtype())
}

/// Whether autocast may change the tensor's dtype.
fn is_cast(x: &Tensor) -> bool {
    matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16)
}

/// `x` in another floating-point dtype, in the same memory format. The gradient has the dtype of `x`, and candle adds it to nothing.
pub fn to_dtype(x: &Tensor, dtype: DType) -> Result<Tensor> {
    if x.dtype() == dtype {
        return Ok(x.clone());
    }
    let format = MemoryFormat::of(x);
    let result = snapshot_tensor(&format.stored(&x.detach())?, dtype)?;
    apply_in(format, &[x], result, Cast { from: x.dtype() })
}

struct Cast {
    from: DType,
}

impl Function for Cast {
    fn name(&self) -> &'static str {
        "autocast"
    }

    fn backward(&self, gradient: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let format = MemoryFormat::of(gradient);
        let (storage, shape) = snapshot_tensor(&format.stored(gradient)?, self.from)?;
        Ok(vec![Some(format.view(&Tensor::from_storage(storage, shape, BackpropOp::none(), false))?)])
    }
}
