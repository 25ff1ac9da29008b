//! Metrics, compared with torchmetrics': see golden/metrics.md.
use crate::common::{golden, ranks};
use candle_core::{DType, Device, Tensor};
use candle_ddp::metrics::*;
use candle_ddp::{Error, ProcessGroup, Result};

fn numbers(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn assert_near(found: &[f64], expected: &Tensor, what: &str) {
    let expected = numbers(expected);
    let is_near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-6;
    assert!(
        found.len() == expected.len() && found.iter().zip(&expected).all(is_near),
        "{what}: {found:?}, {expected:?}"
    );
}

/// The rows of this rank: every `world_size`-th, in batches of two.
fn batches(pg: &ProcessGroup, tensors: &[&Tensor]) -> Result<Vec<Vec<Tensor>>> {
    let rows: Vec<u32> = (pg.rank() as u32..tensors[0].dims()[0] as u32).step_by(pg.world_size()).collect();
    let batch = |rows: &[u32]| {
        let rows = Tensor::new(rows, &Device::Cpu)?;
        tensors.iter().map(|tensor| Ok(tensor.index_select(&rows, 0)?)).collect()
    };
    rows.chunks(2).map(batch).collect()
}

#[test]
fn metrics_are_those_of_torchmetrics_on_any_number_of_ranks() {
    let golden = golden("metrics.safetensors");
    for world in 1..=4 {
        ranks(world, |pg| {
            for (name, classes, ignored) in [("samples", 5, None), ("pixels", 4, Some(255))] {
                let get = |part: &str| &golden[&format!("{name}.{part}")];
                let mut matrix = ConfusionMatrix::new(classes);
                if let Some(ignored) = ignored {
                    matrix = matrix.with_ignore_index(ignored);
                }
                let mut of_classes = matrix.clone();
                for batch in batches(&pg, &[get("logits"), get("targets")])? {
                    matrix.update(&batch[0], &batch[1])?;
                    of_classes.update(&batch[0].argmax(1)?, &batch[1].to_dtype(DType::U8)?)?;
                }
                assert_eq!(matrix, of_classes);
                let all = matrix.all_reduce(&pg)?;
                let counts = (0..classes).flat_map(|row| (0..classes).map(move |column| (row, column)));
                let counts =
                    counts.map(|(row, column)| Ok(all.count(row, column)? as f64)).collect::<Result<Vec<_>>>()?;
                assert_near(&counts, get("matrix"), name);
                let averages = |metric: fn(&ConfusionMatrix, Average) -> f64| {
                    [Average::Micro, Average::Macro, Average::Weighted].map(|average| metric(&all, average))
                };
                assert_near(&averages(ConfusionMatrix::accuracy), get("accuracy"), "accuracy");
                assert_near(&averages(ConfusionMatrix::precision), get("precision"), "precision");
                assert_near(&averages(ConfusionMatrix::recall), get("recall"), "recall");
                assert_near(&averages(ConfusionMatrix::f1), get("f1"), "f1");
                assert_near(&averages(ConfusionMatrix::iou), get("iou"), "iou");
            }
            let mut top = [1, 2, 3].map(TopKAccuracy::new);
            for batch in batches(&pg, &[&golden["samples.logits"], &golden["samples.targets"]])? {
                top.iter_mut().try_for_each(|top| top.update(&batch[0], &batch[1]))?;
            }
            let top = top.iter().map(|top| top.compute(&pg)).collect::<Result<Vec<_>>>()?;
            assert_near(&top, &golden["samples.top"], "top");
            let mut auroc = BinaryAuroc::new();
            for batch in batches(&pg, &[&golden["binary.scores"], &golden["binary.targets"]])? {
                // Targets of 0 and 1 may be the same floating-point numbers that a loss gets.
                let targets = if pg.rank() == 0 { batch[1].to_dtype(DType::F32)? } else { batch[1].clone() };
                auroc.update(&batch[0], &targets)?;
            }
            assert_near(&[auroc.compute(&pg)?], &golden["binary.auroc"], "auroc");
            let mut multiclass = MulticlassAuroc::new(5);
            for batch in batches(&pg, &[&golden["multiclass.scores"], &golden["multiclass.targets"]])? {
                multiclass.update(&batch[0], &batch[1])?;
            }
            let mut areas = multiclass.compute_each(&pg)?;
            assert!(areas.pop().is_some_and(f64::is_nan), "the last class is never a target");
            areas.extend([multiclass.compute(&pg, Average::Macro)?, multiclass.compute(&pg, Average::Weighted)?]);
            assert_near(&areas, &golden["multiclass.auroc"], "multiclass auroc");
            let mut perplexity = [Perplexity::new(), Perplexity::new().with_ignore_index(0)];
            for batch in batches(&pg, &[&golden["tokens.logits"], &golden["tokens.targets"]])? {
                perplexity.iter_mut().try_for_each(|perplexity| perplexity.update(&batch[0], &batch[1]))?;
            }
            let perplexity = perplexity.iter().map(|perplexity| perplexity.compute(&pg)).collect::<Result<Vec<_>>>()?;
            assert_near(
                &(perplexity.iter().map(|value| value / 10.).collect::<Vec<_>>()),
                &(&golden["tokens.perplexity"] / 10.)?,
                "perplexity",
            );
            Ok(())
        });
    }
}

#[test]
fn metrics_of_nothing_are_no_numbers() {
    let found = ranks(2, |pg| {
        let matrix = ConfusionMatrix::new(3).all_reduce(&pg)?;
        let averages = [Average::Micro, Average::Macro, Average::Weighted];
        let mut all: Vec<f64> =
            averages.iter().flat_map(|average| [matrix.f1(*average), matrix.accuracy(*average)]).collect();
        all.extend([
            TopKAccuracy::new(1).compute(&pg)?,
            Perplexity::new().compute(&pg)?,
            BinaryAuroc::new().compute(&pg)?,
            MulticlassAuroc::new(3).compute(&pg, Average::Macro)?,
            MulticlassAuroc::new(3).compute(&pg, Average::Weighted)?,
        ]);
        all.extend(MulticlassAuroc::new(3).compute_each(&pg)?);
        // One rank has an empty batch, the other one positive sample.
        let (mut matrix, mut auroc) = (ConfusionMatrix::new(3), BinaryAuroc::new());
        let (mut top, mut perplexity) = (TopKAccuracy::new(1), Perplexity::new());
        let count = pg.rank();
        let scores = Tensor::new(&[[1f32, 2., 3.]], &Device::Cpu)?.narrow(0, 0, count)?;
        let targets = Tensor::new(&[2u32], &Device::Cpu)?.narrow(0, 0, count)?;
        matrix.update(&scores, &targets)?;
        top.update(&scores, &targets)?;
        perplexity.update(&scores, &targets)?;
        auroc.update(&scores.narrow(1, 0, 1)?.squeeze(1)?, &targets.ones_like()?)?;
        assert_eq!([matrix.all_reduce(&pg)?.iou(Average::Micro), top.compute(&pg)?], [1.; 2]);
        assert!(perplexity.compute(&pg)? > 1.);
        all.push(auroc.compute(&pg)?);
        Ok(all.into_iter().all(f64::is_nan))
    });
    assert_eq!(found, [true, true]);
}

#[test]
fn what_does_not_fit_is_refused_and_not_counted() {
    let t = |values: &[f32], shape: &[usize]| Tensor::from_slice(values, shape, &Device::Cpu).unwrap();
    let c = |values: &[i64]| Tensor::new(values, &Device::Cpu).unwrap();
    let two = t(&[1., 2., 2., 1.], &[2, 2]);
    let mut matrix = ConfusionMatrix::new(2).with_ignore_index(-100);
    let cases = [
        (two.clone(), c(&[0, 2]), "must be at least 0 and below 2, but one is 2"),
        (two.clone(), c(&[0, -1]), "but one is -1"),
        (two.clone(), c(&[0, 1, 1]), "not f32[2, 2] for targets of i64[3]"),
        (t(&[1., f32::NAN, 2., 1.], &[2, 2]), c(&[0, 1]), "1 of them are NaN"),
        (c(&[0, 5]), c(&[0, 1]), "but one is 5"),
        (two.clone(), t(&[0., 1.], &[2]), "of dtype U8, U32 or I64, not F32"),
        (t(&[0., 1.], &[2]), c(&[0, 1]), "or classes of the targets' shape"),
        (t(&[0.; 6], &[2, 3]), c(&[0, 1]), "(N, 2, …)"),
    ];
    for (predictions, targets, text) in cases {
        let error = matrix.update(&predictions, &targets).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains(text), "{error}");
    }
    matrix.update(&two, &c(&[1, -100])).unwrap();
    assert_eq!((matrix.count(1, 1).unwrap(), matrix.count(0, 0).unwrap()), (1, 0));
    assert!(matrix.count(2, 0).is_err());
    let (mut top, mut auroc, mut perplexity) = (TopKAccuracy::new(1), BinaryAuroc::new(), Perplexity::new());
    let errors = [
        top.update(&two, &c(&[0])),
        top.update(&t(&[f32::NAN, 1.], &[1, 2]), &c(&[0])),
        top.update(&two, &c(&[0, 7])),
        auroc.update(&t(&[0.5], &[1]), &c(&[2])),
        auroc.update(&t(&[0.5], &[1]), &t(&[0.5], &[1])),
        auroc.update(&t(&[0.5], &[1]), &t(&[2.], &[1])),
        auroc.update(&t(&[0.5], &[1]), &t(&[f32::NAN], &[1])),
        auroc.update(&t(&[0.5], &[1]), &t(&[f32::INFINITY], &[1])),
        auroc.update(&t(&[f32::NAN], &[1]), &c(&[1])),
        auroc.update(&two, &c(&[1, 1])),
        perplexity.update(&two, &c(&[0, 2])),
        perplexity.update(&two, &c(&[0])),
    ];
    assert!(errors.iter().all(|result| matches!(result, Err(Error::InvalidArgument { .. }))), "{errors:?}");
    let left = ranks(1, |pg| Ok([top.compute(&pg)?, auroc.compute(&pg)?, perplexity.compute(&pg)?]));
    assert!(left[0].iter().all(|value| value.is_nan()));
    let mut multiclass = MulticlassAuroc::new(2);
    let chance = t(&[0.5, 0.5], &[1, 2]);
    for (scores, targets, text) in [
        (chance.clone(), c(&[2]), "must be at least 0 and below 2, but one is 2"),
        (chance.clone(), c(&[1, 1]), "they must have (N, 2), not f32[1, 2] for targets of i64[2]"),
        (
            t(&[1.5, -0.5], &[1, 2]),
            c(&[1]),
            "they must be probabilities, such as the softmax of logits, but one is 1.5",
        ),
        (t(&[f32::NAN, 0.5], &[1, 2]), c(&[1]), "element 0 is NaN"),
    ] {
        let error = multiclass.update(&scores, &targets).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains(text), "{error}");
    }
    let errors = ranks(2, |pg| {
        assert!(multiclass.compute_each(&pg)?.iter().all(|area| area.is_nan()));
        let micro = multiclass.compute(&pg, Average::Micro).unwrap_err().to_string();
        Ok([micro, MulticlassAuroc::new(2 + pg.rank()).compute_each(&pg).unwrap_err().to_string()])
    });
    for [micro, other] in errors {
        assert!(micro.contains("it must be Average::Macro or Average::Weighted"), "{micro}");
        assert!(
            other.contains("classes: it must be the same on all ranks, but is 2 on rank 0, 3 on rank 1"),
            "{other}"
        );
    }
    // Equal scores are no hits for all.
    top.update(&t(&[1., 1.], &[1, 2]), &c(&[1])).unwrap();
    assert_eq!(ranks(1, |pg| top.compute(&pg)), [0.]);
}

