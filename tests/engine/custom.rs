//! An engine defined outside the crate, which moves tensors through a store. DDP trains over it, and it passes the
//! conformance suite except for cases that need calls in the background.
use crate::common::{assert_close, assert_error, fill, floats, ranks, tensor, var};
use candle_core::{DType, Module, Tensor};
use candle_ddp::backend::{Collective, Communicator, Split};
use candle_ddp::conformance::{self, Case, ConformanceOptions};
use candle_ddp::rendezvous::{HashStore, Store};
use candle_ddp::{Backend, CustomOptions, DistributedDataParallel, Error, P2pOp, ProcessGroup, ReduceOp, Result, Work};
use candle_nn::{VarMap, linear};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(30);

struct StoreCommunicator {
    store: Arc<dyn Store>,
    rank: usize,
    world_size: usize,
    /// Number of collectives so far.
    calls: AtomicU64,
    /// For each rank, the number of messages sent to it and received from it.
    messages: Vec<[AtomicU64; 2]>,
}

impl StoreCommunicator {
    fn new(store: Arc<dyn Store>, rank: usize, world_size: usize) -> Self {
        let messages = (0..world_size).map(|_| Default::default()).collect();
        Self { store, rank, world_size, calls: AtomicU64::new(0), messages }
    }

    fn put(&self, key: &str, tensor: &Tensor) -> Result<()> {
        let values: Vec<f64> = tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?;
        Ok(self.store.set(key, &values.into_iter().flat_map(f64::to_le_bytes).collect::<Vec<_>>())?)
    }

    fn take(&self, key: &str, dtype: DType) -> Result<Tensor> {
        let bytes = self.store.get(key)?;
        let values = bytes.chunks_exact(8).map(|bytes| f64::from_le_bytes(bytes.try_into().unwrap()));
        let values: Vec<f64> = values.collect();
        let count = values.len();
        Ok(Tensor::from_vec(values, count, &candle_core::Device::Cpu)?.to_dtype(dtype)?)
    }

    /// Returns every rank's tensor, in rank order.
    fn exchange(&self, own: &Tensor) -> Result<Vec<Tensor>> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        self.put(&format!("{call}/{}", self.rank), own)?;
        if call >= 2 {
            // All ranks have started the last call, so they have finished the one before it.
            self.store.delete(&format!("{}/{}", call - 2, self.rank))?;
        }
        (0..self.world_size).map(|rank| self.take(&format!("{call}/{rank}"), own.dtype())).collect()
    }

    fn reduce(&self, own: &Tensor, op: ReduceOp) -> Result<Tensor> {
        // f64 holds the unrounded sums of the other dtypes.
        let all = self.exchange(own)?.iter().map(|part| part.to_dtype(DType::F64)).collect::<Result<Vec<_>, _>>()?;
        let reduced = all[1..].iter().try_fold(all[0].clone(), |reduced, part| match op {
            ReduceOp::Sum | ReduceOp::Avg => reduced + part,
            ReduceOp::Min => reduced.minimum(part),
            ReduceOp::Max => reduced.maximum(part),
            ReduceOp::Prod => reduced * part,
        })?;
        let reduced = if op == ReduceOp::Avg { (reduced / self.world_size as f64)? } else { reduced };
        Ok(reduced.to_dtype(own.dtype())?)
    }

    /// This rank's `count` elements of a tensor that holds every rank's part in rank order.
    fn part(&self, whole: &Tensor, count: usize) -> Result<Tensor> {
        Ok(whole.flatten_all()?.narrow(0, self.rank * count, count)?)
    }
}

fn write(tensor: &Tensor, values: &Tensor) -> Result<()> {
    match tensor.elem_count() {
        0 => Ok(()),
        _ => Ok(tensor.slice_set(&values.reshape(tensor.shape())?, 0, 0)?),
    }
}

