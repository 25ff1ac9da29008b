//! Operations with indices, sorting, and writing into a part of a tensor.
use super::{Case, Error, Missing, Refused, Wrong, case};
use candle_core::{DType, Device, IndexOp, Result, Tensor};

fn index<const N: usize>(index: [u32; N], shape: &[usize]) -> Result<Tensor> {
    Tensor::from_vec(index.to_vec(), shape, &Device::Cpu)
}

fn reading() -> Vec<Case> {
    vec![
        case("index_select", [&[2, 3, 4]], |[x]| x.index_select(&index([2, 0, 2], &[3])?, 1)),
        case("index_select", [&[3, 4]], |[x]| x.index_select(&index([2, 0, 2, 1], &[4])?, 0)).variant("of rows"),
        case("i", [&[3, 4]], |[x]| x.i(&index([2, 0, 2], &[3])?)).variant("with indices"),
        case("embedding", [&[5, 3]], |[x]| x.embedding(&index([4, 0, 4, 1], &[4])?)),
        case("flip", [&[2, 3, 4]], |[x]| x.flip(&[0, 2])),
        case("gather", [&[2, 4]], |[x]| x.gather(&index([3, 0, 3, 1, 1, 2], &[2, 3])?, 1)),
        case("gather", [&[3, 2]], |[x]| x.gather(&index([2, 0, 2, 1], &[2, 2])?, 0)).variant("of rows"),
        case("gather", [&[3, 4]], |[x]| x.gather(&index([3, 0, 1, 1], &[2, 2])?, 1))
            .variant("with fewer indices in another dimension")
            .is(Error, "scatter_add in the backward pass refuses other sizes"),
        case("sort_last_dim", [&[2, 3, 4]], |[x]| Ok(x.sort_last_dim(true)?.0)),
        case("sort_last_dim", [&[2, 3, 4]], |[x]| Ok(x.sort_last_dim(false)?.0)).variant("descending"),
    ]
}

fn writing() -> Vec<Case> {
    let ids = || index([1, 0, 3, 2], &[2, 2]);
    vec![
        case("scatter", [&[2, 4], &[2, 2]], move |[x, y]| x.scatter(&ids()?, y, 1))
            .is(Wrong, "elements that are overwritten get a gradient"),
        case("scatter", [&[2, 4], &[2, 2]], move |[x, y]| {
            let mask = Tensor::new(&[[0f64, 0., 1., 1.], [1., 1., 0., 0.]], &Device::Cpu)?;
            (x * mask)?.scatter(&ids()?, y, 1)
        })
        .variant("of elements that are not overwritten"),
        case("scatter_add", [&[2, 4], &[2, 2]], move |[x, y]| x.scatter_add(&ids()?, y, 1))
            .is(Error, "the source is smaller"),
        case("scatter_add", [&[2, 2], &[2, 2]], |[x, y]| x.scatter_add(&index([1, 0, 0, 0], &[2, 2])?, y, 1))
            .variant("with equal sizes")
            .is(Wrong, "elements that are added to lose their gradient"),
        case("index_add", [&[2, 4], &[2, 3]], |[x, y]| x.index_add(&index([1, 3, 1], &[3])?, y, 1)),
        case("index_add", [&[4, 2], &[3, 2]], |[x, y]| x.index_add(&index([1, 3, 1], &[3])?, y, 0)).variant("of rows"),
    ]
}

fn slices() -> Vec<Case> {
    vec![
        case("slice_scatter", [&[2, 4, 3], &[2, 2, 3]], |[x, y]| x.slice_scatter(y, 1, 1)),
        case("slice_scatter0", [&[4, 3], &[2, 3]], |[x, y]| x.slice_scatter0(y, 1)),
        case("slice_assign", [&[3, 4], &[2, 2]], |[x, y]| x.slice_assign(&[1..3, 0..2], y)),
    ]
}

/// These write into a tensor without recording it for the backward pass.
fn in_place() -> Vec<Case> {
    let zeros = || Tensor::zeros((2, 4), DType::F64, &Device::Cpu);
    let ids = || index([1, 0, 3, 2], &[2, 2]);
    let cases = vec![
        case("slice_set", [&[2, 2]], move |[x]| {
            let y = zeros()?;
            y.slice_set(x, 1, 1)?;
            Ok(y)
        }),
        case("scatter_set", [&[2, 2]], move |[x]| {
            let y = zeros()?;
            y.scatter_set(&ids()?, x, 1)?;
            Ok(y)
        }),
        case("scatter_add_set", [&[2, 2]], move |[x]| {
            let y = zeros()?;
            y.scatter_add_set(&ids()?, x, 1)?;
            Ok(y)
        }),
    ];
    cases.into_iter().map(|case| case.is(Missing, "in place")).collect()
}

pub(super) fn cases() -> Vec<Case> {
    let contiguous_only = [reading(), writing(), in_place()].into_iter().flatten().map(|case| case.strided(Refused));
    contiguous_only.chain(slices()).collect()
}
