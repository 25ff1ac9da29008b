//! Gathering tensors whose shapes differ.
use crate::common::{ranks, tensor};
use candle_core::{D, DType, Device, IndexOp, Tensor};
use candle_ddp::{Error, ProcessGroup, Result};

/// The tensor of a rank: none of the sizes is the same, and one is 0.
fn part(rank: usize, dim: usize) -> Tensor {
    let mut shape = [2, 3, 4];
    shape[dim] = [5, 0, 2][rank];
    match shape.contains(&0) {
        true => Tensor::zeros(&shape, DType::F32, &Device::Cpu).unwrap(),
        false => tensor(&shape, rank as u64),
    }
}

#[test]
fn every_rank_gets_every_ranks_tensor() {
    for dim in 0..3 {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::U8, DType::I64] {
            let convert = |tensor: Tensor| (tensor * 100.)?.to_dtype(DType::F32)?.abs()?.to_dtype(dtype);
            ranks(3, |pg| {
                let all = pg.all_gather_varied(&convert(part(pg.rank(), dim))?, dim)?;
                for (rank, found) in all.iter().enumerate() {
                    let expected = convert(part(rank, dim))?;
                    assert_eq!((found.dims(), found.dtype()), (expected.dims(), dtype));
                    let values = |tensor: &Tensor| tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
                    assert_eq!(values(found)?, values(&expected)?, "{dim}, {dtype:?}");
                }
                let joined = Tensor::cat(&[&all[0], &all[2]], dim)?;
                assert_eq!(joined.dim(dim)?, 7);
                Ok(())
            });
        }
    }
}

#[test]
fn views_scalars_in_rows_and_empty_tensors_are_gathered() {
    ranks(2, |pg| {
        // A transposed view, along its last dimension.
        let x = tensor(&[3 + pg.rank(), 2], 5).t()?;
        let all = pg.all_gather_varied(&x, D::Minus1)?;
        assert_eq!(all[1].to_vec2::<f32>()?, tensor(&[4, 2], 5).t()?.to_vec2::<f32>()?);
        let none = Tensor::zeros((0, 7), DType::F32, pg.device())?;
        assert!(pg.all_gather_varied(&none, 0)?.iter().all(|tensor| tensor.dims() == [0, 7]));
        Ok(())
    });
    let alone = ranks(1, |pg| pg.all_gather_varied(&tensor(&[2], 1), 0));
    assert_eq!(alone[0][0].to_vec1::<f32>().unwrap(), tensor(&[2], 1).to_vec1::<f32>().unwrap());
}

/// What rank 1 does differently, and a part of the error on rank 0 and on rank 1.
#[test]
fn what_cannot_be_gathered_is_an_error_on_all_ranks_and_does_not_end_the_group() {
    type Wrong = fn(&ProcessGroup, &Tensor) -> Result<Vec<Tensor>>;
    let cases: [(Wrong, [&str; 2]); 5] = [
        (|pg, x| pg.all_gather_varied(&x.i((.., 0..1))?, 0), ["rank 1 has f32[2, 1] along dimension 0"; 2]),
        (|pg, x| pg.all_gather_varied(&x.to_dtype(DType::F64)?, 0), ["rank 1 has f64[2, 3] along dimension 0"; 2]),
        (|pg, x| pg.all_gather_varied(x, 1), ["rank 1 has f32[2, 3] along dimension 1"; 2]),
        (|pg, x| pg.all_gather_varied(&x.flatten_all()?, 0), ["rank 1 has f32[6] along dimension 0"; 2]),
        (|pg, x| pg.all_gather_varied(x, 2), ["rank 1 failed: ", "dimension index 2 out of range"]),
    ];
    for (wrong, texts) in cases {
        ranks(2, |pg| {
            let x = tensor(&[2, 3], 1);
            let result = if pg.rank() == 1 { wrong(&pg, &x) } else { pg.all_gather_varied(&x, 0) };
            let error = result.unwrap_err();
            assert!(error.to_string().contains(texts[pg.rank()]), "{error}");
            assert!(!matches!(error, Error::Group(_)), "{error}");
            assert_eq!(pg.all_gather_varied(&x, 0)?.len(), 2, "the next call works");
            Ok(())
        });
    }
}
