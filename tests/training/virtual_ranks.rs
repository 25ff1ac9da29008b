//! Virtual ranks: a run has the same bits on any number of ranks.
use crate::common::virtual_ranks::{VIRTUAL, noisy, ranks, train};
use crate::common::{
    Made, assert_close, counted, floats, of_micro_batch, of_zero, sharding, values, with_virtual_ranks,
};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_ddp::backend::cpu::{CpuCommunicator, CpuOptions};
use candle_ddp::data::{
    DataLoader, Dataset, DistributedSampler, LoaderOptions, LoaderState, Remainder, SamplerOptions, default_collate,
};
use candle_ddp::nn::{Linear, batch_norm, linear, sync_batch_norm};
use candle_ddp::optim::{Optimizer, ParamsLamb, ParamsSgd, Sgd, ZeroRedundancyOptimizer};
use candle_ddp::rendezvous::HashStore;
use candle_ddp::seed::Generator;
use candle_ddp::{
    Backend, CustomOptions, DdpOptions, DistributedDataParallel, Error, InitOptions, Precision, ProcessGroup, Result,
    Role, backward_with, init_process_group,
};
use candle_nn::VarMap;
use std::sync::Arc;
use std::time::Duration;

fn assert_same(precision: Precision, reduce_dtype: Option<DType>, worlds: &[usize]) {
    let one = ranks(1, |pg| train(&pg, 2, precision, reduce_dtype)).remove(0);
    assert!(one.len() > 20 && one.values().flatten().all(|bits| f32::from_bits(*bits).is_finite()));
    for &world_size in worlds {
        for (rank, other) in ranks(world_size, |pg| train(&pg, 2, precision, reduce_dtype)).into_iter().enumerate() {
            for (name, expected) in &one {
                assert!(other[name] == *expected, "{name} differs on rank {rank} of {world_size}");
            }
        }
    }
}

#[test]
fn a_run_has_the_same_bits_on_any_number_of_ranks_and_in_any_dtype() {
    let (f32, half) = (Precision::default(), Precision::Half { param_dtype: DType::BF16, buffer_dtype: None });
    assert_same(f32, None, &[2, 3, 4, 5, 7, 8]);
    for (precision, reduce_dtype) in [(f32, DType::BF16), (f32, DType::F16), (half, DType::F32)] {
        assert_same(precision, Some(reduce_dtype), &[3, 8]);
    }
}

#[test]
fn so_it_has_while_fast_ranks_compute_more() {
    let one = ranks(1, |pg| train(&pg, 2, Precision::default(), None)).remove(0);
    for (speeds, blocks) in [
        (vec![2., 1.], vec![0..6, 6..8]),
        (vec![1., 5., 0.3], vec![0..1, 1..7, 7..8]),
        (vec![1., 1., 1.1], vec![0..3, 3..5, 5..8]),
    ] {
        let found = ranks(speeds.len(), |pg| {
            pg.share_by_speed(speeds[pg.rank()])?;
            assert_eq!(model(&pg)?.micro_batches(), Some(blocks[pg.rank()].clone()));
            train(&pg, 2, Precision::default(), None)
        });
        assert!(found.iter().all(|other| *other == one), "{speeds:?}");
    }
    for wrong in [0., -1., f64::NAN, f64::INFINITY] {
        ranks(2, |pg| {
            invalid(pg.share_by_speed(if pg.rank() == 1 { wrong } else { 1. }), "speed", "on rank 1");
            // As before.
            assert_eq!(model(&pg)?.micro_batches(), Some(4 * pg.rank()..4 * pg.rank() + 4));
            Ok(())
        });
    }
}

#[test]
fn the_pace_is_known_after_the_second_step() {
    ranks(2, |pg| {
        let ddp = model(&pg)?;
        assert!(step(&ddp, ddp.micro_batches().unwrap())?);
        assert!(ddp.micro_batches_per_second().is_none());
        assert!(step(&ddp, ddp.micro_batches().unwrap())?);
        assert!(ddp.micro_batches_per_second().is_some_and(|pace| pace > 0. && pace.is_finite()));
        Ok(())
    });
}

