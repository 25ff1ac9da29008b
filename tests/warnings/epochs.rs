//! Loops that begin the same epoch again and again.
use crate::logger::of_two_ranks;
use candle_core::{DType, Tensor};
use candle_ddp::data::{DataLoader, LoaderOptions, SamplerOptions};
use candle_ddp::{DistributedDataParallel, Result};
use candle_nn::{Optimizer, SGD, VarMap, linear};
use std::ops::Range;

type Loader = DataLoader<Range<usize>, Vec<usize>>;

/// How often two ranks warn of an epoch that begins again, whose loaders have 10 batches.
fn warnings(shuffle: bool, program: fn(&mut Loader)) -> usize {
    let warnings = of_two_ranks(|pg| {
        let sampler = SamplerOptions { shuffle, ..Default::default() };
        let mut loader = DataLoader::with_collate(0..20, &pg, LoaderOptions { sampler, ..Default::default() }, Ok)?;
        program(&mut loader);
        Ok(())
    });
    assert!(
        warnings.iter().all(|text| text.contains("begins epoch") && text.contains("loader.epoch(n)")),
        "{warnings:?}"
    );
    warnings.len()
}

fn read(loader: &Loader, batches: usize) {
    loader.iter().take(batches).map(Result::unwrap).for_each(drop);
}

#[test]
fn an_epoch_that_begins_again_is_said_once() {
    assert_eq!(warnings(true, |loader| (0..5).for_each(|_| read(loader, 4))), 1);
    assert_eq!(warnings(true, |loader| (0..2).for_each(|_| read(loader, 2))), 1);
    assert_eq!(warnings(true, |loader| (0..5).for_each(|_| drop(loader.iter().next()))), 1);
    // A loop over a part of a resumed epoch does not find it the next time.
    let resumed: fn(&mut Loader) = |loader| {
        read(loader, 4);
        loader.resume(loader.state()).unwrap();
        read(loader, 2);
        read(loader, 2);
    };
    assert_eq!(warnings(true, resumed), 1);

    // A look at the first batch, whole epochs, and epochs that are named.
    let looked: fn(&mut Loader) = |loader| {
        read(loader, 1);
        (0..3).for_each(|_| loader.iter().for_each(drop));
        (0..3).for_each(|_| read(loader, 10));
        (6..9).for_each(|epoch| loader.epoch(epoch).take(4).for_each(drop));
        (0..3).for_each(|_| loader.epoch(8).take(4).for_each(drop));
    };
    assert_eq!(warnings(true, looked), 0);
    let resumed: fn(&mut Loader) = |loader| {
        read(loader, 4);
        loader.resume(loader.state()).unwrap();
        loader.iter().for_each(drop);
    };
    assert_eq!(warnings(true, resumed), 0);
    // All epochs have the same order, as an evaluation wants it.
    assert_eq!(warnings(false, |loader| (0..5).for_each(|_| read(loader, 4))), 0);
}

/// How often two ranks say that what was left of an epoch has gone into the next: each trains two epochs of 10 batches, and makes a
/// step after the batches for which `steps` says so, of the run and of the epoch.
fn carried(steps: fn(usize, usize) -> bool) -> usize {
    let warnings = of_two_ranks(|pg| {
        let loader = DataLoader::with_collate(0..20, &pg, LoaderOptions::default(), Ok)?;
        let evaluation = DataLoader::with_collate(0..6, &pg, LoaderOptions::default(), Ok)?;
        let x = Tensor::ones((1, 4), DType::F32, pg.device())?;
        let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(4, 1, vb))?;
        let mut sgd = SGD::new(ddp.parameters(), 0.1)?;
        let mut passes = 0;
        for _ in 0..2 {
            for (number, batch) in loader.iter().enumerate() {
                drop(batch?);
                let is_step = steps(passes, number);
                let _guard = (!is_step).then(|| ddp.no_sync());
                let grads = ddp.backward(&ddp.forward(&x)?.sum_all()?)?;
                if is_step {
                    sgd.step(&grads)?;
                }
                passes += 1;
                if number % 5 == 3 {
                    // Another loader's epochs end anywhere.
                    evaluation.iter().try_for_each(|batch: Result<Vec<usize>>| batch.map(drop))?;
                }
            }
        }
        Ok(())
    });
    assert!(
        warnings.iter().all(|text| text.contains("gradients of 6 passes, and the one before it had 4")),
        "{warnings:?}"
    );
    warnings.len()
}

#[test]
fn what_is_left_of_an_epoch_is_said_once() {
    assert_eq!(carried(|_, batch| batch % 4 == 3), 1);
    assert_eq!(carried(|_, batch| batch % 4 == 3 || batch == 9), 0);
    assert_eq!(carried(|passes, _| passes % 4 == 3), 0);
    assert_eq!(carried(|_, batch| batch % 5 == 4), 0);
}
