//! Softmax and cross entropy, compared with PyTorch.
use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_ddp_nn::{
    CrossEntropyOptions, CtcLossOptions, LinearCrossEntropyOptions, cross_entropy, cross_entropy_with, ctc_loss,
    linear_cross_entropy, linear_cross_entropy_with, log_softmax, softmax, softmax_last_dim,
};
use candle_ddp_tensor::Error;
use candle_ddp_testing::{assert_close, assert_error, floats, tensor};

#[test]
fn they_work_along_any_dimension() {
    let x = tensor(&[2, 3, 4], 1);
    let flat = |t: Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(flat(softmax_last_dim(&x).unwrap()), flat(softmax(&x, 2).unwrap()));
    assert_eq!(flat(softmax(&x, D::Minus2).unwrap()), flat(softmax(&x, 1).unwrap()));
    assert!(softmax(&x, 3).is_err());
    // Neighbouring columns are processed together, up to a number of them.
    let x = tensor(&[2, 5, 300], 1);
    let turned = x.transpose(1, 2).unwrap().contiguous().unwrap();
    let columns = flat(softmax(&x, 1).unwrap());
    let rows = flat(softmax(&turned, 2).unwrap().transpose(1, 2).unwrap());
    assert_close(&columns, &rows, 1e-6, "columns and rows");
    let classes: Vec<u32> = (0..600).map(|sample| sample % 5).collect();
    let loss = |x: &Tensor, shape: &[usize]| {
        let x = Var::from_tensor(x).unwrap();
        let targets = Tensor::from_slice(&classes, shape, &Device::Cpu).unwrap();
        let options = CrossEntropyOptions { label_smoothing: 0.1, ..Default::default() };
        let loss = cross_entropy_with(&x, &targets, options).unwrap();
        let gradient = loss.backward().unwrap().get(&x).unwrap().clone();
        (loss.to_scalar::<f32>().unwrap(), gradient)
    };
    let ((columns, of_columns), (rows, of_rows)) =
        (loss(&x, &[2, 300]), loss(&turned.reshape((600, 5)).unwrap(), &[600]));
    assert!((columns - rows).abs() < 1e-6, "{columns} and {rows}");
    let of_rows = of_rows.reshape((2, 300, 5)).unwrap().transpose(1, 2).unwrap();
    assert_close(&flat(of_columns), &flat(of_rows), 1e-6, "gradients of columns and rows");
    assert_eq!(softmax(&tensor(&[2, 0], 1), 1).unwrap().dims(), [2, 0]);
}

#[test]
fn it_is_a_drop_in_for_candles() {
    let (logits, targets) = (tensor(&[4, 5], 1), Tensor::new(&[0u32, 4, 2, 2], &Device::Cpu).unwrap());
    let ours = cross_entropy(&logits, &targets).unwrap().to_scalar::<f32>().unwrap();
    let candles = candle_nn::loss::cross_entropy(&logits, &targets).unwrap().to_scalar::<f32>().unwrap();
    assert!((ours - candles).abs() < 1e-6, "{ours} and {candles}");
}

#[test]
fn bad_targets_are_refused() {
    let logits = tensor(&[2, 3], 1);
    let refused = |result: Result<Tensor>, text: &str| assert_error(result, &[text]);
    let targets = |targets: &[i64]| Tensor::new(targets, &Device::Cpu).unwrap();
    refused(cross_entropy(&logits, &targets(&[0, 3])), "a class from 0 to 2 or ignore_index, -100, but one is 3");
    refused(cross_entropy(&logits, &targets(&[-1, 0])), "but one is -1");
    refused(cross_entropy(&logits, &targets(&[0, 1, 2])), "they must be (N, C, …) and (N, …)");
    refused(cross_entropy(&logits, &tensor(&[2], 1)), "u32, i64 or u8");
    let with = |options| cross_entropy_with(&logits, &targets(&[0, 1]), options);
    refused(with(CrossEntropyOptions { label_smoothing: 1.5, ..Default::default() }), "1.5");
    refused(with(CrossEntropyOptions { weight: Some(tensor(&[2], 1)), ..Default::default() }), "one weight per class");
}

#[test]
fn heads_that_do_not_fit_are_refused() {
    let refused = |result: Result<Tensor>, text: &str| assert_error(result, &[text]);
    let (x, weight) = (tensor(&[2, 3], 1), tensor(&[4, 3], 2));
    let targets = |targets: &[i64]| Tensor::new(targets, &Device::Cpu).unwrap();
    let classes = targets(&[3, 0]);
    refused(linear_cross_entropy(&x, &tensor(&[4, 2], 2), None, &classes), "the input of linear_cross_entropy");
    refused(linear_cross_entropy(&x, &weight, Some(&tensor(&[3], 1)), &classes), "the bias of linear_cross_entropy");
    refused(linear_cross_entropy(&x, &weight, None, &targets(&[0, 1, 2])), "f32[2, 3], f32[4, 3] and i64[3]");
    refused(linear_cross_entropy(&x, &weight, None, &targets(&[0, 4])), "a class from 0 to 3 or ignore_index");
    refused(linear_cross_entropy(&x, &weight, None, &tensor(&[2], 1)), "u32, i64 or u8");
    let with = |options| linear_cross_entropy_with(&x, &weight, None, &classes, options);
    refused(with(LinearCrossEntropyOptions { batch_chunk_size: Some(0), ..Default::default() }), "batch_chunk_size");
    let cross_entropy = CrossEntropyOptions { label_smoothing: 1.5, ..Default::default() };
    refused(with(LinearCrossEntropyOptions { cross_entropy, ..Default::default() }), "1.5");
    assert!(linear_cross_entropy(&classes, &classes.reshape((1, 2)).unwrap(), None, &targets(&[])).is_err());
}

