//! SyncBatchNorm, compared with candle's and PyTorch's batch normalisation of the whole batch.
use crate::common::{assert_close, assert_error, fill, floats, golden, ranks, tensor, tiny, var};
use candle_core::{DType, Device, Module, ModuleT, Tensor, Var};
use candle_ddp::nn::{BatchNorm, sync_batch_norm};
use candle_ddp::{DistributedDataParallel, Error, Result};
use candle_nn::{BatchNormConfig, Linear, VarBuilder, VarMap, batch_norm, linear};

/// How a batch of nine rows is split over the ranks.
const SPLITS: [&[usize]; 4] = [&[4, 5], &[9, 0], &[3, 3, 3], &[1, 0, 8]];
const SHAPES: [&[usize]; 4] = [&[9, 3], &[9, 3, 7], &[9, 3, 4, 5], &[9, 3, 2, 3, 2]];

/// A layer's results for a batch, and the gradients of Σ y·dy.
type Outcome = [Vec<f32>; 6];

const PARTS: [&str; 6] = ["y", "dx", "d_weight", "d_bias", "running_mean", "running_var"];

fn outcome(layer: &impl ModuleT, varmap: &VarMap, x: &Tensor, dy: &Tensor) -> Result<Outcome> {
    let x = Var::from_tensor(x)?;
    let y = layer.forward_t(&x, true)?;
    let grads = (&y * dy)?.sum_all()?.backward()?;
    let gradient = |name| grads.get(&var(varmap, name)).map(floats).unwrap_or_default();
    let [d_weight, d_bias] = ["weight", "bias"].map(gradient);
    let [mean, variance] = ["running_mean", "running_var"].map(|name| floats(&var(varmap, name)));
    Ok([floats(&y), floats(grads.get(&x).unwrap()), d_weight, d_bias, mean, variance])
}

/// Joins the ranks' outcomes: batches are concatenated, parameters' gradients summed.
fn join(ranks: &[Outcome]) -> Outcome {
    std::array::from_fn(|part| {
        let first = &ranks[0][part];
        match PARTS[part] {
            "y" | "dx" => ranks.iter().flat_map(|rank| rank[part].clone()).collect(),
            "d_weight" | "d_bias" => (0..first.len()).map(|i| ranks.iter().map(|rank| rank[part][i]).sum()).collect(),
            statistic => {
                assert!(ranks.iter().all(|rank| &rank[part] == first), "{statistic}: ranks must agree bit for bit");
                first.clone()
            }
        }
    })
}

#[track_caller]
fn assert_outcome(found: &Outcome, expected: &Outcome, what: &str) {
    for ((found, expected), part) in found.iter().zip(expected).zip(PARTS) {
        assert_close(found, expected, 1e-5, &format!("{what}: {part}"));
    }
}

/// Variables with values that differ from a new layer's.
fn variables() -> VarMap {
    let varmap = VarMap::new();
    let features = batch_norm(3, 1e-5, builder(&varmap)).unwrap().running_mean().elem_count();
    fill(&varmap, 3);
    var(&varmap, "running_var").set(&(tensor(&[features], 8) + 2.0).unwrap()).unwrap();
    varmap
}

fn builder(varmap: &VarMap) -> VarBuilder<'static> {
    VarBuilder::from_varmap(varmap, DType::F32, &Device::Cpu)
}

/// This rank's rows of the whole batch.
fn mine(whole: &Tensor, split: &[usize], rank: usize) -> Tensor {
    whole.narrow(0, split[..rank].iter().sum(), split[rank]).unwrap()
}

#[test]
fn ranks_normalise_like_one_process_with_the_whole_batch() {
    let configs = [
        BatchNormConfig::default(),
        BatchNormConfig { affine: false, momentum: 0.3, eps: 1e-3, ..Default::default() },
        BatchNormConfig { remove_mean: false, ..Default::default() },
    ];
    for (config, shape) in configs.iter().flat_map(|config| SHAPES.map(|shape| (*config, shape))) {
        let (x, dy) = ((tensor(shape, 1) + 2.0).unwrap(), tensor(shape, 2));
        let varmap = variables();
        let layer = batch_norm(3, config, builder(&varmap)).unwrap();
        let expected = outcome(&layer, &varmap, &x, &dy).unwrap();
        for split in SPLITS.into_iter().chain([&[9usize] as &[usize]]) {
            let outcomes = ranks(split.len(), |pg| {
                let varmap = variables();
                let layer = sync_batch_norm(&pg, 3, config, builder(&varmap))?;
                outcome(&layer, &varmap, &mine(&x, split, pg.rank()), &mine(&dy, split, pg.rank()))
            });
            assert_outcome(&join(&outcomes), &expected, &format!("{shape:?} as {split:?}, {config:?}"));
        }
    }
}

/// Two groups of two ranks each; the second is not in world order.
const GROUPS: [[usize; 2]; 2] = [[0, 2], [3, 1]];
/// Batch sizes of the ranks of each group.
const GROUP_SPLITS: [[usize; 2]; 2] = [[2, 3], [3, 1]];

