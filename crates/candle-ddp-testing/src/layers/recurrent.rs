//! Recurrent layers.
use super::golden::{Parameters, check};
use candle_core::{Device, Result, Tensor};
use candle_ddp_nn::rnn::{GRUState, LSTMState};
use candle_ddp_nn::{RNNOptions, StackedGRU, StackedLSTM};
use candle_nn::VarBuilder;

/// Parameters by PyTorch's names, in PyTorch's order.
fn builder(options: &RNNOptions, weights: &[Tensor]) -> VarBuilder<'static> {
    let directions: &[&str] = if options.bidirectional { &["", "_reverse"] } else { &[""] };
    let kinds = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"];
    let kinds = &kinds[..if options.bias { 4 } else { 2 }];
    let mut names = Vec::new();
    for layer in 0..options.num_layers {
        for direction in directions {
            names.extend(kinds.iter().map(|kind| format!("{kind}_l{layer}{direction}")));
        }
    }
    assert_eq!(names.len(), weights.len());
    let named = names.into_iter().zip(weights.iter().cloned()).collect();
    VarBuilder::from_tensors(named, weights[0].dtype(), weights[0].device())
}

/// Splits the inputs of a case into x, the states, and the weights.
fn parts<'a>(case: &Parameters, inputs: &'a [Tensor], states: usize) -> (&'a Tensor, &'a [Tensor], &'a [Tensor]) {
    let states = if case.flag("state") { states } else { 0 };
    (&inputs[0], &inputs[1..1 + states], &inputs[1 + states..])
}

fn options(case: &Parameters) -> RNNOptions {
    RNNOptions {
        num_layers: case.numbers("layers")[0],
        bias: case.flag("bias"),
        batch_first: case.flag("batch_first"),
        dropout: None,
        bidirectional: case.flag("both"),
    }
}

fn joined(all: &[&Tensor]) -> Result<Tensor> {
    Tensor::cat(&all.iter().map(|tensor| tensor.flatten_all()).collect::<Result<Vec<_>>>()?, 0)
}

fn lstm(case: &Parameters, inputs: &[Tensor]) -> Result<Tensor> {
    let (x, states, weights) = parts(case, inputs, 2);
    let (options, [size, hidden]) = (options(case), ["size", "hidden"].map(|name| case.numbers(name)[0]));
    let vb = builder(&options, weights);
    let layers = StackedLSTM::new(size, hidden, options, vb)?;
    let state = (!states.is_empty()).then(|| LSTMState::new(states[0].clone(), states[1].clone()));
    let (y, state) = match case.text("lengths") {
        "None" => layers.forward(x, state.as_ref(), true)?,
        _ => layers.forward_with_lengths(x, &case.numbers("lengths"), state.as_ref(), true)?,
    };
    joined(&[&y, &state.h, &state.c])
}

fn gru(case: &Parameters, inputs: &[Tensor]) -> Result<Tensor> {
    let (x, states, weights) = parts(case, inputs, 1);
    let (options, [size, hidden]) = (options(case), ["size", "hidden"].map(|name| case.numbers(name)[0]));
    let vb = builder(&options, weights);
    let layers = StackedGRU::new(size, hidden, options, vb)?;
    let state = states.first().map(|h| GRUState { h: h.clone() });
    let (y, state) = match case.text("lengths") {
        "None" => layers.forward(x, state.as_ref(), true)?,
        _ => layers.forward_with_lengths(x, &case.numbers("lengths"), state.as_ref(), true)?,
    };
    joined(&[&y, &state.h])
}

/// All options.
pub fn recurrent_layers_match_pytorch(device: &Device) {
    check(device, "lstm", lstm);
    check(device, "gru", gru);
}
