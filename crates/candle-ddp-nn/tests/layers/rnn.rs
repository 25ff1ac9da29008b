//! Recurrent layers against PyTorch's and candle's, and what they refuse.
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_ddp_nn::rnn::{Direction, GRUState, LSTMState};
use candle_ddp_nn::{Dropout, GRUConfig, LSTMConfig, RNN, RNNOptions, StackedGRU, StackedLSTM, gru, lstm, no_grad};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::seed::Generator;
use candle_ddp_testing::{assert_close, fill, floats, tensor};
use candle_nn::{VarBuilder, VarMap};
use std::sync::{Arc, Mutex};

fn builder(varmap: &VarMap) -> VarBuilder<'static> {
    VarBuilder::from_varmap(varmap, DType::F32, &Device::Cpu)
}

/// A result, with its gradients for `varmap` and `x`.
fn run(varmap: &VarMap, x: &Var, y: &Tensor) -> Vec<Vec<f32>> {
    let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
    let data = varmap.data().lock().unwrap();
    let mut names: Vec<_> = data.keys().collect();
    names.sort();
    let gradients = names.into_iter().map(|name| &data[name]).chain([x]).map(|var| floats(grads.get(var).unwrap()));
    std::iter::once(floats(y)).chain(gradients).collect()
}

fn compare(ours: &[Vec<f32>], candles: &[Vec<f32>], what: &str) {
    assert_eq!(ours.len(), candles.len());
    for (index, (ours, candles)) in ours.iter().zip(candles).enumerate() {
        assert_close(ours, candles, 1e-5, &format!("{what}: {index}"));
    }
}

/// The same names, sequences and states, c after each step included.
#[test]
fn they_are_drop_ins_for_candles() {
    let config = LSTMConfig { layer_idx: 1, direction: Direction::Backward, ..Default::default() };
    for config in [LSTMConfig::default(), config, LSTMConfig::default_no_bias()] {
        let varmap = VarMap::new();
        let (ours, candles) =
            (lstm(3, 5, config, builder(&varmap)).unwrap(), candle_nn::lstm(3, 5, config, builder(&varmap)).unwrap());
        assert_eq!(varmap.all_vars().len(), if config.b_ih_init.is_some() { 4 } else { 2 });
        fill(&varmap, 1);
        let x = Var::from_tensor(&tensor(&[2, 7, 3], 1)).unwrap();
        fn all<L: RNN<State = LSTMState>>(layer: &L, x: &Tensor) -> Tensor {
            let states = layer.seq(x).unwrap();
            let next = layer.step(&x.get_on_dim(1, 2).unwrap(), states.last().unwrap()).unwrap();
            let cells: Vec<_> = states.iter().map(|state| state.c().clone()).collect();
            let steps = [layer.states_to_tensor(&states).unwrap(), Tensor::stack(&cells, 1).unwrap()];
            Tensor::cat(&[steps, [next.h, next.c].map(|t| t.unsqueeze(1).unwrap())].concat(), 1).unwrap()
        }
        compare(&run(&varmap, &x, &all(&ours, &x)), &run(&varmap, &x, &all(&candles, &x)), &format!("{config:?}"));
        assert!(ours.seq(&tensor(&[2, 0, 3], 1)).unwrap().is_empty());
    }
    let recurrent_bias = GRUConfig { b_ih_init: None, ..Default::default() };
    for config in [GRUConfig::default(), GRUConfig::default_no_bias(), recurrent_bias] {
        let varmap = VarMap::new();
        let (ours, candles) =
            (gru(3, 5, config, builder(&varmap)).unwrap(), candle_nn::gru(3, 5, config, builder(&varmap)).unwrap());
        assert_eq!(varmap.all_vars().len(), 2 + [config.b_ih_init, config.b_hh_init].iter().flatten().count());
        fill(&varmap, 1);
        let x = Var::from_tensor(&tensor(&[2, 6, 3], 1)).unwrap();
        fn all<L: RNN<State = GRUState>>(layer: &L, x: &Tensor) -> Tensor {
            let states = layer.seq(x).unwrap();
            let next = layer.step(&x.get_on_dim(1, 2).unwrap(), states.last().unwrap()).unwrap();
            Tensor::cat(&[layer.states_to_tensor(&states).unwrap(), next.h], 1).unwrap()
        }
        compare(&run(&varmap, &x, &all(&ours, &x)), &run(&varmap, &x, &all(&candles, &x)), &format!("{config:?}"));
    }
}

