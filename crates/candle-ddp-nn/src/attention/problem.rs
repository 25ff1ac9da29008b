//! The extents and options of one attention call.
use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_ddp_tensor::Error;
use candle_ddp_tensor::accumulator;
use candle_ddp_tensor::error::{describe, describe_placed};
use candle_ddp_tensor::function::{argument, is_tracked};

/// Options of [`scaled_dot_product_attention`](super::scaled_dot_product_attention). The default is PyTorch's.
#[derive(Clone, Debug, Default)]
pub struct AttentionOptions {
    /// The keys that each query sees, in a shape that can be broadcast to (B, H, Tq, Tk). A u8 mask is not 0 for
    /// visible keys; a floating-point mask is added to the scores. It gets no gradient. `None`, the default: all
    /// keys.
    pub mask: Option<Tensor>,
    /// Whether query i sees only the keys up to i. Cannot be combined with a mask.
    pub is_causal: bool,
    /// The factor of the products of queries and keys; 1 / √D by default.
    pub scale: Option<f64>,
    /// Where the documents that share the rows begin, and where the last one ends: the `cu_seq_q` and `cu_seq_k` of PyTorch's
    /// `varlen_attn`. For N documents these are N + 1 numbers of dtype u32, i32 or i64, from 0 to B × T, counted through all rows.
    /// A query sees only the keys of its own document, and with `is_causal` only the keys up to itself. No time and no memory is spent on
    /// other pairs. A document may be empty, but must not cross the end of a row. There must be as many queries as keys, and
    /// no mask. The numbers should be on the CPU, which reads them: each call would wait for a GPU. `None`, the
    /// default: each row is one document.
    pub cu_seq: Option<Tensor>,
}

/// Neighbouring queries of a sample, and the neighbouring keys that they may see.
#[derive(Clone, Copy, Debug)]
pub(super) struct Document {
    pub(super) sample: usize,
    /// The first query, and the number of queries.
    pub(super) query: usize,
    pub(super) queries: usize,
    pub(super) key: usize,
    pub(super) keys: usize,
}

/// Sizes, and which keys queries see.
#[derive(Debug)]
pub(super) struct Problem {
    pub(super) batch: usize,
    /// The number of heads of queries.
    pub(super) heads: usize,
    /// The number of heads of queries that share keys and values.
    pub(super) group: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    /// The length of queries and keys.
    pub(super) size: usize,
    /// The length of values.
    pub(super) value_size: usize,
    pub(super) scale: f64,
    pub(super) is_causal: bool,
    /// The mask that is added to scores, of rank 4 and dtype [`accumulator`], contiguous.
    pub(super) mask: Option<Tensor>,
    /// In their order in memory, none empty, together all rows.
    pub(super) documents: Vec<Document>,
}

impl Problem {
    pub(super) fn new([q, k, v]: [&Tensor; 3], options: &AttentionOptions) -> Result<Self> {
        let invalid = |argument, reason: String| Err(Error::invalid(argument, reason).into());
        let (&[batch, heads, queries, size], &[kb, key_heads, keys, key_size], &[vb, value_heads, values, value_size]) =
            (q.dims(), k.dims(), v.dims())
        else {
            return invalid("the inputs of attention", refusal([q, k, v]));
        };
        let fits = [kb, vb] == [batch; 2] && key_heads == value_heads && keys == values && size == key_size;
        let groups = key_heads > 0 && heads.is_multiple_of(key_heads);
        if !fits || !groups || size == 0 || value_size == 0 || [k.dtype(), v.dtype()] != [q.dtype(); 2] {
            return invalid("the inputs of attention", refusal([q, k, v]));
        }
        let others = [Some(k), Some(v), options.mask.as_ref()];
        if let Some(other) = others.into_iter().flatten().find(|other| !other.device().same_device(q.device())) {
            let reason = format!(
                "all must have the same dtype and device, but one is {} and the queries are {}",
                describe_placed(other),
                describe_placed(q)
            );
            return invalid("the inputs of attention", reason);
        }
        let mask = match &options.mask {
            None => None,
            Some(_) if options.is_causal || options.cu_seq.is_some() => {
                let other = if options.is_causal { "is_causal" } else { "cu_seq" };
                return invalid(
                    "the mask of attention",
                    format!("it cannot be combined with {other}: set one of the two"),
                );
            }
            Some(mask) => Some(additive(mask, [batch, heads, queries, keys], accumulator(q.dtype()))?),
        };
        let scale = options.scale.unwrap_or(1.0 / (size as f64).sqrt());
        let (group, is_causal) = (heads / key_heads, options.is_causal);
        let documents = match &options.cu_seq {
            Some(cu_seq) => documents(cu_seq, batch, [queries, keys])?,
            None => (0..batch).map(|sample| Document { sample, query: 0, queries, key: 0, keys }).collect(),
        };
        Ok(Self { batch, heads, group, queries, keys, size, value_size, scale, is_causal, mask, documents })
    }

    /// Whether documents share rows.
    pub(super) fn is_packed(&self) -> bool {
        self.documents.iter().any(|document| document.queries < self.queries)
    }

