//! The example `allreduce` under the real launcher: its results follow nccl-tests' definitions, and invalid options are
//! errors.
use crate::common::{example, json_lines, launch_example, succeed};
use serde_json::Value;
use std::process::Command;

fn allreduce(ranks: usize, arguments: &[&str]) -> Command {
    let mut command = launch_example("allreduce", ranks);
    command.args(["--warmup", "1", "--iters", "2"]).args(arguments);
    command
}

/// Returns the JSON lines of a run that must succeed.
fn sweep(ranks: usize, arguments: &[&str]) -> Vec<Value> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("results.jsonl");
    succeed(&mut allreduce(ranks, &[&["--json", file.to_str().unwrap()], arguments].concat()));
    json_lines(&file)
}

#[test]
fn bandwidths_match_nccl_tests() {
    // By collective: elements of the larger buffer per count, and bus bandwidth per algorithm bandwidth, on 3 ranks.
    let expected =
        [("all_reduce", 1, 4. / 3.), ("broadcast", 1, 1.), ("all_gather", 3, 2. / 3.), ("reduce_scatter", 3, 2. / 3.)];
    for (collective, parts, factor) in expected {
        let rows =
            sweep(3, &["--collective", collective, "--min-bytes", "12", "--max-bytes", "3K", "--step-factor", "8"]);
        let sizes: Vec<_> = rows.iter().map(|row| row["bytes"].as_u64().unwrap()).collect();
        assert_eq!(sizes, [12, 96, 768], "{collective}");
        for row in rows {
            let number = |name: &str| row[name].as_f64().unwrap();
            assert_eq!(row["collective"], collective);
            assert_eq!(row["dtype"], "f32");
            assert_eq!(row["world_size"], 3);
            assert_eq!(row["errors"], 0);
            assert_eq!(row["op"].as_str(), collective.contains("reduce").then_some("sum"), "{collective}");
            assert_eq!(number("bytes"), number("count") * 4. * f64::from(parts), "{row}");
            let algbw = number("bytes") / number("time_us") / 1e3;
            assert!((number("algbw_gbps") / algbw - 1.).abs() < 1e-9, "{row}");
            assert!((number("busbw_gbps") / algbw / factor - 1.).abs() < 1e-9, "{row}");
        }
    }
}

#[test]
fn every_dtype_and_operation_is_correct() {
    for dtype in ["f64", "f16", "bf16", "i64", "u32", "u8"] {
        for op in ["sum", "min", "max", "prod"] {
            // More than one period of the values, and not a multiple of it.
            let rows = sweep(2, &["--dtype", dtype, "--op", op, "--sizes", "1,100K"]);
            assert_eq!(rows.len(), 2, "{dtype} {op}");
        }
    }
    assert_eq!(sweep(3, &["--op", "avg", "--sizes", "64K"]).len(), 1);
}

#[test]
fn results_of_several_runs_make_one_chart() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    for (file, svg) in [("a", "a.svg"), ("b", "b.svg")] {
        succeed(&mut allreduce(2, &["--max-bytes", "1K", "--json", &path(file), "--svg", &path(svg)]));
    }
    let curves = [format!("ours, <1>={}", path("a")), format!("ours, 2={}", path("b"))];
    let draw = |curves: &[String]| {
        let mut command = Command::new(example("allreduce"));
        command.args(["--svg", &path("both.svg")]).args(curves.iter().flat_map(|curve| ["--draw", curve]));
        command
    };
    succeed(&mut draw(&curves));
    let svg = std::fs::read_to_string(path("both.svg")).unwrap();
    assert_eq!(svg.matches("<circle").count(), 16);
    assert!(svg.contains("ours, &lt;1&gt;") && svg.contains("1 KiB") && svg.contains("GB/s"), "{svg}");

    std::fs::write(path("a"), "{}\n").unwrap();
    let stderr = String::from_utf8(draw(&curves).output().unwrap().stderr).unwrap();
    assert!(stderr.contains("line 1: not a JSON object with bytes and busbw_gbps"), "{stderr}");
}

#[test]
fn invalid_options_are_errors() {
    for (arguments, message) in [
        (&["--min-bytes", "1M", "--max-bytes", "1K"][..], "is more than the 1024 of --max-bytes"),
        (&["--max-bytes", "5X"], "not one of K, M and G"),
        (&["--max-bytes", "99999999999G"], "more than this machine can address"),
        (&["--sizes", "4,0"], "at least one byte"),
        (&["--op", "mean"], "sum, avg, min, max or prod"),
        (&["--dtype", "u8", "--op", "avg"], "floating point"),
        (&["--max-bytes", "8", "--json", "/no/such/folder/file"], "/no/such/folder/file"),
    ] {
        let output = allreduce(2, arguments).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(message), "{arguments:?}: {stderr}");
    }
}