#[test]
fn subgroups_normalise_their_own_batches() {
    let shape: &[usize] = &[9, 3, 4];
    let (x, dy) = ((tensor(shape, 1) + 2.0).unwrap(), tensor(shape, 2));
    // The first five rows are the first group's batch.
    let batch_of = |whole: &Tensor, group: usize| mine(whole, &[5, 4], group);
    let plain = |x: &Tensor, dy: &Tensor| {
        let varmap = variables();
        outcome(&batch_norm(3, 1e-5, builder(&varmap)).unwrap(), &varmap, x, dy).unwrap()
    };
    let outcomes = ranks(4, |pg| {
        // Every rank creates both groups and belongs to one of them.
        let groups = [pg.new_group(&GROUPS[0])?, pg.new_group(&GROUPS[1])?];
        let (number, group) = groups.into_iter().enumerate().find_map(|(i, group)| Some((i, group?))).unwrap();
        assert_eq!(GROUPS[number][group.rank()], pg.rank());
        let varmap = variables();
        let layer = sync_batch_norm(&group, 3, 1e-5, builder(&varmap))?;
        let part = |whole| mine(&batch_of(whole, number), &GROUP_SPLITS[number], group.rank());
        outcome(&layer, &varmap, &part(&x), &part(&dy))
    });
    let of_world = plain(&x, &dy);
    for (number, group) in GROUPS.iter().enumerate() {
        let joined = join(&group.map(|rank| outcomes[rank].clone()));
        let expected = plain(&batch_of(&x, number), &batch_of(&dy, number));
        assert_outcome(&joined, &expected, &format!("group {group:?}"));
        let rows = number * 5 * 12..number * 5 * 12 + joined[0].len();
        let differ = |a: &[f32], b: &[f32]| a.iter().zip(b).any(|(a, b)| (a - b).abs() > 1e-3);
        // The outputs, the inputs' gradients and the mean must not be those of the world.
        for (part, rows) in [(0, rows.clone()), (1, rows), (4, 0..3)] {
            assert!(differ(&joined[part], &of_world[part][rows]), "group {group:?}: {}", PARTS[part]);
        }
    }
}

#[test]
fn ranks_normalise_as_pytorch_does_with_the_whole_batch() {
    for (group, split) in [("batch_norm_1d", [3usize, 7]), ("batch_norm_2d", [4, 5])] {
        let all = golden("nn.safetensors");
        let golden = |name: &str| &all[&format!("{group}.{name}")];
        let evaluated = std::sync::Mutex::new(Vec::new());
        let outcomes = ranks(2, |pg| {
            let varmap = VarMap::new();
            let layer = sync_batch_norm(&pg, golden("weight").dim(0)?, 1e-5, builder(&varmap))?;
            for name in ["weight", "bias"] {
                var(&varmap, name).set(golden(name))?;
            }
            let own = |name: &str| mine(golden(name), &split, pg.rank());
            let outcome = outcome(&layer, &varmap, &own("x"), &own("dy"))?;
            if pg.rank() == 0 {
                *evaluated.lock().unwrap() = floats(&layer.forward_t(golden("x"), false)?);
            }
            Ok(outcome)
        });
        assert_outcome(&join(&outcomes), &PARTS.map(|part| floats(golden(part))), group);
        assert_close(&evaluated.into_inner().unwrap(), &floats(golden("eval")), 1e-5, "evaluation");
    }
}

#[test]
fn evaluation_is_local_and_differentiable() {
    ranks(2, |pg| {
        // Only one rank evaluates, since evaluation needs no collective.
        if pg.rank() == 1 {
            return Ok(());
        }
        let (x, dy) = (Var::from_tensor(&tensor(&[4, 3, 2], 5))?, tensor(&[4, 3, 2], 6));
        let varmap = variables();
        let run = |layer: &dyn Fn(&Tensor) -> candle_core::Result<Tensor>| -> Result<Vec<Vec<f32>>> {
            let y = layer(&x)?;
            let grads = (&y * &dy)?.sum_all()?.backward()?;
            let vars = [x.clone(), var(&varmap, "weight"), var(&varmap, "bias")];
            Ok(vars.iter().map(|var| floats(grads.get(var).unwrap())).chain([floats(&y)]).collect())
        };
        let (ours, theirs) = (sync_batch_norm(&pg, 3, 1e-5, builder(&varmap))?, batch_norm(3, 1e-5, builder(&varmap))?);
        let actual = run(&|x| ours.forward_t(x, false))?;
        let expected = run(&|x| theirs.forward_t(x, false))?;
        for (actual, expected) in actual.iter().zip(&expected) {
            assert_close(actual, expected, 1e-5, "evaluation");
        }
        Ok(())
    });
}

