//! Sending metrics and other values between ranks.
use crate::common::{assert_error, ranks};
use candle_ddp::{Error, ReduceOp};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

#[test]
fn a_few_numbers_are_reduced_in_one_call() {
    let found = ranks(3, |pg| {
        let rank = pg.rank() as f64;
        let sums = pg.all_reduce_scalars([rank, 0.1, -2. * rank], ReduceOp::Sum)?;
        let [mean] = pg.all_reduce_scalars([rank], ReduceOp::Avg)?;
        let [least, nan] = pg.all_reduce_scalars([rank, if rank == 1. { f64::NAN } else { 0. }], ReduceOp::Min)?;
        assert!(nan.is_nan());
        let []: [f64; 0] = pg.all_reduce_scalars([], ReduceOp::Sum)?;
        Ok((sums, mean, least))
    });
    let third = 0.1 + 0.1 + 0.1;
    assert_eq!(found, [([3., third, -6.], 1., 0.); 3]);
    assert_eq!(ranks(1, |pg| pg.all_reduce_scalars([4.], ReduceOp::Avg)), [[4.]]);
}

type Metrics = BTreeMap<String, Vec<f64>>;

fn metrics(rank: usize) -> Metrics {
    // Any f64 must arrive unchanged; the text is longer on each rank.
    let values = (0..100 * rank as u64).map(|seed| f64::from_bits(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)));
    BTreeMap::from([("Größe \"λ\"".repeat(rank), values.filter(|value| value.is_finite()).collect())])
}

#[test]
fn every_rank_gets_every_ranks_object() {
    let found = ranks(4, |pg| pg.all_gather_object(&metrics(pg.rank())));
    for objects in found {
        assert_eq!(objects, (0..4).map(metrics).collect::<Vec<_>>());
    }
    assert_eq!(ranks(1, |pg| pg.all_gather_object(&())), [[()]]);
}

#[test]
fn every_rank_gets_the_roots_object() {
    let found = ranks(3, |pg| {
        let own = metrics(pg.rank() + 1);
        let first = pg.broadcast_object((pg.rank() == 2).then_some(&own), 2)?;
        // The values of the other ranks are ignored.
        Ok((first, pg.broadcast_object(Some(&pg.rank()), 1)?, pg.broadcast_object(Some(&()), 0)?))
    });
    assert_eq!(found, vec![(metrics(3), 1, ()); 3]);
}

#[test]
fn objects_are_gathered_scattered_sent_and_received() {
    let found = ranks(3, |pg| {
        let (rank, own) = (pg.rank(), metrics(pg.rank()));
        let gathered = pg.gather_object(&own, 1)?;
        assert_eq!(gathered, (rank == 1).then(|| (0..3).map(metrics).collect::<Vec<_>>()));
        assert_eq!(pg.scatter_object(gathered.as_deref(), 1)?, own);
        let (next, last) = ((rank + 1) % 3, (rank + 2) % 3);
        // Around the ring, one rank first receives.
        if rank == 0 {
            assert_eq!(pg.recv_object::<Metrics>(last)?, metrics(last));
        }
        pg.send_object(&own, next)?;
        if rank > 0 {
            assert_eq!(pg.recv_object::<Metrics>(last)?, metrics(last));
        }
        // Objects of another type are received as a whole, and the next calls work.
        let other = match rank {
            0 => pg.gather_object(&1.5, 0).map(drop),
            1 => pg.gather_object(&"text".to_string(), 0).map(drop),
            _ => pg.gather_object(&2.5, 0).map(drop),
        };
        assert_eq!(other.is_err(), rank == 0, "{other:?}");
        pg.gather_object(&rank, 2)
    });
    assert_eq!(found, [None, None, Some(vec![0, 1, 2])]);
    let alone = ranks(1, |pg| Ok((pg.gather_object(&7, 0)?, pg.scatter_object(Some(&[8]), 0)?)));
    assert_eq!(alone, [(Some(vec![7]), 8)]);
}

