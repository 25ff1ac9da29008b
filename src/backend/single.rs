//! The engine of a world of one rank, on any device. It makes the same checks as every engine.
use super::check::extent;
use super::collective::Arguments;
use super::{Collective, Communicator, Completion, Split, Work};
use crate::error::Failure;
use crate::rendezvous::Store;
use crate::tensor::copy::copy;
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use std::sync::{Arc, OnceLock};

/// The only rank of a group whose tensors are on one device.
pub(crate) struct SingleCommunicator {
    device: Device,
    /// The reason why the group was ended.
    reason: OnceLock<String>,
}

impl SingleCommunicator {
    pub(crate) fn new(device: Device) -> Self {
        Self { device, reason: OnceLock::new() }
    }
}

impl Communicator for SingleCommunicator {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn start(&self, collective: Collective) -> Result<Work> {
        collective.check(0, 1, &self.device)?;
        self.failure().map_or(Ok(()), Err)?;
        match collective.arguments() {
            // The output of an all-to-all may lack this rank's own part.
            Arguments { output: Some(output), input: Some(input), .. } if output.elem_count() > 0 => {
                assign(output, input)?;
            }
            Arguments { output: None, input: None, .. } => self.device.synchronize()?,
            // With one tensor, that is already the result. (The checks refuse messages.)
            _ => {}
        }
        Ok(Work::new(OnDevice(self.device.clone())))
    }

    fn failure(&self) -> Option<Error> {
        self.reason.get().map(|reason| Failure::PeerFailed { peer: 0, reason: reason.clone() }.into())
    }

    fn abort(&self, reason: &str) {
        // The first reason stays.
        let _ = self.reason.set(reason.to_string());
    }

    fn split(&self, ranks: &[usize], _: Arc<dyn Store>) -> Result<Split> {
        self.failure().map_or(Ok(()), Err)?;
        Ok(match ranks.contains(&0) {
            true => Split::Member(Box::new(Self::new(self.device.clone()))),
            false => Split::NotMember,
        })
    }
}

/// Copies `input` into `output`, which has as many elements. If the two overlap, they are the same elements.
fn assign(output: &Tensor, input: &Tensor) -> Result<()> {
    let ((to, to_bytes), (from, from_bytes)) = (extent(output), extent(input));
    if to == from && to_bytes == from_bytes {
        return Ok(());
    }
    let input = input.flatten_all()?;
    // candle does not copy within one storage.
    let input = if to == from { input.copy()? } else { input };
    Ok(copy(&output.flatten_all()?, &input)?)
}

/// candle's own stream runs operations in order, so the next ones need not wait.
struct OnDevice(Device);

impl Completion for OnDevice {
    fn wait(&self) -> Result<()> {
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        Ok(self.0.synchronize()?)
    }

    fn is_completed(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::ReduceOp;
    use crate::rendezvous::HashStore;
    use candle_core::DType;
    use std::time::Duration;

    const DTYPES: [DType; 7] = [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I64, DType::U32, DType::U8];

    fn numbers(dtype: DType, from: u32) -> Tensor {
        Tensor::arange(from, from + 6, &Device::Cpu).unwrap().to_dtype(dtype).unwrap().reshape((2, 3)).unwrap()
    }

    fn values(tensor: &Tensor) -> Vec<f64> {
        tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }

    #[test]
    fn every_collective_gives_this_rank_its_own_values() {
        let engine = SingleCommunicator::new(Device::Cpu);
        for dtype in DTYPES {
            let own = [1., 2., 3., 4., 5., 6.];
            for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Prod] {
                if op == ReduceOp::Avg && !dtype.is_float() {
                    continue;
                }
                let tensor = numbers(dtype, 1);
                engine.run(Collective::AllReduce { tensor: tensor.clone(), op }).unwrap();
                engine.run(Collective::Reduce { tensor: tensor.clone(), root: 0, op }).unwrap();
                engine.run(Collective::Broadcast { tensor: tensor.clone(), root: 0 }).unwrap();
                assert_eq!(values(&tensor), own, "{dtype:?}, {op}");
            }
            let moves: [fn(Tensor, Tensor) -> Collective; 5] = [
                |output, input| Collective::AllGather { output, input },
                |output, input| Collective::ReduceScatter { output, input, op: ReduceOp::Sum },
                |output, input| Collective::AllToAll { output, input },
                |output, input| Collective::Gather { output: Some(output), input, root: 0 },
                |output, input| Collective::Scatter { output, input: Some(input), root: 0 },
            ];
            for collective in moves {
                let output = Tensor::zeros(6, dtype, &Device::Cpu).unwrap();
                let collective = collective(output.clone(), numbers(dtype, 1));
                let name = collective.name();
                let work = engine.start(collective).unwrap();
                work.synchronize().unwrap();
                assert!(work.is_completed());
                assert_eq!(values(&output), own, "{dtype:?}, {name}");
            }
        }
        engine.run(Collective::Barrier).unwrap();
    }

    #[test]
    fn slices_of_one_storage_are_copied_and_a_gather_may_be_in_place() {
        let engine = SingleCommunicator::new(Device::Cpu);
        let both = numbers(DType::F32, 1);
        let [first, second] = [0, 1].map(|row| both.narrow(0, row, 1).unwrap());
        engine.run(Collective::AllGather { output: first.clone(), input: first }).unwrap();
        assert_eq!(values(&both), [1., 2., 3., 4., 5., 6.]);
        let first = both.narrow(0, 0, 1).unwrap();
        engine.run(Collective::AllToAll { output: first, input: second }).unwrap();
        assert_eq!(values(&both), [4., 5., 6., 4., 5., 6.]);
    }

    #[test]
    fn what_cannot_be_done_alone_is_refused() {
        let engine = SingleCommunicator::new(Device::Cpu);
        let tensor = numbers(DType::F32, 1);
        let refused = [
            (Collective::Send { tensor: tensor.clone(), peer: 0 }, "is this rank itself"),
            (Collective::Broadcast { tensor: tensor.clone(), root: 1 }, "rank 1 is outside of a world of 1"),
            (Collective::AllReduce { tensor: tensor.t().unwrap(), op: ReduceOp::Sum }, "not contiguous"),
            (Collective::Gather { output: None, input: tensor.clone(), root: 0 }, "is the root and must pass it"),
        ];
        for (collective, expected) in refused {
            let text = engine.run(collective).unwrap_err().to_string();
            assert!(text.contains(expected), "{text}");
        }
        let store: Arc<dyn Store> = Arc::new(HashStore::new(Duration::from_secs(5)));
        assert!(matches!(engine.split(&[0], store.clone()), Ok(Split::Member(_))));
        engine.abort("no data");
        engine.abort("something else");
        for text in [
            engine.run(Collective::Barrier).unwrap_err().to_string(),
            engine.duplicate(store).err().unwrap().to_string(),
        ] {
            assert_eq!(text, "rank 0 ended the group: no data");
        }
    }
}
