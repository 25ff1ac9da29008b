//! Streaming DiLoCo: fragments that are averaged while local steps go on.
use super::{halves, set};
use crate::common::{floats, ranks};
use candle_core::{DType, Device, Tensor, Var};
use candle_ddp::checkpoint::StateDict;
use candle_ddp::optim::PeriodicModelAverager;
use candle_ddp::{Error, ProcessGroup, Result};
use std::collections::HashMap;
use std::sync::{Mutex, mpsc};
use std::time::Duration;

const PERIOD: u64 = 6;
const WARMUP: u64 = 1;
const STEPS: u64 = 20;

/// The sizes of the parameters, whose names are their places.
const SIZES: [usize; 5] = [6, 1, 4, 3, 2];

/// A number of fragments, a delay and an alpha.
type Streaming = (u64, u64, f64);

/// The fragments of these parameters.
fn fragments(count: u64) -> Vec<Vec<usize>> {
    match count {
        1 => vec![vec![0, 1, 2, 3, 4]],
        2 => vec![vec![0, 1], vec![2, 3, 4]],
        _ => vec![vec![0], vec![1, 2], vec![3, 4]],
    }
}

/// The place of an element, and its value after a rank's local step.
fn local(value: f64, rank: usize, step: u64, [parameter, element]: [usize; 2]) -> f64 {
    let target = (37 * rank + 11 * step as usize + 5 * parameter + element) as f64;
    value - 0.1 * (value - target.sin())
}

/// The values of all ranks, by rank, parameter and element.
type Values = Vec<Vec<Vec<f64>>>;

fn initial(rank: usize) -> Vec<Vec<f64>> {
    let of =
        |(parameter, size): (usize, &usize)| (0..*size).map(|element| (rank + parameter * element) as f64).collect();
    SIZES.iter().enumerate().map(of).collect()
}

/// The same algorithm in one process, element by element: whether parameters were replaced, and all values, after each step; and the
/// last starts.
fn simulate(world_size: usize, (count, delay, alpha): Streaming) -> (Vec<(bool, Values)>, Vec<Vec<f64>>) {
    let mut values: Values = (0..world_size).map(initial).collect();
    let (mut starts, mut momenta) = (initial(0), SIZES.map(|size| vec![0.; size]));
    let (spacing, fragments) = (PERIOD / count, fragments(count));
    let mut flight = None;
    let mut after = Vec::new();
    for step in 0..STEPS {
        for (rank, values) in values.iter_mut().enumerate() {
            for (parameter, values) in values.iter_mut().enumerate() {
                for (element, value) in values.iter_mut().enumerate() {
                    *value = local(*value, rank, step, [parameter, element]);
                }
            }
        }
        let mean = |parameter: usize, element: usize| {
            values.iter().map(|values| values[parameter][element]).sum::<f64>() / world_size as f64
        };
        let mut replaced = step == WARMUP;
        if step == WARMUP {
            for (parameter, size) in SIZES.iter().enumerate() {
                starts[parameter] = (0..*size).map(|element| mean(parameter, element)).collect();
            }
            values = vec![starts.clone(); world_size];
        } else if step > WARMUP {
            let since = step - WARMUP;
            if since.is_multiple_of(spacing) {
                let fragment = &fragments[((since / spacing - 1) % count) as usize];
                let moved = |parameter: usize| -> Vec<f64> {
                    (0..SIZES[parameter]).map(|element| starts[parameter][element] - mean(parameter, element)).collect()
                };
                let moved: Vec<_> = fragment.iter().map(|parameter| (*parameter, moved(*parameter))).collect();
                flight = Some((step + delay, moved));
            }
            if let Some((_, moved)) = flight.take_if(|(arrives, _)| *arrives == step) {
                replaced = true;
                for (parameter, moved) in moved {
                    for (element, gradient) in moved.into_iter().enumerate() {
                        let (start, momentum) = (&mut starts[parameter][element], &mut momenta[parameter][element]);
                        *momentum = 0.5 * *momentum + gradient;
                        *start -= 0.5 * (gradient + 0.5 * *momentum);
                        for values in &mut values {
                            let value = &mut values[parameter][element];
                            *value = (1. - alpha) * *start + alpha * *value;
                        }
                    }
                }
            }
        }
        after.push((replaced, values.clone()));
    }
    (after, starts)
}

