//! The loops of attention on the CPU.
use super::problem::Problem;
use crate::gemm::{Strides, gemm};
use crate::rows::{dot, maximum, sum};
use candle_core::{Result, WithDType};
use candle_ddp_tensor::borrow::with_slice;
use candle_ddp_tensor::{Element, Real, vectorise};
use rayon::prelude::*;

/// How many queries are worked on together, and how many keys.
const QUERIES: usize = 128;
const KEYS: usize = 256;
/// In how many parts the backward pass is cut at least, if there are enough keys, for threads to share.
const PARTS: usize = 16;

/// What is added to scores.
#[derive(Clone, Copy)]
pub(super) struct Mask<'a, R> {
    values: &'a [R],
    /// See [`Problem::mask_strides`].
    strides: [usize; 4],
}

/// Gives `work` the problem's mask, if it has one.
pub(super) fn with_mask<R: WithDType, O>(
    problem: &Problem,
    work: impl FnOnce(Option<Mask<R>>) -> Result<O>,
) -> Result<O> {
    let Some(mask) = &problem.mask else { return work(None) };
    let strides = problem.mask_strides();
    with_slice::<R, _>(mask, |values| work(Some(Mask { values, strides })))
}

/// A block of queries and a block of keys: the first of each, and how many.
#[derive(Clone, Copy)]
struct Block {
    /// Sample and head of the queries.
    sample: usize,
    head: usize,
    query: usize,
    queries: usize,
    key: usize,
    keys: usize,
}

impl Block {
    /// How many of the keys a query of the block sees at most.
    #[inline(always)]
    fn visible(&self, problem: &Problem, query: usize) -> usize {
        if problem.is_causal { (self.query + query + 1).saturating_sub(self.key).min(self.keys) } else { self.keys }
    }

    /// The same queries with the keys from `key` on: at most `count`, and as many as any of the queries sees.
    #[inline(always)]
    fn of_keys(self, problem: &Problem, key: usize, count: usize) -> Self {
        let block = Self { key, keys: count, ..self };
        Self { keys: block.visible(problem, self.queries - 1), ..block }
    }

    /// Completes the scores of a query of the block: the mask, and −∞ for what it does not see.
    #[inline(always)]
    fn mask<R: Real>(&self, problem: &Problem, mask: Option<Mask<R>>, query: usize, scores: &mut [R]) {
        scores[self.visible(problem, query)..].fill(R::from_f64(f64::NEG_INFINITY));
        if let Some(Mask { values, strides: [by_sample, by_head, by_query, by_key] }) = mask {
            let start = self.sample * by_sample + self.head * by_head + (self.query + query) * by_query;
            let values = &values[start + self.key * by_key..];
            if by_key == 0 {
                scores.iter_mut().for_each(|score| *score += values[0]);
            } else {
                scores.iter_mut().zip(values).for_each(|(score, value)| *score += *value);
            }
        }
    }
}

/// The elements as numbers to calculate with: themselves, or converted into `buffer`.
#[inline(always)]
fn wide<'a, T: Element>(values: &'a [T], buffer: &'a mut Vec<T::Real>) -> &'a [T::Real] {
    if let Some(values) = T::as_reals(values) {
        return values;
    }
    buffer.clear();
    buffer.extend(values.iter().map(|value| value.widen()));
    buffer
}

/// The elements, converted into `buffer` and multiplied by `scale`.
#[inline(always)]
fn scaled<'a, T: Element>(values: &[T], scale: f64, buffer: &'a mut Vec<T::Real>) -> &'a [T::Real] {
    let scale = T::Real::from_f64(scale);
    buffer.clear();
    buffer.extend(values.iter().map(|value| value.widen() * scale));
    buffer
}

/// What a thread needs besides its results.
struct Workspace<R> {
    scores: Vec<R>,
    gradients: Vec<R>,
    sums: Vec<R>,
    wide: [Vec<R>; 5],
}

impl<R: Real> Workspace<R> {
    fn new(problem: &Problem, is_backward: bool) -> Self {
        let block = QUERIES * KEYS.min(problem.keys);
        let zeros = |count| vec![R::from_f64(0.0); count];
        Self {
            scores: zeros(block),
            gradients: zeros(if is_backward { block } else { 0 }),
            sums: zeros(if is_backward { 0 } else { QUERIES * problem.value_size }),
            wide: [const { Vec::new() }; 5],
        }
    }
}

