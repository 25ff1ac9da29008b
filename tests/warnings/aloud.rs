//! Warnings that change a result reach the user of a program without a logger, once; with one, they are in the log alone.
use crate::common::{ranks, test_process};
use crate::logger::during;
use candle_core::{DType, Device, Var};
use candle_ddp::amp::{GradScaler, GradScalerOptions};
use std::process::Stdio;

/// Which logger a process installs.
const LOGGER: &str = "CANDLE_DDP_TEST_LOGGER";

/// Two ranks whose every step overflows, so that the scale falls below 1 in the third.
fn overflow() {
    ranks(2, |pg| {
        let var = Var::ones(2, DType::F32, &Device::Cpu)?;
        let options = GradScalerOptions { init_scale: 4.0, ..Default::default() };
        let mut scaler = GradScaler::new(&pg, vec![("w".to_string(), var.clone())], options)?;
        for _ in 0..5 {
            let mut grads = scaler.scale(&var.sum_all()?.affine(f64::INFINITY, 0.)?)?.backward()?;
            scaler.unscale(&mut grads)?;
            scaler.update()?;
        }
        Ok(())
    });
}

/// The entry point of the processes.
#[test]
#[ignore = "started by other tests"]
fn process_with_logger() {
    let wanted = std::env::var(LOGGER).unwrap();
    let with_logger = |level| {
        during(|| {
            log::set_max_level(level);
            overflow();
        })
    };
    let ((), told) = match wanted.as_str() {
        "warnings" => with_logger(log::LevelFilter::Warn),
        "errors" => with_logger(log::LevelFilter::Error),
        _ => (overflow(), Vec::new()),
    };
    println!("logged: {}", told.len());
}

#[test]
fn a_warning_that_changes_a_result_needs_no_logger_and_comes_once() {
    // Without a logger, with one that shows warnings, and with one that shows errors alone.
    for (logger, logged) in [("none", 0), ("warnings", 1), ("errors", 0)] {
        let mut process = test_process(module_path!(), "process_with_logger");
        let output = process.env(LOGGER, logger).stdin(Stdio::null()).output().unwrap();
        let [out, told] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        assert!(output.status.success() && out.contains(&format!("logged: {logged}\n")), "{logger}: {out} {told}");
        let lines: Vec<&str> = told.lines().filter(|line| line.contains("the scale fell to")).collect();
        assert_eq!(lines.len(), 1 - logged, "{logger}: {told}");
        assert!(lines.iter().all(|line| line.starts_with("candle-ddp: GradScaler: ")), "{logger}: {told}");
    }
}
