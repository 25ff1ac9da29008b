//! Selects the process group that sends a tensor.
use crate::Result;
use crate::placement::Spread;
use crate::process_group::ProcessGroup;
use candle_core::Device;
use std::sync::OnceLock;

/// The group that a model was built with and, if that group works on GPUs and the model has variables on the CPU, a
/// second group of the same ranks for those variables. PyTorch likewise has a backend for each device type
/// (`"cpu:gloo,cuda:nccl"`).
#[derive(Clone)]
pub(crate) struct Groups {
    main: ProcessGroup,
    cpu: OnceLock<ProcessGroup>,
    hybrid: Option<Hybrid>,
}

/// The groups of a model that is spread over some of the ranks, while others have copies of it: PyTorch's hybrid sharding (HSDP).
#[derive(Clone)]
struct Hybrid {
    /// The ranks that have a model together.
    within: ProcessGroup,
    /// The ranks that have the same pieces.
    across: ProcessGroup,
}

impl Groups {
    pub(in crate::ddp) fn new(main: ProcessGroup) -> Self {
        Self { main, cpu: OnceLock::new(), hybrid: None }
    }

    /// The groups in which `ranks` consecutive ranks, a divisor of the world size, have a model. Every rank must call it.
    pub(in crate::ddp) fn sharded(main: ProcessGroup, ranks: usize) -> Result<Self> {
        let hybrid = (ranks < main.world_size()).then(|| main.hybrid(ranks)).transpose()?;
        let hybrid = hybrid.map(|(within, across)| Hybrid { within, across });
        Ok(Self { hybrid, ..Self::new(main) })
    }

    /// The ranks over which a model and its optimizer's state are spread, if they are.
    pub(crate) fn within(&self) -> &ProcessGroup {
        self.hybrid.as_ref().map_or(&self.main, |hybrid| &hybrid.within)
    }

    /// The ranks that have the same pieces, if there are several.
    pub(crate) fn across(&self) -> Option<&ProcessGroup> {
        self.hybrid.as_ref().map(|hybrid| &hybrid.across)
    }

    /// How this rank's pieces are spread.
    pub(crate) fn spread(&self) -> Spread {
        let is_copy = self.across().is_some_and(|across| across.rank() > 0);
        if is_copy { Spread::Copy } else { Spread::Shard }
    }

    pub(crate) fn main(&self) -> &ProcessGroup {
        &self.main
    }

    /// Whether variables on `device` can be sent, over the main group or the one for the CPU.
    pub(in crate::ddp) fn serve(&self, device: &Device) -> bool {
        device.is_cpu() || device.same_device(self.main.device())
    }

    /// Creates the group for variables on the CPU. Every rank must call it.
    pub(in crate::ddp) fn add_cpu(&self) -> Result<()> {
        let cpu = self.main.cpu_group()?;
        self.cpu.get_or_init(|| cpu);
        Ok(())
    }

    /// The group for tensors on `device`.
    pub(in crate::ddp) fn of(&self, device: &Device) -> &ProcessGroup {
        match self.cpu.get() {
            Some(cpu) if device.is_cpu() => cpu,
            _ => &self.main,
        }
    }
}
