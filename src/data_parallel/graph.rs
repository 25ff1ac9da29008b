//! Cutting candle's graph so that the replicas' backward passes can run concurrently. The README in this folder has a
//! diagram.
use super::apply::on_each;
use super::replica::DeviceVariables;
use super::scatter_gather::{gather, scatter, transfer};
use crate::tensor::function::{self, keyed};
use crate::{Error, Result};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, TensorId, Var};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

/// Computes the gradients of `loss` with respect to all variables that it depends on, including through outputs of any
/// number of [`DataParallel`](super::DataParallel) models. Use it instead of candle's `loss.backward()`. The gradients
/// of parameters are summed over the replicas on the first device.
///
/// # Errors
/// Returns [`Error::Replica`], which names the device, if a replica fails or panics; [`Error::InvalidArgument`] if `loss` has no
/// graph, so that nothing would be trained.
pub fn backward(loss: &Tensor) -> Result<GradStore> {
    if !loss.track_op() {
        let reason = "it has no graph, so no gradient flows from it: compute it outside of no_grad, from the model's outputs and not \
                      from detached tensors";
        return Err(Error::invalid("loss", reason));
    }
    let (mut grads, found) = run(loss)?;
    for (variable, gradient) in found {
        let sum = match grads.remove(&variable) {
            Some(sum) => (sum + gradient)?.detach(),
            None => gradient,
        };
        grads.insert(&variable, sum);
    }
    Ok(grads)
}

/// Variables with their gradients.
type Gradients = Vec<(Tensor, Tensor)>;

/// Runs candle's backward pass and returns its gradients, and those that the replicas' backward passes computed.
fn run(loss: &Tensor) -> Result<(GradStore, Gradients)> {
    let guard = Guard(BACKWARD.replace(Some(Backward::default())));
    let grads = {
        let _pass = function::Pass::begin();
        loss.backward()
    };
    let Backward { found, .. } = BACKWARD.take().unwrap_or_default();
    drop(guard);
    Ok((grads?, found))
}

thread_local! {
    /// The backward pass that DataParallel runs on this thread, if any.
    static BACKWARD: RefCell<Option<Backward>> = const { RefCell::new(None) };
}

/// The results of a backward pass so far.
#[derive(Default)]
struct Backward {
    /// The gradients of gathered outputs, by pass and output index.
    outputs: HashMap<(usize, usize), Tensor>,
    /// The gradients of inputs, in the replicas' parts, by pass and input index.
    inputs: HashMap<(usize, usize), Vec<Tensor>>,
    found: Gradients,
}

/// Restores the enclosing backward pass of this thread, if there is one.
struct Guard(Option<Backward>);

impl Drop for Guard {
    fn drop(&mut self) {
        BACKWARD.set(self.0.take());
    }
}

/// Calls `work` with this thread's backward pass.
///
/// # Errors
/// Returns [`Error::BackwardOutside`] if there is none.
fn with_backward<T>(work: impl FnOnce(&mut Backward) -> T) -> Result<T> {
    let outside = || Error::BackwardOutside {
        wrapper: "DataParallel",
        reached: "its output, so that its replicas' parameters would get no gradients".to_string(),
    };
    BACKWARD.with_borrow_mut(|backward| backward.as_mut().map(work)).ok_or_else(outside)
}

/// A forward pass's inputs: their parts for each replica, and the data for the gradients.
pub(super) struct Inputs {
    originals: Vec<Tensor>,
    /// For each input that needs a gradient, the leaf variables that replace it on the replicas.
    leaves: Vec<Option<Vec<Var>>>,
    parts: Vec<Vec<Tensor>>,
}

impl Inputs {
    /// Scatters the inputs over the devices, detached from their graphs.
    pub(super) fn cut(inputs: &[&Tensor], devices: &[Device]) -> Result<Self> {
        let rows = |tensor: &Tensor| tensor.dims().first().copied();
        let Some(first) = inputs.first() else {
            return Err(Error::invalid("inputs", "there must be at least one tensor to split over the devices"));
        };
        if let Some(other) = inputs.iter().find(|input| rows(input) != rows(first)) {
            let reason = format!(
                "all must have the same number of rows, but there are {:?} and {:?}: expand tensors that are the same for \
                 all rows, or create them in the closure",
                first.dims(),
                other.dims()
            );
            return Err(Error::invalid("inputs", reason));
        }
        let (mut leaves, mut parts) = (Vec::new(), vec![Vec::new(); devices.len()]);
        for input in inputs {
            let mut pieces = scatter(&input.detach(), devices)?;
            let mut vars = None;
            if wants_gradient(input) {
                let made = pieces.iter().map(Var::from_tensor).collect::<candle_core::Result<Vec<_>>>()?;
                pieces = made.iter().map(|var| var.as_tensor().clone()).collect();
                vars = Some(made);
            }
            parts.truncate(pieces.len());
            leaves.push(vars);
            parts.iter_mut().zip(pieces).for_each(|(parts, piece)| parts.push(piece));
        }
        Ok(Self { originals: inputs.iter().map(|input| (*input).clone()).collect(), leaves, parts })
    }

