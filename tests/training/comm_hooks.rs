//! Communication hooks, with ranks as threads: the reducer's part, and hooks with one stage.
use crate::common::{assert_close, floats, ranks, tiny};
use crate::weights::{Model, Shapes, backward, full};
use candle_core::{DType, Device, Tensor};
use candle_ddp::amp::{GradScaler, GradScalerOptions};
use candle_ddp::comm_hook::{AllReduce, Bf16Compress, CommHook, Fp16Compress, GradBucket, HookWork, Noop};
use candle_ddp::optim::{ParamsSgd, Sgd};
use candle_ddp::{DdpOptions, Error, Failure, ProcessGroup, ReduceOp, Result, Unused};
use std::sync::{Arc, Mutex};

const SHAPES: Shapes = &[("a", &[6, 4]), ("b", &[5]), ("c", &[3, 2, 2]), ("d", &[7])];

fn wrap(pg: &ProcessGroup, options: DdpOptions) -> Result<Model> {
    crate::weights::wrap(pg, SHAPES, options)
}

fn all(rank: usize, step: usize) -> Vec<Option<Tensor>> {
    full(SHAPES, rank, step)
}

fn mean_of(world: usize, step: usize, index: usize) -> Vec<f32> {
    let of_rank = |rank: usize| floats(all(rank, step)[index].as_ref().unwrap());
    let mut mean = vec![0.0; of_rank(0).len()];
    for rank in 0..world {
        mean.iter_mut().zip(of_rank(rank)).for_each(|(mean, value)| *mean += value / world as f32);
    }
    mean
}

/// Gradients whose elements all have the same value.
fn constant(value: f64) -> Vec<Option<Tensor>> {
    SHAPES.iter().map(|(_, shape)| Some(Tensor::full(value as f32, *shape, &Device::Cpu).unwrap())).collect()
}

