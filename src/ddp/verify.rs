//! The checks that all ranks hold the same model and the same communication hook.
use super::options::DdpOptions;
use super::parameter::{Buffer, Parameter};
use crate::backend::Label;
use crate::error::describe;
use crate::process_group::ProcessGroup;
use crate::{Error, Result};

/// Checks that all ranks built the same model with the same options; `model` is this rank's, or why it has none.
/// Every rank gets the same verdict: in PyTorch only the mismatching rank raises, and the others hang.
pub(super) fn same_model(
    group: &ProcessGroup,
    options: &DdpOptions,
    model: std::result::Result<(&[Parameter], &[Buffer]), &Error>,
) -> Result<()> {
    let report = model.map(|(parameters, buffers)| describe_model(options, parameters, buffers));
    match Label::DDP_NEW.during(|| group.compare(report, "it could not build its model"))? {
        None => Ok(()),
        Some((rank, difference)) => Err(Error::Mismatch { what: "model", rank, difference }),
    }
}

/// Checks that all ranks register the same communication hook; `described` is this rank's, or why it can have none.
pub(super) fn same_comm_hook(group: &ProcessGroup, described: std::result::Result<String, &Error>) -> Result<()> {
    match Label::DDP_HOOK.during(|| group.compare(described, "it could not register its communication hook"))? {
        None => Ok(()),
        Some((rank, difference)) => Err(Error::Mismatch { what: "communication hook", rank, difference }),
    }
}

/// One line per fact on which ranks must agree.
fn describe_model(options: &DdpOptions, parameters: &[Parameter], buffers: &[Buffer]) -> String {
    let mut lines = vec![format!(
        "options: bucket_cap_mb {}, first_bucket_mb {}, broadcast_buffers {}",
        options.bucket_cap_mb, options.first_bucket_mb, options.broadcast_buffers
    )];
    if let Some(mixed) = options.mixed_precision {
        lines.push(format!("mixed precision: {mixed}"));
    }
    lines.extend(parameters.iter().enumerate().map(|(index, parameter)| {
        let tensor = describe(parameter.var.dtype(), parameter.var.shape());
        let held_as = match parameter.held_as() {
            dtype if dtype == parameter.var.dtype() => String::new(),
            dtype => format!(" held as {}", dtype.as_str()),
        };
        format!("parameter {index}: {} {tensor}{held_as}", parameter.name)
    }));
    lines.extend(buffers.iter().enumerate().map(|(index, buffer)| {
        format!("buffer {index}: {} {}", buffer.name, describe(buffer.var.dtype(), buffer.var.shape()))
    }));
    lines.join("\n")
}
