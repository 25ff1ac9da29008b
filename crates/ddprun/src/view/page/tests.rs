use super::*;
use serde_json::{Value, json};
use std::fs::{create_dir_all, write as put};

fn page_of(folder: &Path) -> String {
    page(folder).unwrap().0
}

/// A trace of so many steps of 10 ms, in which the rank waits `wait` ms.
fn trace(rank: usize, steps: usize, wait: f64) -> String {
    let mut text = format!("[{},\n", json!({ "name": "process_name", "ph": "M", "pid": rank, "args": {} }));
    for step in 0..steps {
        for (name, at, dur, row) in [
            ("forward", 0., 3e3, 0),
            ("backward", 3e3, 4e3, 0),
            ("all-reduce of bucket 0", 4e3, 2e3, 1),
            ("wait for buckets", 7e3, wait * 1e3, 0),
            ("optimizer", 8e3, 1e3, 0),
        ] {
            let ts = 1e15 + step as f64 * 1e4 + at;
            let event = json!({ "name": name, "ph": "X", "ts": ts, "dur": dur, "pid": rank, "tid": row });
            text += &format!("{event},\n");
        }
    }
    text
}

#[test]
fn a_run_is_shown_with_what_it_has_left() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let line = |step: u64, loss: &str| {
        format!("{{\"step\":{step},\"loss\":{loss},\"images_per_second\":100,\"hash\":\"x\"}}\n")
    };
    let lines: String = (1..=50).map(|step| line(step, if step == 7 { "null" } else { "0.5" })).collect();
    put(at("run.jsonl"), lines + "{\"epoch\":1,\"test_accuracy\":0.75}\n{\"step\":51,\"lo").unwrap();
    create_dir_all(at("trace")).unwrap();
    put(at("trace/rank0.trace.json"), trace(0, 5, 0.25)).unwrap();
    put(at("trace/rank1.trace.json"), trace(1, 5, 0.75)).unwrap();
    for attempt in 0..2 {
        (0..2).for_each(|rank| create_dir_all(at(&format!("logs/night/attempt_{attempt}/{rank}"))).unwrap());
    }
    put(at("logs/night/attempt_0/1/error.json"), "{\"message\":{\"message\":\"the disk is full\"}}").unwrap();
    let (path, notes) = write(folder.path(), None).unwrap();
    let text = std::fs::read_to_string(path).unwrap();
    for expected in [
        "<figcaption>Loss <small>by step (1 points are not finite)",
        "<figcaption>Accuracy <small>by epoch",
        "<figcaption>Samples per second",
        "<td>test_accuracy</td><td>0.75</td><td>epoch 1</td>",
        "<td>0</td><td>5</td><td>0.25</td><td>0.25</td>",
        "<td>1</td><td>5</td><td>0.75</td><td>0.75</td>",
        "The last steps",
        "1 restart.",
        "<td>logs/night</td><td>0</td><td>2</td><td>local rank 1: the disk is full</td>",
        "var(--curve-1)",
        "default-src 'none'",
    ] {
        assert!(text.contains(expected), "{expected} in {text}");
    }
    assert_eq!(notes, ["run.jsonl: 1 lines are torn, or are not JSON objects"]);
    // Nothing runs and nothing is loaded, and no colour is that of plotters.
    for forbidden in ["<script", "http://", "https://", "#0102", "#0103"] {
        assert!(!text.replace("http://www.w3.org/2000/svg", "").contains(forbidden), "{forbidden}");
    }
}

/// The phase of the optimizer is recorded by the programs that ask for it.
#[test]
fn a_step_without_a_phase_of_the_optimizer_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let without: Vec<String> =
        trace(0, 5, 0.25).lines().filter(|line| !line.contains("optimizer")).map(String::from).collect();
    put(folder.path().join("rank0.trace.json"), without.join("\n")).unwrap();
    assert!(page_of(folder.path()).contains("The last steps"));
}

/// A step waits for buckets several times if the optimizer's step has parts.
#[test]
fn a_step_in_parts_is_one_step() {
    let folder = tempfile::tempdir().unwrap();
    let in_parts: String = trace(0, 5, 0.25)
        .lines()
        .map(|line| match line.contains("wait for buckets") || line.contains("optimizer") {
            true => format!("{line}\n{line}\n"),
            false => format!("{line}\n"),
        })
        .collect();
    put(folder.path().join("rank0.trace.json"), in_parts).unwrap();
    let text = page_of(folder.path());
    assert!(text.contains("<td>0</td><td>5</td><td>0.5</td><td>0.5</td>"), "{text}");
    // Three steps are shown, which take 29 ms, with a mark at four fifths.
    assert!(text.contains("23.2"), "{text}");
}

