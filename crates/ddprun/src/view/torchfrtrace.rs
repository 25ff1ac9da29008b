//! Flight records in PyTorch's format, which `torchfrtrace`, PyTorch's analyser, reads: one pickle for each rank.
//!
//! The format is version 2.10, that of PyTorch 2.15 (`torch/csrc/distributed/c10d/FlightRecorder.hpp`). PyTorch's analyser expects every
//! rank of a group in every call, so the messages from one rank to another appear as a group of these two ranks.
use crate::error::{Error, Result, refuse};
use candle_ddp_base::file::{PreparedFile, Progress};
use candle_ddp_base::flight_record::{CallRecord, CallState, ChannelKind, GroupRecord, RankRecord};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::io;
use std::path::Path;

/// The calls that are matched with each other by their numbers.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Calls {
    name: String,
    ranks: Vec<usize>,
}

impl Calls {
    fn of(group: &GroupRecord, rank: usize, call: &CallRecord) -> Self {
        let peer = call.peer.and_then(|peer| group.ranks.get(peer).copied()).unwrap_or(rank);
        let message = |from: usize, to: usize| Self {
            name: format!("{}: messages from {from} to {to}", group.name),
            ranks: if from == to { vec![from] } else { vec![from.min(to), from.max(to)] },
        };
        match call.channel {
            ChannelKind::Collectives => Self { name: group.name.clone(), ranks: group.ranks.clone() },
            ChannelKind::Send => message(rank, peer),
            ChannelKind::Recv => message(peer, rank),
        }
    }

    fn desc(&self) -> &'static str {
        if self.name == "world" { "default_pg" } else { "undefined" }
    }
}

/// Writes `records` to the folder `output`, as `rank_0`, `rank_1` and so on.
///
/// # Errors
/// Returns an error if the folder has files already, which PyTorch's analyser would read as well, or if a file cannot be written.
pub(crate) fn write(records: &[&RankRecord], output: &Path) -> Result<()> {
    let failed = |error| Error::io(format!("writing flight records to {}", output.display()), error);
    std::fs::create_dir_all(output).map_err(failed)?;
    if std::fs::read_dir(output).map_err(failed)?.next().is_some() {
        let reason = format!("{} must be empty: torchfrtrace reads every file in its folder", output.display());
        return refuse("--torchfrtrace", reason);
    }
    let first = first_numbers(records);
    for record in records {
        let path = output.join(format!("rank_{}", record.rank));
        let pickle = serde_pickle::to_vec(&dump(record, &first), Default::default()).map_err(io::Error::other);
        PreparedFile::write(&path, &Progress::default(), |file| file.write_all(&pickle?))?.commit()?;
    }
    Ok(())
}

/// The first numbers that all ranks of a group remember: PyTorch's analyser takes an earlier one for a call that the others have not made.
fn first_numbers(records: &[&RankRecord]) -> HashMap<Calls, u64> {
    let mut first = HashMap::new();
    for record in records {
        let mut own: HashMap<Calls, u64> = HashMap::new();
        for group in &record.groups {
            for call in &group.calls {
                let number = own.entry(Calls::of(group, record.rank, call)).or_insert(call.sequence);
                *number = call.sequence.min(*number);
            }
        }
        for (calls, number) in own {
            let shared = first.entry(calls).or_insert(number);
            *shared = number.max(*shared);
        }
    }
    first
}

fn dump(record: &RankRecord, first: &HashMap<Calls, u64>) -> Value {
    let mut pg_config = Map::new();
    let mut calls: Vec<(usize, Calls, &CallRecord)> = Vec::new();
    for (id, group) in record.groups.iter().enumerate() {
        let world = Calls { name: group.name.clone(), ranks: group.ranks.clone() };
        pg_config.insert(world.name.clone(), describe(&world));
        for call in &group.calls {
            let of = Calls::of(group, record.rank, call);
            if first.get(&of).is_some_and(|first| call.sequence < *first) {
                continue;
            }
            pg_config.entry(of.name.clone()).or_insert_with(|| describe(&of));
            calls.push((id, of, call));
        }
    }
    calls.sort_by_key(|(.., call)| call.scheduled_ns);
    let entry = |(record_id, (pg_id, of, call))| entry(record_id, pg_id, of, record.rank, call);
    let entries: Vec<Value> = calls.into_iter().enumerate().map(entry).collect();
    json!({ "version": "2.10", "pg_config": pg_config, "entries": entries })
}

/// A group. Its ranks are a list, as text.
fn describe(calls: &Calls) -> Value {
    json!({ "name": calls.name, "desc": calls.desc(), "ranks": format!("{:?}", calls.ranks) })
}

