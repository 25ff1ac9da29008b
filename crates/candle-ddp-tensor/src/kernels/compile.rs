//! Compiling CUDA sources with NVRTC: for one dtype at a time, once per process and GPU generation, and once per machine where there
//! is a cache (`cache.rs`).
use super::cache::{Cache, Key};
use super::launches::supported;
use super::source::Source;
use crate::{Error, Result};
use candle_core::DType;
use candle_ddp_env::PROCESS;
use cudarc::nvrtc::{result, sys};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, LazyLock};

/// The environment variable that asks for PTX with the value `ptx`. The driver then translates it, as it does for GPUs that are newer
/// than NVRTC.
const FORM: &str = "CANDLE_DDP_KERNEL_FORM";

/// An image for the driver: machine code for one generation of GPUs, or PTX with a zero at its end.
pub(super) type Image = Arc<[u8]>;

/// A compilation: the source, the dtype and the target.
type Compilation = (Source, DType, Target);
static COMPILED: Mutex<Option<HashMap<Compilation, Image>>> = Mutex::new(None);

/// The generation of GPUs that the image is for, by compute capability (90 for 9.0).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Target {
    /// Machine code, for GPUs of exactly this generation.
    Code(i32),
    /// PTX, for this generation and later ones.
    Ptx(i32),
}

/// Returns the image of `source` for tensors of `dtype` and GPUs of this compute capability. Needs no GPU.
///
/// # Errors
/// Returns [`Error::Kernel`] with the compiler's messages.
pub(super) fn image(source: Source, dtype: DType, capability: i32) -> Result<Image> {
    let target = target(capability, &targets(source)?, PROCESS.choice(FORM)? == Some("ptx")).ok_or_else(|| {
        let reason =
            format!("NVRTC has no target for GPUs of compute capability {}.{}", capability / 10, capability % 10);
        failure(source, "choosing a target", reason)
    })?;
    image_for(source, dtype, target)
}

pub(super) fn image_for(source: Source, dtype: DType, target: Target) -> Result<Image> {
    static CACHE: LazyLock<Option<Cache>> = LazyLock::new(Cache::of_environment);
    // Held while compiling, so that other threads do not compile the same source.
    let mut compiled = COMPILED.lock();
    let compiled = compiled.get_or_insert_default();
    if let Some(image) = compiled.get(&(source, dtype, target)) {
        return Ok(image.clone());
    }
    let options = options(source, dtype, target)?;
    let compile = || {
        let image = compile(source.name(), source.text(), &options, target);
        image.map_err(|reason| failure(source, &format!("NVRTC for {}", options[0]), reason))
    };
    let image: Image = match &*CACHE {
        Some(cache) => {
            let text = format!("{:?}\n{}\n{}", version(source)?, options.join("\n"), source.text());
            cache.get(&Key { name: format!("{}-{}", source.name(), dtype.as_str()), text }, compile)?
        }
        None => compile()?,
    }
    .into();
    compiled.insert((source, dtype, target), image.clone());
    Ok(image)
}

pub(super) fn failure(source: Source, operation: &str, reason: impl ToString) -> Error {
    Error::Kernel { file: source.name(), operation: operation.to_string(), reason: reason.to_string() }
}

