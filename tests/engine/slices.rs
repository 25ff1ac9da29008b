//! Slices of one tensor in several calls at once; overlapping slices are refused.
use crate::engine::Engine;
use candle_core::{Device, Tensor};
use candle_ddp::backend::{Collective, Communicator};
use candle_ddp::{Error, ReduceOp};

pub(crate) fn overlapping_slices_are_refused_while_one_is_in_flight(engine: &Engine) {
    engine.in_two_groups(2, |[first, second]| {
        let (rank, peer) = (first.rank(), 1 - first.rank());
        let tensor = Tensor::arange(0f32, 30.0, &Device::Cpu).unwrap();
        let part = |start: usize| tensor.narrow(0, start, 10).unwrap();
        let received = first.start(Collective::Recv { tensor: part(0), peer }).unwrap();
        let send = |start| Collective::Send { tensor: part(start), peer };
        let reduce = |start| Collective::AllReduce { tensor: part(start), op: ReduceOp::Sum };
        // Neither rank sends data to the other until both have checked the refusals.
        let refusals = [
            first.run(send(9)).err(),
            first.start(send(5)).err(),
            first.run(reduce(0)).err(),
            second.start(reduce(1)).err(),
        ];
        for refusal in refusals {
            let Some(Error::InvalidTensor { rank: named, .. }) = refusal else { panic!("{refusal:?}") };
            let text = refusal.map(|error| error.to_string()).unwrap();
            assert_eq!(named, rank);
            assert!(text.contains("f32[10] overlaps the tensor of recv(f32[10]), which rank"), "{text}");
            assert!(text.contains("wait for that call before this one, or use slices that do not overlap"), "{text}");
        }
        second.run(Collective::Barrier).unwrap();
        // Several calls may read at once, and neighbouring slices may be sent; calls of one channel run in order.
        let more = [first.start(send(10)).unwrap(), second.start(send(15)).unwrap()];
        second.run(Collective::Recv { tensor: tensor.zeros_like().unwrap().narrow(0, 0, 10).unwrap(), peer }).unwrap();
        for work in more.iter().chain([&received]) {
            work.wait().unwrap();
        }
        // All calls are complete.
        first.run(reduce(5)).unwrap();
    });
}
