//! The end of a failed run: the verdict, on which all nodes agree, is shown and recorded.
use super::agent::Agent;
use super::output::Remains;
use super::supervisor::Outcome;
use super::worker::Worker;
use crate::console::message;
use crate::verdict::{How, Verdict};

/// Shows and records why the run has failed, and returns the exit code.
pub(crate) fn conclude(agent: &mut Agent, workers: &[Worker], remains: &Remains, outcome: Outcome) -> u8 {
    let (verdict, text) = decide(agent, workers, remains, outcome);
    message(text);
    let code = verdict.code;
    agent.fail(verdict);
    code
}

/// The verdict, and what this machine shows.
fn decide(agent: &Agent, workers: &[Worker], remains: &Remains, outcome: Outcome) -> (Verdict, String) {
    let findings = agent.judge.examine(workers, Some(remains), &agent.starter.topology);
    let first = if let Outcome::Failure(first) = outcome { Some(first) } else { None };
    let own = findings.verdict(first);
    let others = |except| Some(findings.others(except)).filter(|text| !text.is_empty());
    let here = || Some(format!("on this node{}:{}", findings.place(), others(None)?));
    let whole = |(index, own): &(usize, Verdict)| own.summary() + &findings.others(Some(*index));
    // Without the other nodes, nobody knows whether a worker failed first or because of them.
    let is_final = |failure: &&Verdict| agent.is_lost || failure.how == How::NotStarted;
    if let Some(failure) = agent.failure.as_ref().filter(is_final) {
        let here = own.as_ref().map(whole).or_else(here);
        let text = [Some(failure.text.clone()), here].into_iter().flatten().collect::<Vec<_>>().join("\n");
        let evidence = own.map(|(_, own)| own.evidence).unwrap_or_default();
        let code = if agent.is_lost { 1 } else { failure.code };
        return (Verdict { evidence, code, ..failure.clone() }, text);
    }
    let own_verdict = own.as_ref().map(|(_, own)| own);
    let agreed = if agent.is_linked() { agent.agree(own_verdict.cloned()) } else { None };
    let verdict = agreed.or_else(|| agent.failure.clone()).or_else(|| own_verdict.cloned());
    let verdict = verdict.unwrap_or_else(|| Verdict::now(How::Unknown, 1, "the run has failed"));
    // The workers of a check are not to blame for what they have found.
    if let Some(found) = findings.any_error().filter(|_| agent.starter.is_joint_check) {
        let text = format!("--check: the run does not start: {}", found.message.replace('\n', "; "));
        return (Verdict { code: verdict.code, ..Verdict::now(How::NotStarted, 1, text.clone()) }, text);
    }
    let is_here = |own: &&(usize, Verdict)| own.1.evidence.process == verdict.evidence.process;
    let text = match own.as_ref().filter(is_here) {
        Some(own) => whole(own),
        None => verdict.summary() + &here().map(|here| format!("\n{here}")).unwrap_or_default(),
    };
    (verdict, text)
}