#[test]
fn names_are_texts_whatever_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let evil = "<script>alert(1)</script>&\"'\u{1b}[31m\u{202e}";
    let key = serde_json::to_string(evil).unwrap();
    let lines = format!("{{\"step\":1,{key}:1,\"loss{}:2}}\n{{\"step\":2,{key}:3}}\n", &key[1..]);
    put(folder.path().join("a<b>&.jsonl"), lines).unwrap();
    create_dir_all(folder.path().join("<i>run/attempt_0/0")).unwrap();
    put(folder.path().join("<i>run/attempt_0/0/error.json"), evil).unwrap();
    let text = page_of(folder.path());
    assert!(!text.contains("<script") && !text.contains("<i>run") && !text.contains("a<b>"), "{text}");
    assert!(text.contains("&lt;script&gt;alert(1)&lt;/script&gt;&amp;&quot;&#39;") && !text.contains('\u{1b}'));
}

#[test]
fn files_of_other_kinds_are_notes_and_nothing_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let refused = || page(folder.path()).unwrap_err().to_string();
    assert!(refused().contains("has nothing to show"));
    let missing = page(&at("missing")).unwrap_err().to_string();
    assert!(missing.contains("missing"), "{missing}");
    put(at("empty.jsonl"), "").unwrap();
    put(at("other.jsonl"), "hello\n[1]\n{\"a\":1}\n").unwrap();
    std::fs::File::create(at("zeros.jsonl")).unwrap().set_len(3 << 20).unwrap();
    put(at("rank0.trace.json"), "no trace").unwrap();
    create_dir_all(at("folder.jsonl")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", at("endless.jsonl")).unwrap();
    let error = refused();
    for expected in ["other.jsonl: 2 lines", "other.jsonl: 1 lines have no", "zeros.jsonl: 3 lines", "has no events"] {
        assert!(error.contains(expected), "{expected} in {error}");
    }
    assert!(error.contains("endless.jsonl cannot be read"), "{error}");
    assert!(!at(NAME).exists());
    // Numbers that are odd.
    put(
        at("odd.jsonl"),
        "{\"step\":1,\"a\":1e308,\"b\":5}\n{\"step\":2,\"a\":-1e308,\"b\":5}\n{\"step\":1e300,\"a\":1}\n",
    )
    .unwrap();
    assert!(page_of(folder.path()).contains("<figcaption>a "));
    // The disk is full, or the folder is not there.
    let error = write(folder.path(), Some(&at("nowhere/page"))).unwrap_err().to_string();
    assert!(error.contains("nowhere/page"), "{error}");
}

#[test]
fn long_curves_keep_their_shape_in_bounded_memory() {
    let mut series = chart::Series::default();
    (0..1_000_000).for_each(|step| series.push(f64::from(step), f64::from(step)));
    let points = series.points();
    assert!(points.len() <= 2048 && points.len() > 900, "{}", points.len());
    assert!(points[0].0 == 0. && points[points.len() - 1].0 > 998_000. && points.is_sorted());
    // From a checkpoint on.
    series.push(500_000., -1.);
    (500_001..510_000).for_each(|step| series.push(f64::from(step), -1.));
    assert!(series.points().iter().all(|(at, value)| (*value == -1.) == (*at >= 500_000.)));
}

#[test]
fn numbers_are_short() {
    let texts = [0., 1., 0.25, 12.3456, 1234.56, 1e-5, 123_456_789., f64::NAN].map(html::number);
    assert_eq!(texts, ["0", "1", "0.25", "12.35", "1234.6", "1.00e-5", "1.23e8", "NaN"]);
}

/// A line of ddprun's record: the process, steps, seconds and waits of each rank.
fn reports(at: u64, restarts: u32, ranks: &[(u32, u64, f64, Option<f64>)]) -> String {
    let told = |(rank, told): (usize, &(u32, u64, f64, Option<f64>))| {
        let (pid, steps, trained, waited) = told;
        json!({ "rank": rank, "host": "<b>", "pid": pid, "steps": steps, "trained": trained, "waited": waited })
    };
    let ranks: Value = ranks.iter().enumerate().map(told).collect();
    format!("{}\n", json!({ "at": at, "restarts": restarts, "ranks": ranks }))
}

