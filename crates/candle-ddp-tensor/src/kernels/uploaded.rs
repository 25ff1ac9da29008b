//! Tables that are on a GPU already. Optimizers, clipping and DDP's copies use the same tensors in every step, so the same tables, and so do
//! layers that sum with weights.
//! Uploading one again would cost an allocation and a copy, for which the driver may wait.
use super::address::stream_of;
use super::launches::Address;
use crate::Result;
use candle_core::CudaDevice;
use cudarc::driver::{CudaSlice, DevicePtr};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// The number of tables that a thread keeps for each stream: several for each bucket of a large model.
const MOST: usize = 512;

/// The tables of a stream.
#[derive(Default)]
struct Tables {
    /// Each with the number of its last use.
    known: HashMap<Vec<u64>, (Rc<CudaSlice<u64>>, u64)>,
    uses: u64,
}

impl Tables {
    fn get(&mut self, device: &CudaDevice, words: &[u64]) -> Result<Rc<CudaSlice<u64>>> {
        self.uses += 1;
        if let Some((table, last)) = self.known.get_mut(words) {
            *last = self.uses;
            return Ok(table.clone());
        }
        if self.known.len() >= MOST {
            let oldest = self.known.iter().min_by_key(|(_, (_, last))| *last).map(|(words, _)| words.clone());
            oldest.map(|oldest| self.known.remove(&oldest));
        }
        // The driver has its own copy of the words when this returns.
        let table = Rc::new(device.clone_htod(words)?);
        self.known.insert(words.to_vec(), (table.clone(), self.uses));
        Ok(table)
    }
}

thread_local! {
    /// The tables of this thread, by context and stream: a table is uploaded before its first use on the stream, and freed after its
    /// last. Their streams' handles stay taken as long as these are here.
    static TABLES: RefCell<HashMap<(usize, usize), Tables>> = RefCell::default();
}

/// Returns `words` on the GPU, which must not change them.
pub(super) fn uploaded(device: &CudaDevice, words: &[u64]) -> Result<Rc<CudaSlice<u64>>> {
    TABLES.with_borrow_mut(|tables| tables.entry(stream_of(device)).or_default().get(device, words))
}

/// Numbers for kernels that do not change from step to step.
#[derive(Debug)]
pub struct Constants {
    _words: Rc<CudaSlice<u64>>,
    address: u64,
}

impl Constants {
    pub fn new(device: &CudaDevice, numbers: &[f64]) -> Result<Self> {
        let words: Vec<u64> = numbers.iter().map(|number| number.to_bits()).collect();
        let words = uploaded(device, &words)?;
        let address = words.device_ptr(&device.cuda_stream()).0;
        Ok(Self { _words: words, address })
    }

    pub fn address(&self) -> Address<'_> {
        Address::new(self.address)
    }
}
