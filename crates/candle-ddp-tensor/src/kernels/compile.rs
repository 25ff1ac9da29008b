//! Compiling CUDA sources to PTX with NVRTC, once per process and GPU generation.
use super::source::Source;
use crate::{Error, Result};
use cudarc::nvrtc::{CompileError, CompileOptions, compile_ptx_with_opts, result, sys};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// What is compiled, and for which compute capability.
type Key = (Source, i32);
static COMPILED: Mutex<Option<HashMap<Key, Arc<str>>>> = Mutex::new(None);

/// Returns the PTX of `source` for GPUs of this compute capability (90 for 9.0). Needs no GPU.
///
/// # Errors
/// Returns [`Error::Kernel`] with the compiler's messages.
pub(super) fn ptx(source: Source, capability: i32) -> Result<Arc<str>> {
    let target = target(capability, &targets(source)?).ok_or_else(|| {
        let reason =
            format!("NVRTC has no target for GPUs of compute capability {}.{}", capability / 10, capability % 10);
        failure(source, "choosing a target", reason)
    })?;
    // Held while compiling, so that other threads do not compile the same source.
    let mut compiled = COMPILED.lock();
    let compiled = compiled.get_or_insert_default();
    if let Some(ptx) = compiled.get(&(source, target)) {
        return Ok(ptx.clone());
    }
    let ptx: Arc<str> = compile(source.name(), source.text(), target)
        .map_err(|reason| failure(source, &format!("NVRTC for compute_{target}"), reason))?
        .into();
    compiled.insert((source, target), ptx.clone());
    Ok(ptx)
}

pub(super) fn failure(source: Source, operation: &str, reason: impl ToString) -> Error {
    Error::Kernel { file: source.name(), operation: operation.to_string(), reason: reason.to_string() }
}

/// Returns the newest target that such a GPU supports: the driver translates PTX for older targets.
fn target(capability: i32, targets: &[i32]) -> Option<i32> {
    targets.iter().copied().filter(|target| *target <= capability).max()
}

/// Returns the targets of the installed NVRTC.
fn targets(source: Source) -> Result<Vec<i32>> {
    let fail = |error: result::NvrtcError| failure(source, "querying NVRTC's targets", error);
    let mut count = 0;
    // SAFETY: writes one number.
    unsafe { sys::nvrtcGetNumSupportedArchs(&mut count) }.result().map_err(fail)?;
    let mut targets = vec![0; usize::try_from(count).unwrap_or_default()];
    // SAFETY: writes as many numbers as returned by the call above, for which there is room.
    unsafe { sys::nvrtcGetSupportedArchs(targets.as_mut_ptr()) }.result().map_err(fail)?;
    Ok(targets)
}

/// Compiles without fused multiply-adds, so that results equal those of the CPU kernels.
fn compile(name: &str, text: &str, target: i32) -> Result<String, String> {
    let options = CompileOptions {
        fmad: Some(false),
        options: vec![format!("--gpu-architecture=compute_{target}"), "--std=c++17".to_string()],
        name: Some(name.to_string()),
        ..Default::default()
    };
    let image = compile_ptx_with_opts(text, options).map_err(|error| match error {
        CompileError::CompileError { nvrtc, log, .. } => format!("{nvrtc}:\n{}", log.to_string_lossy().trim_end()),
        other => other.to_string(),
    })?;
    let bytes = image.as_bytes().unwrap_or_default();
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8(text.to_vec()).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::source::{DTYPES, Kernel};
    use std::collections::BTreeSet;

    /// Returns the names of the kernels in the PTX.
    fn entries(ptx: &str) -> BTreeSet<String> {
        let names = ptx.lines().filter_map(|line| line.trim().strip_prefix(".visible .entry "));
        names.map(|name| name.trim_end_matches('(').to_string()).collect()
    }

    /// For all GPUs that this NVRTC supports, from Volta on, the PTX must contain exactly the kernels that are looked
    /// up.
    #[test]
    fn every_kernel_compiles_for_every_generation() {
        let targets: Vec<i32> = targets(Source::Adam).unwrap().into_iter().filter(|target| *target >= 70).collect();
        assert!([80, 90].iter().all(|target| targets.contains(target)), "{targets:?}");
        for target in targets {
            for source in Source::ALL.iter().copied() {
                let found = entries(&ptx(source, target).unwrap());
                let kernels = Kernel::ALL.iter().filter(|kernel| kernel.source() == source);
                let expected: BTreeSet<String> =
                    kernels.flat_map(|kernel| DTYPES.map(|(dtype, _)| kernel.name(dtype).unwrap())).collect();
                assert_eq!(found, expected, "{} for compute_{target}", source.name());
            }
        }
    }

    #[test]
    fn multiplications_and_additions_are_not_fused() {
        // Exponential functions have fused ones of their own.
        let exact = |source: &Source| !matches!(source, Source::Softmax | Source::Elementwise | Source::Attention);
        for source in Source::ALL.iter().copied().filter(exact) {
            let ptx = ptx(source, 90).unwrap();
            assert!(!ptx.contains("fma."), "{}", source.name());
            assert!(!ptx.contains("sqrt.approx") && !ptx.contains("div.approx"), "{}", source.name());
        }
    }

    #[test]
    fn errors_contain_the_compilers_messages() {
        let error = compile("broken.cu", "extern \"C\" __global__ void broken() { nothing; }", 90).unwrap_err();
        assert!(error.contains("broken.cu") && error.contains("nothing"), "{error}");
    }

    #[test]
    fn a_gpu_newer_than_the_compiler_gets_ptx_that_its_driver_translates() {
        assert_eq!(target(90, &[75, 80, 90, 100]), Some(90));
        assert_eq!(target(89, &[75, 80, 90, 100]), Some(80));
        assert_eq!(target(130, &[75, 80, 90, 100]), Some(100));
        assert_eq!(target(70, &[75, 80, 90, 100]), None);
        assert!(ptx(Source::Sgd, 10).unwrap_err().to_string().contains("compute capability 1.0"));
    }
}