#[test]
fn ranks_that_name_different_roots_learn_of_it_at_once() {
    // Larger than a part.
    let long = "0123456789abc".repeat((5 << 20) + 1);
    let found = ranks(3, |pg| {
        let (rank, other) = (pg.rank(), pg.rank() / 2);
        let errors = [
            pg.broadcast_object(Some(&1), other).map(drop).unwrap_err(),
            pg.broadcast_object(Some(&long), other).map(drop).unwrap_err(),
            pg.gather_object(&long, other).map(drop).unwrap_err(),
            pg.scatter_object(Some(&[1, 2, 3]), other).map(drop).unwrap_err(),
        ];
        assert!(errors.iter().all(|error| matches!(error, Error::InvalidArgument { .. })), "{errors:?}");
        let missing = pg.gather_object(&1, 3).map(drop).unwrap_err();
        assert!(matches!(missing, Error::RankOutOfRange { rank: 3, world_size: 3 }), "{missing:?}");
        // The next call works.
        assert_eq!(pg.all_gather_object(&rank)?, [0, 1, 2]);
        Ok(errors.map(|error| error.to_string()))
    });
    for text in found.concat() {
        assert!(text.contains("root: it must be the same on all ranks, but is 0 on rank 0, 1 on rank 2"), "{text}");
    }
}

/// In parts, of which the last are shorter, or which some ranks do not have.
#[test]
fn objects_may_be_larger_than_a_part() {
    // 13 characters, so that parts begin with different ones.
    let long = |rank: usize| "0123456789abc".repeat((5 << 20) * rank + 1);
    let found = ranks(2, |pg| {
        let own = long(pg.rank());
        let all = pg.all_gather_object(&own)?;
        assert!(all[0] == long(0) && all[1] == own || pg.rank() == 0);
        assert!(all[1] == long(1));
        assert!(pg.broadcast_object(Some(&own), 1)? == all[1]);
        assert!(pg.scatter_object((pg.rank() == 0).then_some(&all[..]), 0)? == own);
        Ok(pg.gather_object(&own, 0)?.is_none_or(|gathered| gathered == all))
    });
    assert_eq!(found, [true, true]);
}