/// The gradients are the mean over all micro-batches, as one process computes it.
#[test]
fn gradients_are_the_mean_over_all_micro_batches() {
    let input = |number: usize| Tensor::from_vec(values(12, number as u64), (3, 4), &Device::Cpu).unwrap();
    let all: Vec<Tensor> = (0..16).map(input).collect();
    let whole = Tensor::cat(&all, 0).unwrap();
    let weight = Tensor::from_vec(values(8, 77), (2, 4), &Device::Cpu).unwrap();
    let var = Var::from_tensor(&weight).unwrap();
    let mean = whole.matmul(&var.t().unwrap()).unwrap().sqr().unwrap().sum(1).unwrap().mean_all().unwrap();
    let expected = floats(mean.backward().unwrap().get(&var).unwrap());
    for world_size in [5, 16] {
        let found = with_virtual_ranks(16, world_size, |pg| {
            let vars = vec![("weight".to_string(), Var::from_tensor(&weight)?)];
            let ddp = DistributedDataParallel::from_vars(&pg, vars[0].1.clone(), vars, DdpOptions::default())?;
            let mut result = GradStore::default();
            for number in ddp.micro_batches().unwrap() {
                let loss = ddp.call(|w| all[number].matmul(&w.t()?)?.sqr()?.sum(1)?.mean_all())?;
                result = backward_with(&loss, &[&ddp], of_micro_batch(number))?;
            }
            Ok(floats(result.get(&ddp.parameters()[0]).unwrap()))
        });
        for found in found.unwrap() {
            assert_close(&found, &expected, 1e-6, &format!("{world_size} ranks"));
        }
    }
}

type Model = DistributedDataParallel<Linear>;

fn model(pg: &ProcessGroup) -> Result<Model> {
    DistributedDataParallel::new(pg, &VarMap::new(), |vb| linear(4, 1, vb))
}

fn step(ddp: &Model, numbers: impl IntoIterator<Item = usize>) -> Result<bool> {
    let mut has_gradients = false;
    for number in numbers {
        let loss = ddp.forward(&Tensor::ones((2, 4), DType::F32, &Device::Cpu)?)?.sqr()?.mean_all()?;
        has_gradients = backward_with(&loss, &[ddp], of_micro_batch(number))?.get(&ddp.parameters()[0]).is_some();
    }
    Ok(has_gradients)
}

fn invalid<T>(result: Result<T>, argument: &str, part: &str) {
    match result.err() {
        Some(Error::InvalidArgument { argument: found, reason }) => {
            assert_eq!(found, argument, "{reason}");
            assert!(reason.contains(part), "{reason}");
        }
        other => panic!("not an invalid {argument}: {other:?}"),
    }
}

#[test]
fn a_wrong_number_is_an_error_on_every_rank() {
    // Rank 1 computes 2 and 3 of 8; one it has left out, and one that it repeats.
    for wrong in [vec![3], vec![2, 2], vec![2, 4], vec![0]] {
        let results = ranks(4, |pg| {
            let ddp = model(&pg)?;
            let own = ddp.micro_batches().unwrap();
            let then = if pg.rank() == 1 { wrong.clone() } else { own.clone().collect() };
            // The end of the group may reach another rank in its first step.
            Ok(step(&ddp, own).and_then(|has_gradients| {
                assert!(has_gradients);
                step(&ddp, then)
            }))
        });
        for (rank, result) in results.into_iter().enumerate() {
            match rank {
                1 => invalid(result, "micro_batch", "comes next on rank 1"),
                _ => {
                    let error = result.unwrap_err().to_string();
                    assert!(error.contains("rank 1") && error.contains("comes next"), "rank {rank}: {error}");
                }
            }
        }
    }
}

