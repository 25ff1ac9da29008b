//! Groups that are split off, and groups of communicators of the crate `mpi`.
use crate::launch;
use candle_core::{DType, Device, Tensor};
use candle_ddp::backend::{Collective, Communicator, Split};
use candle_ddp::rendezvous::{HashStore, Store};
use candle_ddp::{ReduceOp, Result};
use candle_ddp_mpi::mpi::topology::{Color, Communicator as _, SimpleCommunicator};
use candle_ddp_mpi::{MpiCommunicator, MpiOptions};
use std::sync::Arc;
use std::time::Duration;

fn store() -> Arc<dyn Store> {
    Arc::new(HashStore::new(Duration::from_secs(1)))
}

/// All ranks' numbers in the group, in its order.
fn members(engine: &dyn Communicator, number: u32) -> Result<Vec<u32>> {
    let input = Tensor::new(&[number], &Device::Cpu)?;
    let output = Tensor::zeros(engine.world_size(), DType::U32, &Device::Cpu)?;
    engine.run(Collective::AllGather { output: output.clone(), input })?;
    Ok(output.to_vec1()?)
}

#[test]
fn a_group_has_the_ranks_in_the_given_order() {
    launch::ranks("groups::a_group_has_the_ranks_in_the_given_order", 4, || {
        let world = MpiCommunicator::world(MpiOptions::default())?;
        let rank = world.rank();
        match world.split(&[3, 1, 2], store())? {
            Split::Member(engine) => assert_eq!(members(&*engine, rank as u32)?, [3, 1, 2]),
            other => assert!(matches!(other, Split::NotMember) && rank == 0, "{other:?}"),
        }
        assert_eq!(members(&world, rank as u32)?, [0, 1, 2, 3]);
        Ok(())
    });
}

/// More groups than MPICH has contexts for.
#[test]
fn the_communicators_of_dropped_groups_are_freed() {
    launch::ranks("groups::the_communicators_of_dropped_groups_are_freed", 2, || {
        let world = MpiCommunicator::world(MpiOptions::default())?;
        for _ in 0..1100 {
            let Split::Member(twin) = world.duplicate(store())? else { panic!("every rank is a member") };
            twin.run(Collective::Barrier)?;
        }
        Ok(())
    });
}

/// Rank 0 has a call in flight while the group is made; rank 1 makes that call afterwards.
#[test]
fn a_group_is_made_while_calls_are_in_flight() {
    launch::ranks("groups::a_group_is_made_while_calls_are_in_flight", 2, || {
        let world = MpiCommunicator::world(MpiOptions::default())?;
        let tensor = Tensor::ones(1000, DType::F32, &Device::Cpu)?;
        let sum = || world.start(Collective::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum });
        let early = (world.rank() == 0).then(sum).transpose()?;
        let Split::Member(twin) = world.duplicate(store())? else { panic!("every rank is a member") };
        assert_eq!(members(&*twin, world.rank() as u32)?, [0, 1]);
        match early {
            Some(work) => work.wait()?,
            None => sum()?.wait()?,
        }
        assert_eq!(tensor.to_vec1::<f32>()?, [2.0; 1000]);
        Ok(())
    });
}

#[test]
fn an_engine_is_made_of_a_communicator_of_the_crate_mpi() {
    launch::ranks("groups::an_engine_is_made_of_a_communicator_of_the_crate_mpi", 3, || {
        let world = MpiCommunicator::world(MpiOptions::default())?;
        let rank = world.rank();
        let parts = SimpleCommunicator::world().split_by_color(Color::with_value(i32::from(rank > 0)));
        let engine = MpiCommunicator::of(&parts.expect("a color was given"), MpiOptions::default())?;
        assert_eq!(members(&engine, rank as u32)?, if rank == 0 { vec![0] } else { vec![1, 2] });
        Ok(())
    });
}
