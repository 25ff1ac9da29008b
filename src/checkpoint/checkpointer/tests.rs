use super::*;
use crate::ReduceOp;
use crate::error::Failure;
use crate::process_group::queued;
use candle_core::{DType, Tensor, Var};
use candle_nn::VarMap;

/// A peer dies in an all-reduce, and the program trains with the partial result: that must not become a checkpoint.
#[test]
fn what_a_failed_call_has_left_is_not_saved() {
    let folder = tempfile::tempdir().unwrap();
    let started = std::sync::Barrier::new(2);
    queued(|pg| {
        let mut checkpointer = Checkpointer::new(&pg, folder.path(), CheckpointerOptions::default()).unwrap();
        let model = |weights: &Tensor| {
            let varmap = VarMap::new();
            varmap.data().lock().unwrap().insert("w".to_string(), Var::from_tensor(weights).unwrap());
            varmap
        };
        let weights = Tensor::ones(2, DType::F32, pg.device()).unwrap();
        pg.all_reduce(&weights, ReduceOp::Sum).unwrap();
        checkpointer.save(1, ("model", &mut model(&weights))).unwrap().wait().unwrap();
        if pg.rank() == 1 {
            started.wait();
            return pg.abort("it is told to");
        }
        let spoilt = Tensor::zeros(2, DType::F32, pg.device()).unwrap();
        let work = pg.all_reduce_async(&spoilt, ReduceOp::Sum).unwrap();
        started.wait();
        work.wait().unwrap();
        match checkpointer.save(2, ("model", &mut model(&spoilt))) {
            Err(Error::Group(Failure::PeerFailed { peer: 1, reason })) => assert_eq!(reason, "it is told to"),
            other => panic!("{other:?}"),
        }
    });
    let names: Vec<_> = folder.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["step-00000001"]);
}