/// The results, and the normaliser of each query: the logarithm of the sum of its weights, or ∞ where it sees no key.
pub(super) fn forward<T: Element>(
    problem: &Problem,
    [q, k, v]: [&[T]; 3],
    mask: Option<Mask<T::Real>>,
) -> Result<(Vec<T>, Vec<T::Real>)> {
    let Problem { batch, heads, group, queries, keys, size, value_size, .. } = *problem;
    let mut y = vec![T::from_f64(0.0); batch * heads * queries * value_size];
    let mut normalisers = vec![T::Real::from_f64(0.0); batch * heads * queries];
    let of_heads = y.chunks_exact_mut(queries * value_size).zip(normalisers.chunks_exact_mut(queries));
    let blocks = of_heads.enumerate().flat_map(|(head, (y, normalisers))| {
        let blocks = y.chunks_mut(QUERIES * value_size).zip(normalisers.chunks_mut(QUERIES));
        blocks.enumerate().map(move |(block, results)| (head, block * QUERIES, results))
    });
    let work = |workspace: &mut Workspace<T::Real>,
                (head, query, (y, normalisers)): (_, usize, (&mut [T], &mut [_]))| {
        let q = &q[(head * queries + query) * size..][..normalisers.len() * size];
        let (k, v) = (&k[head / group * keys * size..], &v[head / group * keys * value_size..]);
        let block = Block { sample: head / heads, head: head % heads, query, queries: normalisers.len(), key: 0, keys };
        forward_block(problem, block, [q, &k[..keys * size], &v[..keys * value_size]], mask, workspace, y, normalisers)
    };
    blocks.collect::<Vec<_>>().into_par_iter().try_for_each_init(|| Workspace::new(problem, false), work)?;
    Ok((y, normalisers))
}

fn forward_block<T: Element>(
    problem: &Problem,
    block: Block,
    [q, k, v]: [&[T]; 3],
    mask: Option<Mask<T::Real>>,
    workspace: &mut Workspace<T::Real>,
    y: &mut [T],
    normalisers: &mut [T::Real],
) -> Result<()> {
    let Problem { size, value_size, .. } = *problem;
    let Workspace { scores, sums, wide: [wide_q, wide_k, wide_v, ..], .. } = workspace;
    let (zero, one) = (T::Real::from_f64(0.0), T::Real::from_f64(1.0));
    let infinity = T::Real::from_f64(f64::INFINITY);
    let q = scaled(q, problem.scale, wide_q);
    let (mut max, mut total) = ([-infinity; QUERIES], [zero; QUERIES]);
    sums.fill(zero);
    for key in (0..block.keys).step_by(KEYS) {
        let block = block.of_keys(problem, key, KEYS.min(block.keys - key));
        if block.keys == 0 {
            break;
        }
        let k = wide(&k[key * size..][..block.keys * size], wide_k);
        let v = wide(&v[key * value_size..][..block.keys * value_size], wide_v);
        let (extents, transposed) = ((block.queries, block.keys, size), Strides::transposed(size));
        gemm(extents, scores, false, (q, Strides::rows(size)), (k, transposed), 1)?;
        let rows = scores.chunks_exact_mut(block.keys).zip(sums.chunks_exact_mut(value_size)).take(block.queries);
        for (query, (scores, sums)) in rows.enumerate() {
            block.mask(problem, mask, query, scores);
            weigh(scores, sums, &mut max[query], &mut total[query]);
        }
        let (extents, weights) = ((block.queries, value_size, block.keys), Strides::rows(block.keys));
        gemm(extents, sums, true, (scores, weights), (v, Strides::rows(value_size)), 1)?;
    }
    let rows = y.chunks_exact_mut(value_size).zip(sums.chunks_exact(value_size)).zip(normalisers);
    for (((y, sums), normaliser), (max, total)) in rows.zip(max.iter().zip(&total)) {
        let sees_nothing = *total == zero;
        *normaliser = if sees_nothing { infinity } else { *max + total.ln() };
        let scale = if sees_nothing { zero } else { one / *total };
        scale_row(y, sums, scale);
    }
    Ok(())
}