/// A rank of the same run.
struct Rank {
    vars: Vec<(String, Var)>,
    averager: PeriodicModelAverager,
}

impl Rank {
    fn new(pg: &ProcessGroup, rank: usize, (fragments, delay, alpha): Streaming) -> Result<Self> {
        let var = |(index, values): (usize, &Vec<f64>)| {
            Ok((index.to_string(), Var::from_tensor(&Tensor::new(&values[..], &Device::Cpu)?)?))
        };
        let vars = initial(rank).iter().enumerate().map(var).collect::<Result<_>>()?;
        let averager = PeriodicModelAverager::new(pg, PERIOD, WARMUP, halves())?.streaming(fragments, delay, alpha)?;
        Ok(Self { vars, averager })
    }

    fn values(&self) -> Vec<Vec<f64>> {
        self.vars.iter().map(|(_, var)| var.to_vec1().unwrap()).collect()
    }

    fn set(&self, values: &[Vec<f64>]) -> Result<()> {
        self.vars
            .iter()
            .zip(values)
            .try_for_each(|((_, var), values)| Ok(var.set(&Tensor::new(&values[..], &Device::Cpu)?)?))
    }

    /// A local step like those of `rank`, and its part in the averaging.
    fn step(&mut self, rank: usize, step: u64) -> Result<bool> {
        let mut values = self.values();
        for (parameter, values) in values.iter_mut().enumerate() {
            for (element, value) in values.iter_mut().enumerate() {
                *value = local(*value, rank, step, [parameter, element]);
            }
        }
        self.set(&values)?;
        self.averager.average_parameters(self.vars.clone())
    }

    fn starts(&self) -> Vec<Vec<f64>> {
        let state = self.averager.state_dict().unwrap();
        (0..SIZES.len()).map(|index| state[&format!("start.{index}")].to_vec1().unwrap()).collect()
    }
}

#[track_caller]
fn assert_same(found: &[Vec<f64>], expected: &[Vec<f64>], what: &str) {
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        assert!((found - expected).abs() < 1e-12, "{what}: {found}, not {expected}");
    }
}