/// It would count a step, and a sharded model's would use what the micro-batches before it have left.
#[test]
fn an_optimizer_makes_no_step_before_the_last_micro_batch() {
    for is_sharded in [false, true] {
        ranks(2, |pg| {
            let options = DdpOptions { sharding: sharding(is_sharded), ..Default::default() };
            let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), |vb| linear(4, 1, vb), options)?;
            let mut optimizer = Sgd::new(&ddp, ParamsSgd::default())?;
            let own = ddp.micro_batches().unwrap();
            for number in own.clone() {
                let loss = ddp.forward(&Tensor::ones((2, 4), DType::F32, &Device::Cpu)?)?.sqr()?.mean_all()?;
                let stepped = optimizer.step(&backward_with(&loss, &[&ddp], of_micro_batch(number))?);
                if number + 1 == own.end {
                    return stepped;
                }
                let error = stepped.unwrap_err();
                assert!(
                    matches!(error, Error::Parameter { .. }) && error.to_string().contains("last micro-batch"),
                    "{error}"
                );
                // The step of a sharded model ends its group, since other ranks wait for it.
                if is_sharded {
                    return Ok(());
                }
            }
            Ok(())
        });
    }
}

#[test]
fn a_step_that_was_left_begins_again_after_zero_grad() {
    ranks(2, |pg| {
        let ddp = model(&pg)?;
        let own = ddp.micro_batches().unwrap();
        assert!(!step(&ddp, own.start..own.start + 3)?);
        ddp.zero_grad();
        assert!(step(&ddp, own)?);
        Ok(())
    });
    // In a world of one, a failed pass leaves nothing behind.
    with_virtual_ranks(4, 1, |pg| {
        let ddp = model(&pg)?;
        invalid(step(&ddp, [0, 1, 3]), "micro_batch", "micro-batch 2 comes next on rank 0, not 3");
        assert!(step(&ddp, 2..4)?);
        assert!(step(&ddp, 0..4)?);
        Ok(())
    })
    .unwrap();
}

#[test]
fn numbers_of_virtual_ranks_that_cannot_be_are_errors_on_every_rank() {
    for (virtual_ranks, part) in
        [(0, "power of two"), (3, "power of two"), (6, "power of two"), (2, "number of ranks, 3")]
    {
        let alone = with_virtual_ranks(virtual_ranks, 3, |_| Ok(()));
        invalid(alone, "virtual_ranks", part);
        for error in meet([virtual_ranks; 3], |_| Ok(())) {
            invalid(error, "virtual_ranks", part);
        }
        let store = Arc::new(HashStore::new(Duration::from_secs(60)));
        let engine = Box::new(CpuCommunicator::new(store.clone(), 0, 1, CpuOptions::default()).unwrap());
        let options = CustomOptions { virtual_ranks: Some(virtual_ranks), ..Default::default() };
        if virtual_ranks != 2 {
            invalid(ProcessGroup::with_communicator(store, engine, options), "virtual_ranks", part);
        }
    }
}

