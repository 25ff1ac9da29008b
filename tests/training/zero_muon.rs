//! Muon under ZeRO, where each matrix belongs to one rank, next to Muon on all ranks.
use crate::common::{self, assert_close, buckets, filled, floats, ranks, sharding, tensor, var};
use candle_core::Tensor;
use candle_core::backprop::GradStore;
use candle_ddp::checkpoint::StateDict;
use candle_ddp::optim::{Muon, MuonGroup, Optimizer, ParamsAdamW, ParamsMuon};
use candle_ddp::{DdpOptions, DistributedDataParallel, Error, ProcessGroup, Result, Unused};
use candle_nn::{VarBuilder, VarMap};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

type Dict = HashMap<String, Tensor>;

/// Names with bits.
type Bits = BTreeMap<String, Vec<u32>>;

fn bits<'a>(tensors: impl IntoIterator<Item = (&'a String, &'a Tensor)>) -> Bits {
    tensors.into_iter().map(|(name, tensor)| (name.clone(), common::bits(tensor))).collect()
}

/// Matrices that no number of ranks divides, an embedding, a bias, and a matrix that only some passes use.
struct Net {
    matrices: [Tensor; 3],
    embedding: Tensor,
    bias: Tensor,
    rare: Tensor,
}

fn build(vb: VarBuilder) -> candle_core::Result<Net> {
    let get = |name: &str, shape: &[usize]| vb.get(shape, name);
    let matrices = [get("first", &[5, 7])?, get("second", &[7, 9])?, get("third", &[9, 3])?];
    Ok(Net { matrices, embedding: get("embedding", &[11, 5])?, bias: get("bias", &[3])?, rare: get("rare", &[3, 3])? })
}

type Ddp = DistributedDataParallel<Net>;

/// The model in buckets of a few parameters each.
fn wrap(pg: &ProcessGroup, zero: bool) -> Result<(Ddp, VarMap)> {
    let caps = DdpOptions {
        sharding: sharding(zero),
        unused: Unused::Allow,
        buckets: buckets(2.5e-4, 5e-5),
        ..Default::default()
    };
    filled(pg, build, caps, 3)
}

/// The gradients of a step with this rank's samples. In odd steps the last rank uses one more matrix.
fn backward(ddp: &Ddp, step: u64) -> Result<GradStore> {
    let pg = ddp.process_group();
    let samples = tensor(&[4, 11], 10 * step + pg.rank() as u64);
    ddp.backward(&ddp.call(|net| {
        let [first, second, third] = &net.matrices;
        let y = samples.matmul(&net.embedding)?.matmul(first)?.tanh()?.matmul(second)?.tanh()?.matmul(third)?;
        let y = y.broadcast_add(&net.bias)?;
        let uses_all = step % 2 == 1 && pg.rank() + 1 == pg.world_size();
        if uses_all { y.matmul(&net.rare)? } else { y }.sqr()?.mean_all()
    })?)
}

fn optimizer(ddp: &Ddp) -> Result<Muon> {
    let (muon, adamw) = (ParamsMuon { lr: 0.02, ..Default::default() }, ParamsAdamW { lr: 0.01, ..Default::default() });
    Muon::with_adamw(ddp, muon, adamw, |name| name == "embedding")
}

/// Trains in steps `from..to`, after loading the state and the parameters of another run. Returns those of this one.
fn run(world_size: usize, zero: bool, from: Option<&(Bits, Dict, Dict)>, steps: Range<u64>) -> (Bits, Dict, Dict) {
    let mut runs = ranks(world_size, |pg| {
        let (ddp, mut varmap) = wrap(&pg, zero)?;
        let mut optimizer = optimizer(&ddp)?;
        if let Some((_, parameters, state)) = from {
            varmap.load_state_dict(parameters)?;
            optimizer.load_state_dict(state)?;
        }
        for step in steps.clone() {
            optimizer.step(&backward(&ddp, step)?)?;
        }
        let (parameters, state) = (varmap.state_dict()?, optimizer.state_dict()?);
        let copies = parameters.iter().map(|(name, tensor)| Ok((name.clone(), tensor.copy()?)));
        let parameters: Dict = copies.collect::<candle_core::Result<_>>()?;
        Ok((bits(parameters.iter().chain(&state)), parameters, state))
    });
    assert!(runs.windows(2).all(|pair| pair[0].0 == pair[1].0), "the ranks differ");
    runs.remove(0)
}

#[test]
fn sharded_muon_has_the_bits_of_muon_in_steps_and_files() {
    for world_size in 1..=4 {
        let plain = run(world_size, false, None, 0..5);
        let zero = run(world_size, true, None, 0..5);
        assert_eq!(zero.0, plain.0, "{world_size} ranks");
        // From one kind to the other, with another number of ranks.
        let others = world_size % 4 + 1;
        let expected = run(others, false, Some(&plain), 5..8).0;
        for (from, to_zero) in [(&plain, true), (&zero, false), (&zero, true)] {
            assert_eq!(run(others, to_zero, Some(from), 5..8).0, expected, "from {world_size} ranks to {others}");
        }
    }
}

#[test]
fn each_matrix_has_one_owner() {
    // By size: second 63, first 35, third 27, rare 9. The embedding and the bias, 58 numbers, have two states in pieces.
    for (world_size, loads) in [(1, vec![134]), (2, vec![63, 71]), (3, vec![63, 35, 36]), (4, vec![63, 35, 27, 9])] {
        let found = ranks(world_size, |pg| {
            let (ddp, _) = wrap(&pg, true)?;
            let mut optimizer = optimizer(&ddp)?;
            optimizer.step(&backward(&ddp, 1)?)?;
            let state = optimizer.share()?.dict;
            let of = |end: &str| -> usize {
                let own = state.iter().filter(|(key, _)| key.contains(end));
                own.map(|(_, state)| state.elem_count()).sum()
            };
            assert_eq!(optimizer.state_bytes(), 4 * (of("momentum_buffer@0") + of("exp_avg")));
            Ok((of("momentum_buffer"), of("exp_avg")))
        });
        let (muon, adamw): (Vec<_>, Vec<_>) = found.into_iter().unzip();
        assert_eq!((muon, adamw.iter().sum::<usize>()), (loads, 2 * 58));
    }
}

#[test]
fn sharded_muon_clips_and_refuses_what_is_no_matrix() {
    let clip = |zero: bool| {
        ranks(2, |pg| {
            let (ddp, varmap) = wrap(&pg, zero)?;
            let mut optimizer = optimizer(&ddp)?;
            let mut grads = backward(&ddp, 1)?;
            let norm = optimizer.clip_grad_norm(&mut grads, 0.02)?;
            optimizer.step(&grads)?;
            assert!(norm > 0.02, "the test clips: {norm}");
            Ok((norm as f32, floats(&var(&varmap, "second")), floats(&var(&varmap, "embedding"))))
        })
    };
    let (plain, zero) = (clip(false), clip(true));
    assert_eq!(zero[0], zero[1]);
    assert_close(&[zero[0].0], &[plain[0].0], 1e-6, "norm");
    // Muon rounds to 8 bits.
    assert_close(&zero[0].1, &plain[0].1, 1e-3, "second");
    assert_close(&zero[0].2, &plain[0].2, 1e-5, "embedding");
    ranks(2, |pg| {
        let (ddp, _) = wrap(&pg, true)?;
        let error = Muon::new(&ddp, MuonGroup::Muon(Default::default())).map(drop).unwrap_err();
        assert!(matches!(&error, Error::Parameter { parameter, .. } if parameter == "bias"), "{error}");
        Ok(())
    });
}