#[test]
fn fragments_are_averaged_as_in_a_simulation_in_one_process() {
    for world_size in 1..=3 {
        ranks(world_size, |pg| {
            for count in 1..=3 {
                let spacing = PERIOD / count;
                for delay in [0, 1, spacing - 1] {
                    for alpha in [0., 0.25, 0.5] {
                        let streaming = (count, delay, alpha);
                        let (expected, starts) = simulate(world_size, streaming);
                        let mut rank = Rank::new(&pg, pg.rank(), streaming)?;
                        for (step, (replaced, values)) in expected.iter().enumerate() {
                            let what = format!("{streaming:?}, step {step}, rank {} of {world_size}", pg.rank());
                            assert_eq!(rank.step(pg.rank(), step as u64)?, *replaced, "{what}");
                            assert_same(&rank.values(), &values[pg.rank()], &what);
                        }
                        assert_same(&rank.starts(), &starts, "the starts");
                        let all = pg.all_gather_object(&rank.starts().concat())?;
                        assert!(all.iter().all(|other| *other == all[0]), "{all:?}");
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn local_steps_go_on_while_a_fragment_is_in_flight() {
    let (sender, receiver) = mpsc::channel();
    let (sender, receiver) = (Mutex::new(sender), Mutex::new(receiver));
    ranks(2, |pg| {
        let mut rank = Rank::new(&pg, pg.rank(), (2, 2, 0.))?;
        let sent = WARMUP + PERIOD / 2;
        for step in 0..=sent + 2 {
            if step == sent && pg.rank() == 1 {
                // Rank 0 is already two steps further.
                receiver.lock().unwrap().recv_timeout(Duration::from_secs(60)).unwrap();
            }
            assert_eq!(rank.step(pg.rank(), step)?, step == WARMUP || step == sent + 2);
            if step == sent + 1 && pg.rank() == 0 {
                sender.lock().unwrap().send(()).unwrap();
            }
        }
        Ok(())
    });
}

type State = (Vec<Vec<f64>>, HashMap<String, Tensor>);

/// The state of a run whose ranks make the same local steps, when a fragment is in flight.
fn in_flight(world_size: usize, streaming: Streaming) -> (State, u64) {
    let stop = WARMUP + PERIOD + 1;
    let mut states = ranks(world_size, |pg| {
        let mut rank = Rank::new(&pg, 0, streaming)?;
        (0..stop).try_for_each(|step| rank.step(0, step).map(drop))?;
        let state = rank.averager.state_dict()?;
        assert!(state.keys().any(|key| key.starts_with("moved.")), "{:?}", state.keys());
        Ok((rank.values(), state))
    });
    (states.swap_remove(0), stop)
}

#[test]
fn a_flight_goes_on_with_another_number_of_ranks() {
    let streaming = (2, 2, 0.5);
    let unbroken = ranks(1, |pg| {
        let mut rank = Rank::new(&pg, 0, streaming)?;
        (0..STEPS).try_for_each(|step| rank.step(0, step).map(drop))?;
        Ok((rank.values(), rank.starts()))
    });
    for [before, after] in [[1, 2], [2, 1], [2, 4], [4, 2]] {
        let ((values, state), stop) = in_flight(before, streaming);
        let found = ranks(after, |pg| {
            let mut rank = Rank::new(&pg, 0, streaming)?;
            rank.set(&values)?;
            rank.averager.load_state_dict(&state)?;
            (stop..STEPS).try_for_each(|step| rank.step(0, step).map(drop))?;
            Ok((rank.values(), rank.starts()))
        });
        assert_eq!(found, vec![unbroken[0].clone(); after], "{before} ranks, then {after}");
    }
}

#[test]
fn a_flight_arrives_with_other_options_than_it_began_with() {
    let sent = |state: &HashMap<String, Tensor>| {
        (0..SIZES.len()).filter(|name| state.contains_key(&format!("moved.{name}"))).collect::<Vec<_>>()
    };
    let ((values, state), stop) = in_flight(1, (2, 2, 0.));
    assert_eq!(sent(&state), [2, 3, 4], "the second fragment, since the first has arrived");
    // The period, and how many calls later it arrives: at once, after the delay, or when the next fragment is due.
    for (period, streaming, calls) in [(6, (2, 2, 0.), 1), (6, (2, 0, 0.), 0), (6, (1, 5, 0.), 4), (7, (1, 3, 0.), 0)] {
        ranks(1, |pg| {
            let (fragments, delay, alpha) = streaming;
            let mut rank = Rank::new(&pg, 0, streaming)?;
            let averager = PeriodicModelAverager::new(&pg, period, WARMUP, halves())?;
            rank.averager = averager.streaming(fragments, delay, alpha)?;
            rank.set(&values)?;
            rank.averager.load_state_dict(&state)?;
            for call in 0..=calls {
                assert_eq!(sent(&rank.averager.state_dict()?), [2, 3, 4]);
                assert_eq!(rank.step(0, stop + call)?, call == calls, "{period} {streaming:?}, call {call}");
            }
            let after = rank.averager.state_dict()?;
            assert_eq!(sent(&after), if period == 7 { vec![0, 1, 2, 3, 4] } else { Vec::new() });
            assert_eq!(after["outer_steps"].to_vec1::<i64>()?, [2]);
            Ok(())
        });
    }
    // After one outer step of all parameters it is the turn of the first fragment, in whose second round it is.
    ranks(1, |pg| {
        let mut whole = Rank::new(&pg, 0, (1, 0, 0.))?;
        (0..=WARMUP + PERIOD).try_for_each(|step| whole.step(0, step).map(drop))?;
        let mut rank = Rank::new(&pg, 0, (3, 1, 0.))?;
        rank.averager.load_state_dict(&whole.averager.state_dict()?)?;
        (1..=PERIOD / 3).try_for_each(|step| rank.step(0, WARMUP + PERIOD + step).map(drop))?;
        let after = rank.averager.state_dict()?;
        assert_eq!((sent(&after), after["outer_steps"].to_vec1::<i64>()?), (vec![0], vec![3]));
        Ok(())
    });
}

/// A rank in whose flight something goes wrong: two fragments, "a" and "b".
struct Two {
    vars: Vec<(String, Var)>,
    averager: PeriodicModelAverager,
}

impl Two {
    /// With the first fragment in flight.
    fn new(pg: &ProcessGroup) -> Result<Self> {
        let mut two = Self::before(pg)?;
        assert!(!two.call()?);
        Ok(two)
    }

    /// Just before the first fragment is sent.
    fn before(pg: &ProcessGroup) -> Result<Self> {
        let vars = ["a", "b"].map(|name| (name.to_string(), Var::zeros(2, DType::F32, pg.device()).unwrap()));
        let averager = PeriodicModelAverager::new(pg, 4, 0, halves())?.streaming(2, 1, 0.5)?;
        let mut two = Self { vars: vars.to_vec(), averager };
        assert_eq!((two.call()?, two.call()?), (true, false));
        Ok(two)
    }

    fn call(&mut self) -> Result<bool> {
        self.averager.average_parameters(self.vars.clone())
    }

    fn state(&self) -> Result<String> {
        let mut state: Vec<_> =
            self.averager.state_dict()?.into_iter().filter(|(key, _)| !key.contains("moved")).collect();
        state.sort_by(|a, b| a.0.cmp(&b.0));
        let values = self.vars.iter().map(|(_, var)| floats(var));
        Ok(format!(
            "{:?} {:?}",
            state.iter().map(|(key, value)| (key, value.to_string())).collect::<Vec<_>>(),
            values.collect::<Vec<_>>()
        ))
    }
}

#[test]
fn a_fragment_in_flight_that_is_not_finite_is_an_error_on_all_ranks() {
    let errors = ranks(3, |pg| {
        let mut two = Two::before(&pg)?;
        set(&two.vars[0].1, if pg.rank() == 1 { f32::NAN } else { 1. })?;
        assert!(!two.call()?, "it is on its way");
        set(&two.vars[0].1, 2.)?;
        let before = two.state()?;
        let error = two.call().unwrap_err();
        assert_eq!(two.state()?, before, "nothing has changed");
        // The other calls work, and the fragment has its turn again.
        let replaced: Vec<bool> = (0..4).map(|_| two.call()).collect::<Result<_>>()?;
        assert_eq!(replaced, [false, false, true, false]);
        // It has moved from 0 to 2: 0 - 0.5 (-2 + 0.5 × -2) = 1.5, and half of the local 2.
        assert_eq!((floats(&two.vars[0].1), floats(&two.vars[1].1)), (vec![1.75; 2], vec![0.; 2]));
        Ok(error)
    });
    for error in errors {
        let Error::NonFinite { parameter, rank, value, .. } = &error else { panic!("{error}") };
        assert_eq!((parameter.as_deref(), *rank, value.as_str()), (Some("a"), Some(1), "a NaN"));
    }
}

#[test]
fn other_parameters_than_in_flight_are_refused_on_all_ranks() {
    ranks(2, |pg| {
        let var = |name: &str, size| (name.to_string(), Var::zeros(size, DType::F32, pg.device()).unwrap());
        for (vars, expected) in [
            (vec![var("a", 3), var("b", 2)], "parameter a: the outer optimizer has it as f32[2], but needs f32[3]"),
            (vec![var("a", 2)], "parameter b: the outer optimizer has it, but it is not given"),
            (vec![var("a", 2), var("b", 2), var("c", 2)], "parameter c: it is given"),
            (vec![var("a", 2), var("a", 2), var("b", 2)], "parameter a: two parameters have this name"),
        ] {
            let mut two = Two::new(&pg)?;
            let own = std::mem::replace(&mut two.vars, vars);
            let error = two.call().unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
            // It is still in flight.
            two.vars = own;
            assert!(two.call()?);
        }
        // Those of one rank, which says so without the others.
        let mut two = Two::new(&pg)?;
        if pg.rank() == 1 {
            let error = two.averager.average_parameters(vec![var("a", 2)]).unwrap_err();
            assert!(matches!(error, Error::Parameter { .. }), "{error}");
        }
        assert!(two.call()?);
        Ok(())
    });
}

#[test]
fn a_rank_that_leaves_before_or_during_a_flight_is_an_error_on_the_others() {
    for leaves in ["before it is sent", "before its state is asked for"] {
        let errors = ranks(3, |pg| {
            let mut two = Two::before(&pg)?;
            if pg.rank() == 1 {
                return Ok(None);
            }
            assert!(!two.call()?, "sending does not wait");
            let is_group = |error: &Error| matches!(error, Error::Group(_));
            if leaves != "before it is sent" {
                let error = two.averager.state_dict().unwrap_err();
                assert!(is_group(&error), "{error}");
            }
            let error = two.call().unwrap_err();
            assert!(is_group(&error), "{error}");
            // The group has ended: the next fragment says so too.
            let next = (0..4).find_map(|_| two.call().err()).unwrap();
            assert!(is_group(&next), "{next}");
            Ok(Some(()))
        });
        assert_eq!(errors, [Some(()), None, Some(())], "{leaves}");
    }
}

#[test]
fn streaming_that_cannot_be_right_is_refused() {
    ranks(2, |pg| {
        let averager = || PeriodicModelAverager::new(&pg, 6, 0, halves());
        for (streaming, argument, expected) in [
            ((0, 0, 0.), "fragments", "must divide the period of 6 steps"),
            ((4, 0, 0.), "fragments", "must divide the period of 6 steps"),
            ((12, 0, 0.), "fragments", "must divide the period of 6 steps"),
            ((3, 2, 0.), "delay", "must be less than the 2 steps"),
            ((1, 6, 0.), "delay", "must be less than the 6 steps"),
            ((2, 1, 1.), "alpha", "must be at least 0 and below 1"),
            ((2, 1, -0.1), "alpha", "must be at least 0 and below 1"),
            ((2, 1, f64::NAN), "alpha", "must be at least 0 and below 1"),
        ] {
            let (fragments, delay, alpha) = streaming;
            let error = averager()?.streaming(fragments, delay, alpha).unwrap_err();
            let Error::InvalidArgument { argument: found, reason } = &error else { panic!("{error}") };
            assert!(*found == argument && reason.contains(expected), "{streaming:?}: {error}");
        }
        let error = PeriodicModelAverager::new(&pg, 6, 0, None)?.streaming(2, 0, 0.).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { argument: "outer", .. }), "{error}");

        let vars = ["a", "b"].map(|name| (name.to_string(), Var::zeros(2, DType::F32, pg.device()).unwrap())).to_vec();
        let error = averager()?.streaming(3, 0, 0.)?.average_parameters(vars.clone()).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { argument: "fragments", .. }), "{error}");
        // Each rank has its own alpha.
        let mut mine = averager()?.streaming(2, 1, 0.25 * pg.rank() as f64)?;
        let error = mine.average_parameters(vars).unwrap_err();
        assert!(matches!(&error, Error::Mismatch { difference, .. } if difference.contains("alpha: 0.25")), "{error}");

        // Each rank has loaded another flight.
        let mut two = Two::new(&pg)?;
        let state = two.averager.state_dict()?;
        let mut mine = state.clone();
        mine.insert("moved.a".to_string(), Tensor::full(pg.rank() as f32, 2, pg.device())?);
        two.averager.load_state_dict(&mine)?;
        let error = two.call().unwrap_err();
        assert!(matches!(&error, Error::PartDiffers { names, .. } if names == &["moved.a"]), "{error}");
        // States that cannot be right.
        for (key, tensor, expected) in [
            ("moved.a", Some(Tensor::zeros(3, DType::F32, pg.device())?), "moved.a: it must be f32[2], as its start"),
            ("moved.c", Some(Tensor::zeros(2, DType::F32, pg.device())?), "start.c: it is missing"),
            ("fragments", Some(Tensor::zeros(1, DType::I64, pg.device())?), "fragments: it must be at least 1"),
            ("start.a", None, "start.a: it is missing"),
        ] {
            let mut wrong = state.clone();
            match tensor {
                Some(tensor) => drop(wrong.insert(key.to_string(), tensor)),
                None => {
                    wrong.remove("momentum_buffer.a");
                    wrong.remove(key);
                }
            }
            let error = two.averager.load_state_dict(&wrong).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        Ok(())
    });
}