/// Parameters begin uniformly between ±1/√hidden, as in PyTorch.
#[test]
fn parameters_have_pytorchs_names_and_initial_values() {
    let varmap = VarMap::new();
    let options = RNNOptions { num_layers: 2, bidirectional: true, ..Default::default() };
    StackedLSTM::new(3, 100, options, builder(&varmap)).unwrap();
    let data = varmap.data().lock().unwrap();
    assert_eq!(data.len(), 16);
    assert_eq!(data["weight_ih_l1_reverse"].dims(), [400, 200]);
    for name in ["weight_hh_l0", "bias_ih_l0", "bias_hh_l1_reverse"] {
        let values = floats(&data[name]);
        let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        assert!((0.095..=0.1).contains(&largest), "{name}: {largest}");
    }
}

/// The last step of `narrow` of the first layer's outputs is what the second layer gets, and only in training.
#[test]
fn dropout_is_between_layers() {
    let varmap = VarMap::new();
    let generator = || Arc::new(Mutex::new(Generator::new(3)));
    let new = |dropout| {
        let options = RNNOptions { num_layers: 2, dropout, ..Default::default() };
        StackedGRU::new(3, 4, options, builder(&varmap)).unwrap()
    };
    let (with, without) = (new(Some(Dropout::with_generator(0.4, generator()))), new(None));
    fill(&varmap, 2);
    let x = tensor(&[5, 2, 3], 1);
    let y = |layers: &StackedGRU, train| layers.forward(&x, None, train).unwrap();
    assert_eq!(floats(&y(&with, false).0), floats(&y(&without, false).0));
    let vb = |layer: &str| {
        let data = varmap.data().lock().unwrap();
        let own = data.iter().filter(|(name, _)| name.ends_with(layer));
        let own = own.map(|(name, var)| (name.replace(layer, "l0"), var.as_tensor().clone()));
        VarBuilder::from_tensors(own.collect(), DType::F32, &Device::Cpu)
    };
    let first = StackedGRU::new(3, 4, RNNOptions::default(), vb("l0")).unwrap();
    let second = StackedGRU::new(4, 4, RNNOptions::default(), vb("l1")).unwrap();
    let dropped = Dropout::with_generator(0.4, generator()).forward(&y(&first, true).0, true).unwrap();
    let expected = second.forward(&dropped, None, true).unwrap().0;
    assert_close(&floats(&y(&with, true).0), &floats(&expected), 1e-6, "dropout");
}

/// What a sequence gives does not depend on the others of its batch, or on what is behind its end.
#[test]
fn a_sequence_of_a_batch_is_as_if_alone() {
    let varmap = VarMap::new();
    let options = RNNOptions { num_layers: 2, bidirectional: true, batch_first: true, ..Default::default() };
    let layers = StackedLSTM::new(3, 4, options, builder(&varmap)).unwrap();
    fill(&varmap, 3);
    let lengths = [2, 6, 1, 6, 3];
    let x = tensor(&[5, 6, 3], 1);
    let (y, state) = layers.forward_with_lengths(&x, &lengths, None, false).unwrap();
    for (number, &length) in lengths.iter().enumerate() {
        let (alone, last) =
            layers.forward(&x.narrow(0, number, 1).unwrap().narrow(1, 0, length).unwrap(), None, false).unwrap();
        let own = y.get(number).unwrap();
        assert_close(&floats(&own.narrow(0, 0, length).unwrap()), &floats(&alone), 1e-6, "outputs");
        assert!(floats(&own.narrow(0, length, 6 - length).unwrap()).iter().all(|y| *y == 0.0));
        for (last, state) in [(&last.h, &state.h), (&last.c, &state.c)] {
            assert_close(&floats(&state.narrow(1, number, 1).unwrap()), &floats(last), 1e-6, "the last state");
        }
    }
}

/// A detached state is the one at which the next part of a sequence begins.
#[test]
fn a_sequence_may_come_in_parts() {
    let varmap = VarMap::new();
    let options = RNNOptions { num_layers: 2, ..Default::default() };
    let layers = StackedGRU::new(3, 4, options, builder(&varmap)).unwrap();
    fill(&varmap, 4);
    let x = tensor(&[7, 2, 3], 1);
    let whole = layers.forward(&x, None, false).unwrap();
    let (first, state) = layers.forward(&x.narrow(0, 0, 3).unwrap(), None, false).unwrap();
    let state = GRUState { h: state.h.detach() };
    let (second, state) = layers.forward(&x.narrow(0, 3, 4).unwrap(), Some(&state), false).unwrap();
    assert_eq!(floats(&Tensor::cat(&[first, second], 0).unwrap()), floats(&whole.0));
    assert_eq!(floats(&state.h), floats(&whole.1.h));
}

