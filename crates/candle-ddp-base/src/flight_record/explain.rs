//! Which rank parted from the others, and where.
mod group;
mod late;

use super::record::{CallRecord, CallState, ChannelKind, GroupRecord, RankRecord};
use group::{Group, collectives_of};
use std::collections::{BTreeMap, BTreeSet};

/// Explains the records of a run's ranks in plain sentences, one per line: line breaks in a record do not begin a line.
pub fn explain(records: &[RankRecord]) -> String {
    let (records, old) = newest(records);
    let mut lines = Vec::new();
    let world_size = records.iter().map(|record| record.world_size).max().unwrap_or(0);
    let present: BTreeSet<usize> = records.iter().map(|record| record.rank).collect();
    let absent: Vec<usize> = (0..world_size).filter(|rank| !present.contains(rank)).collect();
    let mut groups: BTreeMap<&str, Group> = BTreeMap::new();
    for record in &records {
        for group in &record.groups {
            groups.entry(&group.name).or_default().insert(record.rank, group);
        }
    }
    for (name, group) in &groups {
        lines.extend(collectives(name, group));
        lines.extend(messages(name, group));
    }
    if lines.is_empty() {
        lines.push(match last_common(groups.get("world")) {
            Some((sequence, call)) => format!(
                "the ranks made the same calls, and all of them completed; the last of group world is call {sequence}, {}",
                call.in_words()
            ),
            None => "no rank has made a call".to_string(),
        });
    }
    lines.extend(groups.iter().filter_map(|(name, group)| late::latecomer(name, group)));
    if !absent.is_empty() {
        lines.push(format!(
            "there is no file of {}: its process was killed, or ended before the failure, or wrote to another folder",
            ranks(&absent)
        ));
    }
    if !old.is_empty() {
        lines.push(format!(
            "the file of {} was left out: it is older than the groups of the other ranks, so an earlier run or \
             generation wrote it",
            ranks(&old)
        ));
    }
    let failures: BTreeSet<&str> =
        groups.values().flat_map(|group| group.values()).filter_map(|group| group.failure.as_deref()).collect();
    lines.extend(failures.into_iter().map(|failure| format!("the error was: {failure}")));
    lines.iter().map(|line| line.replace('\n', "\\n")).collect::<Vec<_>>().join("\n")
}

/// The records of the newest run or generation, and the ranks of the others, which were written before it began.
pub fn newest(records: &[RankRecord]) -> (Vec<&RankRecord>, Vec<usize>) {
    let began = records.iter().map(|record| record.started_ns).max().unwrap_or(0);
    let (new, old): (Vec<_>, Vec<_>) = records.iter().partition(|record| record.written_ns >= began);
    (new, old.into_iter().map(|record| record.rank).collect())
}

/// Returns the first collective at which the ranks part: they called different things, or some did not come, or it does
/// not end.
fn collectives(name: &str, group: &Group) -> Option<String> {
    let calls: BTreeMap<usize, BTreeMap<u64, &CallRecord>> = group
        .iter()
        .map(|(rank, group)| (*rank, collectives_of(group).map(|call| (call.sequence, call)).collect()))
        .collect();
    let last = |rank: &usize| calls[rank].last_key_value().map(|(sequence, call)| (*sequence, *call));
    let sequences: BTreeSet<u64> = calls.values().flat_map(|calls| calls.keys().copied()).collect();
    let mut stuck = None;
    for sequence in sequences {
        // The ranks that called, grouped by what they called.
        let mut kinds: Vec<(&CallRecord, Vec<usize>)> = Vec::new();
        let mut missing = Vec::new();
        for (rank, calls) in &calls {
            match calls.get(&sequence) {
                Some(call) => match kinds.iter_mut().find(|(other, _)| other.is_like(call)) {
                    Some((_, ranks)) => ranks.push(*rank),
                    None => kinds.push((call, vec![*rank])),
                },
                // Otherwise the rank made that call, but no longer remembers it.
                None if last(rank).is_none_or(|(last, _)| last < sequence) => missing.push(*rank),
                None => {}
            }
        }
        let here: Vec<&CallRecord> = calls.values().filter_map(|calls| calls.get(&sequence).copied()).collect();
        let is_open = here.iter().any(|call| !call.is_over());
        let late: Vec<String> = missing.iter().map(|rank| never_came(*rank, sequence, last(rank))).collect();
        // The majority comes last. Among groups of equal size, it is that of the lowest rank.
        kinds.sort_by_key(|(_, ranks)| (ranks.len(), std::cmp::Reverse(ranks[0])));
        if let Some(((common, majority), others)) = kinds.split_last()
            && !others.is_empty()
        {
            let other = |(call, who): &(&CallRecord, Vec<usize>)| format!("{} called {}", ranks(who), call.in_words());
            let others: Vec<String> = others.iter().map(other).collect();
            let difference = format!(
                "{} as call {sequence} of group {name}, {} {}",
                others.join(", and "),
                if missing.is_empty() && majority.len() > 1 { "all others".to_string() } else { ranks(majority) },
                common.in_words()
            );
            let place = |(call, who): &(&CallRecord, Vec<usize>)| {
                call.place.as_ref().map(|place| format!("the call of {} is at {place}", ranks(who)))
            };
            let places: Vec<String> = kinds.iter().filter_map(place).collect();
            return Some([vec![difference], late, places].concat().join("; "));
        }
        let Some((call, came)) = kinds.first() else { continue };
        if !is_open {
            continue;
        }
        if !missing.is_empty() {
            let waiting = format!("{} waited in call {sequence} of group {name}, {}", ranks(came), call.in_words());
            return Some([vec![waiting], late].concat().join("; "));
        }
        // Ranks may still part later: a rank's file may have been written before it recorded the end of this call.
        stuck = stuck.or_else(|| Some(unfinished(name, sequence, call, &calls)));
    }
    stuck
}

