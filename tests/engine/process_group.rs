//! The process group's public methods: every collective, subgroups, ranks as threads, and refused arguments.
use crate::common::{assert_error, floats, ranks, try_ranks};
use candle_core::{DType, Device, Tensor};
use candle_ddp::rendezvous::{Secret, Store};
use candle_ddp::{
    Backend, Error, Failure, InitOptions, ProcessGroup, ReduceOp, SpawnOptions, init_process_group, spawn_with,
};
use std::time::Duration;

/// Rank r's values: r·100, r·100 + 1, …
fn mine(pg: &ProcessGroup, count: usize) -> Tensor {
    let start = pg.rank() as f32 * 100.0;
    Tensor::arange(start, start + count as f32, &Device::Cpu).unwrap()
}

fn zeros(count: usize) -> Tensor {
    Tensor::zeros(count, DType::F32, &Device::Cpu).unwrap()
}

#[test]
fn one_rank_needs_no_engine() {
    crate::common::single::works_on(&Device::Cpu, Backend::Single);
}

#[test]
fn two_ranks_need_an_engine() {
    let folder = tempfile::tempdir().unwrap();
    let errors = std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            let options = InitOptions {
                backend: Backend::Single,
                init_method: format!("file://{}", folder.path().join("store").display()),
                rank: Some(rank),
                world_size: Some(2),
                timeout: Duration::from_secs(120),
                ..Default::default()
            };
            scope.spawn(move || init_process_group(options).unwrap_err().to_string())
        });
        ranks.map(|rank| rank.join().unwrap())
    });
    for error in errors {
        assert!(error.contains("2 ranks on Cpu with Backend::Single"), "{error}");
        assert!(error.contains("build with the feature `nccl`"), "{error}");
    }
}

#[test]
fn a_timeout_may_be_infinite() {
    let options = SpawnOptions { world_size: 2, timeout: Duration::MAX, ..Default::default() };
    let work = |pg: ProcessGroup| {
        let (now, later) = (mine(&pg, 2), mine(&pg, 3));
        let under_way = pg.all_reduce_async(&later, ReduceOp::Sum)?;
        pg.all_reduce(&now, ReduceOp::Sum)?;
        under_way.wait()?;
        Ok((floats(&now), floats(&later)))
    };
    let expected = (vec![100.0, 102.0], vec![100.0, 102.0, 104.0]);
    assert_eq!(spawn_with(options, work).unwrap(), [expected.clone(), expected]);
}

#[test]
fn every_collective_does_what_its_name_says() {
    ranks(3, |pg| {
        let rank = pg.rank();
        let tensor = mine(&pg, 2);
        pg.all_reduce(&tensor, ReduceOp::Sum)?;
        assert_eq!(floats(&tensor), [300.0, 303.0]);

        let tensor = mine(&pg, 2);
        pg.broadcast(&tensor, 1)?;
        assert_eq!(floats(&tensor), [100.0, 101.0]);

        let tensor = mine(&pg, 2);
        pg.reduce(&tensor, 2, ReduceOp::Max)?;
        let own = rank as f32 * 100.0;
        assert_eq!(floats(&tensor), if rank == 2 { [200.0, 201.0] } else { [own, own + 1.0] });

        let output = zeros(6);
        pg.all_gather(&output, &mine(&pg, 2))?;
        assert_eq!(floats(&output), [0.0, 1.0, 100.0, 101.0, 200.0, 201.0]);

        let output = zeros(2);
        pg.reduce_scatter(&output, &mine(&pg, 6), ReduceOp::Sum)?;
        let part = 300.0 + 6.0 * rank as f32;
        assert_eq!(floats(&output), [part, part + 3.0]);

        let output = zeros(6);
        pg.all_to_all(&output, &mine(&pg, 6))?;
        let parts = [0.0, 100.0, 200.0].map(|from| from + 2.0 * rank as f32);
        assert_eq!(floats(&output), parts.map(|first| [first, first + 1.0]).concat());

        let output = zeros(6);
        pg.gather((rank == 1).then_some(&output), &mine(&pg, 2), 1)?;
        let gathered = [0.0, 1.0, 100.0, 101.0, 200.0, 201.0];
        assert_eq!(floats(&output), if rank == 1 { gathered } else { [0.0; 6] });

        let output = zeros(2);
        pg.scatter(&output, (rank == 2).then(|| mine(&pg, 6)).as_ref(), 2)?;
        assert_eq!(floats(&output), [200.0 + 2.0 * rank as f32, 201.0 + 2.0 * rank as f32]);

        // Around a ring: every rank receives while it sends.
        let received = zeros(2);
        let sending = pg.isend(&mine(&pg, 2), (rank + 1) % 3)?;
        pg.recv(&received, (rank + 2) % 3)?;
        sending.wait()?;
        let from = ((rank + 2) % 3) as f32 * 100.0;
        assert_eq!(floats(&received), [from, from + 1.0]);
        pg.barrier()
    });
}