#[test]
fn rows_are_gathered_in_the_order_of_the_dataset() {
    for world in 1..=4u32 {
        let found = ranks(world as usize, |pg| {
            // 21 samples, and on some ranks one of them again.
            let rank = pg.rank() as u32;
            let own = (0..21u32.next_multiple_of(world)).filter(|i| i % world == rank);
            let indices: Vec<usize> = own.map(|i| i as usize % 21).collect();
            let rows = indices.iter().map(|index| *index as i64).collect::<Vec<_>>();
            let rows = Tensor::new(rows, &Device::Cpu)?
                .to_dtype(DType::F32)?
                .unsqueeze(1)?
                .broadcast_as((indices.len(), 2))?;
            let all = gather_in_order(&pg, &indices, &rows)?;
            assert_eq!(all.dims(), [21, 2]);
            assert_eq!(
                all.narrow(1, 1, 1)?.flatten_all()?.to_vec1::<f32>()?,
                (0..21).map(|i| i as f32).collect::<Vec<_>>()
            );
            let missing = gather_in_order(&pg, &indices[1..], &rows.narrow(0, 1, indices.len() - 1)?).map(drop);
            let wrong = gather_in_order(&pg, if rank == 0 { &indices[1..] } else { &indices }, &rows).map(drop);
            Ok((missing.unwrap_err().to_string(), wrong.unwrap_err()))
        });
        for (rank, (missing, wrong)) in found.into_iter().enumerate() {
            assert!(
                missing.contains("no rank has sample 0") || world > 1 && missing.contains("no rank has sample"),
                "{missing}"
            );
            let is_own = matches!(wrong, Error::InvalidArgument { .. });
            assert!(is_own == (rank == 0) && wrong.to_string().contains("one for each row"), "{wrong}");
        }
    }
}