    /// The documents of each of the samples' `heads` heads, with the number of the head, in their order in memory.
    pub(super) fn by_head(&self, heads: usize) -> impl Iterator<Item = (usize, Document)> {
        let samples = self.documents.chunk_by(|document, next| document.sample == next.sample);
        samples.flat_map(move |documents| {
            (0..heads)
                .flat_map(move |head| documents.iter().map(move |document| (document.sample * heads + head, *document)))
        })
    }

    /// The problem of one document.
    pub(super) fn alone(&self, document: &Document) -> Self {
        let Document { queries, keys, .. } = *document;
        let documents = vec![Document { sample: 0, query: 0, key: 0, ..*document }];
        Self { batch: 1, queries, keys, mask: None, documents, ..*self }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.batch * self.heads * self.queries * self.keys == 0
    }

    /// The number of pairs of a sample and a head of keys.
    pub(super) fn items(&self) -> usize {
        self.batch * self.heads / self.group
    }

    /// The number of queries of each pair.
    pub(super) fn rows_of_item(&self) -> usize {
        self.group * self.queries
    }

    /// The strides of the mask by sample, head, query and key: 0 for a dimension that is broadcast.
    pub(super) fn mask_strides(&self) -> [usize; 4] {
        let Some(mask) = &self.mask else { return [0; 4] };
        let dims = mask.dims();
        std::array::from_fn(|index| if dims[index] > 1 { dims[index + 1..].iter().product() } else { 0 })
    }

    pub(super) fn output_shape(&self) -> Shape {
        Shape::from((self.batch, self.heads, self.queries, self.value_size))
    }
}

fn refusal(qkv: [&Tensor; 3]) -> String {
    let [q, k, v] = qkv.map(|t| describe(t.dtype(), t.shape()));
    format!(
        "they must be (B, H, Tq, D), (B, H′, Tk, D) and (B, H′, Tk, E) of one dtype, with H a multiple of H′ and none \
         of H′, D and E equal to 0, not {q}, {k} and {v}"
    )
}

/// The documents that are not empty.
fn documents(cu_seq: &Tensor, batch: usize, [queries, keys]: [usize; 2]) -> Result<Vec<Document>> {
    let invalid = |reason: String| Err(Error::invalid("cu_seq", reason).into());
    if queries != keys {
        let reason = format!("each token of a document must have a query and a key, not {queries} and {keys} in all");
        return invalid(reason);
    }
    if cu_seq.rank() != 1 || !matches!(cu_seq.dtype(), DType::U32 | DType::I32 | DType::I64) {
        let is = describe(cu_seq.dtype(), cu_seq.shape());
        return invalid(format!("it must be (N + 1) of dtype u32, i32 or i64 for N documents, not {is}"));
    }
    let numbers = cu_seq.to_device(&Device::Cpu)?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let all = batch * queries;
    let (first, last) = (numbers.first().copied(), numbers.last().copied());
    if first != Some(0) || last.and_then(|last| usize::try_from(last).ok()) != Some(all) {
        let is = match first.zip(last) {
            Some((first, last)) => format!("is from {first} to {last}"),
            None => "has no numbers".to_string(),
        };
        return invalid(format!("it must be from 0 to {all}, the number of tokens in all rows, but {is}"));
    }
    let mut documents = Vec::with_capacity(numbers.len());
    for (number, ends) in numbers.windows(2).enumerate() {
        let [start, end] = [ends[0], ends[1]];
        if end < start {
            return invalid(format!(
                "no document may have a negative length, but document {number} is from {start} to {end}"
            ));
        }
        let (start, count) = (start as usize, (end - start) as usize);
        if count == 0 {
            continue;
        }
        let (sample, first) = (start / queries, start % queries);
        if first + count > queries {
            let reason = format!(
                "no document may cross the end of a row of {queries} tokens, but document {number} is from {start} to {end}"
            );
            return invalid(reason);
        }
        documents.push(Document { sample, query: first, queries: count, key: first, keys: count });
    }
    Ok(documents)
}

/// The mask in the form that is added to scores.
fn additive(mask: &Tensor, [batch, heads, queries, keys]: [usize; 4], dtype: DType) -> Result<Tensor> {
    let is = describe(mask.dtype(), mask.shape());
    let expected = [batch, heads, queries, keys];
    let given = mask.dims();
    let fits = given.len() <= 4
        && given.iter().rev().zip(expected.iter().rev()).all(|(given, expected)| *given == 1 || given == expected);
    if !fits || !(mask.dtype() == DType::U8 || mask.dtype().is_float()) {
        let reason =
            format!("it must be u8 or floating-point, of a shape that can be broadcast to {expected:?}, not {is}");
        return Err(Error::invalid("the mask of attention", reason).into());
    }
    if is_tracked(mask) {
        let reason = format!(
            "it must not require a gradient, since none is computed for it, but it is a tracked {is}: \
                              `detach` it"
        );
        return Err(Error::invalid("the mask of attention", reason).into());
    }
    let mask = argument(mask).reshape([&[1, 1, 1, 1][given.len()..], given].concat())?;
    let mask = if mask.dtype() == DType::U8 {
        let (seen, unseen) = (Tensor::new(0f32, mask.device())?, Tensor::new(f32::NEG_INFINITY, mask.device())?);
        mask.where_cond(&seen.broadcast_as(mask.shape())?, &unseen.broadcast_as(mask.shape())?)?
    } else {
        mask
    };
    mask.to_dtype(dtype)?.contiguous()
}
