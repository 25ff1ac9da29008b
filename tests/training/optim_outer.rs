//! DiLoCo: an outer optimizer over what the ranks have changed between two averagings.
mod streaming;

use crate::common::{assert_close, bits, floats, ranks, tensor};
use candle_core::{DType, Device, Tensor, Var};
use candle_ddp::checkpoint::{Checkpointer, CheckpointerOptions, PerRank, StateDict};
use candle_ddp::nn::{Linear, linear};
use candle_ddp::optim::{self, Optimizer, ParamsSgd, PeriodicModelAverager, Sgd};
use candle_ddp::{DistributedDataParallel, Error, ProcessGroup, Result};
use candle_nn::{Module, VarBuilder, VarMap};
use std::path::Path;

/// Nesterov's momentum, with numbers that are easy to calculate with.
fn halves() -> ParamsSgd {
    ParamsSgd { lr: 0.5, momentum: 0.5, nesterov: true, ..Default::default() }
}

fn set(var: &Var, value: f32) -> Result<()> {
    Ok(var.set(&Tensor::full(value, var.shape(), &Device::Cpu)?.to_dtype(var.dtype())?)?)
}

#[test]
fn two_outer_steps_are_as_calculated_by_hand() {
    // With three ranks: they begin with the mean of 0, 1 and 2. They move by -1, -3 and -5, so g = m = 3, and
    // 1 - 0.5 (3 + 0.5 × 3) = -1.25. They move by -2, -4 and -6, so g = 4, m = 0.5 × 3 + 4 = 5.5, and
    // -1.25 - 0.5 (4 + 0.5 × 5.5) = -4.625. With fewer ranks, g is 2 and 3, or 1 and 2.
    for (world_size, expected) in [(1, [0., -0.75, -2.375]), (2, [0.5, -1., -3.5]), (3, [1., -1.25, -4.625])] {
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            ranks(world_size, |pg| {
                let rank = pg.rank() as f32;
                let (var, counter) = (Var::zeros(2, dtype, pg.device())?, Var::zeros(1, DType::I64, pg.device())?);
                set(&var, rank)?;
                let named = vec![("w".to_string(), var.clone()), ("counter".to_string(), counter)];
                let mut averager = PeriodicModelAverager::new(&pg, 2, 0, halves())?;
                assert!(averager.average_parameters(named.clone())?);
                assert_close(&floats(&var), &[expected[0]; 2], 1e-6, "the start");
                for (outer, first) in [(1, 1.), (2, 2.)] {
                    for step in 1..=2 {
                        let before = floats(&var)[0];
                        set(&var, before - rank - first / 2.)?;
                        assert_eq!(averager.average_parameters(named.clone())?, step == 2);
                    }
                    let what = format!("outer step {outer} of {world_size} ranks, {dtype:?}");
                    assert_close(&floats(&var), &[expected[outer]; 2], 1e-6, &what);
                }
                Ok(())
            });
        }
    }
}

#[test]
fn an_outer_step_of_rate_1_without_momentum_is_plain_averaging() {
    ranks(3, |pg| {
        let shapes: [&[usize]; 3] = [&[3, 4], &[4], &[]];
        let made = || -> Result<Vec<(String, Var)>> {
            let var = |(index, shape): (usize, &&[usize])| {
                Ok((format!("{index}"), Var::from_tensor(&tensor(shape, index as u64 + 10 * pg.rank() as u64))?))
            };
            shapes.iter().enumerate().map(var).collect()
        };
        let (plain, outer) = (made()?, made()?);
        let rate_1 = ParamsSgd { lr: 1., ..Default::default() };
        let mut averages = PeriodicModelAverager::new(&pg, 3, 1, None)?;
        let mut outer_steps = PeriodicModelAverager::new(&pg, 3, 1, rate_1)?;
        for step in 0..9 {
            for (name, var) in plain.iter().chain(&outer) {
                let change = tensor(var.dims(), step + 100 * name.len() as u64 + 7 * pg.rank() as u64);
                var.set(&(var.as_tensor() + change)?)?;
            }
            let due = averages.average_parameters(plain.clone())?;
            assert_eq!((outer_steps.average_parameters(outer.clone())?, due), (due, (step + 2) % 3 == 0));
            for ((name, plain), (_, outer)) in plain.iter().zip(&outer) {
                assert_close(&floats(outer), &floats(plain), 1e-5, &format!("{name} after step {step}"));
            }
        }
        Ok(())
    });
}

