//! Views, concatenations and products of tensors.
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_ddp_nn::{cat, flatten, matmul, narrow, no_grad, permute, reshape, silu, transpose};
use candle_ddp_testing::{assert_close, assert_error, floats, tensor};

/// candle's graph has neither the argument nor the result, so it adds nothing to zeros.
#[test]
fn between_functions_of_this_crate_nothing_passes_through_candles_graph() {
    let x = Var::from_tensor(&tensor(&[2, 3, 4], 1)).unwrap();
    let h = silu(&x).unwrap();
    let views: [(&str, Result<Tensor>); 7] = [
        ("reshape", reshape(&h, 24)),
        ("flatten", flatten(&h, 0, 1)),
        ("transpose", transpose(&h, 0, 1)),
        ("permute", permute(&h, (2, 1, 0))),
        ("narrow", narrow(&h, 2, 1, 2)),
        ("cat", cat(&[&h, &h], 0)),
        ("matmul", matmul(&h, &transpose(&h, 1, 2).unwrap())),
    ];
    let visited = |result: Tensor, view: &Tensor| {
        let nodes = result.sorted_nodes();
        [&h, view].map(|tensor| nodes.iter().any(|node| node.id() == tensor.id()))
    };
    for (name, view) in views {
        let view = view.unwrap();
        assert_eq!(visited(silu(&view).unwrap(), &view), [false; 2], "{name}");
        assert!(visited(view.sqr().unwrap(), &view)[1], "{name}");
    }
    let candles = h.reshape(24).unwrap();
    assert_eq!(visited(silu(&candles).unwrap(), &candles), [true; 2]);
}

/// More views than are held, all of them before the first use.
#[test]
fn many_views_of_one_tensor() {
    let x = Var::from_tensor(&tensor(&[200, 3], 1)).unwrap();
    let run = |narrow: &dyn Fn(&Tensor, usize) -> Result<Tensor>| {
        let h = silu(&x).unwrap();
        let rows: Vec<Tensor> = (0..200).map(|row| narrow(&h, row).unwrap()).collect();
        let losses: Vec<Tensor> = rows.iter().map(|row| silu(row).unwrap().sum_all().unwrap()).collect();
        floats(Tensor::stack(&losses, 0).unwrap().sum_all().unwrap().backward().unwrap().get(&x).unwrap())
    };
    assert_close(&run(&|h, row| narrow(h, 0, row, 1)), &run(&|h, row| h.narrow(0, row, 1)), 1e-6, "200 rows");
}

#[test]
fn views_under_no_grad_and_of_integers() {
    let x = Var::from_tensor(&tensor(&[2, 3, 4], 1)).unwrap();
    let h = silu(&x).unwrap();
    let views = no_grad(|| {
        [reshape(&h, 24), transpose(&h, 0, 1), narrow(&h, 0, 0, 1), cat(&[&h, &h], 0), matmul(&h, &h.t().unwrap())]
    });
    for view in views {
        assert!(!view.unwrap().track_op());
    }
    let indices = Tensor::arange(0u32, 6, &Device::Cpu).unwrap();
    let twice = cat(&[&reshape(&indices, (2, 3)).unwrap(), &reshape(&indices, (2, 3)).unwrap()], 1).unwrap();
    assert_eq!(twice.to_vec2::<u32>().unwrap(), [[0, 1, 2, 0, 1, 2], [3, 4, 5, 3, 4, 5]]);
    assert!(reshape(&h, 23).is_err() && transpose(&h, 0, 3).is_err() && permute(&h, (0, 0, 1)).is_err());
    assert!(narrow(&h, 2, 3, 2).is_err() && cat(&[], 0).is_err() && cat(&[&h, &indices], 0).is_err());
    assert_eq!(cat(&[&h], 0).unwrap().dims(), [2, 3, 4]);
}

#[test]
fn factors_that_do_not_fit_are_refused() {
    let of = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
    let refused = |a: &Tensor, b: &Tensor| assert_error(matmul(a, b), &["the factors of matmul"]);
    refused(&of(&[2, 3], DType::F32), &of(&[2, 3], DType::F32));
    refused(&of(&[2, 3], DType::F32), &of(&[3, 3], DType::F64));
    refused(&of(&[2, 3], DType::U32), &of(&[3, 3], DType::U32));
    refused(&of(&[3], DType::F32), &of(&[3, 3], DType::F32));
    refused(&of(&[2, 3], DType::F32), &of(&[3], DType::F32));
    refused(&of(&[2, 4, 3], DType::F32), &of(&[3, 3, 3], DType::F32));
    refused(&of(&[4, 3], DType::F32), &of(&[2, 3, 3], DType::F32));
    assert_eq!(matmul(&of(&[2, 0], DType::F32), &of(&[0, 3], DType::F32)).unwrap().dims(), [2, 3]);
}
