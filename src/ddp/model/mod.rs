//! The part of a DDP model that does not depend on its module.
pub(in crate::ddp) mod construct;
pub(in crate::ddp) mod forward;
pub(in crate::ddp) mod memory;
pub(in crate::ddp) mod micro_batches;
pub(in crate::ddp) mod no_grad;
pub(in crate::ddp) mod options;
pub(in crate::ddp) mod parameter;
pub(in crate::ddp) mod precision;
pub(in crate::ddp) mod registry;
pub(in crate::ddp) mod replica;
pub(in crate::ddp) mod sharding;
pub(in crate::ddp) mod virtual_ranks;

use crate::backend;
use crate::ddp::blocks::Blocks;
use crate::ddp::buckets::plan::BucketCaps;
use crate::ddp::buckets::sync;
use crate::ddp::gradients::Marks;
use crate::ddp::gradients::verdict::Verdict;
use crate::ddp::model::options::DdpOptions;
use crate::ddp::model::parameter::{Parameter, Variables};
use crate::ddp::model::sharding::{DDP_NEW, Sharding};
use crate::ddp::reducer::Reducer;
use crate::ddp::reduction::Reduction;
use crate::ddp::watch::first;
use crate::ddp::watch::non_finite::{OnNonFinite, Skipped, warn_of_left_out};
use crate::ddp::watch::pace::Pace;
use crate::ddp::watch::replica_check::Compared;
use crate::ddp::watch::verify;
use crate::ddp::watch::window::Window;
use crate::goes_with::Feature;
use crate::kernels;
use crate::origin;
use crate::panic::lock;
use crate::process_group::ProcessGroup;
use crate::tensor::copy;
use crate::tensor::function::is_grad_enabled;
use crate::trace::{Row, Trace, in_nvtx_range};
use crate::warnings::warn_aloud;
use crate::{Error, ReduceOp, Result};
use candle_core::{DType, Device, Tensor, Var};
use candle_ddp_env::PROCESS;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once};
use std::time::Instant;
use virtual_ranks::Snapshots;

/// A [`DistributedDataParallel`](crate::DistributedDataParallel) model whose module has any type, for lists of models: there,
/// `&ddp` is a reference to this. See [`backward_with`](crate::backward_with).
pub struct DistributedModel {
    pub(in crate::ddp) reducer: Arc<Reducer>,
    pub(in crate::ddp) variables: Variables,
    pub(in crate::ddp) options: DdpOptions,
    pub(in crate::ddp) no_sync: AtomicUsize,
    /// Numbers the models that were built with this group; the same on all ranks.
    pub(in crate::ddp) number: u64,
    /// Whether any rank ignores variables of the model.
    pub(in crate::ddp) ignores: bool,
    /// Agreed orders for backward passes in which this model is given first: the numbers of all models, and the order
    /// of their positions.
    pub(in crate::ddp) orders: Mutex<Vec<(Vec<u64>, Vec<usize>)>>,
    pub(in crate::ddp) marks: Mutex<Marks>,
    pub(in crate::ddp) first: Mutex<Option<bool>>,
    pub(in crate::ddp) snapshots: Mutex<Snapshots>,
    pub(in crate::ddp) pace: Mutex<Pace>,
    /// Whether the last forward pass ran under `no_grad`.
    pub(in crate::ddp) ran_without_graph: AtomicBool,
    pub(in crate::ddp) window: Mutex<Window>,
    pub(in crate::ddp) compared: Compared,
    pub(in crate::ddp) skipped: Mutex<Skipped>,
    /// The verdict on the last step, which `skipped` does not count yet.
    pub(in crate::ddp) late: Mutex<Option<Arc<Verdict>>>,
    /// Where the group keeps `skipped`.
    kept: usize,
    /// Under sharding.
    pub(in crate::ddp) blocks: Option<Blocks>,
}