fn entry(record_id: usize, pg_id: usize, of: Calls, rank: usize, call: &CallRecord) -> Value {
    let place = |rank: usize| of.ranks.iter().position(|other| *other == rank).unwrap_or(0);
    let (own, peer) = (place(rank), of.ranks.iter().position(|other| *other != rank).unwrap_or(0));
    let (all, is_root) = (call.count.saturating_mul(of.ranks.len() as u64), call.root == Some(own));
    let on_root = |size: u64| if is_root { vec![size] } else { Vec::new() };
    let one = vec![call.count];
    let (name, input, output) = match call.operation.as_str() {
        "send" => (format!("send {own}->{peer}"), one.clone(), one),
        "recv" => (format!("recv {own}<-{peer}"), one.clone(), one),
        "all_gather" => ("all_gather".to_string(), one, vec![all]),
        "reduce_scatter" => ("reduce_scatter".to_string(), vec![all], one),
        "gather" => ("gather".to_string(), one, on_root(all)),
        "scatter" => ("scatter".to_string(), on_root(all), one),
        other => (other.to_string(), one.clone(), one),
    };
    let dtype = call.dtype.as_deref().map_or("Byte", dtype);
    let state = match call.state {
        CallState::Scheduled => "scheduled",
        CallState::Completed => "completed",
        // PyTorch has no other state for a call that has not completed.
        CallState::Started | CallState::Failed => "started",
    };
    let completed = call.completed_ns.filter(|_| call.state == CallState::Completed);
    let took = completed.zip(call.started_ns).map(|(end, start)| end.saturating_sub(start) as f64 / 1e6);
    let is_p2p = call.channel != ChannelKind::Collectives;
    let frames: Vec<Value> = call.place.iter().map(|place| frame(place, call)).collect();
    json!({
        "record_id": record_id,
        "pg_id": pg_id,
        "process_group": [of.name, of.desc()],
        "collective_seq_id": call.sequence,
        "p2p_seq_id": if is_p2p { call.sequence } else { 0 },
        "op_id": call.sequence,
        "is_p2p": is_p2p,
        // The name that PyTorch itself writes for a backend that it does not know.
        "profiling_name": format!("c10d:{name}"),
        "time_created_ns": call.scheduled_ns,
        "time_discovered_started_ns": call.started_ns,
        "time_discovered_completed_ns": completed,
        "duration_ms": took,
        "input_sizes": [input],
        "input_dtypes": [dtype],
        "output_sizes": [output],
        "output_dtypes": [dtype],
        "state": state,
        "retired": completed.is_some(),
        "frames": frames,
    })
}

/// The line of the program, from `FILE:LINE:COLUMN`.
fn frame(place: &str, call: &CallRecord) -> Value {
    let mut parts = place.rsplitn(3, ':');
    let (_, line, file) = (parts.next(), parts.next(), parts.next());
    let line: Option<u64> = line.and_then(|line| line.parse().ok());
    json!({ "name": call.in_words(), "filename": file.unwrap_or(place), "line": line.unwrap_or(0) })
}

/// PyTorch's name for a dtype.
fn dtype(name: &str) -> &'static str {
    match name {
        "f64" => "Double",
        "f32" => "Float",
        "f16" => "Half",
        "bf16" => "BFloat16",
        "i64" => "Long",
        "i32" => "Int",
        "i16" => "Short",
        "u32" => "UInt32",
        _ => "Byte",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

    /// The record of a rank whose group has made these calls.
    fn record(rank: usize, channel: &str, operation: &str, sequences: Range<u64>) -> RankRecord {
        let call = |sequence: u64| {
            json!({
                "channel": channel, "operation": operation, "sequence": sequence, "dtype": "bf16", "count": 4,
                "peer": (channel != "collectives").then_some(0), "place": "C:/src/main.rs:7:3", "state": "completed",
                "scheduled_ns": sequence, "started_ns": sequence, "completed_ns": sequence + 1_000_000,
            })
        };
        let group = json!({ "name": "world/part", "ranks": [1, 3], "calls": sequences.map(call).collect::<Value>() });
        let text = json!({
            "version": 1, "rank": rank, "world_size": 4, "host": "a", "pid": 1, "reason": "", "written_ns": 9,
            "groups": [group],
        });
        serde_json::from_value(text).unwrap()
    }

    fn written(records: &[&RankRecord]) -> Vec<Value> {
        let folder = tempfile::tempdir().unwrap();
        write(records, folder.path()).unwrap();
        let read = |record: &&RankRecord| {
            let file = std::fs::read(folder.path().join(format!("rank_{}", record.rank))).unwrap();
            serde_pickle::from_slice(&file, Default::default()).unwrap()
        };
        records.iter().map(read).collect()
    }

    #[test]
    fn calls_that_another_rank_has_forgotten_are_left_out() {
        let gather = |rank, sequences| record(rank, "collectives", "all_gather", sequences);
        let dumps = written(&[&gather(1, 3..6), &gather(3, 4..8)]);
        for (dump, numbers) in dumps.iter().zip([json!([4, 5]), json!([4, 5, 6, 7])]) {
            let entries = dump["entries"].as_array().unwrap();
            let of = |key: &str| Value::from_iter(entries.iter().map(|entry| entry[key].clone()));
            assert_eq!(of("collective_seq_id"), numbers);
            assert_eq!((&entries[0]["record_id"], &entries[1]["record_id"]), (&json!(0), &json!(1)));
            assert_eq!(entries[0]["process_group"], json!(["world/part", "undefined"]));
            assert_eq!((&entries[0]["input_sizes"], &entries[0]["output_sizes"]), (&json!([[4]]), &json!([[8]])));
            assert_eq!((&entries[0]["input_dtypes"], &entries[0]["duration_ms"]), (&json!(["BFloat16"]), &json!(1.0)));
            assert_eq!(entries[0]["frames"][0]["filename"], "C:/src/main.rs");
            assert_eq!(entries[0]["frames"][0]["line"], 7);
        }
    }

    #[test]
    fn messages_are_calls_of_their_two_ranks() {
        let dump = &written(&[&record(3, "recv", "recv", 1..2)])[0];
        assert_eq!(dump["entries"][0]["profiling_name"], "c10d:recv 1<-0");
        let group = &dump["pg_config"]["world/part: messages from 1 to 3"];
        assert_eq!(group["ranks"], "[1, 3]");
    }
}