/// Makes weights of the scores of some more keys of a query, e^(score − maximum). Updates what is known of its keys
/// so far: the sums of values, the maximum of the scores, and the sum of the weights.
fn weigh<T: Real>(scores: &mut [T], sums: &mut [T], max: &mut T, total: &mut T) {
    vectorise!(move || {
        let new = maximum(scores, *max);
        if new == T::from_f64(f64::NEG_INFINITY) {
            scores.fill(T::from_f64(0.0));
            return;
        }
        // What was added up before was relative to another maximum.
        let correction = (*max - new).exp();
        for score in &mut *scores {
            *score = (*score - new).exp();
        }
        *total = *total * correction + sum(scores);
        *max = new;
        if correction != T::from_f64(1.0) {
            for sum in sums {
                *sum *= correction;
            }
        }
    })
}

fn scale_row<T: Element>(y: &mut [T], sums: &[T::Real], scale: T::Real) {
    vectorise!(move || {
        for (y, sum) in y.iter_mut().zip(sums) {
            *y = T::narrow(*sum * scale);
        }
    })
}

fn weights_of_row<T: Real>(scores: &mut [T], normaliser: T) {
    vectorise!(move || {
        for score in scores {
            *score = (*score - normaliser).exp();
        }
    })
}

/// Makes the gradients of scores of weights.
fn gradients_of_row<T: Real>(weights: &mut [T], gradients: &[T], sum: T, scale: T) {
    vectorise!(move || {
        for (weight, gradient) in weights.iter_mut().zip(gradients) {
            *weight *= (*gradient - sum) * scale;
        }
    })
}

fn product_of_rows<T: Element>(y: &[T], dy: &[T]) -> T::Real {
    vectorise!(move || dot(y, dy))
}

fn add<T: Real>(total: &mut [T], values: &[T]) {
    vectorise!(move || {
        for (total, value) in total.iter_mut().zip(values) {
            *total += *value;
        }
    })
}

/// The gradients of q, k and v.
pub(super) fn backward<T: Element>(
    problem: &Problem,
    qkv: [&[T]; 3],
    [y, dy]: [&[T]; 2],
    normalisers: &[T::Real],
    mask: Option<Mask<T::Real>>,
) -> Result<[Vec<T::Real>; 3]> {
    let Problem { batch, heads, group, queries, keys, size, value_size, .. } = *problem;
    let zeros = |count| vec![T::Real::from_f64(0.0); count];
    let pairs = batch * heads / group;
    let (mut dk, mut dv) = (zeros(pairs * keys * size), zeros(pairs * keys * value_size));
    let mut products = zeros(batch * heads * queries);
    products
        .par_iter_mut()
        .zip(y.par_chunks_exact(value_size))
        .zip(dy.par_chunks_exact(value_size))
        .for_each(|((product, y), dy)| *product = product_of_rows(y, dy));
    // Keys are cut in parts, each of which has its own gradient of the queries; how many does not depend on the
    // threads.
    let blocks = keys.div_ceil(KEYS);
    let part = blocks.div_ceil(PARTS.div_ceil(pairs)) * KEYS;
    let parts = keys.div_ceil(part);
    let dq_len = group * queries * size;
    let mut dq = zeros(pairs * parts * dq_len);
    let of_pairs = dk.chunks_exact_mut(keys * size).zip(dv.chunks_exact_mut(keys * value_size));
    let of_pairs = of_pairs.zip(dq.chunks_exact_mut(parts * dq_len)).enumerate();
    let tasks = of_pairs.flat_map(|(pair, ((dk, dv), dq))| {
        let parts = dk.chunks_mut(part * size).zip(dv.chunks_mut(part * value_size)).zip(dq.chunks_exact_mut(dq_len));
        parts.enumerate().map(move |(index, ((dk, dv), dq))| (pair, index * part, [dq, dk, dv]))
    });
    let work = |workspace: &mut Workspace<T::Real>, (pair, key, gradients): (_, _, [&mut [T::Real]; 3])| {
        let task = BackwardTask { problem, qkv, dy, normalisers, products: &products, mask, pair };
        task.run(key, gradients, workspace)
    };
    tasks.collect::<Vec<_>>().into_par_iter().try_for_each_init(|| Workspace::new(problem, true), work)?;
    if parts > 1 {
        let mut total = zeros(pairs * dq_len);
        total.par_chunks_exact_mut(dq_len).zip(dq.par_chunks_exact(parts * dq_len)).for_each(|(total, dq)| {
            for dq in dq.chunks_exact(dq_len) {
                add(total, dq);
            }
        });
        dq = total;
    }
    Ok([dq, dk, dv])
}