/// Returns the newest target that such a GPU supports: the driver translates PTX for older targets.
fn target(capability: i32, targets: &[i32], wants_ptx: bool) -> Option<Target> {
    let newest = targets.iter().copied().filter(|target| *target <= capability).max()?;
    Some(if newest == capability && !wants_ptx { Target::Code(newest) } else { Target::Ptx(newest) })
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

/// Returns NVRTC's version.
fn version(source: Source) -> Result<[i32; 2]> {
    let mut version = [0; 2];
    let [major, minor] = &mut version;
    // SAFETY: writes two numbers.
    let found = unsafe { sys::nvrtcVersion(major, minor) }.result();
    found.map_err(|error| failure(source, "querying NVRTC's version", error))?;
    Ok(version)
}

/// The compiler's options. Multiplications and additions are not fused, so that results equal those of the CPU kernels.
fn options(source: Source, dtype: DType, target: Target) -> Result<[String; 6]> {
    supported(dtype, source.name())?;
    let only = match dtype {
        DType::F64 => ("double", "f64"),
        DType::F16 => ("F16", "f16"),
        DType::BF16 => ("BF16", "bf16"),
        _ => ("float", "f32"),
    };
    let architecture = match target {
        Target::Code(target) => format!("sm_{target}"),
        Target::Ptx(target) => format!("compute_{target}"),
    };
    Ok([
        format!("--gpu-architecture={architecture}"),
        "--std=c++17".to_string(),
        "--fmad=false".to_string(),
        // For closures.
        "--device-as-default-execution-space".to_string(),
        format!("-DONLY={}", only.0),
        format!("-DSUFFIX={}", only.1),
    ])
}

fn compile(name: &str, text: &str, options: &[String], target: Target) -> Result<Vec<u8>, String> {
    let plain = |error: result::NvrtcError| error.to_string();
    let [text, name] = [text, name].map(|text| CString::new(text).map_err(|error| error.to_string()));
    let program = Program(result::create_program(&text?, Some(&name?)).map_err(plain)?);
    // SAFETY: the program lives until the end of this function.
    if let Err(error) = unsafe { result::compile_program(program.0, options) } {
        // SAFETY: as above.
        let log = unsafe { result::get_program_log(program.0) }.map_err(plain)?;
        let log: Vec<u8> = log.into_iter().map(|byte| byte as u8).take_while(|byte| *byte != 0).collect();
        return Err(format!("{error}:\n{}", String::from_utf8_lossy(&log).trim_end()));
    }
    let mut size = 0;
    // SAFETY: the program lives, and there is room for as many bytes as NVRTC says.
    unsafe {
        match target {
            Target::Code(_) => sys::nvrtcGetCUBINSize(program.0, &mut size),
            Target::Ptx(_) => sys::nvrtcGetPTXSize(program.0, &mut size),
        }
        .result()
        .map_err(plain)?;
        let mut image = vec![0u8; size];
        match target {
            Target::Code(_) => sys::nvrtcGetCUBIN(program.0, image.as_mut_ptr().cast()),
            Target::Ptx(_) => sys::nvrtcGetPTX(program.0, image.as_mut_ptr().cast()),
        }
        .result()
        .map_err(plain)?;
        Ok(image)
    }
}

/// A program of NVRTC.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program was created, and is not used any more.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::launches::THREADS;
    use crate::kernels::source::{DTYPES, Kernel};
    use std::collections::BTreeSet;

    fn ptx(source: Source, dtype: DType, target: i32) -> String {
        let image = image_for(source, dtype, Target::Ptx(target)).unwrap();
        String::from_utf8(image.split_last().unwrap().1.to_vec()).unwrap()
    }

    /// Returns the names of the kernels in the PTX.
    fn entries(ptx: &str) -> BTreeSet<String> {
        let names = ptx.lines().filter_map(|line| line.trim().strip_prefix(".visible .entry "));
        names.map(|name| name.trim_end_matches('(').to_string()).collect()
    }

    /// The GPUs that this NVRTC supports, from Volta on.
    fn generations() -> Vec<i32> {
        let all: Vec<i32> = targets(Source::Adam).unwrap().into_iter().filter(|target| *target >= 70).collect();
        assert!([80, 90].iter().all(|target| all.contains(target)), "{all:?}");
        all
    }

    /// The PTX must contain exactly the kernels that are looked up.
    fn compiles_for(targets: &[i32]) {
        for &target in targets {
            for (source, (dtype, _)) in Source::ALL.iter().flat_map(|source| DTYPES.map(|dtype| (*source, dtype))) {
                let found = entries(&ptx(source, dtype, target));
                let kernels = Kernel::ALL.iter().filter(|kernel| kernel.source() == source);
                let expected: BTreeSet<String> = kernels.map(|kernel| kernel.name(dtype).unwrap()).collect();
                assert_eq!(found, expected, "{} for compute_{target}", source.name());
            }
        }
    }

    #[test]
    fn every_kernel_compiles_for_the_oldest_and_the_newest_generation() {
        let all = generations();
        compiles_for(&[all[0], all[all.len() - 1]]);
    }

    #[test]
    #[ignore = "takes minutes"]
    fn every_kernel_compiles_for_every_generation() {
        compiles_for(&generations());
    }

    #[test]
    fn multiplications_and_additions_are_not_fused() {
        // Exponential functions contain fused operations themselves.
        let exact = |source: &Source| {
            !matches!(source, Source::Softmax | Source::Elementwise | Source::Attention | Source::Rnn)
        };
        let exact = Source::ALL.iter().copied().filter(exact);
        for (source, (dtype, _)) in exact.flat_map(|source| DTYPES.map(|dtype| (source, dtype))) {
            let ptx = ptx(source, dtype, 90);
            assert!(!ptx.contains("fma."), "{}", source.name());
            assert!(!ptx.contains("sqrt.approx") && !ptx.contains("div.approx"), "{}", source.name());
        }
    }

    /// The registers of a thread of each kernel in machine code, whose attribute EIATTR_REGCOUNT has them behind the kernel's symbol.
    fn registers(code: &[u8]) -> Vec<u32> {
        let attributes = code.windows(12).filter(|bytes| bytes.starts_with(&[0x04, 0x2f, 8, 0]));
        attributes.map(|bytes| u32::from_le_bytes(bytes[8..].try_into().unwrap())).collect()
    }

    /// With one block alone, too few loads are in flight: the cross entropy then reached half of a copy's speed.
    #[test]
    fn two_blocks_of_the_largest_kernels_run_at_once_on_a_multiprocessor() {
        let sources = [Source::Softmax, Source::Norm];
        for (source, dtype) in
            sources.into_iter().flat_map(|source| [DType::F32, DType::BF16].map(|dtype| (source, dtype)))
        {
            let registers = registers(&image_for(source, dtype, Target::Code(90)).unwrap());
            let kernels = Kernel::ALL.iter().filter(|kernel| kernel.source() == source).count();
            assert_eq!(registers.len(), kernels, "{}", source.name());
            assert!(
                registers.iter().all(|of_thread| of_thread * 2 * THREADS <= 65_536),
                "{}: {registers:?}",
                source.name()
            );
        }
    }

    #[test]
    fn errors_contain_the_compilers_messages() {
        let broken = "extern \"C\" __global__ void broken() { nothing; }";
        let error = compile("broken.cu", broken, &["--std=c++17".to_string()], Target::Ptx(90)).unwrap_err();
        assert!(error.contains("broken.cu") && error.contains("nothing"), "{error}");
    }

    /// Machine code is an ELF file.
    #[test]
    fn a_gpu_that_the_compiler_knows_gets_machine_code() {
        let image = image_for(Source::Sgd, DType::F32, Target::Code(90)).unwrap();
        assert_eq!(image[..4], *b"\x7fELF");
    }

    #[test]
    fn a_gpu_newer_than_the_compiler_gets_ptx_that_its_driver_translates() {
        let target = |capability| target(capability, &[75, 80, 90, 100], false);
        assert_eq!(target(90), Some(Target::Code(90)));
        assert_eq!(target(89), Some(Target::Ptx(80)));
        assert_eq!(target(130), Some(Target::Ptx(100)));
        assert_eq!(target(70), None);
        assert_eq!(super::target(90, &[80, 90], true), Some(Target::Ptx(90)));
        assert!(image(Source::Sgd, DType::F32, 10).unwrap_err().to_string().contains("compute capability 1.0"));
    }
}
