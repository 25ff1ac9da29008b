//! Activation checkpointing changes memory use and nothing else.
use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_ddp_nn::checkpoint;
use candle_ddp_testing::checkpointed::{Kind, NAMES, Net, fill};
use candle_ddp_testing::{assert_close, assert_error, floats, tensor, var};
use candle_nn::{VarBuilder, VarMap};
use std::sync::atomic::Ordering;

#[test]
fn results_and_gradients_match_those_without_a_checkpoint() {
    let gradients = |kind| {
        let varmap = VarMap::new();
        let net = Net::new(kind, &VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu)).unwrap();
        fill(&varmap);
        let x = Var::from_tensor(&tensor(&[4, 6], 9)).unwrap();
        let mut all = Vec::new();
        for _ in 0..2 {
            let y = net.forward(&x).unwrap();
            let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
            all.push(floats(&y));
            all.extend(NAMES.iter().map(|name| floats(grads.get(&var(&varmap, name)).unwrap())));
            all.push(floats(grads.get(&x).unwrap()));
        }
        (all.concat(), net.runs.load(Ordering::Relaxed))
    };
    let (plain, once) = gradients(Kind::Plain);
    assert_eq!(once, 2);
    for kind in [Kind::Checkpoint, Kind::Nested] {
        let (checkpointed, twice) = gradients(kind);
        assert_eq!(twice, 4);
        assert_close(&checkpointed, &plain, 1e-6, "outputs and gradients");
    }
}

#[test]
fn the_checkpoint_returns_the_functions_error() {
    let x = Var::from_tensor(&tensor(&[2, 2], 1)).unwrap();
    let error = checkpoint::<_, Tensor>(&[x.as_tensor()], |_| candle_core::bail!("no such layer")).unwrap_err();
    assert!(error.to_string().contains("no such layer"), "{error}");
    assert_error(checkpoint(&[x.as_tensor()], |x| x[0].argmax(1)), &["must be floating-point for gradients to flow"]);
    let error = checkpoint(&[x.as_tensor()], |x| Ok((x[0].argmax(1)?, Vec::<Tensor>::new()))).unwrap_err().to_string();
    assert!(error.contains("must be floating-point for gradients to flow, not u32[2]"), "{error}");
}

/// A pair, a list and a triple, of which some are of 16 bits, some have no gradient, and some are not used.
#[test]
fn several_results_have_the_values_and_gradients_that_they_have_without_a_checkpoint() {
    type Results = (Tensor, Vec<Tensor>, (Tensor, Tensor));
    for is_used in [true, false] {
        let run = |is_checkpointed: bool| {
            let varmap = VarMap::new();
            let net = Net::new(Kind::Plain, &VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu)).unwrap();
            fill(&varmap);
            let x = Var::from_tensor(&tensor(&[4, 6], 9)).unwrap();
            let of = net.clone();
            let function = move |x: &[Tensor]| -> Result<Results> {
                let y = of.middle(&x[0])?;
                let half = y.to_dtype(DType::BF16)?;
                Ok((y.t()?.sqr()?, vec![half, of.last(&y)?.narrow(1, 1, 2)?], (y.argmax(1)?, y.mean_all()?)))
            };
            let (a, list, (best, mean)) = match is_checkpointed {
                true => checkpoint(&[&x], function).unwrap(),
                false => function(&[x.as_tensor().clone()]).unwrap(),
            };
            assert_eq!((list[0].dtype(), best.dtype(), mean.rank()), (DType::BF16, DType::U32, 0));
            let mut loss = (a.sum_all().unwrap() + mean.sqr().unwrap()).unwrap();
            if is_used {
                let half = list[0].sin().unwrap().to_dtype(DType::F32).unwrap().sum_all().unwrap();
                loss = (loss + (half * list[1].sqr().unwrap().sum_all().unwrap()).unwrap()).unwrap();
            }
            let grads = loss.backward().unwrap();
            let values = [&a, &list[0].to_dtype(DType::F32).unwrap(), &list[1], &mean].map(floats).concat();
            let best = best.to_vec1::<u32>().unwrap();
            let used = NAMES.iter().filter(|name| **name != "a.weight");
            let mut gradients: Vec<Vec<f32>> =
                used.map(|name| floats(grads.get(&var(&varmap, name)).unwrap())).collect();
            gradients.push(floats(grads.get(&x).unwrap()));
            (best, values, gradients.concat(), net.runs.load(Ordering::Relaxed))
        };
        let (plain, checkpointed) = (run(false), run(true));
        assert_eq!((&checkpointed.0, &checkpointed.1), (&plain.0, &plain.1));
        assert_close(&checkpointed.2, &plain.2, 1e-5, "gradients");
        assert_eq!((plain.3, checkpointed.3), (1, 2));
    }
}

#[test]
fn results_may_be_inputs_or_views_or_constants_and_need_no_inputs() {
    let x = Var::from_tensor(&tensor(&[4, 6], 1)).unwrap();
    let function = |x: &[Tensor]| -> Result<Vec<Tensor>> {
        let ones = Tensor::ones(3, DType::F32, &Device::Cpu)?;
        Ok(vec![x[0].clone(), x[0].narrow(1, 1, 2)?, ones, x[0].clone(), x[0].narrow(0, 0, 0)?])
    };
    let gradient = |results: Vec<Tensor>| {
        let terms = results.iter().zip(1..).map(|(result, factor)| (result.sqr()? * f64::from(factor))?.sum_all());
        let loss = terms.reduce(|sum, term| sum? + term?).unwrap().unwrap();
        floats(loss.backward().unwrap().get(&x).unwrap())
    };
    let plain = gradient(function(&[x.as_tensor().clone()]).unwrap());
    assert_close(&gradient(checkpoint(&[&x], function).unwrap()), &plain, 1e-6, "several");
    // One alone, and none.
    let same = gradient(vec![checkpoint(&[&x], |x| Ok(x[0].clone())).unwrap()]);
    assert_close(&same, &floats(&(x.as_tensor() * 2.).unwrap()), 1e-6, "the input");
    let captured = x.clone();
    let (a, b) = checkpoint(&[], move |_| Ok(((captured.as_tensor() * 3.)?, captured.sqr()?))).unwrap();
    let grads = (a.sum_all().unwrap() + b.sum_all().unwrap()).unwrap().backward().unwrap();
    assert_close(floats(grads.get(&x).unwrap()).as_slice(), &floats(&x.affine(2., 3.).unwrap()), 1e-6, "no inputs");
}