/// What each rank gets that meets the others in a process group with its number of virtual ranks.
fn meet<T: Send, const N: usize>(
    virtual_ranks: [usize; N],
    work: impl Fn(ProcessGroup) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let folder = tempfile::tempdir().unwrap();
    let rank = |rank: usize| {
        let pg = init_process_group(InitOptions {
            backend: Backend::Cpu,
            init_method: format!("file://{}/store", folder.path().display()),
            rank: Some(rank),
            world_size: Some(N),
            timeout: Duration::from_secs(60),
            virtual_ranks: Some(virtual_ranks[rank]),
            ..Default::default()
        })?;
        work(pg)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..N).map(|number| scope.spawn(move || rank(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn ranks_with_other_numbers_of_virtual_ranks_get_an_error() {
    let unequal = "virtual ranks: Some(16) on rank 1, virtual ranks: Some(8) on rank 0";
    let of_model = meet([8, 16], |pg| model(&pg));
    let of_loader = meet([8, 16], |pg| DataLoader::new(noisy(), &pg, LoaderOptions::default()));
    let errors =
        of_model.into_iter().map(|result| result.err()).chain(of_loader.into_iter().map(|result| result.err()));
    for error in errors {
        let Some(Error::Mismatch { what: "model" | "data loader", rank: 1, difference }) = error else {
            panic!("{error:?}")
        };
        assert_eq!(difference, unequal);
    }
}

/// They belong to the group, and to the groups that are split off from it.
#[test]
fn groups_that_are_split_off_have_the_same_virtual_ranks() {
    ranks(3, |pg| {
        assert_eq!(pg.virtual_ranks(), Some(VIRTUAL));
        assert_eq!(pg.cpu_group()?.virtual_ranks(), Some(VIRTUAL));
        let Some(half) = pg.new_group(&[0, 2])? else { return Ok(()) };
        assert_eq!(half.virtual_ranks(), Some(VIRTUAL));
        let ddp = model(&half)?;
        assert_eq!(ddp.micro_batches(), Some(4 * half.rank()..4 * half.rank() + 4));
        let loader = DataLoader::new(noisy(), &half, LoaderOptions { batch_size: 3, ..Default::default() })?;
        let numbers: Vec<_> = loader.micro_batches()?.take(4).map(|batch| batch.unwrap().number).collect();
        assert_eq!(numbers, ddp.micro_batches().unwrap().collect::<Vec<_>>());
        let error = sync_batch_norm(&half, 3, 1e-5, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu));
        assert!(error.err().unwrap().to_string().contains("SyncBatchNorm cannot be combined"));
        Ok(())
    });
    // Without virtual ranks, there is nothing to share.
    crate::common::ranks(2, |pg| {
        assert_eq!(pg.virtual_ranks(), None);
        invalid(pg.share_by_speed(1.), "speed", "set InitOptions.virtual_ranks");
        Ok(())
    });
}

/// An evaluation counts each sample once, so the ranks share the samples, as without virtual ranks.
#[test]
fn a_loader_for_evaluation_has_no_micro_batches() {
    let seen = ranks(2, |pg| {
        let sampler = SamplerOptions { shuffle: false, remainder: Remainder::Uneven, ..Default::default() };
        let options = LoaderOptions { batch_size: 10, sampler, ..Default::default() };
        let loader = DataLoader::new(indices(), &pg, options)?;
        invalid(loader.micro_batches(), "virtual_ranks", "with Remainder::Pad or Drop");
        let mut seen = Vec::new();
        for batch in &loader {
            seen.extend(batch?.0.to_vec1::<u32>()?);
        }
        assert_eq!(seen.len(), 23 - pg.rank());
        // Neither has one that is given its sampler.
        let sampler = DistributedSampler::new(45, 0, 1, SamplerOptions::default())?;
        let alone = DataLoader::from_sampler(indices(), sampler, LoaderOptions::default(), default_collate)?;
        invalid(alone.micro_batches(), "virtual_ranks", "not from a sampler");
        Ok(seen)
    });
    let mut seen = seen.concat();
    seen.sort_unstable();
    assert_eq!(seen, (0..45).collect::<Vec<u32>>());
}

#[test]
fn what_would_depend_on_the_ranks_is_refused() {
    with_virtual_ranks(4, 2, |pg| {
        let ddp = model(&pg)?;
        let loss =
            || ddp.forward(&Tensor::ones((2, 4), DType::F32, &Device::Cpu)?)?.sqr()?.mean_all().map_err(Error::from);
        invalid(ddp.backward(&loss()?), "micro_batch", "needs its number");
        invalid(backward_with(&loss()?, &[&ddp], counted(1.)), "micro_batch", "needs its number");
        let zero = DistributedDataParallel::with_options(&pg, &VarMap::new(), |vb| linear(4, 1, vb), of_zero())?;
        invalid(ZeroRedundancyOptimizer::new(&zero, ParamsLamb::default()), "virtual_ranks", "no norms");
        let mut sharded = ZeroRedundancyOptimizer::new(&zero, ParamsSgd::default())?;
        let loss_of_zero = || zero.forward(&Tensor::ones((2, 4), DType::F32, &Device::Cpu)?)?.sqr()?.mean_all();
        let grads = zero.micro_batches().unwrap().try_fold(GradStore::default(), |_, number| {
            backward_with(&loss_of_zero()?, &[&zero], of_micro_batch(number))
        });
        invalid(sharded.clip_grad_norm(&mut grads?, 1.), "virtual_ranks", "no norms");
        invalid(
            ddp.gather_micro_batches(&vec![0.; 2 + pg.rank()]),
            "own",
            "rank 1 has 2 micro-batches in a step, and gave 3 values",
        );
        assert!(step(&ddp, ddp.micro_batches().unwrap())?);

        let own = DdpOptions { broadcast_buffers: false, ..Default::default() };
        let error = DistributedDataParallel::with_options(&pg, &VarMap::new(), |vb| batch_norm(3, 1e-5, vb), own)
            .err()
            .unwrap();
        assert!(error.to_string().contains("broadcast_buffers"), "{error}");
        let role = Arc::new(|name: &str| if name == "bias" { Role::Ignored } else { Role::Parameter });
        let own = DdpOptions { role, ..Default::default() };
        let error =
            DistributedDataParallel::with_options(&pg, &VarMap::new(), |vb| linear(4, 1, vb), own).err().unwrap();
        assert!(error.to_string().contains("the variable bias has Role::Ignored"), "{error}");
        Ok(())
    })
    .unwrap();
    crate::common::ranks(2, |pg| {
        let plain = DistributedDataParallel::new(&pg, &VarMap::new(), |vb| linear(4, 1, vb))?;
        assert!(plain.micro_batches().is_none());
        invalid(plain.gather_micro_batches(&[]), "own", "no virtual ranks");
        let loss = plain.forward(&Tensor::ones((2, 4), DType::F32, &Device::Cpu)?)?.sqr()?.mean_all()?;
        invalid(backward_with(&loss, &[&plain], of_micro_batch(0)), "micro_batch", "no virtual ranks");
        plain.backward(&loss)?;
        let loader = DataLoader::new(noisy(), &pg, LoaderOptions::default())?;
        invalid(loader.micro_batches(), "virtual_ranks", "InitOptions.virtual_ranks");
        Ok(())
    });
    let under = |case: fn(&Model, &Tensor) -> Result<()>| {
        let result = with_virtual_ranks(4, 1, |pg| {
            let ddp = model(&pg)?;
            let loss = ddp.forward(&Tensor::ones((2, 4), DType::F32, &Device::Cpu)?)?.sqr()?.mean_all()?;
            Ok(case(&ddp, &loss))
        });
        result.unwrap().remove(0)
    };
    let other_generator = under(|ddp, loss| {
        candle_ddp::nn::dropout(loss, 0.5, &mut Generator::for_rank(1, 0))?;
        backward_with(loss, &[ddp], of_micro_batch(0)).map(drop)
    });
    invalid(other_generator, "generator", "not that of micro-batch 0");
    let other_number = under(|ddp, loss| {
        candle_ddp::nn::dropout(loss, 0.5, &mut Generator::for_micro_batch(1, 0, 0, 2))?;
        backward_with(loss, &[ddp], of_micro_batch(0)).map(drop)
    });
    invalid(other_number, "generator", "not that of micro-batch 0");
}

/// The indices of 45 samples, with what each sample draws.
fn indices() -> impl Dataset<Sample = (u32, f64)> {
    Made(45, |index, random: &mut Generator| Ok((index as u32, random.uniform(0., 1.))))
}

/// All micro-batches of an epoch in the order of the steps and their numbers, of 4 virtual ranks with 3 samples each.
fn dealt(
    world_size: usize,
    num_workers: usize,
    drop_last: bool,
    start: Option<LoaderState>,
) -> Vec<(usize, Vec<u32>, Vec<f64>)> {
    let of_rank = |pg: ProcessGroup| {
        let options = LoaderOptions { batch_size: 3, num_workers, drop_last, ..Default::default() };
        let mut loader = DataLoader::new(indices(), &pg, options)?;
        if let Some(start) = start {
            loader.resume(start)?;
        }
        let micro_batches = loader.micro_batches()?;
        assert_eq!(micro_batches.len(), loader.iter().len());
        let mut dealt = Vec::new();
        for micro_batch in micro_batches {
            let micro_batch = micro_batch?;
            let (indices, drawn) = &micro_batch.batch;
            let first: f64 = micro_batch.generator().uniform(0., 1.);
            let drawn = [drawn.to_vec1::<f64>()?, vec![first]].concat();
            dealt.push((micro_batch.start.consumed, micro_batch.number, indices.to_vec1::<u32>()?, drawn));
        }
        assert_eq!((loader.current_epoch(), loader.state().consumed), (1, 0));
        Ok(dealt)
    };
    let mut all = with_virtual_ranks(4, world_size, of_rank).unwrap().concat();
    all.sort_by_key(|(consumed, number, ..)| (*consumed, *number));
    all.into_iter().map(|(_, number, indices, drawn)| (number, indices, drawn)).collect()
}

#[test]
fn micro_batches_do_not_depend_on_the_ranks() {
    let one = dealt(1, 0, false, None);
    assert_eq!(one.iter().map(|(number, ..)| *number).collect::<Vec<_>>(), [0, 1, 2, 3].repeat(4));
    // Each virtual rank has the samples of a rank.
    for virtual_rank in 0..4 {
        let sampler = DistributedSampler::new(45, virtual_rank, 4, SamplerOptions::default()).unwrap();
        let own = one.iter().filter(|(number, ..)| *number == virtual_rank).flat_map(|(_, indices, _)| indices);
        assert!(sampler.iter().eq(own.map(|index| *index as usize).take(12)), "{virtual_rank}");
    }
    // The last global batch is filled from the head of the epoch.
    let mut seen: Vec<u32> = one.iter().flat_map(|(_, indices, _)| indices).copied().collect();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), 45);
    assert_eq!(dealt(1, 0, true, None), one[..12]);
    for (world_size, num_workers) in [(1, 2), (2, 0), (3, 1), (4, 2)] {
        assert_eq!(dealt(world_size, num_workers, false, None), one, "{world_size} ranks, {num_workers} workers");
    }
    // Another number of ranks continues after the second step.
    let start = LoaderState { seed: 0, epoch: 0, consumed: 24, dataset_len: 45, order: 0 };
    assert_eq!(dealt(3, 0, false, Some(start)), one[8..]);
}

#[test]
fn a_loader_in_the_middle_of_a_step_is_before_it() {
    with_virtual_ranks(4, 2, |pg| {
        let loader = DataLoader::new(indices(), &pg, LoaderOptions { batch_size: 3, ..Default::default() })?;
        let mut micro_batches = loader.micro_batches()?;
        for (consumed, is_last) in [(0, false), (12, true), (12, false), (24, true)] {
            assert_eq!(micro_batches.next().unwrap()?.is_last, is_last);
            assert_eq!(loader.state().consumed, consumed);
        }
        Ok(())
    })
    .unwrap();
    let refused = |options: LoaderOptions| {
        let result = with_virtual_ranks(4, 1, |pg| Ok(DataLoader::new(indices(), &pg, options).err().unwrap()));
        result.unwrap().remove(0).to_string()
    };
    let large = refused(LoaderOptions { batch_size: 12, drop_last: true, ..Default::default() });
    assert!(large.contains("a global batch of 4 × 12"), "{large}");
    assert!(refused(LoaderOptions { batch_size: usize::MAX, ..Default::default() }).contains("too large"));
    assert!(refused(LoaderOptions { batch_size: 0, ..Default::default() }).contains("at least 1"));
}