#[test]
fn low_precision_inputs_have_statistics_in_f32() {
    // The sum of these 40 000 elements would be infinite in f16, and would stop growing at 256 in bf16.
    for dtype in [DType::F16, DType::BF16] {
        let outcomes = ranks(2, |pg| {
            let varmap = VarMap::new();
            let layer =
                sync_batch_norm(&pg, 1, BatchNormConfig { momentum: 1.0, ..Default::default() }, builder(&varmap))?;
            let x = Tensor::new(&[2f32, 4.0], &Device::Cpu)?.repeat(20_000)?.reshape((40_000, 1))?.to_dtype(dtype)?;
            let y = layer.forward_t(&x, true)?;
            assert_eq!(y.dtype(), dtype);
            Ok((floats(&y.narrow(0, 0, 2)?), floats(layer.running_mean()), floats(layer.running_var())))
        });
        for (y, mean, variance) in outcomes {
            assert_close(&y, &[-1.0, 1.0], 1e-4, "y");
            assert_close(&mean, &[3.0], 1e-6, "mean");
            assert_close(&variance, &[80_000.0 / 79_999.0], 1e-6, "variance");
        }
    }
}

/// Rank 0's first bucket is full before the norm's backward pass, rank 1's after it. In every second step, rank 1 has no rows.
#[test]
fn buckets_that_become_ready_at_different_moments_do_not_mix_with_the_norms_collectives() {
    ranks(2, |pg| {
        let build = |vb: VarBuilder<'static>| -> candle_core::Result<(Linear, BatchNorm, Linear)> {
            let norm = sync_batch_norm(&pg, 8, 1e-5, vb.pp("norm"))?;
            Ok((linear(4, 8, vb.pp("first"))?, norm, linear(8, 8, vb.pp("last"))?))
        };
        let ddp = DistributedDataParallel::with_options(&pg, &VarMap::new(), build, tiny())?;
        let x = tensor(&[5, 4], 1);
        for step in 0..20 {
            let x = x.narrow(0, 0, if step % 2 == 1 && pg.rank() == 1 { 0 } else { 5 })?;
            let y = ddp.call(|(first, norm, last)| {
                let y = norm.forward_t(&first.forward(&x)?, true)?;
                if pg.rank() == 0 { last.forward(&y) } else { y.tanh() }
            })?;
            let grads = ddp.backward(&y.sqr()?.sum_all()?)?;
            assert!(ddp.parameters().iter().all(|var| floats(grads.get(var).unwrap()).iter().all(|x| x.is_finite())));
        }
        Ok(())
    });
}

/// `ddp.backward` aborts the group when it fails, while another rank may be waiting in a forward pass. The norm's first pass creates
/// its own group, which the other rank never joins.
#[test]
fn ending_the_group_ends_the_norms_collectives() {
    for passes in [1, 0] {
        let over = std::sync::Barrier::new(2);
        ranks(2, |pg| {
            let layer = sync_batch_norm(&pg, 3, 1e-5, builder(&VarMap::new()))?;
            for _ in 0..passes {
                layer.forward_t(&tensor(&[4, 3], 1), true)?;
            }
            let error = if pg.rank() == 0 {
                pg.abort("out of memory");
                None
            } else {
                layer.forward_t(&tensor(&[4, 3], 1), true).err()
            };
            // Rank 0 stays until then, so that rank 1 does not report its leaving instead.
            over.wait();
            if pg.rank() == 1 {
                assert_error(error.map_or(Ok(()), Err), &["rank 0 ended the group: out of memory"]);
            }
            Ok(())
        });
    }
}

#[test]
fn bad_input_is_named() {
    ranks(2, |pg| {
        let layer = sync_batch_norm(&pg, 3, 1e-5, builder(&VarMap::new()))?;
        let refused = |x: Tensor| layer.forward_t(&x, true).unwrap_err().to_string();
        let error = refused(tensor(&[4, 2], 1));
        assert!(error.contains("f32[4, 2]") && error.contains("(N, 3)"), "{error}");
        assert!(refused(Tensor::zeros((4, 3), DType::U8, &Device::Cpu)?).contains("batch normalisation"));
        // One row on one rank and none on the other: both ranks return the error.
        let error = refused(tensor(&[1 - pg.rank(), 3], 1));
        assert!(error.contains("at least two values"), "{error}");
        for (config, name) in [
            (BatchNormConfig { eps: -1.0, ..Default::default() }, "eps"),
            (BatchNormConfig { momentum: 1.5, ..Default::default() }, "momentum"),
        ] {
            assert_error(sync_batch_norm(&pg, 3, config, builder(&VarMap::new())), &[name]);
        }
        Ok(())
    });
}

#[test]
fn its_errors_come_out_of_ddp_as_they_are() {
    ranks(1, |pg| {
        let build = |vb| sync_batch_norm(&pg, 3, BatchNormConfig::default(), vb);
        let ddp = DistributedDataParallel::new(&pg, &VarMap::new(), build)?;
        let error = ddp.forward_t(&tensor(&[2, 5], 1), true).unwrap_err();
        let argument = "the input of SyncBatchNorm";
        assert!(matches!(&error, Error::InvalidArgument { argument: found, .. } if *found == argument), "{error}");
        Ok(())
    });
}
