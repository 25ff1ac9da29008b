//! The report about a failed run, and its exit code. With several nodes, all of them name the same failure.
use super::agent::Agent;
use super::console::message;
use super::nodes::Report;
use super::root_cause::{self, Cause};
use super::summary::Findings;
use super::supervisor::Outcome;
use candle_ddp_base::host::host_name;
use candle_ddp_rendezvous::milliseconds;

/// Shows the failure, and returns the exit code.
pub(super) fn report(findings: &Findings, outcome: Outcome, agent: &Agent) -> u8 {
    let workers = findings.workers;
    let first = match outcome {
        Outcome::Failure(first) => Some(first),
        _ => root_cause::first(workers),
    };
    let cause = first.map(|first| root_cause::cause(workers, first, findings.errors, &findings.topology));
    // The worker that caused the failure may not have failed itself.
    let failed = [cause.map(|cause| cause.worker), first].into_iter().flatten().filter_map(|index| workers.get(index));
    let ended = failed.filter(|worker| root_cause::failed(worker)).find_map(|worker| worker.ended);
    let code = ended.map_or(1, |ended| ended.how.code());
    if !agent.is_linked() {
        if let Some(cause) = cause
            && let Some(text) = findings.first(cause, "")
        {
            message(text + &findings.others(Some(cause.worker)));
        }
        return code;
    }
    let own = cause.and_then(|cause| own_report(findings, cause, code));
    let root = if agent.is_lost() { None } else { agent.root(own.clone()) };
    let (why, code) = match agent.failure() {
        Some((reason, their_code)) => (Some(reason), root.as_ref().map_or(*their_code, |root| root.code)),
        None => (None, code),
    };
    if let Some(reason) = agent.failure().map(|(reason, _)| reason).filter(|_| agent.is_lost()) {
        // Without the other nodes, nobody knows whether a worker failed first or because of them.
        let first = own.map(|own| own.text + &findings.others(cause.map(|cause| cause.worker)));
        let others = Some(findings.others(None)).filter(|text| !text.is_empty());
        let here = first.or(others.map(|others| format!("on this node{}:{others}", place(findings))));
        message([Some(reason.clone()), here].into_iter().flatten().collect::<Vec<_>>().join("\n"));
        return 1;
    }
    let others = |except| Some(findings.others(except)).filter(|text| !text.is_empty());
    // The workers of a check are not to blame for what they have found.
    let found = findings.errors.iter().flatten().next().filter(|_| agent.starter.is_joint_check);
    if let Some(found) = found {
        message(format_args!("--check: the run does not start: {}", found.message.replace('\n', "; ")));
        return code;
    }
    let text = match (root, cause) {
        (Some(root), Some(cause)) if Some(&root) == own.as_ref() => {
            root.text + &others(Some(cause.worker)).unwrap_or_default()
        }
        (root, _) => {
            let first = root.map(|root| root.text).or(why.cloned()).unwrap_or_else(|| "the run has failed".to_string());
            let here = others(None).map(|others| format!("\non this node{}:{others}", place(findings)));
            first + &here.unwrap_or_default()
        }
    };
    message(text);
    code
}

/// This node's report to the others about its first failure.
fn own_report(findings: &Findings, cause: Cause, code: u8) -> Option<Report> {
    let worker = findings.workers.get(cause.worker)?;
    Some(Report {
        rank: worker.rank,
        killed: root_cause::failed(worker) && root_cause::was_killed(worker),
        elsewhere: cause.elsewhere,
        at: worker.ended.map_or(u64::MAX, |ended| milliseconds(ended.at)),
        code,
        text: findings.first(cause, &place(findings))?,
    })
}

fn place(findings: &Findings) -> String {
    format!(" on host {} (node {})", host_name(), findings.topology.node_rank)
}