#[test]
fn a_mesh_has_a_group_for_each_line() {
    ranks(12, |pg| {
        let mesh = pg.mesh(&[2, 3, 2], &["pod", "host", "device"])?;
        assert_eq!(mesh.shape(), [2, 3, 2]);
        let rank = pg.rank();
        assert_eq!(mesh.get_coordinate(), [rank / 6, rank / 2 % 3, rank % 2]);
        let lines =
            ["pod", "host", "device"].map(|name| mesh.get_group(name).unwrap().all_gather_object(&rank).unwrap());
        let expected = [
            vec![rank % 6, rank % 6 + 6],
            (0..3).map(|host| rank / 6 * 6 + host * 2 + rank % 2).collect(),
            vec![rank / 2 * 2, rank / 2 * 2 + 1],
        ];
        assert_eq!(lines, expected);
        assert_error(mesh.get_group("rack").map(drop), &[r#"["pod", "host", "device"], but no "rack""#]);
        Ok(())
    });
}

#[test]
fn a_slice_of_a_mesh_is_a_mesh_and_its_dimensions_become_one() {
    let found = ranks(12, |pg| {
        let (rank, mesh) = (pg.rank(), pg.mesh(&[2, 3, 2], &["replicate", "shard", "tensor"])?);
        let data = mesh.slice(&["replicate", "shard"])?;
        assert_eq!(data.shape(), [2, 3]);
        assert_eq!(data.get_coordinate(), [rank / 6, rank / 2 % 3]);
        let text = data.get_group("tensor").map(drop).unwrap_err().to_string();
        assert!(text.contains(r#"["replicate", "shard"], but no "tensor""#), "{text}");
        let lines = [
            data.flatten("data")?.get_group("data")?.all_gather_object(&rank)?,
            mesh.slice(&["replicate", "tensor"])?.flatten("ends")?.get_group("ends")?.all_gather_object(&rank)?,
            mesh.flatten("all")?.get_group("all")?.all_gather_object(&rank)?,
        ];
        let ends = [0, 1, 6, 7].map(|first| first + rank / 2 % 3 * 2);
        assert_eq!(lines, [(0..6).map(|place| place * 2 + rank % 2).collect(), ends.to_vec(), (0..12).collect()]);
        let flat = data.flatten("flat")?;
        assert_eq!((flat.shape(), flat.get_coordinate()), (vec![6], vec![rank / 2]));
        Ok(())
    });
    assert_eq!(found.len(), 12);
}

/// Groups over the same ranks are one: a call that fails in one of them has failed the other.
#[test]
fn the_same_dimensions_of_a_mesh_have_one_group() {
    let found = ranks(4, |pg| {
        let mesh = pg.mesh(&[2, 1, 2], &["replicate", "shard", "tensor"])?;
        let flat = mesh.slice(&["shard", "tensor"])?.flatten("one")?;
        let other = pg.mesh(&[4, 1], &["all", "none"])?;
        mesh.get_group("tensor")?.abort("the end of this group");
        let alone = mesh.slice(&["tensor"])?.flatten("two")?;
        let failed = [flat.get_group("one")?, alone.get_group("two")?].map(|group| group.barrier().is_err());
        let works = mesh.get_group("replicate")?.barrier().is_ok();
        pg.barrier()?;
        other.get_group("all")?.abort("the end of all");
        Ok((failed, works, pg.barrier().is_err()))
    });
    assert_eq!(found, [([true, true], true, true); 4]);
}

#[test]
fn a_slice_or_a_flat_mesh_that_cannot_be_is_an_error() {
    let found = ranks(4, |pg| {
        let mesh = pg.mesh(&[2, 2], &["host", "device"])?;
        let own = if pg.rank() == 3 { mesh.slice(&["host"])? } else { mesh.clone() };
        let texts = [
            mesh.slice(&["device", "host"]),
            mesh.slice(&["host", "host"]),
            mesh.slice(&[]),
            mesh.slice(&["rack"]),
            own.flatten("flat"),
        ];
        let texts = texts.map(|mesh| mesh.map(drop).unwrap_err().to_string());
        assert_eq!(mesh.flatten("flat")?.get_coordinate(), [pg.rank()]);
        Ok(texts)
    });
    let order = r#"they must be some of ["host", "device"] in this order, not ["#;
    let expected = [
        order,
        order,
        order,
        r#"["host", "device"], but no "rack""#,
        r#"is ["host", "device"] as "flat" on rank 0, ["host"] as "flat" on rank 3"#,
    ];
    for texts in found {
        texts.iter().zip(expected).for_each(|(text, part)| assert!(text.contains(part), "{text}"));
    }
}

#[test]
fn a_mesh_that_cannot_be_is_an_error_on_all_ranks() {
    let found = ranks(4, |pg| {
        let all = [
            pg.mesh(&[2, 3], &["a", "b"]),
            pg.mesh(&[2, 2], &["a", "a"]),
            pg.mesh(&[2, 2], &["a"]),
            pg.mesh(&[usize::MAX, 4], &["a", "b"]),
            pg.mesh(&[], &[]),
            pg.mesh(if pg.rank() == 2 { &[4, 1] } else { &[2, 2] }, &["a", "b"]),
        ];
        let texts = all.map(|mesh| mesh.map(drop).unwrap_err().to_string());
        assert_eq!(pg.mesh(&[4, 1], &["a", "b"])?.get_coordinate(), [pg.rank(), 0]);
        Ok(texts)
    });
    let expected = [
        "the number of ranks, 4, not that of [2, 3]",
        "a different name for each of the 2 dimensions",
        "a different name for each of the 2 dimensions",
        "the number of ranks, 4",
        "the number of ranks, 4",
        r#"but is [2, 2] with ["a", "b"] on rank 0, [4, 1] with ["a", "b"] on rank 2"#,
    ];
    for texts in found {
        texts.iter().zip(expected).for_each(|(text, part)| assert!(text.contains(part), "{text}"));
    }
}

/// serde refuses a path that is no Unicode.
type Unwritable = Vec<PathBuf>;

#[test]
fn an_object_that_cannot_be_sent_is_an_error_on_all_ranks_and_does_not_end_the_group() {
    let found = ranks(2, |pg| {
        let bad = vec![PathBuf::from(OsStr::from_bytes(&[0xff]))];
        let mine = if pg.rank() == 1 { bad.clone() } else { Unwritable::default() };
        let mut errors = vec![
            pg.all_gather_object(&mine).unwrap_err(),
            pg.broadcast_object((pg.rank() == 1).then_some(&bad), 1).unwrap_err(),
            pg.broadcast_object::<u32>(None, 1).unwrap_err(),
        ];
        errors.push(pg.gather_object(&mine, 0).unwrap_err());
        let all = [vec![], bad.clone()];
        errors.push(pg.scatter_object((pg.rank() == 1).then_some(&all[..]), 1).unwrap_err());
        errors.push(pg.scatter_object((pg.rank() == 1).then_some(&[5, 6, 7][..]), 1).unwrap_err());
        errors.push(pg.scatter_object::<u32>(None, 1).unwrap_err());
        errors.push(match pg.rank() {
            0 => pg.recv_object::<Unwritable>(1).unwrap_err(),
            _ => pg.send_object(&bad, 0).unwrap_err(),
        });
        // The next call works.
        assert_eq!(pg.all_gather_object(&pg.rank())?, [0, 1]);
        Ok(errors)
    });
    let texts = [
        "path contains invalid UTF-8",
        "path contains invalid UTF-8",
        "rank 1 is the root, but has none",
        "path contains invalid UTF-8",
        "path contains invalid UTF-8",
        "it must have 2, one for each rank, not 3",
        "it must have 2, one for each rank, not 0",
        "path contains invalid UTF-8",
    ];
    for (own, (other, text)) in found[1].iter().zip(found[0].iter().zip(texts)) {
        assert!(matches!(own, Error::InvalidArgument { .. }) && own.to_string().contains(text), "{own}");
        assert!(matches!(other, Error::RankFailed { rank: 1, .. }) && other.to_string().contains(text), "{other}");
    }
}

#[test]
fn an_object_of_another_type_is_an_error_on_all_ranks() {
    let found = ranks(2, |pg| {
        let error = match pg.rank() {
            0 => pg.all_gather_object(&"text".to_string()).unwrap_err(),
            _ => pg.all_gather_object(&1.5).unwrap_err(),
        };
        assert_eq!(pg.all_gather_object(&pg.rank())?, [0, 1]);
        Ok(error.to_string())
    });
    assert!(found[0].contains("the bytes from rank 1 cannot be read as"), "{}", found[0]);
    assert!(found[1].contains("the bytes from rank 0 cannot be read as"), "{}", found[1]);
}

#[test]
fn numbers_that_are_not_finite_arrive_as_they_are() {
    type Found = (f64, Option<f64>, Vec<f32>, BTreeMap<u64, f64>);
    let found = ranks(2, |pg| {
        let own: Found =
            (f64::NAN, Some(f64::NAN), vec![f32::INFINITY, f32::NAN, -0.0], [(3, f64::NEG_INFINITY)].into());
        let all = pg.all_gather_object(&own)?;
        assert_eq!(format!("{all:?}"), format!("{:?}", [&own, &own]));
        let loss = pg.broadcast_object((pg.rank() == 1).then_some(&f64::NAN), 1)?;
        // An option that is none is none.
        assert_eq!(pg.all_gather_object(&None::<f64>)?, [None, None]);
        Ok(loss.is_nan())
    });
    assert_eq!(found, [true; 2]);
}
