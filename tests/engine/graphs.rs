//! No gradient flows through a collective: every one refuses a tensor of a graph, whatever its form and its engine.
use crate::common::{ranks, tensor};
use candle_core::{DType, Device, Module, Tensor, Var};
use candle_ddp::backend::{Collective, Communicator};
use candle_ddp::nn::Linear;
use candle_ddp::rendezvous::HashStore;
use candle_ddp::{Backend, CustomOptions, Error, InitOptions, P2pOp, ProcessGroup, ReduceOp, Result, Work};
use std::sync::Arc;
use std::time::Duration;

type Call = fn(&ProcessGroup, &Tensor, &Tensor) -> Result<()>;

const SUM: ReduceOp = ReduceOp::Sum;

/// A call with a tensor of a graph, its second argument; the name of the collective, the name of the argument, and whether the
/// argument is changed. The third argument has `world_size` × its elements.
const CALLS: &[(Call, &str, &str, bool)] = &[
    (|pg, z, _| pg.all_reduce(z, SUM), "all_reduce", "tensor", true),
    (|pg, z, _| pg.all_reduce_async(z, SUM).map(drop), "all_reduce", "tensor", true),
    (|pg, z, _| pg.broadcast(z, 0), "broadcast", "tensor", true),
    (|pg, z, _| pg.broadcast_async(z, 0).map(drop), "broadcast", "tensor", true),
    (|pg, z, _| pg.reduce(z, 0, SUM), "reduce", "tensor", true),
    (|pg, z, _| pg.reduce_async(z, 0, SUM).map(drop), "reduce", "tensor", true),
    (|pg, z, all| pg.all_gather(all, z), "all_gather", "input", false),
    (|pg, z, all| pg.all_gather_async(all, z).map(drop), "all_gather", "input", false),
    (|pg, z, _| pg.all_gather_varied(z, 0).map(drop), "all_gather_varied", "tensor", false),
    (
        |pg, z, _| {
            let rows: Vec<usize> = (0..pg.world_size()).map(|rank| if rank == 0 { 2 } else { 0 }).collect();
            pg.all_to_all_varied(z, &rows).map(drop)
        },
        "all_to_all_varied",
        "tensor",
        false,
    ),
    (|pg, z, all| pg.reduce_scatter(z, all, SUM), "reduce_scatter", "output", true),
    (|pg, z, all| pg.reduce_scatter_async(z, all, SUM).map(drop), "reduce_scatter", "output", true),
    (|pg, z, _| pg.reduce_scatter(&part(pg, z)?, z, SUM), "reduce_scatter", "input", false),
    (|pg, z, _| pg.all_to_all(&z.zeros_like()?, z), "all_to_all", "input", false),
    (|pg, z, _| pg.all_to_all_async(&z.zeros_like()?, z).map(drop), "all_to_all", "input", false),
    (|pg, z, _| pg.all_to_all(z, &z.zeros_like()?), "all_to_all", "output", true),
    (|pg, z, all| pg.gather(on_root(pg, all), z, 0), "gather", "input", false),
    (|pg, z, all| pg.gather_async(on_root(pg, all), z, 0).map(drop), "gather", "input", false),
    (|pg, z, all| pg.scatter(z, on_root(pg, all), 0), "scatter", "output", true),
    (|pg, z, all| pg.scatter_async(z, on_root(pg, all), 0).map(drop), "scatter", "output", true),
    (|pg, z, _| pg.send(z, peer(pg)), "send", "tensor", false),
    (|pg, z, _| pg.isend(z, peer(pg)).map(drop), "send", "tensor", false),
    (|pg, z, _| pg.recv(z, peer(pg)), "recv", "tensor", true),
    (|pg, z, _| pg.irecv(z, peer(pg)).map(drop), "recv", "tensor", true),
    (
        |pg, z, _| pg.batch_isend_irecv(&[P2pOp::Send { tensor: z.clone(), peer: peer(pg) }]).map(drop),
        "batch_isend_irecv",
        "tensor",
        false,
    ),
    (
        |pg, z, _| pg.batch_isend_irecv(&[P2pOp::Recv { tensor: z.clone(), peer: peer(pg) }]).map(drop),
        "batch_isend_irecv",
        "tensor",
        true,
    ),
];

fn part(pg: &ProcessGroup, whole: &Tensor) -> Result<Tensor> {
    Ok(Tensor::zeros(whole.elem_count() / pg.world_size(), whole.dtype(), pg.device())?)
}

fn on_root<'a>(pg: &ProcessGroup, tensor: &'a Tensor) -> Option<&'a Tensor> {
    (pg.rank() == 0).then_some(tensor)
}

fn peer(pg: &ProcessGroup) -> usize {
    (pg.rank() + 1) % pg.world_size()
}

