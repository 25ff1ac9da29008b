//! Documents that share a row: attention, and a model like a GPT.
use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_ddp_nn::{
    AttentionOptions, CrossEntropyOptions, Embedding, LayerNorm, Linear, Reduction, add, autocast, cross_entropy_with,
    embedding, gelu, layer_norm, linear, reshape, rope, scaled_dot_product_attention,
    scaled_dot_product_attention_qkvpacked, transpose,
};
use candle_ddp_testing::{assert_error, fill};
use candle_nn::{VarBuilder, VarMap};
use std::ops::Range;

fn values(shape: &[usize], step: f64) -> Tensor {
    let values: Vec<f64> = (0..shape.iter().product()).map(|i: usize| (i as f64 * step).sin()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn list(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The largest difference, as a share of the largest value.
fn difference(a: &Tensor, b: &Tensor) -> f64 {
    let (a, b) = (list(a), list(b));
    assert_eq!(a.len(), b.len());
    let largest = b.iter().fold(1e-300f64, |largest, value| largest.max(value.abs()));
    a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0., f64::max) / largest
}

fn ends(lengths: &[usize]) -> Vec<usize> {
    (0..=lengths.len()).map(|count| lengths[..count].iter().sum()).collect()
}

fn cu_seq(lengths: &[usize]) -> Tensor {
    Tensor::from_iter(ends(lengths).into_iter().map(|end| end as u32), &Device::Cpu).unwrap()
}

fn ranges(lengths: &[usize]) -> Vec<Range<usize>> {
    ends(lengths).windows(2).map(|ends| ends[0]..ends[1]).collect()
}

/// The result and the gradients of q, k and v, for the gradient `dy`.
fn run(qkv: &[Tensor; 3], dy: &Tensor, options: AttentionOptions) -> [Tensor; 4] {
    let [q, k, v] = qkv.each_ref().map(|t| Var::from_tensor(t).unwrap());
    let y = scaled_dot_product_attention(&q, &k, &v, options).unwrap();
    let grads = (&y * dy).unwrap().sum_all().unwrap().backward().unwrap();
    let of = |var: &Var| grads.get(var).unwrap().clone();
    [y.detach(), of(&q), of(&k), of(&v)]
}

/// In one row and in two, with lengths of one token, of prime numbers of tokens, of several blocks of queries and keys, of a whole row,
/// and of none.
#[test]
fn documents_have_the_results_and_gradients_that_they_have_by_themselves() {
    let rows: [(usize, usize, &[usize]); 4] = [
        (1, 600, &[0, 1, 131, 0, 257, 211]),
        (1, 7, &[7]),
        (2, 601, &[601, 290, 0, 311]),
        (3, 5, &[1, 1, 1, 1, 1, 5, 2, 3, 0]),
    ];
    for (batch, tokens, lengths) in rows {
        for (is_causal, group) in [(true, 1), (false, 1), (true, 3), (false, 2)] {
            let q = values(&[batch, 2 * group, tokens, 3], 1.7);
            let qkv = [q, values(&[batch, 2, tokens, 3], 0.9), values(&[batch, 2, tokens, 5], 0.3)];
            let dy = values(&[batch, 2 * group, tokens, 5], 0.4);
            let together =
                run(&qkv, &dy, AttentionOptions { is_causal, cu_seq: Some(cu_seq(lengths)), ..Default::default() });
            for document in ranges(lengths).into_iter().filter(|document| !document.is_empty()) {
                let of = |t: &Tensor| {
                    let (row, start) = (document.start / tokens, document.start % tokens);
                    t.narrow(0, row, 1).unwrap().narrow(2, start, document.len()).unwrap()
                };
                let alone =
                    run(&qkv.each_ref().map(of), &of(&dy), AttentionOptions { is_causal, ..Default::default() });
                for (index, (together, alone)) in together.iter().zip(&alone).enumerate() {
                    let difference = difference(&of(together), alone);
                    assert!(
                        difference < 1e-12,
                        "{difference}: result {index} of {document:?} of {batch} × {lengths:?}, {is_causal}, {group}"
                    );
                }
            }
        }
    }
}

/// Not even NaN does.
#[test]
fn nothing_of_a_document_reaches_another() {
    let lengths = [5, 290, 1, 3, 131];
    let tokens = lengths.iter().sum();
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        for (is_causal, group) in [(true, 1), (false, 2)] {
            let shapes = [[1, 2 * group, tokens, 4], [1, 2, tokens, 4], [1, 2, tokens, 4], [1, 2 * group, tokens, 4]];
            let options = AttentionOptions { is_causal, cu_seq: Some(cu_seq(&lengths)), ..Default::default() };
            let results = |changed: Option<&Range<usize>>| {
                let [q, k, v, dy] = shapes.map(|shape| {
                    let t = values(&shape, 1.3 + shape[1] as f64);
                    if let Some(document) = changed {
                        let nan = Tensor::full(f64::NAN, (1, shape[1], document.len(), 4), &Device::Cpu).unwrap();
                        t.slice_set(&nan, 2, document.start).unwrap();
                    }
                    t.to_dtype(dtype).unwrap()
                });
                run(&[q, k, v], &dy, options.clone())
            };
            let before = results(None);
            for changed in ranges(&lengths) {
                for (before, after) in before.iter().zip(results(Some(&changed))) {
                    for document in ranges(&lengths) {
                        let of = |t: &Tensor| list(&t.narrow(2, document.start, document.len()).unwrap());
                        if document == changed {
                            assert!(of(&after).iter().all(|value| value.is_nan()));
                        } else {
                            let is_same = of(before) == of(&after);
                            assert!(is_same, "{document:?} after a change of {changed:?}, {dtype:?}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn documents_that_do_not_fit_are_refused() {
    let attend = |cu_seq: Tensor, mask: Option<Tensor>, keys: usize| {
        let kv = values(&[2, 1, keys, 4], 0.3);
        let options = AttentionOptions { mask, cu_seq: Some(cu_seq), ..Default::default() };
        scaled_dot_product_attention(&values(&[2, 1, 6, 4], 1.7), &kv, &kv, options)
    };
    let numbers = |numbers: &[i64]| Tensor::new(numbers, &Device::Cpu).unwrap();
    let refused = |cu_seq, text: &str| assert_error(attend(cu_seq, None, 6), &["cu_seq", text]);
    refused(numbers(&[0, 6]), "from 0 to 12");
    refused(numbers(&[0, 6, 13]), "is from 0 to 13");
    refused(numbers(&[1, 6, 12]), "is from 1 to 12");
    refused(numbers(&[-1, 6, 12]), "is from -1 to 12");
    refused(numbers(&[0, 6, -12]), "is from 0 to -12");
    refused(numbers(&[]), "has no numbers");
    refused(numbers(&[0, 6, 5, 12]), "document 1 is from 6 to 5");
    refused(numbers(&[0, 4, 12]), "a row of 6 tokens, but document 1 is from 4 to 12");
    refused(numbers(&[0, 6, 12]).to_dtype(DType::F32).unwrap(), "f32[3]");
    refused(numbers(&[0, 6, 12]).reshape((1, 3)).unwrap(), "i64[1, 3]");
    let valid = || numbers(&[0, 6, 12]);
    assert_error(attend(valid(), None, 7), &["cu_seq", "not 6 and 7"]);
    assert_error(attend(valid(), Some(values(&[6, 6], 1.)), 6), &["mask", "cu_seq"]);
    for dtype in [DType::U32, DType::I32, DType::I64] {
        assert_eq!(attend(valid().to_dtype(dtype).unwrap(), None, 6).unwrap().dims(), [2, 1, 6, 4]);
    }
    let none = Tensor::zeros((1, 2, 0, 4), DType::F32, &Device::Cpu).unwrap();
    let options = AttentionOptions { cu_seq: Some(numbers(&[0, 0])), ..Default::default() };
    assert_eq!(scaled_dot_product_attention(&none, &none, &none, options).unwrap().dims(), [1, 2, 0, 4]);
}

#[test]
fn documents_under_autocast_have_the_results_in_bf16() {
    let qkv = [[1, 4, 6, 4], [1, 2, 6, 4], [1, 2, 6, 4]].map(|shape| values(&shape, 1.1).to_dtype(DType::F32).unwrap());
    let attend = |[q, k, v]: &[Tensor; 3]| {
        let options = AttentionOptions { is_causal: true, cu_seq: Some(cu_seq(&[2, 4])), ..Default::default() };
        scaled_dot_product_attention(q, k, v, options).unwrap()
    };
    let y = autocast(DType::BF16, || attend(&qkv));
    assert_eq!(list(&y), list(&attend(&qkv.each_ref().map(|t| t.to_dtype(DType::BF16).unwrap()))));
}

const WIDTH: usize = 16;
const HEADS: usize = 4;
const VOCABULARY: usize = 23;

/// A layer with rotary positions, in which heads share keys, and one whose queries, keys and values are side by side.
struct Gpt {
    tokens: Embedding,
    projections: [Linear; 4],
    qkv: Linear,
    output: Linear,
    norms: [LayerNorm; 3],
    head: Linear,
}

impl Gpt {
    fn new(vb: VarBuilder) -> Result<Self> {
        let layer = |name: &str, to| linear(WIDTH, to, vb.pp(name));
        let norm = |name: &str| layer_norm(WIDTH, 1e-5, vb.pp(name));
        Ok(Self {
            tokens: embedding(VOCABULARY, WIDTH, vb.pp("tokens"))?,
            projections: [layer("q", WIDTH)?, layer("k", WIDTH / 2)?, layer("v", WIDTH / 2)?, layer("o", WIDTH)?],
            qkv: layer("qkv", 3 * WIDTH)?,
            output: layer("output", WIDTH)?,
            norms: [norm("norm1")?, norm("norm2")?, norm("norm3")?],
            head: layer("head", VOCABULARY)?,
        })
    }

    /// The sum of the losses of a row of tokens.
    fn loss(&self, tokens: &[u32], positions: &[u32], targets: &[i64], cu_seq: Option<Tensor>) -> Result<Tensor> {
        let (count, device) = (tokens.len(), &Device::Cpu);
        let options = || AttentionOptions { is_causal: true, cu_seq: cu_seq.clone(), ..Default::default() };
        let angles =
            Tensor::from_iter((0..80).map(|i| f64::from(i / 2) * 0.1f64.powi(i % 2)), device)?.reshape((40, 2))?;
        // The rows of the tables of positions that start anew with each document.
        let rows = Tensor::new(positions, device)?;
        let (cos, sin) = (angles.cos()?.index_select(&rows, 0)?, angles.sin()?.index_select(&rows, 0)?);
        let [q, k, v, o] = &self.projections;
        let x = self.tokens.forward(&Tensor::new(tokens, device)?.reshape((1, count))?)?;
        let normed = self.norms[0].forward(&x)?;
        let split = |layer: &Linear, heads: usize| {
            transpose(&reshape(&layer.forward(&normed)?, (1, count, heads, ()))?, 1, 2)?.contiguous()
        };
        let (q, k) = (rope(&split(q, HEADS)?, &cos, &sin)?, rope(&split(k, HEADS / 2)?, &cos, &sin)?);
        let y = scaled_dot_product_attention(&q, &k, &split(v, HEADS / 2)?, options())?;
        let x = add(&x, &o.forward(&reshape(&transpose(&y, 1, 2)?, (1, count, WIDTH))?)?)?;
        let qkv = self.qkv.forward(&self.norms[1].forward(&x)?)?;
        let x =
            add(&x, &gelu(&self.output.forward(&scaled_dot_product_attention_qkvpacked(&qkv, HEADS, options())?)?)?)?;
        let logits = self.head.forward(&self.norms[2].forward(&x)?)?.flatten(0, 1)?;
        let sum = CrossEntropyOptions { reduction: Reduction::Sum, ..Default::default() };
        cross_entropy_with(&logits, &Tensor::new(targets, device)?, sum)
    }
}

/// Positions start anew with each document, and the last token of each has no target.
#[test]
fn a_model_has_the_gradients_of_its_documents_by_themselves() {
    let lengths = [1, 13, 7, 0, 2, 1, 31];
    let varmap = VarMap::new();
    let gpt = Gpt::new(VarBuilder::from_varmap(&varmap, DType::F64, &Device::Cpu)).unwrap();
    fill(&varmap, 3);
    let tokens: Vec<u32> = (0..lengths.iter().sum::<usize>() as u32).map(|i| i * i % VOCABULARY as u32).collect();
    let of = |document: Range<usize>| {
        let next = tokens[document.clone()].iter().skip(1).map(|token| i64::from(*token)).chain([-100]);
        let targets: Vec<i64> = next.take(document.len()).collect();
        ((0..document.len() as u32).collect::<Vec<_>>(), targets)
    };
    let (positions, targets): (Vec<_>, Vec<_>) = ranges(&lengths).into_iter().map(of).unzip();
    let together = gpt.loss(&tokens, &positions.concat(), &targets.concat(), Some(cu_seq(&lengths))).unwrap();
    let documents = ranges(&lengths).into_iter().zip(positions.iter().zip(&targets));
    let alone: Vec<Tensor> = documents
        .filter(|(document, _)| !document.is_empty())
        .map(|(document, (positions, targets))| gpt.loss(&tokens[document], positions, targets, None).unwrap())
        .collect();
    let alone = Tensor::stack(&alone, 0).unwrap().sum_all().unwrap();
    assert!(difference(&together, &alone) < 1e-12);
    let (together, alone) = (together.backward().unwrap(), alone.backward().unwrap());
    for (name, var) in varmap.data().lock().unwrap().iter() {
        let difference = difference(together.get(var).unwrap(), alone.get(var).unwrap());
        assert!(
            difference < 1e-12 || list(alone.get(var).unwrap()).iter().all(|value| value.abs() < 1e-12),
            "{difference}: {name}"
        );
    }
}