/// Local steps of a model that each rank trains with its own samples.
struct Run {
    varmap: PerRank<VarMap>,
    optimizer: PerRank<Sgd>,
    averager: PeriodicModelAverager,
    model: Linear,
}

impl Run {
    fn new(pg: &ProcessGroup, seed: u64, (fragments, delay, alpha): (u64, u64, f64)) -> Result<Self> {
        let varmap = VarMap::new();
        let model = linear(3, 2, VarBuilder::from_varmap(&varmap, DType::F32, pg.device()))?;
        crate::common::fill(&varmap, seed);
        let options = ParamsSgd { lr: 0.1, momentum: 0.9, ..Default::default() };
        let optimizer = PerRank(Sgd::new(&varmap, options)?);
        let averager = PeriodicModelAverager::new(pg, 4, 1, halves())?.streaming(fragments, delay, alpha)?;
        Ok(Self { varmap: PerRank(varmap), optimizer, averager, model })
    }

    fn step(&mut self, pg: &ProcessGroup, number: u64) -> Result<()> {
        let x = tensor(&[4, 3], 10 * number + pg.rank() as u64);
        let loss = self.model.forward(&x)?.sqr()?.mean_all()?;
        Optimizer::step(&mut self.optimizer.0, &loss.backward()?)?;
        self.averager.average_parameters(&self.varmap.0)?;
        Ok(())
    }

    fn checkpoint(&mut self, pg: &ProcessGroup, folder: &Path, step: Option<u64>) -> Result<()> {
        let options = CheckpointerOptions { resume: true, ..Default::default() };
        let mut checkpointer = Checkpointer::new(pg, folder, options)?;
        let parts =
            &mut (("model", &mut self.varmap), ("optimizer", &mut self.optimizer), ("averager", &mut self.averager));
        match step {
            Some(step) => checkpointer.save(step, parts)?.wait().map(drop),
            None => checkpointer.load_latest(parts).map(|step| assert!(step.is_some())),
        }
    }

    fn bits(&self) -> Vec<u32> {
        optim::Parameters::from(&self.varmap.0).into_iter().flat_map(|(_, var)| bits(&var)).collect()
    }
}

#[test]
fn a_run_that_resumes_between_two_outer_steps_has_the_same_bits() {
    // Before the first averaging, after it, at an outer step and between two; and with fragments, or all parameters, in flight.
    let cases = [
        ((1, 0, 0.), &[1, 3, 6, 8][..], &[][..]),
        ((2, 1, 0.5), &[1, 3, 4, 5, 6], &[4, 6]),
        ((1, 3, 0.25), &[5, 6, 7, 8], &[6, 7, 8]),
    ];
    for (streaming, stops, in_flight) in cases {
        for stop in stops.iter().copied() {
            let folder = tempfile::tempdir().unwrap();
            ranks(2, |pg| {
                let mut unbroken = Run::new(&pg, 1, streaming)?;
                (0..14).try_for_each(|number| unbroken.step(&pg, number))?;
                let mut first = Run::new(&pg, 1, streaming)?;
                (0..stop).try_for_each(|number| first.step(&pg, number))?;
                first.checkpoint(&pg, folder.path(), Some(stop))?;
                let state = first.averager.state_dict()?;
                assert_eq!(state.keys().any(|key| key.starts_with("moved.")), in_flight.contains(&stop));
                let mut second = Run::new(&pg, 2, streaming)?;
                second.checkpoint(&pg, folder.path(), None)?;
                (stop..14).try_for_each(|number| second.step(&pg, number))?;
                assert_eq!(second.bits(), unbroken.bits(), "{streaming:?} stopped after {stop} steps");
                let [mut one, mut other] =
                    [&second, &unbroken].map(|run| run.averager.state_dict().unwrap().into_iter().collect::<Vec<_>>());
                one.sort_by(|a, b| a.0.cmp(&b.0));
                other.sort_by(|a, b| a.0.cmp(&b.0));
                assert_eq!(format!("{one:?}"), format!("{other:?}"));
                Ok(())
            });
        }
    }
}

