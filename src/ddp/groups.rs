//! Selects the process group that sends a tensor, since an engine works on tensors of one device.
use crate::Result;
use crate::process_group::ProcessGroup;
use candle_core::Device;
use std::sync::OnceLock;

/// The group that a model was built with and, if that group works on GPUs and the model has variables on the CPU, a
/// second group of the same ranks for those variables. PyTorch likewise has a backend for each device type
/// (`"cpu:gloo,cuda:nccl"`).
pub(crate) struct Groups {
    main: ProcessGroup,
    cpu: OnceLock<ProcessGroup>,
}

impl Groups {
    pub(super) fn new(main: ProcessGroup) -> Self {
        Self { main, cpu: OnceLock::new() }
    }

    pub(super) fn main(&self) -> &ProcessGroup {
        &self.main
    }

    /// Whether variables on `device` can be sent, over the main group or the one for the CPU.
    pub(super) fn serve(&self, device: &Device) -> bool {
        device.is_cpu() || device.same_device(self.main.device())
    }

    /// Creates the group for variables on the CPU. Every rank must call it.
    pub(super) fn add_cpu(&self) -> Result<()> {
        let cpu = self.main.cpu_group()?;
        self.cpu.get_or_init(|| cpu);
        Ok(())
    }

    pub(super) fn are_two(&self) -> bool {
        self.cpu.get().is_some()
    }

    /// The group for tensors on `device`.
    pub(super) fn of(&self, device: &Device) -> &ProcessGroup {
        match self.cpu.get() {
            Some(cpu) if device.is_cpu() => cpu,
            _ => &self.main,
        }
    }
}