/// Checks that all calls refuse tensors through which gradients flow, of candle's operations and of this crate's layers.
fn refuses(pg: &ProcessGroup) {
    let all = tensor(&[2 * pg.world_size(), 2], 3);
    let var = Var::from_tensor(&tensor(&[2, 2], 1)).unwrap();
    let layer = Linear::new(var.as_tensor().clone(), None);
    let view = Var::from_tensor(&tensor(&[4, 2], 1)).unwrap();
    let tracked = [var.sqr().unwrap(), view.narrow(0, 2, 2).unwrap(), layer.forward(&tensor(&[2, 2], 2)).unwrap()];
    for z in &tracked {
        for (call, name, argument, is_changed) in CALLS {
            let error = call(pg, z, &all).unwrap_err();
            let Error::InvalidTensor { rank, operation, reason } = &error else { panic!("{name}: {error}") };
            assert_eq!((*rank, operation.as_str()), (pg.rank(), *name));
            let remedy =
                if *is_changed { format!("{argument}.detach().copy()?") } else { format!("{argument}.detach()`") };
            assert!(
                reason.contains(&format!("`{argument}` was computed")) && reason.contains(&remedy),
                "{name}: {reason}"
            );
        }
    }
}

/// Values that a program means to send are sent: the values of a tensor without its graph, or of a variable.
fn takes_values(pg: &ProcessGroup) -> Result<()> {
    let var = Var::from_tensor(&tensor(&[2, 2], pg.rank() as u64))?;
    let all = Tensor::zeros((2 * pg.world_size(), 2), DType::F32, &Device::Cpu)?;
    pg.all_gather(&all, &var.sqr()?.detach())?;
    pg.all_gather(&all, &var)?;
    pg.all_reduce(&var, SUM)?;
    assert_eq!(pg.all_gather_varied(&var.sqr()?.detach(), 0)?.len(), pg.world_size());
    Ok(())
}

#[test]
fn every_collective_refuses_a_tensor_of_a_graph() {
    ranks(2, |pg| {
        refuses(&pg);
        takes_values(&pg)?;
        for members in [&[1, 0][..], &[1]] {
            let Some(group) = pg.new_group(members)? else { continue };
            refuses(&group);
            takes_values(&group)?;
        }
        Ok(())
    });
}

#[test]
fn so_does_a_world_of_one() {
    let folder = tempfile::tempdir().unwrap();
    for backend in [Backend::Single, Backend::Cpu] {
        let options = InitOptions {
            backend,
            init_method: format!("file://{}", folder.path().join(format!("{backend:?}")).display()),
            rank: Some(0),
            world_size: Some(1),
            timeout: Duration::from_secs(120),
            device: Some(Device::Cpu),
            ..Default::default()
        };
        let pg = candle_ddp::init_process_group(options).unwrap();
        refuses(&pg);
        takes_values(&pg).unwrap();
        let rows = |shape: &[usize]| tensor(shape, 1);
        assert!(pg.all_gather(&rows(&[2, 3]), &rows(&[3, 2])).is_err());
        pg.all_to_all(&rows(&[3, 2]), &rows(&[3, 2])).unwrap();
    }
}

/// An engine from outside that no call must reach.
struct Unreached;

impl Communicator for Unreached {
    fn rank(&self) -> usize {
        1
    }

    fn world_size(&self) -> usize {
        2
    }

    fn start(&self, collective: Collective) -> Result<Work> {
        panic!("{} reached the engine", collective.name())
    }

    fn abort(&self, _: &str) {}
}

#[test]
fn nothing_of_a_graph_reaches_an_engine_from_outside() {
    let store = Arc::new(HashStore::new(Duration::from_secs(30)));
    let pg = ProcessGroup::with_communicator(store, Box::new(Unreached), CustomOptions::default()).unwrap();
    for (call, name, ..) in CALLS.iter().filter(|(_, name, ..)| !name.ends_with("_varied")) {
        let z = Var::from_tensor(&tensor(&[2, 2], 1)).unwrap().sqr().unwrap();
        let error = call(&pg, &z, &tensor(&[4, 2], 3)).unwrap_err();
        assert!(matches!(error, Error::InvalidTensor { .. }), "{name}: {error}");
    }
}

/// Rows are not cut in two: three rows for two ranks are refused, on the calling rank alone, and the group continues.
#[test]
fn rows_that_do_not_divide_are_refused() {
    ranks(2, |pg| {
        let rows = |shape: &[usize]| tensor(shape, 1);
        let root = |shape: &[usize]| (pg.rank() == 0).then(|| rows(shape));
        for refused in [
            pg.all_to_all(&rows(&[3, 2]), &rows(&[3, 2])),
            pg.all_gather(&rows(&[3, 2]), &rows(&[3])),
            pg.reduce_scatter(&rows(&[3]), &rows(&[3, 2]), SUM),
            pg.all_gather(&rows(&[4, 3]), &rows(&[3, 2])),
        ] {
            assert!(matches!(refused, Err(Error::InvalidTensor { .. })), "{refused:?}");
        }
        if pg.rank() == 0 {
            assert!(pg.gather(root(&[3, 2]).as_ref(), &rows(&[3]), 0).is_err());
            assert!(pg.scatter(&rows(&[3]), root(&[3, 2]).as_ref(), 0).is_err());
        }
        pg.all_to_all(&rows(&[4, 2]), &rows(&[4, 2]))?;
        // Stacked, and flat.
        pg.all_gather(&rows(&[2, 3, 2]), &rows(&[3, 2]))?;
        pg.all_gather(&rows(&[12]), &rows(&[3, 2]))
    });
}