impl DistributedModel {
    /// Connects this rank's model, or the error that building it caused, with those of the other ranks: ranks compare
    /// their models and take rank 0's values.
    pub(in crate::ddp) fn connect<M>(
        reducer: Arc<Reducer>,
        built: Result<M>,
        variables: Variables,
        blocks: Option<Blocks>,
        mut options: DdpOptions,
    ) -> Result<(M, Self)> {
        let group = reducer.groups().main();
        let built = built.and_then(|module| {
            options.resolve(PROCESS)?;
            options.replica_check.map_or(Ok(()), |check| check.check())?;
            options.policy().check()?;
            check_variables(&reducer, &variables)?;
            if group.world_size() > 1 {
                preload(&variables, &options)?;
            }
            let ranks = group.micro_batches();
            if ranks.is_some() {
                if matches!(options.sharding, Sharding::Blocks { .. }) {
                    Feature::VirtualRanks.goes_with(Feature::ShardedBlocks)?;
                }
                virtual_ranks::check_options(&options, &variables)?;
            }
            if let Some(folder) = &options.trace {
                reducer.set_trace(Trace::open(folder, group.rank())?);
            }
            let is_split = !group.device().is_cpu() && variables.shared().any(|(_, var)| var.device().is_cpu());
            if is_split && options.sharding != Sharding::Off {
                let reason = "it needs all variables on one device, but they are on the CPU and on a GPU: put the whole model on one device, \
                              or use Sharding::Off";
                return Err(Error::invalid("sharding", reason));
            }
            let caps = BucketCaps::new(options.buckets)?;
            Ok((module, caps, ranks, is_split))
        });
        // A rank without a model takes part in the check, so that the others get its error.
        let verdict = verify::same_model(group, &options, built.as_ref().map(|_| &variables));
        let (module, caps, ranks, is_split) = built?;
        verdict?;
        if is_split {
            reducer.groups().add_cpu()?;
        }
        let info = |parameter: &Parameter| {
            let block = blocks.as_ref().and_then(|blocks| blocks.owners.get(&parameter.name).copied());
            parameter.info(&options, block)
        };
        let parameters = variables.parameters.iter().map(info).collect();
        let reduction = Reduction::new(options.sharding, ranks, reducer.groups())?;
        reducer.set_parameters(parameters, caps, options.policy(), reduction)?;
        let shared = variables.shared().filter(|_| blocks.is_none());
        let buffers = variables.buffers.iter().filter(|_| blocks.is_some()).map(|buffer| &buffer.var);
        sync::broadcast(reducer.groups(), shared.map(|(_, var)| var).chain(buffers), 0)?.finish()?;
        if let Some(parameter) = variables.parameters.first() {
            reducer.identity().is_built(&parameter.var.as_detached_tensor());
        }
        let (number, ignores) = agreed(group, !variables.ignored.is_empty())?;
        if let Some(blocks) = &blocks {
            reducer.identity().is_spread(number, &blocks.units);
        }
        let (no_sync, orders) = (AtomicUsize::new(0), Mutex::default());
        let sharded_by = (options.sharding != Sharding::Off).then(|| Arc::clone(&reducer));
        let (marks, first) = (Mutex::new(Marks::new(&variables, sharded_by)?), Mutex::default());
        let (snapshots, pace, ran_without_graph, window, compared) = Default::default();
        let (kept, numbers) = group.keep();
        let skipped = Mutex::new(Skipped::from(numbers));
        let model = Self {
            reducer,
            variables,
            options,
            no_sync,
            number,
            ignores,
            orders,
            marks,
            first,
            snapshots,
            pace,
            ran_without_graph,
            window,
            compared,
            skipped,
            late: Mutex::default(),
            kept,
            blocks,
        };
        Ok((module, model))
    }

    pub(in crate::ddp) fn group(&self) -> &ProcessGroup {
        self.reducer.groups().main()
    }

    /// Changes what is known of the steps that were left out, also where an elastic run keeps it.
    pub(in crate::ddp) fn count_skipped<T>(&self, change: impl FnOnce(&mut Skipped) -> T) -> T {
        let mut skipped = lock(&self.skipped);
        let changed = change(&mut skipped);
        self.group().keep_numbers(self.kept, skipped.numbers());
        changed
    }

    /// Counts the last step, if the host does not know yet whether it was left out. Waits for the verdict.
    pub(in crate::ddp) fn settle_late(&self) -> Result<()> {
        let Some(verdict) = lock(&self.late).take() else { return Ok(()) };
        let is_bad = verdict.is_bad()?;
        let total = self.count_skipped(|skipped| {
            skipped.pass(true, !is_bad);
            skipped.total
        });
        if is_bad && self.group().rank() == 0 {
            if total == 1 {
                warn_of_left_out("the last step", "a gradient is not finite");
            }
            if !verdict.is_followed() {
                warn_aloud(format_args!(
                    "a gradient of the last step is not finite, and no optimizer of candle-ddp has got the gradients, to leave out the step \
                     (OnNonFinite::Skip). If another optimizer has, the parameters are not finite either: go back to a checkpoint"
                ));
            }
        }
        Ok(())
    }

    /// Whether a backward pass that begins now sends gradients.
    pub(in crate::ddp) fn synchronises(&self) -> bool {
        self.no_sync.load(Ordering::Relaxed) == 0
    }

