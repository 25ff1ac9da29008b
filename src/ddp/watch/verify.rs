//! Checks that all ranks hold the same model and the same communication hook.
use crate::backend::Purpose;
use crate::ddp::buckets::plan::DDP_ORDER;
use crate::ddp::model::options::DdpOptions;
use crate::ddp::model::parameter::Variables;
use crate::ddp::model::sharding::{DDP_NEW, Sharding};
use crate::error::describe;
use crate::process_group::ProcessGroup;
use crate::{Error, Result};
use candle_core::{Shape, Var};

static DDP_HOOK: Purpose = Purpose::of("register_comm_hook");
static JOIN_NEW: Purpose = Purpose::of("join");

/// Checks that all ranks built the same model with the same options; `model` is this rank's, or the reason why it has
/// none. Every rank gets the same result; in PyTorch only the mismatching rank raises an error, and the others hang.
pub(in crate::ddp) fn same_model(
    group: &ProcessGroup,
    options: &DdpOptions,
    model: std::result::Result<&Variables, &Error>,
) -> Result<()> {
    let virtual_ranks = group.virtual_ranks();
    let report =
        model.map(|variables| format!("virtual ranks: {virtual_ranks:?}\n{}", describe_model(options, variables)));
    match DDP_NEW.during(|| group.compare(report, "it could not build its model"))? {
        None => Ok(()),
        Some((rank, difference)) => Err(Error::Mismatch { what: "model", rank, difference }),
    }
}

/// Checks that all ranks register the same communication hook; `described` is this rank's, or the reason why it
/// cannot have one.
pub(in crate::ddp) fn same_comm_hook(
    group: &ProcessGroup,
    described: std::result::Result<String, &Error>,
) -> Result<()> {
    match DDP_HOOK.during(|| group.compare(described, "it could not register its communication hook"))? {
        None => Ok(()),
        Some((rank, difference)) => Err(Error::Mismatch { what: "communication hook", rank, difference }),
    }
}

/// Checks that all ranks train the same models in the same order in one backward pass; `numbers` are this rank's.
pub(in crate::ddp) fn same_models(group: &ProcessGroup, numbers: &[u64]) -> Result<()> {
    let line = |(place, number): (usize, &u64)| format!("model {place}: number {number} of those that were built");
    let described = numbers.iter().enumerate().map(line).collect::<Vec<_>>().join("\n");
    match DDP_ORDER.during(|| group.compare(Ok(described), "it could not begin its backward pass"))? {
        None => Ok(()),
        Some((_, difference)) => {
            let reason = format!("all ranks must give the same models in the same order: {difference}");
            Err(Error::invalid("models", reason))
        }
    }
}

/// Checks that all ranks begin the same join, which each has `described`.
pub(in crate::ddp) fn same_join(group: &ProcessGroup, described: String) -> Result<()> {
    match JOIN_NEW.during(|| group.compare(Ok(described), "it could not begin"))? {
        None => Ok(()),
        Some((rank, difference)) => Err(Error::Mismatch { what: "join", rank, difference }),
    }
}

/// Returns one line per fact on which ranks must agree.
fn describe_model(options: &DdpOptions, variables: &Variables) -> String {
    let mut lines = vec![format!("options: {:?}, broadcast_buffers: {}", options.buckets, options.broadcast_buffers)];
    lines.push(format!("precision: {:?}", options.precision));
    lines.push(format!("replica check: {:?}", options.replica_check));
    lines.push(format!("on_non_finite: {:?}", options.policy()));
    lines.push(format!("sharding: {:?}", options.sharding));
    lines.extend(variables.parameters.iter().enumerate().map(|(index, parameter)| {
        let held_as = match parameter.held_as() {
            dtype if dtype == parameter.var.dtype() => String::new(),
            dtype => format!(" held as {}", dtype.as_str()),
        };
        let unused = if options.unused.allows(&parameter.name) { ", may be unused" } else { "" };
        let described = describe_variable(&parameter.name, parameter.shape(), &parameter.var);
        format!("parameter {index}: {described}{held_as}{unused}")
    }));
    let frozen = variables.frozen.iter().enumerate();
    lines.extend(
        // Pieces have other sizes on each rank. Those of frozen variables were compared before they were cut.
        frozen.filter(|_| !matches!(options.sharding, Sharding::Blocks { .. })).map(|(index, frozen)| {
            format!("frozen {index}: {}", describe_variable(&frozen.name, frozen.var.shape(), &frozen.var))
        }),
    );
    let buffers = variables.buffers.iter().enumerate();
    lines.extend(buffers.map(|(index, buffer)| {
        format!("buffer {index}: {}", describe_variable(&buffer.name, buffer.var.shape(), &buffer.var))
    }));
    lines.join("\n")
}

fn describe_variable(name: &str, shape: &Shape, var: &Var) -> String {
    // Ranks have different GPUs, but the same variables on them.
    let device = if var.device().is_cpu() { "" } else { " on a GPU" };
    format!("{name} {}{device}", describe(var.dtype(), shape))
}
