//! Runs that end after a checkpoint, and continue on another number of ranks.
use crate::files::{file, u16s};
use candle_ddp::{Error, Result};
use clap::Parser;
use pretrain::{Options, train};
use std::fmt::Display;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;

const CONTEXT: usize = 8;

/// Options of a tiny model, whose files are in `folder`.
fn options(folder: &Path, more: &[&str]) -> Options {
    let text = |name: &str| folder.join(name).display().to_string();
    let fixed = "--vocabulary 64 --context 8 --width 16 --layers 1 --heads 2 --batch-size 2 --lr 0.01 --warmup 2 --end-of-text 63";
    let data = [text("first.bin"), text("second.bin")];
    let mut arguments = vec!["pretrain", "--data", &data[0], &data[1]];
    arguments.extend(fixed.split(' ').chain(more.iter().copied()));
    Options::parse_from(arguments)
}

/// Two files with `windows` windows together.
fn write(folder: &Path, windows: usize) {
    let first = windows / 3;
    for (name, count) in [("first.bin", first), ("second.bin", windows - first)] {
        file(folder, name, &u16s((0..count * CONTEXT + 1).map(|place| (place * place % 63) as u16)));
    }
}

/// The samples that each rank has seen, in their order, in the steps up to `until`, when every rank drops out. The last validation loss.
fn run(ranks: usize, options: &Options, until: u64) -> (Vec<Vec<usize>>, Option<f64>) {
    let seen: Vec<Mutex<Vec<usize>>> = (0..ranks).map(|_| Mutex::default()).collect();
    let losses = candle_ddp::spawn(ranks, |pg| -> Result<Option<f64>> {
        let ended = train(&pg, options, |step, samples| {
            if step > until {
                return Err(Error::InvalidArgument { argument: "test", reason: "killed".to_string() });
            }
            seen[pg.rank()].lock().unwrap().extend(samples);
            Ok(())
        });
        match ended {
            Err(error) if error.to_string().contains("killed") => Ok(None),
            ended => ended,
        }
    });
    (seen.into_iter().map(|seen| seen.into_inner().unwrap()).collect(), losses.unwrap()[0])
}

/// The samples in the order of the epoch, in which ranks take turns.
fn in_turns(seen: &[Vec<usize>]) -> Vec<usize> {
    let longest = seen.iter().map(Vec::len).max().unwrap_or(0);
    (0..longest).flat_map(|place| seen.iter().filter_map(move |rank| rank.get(place)).copied()).collect()
}

#[test]
fn a_run_that_is_killed_on_two_ranks_continues_on_three_with_every_window_once() {
    let folder = tempfile::tempdir().unwrap();
    // 3 steps of 2 ranks and 4 of 3 ranks, of 2 windows each.
    write(folder.path(), 3 * 4 + 4 * 6);
    let (alone, _) = run(1, &options(folder.path(), &["--steps", "18", "--measure-data", "30"]), 18);
    let mut sorted = alone[0].clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..36).collect::<Vec<_>>());

    let checkpoints = folder.path().join("checkpoints").display().to_string();
    let more = ["--steps", "7", "--checkpoints", &checkpoints, "--checkpoint-every", "3"];
    let options = options(folder.path(), &more);
    // The checkpoint is of step 3; two more steps are lost.
    let (before, _) = run(2, &options, 5);
    let before: Vec<_> = before.into_iter().map(|rank| rank[..6].to_vec()).collect();
    let (after, _) = run(3, &options, 7);
    assert_eq!(after[0].len(), 8);
    let seen = [in_turns(&before), in_turns(&after)].concat();
    assert_eq!(seen, alone[0]);
}

#[test]
fn packed_documents_are_seen_once_as_well_with_accumulation_and_an_evaluation() {
    let folder = tempfile::tempdir().unwrap();
    // 60 documents of 2 to 8 tokens, the last of which is 63.
    let documents: Vec<Vec<u16>> =
        (0..60).map(|index| [vec![index; 1 + index as usize % 7], vec![63]].concat()).collect();
    file(folder.path(), "first.bin", &u16s(documents[..20].concat()));
    file(folder.path(), "second.bin", &u16s(documents[20..].concat()));
    let checkpoints = folder.path().join("checkpoints").display().to_string();
    let validation = folder.path().join("first.bin").display().to_string();
    let more = [
        "--pack",
        "--model",
        "llama",
        "--optimizer",
        "muon",
        "--accumulate",
        "2",
        "--checkpoints",
        &checkpoints,
        "--checkpoint-every",
        "2",
        "--steps",
        "4",
        "--validation",
        &validation,
        "--evaluate-every",
        "2",
        "--sample",
        "3",
        "--shard",
        "optimizer",
    ];
    let options = options(folder.path(), &more);
    let (before, _) = run(2, &options, 2);
    let (after, loss) = run(3, &options, 4);
    let mut seen = [before.concat(), after.concat()].concat();
    seen.sort_unstable();
    let count = seen.len();
    seen.dedup();
    assert_eq!((seen, count), ((0..60).collect(), 60));
    // At the beginning, it is ln 64 = 4.16.
    assert!(loss.unwrap() < 4.1, "{loss:?}");
}