#[test]
fn works_may_be_waited_for_in_any_order() {
    ranks(2, |pg| {
        let (a, b) = (mine(&pg, 1000), mine(&pg, 10));
        let (first, second) = (pg.all_reduce_async(&a, ReduceOp::Sum)?, pg.broadcast_async(&b, 1)?);
        second.wait()?;
        assert!(first.is_completed(), "the calls of a group are carried out in order");
        first.synchronize()?;
        assert_eq!(floats(&a)[999], 2.0 * 999.0 + 100.0);
        assert_eq!(floats(&b)[9], 109.0);
        Ok(())
    });
}

#[test]
fn gather_scatter_and_barrier_have_a_form_that_does_not_wait() {
    ranks(3, |pg| {
        let (root, input, output) = (1, mine(&pg, 2), zeros(2));
        let all = (pg.rank() == root).then(|| zeros(6));
        let gathered = pg.gather_async(all.as_ref(), &input, root)?;
        let over = pg.barrier_async()?;
        gathered.wait()?;
        if let Some(all) = &all {
            assert_eq!(floats(all), [0.0, 1.0, 100.0, 101.0, 200.0, 201.0]);
        }
        // Back to where it came from.
        let scattered = pg.scatter_async(&output, all.as_ref(), root)?;
        [over, scattered].iter().try_for_each(candle_ddp::Work::wait)?;
        assert_eq!(floats(&output), floats(&input));
        Ok(())
    });
}

#[test]
fn sub_groups_have_ranks_and_collectives_of_their_own() {
    ranks(4, |pg| {
        let odd = pg.new_group(&[3, 1])?;
        let low = pg.new_group(&[0, 1, 2])?;
        assert_eq!(odd.is_some(), pg.rank() % 2 == 1);
        assert_eq!(low.is_some(), pg.rank() < 3);
        if let Some(odd) = &odd {
            assert_eq!(odd.global_ranks(), [3, 1]);
            assert_eq!(odd.rank(), if pg.rank() == 3 { 0 } else { 1 });
            let tensor = mine(&pg, 1);
            odd.all_reduce(&tensor, ReduceOp::Sum)?;
            assert_eq!(floats(&tensor), [400.0]);
            // A subgroup of a subgroup still reports the job's ranks.
            let alone = odd.new_group(&[0])?;
            assert_eq!(alone.map(|group| group.global_ranks().to_vec()), (pg.rank() == 3).then(|| vec![3]));
        }
        if let Some(low) = low {
            let tensor = mine(&pg, 1);
            low.broadcast(&tensor, 2)?;
            assert_eq!(floats(&tensor), [200.0]);
        }
        pg.barrier()
    });
}

#[test]
fn impossible_sub_groups_are_refused() {
    ranks(2, |pg| {
        assert!(matches!(pg.new_group(&[0, 2]), Err(Error::RankOutOfRange { rank: 2, world_size: 2 })));
        for (bad, why) in [(&[0, 0][..], "twice"), (&[], "at least one")] {
            assert_error(pg.new_group(bad), &[why]);
        }
        // Refused groups do not count: the next one works.
        pg.new_group(&[0, 1])?.unwrap().barrier()
    });
}