impl Communicator for StoreCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn start(&self, collective: Collective) -> Result<Work> {
        match &collective {
            Collective::AllReduce { tensor, op } => write(tensor, &self.reduce(tensor, *op)?)?,
            Collective::Broadcast { tensor, root } => write(tensor, &self.exchange(tensor)?[*root])?,
            Collective::Reduce { tensor, root, op } => {
                let reduced = self.reduce(tensor, *op)?;
                if self.rank == *root {
                    write(tensor, &reduced)?;
                }
            }
            Collective::AllGather { output, input } => write(output, &Tensor::cat(&self.exchange(input)?, 0)?)?,
            Collective::ReduceScatter { output, input, op } => {
                write(output, &self.part(&self.reduce(input, *op)?, output.elem_count())?)?;
            }
            Collective::AllToAll { output, input } => {
                let count = input.elem_count() / self.world_size;
                let mut parts =
                    self.exchange(input)?.iter().map(|whole| self.part(whole, count)).collect::<Result<Vec<_>>>()?;
                if output.elem_count() < input.elem_count() {
                    parts.remove(self.rank);
                }
                // Alone, a rank gets nothing.
                if !parts.is_empty() {
                    write(output, &Tensor::cat(&parts, 0)?)?;
                }
            }
            Collective::Gather { output, input, .. } => {
                let all = self.exchange(input)?;
                if let Some(output) = output {
                    write(output, &Tensor::cat(&all, 0)?)?;
                }
            }
            Collective::Scatter { output, input, root } => {
                let all = self.exchange(input.as_ref().unwrap_or(output))?;
                write(output, &self.part(&all[*root], output.elem_count())?)?;
            }
            Collective::Send { tensor, peer } => {
                let number = self.messages[*peer][0].fetch_add(1, Ordering::Relaxed);
                self.put(&format!("{} to {peer}/{number}", self.rank), tensor)?;
            }
            Collective::Recv { tensor, peer } => {
                let number = self.messages[*peer][1].fetch_add(1, Ordering::Relaxed);
                let key = format!("{peer} to {}/{number}", self.rank);
                write(tensor, &self.take(&key, tensor.dtype())?)?;
                self.store.delete(&key)?;
            }
            Collective::Barrier => {
                self.exchange(&Tensor::zeros(1, DType::U8, &candle_core::Device::Cpu)?)?;
            }
            other => return Err(Error::Unavailable { what: other.name().into(), hint: "it is not known here".into() }),
        }
        Ok(Work::done())
    }

    fn abort(&self, _: &str) {}

    fn split(&self, ranks: &[usize], store: Arc<dyn Store>) -> Result<Split> {
        Ok(match ranks.iter().position(|rank| *rank == self.rank) {
            Some(rank) => Split::Member(Box::new(Self::new(store, rank, ranks.len()))),
            None => Split::NotMember,
        })
    }
}

/// Small cases, since every rank reads all others' tensors from the store.
fn options() -> ConformanceOptions {
    let mut options = ConformanceOptions {
        world_sizes: vec![1, 2, 3],
        counts: vec![0, 1, 7, 1001],
        timeout: TIMEOUT,
        ..Default::default()
    };
    // This engine's calls are complete when they return.
    options.cases.retain(|case| {
        !matches!(case, Case::MessagesPassCollectives | Case::LargeMessages | Case::TwoGroups | Case::Halos)
    });
    options
}

#[test]
fn an_engine_from_outside_conforms() {
    let make = |store, rank, world_size| -> Result<Box<dyn Communicator>> {
        Ok(Box::new(StoreCommunicator::new(store, rank, world_size)))
    };
    conformance::run(options(), make).unwrap();
}

/// Works like the engine above, with deliberate faults.
struct Faulty(StoreCommunicator);

impl Communicator for Faulty {
    fn rank(&self) -> usize {
        self.0.rank
    }

    fn world_size(&self) -> usize {
        self.0.world_size
    }

    fn start(&self, collective: Collective) -> Result<Work> {
        match &collective {
            Collective::ReduceScatter { .. } => {
                Err(Error::Unavailable { what: "reduce_scatter".into(), hint: "it is left out".into() })
            }
            Collective::Broadcast { tensor, root: 1 } if tensor.dtype() == DType::F16 && self.0.rank == 0 => {
                let work = self.0.start(collective.clone())?;
                tensor.slice_set(&tensor.zeros_like()?.narrow(0, 0, 1)?, 0, tensor.elem_count() - 1)?;
                Ok(work)
            }
            _ => self.0.start(collective),
        }
    }

    fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }
}

