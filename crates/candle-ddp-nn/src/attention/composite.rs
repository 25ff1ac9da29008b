//! Attention by candle's operations, some queries at a time.
use super::problem::Problem;
use candle_core::{D, DType, Result, Tensor};
use candle_ddp_tensor::accumulator;

/// The number of queries that are processed together.
const QUERIES: usize = 512;

/// The result, and the normaliser of each query.
pub(super) fn forward(problem: &Problem, qkv: &[Tensor; 3]) -> Result<(Tensor, Tensor)> {
    let [q, k, v] = spread(problem, qkv)?;
    let (mut results, mut normalisers) = (Vec::new(), Vec::new());
    for query in (0..problem.queries).step_by(QUERIES) {
        let scores = scores(problem, query, &rows(problem, &q, query)?, &k)?;
        // Finite even if a query sees nothing, so that its weights become zero.
        let max = scores.max_keepdim(D::Minus1)?.maximum(-1e30)?;
        let weights = scores.broadcast_sub(&max)?.exp()?;
        let sum = weights.sum_keepdim(D::Minus1)?.maximum(1e-30)?;
        results.push(weights.broadcast_div(&sum)?.to_dtype(v.dtype())?.matmul(&v)?);
        normalisers.push((max + sum.log()?)?);
    }
    Ok((Tensor::cat(&results, 2)?, Tensor::cat(&normalisers, 2)?))
}

/// The gradients of q, k and v.
pub(super) fn backward(
    problem: &Problem,
    qkv: &[Tensor; 3],
    y: &Tensor,
    normalisers: &Tensor,
    dy: &Tensor,
) -> Result<[Tensor; 3]> {
    let [q, k, v] = spread(problem, qkv)?;
    let (dtype, acc) = (q.dtype(), normalisers.dtype());
    let products = (y.to_dtype(acc)? * dy.to_dtype(acc)?)?.sum_keepdim(D::Minus1)?;
    let mut dq = Vec::new();
    let (mut dk, mut dv) = (None, None);
    let add = |sum: Option<Tensor>, next: Tensor| {
        Ok::<_, candle_core::Error>(Some(match sum {
            Some(sum) => (sum + next)?,
            None => next,
        }))
    };
    for query in (0..problem.queries).step_by(QUERIES) {
        let of = |t: &Tensor| rows(problem, t, query);
        let (q, dy) = (of(&q)?, of(dy)?);
        let weights = scores(problem, query, &q, &k)?.broadcast_sub(&of(normalisers)?)?.exp()?;
        dv = add(dv, weights.to_dtype(dtype)?.transpose(2, 3)?.contiguous()?.matmul(&dy)?.to_dtype(acc)?)?;
        let gradients = dy.matmul(&v.transpose(2, 3)?.contiguous()?)?.to_dtype(acc)?;
        let gradients = ((weights * gradients.broadcast_sub(&of(&products)?)?)? * problem.scale)?.to_dtype(dtype)?;
        dq.push(gradients.matmul(&k)?);
        dk = add(dk, gradients.transpose(2, 3)?.contiguous()?.matmul(&q)?.to_dtype(acc)?)?;
    }
    let join = |sum: Option<Tensor>, like: &Tensor| match sum {
        None => like.zeros_like(),
        Some(sum) => {
            let (_, _, keys, size) = sum.dims4()?;
            let shape = (problem.batch, problem.heads / problem.group, problem.group, keys, size);
            sum.reshape(shape)?.sum(2)?.to_dtype(dtype)
        }
    };
    Ok([Tensor::cat(&dq, 2)?, join(dk, &qkv[1])?, join(dv, &qkv[2])?])
}

/// Makes `x` contiguous, with as many heads of keys and values as of queries.
fn spread(problem: &Problem, [q, k, v]: &[Tensor; 3]) -> Result<[Tensor; 3]> {
    let repeat = |t: &Tensor| {
        let (batch, heads, keys, size) = t.dims4()?;
        let t = t.unsqueeze(2)?.broadcast_as((batch, heads, problem.group, keys, size))?;
        t.reshape((batch, problem.heads, keys, size))?.contiguous()
    };
    Ok([q.contiguous()?, repeat(k)?, repeat(v)?])
}

/// The rows of the queries from `query` on.
fn rows(problem: &Problem, t: &Tensor, query: usize) -> Result<Tensor> {
    t.narrow(2, query, QUERIES.min(problem.queries - query))?.contiguous()
}

/// The scores of the queries `q`, of which the first is number `query`.
fn scores(problem: &Problem, query: usize, q: &Tensor, k: &Tensor) -> Result<Tensor> {
    let acc = accumulator(q.dtype());
    let scores = (q.matmul(&k.transpose(2, 3)?.contiguous()?)?.to_dtype(acc)? * problem.scale)?;
    let count = q.dim(2)?;
    let scores = match &problem.mask {
        Some(mask) if mask.dim(2)? > 1 => scores.broadcast_add(&mask.narrow(2, query, count)?)?,
        Some(mask) => scores.broadcast_add(mask)?,
        None => scores,
    };
    if !problem.is_causal {
        return Ok(scores);
    }
    let (device, keys) = (q.device(), problem.keys as u32);
    let queries = Tensor::arange(query as u32, (query + count) as u32, device)?.unsqueeze(1)?;
    let keys = Tensor::arange(0, keys, device)?.unsqueeze(0)?;
    let seen = queries.broadcast_ge(&keys)?.broadcast_as(scores.shape())?;
    let unseen = Tensor::new(f32::NEG_INFINITY, device)?.to_dtype(acc)?.broadcast_as(scores.shape())?;
    debug_assert_eq!(seen.dtype(), DType::U8);
    seen.where_cond(&scores, &unseen)
}
