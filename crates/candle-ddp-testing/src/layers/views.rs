//! Views, concatenations and products of tensors, compared with candle's.
use crate::{assert_close, floats, new_var};
use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_ddp_nn::{cat, flatten, matmul, narrow, permute, reshape, silu, transpose};

type Run<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;

/// The loss of which functions of this crate see `y`, and candle's operations if `both`.
fn loss(y: &Tensor, both: bool) -> Result<Tensor> {
    let weight = new_var(y.dims(), 3, y.dtype(), y.device());
    let ours = silu(y)?.broadcast_mul(&weight.as_detached_tensor())?.sum_all()?;
    if both { ours + y.sqr()?.sum_all()? } else { Ok(ours) }
}

/// Views of a variable, of a result of this crate, and of candle's have candle's values and gradients.
pub fn views_are_candles(device: &Device) {
    let cases: [(&str, Run, Run); 10] = [
        ("reshape", &|x| reshape(x, (4, ())), &|x| x.reshape((4, ()))),
        ("flatten", &|x| flatten(x, 1, D::Minus1), &|x| x.flatten(1, D::Minus1)),
        ("transpose", &|x| transpose(x, 0, D::Minus1), &|x| x.transpose(0, D::Minus1)),
        ("permute", &|x| permute(x, (2, 0, 1)), &|x| x.permute((2, 0, 1))),
        ("narrow", &|x| narrow(x, 1, 1, 2), &|x| x.narrow(1, 1, 2)),
        ("nothing", &|x| narrow(x, 1, 1, 0), &|x| x.narrow(1, 1, 0)),
        (
            "the whole",
            &|x| transpose(&narrow(&flatten(&reshape(&cat(&[x], 0)?, (2, 3, 4))?, 1, 1)?, 2, 0, 4)?, 1, 1),
            &|x| Ok(x.clone()),
        ),
        ("cat", &|x| cat(&[x, &silu(x)?, x], 1), &|x| Tensor::cat(&[x, &silu(x)?, x], 1)),
        (
            "views of views",
            &|x| reshape(&transpose(&narrow(&reshape(x, (2, 3, 2, 2))?, 1, 0, 2)?, 1, 2)?, (4, ())),
            &|x| x.reshape((2, 3, 2, 2))?.narrow(1, 0, 2)?.transpose(1, 2)?.reshape((4, ())),
        ),
        ("parts", &|x| cat(&[&narrow(x, 0, 1, 1)?, &narrow(x, 0, 0, 1)?, &narrow(x, 0, 0, 2)?], 0), &|x| {
            Tensor::cat(&[&x.narrow(0, 1, 1)?, &x.narrow(0, 0, 1)?, &x.narrow(0, 0, 2)?], 0)
        }),
    ];
    for (dtype, tolerance) in [(DType::F64, 1e-14), (DType::F32, 1e-6), (DType::BF16, 2e-2)] {
        // candle's own operations on CUDA refuse tensors without elements.
        for (name, ours, candles) in cases.iter().filter(|case| case.0 != "nothing" || device.is_cpu()) {
            for (of, both) in [(0, false), (0, true), (1, false), (1, true), (2, true)] {
                let x = new_var(&[2, 3, 4], 1, dtype, device);
                let run = |view: Run| -> Result<[Vec<f32>; 2]> {
                    let of = match of {
                        0 => x.as_tensor().clone(),
                        1 => silu(&x)?,
                        _ => x.sqr()?,
                    };
                    let y = view(&of)?;
                    let gradients = (loss(&y, both)? + loss(&of, both)?)?.backward()?;
                    Ok([floats(&y.contiguous()?), floats(gradients.get(&x).unwrap())])
                };
                let (ours, candles) = (run(ours).unwrap(), run(candles).unwrap());
                assert_eq!(ours[0], candles[0], "{name}");
                assert_close(&ours[1], &candles[1], tolerance, &format!("{name} of {of}, {both}, {dtype:?}"));
            }
        }
    }
}

/// Products of contiguous and of transposed factors, of batches, and with one matrix for all.
pub fn products_match_the_definition(device: &Device) {
    let shapes: [(&[usize], &[usize]); 6] = [
        (&[5, 7], &[7, 3]),
        (&[2, 5, 7], &[2, 7, 3]),
        (&[2, 3, 5, 7], &[2, 3, 7, 4]),
        (&[2, 1, 3, 5, 7], &[2, 1, 3, 7, 4]),
        (&[2, 3, 5, 7], &[7, 3]),
        (&[2, 0, 7], &[2, 7, 3]),
    ];
    for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 1e-5), (DType::F16, 5e-3), (DType::BF16, 3e-2)] {
        for (of_a, of_b) in shapes.into_iter().filter(|shapes| !shapes.0.contains(&0) || device.is_cpu()) {
            for transposed in [[false, false], [true, false], [false, true], [true, true]] {
                let stored = |shape: &[usize], is_transposed: bool, seed| {
                    let mut shape = shape.to_vec();
                    let rank = shape.len();
                    if is_transposed {
                        shape.swap(rank - 2, rank - 1);
                    }
                    new_var(&shape, seed, dtype, device)
                };
                let (a, b) = (stored(of_a, transposed[0], 1), stored(of_b, transposed[1], 2));
                let run = |product: &dyn Fn(&Tensor, &Tensor) -> Result<Tensor>, wide: bool| -> Result<[Vec<f32>; 3]> {
                    let view = |x: &Var, is_transposed| {
                        let x =
                            if wide { x.to_device(&Device::Cpu)?.to_dtype(DType::F64)? } else { x.as_tensor().clone() };
                        if is_transposed { x.t() } else { Ok(x) }
                    };
                    let y = product(&view(&a, transposed[0])?, &view(&b, transposed[1])?)?;
                    let gradients = loss(&y, false)?.backward()?;
                    let of = |var: &Var| gradients.get(var).map(floats).unwrap_or_default();
                    Ok([floats(&y), of(&a), of(&b)])
                };
                let ours = run(&matmul, false).unwrap();
                let by_definition = |a: &Tensor, b: &Tensor| {
                    a.unsqueeze(D::Minus1)?.broadcast_mul(&b.unsqueeze(b.rank() - 2)?)?.sum(D::Minus2)
                };
                let candles = run(&by_definition, true).unwrap();
                for (index, (ours, candles)) in ours.iter().zip(&candles).enumerate() {
                    if candles.is_empty() {
                        assert!(ours.iter().all(|&value| value == 0.0));
                        continue;
                    }
                    let name = format!("{index} of {of_a:?} and {of_b:?}, {transposed:?}, {dtype:?}");
                    assert_close(ours, candles, tolerance, &name);
                }
            }
        }
    }
}
