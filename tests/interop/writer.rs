//! Event files, read by TensorBoard's own reader.
//!
//! Needs PyTorch and TensorBoard for the interpreter named by CANDLE_DDP_PYTHON (default: python3); otherwise skipped with a message.
use crate::common::succeed;
use candle_core::{DType, Device, Tensor};
use candle_ddp::metrics::{Writer, WriterOptions};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

const MODULES: &str = "torch.utils.tensorboard, tensorboard";

/// A run of one rank that begins at `purge_step`.
fn run(folder: &Path, purge_step: u64, work: impl Fn(&mut Writer) -> candle_ddp::Result<()> + Send + Sync) {
    let options = WriterOptions { log_dir: Some(folder.to_path_buf()), purge_step, ..Default::default() };
    candle_ddp::spawn(1, |pg| work(&mut Writer::new(&pg, options.clone())?)).unwrap();
}

fn read(python: &PathBuf, folder: &Path, histogram: &[f64]) -> Value {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/interop/writer.py");
    let histogram = serde_json::to_string(histogram).unwrap();
    let [stdout, _] = succeed(Command::new(python).arg(script).arg(folder).arg(histogram));
    serde_json::from_str(&stdout).unwrap()
}

#[test]
fn tensorboard_reads_scalars_images_and_histograms() {
    let Some(python) = crate::pytorch::python_with("tensorboard_reads_scalars_images_and_histograms", MODULES) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let values = [-3.5, -1e-13, 0., 0., 1e-12, 0.25, 1.0, 1.0, 7e5];
    run(folder.path(), 0, |writer| {
        writer.write(&[("step", 7u64.into()), ("loss", 0.5.into()), ("epoch", 1u64.into()), ("name", "x".into())])?;
        writer.add_scalar("übung/a b", -2.25, 300)?;
        for (step, value) in [(0, f64::NAN), (1, f64::INFINITY), (i64::MAX as u64, f64::NEG_INFINITY)] {
            writer.add_scalar("odd", value, step)?;
        }
        let floats = Tensor::rand(0f32, 1., (3, 5, 4), &Device::Cpu)?;
        writer.add_image("rgb", &floats, 2)?;
        writer.add_image("gray", &Tensor::zeros((1, 2, 300), DType::U8, &Device::Cpu)?, 3)?;
        writer.add_histogram("weights", &Tensor::new(&values, &Device::Cpu)?.reshape((3, 3))?, 4)?;
        writer.flush()
    });
    let png = json!([137, 80, 78, 71, 13, 10, 26, 10]);
    let found = read(&python, folder.path(), &values);
    assert_eq!(found["version"], 2.0);
    assert_eq!(
        found["scalars"],
        json!({
            "loss": [[7, "0.5"]],
            "übung/a b": [[300, "-2.25"]],
            "odd": [[0, "nan"], [1, "inf"], [i64::MAX, "-inf"]],
        })
    );
    assert_eq!(found["images"], json!({ "rgb": [2, 4, 5, png], "gray": [3, 300, 2, png] }));
    assert_eq!(found["histograms"], json!({ "weights": [4, true] }));
}

#[test]
fn tensorboard_hides_what_a_resumed_run_repeats_and_takes_a_torn_end() {
    let name = "tensorboard_hides_what_a_resumed_run_repeats_and_takes_a_torn_end";
    let Some(python) = crate::pytorch::python_with(name, MODULES) else { return };
    let folder = tempfile::tempdir().unwrap();
    let losses = |steps: std::ops::Range<u64>, value: f64| {
        move |writer: &mut Writer| steps.clone().try_for_each(|step| writer.add_scalar("loss", value, step))
    };
    let points = || {
        let found = read(&python, folder.path(), &[0.]);
        let points: Vec<(u64, String)> = serde_json::from_value(found["scalars"]["loss"].clone()).unwrap();
        points
    };
    let expected = |parts: &[(std::ops::Range<u64>, &str)]| -> Vec<(u64, String)> {
        parts.iter().flat_map(|(steps, value)| steps.clone().map(|step| (step, value.to_string()))).collect()
    };
    run(folder.path(), 0, losses(1..7, 1.));
    // The last record is torn.
    let file = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    let bytes = std::fs::read(&file).unwrap();
    for cut in [1, 24] {
        std::fs::write(&file, &bytes[..bytes.len() - cut]).unwrap();
        assert_eq!(points(), expected(&[(1..6, "1.0")]), "{cut} bytes less");
    }
    // The checkpoint was that of step 3.
    run(folder.path(), 4, losses(4..9, 2.));
    assert_eq!(points(), expected(&[(1..4, "1.0"), (4..9, "2.0")]));
    // A run from the beginning in the same folder.
    run(folder.path(), 0, losses(1..3, 3.));
    assert_eq!(points(), expected(&[(1..3, "3.0")]));
}