/// Describes a call that all ranks made, and that did not complete on all of them.
fn unfinished(
    name: &str,
    sequence: u64,
    call: &CallRecord,
    calls: &BTreeMap<usize, BTreeMap<u64, &CallRecord>>,
) -> String {
    let those = |is_chosen: fn(&CallRecord) -> bool| -> Vec<usize> {
        let chosen = calls.iter().filter(|(_, calls)| calls.get(&sequence).is_some_and(|call| is_chosen(call)));
        chosen.map(|(rank, _)| *rank).collect()
    };
    let mut text = format!(
        "all ranks that left a file made call {sequence} of group {name}, {}, which did not complete on {}",
        call.in_words(),
        ranks(&those(|call| !call.is_over()))
    );
    let scheduled = those(|call| call.state == CallState::Scheduled);
    if !scheduled.is_empty() {
        text += &format!("; on {} it had not begun", ranks(&scheduled));
    }
    text
}

fn never_came(rank: usize, sequence: u64, last: Option<(u64, &CallRecord)>) -> String {
    let Some((last, call)) = last else {
        return format!("rank {rank} never came to call {sequence}, and made none before");
    };
    // It may have missed calls that the others completed without it.
    let sequence = sequence.min(last + 1);
    let state = match (call.state, call.completed_ns) {
        (CallState::Completed, Some(at)) => format!("ended at {}", time(at)),
        (CallState::Failed, Some(at)) => format!("failed at {}", time(at)),
        (CallState::Scheduled, _) => "had not begun".to_string(),
        _ => "had not ended".to_string(),
    };
    format!("rank {rank} never came to call {sequence}: its last call, {last}, {}, {state}", call.in_words())
}

/// Describes messages that wait for the other side.
fn messages(name: &str, group: &Group) -> Vec<String> {
    let mut lines = Vec::new();
    for (rank, own) in group {
        let waiting = own.calls.iter().filter(|call| call.channel != ChannelKind::Collectives && !call.is_over());
        // The first of each peer and direction is enough.
        let mut seen = BTreeSet::new();
        for call in waiting.filter(|call| seen.insert((call.channel == ChannelKind::Send, call.peer))) {
            let Some(peer) = call.peer.and_then(|peer| own.ranks.get(peer).copied()) else { continue };
            let back = own.ranks.iter().position(|other| other == rank);
            let made = |peer: &GroupRecord| {
                let same = |other: &&CallRecord| {
                    other.peer == back && other.channel != call.channel && other.channel != ChannelKind::Collectives
                };
                peer.calls.iter().filter(same).map(|call| call.sequence).max().unwrap_or(0)
            };
            let Some(made) = group.get(&peer).map(|peer| made(peer)).filter(|made| *made < call.sequence) else {
                continue;
            };
            lines.push(format!(
                "rank {rank} waited in message {} of group {name}, {} with rank {peer}, which made {made} matching call(s)",
                call.sequence,
                call.in_words()
            ));
        }
    }
    lines
}

/// Describes the last collective that all ranks made.
fn last_common<'a>(group: Option<&Group<'a>>) -> Option<(u64, &'a CallRecord)> {
    let last = group?.values().map(|group| collectives_of(group).next_back());
    last.collect::<Option<Vec<_>>>()?.into_iter().min_by_key(|call| call.sequence).map(|call| (call.sequence, call))
}

/// Returns, for example, `rank 2` or `ranks 0, 1 and 3`.
fn ranks(ranks: &[usize]) -> String {
    /// Further ones are only counted.
    const MOST: usize = 64;
    let mut names: Vec<String> = ranks.iter().take(MOST).map(usize::to_string).collect();
    if ranks.len() > MOST {
        names.push(format!("{} more", ranks.len() - MOST));
    }
    match names.split_last() {
        Some((only, [])) => format!("rank {only}"),
        Some((last, others)) => format!("ranks {} and {last}", others.join(", ")),
        None => "no rank".to_string(),
    }
}

/// Returns the time of day, for example `23:59:59.123 UTC`.
fn time(ns: u64) -> String {
    let (milliseconds, seconds) = (ns / 1_000_000 % 1000, ns / 1_000_000_000);
    let [hour, minute, second] = [seconds / 3600 % 24, seconds / 60 % 60, seconds % 60];
    format!("{hour:02}:{minute:02}:{second:02}.{milliseconds:03} UTC")
}

#[cfg(test)]
mod tests;
