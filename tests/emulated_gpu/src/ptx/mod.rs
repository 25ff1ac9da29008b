//! Kernels given as PTX, which are translated to C, compiled for the CPU and run there.
mod arithmetic;
mod body;
mod compare;
mod compile;
mod control;
mod convert;
mod memory;
mod module;
mod parse;
#[cfg(test)]
mod tests;
mod translate;
mod types;

use compile::{Launch, Run};
use module::Module;
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

/// A kernel that can be run. It stays loaded.
pub(crate) struct Kernel {
    run: Run,
    sizes: Vec<usize>,
    offsets: Vec<usize>,
    stack: Option<usize>,
}

impl Kernel {
    /// Translates and loads the kernel `name` of a module.
    pub(crate) fn load(ptx: &str, name: &str) -> Result<Self, String> {
        let text = module::without_comments(ptx);
        let translation = translate::translate(&Module::parse(&text)?, name)?;
        let run = compile::load(&translation.source)?;
        let (sizes, offsets) = translation.parameters.into_iter().unzip();
        Ok(Self { run, sizes, offsets, stack: translation.stack })
    }

    /// Returns the sizes of the parameters in bytes, in order.
    pub(crate) fn parameter_sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// Runs the whole grid on the calling thread. `shared` is the size of the dynamic shared memory in bytes. Errors
    /// that must not happen on a GPU (an access outside shared memory, threads that wait forever) end the process with
    /// a message.
    ///
    /// # Safety
    /// The parameters must be those that the kernel expects, and memory that it accesses through them must exist.
    pub(crate) unsafe fn run(&self, grid: [u32; 3], block: [u32; 3], shared: u32, parameters: &[Vec<u8>]) {
        static TURN: AtomicU32 = AtomicU32::new(0);
        assert_eq!(parameters.len(), self.sizes.len(), "there must be a value for each parameter");
        let size = self.offsets.last().zip(self.sizes.last()).map_or(0, |(offset, size)| offset + size);
        let mut bytes = vec![0; size];
        for ((parameter, size), offset) in parameters.iter().zip(&self.sizes).zip(&self.offsets) {
            bytes[*offset..offset + size].copy_from_slice(parameter);
        }
        let threads: usize = block.iter().map(|length| *length as usize).product();
        let stacks = self.stack.map_or(std::ptr::null_mut(), |stack| stacks(threads * stack));
        let turn = TURN.fetch_add(1, Ordering::Relaxed);
        let launch = Launch { grid, block, dynamic_shared: shared, parameters: bytes.as_ptr(), stacks, turn };
        // SAFETY: the parameters and stacks are as large as the kernel needs; the caller guarantees the rest.
        unsafe { (self.run)(&launch) }
    }
}

/// Returns the names of the kernels in a module.
pub(crate) fn entries(ptx: &str) -> Vec<&str> {
    let lines = ptx.lines().filter_map(|line| line.split("//").next()?.split_once(".entry"));
    lines.filter_map(|(_, rest)| rest.split(['(', ' ', '\t']).find(|name| !name.is_empty())).collect()
}

/// Returns memory for the stacks of a block's threads, which is kept for the next kernel on this operating system
/// thread.
fn stacks(size: usize) -> *mut c_void {
    struct Stacks(*mut u8, Layout);
    impl Drop for Stacks {
        fn drop(&mut self) {
            // SAFETY: the memory was allocated below with this layout.
            unsafe { dealloc(self.0, self.1) }
        }
    }
    thread_local! {
        static STACKS: RefCell<Option<Stacks>> = const { RefCell::new(None) };
    }
    STACKS.with_borrow_mut(|stacks| {
        if let Some(Stacks(address, layout)) = stacks
            && layout.size() >= size
        {
            return address.cast();
        }
        *stacks = None;
        let layout = Layout::from_size_align(size.max(1), 1 << 12).expect("stacks that fit into memory");
        // SAFETY: the size is not zero.
        let address = unsafe { alloc(layout) };
        if address.is_null() {
            handle_alloc_error(layout);
        }
        *stacks = Some(Stacks(address, layout));
        address.cast()
    })
}