    /// Refuses a feature under sharding, where no rank has the whole model.
    pub(in crate::ddp) fn check_whole(&self, feature: Feature) -> Result<()> {
        self.blocks.as_ref().map_or(Ok(()), |_| feature.goes_with(Feature::ShardedBlocks))
    }

    /// Whether gradients arrive during candle's backward pass.
    pub(in crate::ddp) fn has_replicas(&self) -> bool {
        self.variables.parameters.iter().any(|parameter| parameter.replica().is_some())
    }

    pub(in crate::ddp) fn marks(&self) -> MutexGuard<'_, Marks> {
        lock(&self.marks)
    }

    /// The dtype of the `VarBuilder` with which the model is built.
    pub(in crate::ddp) fn held_as(&self) -> DType {
        self.options.precision.held_as()
    }

    /// Prepares a forward pass, with the model's own tensors or the tensors of its model for `no_grad`.
    pub(in crate::ddp) fn begin_forward(&self, of_no_grad_model: bool) -> Result<()> {
        self.ran_without_graph.store(!is_grad_enabled(), Ordering::Relaxed);
        if !is_grad_enabled() {
            origin::evaluates();
        }
        self.phase("refresh", || self.refresh(of_no_grad_model))
    }

    /// Call when a forward pass is over.
    pub(in crate::ddp) fn end_forward(&self) {
        if let Some(blocks) = &self.blocks {
            blocks.units.end_forward();
        }
    }

    /// The result of a forward pass, copied if it is a view of a parameter whose memory would be freed.
    pub(in crate::ddp) fn own(&self, result: Tensor) -> candle_core::Result<Tensor> {
        match &self.blocks {
            Some(blocks) => blocks.units.own(result),
            None => Ok(result),
        }
    }

    /// Updates the replicas, and converted frozen tensors, from the variables. The model for `no_grad` needs only tensors whose
    /// dtype differs from the dtype of their variables.
    fn refresh(&self, only_converted: bool) -> Result<()> {
        self.reducer.identity().backward_is_over();
        first::look(&mut lock(&self.first), &self.variables.parameters)?;
        // Without a graph, no backward pass follows.
        if self.group().virtual_ranks().is_some() && is_grad_enabled() {
            lock(&self.pace).begin(Instant::now());
            if self.reducer.is_between_steps() {
                lock(&self.snapshots).keep(&self.variables.buffers)?;
            }
        } else if matches!(self.options.policy(), OnNonFinite::Skip { .. }) && is_grad_enabled() {
            lock(&self.snapshots).keep_first(&self.variables.buffers)?;
        }
        if let Some(blocks) = &self.blocks {
            blocks.units.begin_forward()?;
            if let Some(parameter) = self.variables.parameters.first() {
                self.reducer.identity().is_updated(None, &parameter.var.as_detached_tensor());
            }
            return Ok(());
        }
        // candle cannot report that a variable changed, so all are copied every time. The last ones come first: the
        // optimizer has just written them, and the model reads the first ones first.
        let replicas = self.variables.parameters.iter().rev();
        let held = if only_converted { Parameter::converted } else { Parameter::replica };
        let replicas = replicas.filter_map(|parameter| Some((held(parameter)?, &*parameter.var)));
        let frozen = self.variables.frozen.iter();
        let converted = frozen.filter_map(|frozen| Some((frozen.converted.as_ref()?, &*frozen.var)));
        let updated = copy::update_all(replicas.chain(converted))?;
        if only_converted && updated == Some(false) {
            return Ok(()); // others may have changed
        }
        // Without replicas, the model computes with the variables themselves.
        let changed = if self.has_replicas() { updated } else { None };
        if let Some(parameter) = self.variables.parameters.first() {
            self.reducer.identity().is_updated(changed, &parameter.var.as_detached_tensor());
        }
        Ok(())
    }

    /// Warns that a forward pass under `no_grad` has recorded a graph.
    pub(in crate::ddp) fn warn_of_graph(&self) {
        static ONCE: Once = Once::new();
        if self.group().rank() == 0 {
            ONCE.call_once(|| {
                log::warn!(
                    "under no_grad, the forward pass of the model with the parameter {} has kept activations all the same: candle's \
                     own operations record a graph if they get a parameter directly. Build the model a second time, from tensors \
                     that candle does not track: `DistributedDataParallel::new(…)?.with_no_grad_model(build)?`",
                    self.first_name()
                );
            });
        }
    }

    /// The name of the first parameter, by which messages call the model.
    pub(in crate::ddp) fn first_name(&self) -> &str {
        self.variables.parameters.first().map_or("", |parameter| &parameter.name)
    }

    /// Runs `f`, and shows it as `name` in NVIDIA's tools, and in the trace if there is one.
    pub(in crate::ddp) fn phase<T>(&self, name: &str, f: impl FnOnce() -> T) -> T {
        let f = || in_nvtx_range(name, f);
        let Some(trace) = self.reducer.trace() else { return f() };
        let start = Instant::now();
        let result = f();
        // The host runs ahead of a GPU. The next operation reports any error of the GPU.
        let _ = self.group().device().synchronize();
        // The name is written into JSON unescaped.
        let name: String = name.chars().filter(|c| !c.is_control() && !"\"\\".contains(*c)).collect();
        trace.span(Row::Training, name, start, Instant::now());
        result
    }
}