/// Its own dtype would round small outer steps away, and what it has rounded away is no movement.
#[test]
fn starts_of_16_bit_parameters_are_kept_in_f32() {
    ranks(2, |pg| {
        let var = Var::zeros(1, DType::BF16, pg.device())?;
        set(&var, 256.)?;
        let parameters = vec![("w".to_string(), var.clone())];
        let quarter = ParamsSgd { lr: 0.25, ..Default::default() };
        let mut averager = PeriodicModelAverager::new(&pg, 1, 0, quarter)?;
        averager.average_parameters(parameters.clone())?;
        for (moves, start, seen) in [(-2., 255.5, 256.), (0., 255.5, 256.), (-2., 255., 255.)] {
            set(&var, floats(&var)[0] + moves)?;
            averager.average_parameters(parameters.clone())?;
            assert_eq!((floats(&averager.state_dict()?["start.w"]), floats(&var)), (vec![start], vec![seen]));
        }
        Ok(())
    });
}

#[test]
fn parameters_of_a_rank_that_are_not_finite_are_an_error_on_all_ranks() {
    for steps in [0, 1] {
        let errors = ranks(3, |pg| {
            let parameters = ["a", "b"].map(|name| (name.to_string(), Var::zeros(2, DType::F32, pg.device()).unwrap()));
            let mut averager = PeriodicModelAverager::new(&pg, 1, 0, halves())?;
            for _ in 0..steps {
                averager.average_parameters(parameters.to_vec())?;
            }
            let state = || averager.state_dict().map(|state| format!("{:?}", state.get("start.a")));
            let (before, rank) = (state()?, pg.rank() as f32);
            set(&parameters[0].1, rank)?;
            set(&parameters[1].1, if rank == 1. { f32::INFINITY } else { 0. })?;
            let mut failed = averager.clone();
            let error = failed.average_parameters(parameters.to_vec()).unwrap_err();
            assert_eq!(before, format!("{:?}", failed.state_dict()?.get("start.a")));
            assert_eq!(floats(&parameters[0].1), [rank; 2], "nothing has changed");
            // The group still works, and so does the averager.
            set(&parameters[1].1, 0.)?;
            failed.average_parameters(parameters.to_vec())?;
            assert!(floats(&parameters[0].1) != [rank; 2] || rank == 1.);
            Ok(error)
        });
        for error in errors {
            let Error::NonFinite { parameter, rank, value, .. } = &error else { panic!("{error}") };
            assert_eq!((parameter.as_deref(), *rank, value.as_str()), (Some("b"), Some(1), "an infinity"));
        }
    }
}