/// The backward pass for one head of keys, and the heads of queries that see it.
struct BackwardTask<'a, T: Element> {
    problem: &'a Problem,
    qkv: [&'a [T]; 3],
    dy: &'a [T],
    normalisers: &'a [T::Real],
    /// Σ y dy of each query.
    products: &'a [T::Real],
    mask: Option<Mask<'a, T::Real>>,
    pair: usize,
}

impl<T: Element> BackwardTask<'_, T> {
    /// Adds to the gradients of the queries, and of the keys and values from `first` on.
    fn run(&self, first: usize, [dq, dk, dv]: [&mut [T::Real]; 3], workspace: &mut Workspace<T::Real>) -> Result<()> {
        let Problem { heads, group, queries, keys, size, value_size, .. } = *self.problem;
        let Workspace { scores, gradients, wide: [wide_q, wide_k, wide_v, wide_dy, scaled_q], .. } = workspace;
        let scale = T::Real::from_f64(self.problem.scale);
        let (by_key, by_value) = (Strides::rows(size), Strides::rows(value_size));
        let [q, k, v] = self.qkv;
        let (k, v) = (&k[self.pair * keys * size..], &v[self.pair * keys * value_size..]);
        let key_blocks = dk.chunks_mut(KEYS * size).zip(dv.chunks_mut(KEYS * value_size)).enumerate();
        for (key_block, (dk, dv)) in key_blocks {
            let (key, count) = (first + key_block * KEYS, dk.len() / size);
            let k = wide(&k[key * size..][..count * size], wide_k);
            let v = wide(&v[key * value_size..][..count * value_size], wide_v);
            for (member, dq) in dq.chunks_exact_mut(queries * size).enumerate() {
                let head = self.pair * group + member;
                for (query_block, dq) in dq.chunks_mut(QUERIES * size).enumerate() {
                    let (query, rows) = (query_block * QUERIES, dq.len() / size);
                    let (sample, head_of_sample) = (head / heads, head % heads);
                    let block = Block { sample, head: head_of_sample, query, queries: rows, key, keys: count };
                    let block = block.of_keys(self.problem, key, count);
                    let count = block.keys;
                    if count == 0 {
                        continue;
                    }
                    let row = head * queries + query;
                    let q = &q[row * size..][..rows * size];
                    let (scaled_q, q) = (scaled(q, self.problem.scale, scaled_q), wide(q, wide_q));
                    let dy = wide(&self.dy[row * value_size..][..rows * value_size], wide_dy);
                    let transposed = Strides::transposed(size);
                    gemm((rows, count, size), scores, false, (scaled_q, by_key), (k, transposed), 1)?;
                    let normalisers = &self.normalisers[row..][..rows];
                    for (query, (scores, normaliser)) in scores.chunks_exact_mut(count).zip(normalisers).enumerate() {
                        block.mask(self.problem, self.mask, query, scores);
                        weights_of_row(scores, *normaliser);
                    }
                    let transposed = Strides::transposed(count);
                    gemm((count, value_size, rows), dv, true, (scores, transposed), (dy, by_value), 1)?;
                    let of_value = Strides::transposed(value_size);
                    gemm((rows, count, value_size), gradients, false, (dy, by_value), (v, of_value), 1)?;
                    let sums = &self.products[row..][..rows];
                    let rows_of = scores.chunks_exact_mut(count).zip(gradients.chunks_exact(count)).zip(sums);
                    for ((weights, gradients), sum) in rows_of {
                        gradients_of_row(weights, gradients, *sum, scale);
                    }
                    gemm((rows, size, count), dq, true, (scores, Strides::rows(count)), (k, by_key), 1)?;
                    gemm((count, size, rows), dk, true, (scores, transposed), (q, by_key), 1)?;
                }
            }
        }
        Ok(())
    }
}
