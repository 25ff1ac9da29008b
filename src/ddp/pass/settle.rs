//! All ranks leave out a step whose gradients are not finite, or end the run.
use crate::ddp::gradients::left_out::{leave_out, put_verdict};
use crate::ddp::pass::Pass;
use crate::ddp::pass::order::Member;
use crate::ddp::watch::non_finite::{DDP_NON_FINITE, Finding, Findings, warn_of_left_out};
use crate::panic::lock;
use crate::{Error, Result};
use candle_core::backprop::GradStore;

/// Call once the averaged gradients are there. If one is not finite, `grads` loses them all, or this is an error. Returns whether the
/// step is left out.
pub(in crate::ddp) fn settle(pass: &Pass, grads: &mut GradStore) -> Result<bool> {
    let members: Vec<_> = pass.models.iter().filter(|model| model.synchronises).collect();
    let Some(policy) = members.first().map(|model| model.core.options.policy()).filter(|policy| policy.is_on()) else {
        return Ok(false);
    };
    let findings = members.iter().map(|model| model.core.reducer.findings()).collect::<Result<Vec<_>>>()?;
    if let ([Member { core, .. }], [Findings { verdict: Some(verdict), .. }]) = (&members[..], &findings[..]) {
        *lock(&core.late) = Some(put_verdict(grads, &core.marks().steps, verdict.clone())?);
        return Ok(false);
    }
    let is_found = findings.iter().any(|findings| findings.is_agreed);
    let (mut is_left_out, mut in_a_row) = (false, 0);
    for (Member { core, adds_up, .. }, _) in members.iter().zip(&findings).filter(|(_, findings)| findings.looks) {
        let counted = core.count_skipped(|skipped| (skipped.pass(!adds_up, !is_found), skipped.in_a_row));
        (is_left_out, in_a_row) = (is_left_out | counted.0, in_a_row.max(counted.1));
    }
    if is_found && in_a_row > policy.at_most() {
        return Err(pass.models[0].core.group().note(name(pass, &findings, in_a_row)?));
    }
    if is_left_out {
        leave_out(grads)?;
    }
    for Member { core, .. } in members {
        if is_left_out {
            core.reducer.leave_out();
            lock(&core.snapshots).restore(&core.variables.buffers, "on_non_finite")?;
        }
        if core.group().virtual_ranks().is_none() {
            lock(&core.snapshots).forget();
        }
    }
    let first = pass.models[0].core;
    if is_found && first.group().rank() == 0 && lock(&first.skipped).total == 1 {
        let is_ignored = |name: &str| pass.models.iter().any(|model| model.core.variables.ignores(name));
        let own = findings.iter().find_map(|findings| findings.own.clone()).filter(|(name, _)| is_ignored(name));
        let averaged = findings.into_iter().find_map(|findings| findings.averaged);
        let what = match (averaged, own) {
            (Some((parameter, value)), _) => format!("the averaged gradient of {parameter} contains {value}"),
            (None, Some((parameter, value))) => format!("rank 0's gradient of {parameter} contains {value}"),
            (None, None) => "a gradient is not finite".to_string(),
        };
        warn_of_left_out("this step", &what);
    }
    Ok(is_left_out)
}

/// The error of a pass that must not be used, which is the same on all ranks: asks them which gradient was the first.
fn name(pass: &Pass, findings: &[Findings], steps: u64) -> Result<Error> {
    let group = pass.models[0].core.group();
    let first = |of: fn(&Findings) -> Option<&Finding>| {
        findings.iter().find_map(of).map(|(parameter, value)| (Some(parameter.clone()), value.to_string()))
    };
    let own = first(|findings| findings.own.as_ref()).map(|found| (0u8, found));
    let loss = findings.iter().find_map(|findings| findings.loss).map(|loss| (1, (None, loss.to_string())));
    let averaged = first(|findings| findings.averaged.as_ref()).map(|found| (2, found));
    let own = own.or(loss).or(averaged);
    // In a join, ranks without inputs do not take part; a local hook leaves each rank alone.
    let is_alone = pass.is_joined() || pass.models.iter().any(|model| model.core.reducer.is_local());
    let found = match is_alone {
        true => vec![(group.rank(), own)],
        false => DDP_NON_FINITE.during(|| group.all_gather_object(&own))?.into_iter().enumerate().collect(),
    };
    let found = found.into_iter().filter_map(|(rank, found)| found.map(|(kind, what)| (kind, rank, what)));
    Ok(match found.min_by_key(|(kind, rank, _)| (*kind, *rank)) {
        Some((kind, rank, (parameter, value))) => {
            Error::NonFinite { parameter, rank: (kind < 2).then_some(rank), value, steps }
        }
        None => Error::NonFinite { parameter: None, rank: None, value: "a NaN or an infinity".to_string(), steps },
    })
}
