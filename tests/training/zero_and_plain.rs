//! A run moves between ZeRO and the plain optimizers with the same checkpoints, and between numbers of ranks.
use crate::common::{buckets, going_on, ranks, sharding, tensor};
use candle_core::DType;
use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions, StateDict};
use candle_ddp::optim::{
    FusedOptimizer, MuonGroup, Optimizer, ParameterGroup, ParamsAdam, ParamsAdamW, ParamsLamb, ParamsSgd, UpdateRule,
};
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, ProcessGroup, Result};
use candle_nn::{Linear, VarBuilder, VarMap};
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

/// candle's layer and ours, whose sizes no number of ranks divides.
type Net = (Linear, candle_ddp::nn::Linear);

fn net(vb: VarBuilder) -> candle_core::Result<Net> {
    Ok((candle_nn::linear(3, 5, vb.pp("first"))?, candle_ddp::nn::linear(5, 1, vb.pp("second"))?))
}

struct Run {
    varmap: VarMap,
    ddp: DistributedDataParallel<Net>,
    optimizer: Box<dyn Optimizer>,
}

/// By name, as bits.
type Values = BTreeMap<String, Vec<u64>>;

impl Run {
    /// The biases form a separate group.
    fn new<R: UpdateRule + 'static>(pg: &ProcessGroup, zero: bool, [options, of_biases]: &[R; 2]) -> Result<Self> {
        let varmap = VarMap::new();
        // Buckets of a few parameters each.
        let ddp_options = DdpOptions { sharding: sharding(zero), buckets: buckets(5e-5, 5e-5), ..Default::default() };
        let ddp = DistributedDataParallel::with_options(pg, &varmap, net, ddp_options)?;
        let (biases, weights) =
            ddp.named_parameters().into_iter().partition::<Vec<_>, _>(|(name, _)| name.ends_with("bias"));
        let mut slow = of_biases.clone();
        slow.set_learning_rate(0.01);
        let groups = vec![
            ParameterGroup { parameters: weights, options: options.clone() },
            ParameterGroup { parameters: biases, options: slow },
        ];
        let optimizer = Box::new(FusedOptimizer::from_groups(groups)?);
        Ok(Self { varmap, ddp, optimizer })
    }

    fn train(&mut self, steps: u64) -> Result<()> {
        for step in 0..steps {
            let x = tensor(&[4, 3], 10 * step + self.ddp.process_group().rank() as u64);
            let y = self.ddp.call(|(first, second)| {
                use candle_core::Module;
                second.forward(&first.forward(&x)?.tanh()?)
            })?;
            self.optimizer.step(&self.ddp.backward(&y.sqr()?.mean_all()?)?)?;
        }
        Ok(())
    }

    /// Of the whole state, and the parameters. All ranks call it.
    fn values(&mut self) -> Result<Values> {
        let mut values = Values::new();
        for (part, dict) in [("model", self.varmap.state_dict()?), ("optimizer", self.optimizer.state_dict()?)] {
            for (name, tensor) in dict {
                let list = tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
                values.insert(format!("{part}.{name}"), list.into_iter().map(f64::to_bits).collect());
            }
        }
        Ok(values)
    }
}

fn save<R: UpdateRule + Sync + 'static>(folder: &Path, world_size: usize, zero: bool, options: &[R; 2]) -> Values {
    let mut saved = ranks(world_size, |pg| {
        let mut run = Run::new(&pg, zero, options)?;
        run.train(3)?;
        let mut checkpointer = Checkpointer::new(&pg, folder, CheckpointerOptions::default())?;
        let Run { varmap, optimizer, .. } = &mut run;
        checkpointer.save(3, (("model", varmap), ("optimizer", optimizer)))?.wait()?;
        run.values()
    });
    saved.remove(0)
}

fn load<R: UpdateRule + Sync + 'static>(folder: &Path, world_size: usize, zero: bool, options: &[R; 2]) -> Vec<Values> {
    ranks(world_size, |pg| {
        let mut run = Run::new(&pg, zero, options)?;
        let mut checkpointer = going_on(&pg, folder)?;
        let Run { varmap, optimizer, .. } = &mut run;
        assert_eq!(checkpointer.load_latest((("model", varmap), ("optimizer", optimizer)))?, Some(3));
        let values = run.values()?;
        // It can continue to train.
        run.train(1)?;
        Ok(values)
    })
}

/// With the options of weights and of biases.
fn every_pair<R: UpdateRule + Sync + 'static>(options: [R; 2]) {
    // Plain states are the same on any number of ranks.
    let kinds = [(1, true), (2, true), (3, true), (2, false)];
    let mut seen = HashSet::new();
    for (saves, from_zero) in kinds {
        let folder = tempfile::tempdir().unwrap();
        let saved = save(folder.path(), saves, from_zero, &options);
        seen.insert(saved.clone());
        for (loads, to_zero) in kinds {
            for (rank, loaded) in load(folder.path(), loads, to_zero, &options).into_iter().enumerate() {
                let what = format!("{} from {saves} (ZeRO: {from_zero}) to {loads} (ZeRO: {to_zero})", R::NAME);
                assert_eq!(loaded, saved, "{what}, rank {rank}");
            }
        }
    }
    assert!(seen.len() > 1, "each number of ranks has other samples");
}

#[test]
fn every_optimizer_moves_between_zero_and_plain() {
    fn of_all<R: UpdateRule + Sync + 'static>(options: R) {
        every_pair([options.clone(), options]);
    }
    of_all(ParamsAdamW { lr: 0.05, ..Default::default() });
    of_all(ParamsAdam { lr: 0.05, ..Default::default() });
    of_all(ParamsSgd { lr: 0.05, momentum: 0.9, ..Default::default() });
    of_all(ParamsSgd { lr: 0.05, ..Default::default() });
    of_all(ParamsLamb { lr: 0.05, ..Default::default() });
    every_pair([MuonGroup::Muon(Default::default()), MuonGroup::AdamW(Default::default())]);
}

#[test]
fn shards_of_another_optimizer_or_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 2, true, &[ParamsAdamW::default(), ParamsAdamW::default()]);
    ranks(2, |pg| {
        let mut checkpointer = going_on(&pg, folder.path())?;
        let mut run = Run::new(&pg, false, &[ParamsSgd::default(), ParamsSgd::default()])?;
        let before = run.values()?;
        let error = checkpointer.load_latest(("optimizer", &mut run.optimizer)).unwrap_err();
        assert!(error.to_string().contains("it must be the state of part of Sgd, not of part of AdamW"), "{error}");
        assert_eq!(run.values()?, before);
        // Without the second layer, and then without groups.
        let parameters: Vec<_> =
            run.ddp.named_parameters().into_iter().filter(|(name, _)| name.starts_with("first")).collect();
        let mut fewer = FusedOptimizer::new(parameters, ParamsAdamW::default())?;
        let error = checkpointer.load_latest(("optimizer", &mut fewer)).unwrap_err();
        assert!(matches!(&error, Error::CheckpointPart { .. } | Error::RankFailed { .. }), "{error:?}");
        assert!(error.to_string().contains("2 parameter group(s), and this one has 1"), "{error}");
        Ok(())
    });
}
