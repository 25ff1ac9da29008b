use super::*;
use crate::spawn;
use std::fs::{read_dir, read_to_string, write};

fn number(value: f64) -> Field<'static> {
    value.into()
}

/// A writer of the only rank.
fn alone(options: WriterOptions, work: impl Fn(&mut Writer) -> Result<()> + Send + Sync) -> Result<()> {
    spawn(1, |pg| work(&mut Writer::new(&pg, options.clone())?)).map(drop)
}

#[test]
fn a_run_that_goes_on_replaces_what_it_repeats() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("lines");
    let run = |purge_step, steps: std::ops::Range<u64>| {
        let options = WriterOptions { lines: Some(file.clone()), purge_step, ..Default::default() };
        alone(options, |writer| steps.clone().try_for_each(|step| writer.add_scalar("loss", step as f64, step)))
            .unwrap();
        read_to_string(&file).unwrap().lines().map(str::to_string).collect::<Vec<_>>()
    };
    let first = run(0, 1..6);
    assert_eq!((first.len(), first[4].as_str()), (5, r#"{"loss":5.0,"step":5}"#));
    // The run was killed while it wrote, and its checkpoint is that of step 3.
    write(&file, first.join("\n") + "\n{\"loss\":6.0,\"st").unwrap();
    assert_eq!(run(4, 4..5), first[..4]);
    // Nothing to discard but the torn end.
    write(&file, first.join("\n") + "\n{\"loss\":6.0,\"step\":6}").unwrap();
    assert_eq!(run(6, 7..7), first);
    // Lines of other kinds stay.
    write(&file, "not JSON\n[1]\n{\"epoch\":2}\n{\"step\":9}\n").unwrap();
    assert_eq!(run(5, 5..6), ["not JSON", "[1]", r#"{"epoch":2}"#, r#"{"loss":5.0,"step":5}"#]);
    assert_eq!(run(0, 1..2), first[..1]);
}

#[test]
fn only_rank_0_writes_unless_all_shall() {
    let folder = tempfile::tempdir().unwrap();
    let names = |folder: &Path| {
        let mut names: Vec<_> =
            read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let run = |name: &str, all_ranks| {
        let folder = folder.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        let (log_dir, lines) = (Some(folder.join("events")), Some(folder.join("lines")));
        let options = WriterOptions { log_dir, lines, all_ranks, ..Default::default() };
        spawn(2, |pg| Writer::new(&pg, options.clone())?.write(&[("epoch", 1u64.into()), ("rank", pg.rank().into())]))
            .unwrap();
        folder
    };
    let one = run("one", false);
    assert_eq!((names(&one), names(&one.join("events")).len()), (vec!["events".into(), "lines".into()], 1));
    let all = run("all", true);
    assert_eq!(
        (names(&all), names(&all.join("events"))),
        (
            ["events", "lines.rank0", "lines.rank1"].map(String::from).to_vec(),
            ["rank0", "rank1"].map(String::from).to_vec()
        )
    );
    assert_eq!(read_to_string(all.join("lines.rank1")).unwrap(), "{\"epoch\":1,\"rank\":1}\n");
}

/// A later file must have the greater name, whatever the clocks say.
#[test]
fn the_newest_event_file_is_the_last_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let ahead = "events.out.tfevents.9000000000.other.1.0";
    for name in [ahead, "events.out.tfevents.99999999999999999999.other.1.0", "events.out.tfevents.x", "other"] {
        write(folder.path().join(name), "").unwrap();
    }
    let options = WriterOptions { log_dir: Some(folder.path().to_path_buf()), ..Default::default() };
    for _ in 0..3 {
        alone(options.clone(), |writer| writer.flush()).unwrap();
    }
    let mut names: Vec<_> =
        read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    let at = names.iter().position(|name| name == ahead).unwrap();
    let seconds: Vec<_> = names[at + 1..at + 4].iter().map(|name| name.split('.').nth(3).unwrap()).collect();
    assert_eq!(seconds, ["9000000001", "9000000002", "9000000003"]);
}

/// Which event files hide what older ones have, in the order in which they were made.
fn hide(folder: &Path) -> Vec<bool> {
    let mut paths: Vec<_> = read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    // The field `session_log` with the status START.
    let hides = |path: &PathBuf| std::fs::read(path).unwrap().windows(4).any(|field| field == [0x3a, 2, 8, 1]);
    paths.iter().map(hides).collect()
}

/// `SummaryWriter` without a `purge_step` hides nothing.
#[test]
fn a_second_writer_hides_nothing_that_the_first_one_writes() {
    let folder = tempfile::tempdir().unwrap();
    let events = folder.path().join("events");
    let file = folder.path().join("lines");
    let options = WriterOptions { log_dir: Some(events.clone()), lines: Some(file.clone()), ..Default::default() };
    spawn(1, |pg| {
        let mut first = Writer::new(&pg, options.clone())?;
        first.add_scalar("train", 1., 1)?;
        let mut second = Writer::new(&pg, options.clone())?;
        second.add_scalar("valid", 2., 1)?;
        let mut third = Writer::new(&pg, options.clone())?;
        drop(second);
        first.add_scalar("train", 3., 2)?;
        third.add_scalar("test", 4., 2)
    })
    .unwrap();
    let lines = read_to_string(&file).unwrap();
    assert_eq!(["train", "valid", "test"].map(|tag| lines.matches(tag).count()), [2, 1, 1], "{lines}");
    // The next run hides them all.
    alone(options, |_| Ok(())).unwrap();
    assert_eq!(read_to_string(&file).unwrap(), "");
    assert_eq!(hide(&events), [true, false, false, true]);
}

#[test]
fn lines_do_not_follow_links_to_files() {
    let folder = tempfile::tempdir().unwrap();
    let (link, other) = (folder.path().join("lines"), folder.path().join("other"));
    write(&other, "worth keeping").unwrap();
    std::os::unix::fs::symlink(&other, &link).unwrap();
    let options = WriterOptions { lines: Some(link.clone()), ..Default::default() };
    let error = alone(options.clone(), |_| Ok(())).unwrap_err().to_string();
    assert!(error.contains("must not be a symbolic link to a file"), "{error}");
    assert_eq!(read_to_string(&other).unwrap(), "worth keeping");
    // Nothing is created where it leads to, either.
    std::fs::remove_file(&other).unwrap();
    alone(options.clone(), |_| Ok(())).unwrap_err();
    assert!(!other.exists());
    // A device is none.
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink("/dev/null", &link).unwrap();
    alone(options, |writer| writer.add_scalar("a", 1., 1)).unwrap();
}

#[test]
fn what_cannot_be_written_is_an_error_that_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let log_dir = Some(folder.path().to_path_buf());
    let options = WriterOptions { log_dir, lines: Some(folder.path().join("lines")), ..Default::default() };
    alone(options, |writer| {
        let error = |result: Result<()>| result.unwrap_err().to_string();
        let step = ("step", Field::Integer(1));
        assert!(error(writer.add_scalar("", 1., 1)).contains("must not be empty"));
        assert!(error(writer.add_scalar("epoch", 1., 1)).contains("the name of the position"));
        assert!(error(writer.add_scalar("a", 1., u64::MAX)).contains("at most 9223372036854775807"));
        assert!(error(writer.write(&[("a", number(1.))])).contains("\"step\" or \"epoch\""));
        assert!(error(writer.write(&[("step", number(1.))])).contains("whole number"));
        assert!(error(writer.write(&[step, ("a", number(1.)), ("a", number(2.))])).contains("\"a\" is repeated"));
        let nan = Tensor::new(&[f32::NAN], &candle_core::Device::Cpu)?;
        assert!(error(writer.add_histogram("a", &nan, 1)).contains("none of the 1 values"));
        writer.add_scalar("a", f64::NAN, 1)
    })
    .unwrap();
    assert_eq!(read_to_string(folder.path().join("lines")).unwrap(), "{\"a\":null,\"step\":1}\n");
    for (log_dir, lines) in [(None, Some("/nowhere/lines")), (Some("/proc/nowhere"), None)] {
        let options =
            WriterOptions { log_dir: log_dir.map(Into::into), lines: lines.map(Into::into), ..Default::default() };
        let error = alone(options, |_| Ok(())).unwrap_err();
        assert!(error.to_string().contains(lines.or(log_dir).unwrap()), "{error}");
    }
    // A full disk.
    let options = WriterOptions { lines: Some("/dev/full".into()), ..Default::default() };
    let error = alone(options, |writer| writer.add_scalar("a", 1., 1)).unwrap_err().to_string();
    assert!(error.contains("/dev/full") && error.contains("No space left"), "{error}");
}
