//! An engine from outside of the crate: the ranks are threads, and meet at one table. DDP trains over it.
use crate::common::{assert_close, fill, floats, ranks, tensor, var};
use candle_core::{DType, Module, Tensor};
use candle_ddp::backend::{Collective, Communicator, ReduceOp, Split, Work};
use candle_ddp::rendezvous::{HashStore, Store};
use candle_ddp::{Backend, CustomOptions, DdpOptions, DistributedDataParallel, Error, ProcessGroup, Result};
use candle_nn::{VarMap, linear};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(30);

/// What the ranks of a group have in common: the tensors that each has brought to the present call.
#[derive(Default)]
struct Table {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    brought: Vec<Option<Tensor>>,
    /// Ranks that have brought theirs.
    here: usize,
    /// Ranks that still have to take what there is.
    taking: usize,
}

impl Table {
    /// Brings this rank's tensor, and returns those of all, once all are there.
    fn exchange(&self, rank: usize, world_size: usize, own: &Tensor) -> Result<Vec<Tensor>> {
        let copy = own.copy()?;
        let wait = |state, pending: fn(&mut State) -> bool| {
            self.changed.wait_timeout_while(state, TIMEOUT, pending).unwrap().0
        };
        // Those of the last call have to take theirs away first.
        let mut state = wait(self.state.lock().unwrap(), |state| state.taking > 0);
        state.brought.resize(world_size, None);
        state.brought[rank] = Some(copy);
        state.here += 1;
        if state.here == world_size {
            (state.here, state.taking) = (0, world_size);
        }
        self.changed.notify_all();
        let mut state = wait(state, |state| state.taking == 0);
        let all = state.brought.iter().flatten().cloned().collect();
        state.taking -= 1;
        self.changed.notify_all();
        Ok(all)
    }
}

struct AtTable {
    table: Arc<Table>,
    rank: usize,
    world_size: usize,
}

impl Communicator for AtTable {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn start(&self, collective: Collective) -> Result<Work> {
        let exchange = |own: &Tensor| self.table.exchange(self.rank, self.world_size, own);
        match &collective {
            Collective::AllReduce { tensor, op } => {
                let all = exchange(tensor)?;
                let reduced = all[1..].iter().try_fold(all[0].clone(), |sum, part| match op {
                    ReduceOp::Max => sum.maximum(part),
                    _ => sum + part,
                })?;
                tensor.slice_set(&reduced, 0, 0)?;
            }
            Collective::Broadcast { tensor, root } => {
                let all = exchange(tensor)?;
                if *root != self.rank {
                    tensor.slice_set(&all[*root], 0, 0)?;
                }
            }
            Collective::AllGather { output, input } => {
                output.slice_set(&Tensor::cat(&exchange(input)?, 0)?, 0, 0)?;
            }
            other => return Err(Error::Unavailable { what: other.name().into(), hint: "not at this table".into() }),
        }
        Ok(Work::done())
    }

    fn abort(&self, _: &str) {}

    /// All ranks at another table.
    fn split(&self, ranks: &[usize], store: Arc<dyn Store>) -> Result<Split> {
        let Some(rank) = ranks.iter().position(|rank| *rank == self.rank) else { return Ok(Split::NotMember) };
        if ranks.len() > 1 {
            return Ok(Split::Unsupported);
        }
        store.set("alone", b"yes")?;
        Ok(Split::Member(Box::new(Self { table: Arc::default(), rank, world_size: 1 })))
    }
}

fn train(pg: &ProcessGroup) -> Result<Vec<f32>> {
    let varmap = VarMap::new();
    let ddp =
        DistributedDataParallel::new(pg, &varmap, DType::F32, |vb| linear(4, 3, vb.pp("fc")), DdpOptions::default())?;
    fill(&varmap, 1);
    for step in 0..3 {
        let x = tensor(&[2, 4], 10 * step + pg.rank() as u64);
        let grads = ddp.backward(&ddp.call(|net| net.forward(&x))?.sqr()?.mean_all()?)?;
        for (_, var) in ddp.named_parameters() {
            var.set(&(var.as_tensor() - (grads.get(&var).unwrap() * 0.1)?)?)?;
        }
    }
    Ok(floats(&var(&varmap, "fc.weight")))
}

#[test]
fn ddp_trains_over_an_engine_from_outside() {
    let (table, store) = (Arc::<Table>::default(), Arc::new(HashStore::new(TIMEOUT)));
    let rank = |rank| {
        let communicator = AtTable { table: Arc::clone(&table), rank, world_size: 3 };
        let pg =
            ProcessGroup::with_communicator(store.clone(), Box::new(communicator), CustomOptions::default()).unwrap();
        assert_eq!((pg.rank(), pg.world_size(), pg.backend()), (rank, 3, Backend::Custom));
        let alone = pg.new_group(&[1]).unwrap();
        assert_eq!(alone.map(|alone| (alone.rank(), alone.world_size())), (rank == 1).then_some((0, 1)));
        let refused = pg.new_group(&[0, 2]);
        assert_eq!(refused.is_err(), rank != 1);
        if let Err(error) = refused {
            assert!(error.to_string().contains("Communicator::split"), "{error}");
        }
        train(&pg).unwrap()
    };
    let here: Vec<Vec<f32>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..3).map(|number| scope.spawn(move || rank(number))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for (here, there) in here.iter().zip(ranks(3, |pg| train(&pg)).unwrap()) {
        assert_close(here, &there, 1e-5, "as over the crate's own engine");
    }
    let wrong = CustomOptions { local_rank: 1, ..Default::default() };
    let alone = AtTable { table, rank: 0, world_size: 1 };
    assert!(ProcessGroup::with_communicator(store, Box::new(alone), wrong).is_err());
}
