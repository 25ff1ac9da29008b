//! A Python with PyTorch, for the tests of working together with it.
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// The interpreter named by `CANDLE_DDP_PYTHON` (default: `python3`), if it can import PyTorch. Otherwise says that
/// `test` is skipped, or fails where `CANDLE_DDP_REQUIRE_PYTORCH` is set.
pub(crate) fn python(test: &str) -> Option<PathBuf> {
    let python = PathBuf::from(std::env::var_os("CANDLE_DDP_PYTHON").unwrap_or_else(|| "python3".into()));
    let imports = Command::new(&python)
        .args(["-c", "import torch.distributed"])
        .stdin(Stdio::null())
        .output()
        .is_ok_and(|output| output.status.success());
    if imports {
        return Some(python);
    }
    let python = python.display();
    assert!(
        std::env::var_os("CANDLE_DDP_REQUIRE_PYTORCH").is_none(),
        "{test}: {python} cannot import torch.distributed, and CANDLE_DDP_REQUIRE_PYTORCH is set"
    );
    // Not `eprintln!`, which the test harness would swallow.
    let line =
        format!("SKIPPED {test}: {python} cannot import PyTorch (CANDLE_DDP_PYTHON names an interpreter that can)\n");
    let _ = std::io::Write::write_all(&mut std::io::stderr().lock(), line.as_bytes());
    None
}
