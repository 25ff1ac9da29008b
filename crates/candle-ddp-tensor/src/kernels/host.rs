//! The kernels on the CPU, for tests: the system's C++ compiler compiles the same `.cu` files, and they execute the
//! same launches. See `host.h`.
// It is compiled only for tests, which panic if something is wrong.
#![allow(clippy::unwrap_used)]
use super::launches::{Arguments, THREADS};
use super::program::Machine;
use super::source::Kernel;
use super::table::{Sets, Table};
use crate::Result;
use candle_core::DType;
use libloading::Library;
use parking_lot::Mutex;
use std::cell::Cell;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

const SOURCE: &str = concat!(
    include_str!("host.h"),
    include_str!("element.cu"),
    include_str!("few.cu"),
    include_str!("part.cu"),
    include_str!("reduce.cu"),
    include_str!("moments.cu"),
    include_str!("adam.cu"),
    include_str!("sgd.cu"),
    include_str!("lamb.cu"),
    include_str!("copy.cu"),
    include_str!("gradient.cu"),
    include_str!("layer.cu"),
    include_str!("rows.cu"),
    include_str!("norm.cu"),
    include_str!("norm_rows.cu"),
    include_str!("host.cpp"),
);

type KernelEntry = unsafe extern "C" fn(*const u64, u32, Sets, *mut f64);
type HostLaunch = unsafe extern "C" fn(KernelEntry, u32, u32, *const u64, u32, *const Sets, *mut f64);
type LayerEntry = unsafe extern "C" fn(Arguments);
type HostLaunchByValue = unsafe extern "C" fn(LayerEntry, u32, u32, *const Arguments);

/// Held during a launch, since the fibres are global.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A machine whose memory is the process's own, and which counts its launches.
#[derive(Debug)]
pub struct Host {
    library: &'static Library,
    pub launches: Cell<usize>,
}

impl Host {
    /// Returns `None` if kernels cannot be compiled for the CPU: this needs a C++ compiler, `c++`, and glibc.
    pub fn new() -> Option<Self> {
        static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
        let library = LIBRARY.get_or_init(compile).as_ref()?;
        Some(Self { library, launches: Cell::new(0) })
    }

    fn symbol<T: Copy>(&self, name: &str) -> T {
        // SAFETY: callers name the type that the symbol has in the sources.
        unsafe { *self.library.get::<T>(name).unwrap_or_else(|error| panic!("{name}: {error}")) }
    }

    /// Returns `host_to_f16` or `host_to_bf16`.
    pub fn narrow(&self, name: &str) -> impl Fn(f32) -> u16 {
        let function: unsafe extern "C" fn(f32) -> u16 = self.symbol(name);
        // SAFETY: the function only computes with its argument.
        move |value| unsafe { function(value) }
    }

    /// Returns `host_from_f16` or `host_from_bf16`.
    pub fn widen(&self, name: &str) -> impl Fn(u16) -> f32 {
        let function: unsafe extern "C" fn(u16) -> f32 = self.symbol(name);
        // SAFETY: the function only computes with its argument.
        move |bits| unsafe { function(bits) }
    }
}

/// Returns `None` if the system lacks a compiler or fibres.
fn compile() -> Option<Library> {
    if !cfg!(all(target_os = "linux", target_env = "gnu")) {
        return None;
    }
    Command::new("c++").arg("--version").output().ok()?;
    let folder = tempfile::tempdir().unwrap();
    let (source, library) = (folder.path().join("kernels.cpp"), folder.path().join("libkernels.so"));
    std::fs::write(&source, SOURCE).unwrap();
    // As with NVRTC, multiplications and additions are not fused.
    let flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden", "-w"];
    let output = Command::new("c++").args(flags).args([Path::new("-o"), &library, &source]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // SAFETY: loading it runs only constructors of empty containers.
    Some(unsafe { Library::new(&library) }.unwrap())
}

impl Machine for Host {
    type Words = Vec<u64>;
    type Numbers = Vec<f64>;

    fn upload(&self, words: &[u64]) -> Result<Vec<u64>> {
        Ok(words.to_vec())
    }

    /// Not zeros, on which kernels must not rely.
    fn numbers(&self, count: usize) -> Result<Vec<f64>> {
        Ok(vec![f64::NAN; count])
    }

    fn write(&self, numbers: &mut Vec<f64>, values: &[f64]) -> Result<()> {
        numbers[..values.len()].copy_from_slice(values);
        Ok(())
    }

    fn read(&self, numbers: &Vec<f64>, count: usize) -> Result<Vec<f64>> {
        Ok(numbers[..count].to_vec())
    }

    fn address(&self, numbers: &Vec<f64>) -> u64 {
        numbers.as_ptr() as u64
    }

    fn launch(
        &self,
        (kernel, dtype): (Kernel, DType),
        blocks: u32,
        (words, table): (&Vec<u64>, &Table),
        numbers: Option<&mut Vec<f64>>,
    ) -> Result<()> {
        let _turn = ONE_AT_A_TIME.lock();
        self.launches.set(self.launches.get() + 1);
        let kernel: KernelEntry = self.symbol(&kernel.name(dtype).unwrap());
        let launch: HostLaunch = self.symbol("host_launch");
        let numbers = numbers.map_or(std::ptr::null_mut(), Vec::as_mut_ptr);
        // SAFETY: these are the arguments of all kernels; the tests ensure that the tensors in the table exist.
        unsafe { launch(kernel, blocks, THREADS, words.as_ptr(), table.parts, &table.sets, numbers) };
        Ok(())
    }

    fn launch_by_value(&self, (kernel, dtype): (Kernel, DType), blocks: u32, arguments: &Arguments) -> Result<()> {
        let _turn = ONE_AT_A_TIME.lock();
        self.launches.set(self.launches.get() + 1);
        let kernel: LayerEntry = self.symbol(&kernel.name(dtype).unwrap());
        let launch: HostLaunchByValue = self.symbol("host_launch_by_value");
        // SAFETY: these are the arguments of the kernels of layers; the tests ensure that the tensors exist.
        unsafe { launch(kernel, blocks, THREADS, arguments) };
        Ok(())
    }
}