#[test]
fn nothing_is_recorded_under_no_grad() {
    let varmap = VarMap::new();
    let layers = StackedLSTM::new(3, 4, RNNOptions::default(), builder(&varmap)).unwrap();
    let x = Var::from_tensor(&tensor(&[5, 2, 3], 1)).unwrap();
    let tracked = layers.forward_with_lengths(&x, &[5, 2], None, false).unwrap();
    let (y, state) = no_grad(|| layers.forward_with_lengths(&x, &[5, 2], None, false)).unwrap();
    assert!(tracked.0.track_op() && ![&y, &state.h, &state.c].iter().any(|tensor| tensor.track_op()));
    assert_eq!(floats(&y), floats(&tracked.0));
}

#[test]
fn what_does_not_fit_is_refused() {
    fn refused<T>(result: Result<T>, argument: &str, text: &str) {
        match result.map(|_| ()).map_err(Error::from) {
            Err(Error::Base(candle_ddp_base::Error::InvalidArgument { argument: found, reason })) => {
                assert!(found == argument && reason.contains(text), "{found}: {reason}");
            }
            other => panic!("{argument}: {other:?}"),
        }
    }
    let varmap = VarMap::new();
    let new = |hidden, options| StackedLSTM::new(3, hidden, options, builder(&varmap));
    refused(new(0, RNNOptions::default()), "hidden_size", "at least 1");
    refused(new(4, RNNOptions { num_layers: 0, ..Default::default() }), "num_layers", "at least 1");
    let dropout = Some(Dropout::new(0.5));
    refused(new(4, RNNOptions { dropout, ..Default::default() }), "dropout", "must be None");
    let layers = new(4, RNNOptions::default()).unwrap();
    let input = "the input of LSTM";
    for shape in [&[5, 2, 4][..], &[5, 3], &[0, 2, 3]] {
        refused(layers.forward(&tensor(shape, 1), None, false), input, "must be (steps, batch, 3)");
    }
    refused(layers.forward(&tensor(&[5, 2, 3], 1).to_dtype(DType::F64).unwrap(), None, false), input, "same dtype");
    let x = tensor(&[5, 2, 3], 1);
    let state = |h: &[usize], c: &[usize]| LSTMState::new(tensor(h, 1), tensor(c, 2));
    let good: &[usize] = &[1, 2, 4];
    for bad in [&[2, 2, 4][..], &[1, 1, 4], &[1, 2, 3], &[2, 4]] {
        for state in [state(bad, good), state(good, bad)] {
            refused(layers.forward(&x, Some(&state), false), "the state of LSTM", "must be (1, 2, 4)");
        }
    }
    let wide = LSTMState::new(tensor(good, 1).to_dtype(DType::F64).unwrap(), tensor(good, 1));
    refused(layers.forward(&x, Some(&wide), false), "the state of LSTM", "same dtype");
    for lengths in [&[5, 0][..], &[6, 1], &[5], &[5, 2, 1]] {
        refused(layers.forward_with_lengths(&x, lengths, None, false), "the lengths of LSTM", "from 1 to 5");
    }
    let single = |hidden| lstm(3, hidden, Default::default(), builder(&VarMap::new()));
    refused(single(0), "hidden_size", "at least 1");
    let (single, zeros) = (single(4).unwrap(), |batch: usize| tensor(&[batch, 4], 1));
    // The rows of a sequence are not one step.
    for shape in [&[2, 5, 3][..], &[2, 4]] {
        let state = LSTMState::new(zeros(2), zeros(2));
        refused(single.step(&tensor(shape, 1), &state), input, "it must be (2, 3)");
    }
    refused(single.step(&tensor(&[3, 3], 1), &LSTMState::new(zeros(3), zeros(2))), "the state of LSTM", "(3, 4)");
    let gru = StackedGRU::new(3, 4, RNNOptions::default(), builder(&VarMap::new())).unwrap();
    refused(gru.forward_with_lengths(&x, &[5, 9], None, false), "the lengths of GRU", "[5, 9]");
    refused(gru.forward(&tensor(&[5, 2, 9], 1), None, false), "the input of GRU", "f32[5, 2, 9]");
}