#[test]
fn outer_optimizers_that_cannot_be_right_are_refused() {
    ranks(2, |pg| {
        let wrong = ParamsSgd { nesterov: true, ..Default::default() };
        let error = PeriodicModelAverager::new(&pg, 2, 0, wrong).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { argument: "nesterov", .. }), "{error}");

        let var = |shape: &[usize]| Var::zeros(shape, DType::F32, pg.device()).unwrap();
        let named = |shape: &[usize]| vec![("w".to_string(), var(shape))];
        // Each rank has its own rate.
        let mine = ParamsSgd { lr: 0.5 + pg.rank() as f64, ..Default::default() };
        let error = PeriodicModelAverager::new(&pg, 1, 0, mine)?.average_parameters(named(&[2])).unwrap_err();
        assert!(matches!(&error, Error::Mismatch { difference, .. } if difference.contains("lr: 1.5")), "{error}");

        // Other parameters than before, on all ranks.
        let mut averager = PeriodicModelAverager::new(&pg, 1, 0, halves())?;
        averager.average_parameters(named(&[2]))?;
        let both = [named(&[2]), vec![("v".to_string(), var(&[1]))]].concat();
        for (other, expected) in [
            (named(&[3]), "parameter w: the outer optimizer has it as f32[2], but needs f32[3]"),
            (both, "parameter v: it is given, but the outer optimizer does not have it"),
            (Vec::new(), "parameter w: the outer optimizer has it, but it is not given"),
        ] {
            let error = averager.average_parameters(other).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
        let twice = [named(&[2]), named(&[2])].concat();
        let error = PeriodicModelAverager::new(&pg, 1, 0, halves())?.average_parameters(twice).unwrap_err();
        assert!(error.to_string().contains("two parameters have this name"), "{error}");

        // Each rank has loaded another state, although they have agreed before.
        averager.average_parameters(named(&[2]))?;
        let state = averager.state_dict()?;
        let mut mine = state.clone();
        mine.insert("start.w".to_string(), Tensor::full(pg.rank() as f32, 2, pg.device())?);
        averager.load_state_dict(&mine)?;
        let error = averager.average_parameters(named(&[2])).unwrap_err();
        assert!(matches!(&error, Error::PartDiffers { names, .. } if names == &["start.w"]), "{error}");

        // A state of another kind. That of a plain averager begins anew.
        let mut plain = PeriodicModelAverager::new(&pg, 1, 0, None)?;
        assert!(plain.load_state_dict(&state).is_err());
        averager.load_state_dict(&plain.state_dict()?)?;
        assert!(!averager.state_dict()?.contains_key("start.w"));
        let mut unlike = state.clone();
        unlike.insert("momentum_buffer.w".to_string(), Tensor::zeros(3, DType::F32, pg.device())?);
        let error = averager.load_state_dict(&unlike).unwrap_err().to_string();
        assert!(error.contains("momentum_buffer.w: it must be f32[2]"), "{error}");
        let mut unnamed = PeriodicModelAverager::new(&pg, 1, 0, halves())?;
        unnamed.average_parameters(vec![var(&[2])])?;
        let error = unnamed.state_dict().unwrap_err().to_string();
        assert!(error.contains("must have names for an outer optimizer to be saved"), "{error}");
        Ok(())
    });
}

/// Ranks 0 and 1, and ranks 2 and 3, are two hosts with a slow link between them: gradients are averaged within each.
#[test]
fn hosts_average_gradients_and_take_outer_steps_together() {
    let train = |pg: &ProcessGroup, island: &ProcessGroup, across: &ProcessGroup, host: usize| -> Result<Vec<f32>> {
        let varmap = VarMap::new();
        let ddp = DistributedDataParallel::new(island, &varmap, |vb| linear(3, 2, vb))?;
        crate::common::fill(&varmap, 1);
        let mut optimizer = Sgd::new(&ddp, ParamsSgd { lr: 0.1, ..Default::default() })?;
        let mut averager = PeriodicModelAverager::new(across, 3, 0, halves())?;
        let rows = 4 / island.world_size();
        for number in 0..7 {
            let x = tensor(&[4, 3], 10 * number + host as u64).narrow(0, island.rank() * rows, rows)?;
            Optimizer::step(&mut optimizer, &ddp.backward(&ddp.forward(&x)?.sqr()?.mean_all()?)?)?;
            averager.average_parameters(&ddp)?;
        }
        pg.barrier()?;
        Ok(ddp.parameters().iter().flat_map(|var| floats(var)).collect())
    };
    let four = ranks(4, |pg| {
        let of = |groups: [&[usize]; 2]| -> Result<ProcessGroup> {
            let [first, second] = groups.map(|ranks| pg.new_group(ranks));
            Ok(first?.or(second?).unwrap())
        };
        let (island, across) = (of([&[0, 1], &[2, 3]])?, of([&[0, 2], &[1, 3]])?);
        train(&pg, &island, &across, pg.rank() / 2)
    });
    let two = ranks(2, |pg| {
        let alone = [0, 1].map(|rank| pg.new_group(&[rank]));
        let [first, second] = alone;
        let own = first?.or(second?).unwrap();
        train(&pg, &own, &pg, pg.rank())
    });
    for found in &four {
        assert_eq!(found, &four[0]);
        assert_close(found, &two[0], 1e-5, "one rank per host");
    }
}
