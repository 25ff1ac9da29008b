//! The checks that all ranks hold the same model and the same communication hook.
use super::{Buffer, DdpOptions, Parameter};
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
    match agree(group, report, "it could not build its model")? {
        None => Ok(()),
        Some((rank, difference)) => Err(Error::ModelMismatch { rank, difference }),
    }
}

/// Checks that all ranks register the same communication hook; `described` is this rank's, or why it can have none.
pub(super) fn same_comm_hook(group: &ProcessGroup, described: std::result::Result<String, &Error>) -> Result<()> {
    match agree(group, described, "it could not register its communication hook")? {
        None => Ok(()),
        Some((rank, difference)) => Err(Error::CommHookMismatch { rank, difference }),
    }
}

/// The first rank whose report differs from rank 0's, and in what. A rank that has none, but a reason, is an error on all,
/// to which `failed` is the introduction.
pub(crate) fn agree(
    group: &ProcessGroup,
    report: std::result::Result<String, &Error>,
    failed: &str,
) -> Result<Option<(usize, String)>> {
    match group.gather_reports(report.as_deref().map_err(|error| *error))? {
        Err((peer, reason)) => Err(Error::PeerFailed { peer, reason: format!("{failed}: {reason}") }),
        Ok(reports) => {
            let other = reports.iter().position(|report| *report != reports[0]);
            Ok(other.map(|rank| (rank, first_difference(rank, &reports[rank], &reports[0]))))
        }
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

fn first_difference(rank: usize, theirs: &str, rank_0: &str) -> String {
    let (mut theirs, mut rank_0) = (theirs.lines(), rank_0.lines());
    loop {
        match (theirs.next(), rank_0.next()) {
            (Some(a), Some(b)) if a == b => {}
            (Some(a), Some(b)) => return format!("{a} on rank {rank}, {b} on rank 0"),
            (Some(a), None) => return format!("{a} on rank {rank} does not exist on rank 0"),
            (None, Some(b)) => return format!("{b} on rank 0 does not exist on rank {rank}"),
            (None, None) => return "none in the text of their reports".to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        let rank_0 = "options: a\nparameter 0: w f32[2]\nparameter 1: b f32[2]";
        let cases = [
            ("options: b\nparameter 0: w f32[3]", "options: b on rank 3, options: a on rank 0"),
            ("options: a\nparameter 0: w f32[3]", "parameter 0: w f32[3] on rank 3, parameter 0: w f32[2] on rank 0"),
            ("options: a\nparameter 0: w f32[2]", "parameter 1: b f32[2] on rank 0 does not exist on rank 3"),
        ];
        for (theirs, expected) in cases {
            assert_eq!(first_difference(3, theirs, rank_0), expected);
        }
        let longer = format!("{rank_0}\nparameter 2: c f32[1]");
        let expected = "parameter 2: c f32[1] on rank 3 does not exist on rank 0";
        assert_eq!(first_difference(3, &longer, rank_0), expected);
    }
}