#[test]
fn faults_of_an_engine_are_named() {
    let fault = |case| {
        // Its `abort` does not reach the other ranks, so they wait until this time-out.
        let timeout = Duration::from_secs(8);
        let options = ConformanceOptions { cases: vec![case], counts: vec![7], timeout, ..options() };
        let make = |store, rank, world_size| -> Result<Box<dyn Communicator>> {
            Ok(Box::new(Faulty(StoreCommunicator::new(store, rank, world_size))))
        };
        conformance::run(options, make).map_err(|error| error.to_string())
    };
    assert_eq!(fault(Case::AllReduce), Ok(()));
    let text = "rank 0 failed: broadcast, 2 ranks, f16[7]: element 6 is 0 where 13 is expected";
    assert_eq!(fault(Case::Broadcast), Err(text.to_string()));
    let text = "rank 0 failed: reduce_scatter, 1 ranks, f32[7]: sum: reduce_scatter is not available: it is left out";
    assert_eq!(fault(Case::ReduceScatter), Err(text.to_string()));
    let options = ConformanceOptions { world_sizes: vec![0], ..options() };
    let unused = |_, _, _| -> Result<Box<dyn Communicator>> { unreachable!() };
    assert!(matches!(conformance::run(options, unused), Err(Error::InvalidArgument { argument: "world_sizes", .. })));
}

fn train(pg: &ProcessGroup) -> Result<Vec<f32>> {
    let varmap = VarMap::new();
    let ddp = DistributedDataParallel::new(pg, &varmap, |vb| linear(4, 3, vb.pp("fc")))?;
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
    let (store, other): (Arc<dyn Store>, Arc<dyn Store>) =
        (Arc::new(HashStore::new(TIMEOUT)), Arc::new(HashStore::new(TIMEOUT)));
    let rank = |rank| {
        let communicator = StoreCommunicator::new(other.clone(), rank, 3);
        let pg =
            ProcessGroup::with_communicator(store.clone(), Box::new(communicator), CustomOptions::default()).unwrap();
        assert_eq!((pg.rank(), pg.world_size(), pg.backend()), (rank, 3, Backend::Custom));
        let pair = pg.new_group(&[2, 1]).unwrap();
        assert_eq!(pair.map(|pair| (pair.rank(), pair.world_size())), (rank > 0).then_some((2 - rank, 2)));
        train(&pg).unwrap()
    };
    let here: Vec<Vec<f32>> = std::thread::scope(|scope| {
        let rank = &rank;
        let ranks: Vec<_> = (0..3).map(|number| scope.spawn(move || rank(number))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for (here, there) in here.iter().zip(ranks(3, |pg| train(&pg))) {
        assert_close(here, &there, 1e-5, "as with the crate's own engine");
    }
}

/// An engine sends the messages of a batch one by one, so it gets only batches of which none is refused.
#[test]
fn of_a_batch_that_is_refused_an_engine_from_outside_sends_nothing() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new(TIMEOUT));
    let communicator = Box::new(StoreCommunicator::new(store.clone(), 0, 2));
    let pg = ProcessGroup::with_communicator(store.clone(), communicator, CustomOptions::default()).unwrap();
    let (whole, other) = (tensor(&[4], 1), tensor(&[4], 2));
    let send = |tensor: &Tensor| P2pOp::Send { tensor: tensor.clone(), peer: 1 };
    let cases = [
        (P2pOp::Recv { tensor: other, peer: 2 }, "rank 2 is outside of a world of 2"),
        (P2pOp::Recv { tensor: whole.narrow(0, 1, 2).unwrap(), peer: 1 }, "one of them is written"),
    ];
    for (wrong, expected) in cases {
        assert_error(pg.batch_isend_irecv(&[send(&whole), wrong]), &[expected]);
        assert_eq!(store.num_keys().unwrap(), 0);
    }
    pg.batch_isend_irecv(&[send(&whole)]).unwrap().wait().unwrap();
    assert_eq!(store.num_keys().unwrap(), 1);
}

#[test]
fn an_engine_without_subgroups_says_so() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new(TIMEOUT));
    let group = |options| {
        let communicator = Box::new(Faulty(StoreCommunicator::new(store.clone(), 0, 1)));
        ProcessGroup::with_communicator(store.clone(), communicator, options)
    };
    assert_error(group(CustomOptions::default()).unwrap().new_group(&[0]), &["Communicator::split"]);
    assert!(group(CustomOptions { local_rank: 1, ..Default::default() }).is_err());
}