    /// Takes the inputs of each replica.
    pub(super) fn parts(&mut self) -> Vec<Vec<Tensor>> {
        std::mem::take(&mut self.parts)
    }
}

/// Returns whether candle's backward pass would continue to the tensor, as far as that shows without traversing its
/// graph.
fn wants_gradient(tensor: &Tensor) -> bool {
    tensor.dtype().is_float() && function::is_tracked(tensor)
}

/// A forward pass through the replicas. The gathered outputs keep it alive, and with it the replicas' graphs.
struct Pass {
    locals: Vec<Arc<DeviceVariables>>,
    /// For each input, its leaves as in [`Inputs`].
    leaves: Vec<Option<Vec<Var>>>,
    /// The outputs of each replica.
    outputs: Vec<Vec<Tensor>>,
}

/// Gathers the replicas' outputs on the device of `root`, as tensors that depend on it and on the inputs.
pub(super) fn join(
    locals: Vec<Arc<DeviceVariables>>,
    inputs: Inputs,
    outputs: Vec<Vec<Tensor>>,
    root: &Var,
) -> Result<Vec<Tensor>> {
    let count = outputs.first().map_or(0, Vec::len);
    if let Some(index) = outputs.iter().position(|outputs| outputs.len() != count) {
        let reason = format!("replica {index} returned {}, but replica 0 returned {count}", outputs[index].len());
        return Err(Error::invalid("outputs", reason));
    }
    let mut gathered = Vec::with_capacity(count);
    let mut tracked = Vec::with_capacity(count);
    for number in 0..count {
        let of_replicas: Vec<Tensor> = outputs.iter().map(|outputs| outputs[number].detach()).collect();
        gathered.push(gather(&of_replicas, root.device())?);
        tracked.push(outputs.iter().any(|outputs| wants_gradient(&outputs[number])));
    }
    if !tracked.contains(&true) {
        return Ok(gathered);
    }
    let pass = Arc::new(Pass { locals, leaves: inputs.leaves, outputs });
    let token = pass.token(root, &inputs.originals)?;
    let attach = |(number, (value, tracked)): (usize, (Tensor, bool))| match tracked {
        true => Ok(pass.attach(&value, &token, number)?),
        false => Ok(value),
    };
    gathered.into_iter().zip(tracked).enumerate().map(attach).collect()
}

impl Pass {
    /// A gathered output: its value, as a function of the pass's token, which candle reaches after all outputs.
    fn attach(self: &Arc<Self>, value: &Tensor, token: &Tensor, number: usize) -> candle_core::Result<Tensor> {
        let pass = Arc::clone(self);
        keyed("data-parallel-output", value, token, move |token, gradient| {
            let key = (pass.id(), number);
            with_backward(|backward| backward.outputs.insert(key, gradient.clone()))?;
            Ok((None, Some(token.zeros_like()?)))
        })
    }

    /// Returns this pass's id in a [`Backward`], which does not outlive the pass.
    fn id(self: &Arc<Self>) -> usize {
        Arc::as_ptr(self) as usize
    }

    /// Creates a scalar between the outputs and their inputs. candle reaches it after all outputs and then
    /// continues to the inputs.
    fn token(self: &Arc<Self>, root: &Var, inputs: &[Tensor]) -> Result<Tensor> {
        let mut sum = root.as_tensor().clone();
        for (number, input) in inputs.iter().enumerate() {
            if self.leaves[number].is_some() {
                let pass = Arc::clone(self);
                let scattered_input = Token::new(root.device(), move |input: &Tensor| {
                    let parts = with_backward(|backward| backward.inputs.remove(&(pass.id(), number)))?;
                    Ok(Some(gather(&parts.unwrap_or_default(), input.device())?))
                });
                // This only copies between a GPU and the CPU, because a copy between GPUs would not be waited for.
                sum = (sum + input.apply_op1(scattered_input)?.to_device(root.device())?)?;
            }
        }
        let pass = Arc::clone(self);
        let replicas = Token::new(root.device(), move |sum: &Tensor| {
            pass.backward()?;
            if sum.is_variable() { Ok(None) } else { Ok(Some(sum.zeros_like()?)) }
        });
        Ok(sum.apply_op1(replicas)?)
    }

    /// Runs the backward passes of all replicas, from the collected gradients of the outputs.
    fn backward(self: &Arc<Self>) -> Result<()> {
        let mut seeds: Vec<Vec<(usize, Tensor)>> = vec![Vec::new(); self.locals.len()];
        for number in 0..self.outputs[0].len() {
            if let Some(gradient) = with_backward(|backward| backward.outputs.remove(&(self.id(), number)))? {
                for (seeds, part) in seeds.iter_mut().zip(self.split(number, &gradient)?) {
                    seeds.push((number, part));
                }
            }
        }
        let found = on_each(&self.locals, seeds, |index, seeds| self.replica_backward(index, seeds))?;
        self.collect(found)
    }

