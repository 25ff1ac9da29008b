//! A program's struct that holds everything of a training can derive `Debug`, and shows sizes and ranks instead of values.
use crate::common::ranks;
use candle_core::Device;
use candle_ddp::data_parallel::DataParallel;
use candle_ddp::prelude::*;
use candle_nn::{Linear, linear};

#[derive(Debug)]
#[expect(dead_code, reason = "Debug reads the fields")]
struct Training {
    ddp: DistributedDataParallel<Linear>,
    optimizer: AdamW,
    loader: DataLoader<TensorDataset<Tensor>, Tensor>,
}

#[test]
fn a_struct_with_all_of_a_training_can_be_shown() {
    let mut shown = ranks(2, |pg| {
        let data = TensorDataset::new(Tensor::zeros((6, 3), DType::F32, pg.device())?)?;
        let loader = DataLoader::new(data, &pg, LoaderOptions { batch_size: 2, ..Default::default() })?;
        let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(3, 4, vb))?;
        let optimizer = AdamW::new(&ddp, ParamsAdamW::default())?;
        let guards = format!("{:?} {:?}", ddp.no_sync(), ddp.freeze());
        let batches = {
            let mut batches = loader.epoch(5);
            batches.next().unwrap()?;
            format!("{batches:?}")
        };
        Ok((guards, batches, format!("{:?}", Training { ddp, optimizer, loader })))
    });
    let (guards, batches, training) = shown.remove(1);
    let model = "DistributedDataParallel { parameters: 2, elements: 16, frozen: 0, buffers: 0, ignored: 0, options: DdpOptions {";
    assert!(guards.starts_with(&format!("NoSync({model}")), "{guards}");
    assert!(guards.contains(&format!("Freeze({model}")), "{guards}");
    assert_eq!(batches, "LoaderIter { epoch: 5, consumed: 4, remaining: 1, .. }");
    assert!(training.starts_with(&format!("Training {{ ddp: {model}")), "{training}");
    assert!(training.contains("process_group: ProcessGroup { rank: 1, world_size: 2"), "{training}");
    assert!(!training.contains("Tensor["), "{training}");
}

#[test]
fn data_parallel_can_be_shown() {
    let devices = [Device::Cpu, Device::Cpu];
    let dp = DataParallel::new(&devices, &devices[0], &VarMap::new(), |vb| linear(3, 4, vb)).unwrap();
    let shown = format!("{dp:?}");
    assert_eq!(shown, "DataParallel { devices: [Cpu, Cpu], output_device: Cpu, parameters: 2, buffers: 0, .. }");
    assert_eq!(format!("{:?}", dp.replicas()[1]), "Replica { device: Cpu, variables: 2, .. }");
}
