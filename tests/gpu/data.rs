//! Batches of a `DataLoader` for a GPU: pinned memory, copies on a separate stream, and the order between that and candle's.
use super::fences::{assert_all, keep_busy};
use super::launch::gpus;
use candle_core::{DType, Device, Tensor};
use candle_ddp::data::{DataLoader, Dataset, DistributedSampler, LoaderOptions, SamplerOptions, default_collate};
use candle_ddp::seed::Generator;
use candle_ddp::{Error, Result};

const SAMPLES: usize = 22;
const BATCH: usize = 4;
/// 1 MiB a sample: large enough that a copy takes its time.
const ELEMENTS: usize = 1 << 18;

/// Tensors that are full of their index.
struct Constant;

impl Dataset for Constant {
    type Sample = (Tensor, u32, String);

    fn len(&self) -> usize {
        SAMPLES
    }

    fn get(&self, index: usize, _: &mut Generator) -> Result<Self::Sample> {
        if index == 9 {
            return Err(Error::InvalidArgument { argument: "image", reason: "it is corrupt".to_string() });
        }
        Ok((Tensor::full(index as f32, ELEMENTS, &Device::Cpu)?, index as u32, index.to_string()))
    }
}

/// Trains two epochs, and checks that each batch holds the right samples, before and after other work on candle's stream.
fn read(device: &Device, num_workers: usize) -> Result<()> {
    let sampler = DistributedSampler::new(SAMPLES, 0, 1, SamplerOptions { shuffle: false, ..Default::default() })?;
    let options = LoaderOptions { batch_size: BATCH, num_workers, ..Default::default() };
    let loader = DataLoader::from_sampler(Constant, sampler, options, default_collate)?.to_device(device);
    for epoch in 0..2 {
        // Freed memory of the same size, which candle's stream still writes when the copy could begin.
        let mut kept = Vec::new();
        for (number, batch) in loader.iter().enumerate() {
            let first = number * BATCH;
            let (images, labels, names) = match batch {
                Err(error) if number == 2 => {
                    assert!(error.to_string().starts_with("sample 9 of the dataset"), "{error}");
                    continue;
                }
                batch => batch?,
            };
            assert!(images.device().same_device(device) && labels.device().same_device(device));
            let count = BATCH.min(SAMPLES - first);
            assert_eq!(names.len(), count);
            // Reads the batch at once, and then keeps the stream busy, so that the next copy must wait, or run at the same time.
            let sums = (images.sum(1)? / ELEMENTS as f64)?;
            kept.push((first, sums, labels));
            if number % 2 == 0 {
                let _product = keep_busy(device)?;
            }
            drop(Tensor::full(f32::NAN, (BATCH, ELEMENTS), device)?);
            if number == 4 {
                assert_all(&images.narrow(0, 1, 1)?, (first + 1) as f32, "a batch")?;
            }
        }
        for (first, sums, labels) in kept {
            let expected: Vec<u32> = (first..SAMPLES.min(first + BATCH)).map(|index| index as u32).collect();
            assert_eq!(labels.to_vec1::<u32>()?, expected);
            let sums: Vec<u32> = sums.to_vec1::<f32>()?.into_iter().map(|sum| sum.round() as u32).collect();
            assert_eq!(sums, expected, "epoch {epoch}, {num_workers} workers");
        }
        assert_eq!(loader.current_epoch(), epoch + 1);
    }
    // An iterator that is dropped with a copy on its way.
    let mut batches = loader.iter();
    batches.next().transpose()?;
    drop(batches);
    Ok(device.synchronize()?)
}

#[test]
fn batches_arrive_whole_and_in_order() {
    let Some(_) = gpus("batches_arrive_whole_and_in_order") else { return };
    let device = Device::new_cuda(0).unwrap();
    for num_workers in [0, 3] {
        read(&device, num_workers).unwrap();
    }
}

/// Dtypes without CUDA kernels are copied by candle, and all dtypes keep their bits.
#[test]
fn every_dtype_keeps_its_values() {
    let Some(_) = gpus("every_dtype_keeps_its_values") else { return };
    let device = Device::new_cuda(0).unwrap();
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16, DType::U8, DType::U32, DType::I64] {
        let sampler =
            DistributedSampler::new(6, 0, 1, SamplerOptions { shuffle: false, ..Default::default() }).unwrap();
        let options = LoaderOptions { batch_size: 6, num_workers: 1, ..Default::default() };
        let collate = move |indices: Vec<usize>| {
            let indices: Vec<f32> = indices.into_iter().map(|index| index as f32).collect();
            // Not contiguous, next to an empty one.
            let matrix = Tensor::from_vec(indices, (2, 3), &Device::Cpu)?.t()?.to_dtype(dtype)?;
            Ok((matrix.t()?, matrix.narrow(0, 0, 0)?))
        };
        let loader = DataLoader::from_sampler(0..6, sampler, options, collate).unwrap().to_device(&device);
        let (matrix, empty) = loader.iter().next().unwrap().unwrap();
        assert_eq!((matrix.dtype(), matrix.dims(), empty.dims()), (dtype, &[2, 3][..], &[0, 2][..]));
        let values = matrix.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap().to_vec2::<f32>().unwrap();
        assert_eq!(values, [[0., 1., 2.], [3., 4., 5.]], "{dtype:?}");
    }
}