#[test]
fn a_group_has_a_store_of_its_own() {
    ranks(2, |pg| {
        let group = pg.new_group(&[0, 1])?.unwrap();
        if pg.rank() == 0 {
            pg.store().set("key", b"of all")?;
            group.store().set("key", b"of the group")?;
        }
        assert_eq!(pg.store().get("key")?, b"of all");
        assert_eq!(group.store().get("key")?, b"of the group");
        Ok(())
    });
}

#[test]
fn spawn_returns_results_in_rank_order_and_the_first_error() {
    assert_eq!(ranks(3, |pg| Ok(pg.rank() * 10)), [0, 10, 20]);
    // The others wait for rank 1 and fail because of it, so their errors are not the cause.
    let error = try_ranks(3, |pg| match pg.rank() {
        1 => Err(Error::Io { context: "reading data".into(), error: std::io::Error::other("no disk") }),
        _ => pg.barrier(),
    });
    assert!(error.unwrap_err().to_string().contains("no disk"));
    let error = try_ranks(3, |pg| if pg.rank() == 2 { panic!("out of luck") } else { pg.barrier() }).unwrap_err();
    assert!(matches!(&error, Error::RankFailed { rank: 2, reason } if reason.contains("out of luck")), "{error}");
    assert!(matches!(try_ranks(0, |_| Ok(())), Err(Error::InvalidArgument { .. })));
}

#[test]
fn invalid_tensors_are_refused_before_anything_is_sent() {
    ranks(2, |pg| {
        let integers = Tensor::zeros(4, DType::I64, &Device::Cpu)?;
        assert!(pg.all_reduce(&integers, ReduceOp::Avg).is_err(), "integers have no average");
        let transposed = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?.t()?;
        assert_error(pg.all_reduce(&transposed, ReduceOp::Sum), &["contiguous"]);
        assert!(matches!(pg.broadcast(&integers, 2), Err(Error::RankOutOfRange { rank: 2, .. })));
        assert!(pg.all_gather(&zeros(5), &zeros(2)).is_err(), "5 is not 2 × 2");
        pg.barrier() // the group remains usable
    });
}

#[test]
fn unavailable_engines_say_how_to_get_them() {
    let init = |backend| {
        let options = InitOptions { backend, rank: Some(0), world_size: Some(1), ..Default::default() };
        init_process_group(InitOptions { init_method: "tcp://127.0.0.1:0".into(), ..options })
    };
    assert_eq!(init(Backend::Cpu).unwrap().backend(), Backend::Cpu);
    assert_error(init(Backend::Custom), &["ProcessGroup::with_communicator"]);
    #[cfg(not(feature = "nccl"))]
    {
        assert_eq!(init(Backend::Auto).unwrap().backend(), Backend::Cpu);
        assert_error(init(Backend::Nccl), &["feature `nccl`"]);
    }
}

/// One rank ends the group instead of creating a subgroup of it.
#[test]
fn creating_a_group_fails_if_its_parent_ends() {
    for absent in 0..3 {
        let all_know = std::sync::Barrier::new(3);
        ranks(3, |pg| {
            let errors = if pg.rank() == absent {
                std::thread::sleep(Duration::from_millis(200));
                pg.abort("no disk");
                vec![]
            } else {
                // At the second attempt, the group has already ended.
                [(); 2].map(|()| pg.new_group(&[2, 0, 1]).map(drop).unwrap_err().to_string()).into()
            };
            // The reason must reach the other ranks before this rank leaves.
            all_know.wait();
            for error in errors {
                assert_eq!(error, format!("rank {absent} ended the group: no disk"));
            }
            Ok(())
        });
    }
}