#[test]
fn the_all_reduce_hook_matches_ddp_without_a_hook() {
    for (world, options) in [(1, tiny()), (2, DdpOptions::default()), (3, tiny())] {
        ranks(world, |pg| {
            let (plain, hooked) = (wrap(&pg, options.clone())?, wrap(&pg, options.clone())?);
            hooked.register_comm_hook(AllReduce::default())?;
            for step in 0..3 {
                let gradients = all(pg.rank(), step);
                let (plain, hooked) = (backward(&plain, &gradients)?, backward(&hooked, &gradients)?);
                for (index, (plain, hooked)) in plain.iter().zip(&hooked).enumerate() {
                    let (plain, hooked) = (floats(plain.as_ref().unwrap()), floats(hooked.as_ref().unwrap()));
                    assert_eq!(plain, hooked, "bit for bit");
                    assert_close(&hooked, &mean_of(world, step, index), 1e-6, "the mean");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn compression_rounds_to_its_dtype_only() {
    let (fine, coarse) = (1.0 + 1.0 / 1024.0, 1.0 + 1.0 / 64.0);
    // Results when two ranks both have the first value: f16 keeps 11 bits; bf16 keeps 8 bits and the range of f32.
    let cases = [
        (coarse, coarse, coarse),
        (fine, fine, 1.0),
        (1.0 + 1.0 / 4096.0, 1.0, 1.0),
        (-65504.0, -65504.0, -65536.0),
        (131072.0, f64::INFINITY, 131072.0),
        (1e-30, 0.0, f64::from(half::bf16::from_f64(1e-30))),
    ];
    for (value, f16, bf16) in cases {
        ranks(2, |pg| {
            let (half, brain) = (wrap(&pg, tiny())?, wrap(&pg, DdpOptions::default())?);
            half.register_comm_hook(Fp16Compress::default())?;
            brain.register_comm_hook(Bf16Compress::default())?;
            for (ddp, expected) in [(half, f16), (brain, bf16)] {
                for gradient in backward(&ddp, &constant(value))?.into_iter().flatten() {
                    assert_eq!(gradient.dtype(), DType::F32);
                    assert!(floats(&gradient).iter().all(|value| *value == expected as f32), "{value}: {gradient}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn compressed_gradients_are_the_mean_within_their_precision_and_cost_half() {
    for world in [2, 3] {
        ranks(world, |pg| {
            let (half, brain) = (wrap(&pg, DdpOptions::default())?, wrap(&pg, tiny())?);
            half.register_comm_hook(Fp16Compress::default())?;
            brain.register_comm_hook(Bf16Compress::default())?;
            assert!(wrap(&pg, tiny())?.comm_hook_traffic().is_none());
            for (ddp, tolerance) in [(half, 2e-3), (brain, 1.5e-2)] {
                for step in 0..3 {
                    let gradients = backward(&ddp, &all(pg.rank(), step))?;
                    for (index, gradient) in gradients.iter().enumerate() {
                        let gradient = floats(gradient.as_ref().unwrap());
                        assert_close(&gradient, &mean_of(world, step, index), tolerance, "compressed");
                    }
                }
                // Three steps of 48 elements, with one byte for each of the four parameters.
                assert_eq!(ddp.comm_hook_traffic(), Some((3 * 48 * 4, Some(3 * (48 * 2 + 5)))));
            }
            Ok(())
        });
    }
}

#[test]
fn noop_sends_nothing_and_keeps_local_gradients() {
    for world in [1, 3] {
        ranks(world, |pg| {
            let ddp = wrap(&pg, tiny())?;
            ddp.register_comm_hook(Noop)?;
            // The ranks run different numbers of steps: no rank waits for another, and the group's next call is
            // unaffected.
            let steps = if world == 1 { 2 } else { pg.rank() };
            for step in 0..steps {
                let mut gradients = all(pg.rank(), step);
                gradients[pg.rank()] = None;
                let out = backward(&ddp, &gradients)?;
                for (index, (given, got)) in gradients.iter().zip(&out).enumerate() {
                    let (given, got) = (given.as_ref().map(floats), got.as_ref().map(floats));
                    assert_eq!(given, got, "parameter {index} on rank {}", pg.rank());
                }
            }
            assert_eq!(ddp.comm_hook_traffic().unwrap().1, Some(0));
            pg.barrier()
        });
    }
}

#[test]
fn ranks_may_use_different_parameters_with_a_hook() {
    for options in [DdpOptions::default(), tiny()] {
        ranks(3, |pg| {
            let ddp = wrap(&pg, options.clone())?;
            ddp.register_comm_hook(Bf16Compress::default())?;
            for step in 0..4 {
                // First fill all slices, whose contents must not be mistaken for gradients. Then no rank uses `d`, a
                // different rank each time is the only one to use `c`, and each rank leaves out `a` or `b`.
                backward(&ddp, &constant(9.0))?;
                let mut gradients = constant(3.0);
                gradients[3] = None;
                if pg.rank() != step % 3 {
                    gradients[2] = None;
                }
                gradients[pg.rank() % 2] = None;
                let out = backward(&ddp, &gradients)?;
                let expected = [Some(1.0), Some(2.0), Some(1.0), None];
                for (got, expected) in out.iter().zip(expected) {
                    let got = got.as_ref().map(floats);
                    assert_eq!(got.as_ref().map(|got| got[0]), expected, "rank {}, step {step}", pg.rank());
                    assert!(got.iter().flatten().all(|value| Some(*value) == expected));
                }
            }
            Ok(())
        });
    }
}

#[test]
fn no_sync_hands_the_sum_to_the_hook() {
    for world in [2, 3] {
        ranks(world, |pg| {
            let ddp = wrap(&pg, DdpOptions::default())?;
            ddp.register_comm_hook(AllReduce::default())?;
            backward(&ddp, &all(pg.rank(), 9))?;
            {
                let _guard = ddp.no_sync();
                backward(&ddp, &all(pg.rank(), 0))?;
            }
            // The last parameter is not used in the synchronised pass, but its accumulated gradient counts.
            let mut gradients = all(pg.rank(), 1);
            gradients[3] = None;
            let out = backward(&ddp, &gradients)?;
            for (index, got) in out.iter().enumerate() {
                let mut expected = mean_of(world, 0, index);
                if index != 3 {
                    expected.iter_mut().zip(mean_of(world, 1, index)).for_each(|(sum, value)| *sum += value);
                }
                assert_close(&floats(got.as_ref().unwrap()), &expected, 1e-6, "the mean of the sums");
            }
            assert_eq!(ddp.comm_hook_traffic().unwrap().0, 2 * 48 * 4, "only synchronised passes count");
            Ok(())
        });
    }
}

#[test]
fn an_overflow_in_compression_reaches_the_scaler_on_all_ranks() {
    ranks(2, |pg| {
        let ddp = wrap(&pg, DdpOptions { unused: Unused::Allow, ..Default::default() })?;
        ddp.register_comm_hook(Fp16Compress::default())?;
        let mut optimizer = Sgd::new(&ddp, ParamsSgd { lr: 1.0, ..Default::default() })?;
        let options = GradScalerOptions { init_scale: 1024.0, ..Default::default() };
        let mut scaler = GradScaler::new(&pg, &ddp, options)?;
        for (gradient, stepped) in [(1.0, true), (1000.0, false), (1.0, true)] {
            // Only rank 1's gradient overflows, and only in f16.
            let gradient = if pg.rank() == 1 { gradient } else { 1.0 };
            let before = floats(&ddp.parameters()[0]);
            let loss = ddp.call(|net| Ok::<_, Error>((net.0[0].sum_all()? * gradient)?))?;
            let mut grads = ddp.backward(&scaler.scale(&loss)?)?;
            scaler.step(&mut optimizer, &mut grads)?;
            scaler.update()?;
            let expected: Vec<f32> = before.iter().map(|value| value - f32::from(u8::from(stepped))).collect();
            assert_close(&floats(&ddp.parameters()[0]), &expected, 1e-6, "one step");
        }
        assert_eq!(scaler.current_scale(), 512.0);
        Ok(())
    });
}

/// Arguments of a hook's calls: the stage, the bucket, whether it is the last, and its parameters' names.
type Log = Arc<Mutex<Vec<(usize, usize, bool, Vec<String>)>>>;

/// A user's hook with state and three stages: the first two sum over the ranks; the second also sums the number of passes
/// so far, and the last subtracts its mean.
struct Stages {
    log: Log,
    passes: f32,
}

impl Stages {
    fn note(&self, stage: usize, bucket: &GradBucket) {
        self.log.lock().unwrap().push((stage, bucket.index(), bucket.is_last(), bucket.names().to_vec()));
    }
}

impl CommHook for Stages {
    fn run(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<HookWork<Self>> {
        self.note(1, bucket);
        assert_eq!(bucket.gradients().len(), bucket.names().len());
        self.passes += f32::from(u8::from(bucket.is_last()));
        let work = group.all_reduce_async(bucket.buffer(), ReduceOp::Sum)?;
        Ok(HookWork::then([work], |hook: &mut Self, bucket, group| {
            hook.note(2, bucket);
            let passes = Tensor::new(hook.passes, &Device::Cpu)?;
            let works = [bucket.buffer(), &passes].map(|sum| group.all_reduce_async(sum, ReduceOp::Sum));
            let works = works.into_iter().collect::<Result<Vec<_>>>()?;
            Ok(HookWork::then(works, move |hook: &mut Self, bucket, group| {
                hook.note(3, bucket);
                let mean = passes.to_scalar::<f32>()? / group.world_size() as f32;
                bucket.set_buffer(&(bucket.buffer() - f64::from(mean))?)?;
                Ok(HookWork::done())
            }))
        }))
    }
}

#[test]
fn a_custom_hook_runs_stage_by_stage_in_bucket_order() {
    let world = 2;
    ranks(world, |pg| {
        let ddp = wrap(&pg, tiny())?;
        let log = Log::default();
        ddp.register_comm_hook(Stages { log: log.clone(), passes: 0.0 })?;
        for step in 0..3 {
            log.lock().unwrap().clear();
            let out = backward(&ddp, &all(pg.rank(), step))?;
            for (index, got) in out.iter().enumerate() {
                let factor = (world * world) as f32;
                let expected = mean_of(world, step, index).into_iter().map(|mean| mean * factor - (step + 1) as f32);
                assert_close(&floats(got.as_ref().unwrap()), &expected.collect::<Vec<_>>(), 1e-5, "both sums");
            }
            let expected = (1..=3).flat_map(|stage| {
                let bucket = move |(index, names): (usize, Vec<String>)| (stage, index, index == 3, names);
                ddp.buckets().into_iter().enumerate().map(bucket)
            });
            assert_eq!(*log.lock().unwrap(), expected.collect::<Vec<_>>());
        }
        assert_eq!(ddp.comm_hook_traffic().unwrap().1, None, "not counted");
        Ok(())
    });
}

#[test]
fn a_trace_shows_each_stage_of_a_hook() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |pg| {
        let ddp = wrap(&pg, DdpOptions { trace: Some(folder.path().to_path_buf()), ..tiny() })?;
        ddp.register_comm_hook(Stages { log: Log::default(), passes: 0.0 })?;
        backward(&ddp, &all(pg.rank(), 0)).map(drop)
    });
    for rank in 0..2 {
        let trace = std::fs::read_to_string(folder.path().join(format!("rank{rank}.trace.json"))).unwrap();
        // The second stage has two collectives.
        for (stage, bucket) in [(1, 0), (1, 3), (2, 0), (2, 3)] {
            let name = format!("\"name\":\"hook, stage {stage} of bucket {bucket}\"");
            assert_eq!(trace.matches(&name).count(), stage, "{name} in {trace}");
        }
    }
}

/// Fails on one rank, in the given stage of the second pass.
struct Fails {
    rank: usize,
    stage: usize,
    buckets: usize,
}

impl CommHook for Fails {
    fn run(&mut self, bucket: &GradBucket, group: &ProcessGroup) -> Result<HookWork<Self>> {
        self.buckets += 1;
        let fails = group.rank() == self.rank && self.buckets == 6;
        let failure = || Error::InvalidArgument { argument: "test", reason: "the wire is cut".to_string() };
        if fails && self.stage == 1 {
            return Err(failure());
        }
        let work = group.all_reduce_async(bucket.buffer(), ReduceOp::Sum)?;
        Ok(HookWork::then([work], move |hook: &mut Self, bucket, group| {
            if fails && hook.stage == 2 {
                return Err(failure());
            }
            Ok(HookWork::wait([group.all_reduce_async(bucket.buffer(), ReduceOp::Sum)?]))
        }))
    }
}

#[test]
fn a_hook_that_fails_on_one_rank_ends_all_ranks_with_its_reason() {
    for stage in [1, 2] {
        let errors = ranks(3, |pg| {
            let ddp = wrap(&pg, tiny())?;
            ddp.register_comm_hook(Fails { rank: 1, stage, buckets: 0 })?;
            let steps = || (0..2).try_for_each(|step| backward(&ddp, &all(pg.rank(), step)).map(drop));
            Ok(steps().expect_err("an error"))
        });
        assert!(matches!(errors[1], Error::InvalidArgument { argument: "test", .. }), "typed: {}", errors[1]);
        for rank in [0, 2] {
            assert!(matches!(errors[rank], Error::Group(Failure::PeerFailed { peer: 1, .. })), "{}", errors[rank]);
            assert!(errors[rank].to_string().contains("the wire is cut"), "{}", errors[rank]);
        }
    }
    // In a world of one, training can continue after a failed hook.
    ranks(1, |pg| {
        let ddp = wrap(&pg, tiny())?;
        ddp.register_comm_hook(Fails { rank: 0, stage: 2, buckets: 0 })?;
        backward(&ddp, &all(0, 0))?;
        assert!(backward(&ddp, &all(0, 1)).is_err());
        for (index, got) in backward(&ddp, &all(0, 2))?.iter().enumerate() {
            assert_close(&floats(got.as_ref().unwrap()), &mean_of(1, 2, index), 1e-6, "after a failure");
        }
        Ok(())
    });
}

#[test]
fn every_rank_reports_hooks_that_differ() {
    let errors = ranks(3, |pg| {
        let ddp = wrap(&pg, tiny())?;
        let error = match pg.rank() {
            2 => ddp.register_comm_hook(Fp16Compress::default()),
            _ => ddp.register_comm_hook(Bf16Compress::default()),
        };
        // The model and the group remain usable.
        for (index, got) in backward(&ddp, &all(pg.rank(), 0))?.iter().enumerate() {
            assert_close(&floats(got.as_ref().unwrap()), &mean_of(3, 0, index), 1e-6, "plain");
        }
        Ok(error.expect_err("an error"))
    });
    for error in errors {
        assert!(matches!(error, Error::Mismatch { what: "communication hook", rank: 2, .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("fp16 compression on rank 2, bf16 compression on rank 0"), "{text}");
    }
}

#[test]
fn a_hook_that_only_one_rank_registers_is_an_error_on_both() {
    let errors = ranks(2, |pg| {
        let ddp = wrap(&pg, tiny())?;
        let result = match pg.rank() {
            0 => ddp.register_comm_hook(Fp16Compress::default()),
            _ => backward(&ddp, &all(1, 0)).map(drop),
        };
        Ok(result.expect_err("an error").to_string())
    });
    for error in errors {
        assert!(error.contains("all_gather") && error.contains("all_reduce"), "names both calls: {error}");
    }
}

#[test]
fn a_hook_is_registered_once_and_in_time() {
    let errors = ranks(2, |pg| {
        let (twice, late) = (wrap(&pg, tiny())?, wrap(&pg, tiny())?);
        twice.register_comm_hook(Noop)?;
        let twice = twice.register_comm_hook(Noop).expect_err("a second one");
        if pg.rank() == 1 {
            let _guard = late.no_sync();
            backward(&late, &all(1, 0))?;
        }
        Ok((twice, late.register_comm_hook(Noop).expect_err("too late on rank 1")))
    });
    for (rank, (twice, late)) in errors.iter().enumerate() {
        assert!(twice.to_string().contains("already has a communication hook"), "{twice}");
        assert!(late.to_string().contains("before the first backward pass"), "{late}");
        assert_eq!(matches!(late, Error::RankFailed { rank: 1, .. }), rank == 0, "{late}");
    }
}

#[test]
fn a_bucket_takes_only_as_many_values_as_it_has() {
    struct Short;
    impl CommHook for Short {
        fn run(&mut self, bucket: &GradBucket, _: &ProcessGroup) -> Result<HookWork<Self>> {
            bucket.set_buffer(&Tensor::zeros(3, DType::F32, &Device::Cpu)?)?;
            Ok(HookWork::done())
        }
    }
    let error = ranks(1, |pg| {
        let ddp = wrap(&pg, DdpOptions::default())?;
        ddp.register_comm_hook(Short)?;
        Ok(backward(&ddp, &all(0, 0)).map(drop).expect_err("an error").to_string())
    });
    assert!(error[0].contains("as many elements as the bucket, 48, but has 3"));
}
