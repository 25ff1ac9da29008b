//! Errors about ranks that do different things: they name the purpose of each call, not only the collective.
use crate::common::{assert_error, ranks, tensor, try_ranks};
use candle_core::{DType, Tensor};
use candle_ddp::nn::{BatchNorm, sync_batch_norm};
use candle_ddp::{
    Buckets, DdpOptions, DistributedDataParallel, Error, ProcessGroup, ReduceOp, Result, SpawnOptions, checkpoint,
    spawn_with,
};
use candle_nn::{BatchNormConfig, Linear, ModuleT, VarBuilder, VarMap, linear};
use std::sync::Barrier;
use std::time::Duration;

type Net = (Linear, Linear, BatchNorm);

struct Job<'a> {
    pg: &'a ProcessGroup,
    varmap: VarMap,
    ddp: DistributedDataParallel<Net>,
    folder: &'a std::path::Path,
}

impl Job<'_> {
    fn backward(&self) -> Result<()> {
        let x = tensor(&[4, 3], 1);
        let forward = |(first, second, _): &Net| {
            use candle_nn::Module;
            second.forward(&first.forward(&x)?)?.sqr()?.mean_all()
        };
        self.ddp.backward(&self.ddp.call(forward)?).map(drop)
    }

    fn save(&self) -> Result<()> {
        checkpoint::save_distributed(self.pg, &self.varmap, self.folder.join("model"))
    }

    fn gather(&self) -> Result<()> {
        self.pg.all_gather_object(&1).map(drop)
    }

    fn reduce(&self) -> Result<()> {
        self.pg.all_reduce(&Tensor::zeros(7, DType::F32, self.pg.device())?, ReduceOp::Sum)
    }
}

type Act = for<'a, 'b> fn(&'a Job<'b>) -> Result<()>;

/// The errors of both ranks when rank 0 does `first` and rank 1 does `second`.
fn desync(first: Act, second: Act) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |pg| {
        let varmap = VarMap::new();
        let build = |vb: VarBuilder| -> Result<Net> {
            let norm = sync_batch_norm(&pg, 3, BatchNormConfig::default(), vb.pp("norm"))?;
            Ok((linear(3, 3, vb.pp("fc1"))?, linear(3, 2, vb.pp("fc2"))?, norm))
        };
        let options =
            DdpOptions { buckets: Buckets { first_bucket_mb: 1., ..Default::default() }, ..Default::default() };
        let ddp = DistributedDataParallel::with_options(&pg, &varmap, build, options)?;
        let job = Job { pg: &pg, varmap, ddp, folder: folder.path() };
        let error = if pg.rank() == 0 { first(&job) } else { second(&job) };
        Ok(error.unwrap_err().to_string())
    })
}

#[test]
fn a_desync_names_what_each_rank_was_doing() {
    const SAVE: &str = "all_gather(i64[1]) for save_distributed";
    const GATHER: &str = "all_gather(i64[1]) for all_gather_object";
    const GRADIENTS: &str =
        "all_reduce(f32[34]) for the gradients of fc2.bias, fc2.weight and 4 more parameters (bucket 0)";
    let cases: [(Act, Act, &str, &str); 3] = [
        (|job| job.save(), |job| job.backward(), SAVE, GRADIENTS),
        // Without the purpose, these calls would look alike.
        (|job| job.save(), |job| job.gather(), SAVE, GATHER),
        (|job| job.reduce(), |job| job.gather(), "all_reduce(f32[7])", GATHER),
    ];
    for (first, second, rank_0, rank_1) in cases {
        let expected = format!("rank 1 called {rank_1} where rank 0 called {rank_0}, sequence");
        for error in desync(first, second) {
            assert!(error.starts_with(&expected), "{error}\n{expected}");
        }
    }
}

#[test]
fn a_bucket_is_named_by_its_parameters() {
    let folder = tempfile::tempdir().unwrap();
    let errors = try_ranks(2, |pg| {
        let varmap = VarMap::new();
        let build = |vb: VarBuilder| Ok::<_, Error>((linear(3, 3, vb.pp("fc1"))?, linear(3, 2, vb.pp("fc2"))?));
        let ddp = DistributedDataParallel::new(&pg, &varmap, build)?;
        if pg.rank() == 0 {
            return checkpoint::save_distributed(&pg, &varmap, folder.path().join("model"));
        }
        let loss = ddp.call(|(a, b): &(Linear, Linear)| {
            use candle_nn::Module;
            b.forward(&a.forward(&tensor(&[4, 3], 1))?)?.sqr()?.mean_all()
        })?;
        ddp.backward(&loss).map(drop)
    });
    let error = errors.unwrap_err().to_string();
    let bucket = "all_reduce(f32[26]) for the gradients of fc2.bias, fc2.weight and 2 more parameters";
    assert!(error.contains(bucket) && error.contains("for save_distributed"), "{error}");
}

#[test]
fn the_statistics_of_a_batch_norm_are_named() {
    let errors = try_ranks(2, |pg| {
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, pg.device());
        let norm = sync_batch_norm(&pg, 3, BatchNormConfig::default(), vb)?;
        let x = tensor(&[4, 3], 1);
        let y = norm.forward_t(&x, true)?;
        if pg.rank() == 0 {
            norm.forward_t(&x, true)?;
        } else {
            y.sqr()?.mean_all()?.backward()?;
        }
        Ok(())
    });
    assert_error(errors, &["for SyncBatchNorm's statistics", "for SyncBatchNorm's gradients"]);
}

#[test]
fn a_batch_norm_that_trains_on_one_rank_only_is_named() {
    let is_over = Barrier::new(2);
    let options = SpawnOptions { world_size: 2, timeout: Duration::from_secs(5), ..Default::default() };
    let errors = spawn_with(options, |pg| {
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, pg.device());
        let norm = sync_batch_norm(&pg, 3, BatchNormConfig::default(), vb)?;
        let x = tensor(&[4, 3], 1);
        norm.forward_t(&x, false)?;
        let error = (pg.rank() == 0).then(|| Error::from(norm.forward_t(&x, true).unwrap_err()));
        is_over.wait();
        Ok(error)
    });
    let error = errors.unwrap().remove(0).unwrap();
    assert!(matches!(&error, Error::Connect { rank: 0, peers, .. } if *peers == [1]), "{error:?}");
    let advice = "SyncBatchNorm connects all ranks for its statistics in their first forward pass in training mode: run it on \
                  every rank, and evaluate with forward_t(x, false)";
    assert!(error.to_string().contains(advice), "{error}");
}