#[test]
fn sharded_blocks_and_autocast_learn_a_text() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), 36);
    let validation = folder.path().join("first.bin").display().to_string();
    let logs = folder.path().join("logs");
    let log_dir = logs.display().to_string();
    let more = [
        "--model",
        "llama",
        "--key-heads",
        "1",
        "--shard",
        "blocks",
        "--autocast",
        "--steps",
        "20",
        "--validation",
        &validation,
        "--sample",
        "4",
        "--log-dir",
        &log_dir,
        "--workers",
        "0",
    ];
    let (_, loss) = run(2, &options(folder.path(), &more), 20);
    assert!(loss.unwrap() < 3.5, "{loss:?}");
    assert_eq!(std::fs::read_dir(logs).unwrap().count(), 1);
}

/// A run of processes under the launcher, or None if that was not built.
fn start(folder: &Path, ranks: usize, checkpoints: &str, every: u64, steps: u64) -> Option<Child> {
    let ddprun = Path::new(env!("CARGO_BIN_EXE_pretrain")).with_file_name("ddprun");
    if !ddprun.exists() {
        eprintln!("skipped: {} was not built", ddprun.display());
        return None;
    }
    let fixed =
        "--vocabulary 64 --context 8 --width 16 --layers 1 --heads 2 --batch-size 2 --print-every 1 --model llama";
    let mut command = Command::new(&ddprun);
    command.arg(format!("--nproc-per-node={ranks}")).arg(env!("CARGO_BIN_EXE_pretrain")).args(fixed.split(' '));
    command.arg("--data").arg(folder.join("second.bin")).arg("--checkpoints").arg(folder.join(checkpoints));
    command.args(["--checkpoint-every", &every.to_string(), "--steps", &steps.to_string()]);
    Some(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
}

/// Reads the output of a run that would not end by itself until step 20, lets `end` end it, and waits for it.
fn ended_by(mut child: Child, end: impl FnOnce(&Child)) {
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.by_ref().any(|line| line.unwrap().contains("step 20, epoch")));
    end(&child);
    lines.for_each(drop);
    child.wait().unwrap();
}

fn kill(signal: &str, process: impl Display) {
    assert!(Command::new("kill").args([signal, &process.to_string()]).status().unwrap().success());
}

/// Returns the output of a run, which must succeed.
fn printed(child: Child) -> String {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn processes_that_get_sigterm_save_and_continue_on_another_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), 36);
    // It has had some epochs when it is stopped, without a checkpoint.
    let Some(child) = start(folder.path(), 2, "checkpoints", 1_000_000, 100_000_000) else { return };
    ended_by(child, |child| kill("-TERM", child.id()));
    let saved = std::fs::read_dir(folder.path().join("checkpoints")).unwrap();
    let saved = saved.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let steps: Vec<u64> = saved.filter_map(|name| name.strip_prefix("step-")?.parse().ok()).collect();
    let [step] = steps[..] else { panic!("there must be one checkpoint, not {steps:?}") };
    assert!(step >= 20);

    let text = printed(start(folder.path(), 3, "checkpoints", 1_000_000, step + 4).unwrap());
    assert!(text.contains(&format!("continuing after step {step}\n")), "{text}");
    assert!(text.contains(&format!("step {}, epoch", step + 4)), "{text}");
}

/// The losses are those of a run that nothing has interrupted.
#[test]
fn a_process_that_is_killed_costs_the_steps_since_the_last_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), 36);
    let Some(child) = start(folder.path(), 2, "checkpoints", 7, 400) else { return };
    ended_by(child, |child| {
        let workers = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id())).unwrap();
        kill("-KILL", workers.split_whitespace().last().unwrap());
    });
    let resumed = printed(start(folder.path(), 2, "checkpoints", 7, 400).unwrap());
    let step = resumed.lines().find_map(|line| line.strip_prefix("continuing after step ")?.parse::<u64>().ok());
    assert!(step.is_some_and(|step| (14..400).contains(&step) && step.is_multiple_of(7)), "{resumed}");
    let losses = |text: &str| -> Vec<String> {
        let steps = text.lines().filter(|line| line.starts_with("step "));
        steps.map(|line| line.split_once(", ").unwrap().1.rsplit_once(',').unwrap().0.to_string()).collect()
    };
    let whole = losses(&printed(start(folder.path(), 2, "others", 1_000_000, 400).unwrap()));
    assert_eq!(losses(&resumed), whole[step.unwrap() as usize..]);
}