/// Every way from a time to the next is counted by hand: all classes' sequences that say the labels.
#[test]
fn ctc_loss_is_the_sum_over_all_alignments() {
    let (times, classes) = (5, 3);
    let log_probs = log_softmax(&tensor(&[times, classes], 3).to_dtype(DType::F64).unwrap(), 1).unwrap();
    let of_times = log_probs.to_vec2::<f64>().unwrap();
    for labels in [vec![], vec![1u32], vec![2, 1], vec![1, 1], vec![1, 1, 2], vec![1, 1, 1], vec![2, 2, 2, 2]] {
        let mut probability = 0.0;
        for sequence in 0..classes.pow(times as u32) {
            let sequence: Vec<usize> = (0..times).map(|time| sequence / classes.pow(time as u32) % classes).collect();
            let mut said: Vec<u32> = sequence.iter().map(|class| *class as u32).collect();
            said.dedup();
            said.retain(|class| *class != 0);
            if said == labels {
                probability += sequence.iter().zip(&of_times).map(|(class, time)| time[*class]).sum::<f64>().exp();
            }
        }
        let targets = Tensor::new(labels.as_slice(), &Device::Cpu).unwrap();
        let options = CtcLossOptions { reduction: None, ..Default::default() };
        let loss =
            ctc_loss(&log_probs, &targets, &[times], &[labels.len()], options).unwrap().to_scalar::<f64>().unwrap();
        let expected = -f64::ln(probability);
        assert!(loss == expected || (loss - expected).abs() < 1e-12, "{labels:?}: {loss} and {expected}");
    }
}

#[test]
fn ctc_loss_without_an_alignment_and_with_wrong_inputs() {
    let log_probs = Var::from_tensor(&log_softmax(&tensor(&[4, 2, 3], 1), 2).unwrap()).unwrap();
    let targets = Tensor::new(&[[1u32, 1, 2], [1, 2, 2]], &Device::Cpu).unwrap();
    let run = |targets: &Tensor, inputs: &[usize], lengths: &[usize], options| {
        ctc_loss(&log_probs, targets, inputs, lengths, options)
    };
    let options = CtcLossOptions { reduction: None, ..Default::default() };
    // "1 1" needs three times, and "1 2 2" four.
    let losses = run(&targets, &[2, 3], &[2, 2], options).unwrap();
    let values = losses.to_vec1::<f32>().unwrap();
    assert!(values[0] == f32::INFINITY && values[1].is_finite(), "{values:?}");
    let of_samples = |loss: &Tensor| {
        let gradient = loss.sum_all().unwrap().backward().unwrap().get(&log_probs).unwrap().clone();
        [0, 1].map(|sample| floats(&gradient.narrow(1, sample, 1).unwrap()))
    };
    let [first, second] = of_samples(&losses);
    assert!(first[..6].iter().all(|value| value.is_nan()) && first[6..] == [0.0; 6], "{first:?}");
    assert!(second[..9].iter().all(|value| value.is_finite()) && second[9..] == [0.0; 3], "{second:?}");
    let [zero, same] =
        of_samples(&run(&targets, &[2, 3], &[2, 2], CtcLossOptions { zero_infinity: true, ..options }).unwrap());
    assert_eq!((&zero, &same), (&vec![0.0; 12], &second));
    // Only the samples that count.
    let mask = Tensor::new(&[0u8, 1], &Device::Cpu).unwrap();
    let masked = mask.where_cond(&losses, &losses.zeros_like().unwrap()).unwrap();
    assert_eq!(of_samples(&masked), [zero, second]);
    // Nothing becomes a number that is one.
    let nan = Tensor::full(f32::NAN, (2, 3), &Device::Cpu).unwrap();
    let one = Tensor::new(&[1u32], &Device::Cpu).unwrap();
    assert!(ctc_loss(&nan, &one, &[2], &[1], options).unwrap().to_scalar::<f32>().unwrap().is_nan());
    let none = ctc_loss(
        &tensor(&[4, 0, 3], 1),
        &Tensor::zeros((0, 2), DType::U32, &Device::Cpu).unwrap(),
        &[],
        &[],
        Default::default(),
    );
    assert!(none.unwrap().to_scalar::<f32>().unwrap().is_nan(), "the mean over no samples");

    let refused = |result: Result<Tensor>, text: &str| {
        let error = Error::from(result.unwrap_err());
        assert!(
            matches!(error, Error::Base(candle_ddp_base::Error::InvalidArgument { .. }))
                && error.to_string().contains(text),
            "{error}"
        );
    };
    let default = CtcLossOptions::default();
    refused(run(&targets, &[4, 4], &[2, 2], CtcLossOptions { blank: 3, ..default }), "less than 3");
    refused(run(&targets, &[4], &[2, 2], default), "input_lengths");
    refused(run(&targets, &[4, 4], &[2], default), "target_lengths");
    refused(run(&targets, &[4, 5], &[2, 2], default), "at most 4");
    refused(run(&targets, &[4, 4], &[2, 4], default), "S at least 4");
    refused(run(&targets.flatten_all().unwrap(), &[4, 4], &[2, 2], default), "or (4), their sum, not u32[6]");
    refused(run(&targets.to_dtype(DType::F32).unwrap(), &[4, 4], &[2, 2], default), "u32, i64 or u8");
    refused(run(&targets, &[4, 4], &[2, 2], CtcLossOptions { blank: 2, ..default }), "not the blank, 2; one is 2");
    refused(run(&(&targets + 1.0).unwrap(), &[4, 4], &[2, 3], default), "from 0 to 2");
    refused(ctc_loss(&tensor(&[3], 1), &targets, &[1], &[1], default), "f32[3]");
}
