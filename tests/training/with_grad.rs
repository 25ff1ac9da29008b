//! Collectives with a gradient, compared with candle's graph of all ranks' tensors in one process.
use crate::common::{assert_error, ranks, tensor, try_ranks};
use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_ddp::nn::{checkpoint, log_softmax, no_grad};
use candle_ddp::{
    Buckets, DdpOptions, DistributedDataParallel, Error, Precision, ReduceOp, SpawnOptions, WithGrad, spawn_with,
};
use candle_nn::{Init, VarBuilder, VarMap};

fn values(shape: &[usize], seed: usize) -> Tensor {
    tensor(shape, seed as u64).to_dtype(DType::F64).unwrap()
}

fn flat(tensor: &Tensor) -> Vec<f64> {
    tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

fn assert_close(ours: &[f64], expected: &[f64], what: &str) {
    assert_eq!(ours.len(), expected.len(), "{what}");
    let differs = ours.iter().zip(expected).any(|(a, b)| (a - b).abs() > 1e-12 * b.abs().max(1.0));
    assert!(!differs, "{what}: {ours:?}, not {expected:?}");
}

/// A function, of this rank's tensor and its rank.
type Ours = fn(&WithGrad, &Tensor, usize) -> candle_ddp::Result<Tensor>;
/// Its results on all ranks, of all ranks' tensors.
type Reference = fn(&[Tensor]) -> Result<Vec<Tensor>>;

fn same(all: &[Tensor], y: Tensor) -> Vec<Tensor> {
    vec![y; all.len()]
}

fn sum(all: &[Tensor]) -> Result<Tensor> {
    Tensor::stack(all, 0)?.sum(0)
}

/// Row `r` of rank `s` and row `s` of rank `r` change places, if rows have `rows(s, r)` rows of their own.
fn exchanged(all: &[Tensor], rows: fn(usize, usize) -> usize) -> Result<Vec<Tensor>> {
    let part = |from: usize, to: usize| {
        let start = (0..to).map(|earlier| rows(from, earlier)).sum();
        all[from].narrow(0, start, rows(from, to))
    };
    let of = |to: usize| Tensor::cat(&(0..all.len()).map(|from| part(from, to)).collect::<Result<Vec<_>>>()?, 0);
    (0..all.len()).map(of).collect()
}

fn uneven(from: usize, to: usize) -> usize {
    (2 * from + to) % 3
}

#[test]
fn results_and_gradients_are_those_of_one_process() {
    /// The shape of a rank's tensor: of its rank and the number of ranks.
    type Rows = fn(usize, usize) -> usize;
    let cases: [(&str, Rows, Ours, Reference); 9] = [
        ("all_reduce", |_, _| 2, |c, x, _| c.all_reduce(x, ReduceOp::Sum), |all| Ok(same(all, sum(all)?))),
        (
            "the mean",
            |_, _| 2,
            |c, x, _| c.all_reduce(x, ReduceOp::Avg),
            |all| Ok(same(all, (sum(all)? / all.len() as f64)?)),
        ),
        ("all_gather", |_, _| 2, |c, x, _| c.all_gather(x), |all| Ok(same(all, Tensor::cat(all, 0)?))),
        (
            "all_gather_varied",
            |rank, _| (rank + 1) % 3,
            |c, x, _| Ok(c.all_gather_varied(&x.t()?, 1)?.t()?),
            |all| Ok(same(all, Tensor::cat(all, 0)?)),
        ),
        (
            "reduce_scatter",
            |_, world| 2 * world,
            |c, x, _| c.reduce_scatter(x, ReduceOp::Sum),
            |all| sum(all)?.chunk(all.len(), 0),
        ),
        (
            "the part of a mean",
            |_, world| world,
            |c, x, _| c.reduce_scatter(x, ReduceOp::Avg),
            |all| (sum(all)? / all.len() as f64)?.chunk(all.len(), 0),
        ),
        ("broadcast", |_, _| 3, |c, x, _| c.broadcast(x, 0), |all| Ok(same(all, all[0].clone()))),
        ("all_to_all", |_, world| 2 * world, |c, x, _| c.all_to_all(x), |all| exchanged(all, |_, _| 2)),
        (
            "all_to_all_varied",
            |rank, world| (0..world).map(|to| uneven(rank, to)).sum(),
            |c, x, rank| {
                let world = x.dims()[1] - 3;
                let rows: Vec<usize> = (0..world).map(|to| uneven(rank, to)).collect();
                let (y, from) = c.all_to_all_varied(x, &rows)?;
                assert_eq!(from, (0..world).map(|from| uneven(from, rank)).collect::<Vec<_>>());
                Ok(y)
            },
            |all| exchanged(all, uneven),
        ),
    ];
    for world in 1..=4 {
        for (name, rows, ours, reference) in cases {
            let xs: Vec<Var> = (0..world)
                .map(|rank| Var::from_tensor(&values(&[rows(rank, world), 3 + world], rank)).unwrap())
                .collect();
            // The tensors are results, which both candle's and our functions use.
            let middle = |x: &Var| x.sqr().unwrap();
            let loss = |y: &Tensor, rank: usize| (y.sin()? * values(y.dims(), 10 + rank))?.sum_all();
            let ys = reference(&xs.iter().map(middle).collect::<Vec<_>>()).unwrap();
            let losses: Vec<Tensor> = ys.iter().enumerate().map(|(rank, y)| loss(y, rank).unwrap()).collect();
            let expected = Tensor::stack(&losses, 0).unwrap().sum_all().unwrap().backward().unwrap();
            let found = ranks(world, |pg| {
                let x = &xs[pg.rank()];
                let y = ours(&pg.with_grad()?, &middle(x), pg.rank())?;
                let gradients = loss(&y, pg.rank())?.backward()?;
                Ok((flat(&y), gradients.get(x).map(flat).unwrap_or_default()))
            });
            for (rank, (y, dx)) in found.iter().enumerate() {
                let what = format!("{name} on rank {rank} of {world}");
                assert_close(y, &flat(&ys[rank]), &what);
                let of_one = expected.get(&xs[rank]).map_or(vec![0.0; dx.len()], flat);
                assert_close(dx, &of_one, &format!("the gradient of {what}"));
            }
        }
    }
}

/// A ring, in which each rank's tensor comes back through all others.
#[test]
fn messages_bring_their_gradients_back() {
    for world in 2..=3 {
        let found = ranks(world, |pg| {
            let (rank, messages) = (pg.rank(), pg.with_grad()?);
            let x = Var::from_tensor(&values(&[2], rank))?;
            let own = x.sqr()?;
            // Rank 0 begins, and the others pass on what they have received.
            let loss = if rank == 0 {
                let sent = messages.send(&own, 1, None)?;
                messages.recv(2, DType::F64, world - 1, Some(&sent))?.sin()?.sum_all()?
            } else {
                let received = messages.recv(2, DType::F64, rank - 1, None)?;
                messages.send(&(received * own)?, (rank + 1) % world, None)?
            };
            let gradients = loss.backward()?;
            Ok((flat(&x), flat(gradients.get(&x).unwrap())))
        });
        let xs: Vec<Var> = found
            .iter()
            .map(|(x, _)| Var::from_tensor(&Tensor::new(x.as_slice(), &Device::Cpu).unwrap()).unwrap())
            .collect();
        let product = xs.iter().map(|x| x.sqr().unwrap()).reduce(|a, b| (a * b).unwrap()).unwrap();
        let gradients = product.sin().unwrap().sum_all().unwrap().backward().unwrap();
        for (x, (_, dx)) in xs.iter().zip(&found) {
            assert_close(dx, &flat(gradients.get(x).unwrap()), &format!("{world} ranks"));
        }
    }
}

/// A rank whose tensor needs no gradient takes part in the backward pass, and integers have none.
#[test]
fn tensors_that_need_no_gradient() {
    ranks(3, |pg| {
        let functions = pg.with_grad()?;
        let x = Var::from_tensor(&values(&[2, 2], pg.rank()))?;
        let given = if pg.rank() == 1 { x.detach() } else { x.as_tensor().clone() };
        let gradients = functions.all_gather(&given)?.sum_all()?.backward()?;
        match pg.rank() {
            1 => assert!(gradients.get(&x).is_none()),
            _ => assert_eq!(flat(gradients.get(&x).unwrap()), [3.0; 4]),
        }
        let labels = functions.all_gather(&Tensor::new(&[pg.rank() as u32], pg.device())?)?;
        assert_eq!(labels.to_vec1::<u32>()?, [0, 1, 2]);
        let scalars = functions.all_gather(&x.sum_all()?)?;
        assert_eq!(scalars.dims(), [3]);
        assert!(!no_grad(|| functions.all_gather(&x))?.track_op());
        Ok(())
    });
}

/// A contrastive loss, of this rank's samples against all: each rank's mean, as DDP expects it.
fn contrastive(all: &Tensor, own: &Tensor, start: usize) -> Result<Tensor> {
    let scores = (own.matmul(&all.t()?)? / 0.5)?;
    let targets = Tensor::arange(start as u32, (start + own.dim(0)?) as u32, own.device())?;
    log_softmax(&scores, D::Minus1)?.gather(&targets.unsqueeze(1)?, 1)?.mean_all()?.neg()
}

struct Net([Tensor; 3]);

impl Net {
    fn new(vb: VarBuilder) -> Result<Self> {
        let weight = |name| vb.get_with_hints((5, 5), name, Init::Const(0.0));
        Ok(Self([weight("a")?, weight("b")?, weight("c")?]))
    }

    fn features(&self, x: &Tensor) -> Result<Tensor> {
        self.0.iter().try_fold(x.clone(), |x, weight| x.matmul(weight)?.tanh())
    }
}

fn fill(varmap: &VarMap) -> Result<()> {
    for (index, name) in ["a", "b", "c"].into_iter().enumerate() {
        varmap.data().lock().unwrap()[name].set(&values(&[5, 5], index))?;
    }
    Ok(())
}

/// On any number of ranks, parameters get the gradient of the mean loss of the whole batch, also if a checkpoint calls the collective
/// again. Each bucket holds one parameter, so buckets are reduced while the backward pass of the gathered features runs.
#[test]
fn ddp_has_the_gradients_of_the_whole_batch() {
    const SAMPLES: usize = 12;
    let gradients = |world: usize| {
        let found = ranks(world, |pg| {
            let varmap = VarMap::new();
            let options = DdpOptions {
                precision: Precision::Pure(DType::F64),
                buckets: Buckets { bucket_cap_mb: 1e-4, ..Default::default() },
                ..Default::default()
            };
            let ddp = DistributedDataParallel::with_options(&pg, &varmap, Net::new, options)?;
            fill(&varmap)?;
            let functions = pg.with_grad()?;
            let (count, batch) = (SAMPLES / world, values(&[SAMPLES, 5], 7));
            let start = pg.rank() * count;
            let loss = ddp.call(|net: &Net| {
                let own = net.features(&batch.narrow(0, start, count)?)?;
                match world {
                    1 => contrastive(&own, &own, 0),
                    _ => checkpoint(&[&own], move |own| contrastive(&functions.all_gather(&own[0])?, &own[0], start)),
                }
            })?;
            let gradients = ddp.backward(&loss)?;
            let vars = ddp.parameters();
            Ok(vars.iter().flat_map(|var| flat(gradients.get(var).unwrap())).collect::<Vec<f64>>())
        });
        assert!(found.iter().all(|other| *other == found[0]), "{world} ranks differ");
        found.into_iter().next().unwrap()
    };
    let one = gradients(1);
    assert!(one.iter().any(|value| value.abs() > 1e-3));
    for world in 2..=4 {
        assert_close(&gradients(world), &one, &format!("{world} ranks"));
    }
}

#[test]
fn what_cannot_be_done_is_refused_on_all_ranks() {
    ranks(2, |pg| {
        let functions = pg.with_grad()?;
        let x = Tensor::ones((3, 2), DType::F32, pg.device())?;
        let refused = |result: candle_ddp::Result<Tensor>, text: &str| {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains(text), "{error}");
        };
        refused(functions.all_reduce(&x, ReduceOp::Max), "must use Sum or Avg, not Max");
        refused(functions.reduce_scatter(&x, ReduceOp::Prod), "must use Sum or Avg, not Prod");
        refused(functions.reduce_scatter(&x, ReduceOp::Sum), "a multiple of the number of ranks, 2, not [3, 2]");
        Ok(())
    });
    let options = SpawnOptions { world_size: 2, virtual_ranks: Some(4), ..Default::default() };
    assert_error(spawn_with(options, |pg| pg.with_grad().map(drop)), &["cannot be combined with virtual ranks"]);
    let failed = try_ranks(2, |pg| {
        let rows = if pg.rank() == 1 { vec![1, 3] } else { vec![1, 2] };
        pg.with_grad()?.all_to_all_varied(&Tensor::ones((3, 2), DType::F32, pg.device())?, &rows).map(drop)
    });
    assert_error(failed, &["rows", "with the sum 3, not [1, 3]"]);
}