/// The numbers that messages have are the group's, so they name it, unless they are those of the group of all ranks.
#[test]
fn the_failure_of_a_group_says_which_group_it_is() {
    for (members, place) in [(&[2, 1][..], " in the group of ranks [2, 1]"), (&[0, 1], "")] {
        ranks(3, |pg| {
            let group = pg.new_group(members)?;
            match group {
                Some(group) if group.rank() == 1 => group.abort("no disk"),
                Some(group) => {
                    for _ in 0..2 {
                        let error = group.barrier().unwrap_err();
                        assert_eq!(error.to_string(), format!("rank 1 ended the group: no disk{place}"));
                        assert!(matches!(error, Error::Group(Failure::PeerFailed { peer: 1, .. })), "{error:?}");
                    }
                }
                None => {}
            }
            pg.barrier()
        });
    }
}

#[test]
fn peers_are_told_why_a_rank_ended() {
    let expect = |pg: &ProcessGroup, reason: &str| {
        for _ in 0..2 {
            let error = pg.barrier().unwrap_err();
            let heard =
                matches!(&error, Error::Group(Failure::PeerFailed { peer: 1, reason: heard }) if heard == reason);
            assert!(heard, "rank {}: {error}", pg.rank());
        }
    };
    // An error of the program.
    ranks(3, |pg| {
        if pg.rank() == 1 {
            let error = pg.abort_on_error(|| Err::<(), String>("no disk".to_string()));
            assert_eq!(error.unwrap_err(), "no disk");
        }
        expect(&pg, "no disk");
        Ok(())
    });
    // A panic continues after its reason was sent.
    ranks(3, |pg| {
        if pg.rank() == 1 {
            let body = || -> Result<(), String> { panic!("out of luck") };
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| pg.abort_on_error(body))).unwrap_err();
        }
        expect(&pg, "it panicked: out of luck");
        Ok(())
    });
    // The rank that failed is still named if another rank ends because of it.
    ranks(3, |pg| {
        let ended = pg.abort_on_error(|| match pg.rank() {
            1 => Err(Error::Io { context: "reading data".into(), error: std::io::Error::other("no disk") }),
            _ => pg.barrier(),
        });
        assert!(ended.is_err());
        expect(&pg, "reading data: no disk");
        Ok(())
    });
    // Ranks that are threads report their errors without `abort_on_error`.
    let error = try_ranks(3, |pg| match pg.rank() {
        1 => Err(Error::Io { context: "reading data".into(), error: std::io::Error::other("no disk") }),
        _ => {
            expect(&pg, "reading data: no disk");
            Ok(())
        }
    });
    assert_eq!(error.unwrap_err().to_string(), "reading data: no disk");
    // Without an error, the results are returned.
    assert_eq!(ranks(2, |pg| pg.abort_on_error(|| Ok::<_, Error>(pg.rank()))), [0, 1]);
}

/// Rank 1 gathers its own numbers, in a call that differs from rank 0's first one only in its purpose.
#[test]
fn a_rank_in_another_call_is_an_error_and_not_a_panic() {
    let error = try_ranks(2, |pg| {
        if pg.rank() == 1 {
            let all = Tensor::zeros(2, DType::I64, &Device::Cpu)?;
            return pg.all_gather(&all, &Tensor::new(&[1i64 << 40], &Device::Cpu)?);
        }
        let (varmap, build) = (candle_nn::VarMap::new(), |vb: candle_nn::VarBuilder<'static>| vb.get(1, "w"));
        candle_ddp::DistributedDataParallel::new(&pg, &varmap, build).map(drop)
    });
    let text = error.unwrap_err().to_string();
    let expected = "rank 1 called all_gather(i64[1]) where rank 0 called all_gather(i64[1]) for \
                    DistributedDataParallel::new, sequence";
    assert!(text.starts_with(expected), "{text}");
}

#[test]
fn no_options_show_the_secret() {
    let secret = Some(Secret::new("0123456789abcdef0123456789abcdef").unwrap());
    let shown = format!("{:?}", InitOptions { secret, ..Default::default() });
    assert!(!shown.contains("0123456789abcdef") && shown.contains("Secret(hidden)"), "{shown}");
}