/// Shows the model without its values. Nothing here waits for a lock, so a backward pass may show it.
impl fmt::Debug for DistributedModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Variables { parameters, frozen, buffers, ignored } = &self.variables;
        f.debug_struct("DistributedDataParallel")
            .field("parameters", &parameters.len())
            .field("elements", &parameters.iter().map(|parameter| parameter.var.elem_count()).sum::<usize>())
            .field("frozen", &frozen.len())
            .field("buffers", &buffers.len())
            .field("ignored", &ignored.len())
            .field("options", &self.options)
            .field("process_group", self.group())
            .finish_non_exhaustive()
    }
}

/// A number that no other model of this group has, and whether any rank `ignores` variables; the same on all ranks.
fn agreed(group: &ProcessGroup, ignores: bool) -> Result<(u64, bool)> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    if group.world_size() == 1 {
        return Ok((number, ignores));
    }
    // Rank 0's number.
    let own = if group.rank() == 0 { number as f64 } else { -1. };
    let of_all = Tensor::new(&[own, f64::from(u8::from(ignores))], group.device())?;
    DDP_NEW.during(|| group.all_reduce(&of_all, ReduceOp::Max))?;
    let of_all = of_all.to_vec1::<f64>()?;
    Ok((of_all[0] as u64, of_all[1] > 0.))
}

/// Loads the kernels that the model and its training may need, before the first collective.
fn preload(variables: &Variables, options: &DdpOptions) -> Result<()> {
    let precision = options.precision;
    let shared = || variables.shared().map(|(_, var)| var);
    let mut dtypes: Vec<DType> = shared().map(|var| var.dtype()).collect();
    let more = [Some(DType::F32), precision.param_dtype(), options.buckets.reduce_dtype, precision.buffer_dtype()];
    dtypes.extend(more.into_iter().flatten());
    dtypes.sort_by_key(DType::as_str);
    dtypes.dedup();
    let mut devices: Vec<&Device> = Vec::new();
    for var in shared() {
        if !devices.iter().any(|device| device.same_device(var.device())) {
            devices.push(var.device());
        }
    }
    devices.into_iter().try_for_each(|device| Ok(kernels::preload(device, &dtypes)?))
}

/// Checks the variables against the requirements of the reducer and the broadcasts.
fn check_variables(reducer: &Reducer, variables: &Variables) -> Result<()> {
    if variables.parameters.is_empty() {
        let reason = "it has no trainable parameter, so there is nothing to average: build it with the VarBuilder \
                      that is handed to the closure, or wrap it with `from_vars`; DdpOptions.role must leave some";
        return Err(Error::invalid("model", reason));
    }
    for (name, var) in variables.shared() {
        check_variable(reducer, name, var)?;
    }
    Ok(())
}

fn check_variable(reducer: &Reducer, name: &str, var: &Var) -> Result<()> {
    if !backend::takes(var.dtype()) {
        let reason = format!(
            "its dtype is {}, which cannot be sent to other ranks (f32, f64, f16 and bf16 can, and for buffers i64, \
             u32 and u8): make it in one of these, or leave it to each rank with Role::Ignored",
            var.dtype().as_str()
        );
        return Err(Error::parameter(name, reason));
    }
    if !reducer.groups().serve(var.device()) {
        return Err(Error::parameter(name, elsewhere(var.device(), reducer.groups().main().device())));
    }
    if !var.is_contiguous() {
        return Err(Error::parameter(name, "its variable is not contiguous: make it from a contiguous tensor"));
    }
    Ok(())
}

fn elsewhere(is: &Device, belongs: &Device) -> String {
    let (is, works) = (is.location(), belongs.location());
    let what = if is == works { ", with another candle Device" } else { "" };
    format!(
        "it is on {is:?}{what}, but the process group works on {works:?}, and parameters must be on that device or on the CPU: \
         use the VarBuilder that is passed to your closure, which is on the device of the group, `pg.device()`"
    )
}