    /// Returns each replica's rows of the gradient of output `number`, on that replica's device.
    fn split(&self, number: usize, gradient: &Tensor) -> Result<Vec<Tensor>> {
        let mut start = 0;
        let mut moves = Vec::with_capacity(self.locals.len());
        for (outputs, local_variables) in self.outputs.iter().zip(&self.locals) {
            let rows = outputs[number].dims().first().copied().unwrap_or(1);
            moves.push((gradient.narrow(0, start, rows)?, &local_variables.device));
            start += rows;
        }
        transfer(&moves)
    }

    /// Runs one replica's backward pass, on its own thread. Returns the gradients of the variables that it reached.
    fn replica_backward(&self, index: usize, seeds: Vec<(usize, Tensor)>) -> Result<Gradients> {
        let mut total: Option<Tensor> = None;
        for (number, gradient) in seeds {
            let output = &self.outputs[index][number];
            if wants_gradient(output) {
                let gradient = gradient.reshape(output.shape())?;
                let seed =
                    output.apply_op1(Token::new(output.device(), move |_: &Tensor| Ok(Some(gradient.clone()))))?;
                total = Some(total.map_or_else(|| Ok(seed.clone()), |total| &total + &seed)?);
            }
        }
        let Some(total) = total else { return Ok(Vec::new()) };
        let (mut grads, mut found) = run(&total)?;
        for node in total.sorted_nodes() {
            if node.is_variable()
                && let Some(gradient) = grads.remove(node)
            {
                found.push((node.clone(), gradient.detach()));
            }
        }
        Ok(found)
    }

    /// Collects the replicas' results: gradients of copies are summed on the first device in the order of the replicas,
    /// gradients of an input's parts are stored for the input, and gradients of variables outside the model are summed
    /// where these are.
    fn collect(self: &Arc<Self>, found: Vec<Gradients>) -> Result<()> {
        let mut sums: HashMap<TensorId, (Tensor, Tensor)> = HashMap::new();
        let mut of_parts: HashMap<TensorId, Tensor> = HashMap::new();
        let leaves: Vec<TensorId> = self.leaves.iter().flatten().flatten().map(|leaf| leaf.id()).collect();
        for (local_variables, found) in self.locals.iter().zip(found) {
            let variables: HashMap<TensorId, &Var> =
                local_variables.variables.iter().map(|variable| (variable.local.id(), &variable.var)).collect();
            let mut variables_of_found = Vec::with_capacity(found.len());
            let mut gradients = Vec::with_capacity(found.len());
            for (variable, gradient) in found {
                if leaves.contains(&variable.id()) {
                    of_parts.insert(variable.id(), gradient);
                } else {
                    let belongs = variables.get(&variable.id()).map_or(&variable, |var| var.as_tensor()).clone();
                    variables_of_found.push(belongs);
                    gradients.push(gradient);
                }
            }
            let moves: Vec<_> = gradients.into_iter().zip(variables_of_found.iter().map(|var| var.device())).collect();
            let moved = transfer(&moves)?;
            for (variable, gradient) in variables_of_found.iter().zip(moved) {
                let sum = match sums.remove(&variable.id()) {
                    Some((_, sum)) => (sum + gradient)?.detach(),
                    None => gradient,
                };
                sums.insert(variable.id(), (variable.clone(), sum));
            }
        }
        with_backward(|backward| backward.found.extend(sums.into_values()))?;
        for (number, leaves) in self.leaves.iter().enumerate() {
            let Some(leaves) = leaves else { continue };
            // candle requires a gradient even if nothing depends on a part.
            let parts = leaves.iter().map(|leaf| of_parts.remove(&leaf.id()).map_or_else(|| leaf.zeros_like(), Ok));
            let parts = parts.collect::<candle_core::Result<Vec<_>>>()?;
            with_backward(|backward| backward.inputs.insert((self.id(), number), parts))?;
        }
        Ok(())
    }
}

/// A scalar zero made from a tensor. Its backward pass calls a function that gets the tensor and returns its gradient.
struct Token<F> {
    /// The device of the scalar, which may differ from the tensor's.
    device: Device,
    backward: F,
}

impl<F: Fn(&Tensor) -> Result<Option<Tensor>>> Token<F> {
    fn new(device: &Device, backward: F) -> Self {
        Self { device: device.clone(), backward }
    }
}

impl<F: Fn(&Tensor) -> Result<Option<Tensor>>> CustomOp1 for Token<F> {
    fn name(&self) -> &'static str {
        "data-parallel-token"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        let device = match &self.device {
            Device::Cuda(device) => device,
            _ => storage.device(),
        };
        Ok((device.zeros_impl(&Shape::from(()), DType::F32)?, Shape::from(())))
    }

    fn bwd(&self, arg: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok((self.backward)(arg)?)
    }
}
