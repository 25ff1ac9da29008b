//! A rank that is slower than the others: what the launcher says, its status and its metrics.
use crate::common::elastic_ranks::wait_for;
use crate::common::{free_port, launch_test, tensor};
use candle_ddp::metrics::{Writer, WriterOptions, put_metric};
use candle_ddp::{DistributedDataParallel, InitOptions, init_process_group};
use candle_nn::{VarMap, linear};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

const SLOW: usize = 1;
/// Longer than it takes on a busy machine, unless something hangs.
const PATIENCE: Duration = Duration::from_secs(300);

/// Trains until the launcher ends it. Rank 1 takes much longer for its batches.
#[test]
#[ignore = "started by another test"]
fn rank_of_another_test() {
    let pg = init_process_group(InitOptions::default()).unwrap();
    let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(64, 64, vb)).unwrap();
    let x = tensor(&[4, 64], 1);
    let mut writer = Writer::new(&pg, WriterOptions::default()).unwrap();
    for step in 0..u32::MAX {
        if pg.rank() == SLOW {
            std::thread::sleep(Duration::from_millis(40));
        }
        let loss = ddp.forward(&x).unwrap().sqr().unwrap().mean_all().unwrap();
        ddp.backward(&loss).unwrap();
        put_metric("loss", f64::from(step) + pg.rank() as f64 / 10.).unwrap();
        let fields =
            [("step", u64::from(step).into()), ("loss", 0.5.into()), ("written", 7.25.into()), ("text", "x".into())];
        writer.write(&fields).unwrap();
    }
}

fn metrics(port: &str) -> String {
    let mut connection = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
    connection.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut reply = String::new();
    connection.read_to_string(&mut reply).unwrap();
    assert!(reply.starts_with("HTTP/1.1 200 OK\r\n"), "{reply}");
    reply
}

#[test]
fn the_rank_that_the_others_wait_for_is_named() {
    let [store, page] = [(); 2].map(|()| free_port().to_string());
    let logs = tempfile::tempdir().unwrap();
    let to_logs = logs.path().to_str().unwrap();
    let options = ["--log-dir", to_logs, "--no-secret", "--master-port", &store, "--metrics-port", &page];
    let mut launcher = launch_test(module_path!(), 3, &options);
    let mut run = launcher.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(run.stderr.take().unwrap()).lines().map(Result::unwrap);
    let (tell, said) = channel();
    std::thread::spawn(move || {
        lines.filter(|line| line.contains("the others up")).for_each(|line| {
            // Nobody listens once the test is over.
            let _ = tell.send(line);
        });
    });
    let said = said.recv_timeout(PATIENCE).unwrap();
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    assert!(said.starts_with(&format!("ddprun: rank 1 on {host} holds the others up: over the last ")), "{said}");

    let status = |arguments: &[&str]| {
        let address = format!("127.0.0.1:{store}");
        let output =
            Command::new(crate::common::ddprun()).args(["status", "--no-secret", &address]).args(arguments).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    };
    let json: Value = serde_json::from_str(&status(&["--json"])).unwrap();
    let of = |rank: usize, field: &str| json["ranks"][rank][field].as_f64().unwrap_or_else(|| panic!("{json}"));
    for field in ["waiting_seconds", "waiting_share"] {
        assert!(of(0, field) > of(SLOW, field) && of(2, field) > of(SLOW, field), "{json}");
    }
    assert!(of(0, "waiting_share") <= 1. && of(0, "waiting_seconds") <= of(0, "training_seconds"), "{json}");
    // A writer's numbers come from rank 0 alone, and what the program has put comes first.
    let metrics_of = |rank: usize| &json["ranks"][rank]["metrics"];
    assert_eq!((&metrics_of(0)["written"], &metrics_of(1)["written"]), (&Value::from(7.25), &Value::Null), "{json}");
    assert!(metrics_of(0)["loss"].as_f64().unwrap().fract() < 1e-9, "{json}");
    assert!(metrics_of(0).get("step").is_none() && metrics_of(0).get("text").is_none(), "{json}");
    let table = status(&[]);
    assert!(table.contains("  waiting  ") && table.contains(" %  "), "{table}");

    let page = metrics(&page);
    let value = |name: &str, rank: usize| -> f64 {
        let start = format!("{name}rank=\"{rank}\",host=\"{host}\"}} ");
        let line = page.lines().find_map(|line| line.strip_prefix(&start));
        line.unwrap_or_else(|| panic!("{page}")).parse().unwrap()
    };
    let name = "ddprun_rank_waiting_seconds_total{";
    assert!(value(name, 0) > value(name, SLOW), "{page}");
    assert!(value("ddprun_rank_steps_total{", 0) > 100., "{page}");
    // Each rank has its own values.
    let loss = value("ddprun_rank_metric{name=\"loss\",", 2);
    assert!((loss.fract() - 0.2).abs() < 1e-9, "{page}");
    assert_eq!(value("ddprun_rank_metric{name=\"written\",", 0), 7.25);
    assert_eq!(page.matches("name=\"written\"").count(), 1, "{page}");

    let pid = rustix::process::Pid::from_child(&run);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    run.wait().unwrap();
    // The page has the waits without traces.
    let report = Command::new(crate::common::ddprun()).arg("report").arg(logs.path()).output().unwrap();
    assert!(report.status.success(), "{report:?}");
    let report = std::fs::read_to_string(logs.path().join("report.html")).unwrap();
    for expected in ["Waits of the ranks: ", &format!("rank 1 on {host} holds the others up"), "CANDLE_DDP_TRACE"] {
        assert!(report.contains(expected), "{expected}: {report}");
    }
    wait_for("the end of the launcher", || TcpStream::connect(format!("127.0.0.1:{store}")).is_err());
}