#[test]
fn waits_are_shown_without_traces_over_all_processes_of_a_rank() {
    let folder = tempfile::tempdir().unwrap();
    create_dir_all(folder.path().join("night/attempt_0/0")).unwrap();
    let file = folder.path().join("night").join(RECORD);
    let lines = [
        reports(1000, 0, &[(1, 10, 4., Some(1.)), (2, 10, 4., Some(0.))]),
        reports(3000, 0, &[(1, 20, 8., Some(3.)), (2, 20, 8., Some(0.5))]),
        // New processes.
        reports(9000, 1, &[(3, 25, 2., Some(1.)), (4, 5, 2., Some(0.))]),
    ];
    put(&file, lines.concat() + "{\"at\":1,\"rest").unwrap();
    let (text, notes) = page(folder.path()).unwrap();
    for expected in [
        "Waits of the ranks: night",
        "<td>0</td><td>&lt;b&gt;</td><td>45</td><td>4.5</td><td>4</td><td>40</td>",
        "<td>1</td><td>&lt;b&gt;</td><td>25</td><td>2.5</td><td>0.5</td><td>5</td>",
        "<figcaption>Waiting for the others, in % of the time <small>by second of the record<",
        "rank 1 on &lt;b&gt; holds the others up: over the last 45 steps, these spent 40 % of their time",
        "Restarts used: 1.",
        "What the run has not recorded",
        "<td>timelines</td><td>CANDLE_DDP_TRACE=FOLDER</td>",
        "CANDLE_DDP_FLIGHT_RECORDER=FOLDER",
        "metrics::Writer",
    ] {
        assert!(text.contains(expected), "{expected} in {text}");
    }
    assert!(!text.contains("<td>waits of the ranks</td>"), "{text}");
    assert_eq!(notes, [format!("night/{RECORD}: 1 lines are torn, or no ddprun has written them")]);
    // All wait as long; then the engine of one does not tell; then numbers that no rank writes.
    put(&file, reports(1, 0, &[(1, 9, 4., Some(2.)), (2, 9, 4., Some(2.))])).unwrap();
    assert!(page_of(folder.path()).contains("No rank has held the others up"));
    put(&file, reports(1, 0, &[(1, 9, 4., Some(2.)), (2, 9, 4., None)])).unwrap();
    let text = page_of(folder.path());
    assert!(
        text.contains("their engine does not tell it") && text.contains("<td>9</td><td>2.25</td><td>-</td><td>-</td>")
    );
    let odd = [(1, u64::MAX, 1e308, Some(-1e308)), (2, 0, -1e308, Some(1e308))];
    put(&file, reports(u64::MAX, 9, &odd) + &reports(0, 9, &[odd[0], (3, u64::MAX, 1e308, Some(1e308))])).unwrap();
    assert!(page_of(folder.path()).contains("Waits of the ranks"));
}

#[test]
fn flight_records_say_who_came_last() {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path().join("rank0.flight.json"), "no record").unwrap();
    assert!(page(folder.path()).unwrap_err().to_string().contains("rank0.flight.json"));
    let record = "{\"version\":1,\"rank\":0,\"world_size\":2,\"started_ns\":1,\"written_ns\":2,\"host\":\"a\",\"pid\":1,\"reason\":\"a test\",\"groups\":[]}";
    put(folder.path().join("rank0.flight.json"), record).unwrap();
    let text = page_of(folder.path());
    assert!(text.contains("Flight records: this folder") && text.contains("there is no file of rank 1"), "{text}");
}

#[test]
fn a_verdict_comes_first_and_is_text_whatever_it_says() {
    let folder = tempfile::tempdir().unwrap();
    create_dir_all(folder.path().join("night/attempt_0/0")).unwrap();
    let file = folder.path().join("night").join(crate::verdict::VERDICT);
    let earlier = r#"[{"at":1,"text":"rank 1 <b>died"}]"#;
    let fields =
        r#""schema":1,"run_id":"x","outcome":"failed","restarts":2,"at":1700000000000,"how":"lost","rank":null"#;
    put(&file, format!("{{{fields},\"text\":\"<i>node 1 is gone\",\"earlier\":{earlier}}}")).unwrap();
    let text = page_of(folder.path());
    for expected in ["&lt;i&gt;node 1 is gone", "<td>lost</td>", "2023-11-14 22:13:20 UTC", "rank 1 &lt;b&gt;died"] {
        assert!(text.contains(expected), "{expected} in {text}");
    }
    assert!(text.find("Why it failed: night").unwrap() < text.find("Restarts").unwrap());
    put(&file, "{\"schema\":1").unwrap();
    let (text, notes) = page(folder.path()).unwrap();
    assert!(!text.contains("Why it failed") && notes[0].contains("verdict.json cannot be read: EOF"), "{notes:?}");
}
