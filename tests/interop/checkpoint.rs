//! The kinds of files that PyTorch's torch.save writes.
//!
//! Needs PyTorch for the interpreter named by CANDLE_DDP_PYTHON (default: python3); otherwise skipped with a message.
use candle_core::DType;
use candle_ddp::checkpoint;
use serde_json::Value;
use std::process::Command;

#[test]
fn files_of_torch_save_are_read_or_refused_with_a_reason() {
    let Some(python) = crate::pytorch::python("files_of_torch_save_are_read_or_refused_with_a_reason") else { return };
    let folder = tempfile::tempdir().unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/interop/checkpoint.py");
    assert!(Command::new(python).arg(script).arg(folder.path()).status().unwrap().success());
    let expected = std::fs::read_to_string(folder.path().join("expected.json")).unwrap();
    let expected: serde_json::Map<String, Value> = serde_json::from_str(&expected).unwrap();
    assert!(expected.len() > 15);
    for (file, expected) in expected {
        let read = checkpoint::read(folder.path().join(&file));
        let Some(tensors) = expected.as_object() else {
            let error = read.unwrap_err().to_string();
            assert!(error.contains(expected.as_str().unwrap()), "{file}: {error}");
            continue;
        };
        let read = read.unwrap_or_else(|error| panic!("{file}: {error}"));
        assert!(file == "many.pt" || read.len() == tensors.len(), "{file}: {:?}", read.keys());
        for (name, expected) in tensors {
            let tensor = &read[name];
            let dtype = match expected[0].as_str().unwrap() {
                "float32" => DType::F32,
                "float64" => DType::F64,
                "float16" => DType::F16,
                "bfloat16" => DType::BF16,
                "uint8" | "bool" => DType::U8,
                "int16" => DType::I16,
                "int32" => DType::I32,
                "int64" => DType::I64,
                "uint32" => DType::U32,
                "float8_e4m3fn" => DType::F8E4M3,
                other => panic!("{other}"),
            };
            assert_eq!(tensor.dtype(), dtype, "{file}: {name}");
            let shape: Vec<usize> = serde_json::from_value(expected[1].clone()).unwrap();
            assert_eq!(tensor.dims(), shape, "{file}: {name}");
            let values: Vec<f64> = serde_json::from_value(expected[2].clone()).unwrap();
            // candle never returns from converting float8 to f64.
            let tensor = if dtype == DType::F8E4M3 { &tensor.to_dtype(DType::F32).unwrap() } else { tensor };
            let tensor = tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap();
            // serde_json may be off by one in the last bit of a float.
            let close = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-15 * b.abs();
            assert!(tensor.to_vec1().unwrap().iter().zip(&values).all(close), "{file}: {name}: {tensor} {values:?}");
        }
    }
}
