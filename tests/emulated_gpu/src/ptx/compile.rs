//! Compiling C to a loaded library with the system's C compiler. Libraries are cached in a folder, because many
//! processes run the same kernels.
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::collections::HashMap;
use std::ffi::c_void;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// The same as `struct launch` in `thread.h`.
#[repr(C)]
pub(super) struct Launch {
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) dynamic_shared: u32,
    pub(super) parameters: *const u8,
    pub(super) stacks: *mut c_void,
    pub(super) turn: u32,
}

pub(super) type Run = unsafe extern "C" fn(*const Launch);

/// Multiplications and additions are not fused unless the kernel fuses them.
const OPTIONS: [&str; 8] =
    ["-O2", "-fPIC", "-shared", "-w", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing", "-fwrapv"];

/// Options that allow single instructions for fused multiply-adds, f16 and rounding.
fn processor_options() -> &'static [&'static str] {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") && is_x86_feature_detected!("avx2") {
        return &["-mavx2", "-mfma", "-mf16c"];
    }
    &[]
}

/// Compiles and loads the function that runs the kernel's grid.
pub(super) fn load(source: &str) -> Result<Run, String> {
    static LOADED: Mutex<Option<HashMap<u64, Run>>> = Mutex::new(None);
    let mut hasher = DefaultHasher::new();
    (source, OPTIONS, processor_options()).hash(&mut hasher);
    let hash = hasher.finish();
    let known = |run: Option<Run>| {
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = loaded.get_or_insert_default();
        if let Some(run) = run {
            loaded.insert(hash, run);
        }
        loaded.get(&hash).copied()
    };
    if let Some(run) = known(None) {
        return Ok(run);
    }
    let folder = folder()?;
    let file = folder.join(format!("{hash:016x}.so"));
    if !file.exists() {
        compile(source, &folder, &file)?;
    }
    let explain = |error| format!("loading {}: {error}", file.display());
    // SAFETY: the library was made from this crate's code and has no initializers.
    let library = unsafe { Library::open(Some(&file), RTLD_NOW | RTLD_LOCAL) }.map_err(explain)?;
    // SAFETY: `grid.h` declares the function with this type.
    let run = *unsafe { library.get::<Run>(b"emulated_gpu_run\0") }.map_err(explain)?;
    // The library is never unloaded, because its functions are kept.
    std::mem::forget(library);
    known(Some(run));
    Ok(run)
}

fn folder() -> Result<PathBuf, String> {
    let folder = std::env::var_os("EMULATED_GPU_CACHE").map(PathBuf::from).unwrap_or_else(|| {
        unsafe extern "C" {
            safe fn getuid() -> u32;
        }
        std::env::temp_dir().join(format!("emulated-gpu-cache-{}", getuid()))
    });
    let explain = |error| format!("creating {}: {error}", folder.display());
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(explain)?;
    Ok(folder)
}

/// Compiles to another name first, so that other processes never find an incomplete file.
fn compile(source: &str, folder: &Path, file: &Path) -> Result<(), String> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let own = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let (text, library) = (folder.join(format!("{own}.c")), folder.join(format!("{own}.so")));
    fs::write(&text, source).map_err(|error| format!("writing {}: {error}", text.display()))?;
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_string());
    let mut command = Command::new(&compiler);
    command.args(OPTIONS).args(processor_options()).arg("-o").arg(&library).arg(&text).arg("-lm");
    // The compiler must not load the emulated GPU.
    let output = command.env_remove("LD_PRELOAD").output();
    let output = output.map_err(|error| format!("kernels need a C compiler; cannot start `{compiler}`: {error}"))?;
    if !output.status.success() {
        let messages = String::from_utf8_lossy(&output.stderr);
        let messages: Vec<_> = messages.lines().take(20).collect();
        return Err(format!("`{compiler}` refuses {}:\n{}", text.display(), messages.join("\n")));
    }
    let keep = fs::rename(&text, file.with_extension("c")).and_then(|()| fs::rename(&library, file));
    keep.map_err(|error| format!("writing {}: {error}", file.display()))
}
