//! The loops of attention on the CPU.
use super::problem::{Document, Problem};
use crate::gemm::{self, Strides, gemm, is_wide, same};
use crate::rows::{dot, maximum, sum};
use candle_core::{DType, Result, WithDType};
use candle_ddp_tensor::borrow::with_slice;
use candle_ddp_tensor::parallel::Each;
use candle_ddp_tensor::{Element, Real, vectorise};
use rayon::prelude::*;

/// The numbers of queries and of keys that are processed together.
const QUERIES: usize = 128;
const KEYS: usize = 256;
/// The minimum number of parts into which the backward pass is cut for threads to share, if there are enough keys.
const PARTS: usize = 16;

/// The mask that is added to scores.
#[derive(Clone, Copy)]
pub(super) struct Mask<'a, R> {
    values: &'a [R],
    /// See [`Problem::mask_strides`].
    strides: [usize; 4],
}

/// Passes the problem's mask to `work`, if it has one.
pub(super) fn with_mask<R: WithDType, O>(
    problem: &Problem,
    work: impl FnOnce(Option<Mask<R>>) -> Result<O>,
) -> Result<O> {
    let Some(mask) = &problem.mask else { return work(None) };
    let strides = problem.mask_strides();
    with_slice::<R, _>(mask, |values| work(Some(Mask { values, strides })))
}

/// A block of a document's queries and a block of its keys: the first one and the number of each.
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
    /// The largest number of keys that a query of the block sees.
    #[inline(always)]
    fn visible(&self, problem: &Problem, query: usize) -> usize {
        if problem.is_causal { (self.query + query + 1).saturating_sub(self.key).min(self.keys) } else { self.keys }
    }

    /// The same queries with at most `count` keys from `key` on, limited to those that any of the queries sees.
    #[inline(always)]
    fn of_keys(self, problem: &Problem, key: usize, count: usize) -> Self {
        let block = Self { key, keys: count, ..self };
        Self { keys: block.visible(problem, self.queries - 1), ..block }
    }

    /// Completes the scores of a query of the block: multiplies them by `scale`, applies the mask, and sets the scores of
    /// hidden keys to −∞.
    #[inline(always)]
    fn complete<R: Real>(&self, problem: &Problem, scale: R, mask: Option<Mask<R>>, query: usize, scores: &mut [R]) {
        if scale != R::from_f64(1.0) {
            scale_by(scores, scale);
        }
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

/// The elements as factors of products: themselves, or converted into `buffer`.
#[inline(always)]
fn factors<'a, T: Element, F: Element<Real = T::Real>>(values: &'a [T], buffer: &'a mut Vec<F>) -> &'a [F] {
    if let Some(values) = same(values) {
        return values;
    }
    buffer.clear();
    vectorise!(|| buffer.extend(values.iter().map(|value| F::narrow(value.widen()))));
    buffer
}

/// Weights and gradients as factors of products. Those in bf16 are rounded, as in PyTorch, also for a processor that multiplies bf16 in f32.
#[inline(always)]
fn rounded<'a, T: Element, F: Element<Real = T::Real>>(values: &'a [T::Real], buffer: &'a mut Vec<F>) -> &'a [F] {
    if T::DTYPE != DType::BF16 || !is_wide::<F>() {
        return factors(values, buffer);
    }
    buffer.clear();
    vectorise!(|| buffer.extend(values.iter().map(|value| F::narrow(T::narrow(*value).widen()))));
    buffer
}

/// Queries as factors of products, and the factor that these products still lack: queries that are converted anyway
/// are multiplied by `scale` as well.
#[inline(always)]
fn scaled<'a, T: Element, F: Element<Real = T::Real>>(
    values: &'a [T],
    scale: f64,
    buffer: &'a mut Vec<F>,
) -> (&'a [F], T::Real) {
    let scale = T::Real::from_f64(scale);
    if !is_wide::<F>() {
        return (factors(values, buffer), scale);
    }
    buffer.clear();
    buffer.extend(values.iter().map(|value| F::narrow(value.widen() * scale)));
    (buffer, T::Real::from_f64(1.0))
}

/// A thread's memory besides its results, with factors of type `F`.
struct Workspace<F: Element> {
    scores: Vec<F::Real>,
    gradients: Vec<F::Real>,
    sums: Vec<F::Real>,
    factors: [Vec<F>; 6],
}

impl<F: Element> Workspace<F> {
    fn new(problem: &Problem, is_backward: bool) -> Self {
        let longest = problem.documents.iter().map(|document| document.keys).max().unwrap_or(0);
        let block = QUERIES * KEYS.min(longest);
        let zeros = |count| vec![F::Real::from_f64(0.0); count];
        Self {
            scores: zeros(block),
            gradients: zeros(if is_backward { block } else { 0 }),
            sums: zeros(if is_backward { 0 } else { QUERIES * problem.value_size }),
            factors: [const { Vec::new() }; 6],
        }
    }
}

/// Cuts consecutive pieces of these lengths off.
fn pieces<T>(mut all: &mut [T], lengths: impl Iterator<Item = usize>) -> impl Iterator<Item = &mut [T]> {
    lengths.map(move |length| all.split_off_mut(..length).unwrap_or_default())
}

/// The results, and the normaliser of each query: the logarithm of the sum of its weights, or ∞ where it sees no key.
pub(super) fn forward<T: Element>(
    problem: &Problem,
    qkv: [&[T]; 3],
    mask: Option<Mask<T::Real>>,
) -> Result<(Vec<T>, Vec<T::Real>)> {
    match gemm::is_native::<T>()? {
        true => forward_by::<T, T>(problem, qkv, mask),
        false => forward_by::<T, T::Real>(problem, qkv, mask),
    }
}

/// The same by products with factors of type `F`.
fn forward_by<T: Element, F: Element<Real = T::Real>>(
    problem: &Problem,
    [q, k, v]: [&[T]; 3],
    mask: Option<Mask<T::Real>>,
) -> Result<(Vec<T>, Vec<T::Real>)> {
    let Problem { batch, heads, group, queries, keys, size, value_size, .. } = *problem;
    let mut y = vec![T::from_f64(0.0); batch * heads * queries * value_size];
    let mut normalisers = vec![T::Real::from_f64(0.0); batch * heads * queries];
    let lengths = |size| problem.by_head(heads).map(move |(_, document)| document.queries * size);
    let results = pieces(&mut y, lengths(value_size)).zip(pieces(&mut normalisers, lengths(1)));
    let blocks = problem.by_head(heads).zip(results).flat_map(|(place, (y, normalisers))| {
        let blocks = y.chunks_mut(QUERIES * value_size).zip(normalisers.chunks_mut(QUERIES));
        blocks.enumerate().map(move |(block, results)| (place, block * QUERIES, results))
    });
    let work = |workspace: &mut Workspace<F>, (place, query, results): (_, usize, (&mut [T], &mut [T::Real]))| {
        let ((head, document), (y, normalisers)): ((usize, Document), _) = (place, results);
        let (row, key) = (head * queries + document.query + query, head / group * keys + document.key);
        let (sample, head, count, keys) = (document.sample, head % heads, normalisers.len(), document.keys);
        let q = &q[row * size..][..count * size];
        let (k, v) = (&k[key * size..][..keys * size], &v[key * value_size..][..keys * value_size]);
        let block = Block { sample, head, query, queries: count, key: 0, keys };
        forward_block(problem, block, [q, k, v], mask, workspace, y, normalisers)
    };
    blocks.collect::<Vec<_>>().into_par_iter().try_each_with(|| Workspace::new(problem, false), work)?;
    Ok((y, normalisers))
}

fn forward_block<T: Element, F: Element<Real = T::Real>>(
    problem: &Problem,
    block: Block,
    [q, k, v]: [&[T]; 3],
    mask: Option<Mask<T::Real>>,
    workspace: &mut Workspace<F>,
    y: &mut [T],
    normalisers: &mut [T::Real],
) -> Result<()> {
    let Problem { size, value_size, .. } = *problem;
    let Workspace { scores, sums, factors: [of_q, of_k, of_v, of_weights, ..], .. } = workspace;
    let (zero, one) = (T::Real::from_f64(0.0), T::Real::from_f64(1.0));
    let infinity = T::Real::from_f64(f64::INFINITY);
    let (q, scale) = scaled(q, problem.scale, of_q);
    let (mut max, mut total) = ([-infinity; QUERIES], [zero; QUERIES]);
    sums.fill(zero);
    for key in (0..block.keys).step_by(KEYS) {
        let block = block.of_keys(problem, key, KEYS.min(block.keys - key));
        if block.keys == 0 {
            break;
        }
        let k = factors(&k[key * size..][..block.keys * size], of_k);
        let v = factors(&v[key * value_size..][..block.keys * value_size], of_v);
        let (extents, transposed) = ((block.queries, block.keys, size), Strides::transposed(size));
        gemm(extents, scores, false, (q, Strides::rows(size)), (k, transposed), 1)?;
        let rows = scores.chunks_exact_mut(block.keys).zip(sums.chunks_exact_mut(value_size)).take(block.queries);
        for (query, (scores, sums)) in rows.enumerate() {
            block.complete(problem, scale, mask, query, scores);
            weigh(scores, sums, &mut max[query], &mut total[query]);
        }
        let (extents, weights) = ((block.queries, value_size, block.keys), Strides::rows(block.keys));
        let scores = rounded::<T, F>(&scores[..block.queries * block.keys], of_weights);
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

/// Turns the scores of further keys of a query into weights, e^(score − maximum). Updates the running results of the
/// query: the sums of values, the maximum of the scores, and the sum of the weights.
fn weigh<T: Real>(scores: &mut [T], sums: &mut [T], max: &mut T, total: &mut T) {
    vectorise!(move || {
        let new = maximum(scores, *max);
        if new == T::from_f64(f64::NEG_INFINITY) {
            scores.fill(T::from_f64(0.0));
            return;
        }
        // Earlier sums are relative to another maximum.
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

fn scale_by<T: Real>(values: &mut [T], factor: T) {
    vectorise!(move || {
        for value in values {
            *value *= factor;
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

/// Turns the gradients of weights into those of scores.
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
    results: [&[T]; 2],
    normalisers: &[T::Real],
    mask: Option<Mask<T::Real>>,
) -> Result<[Vec<T::Real>; 3]> {
    match gemm::is_native::<T>()? {
        true => backward_by::<T, T>(problem, qkv, results, normalisers, mask),
        false => backward_by::<T, T::Real>(problem, qkv, results, normalisers, mask),
    }
}

/// The same by products with factors of type `F`.
fn backward_by<T: Element, F: Element<Real = T::Real>>(
    problem: &Problem,
    qkv: [&[T]; 3],
    [y, dy]: [&[T]; 2],
    normalisers: &[T::Real],
    mask: Option<Mask<T::Real>>,
) -> Result<[Vec<T::Real>; 3]> {
    let Problem { batch, heads, group, queries, keys, size, value_size, .. } = *problem;
    let zeros = |count| vec![T::Real::from_f64(0.0); count];
    let key_heads = heads / group;
    let (mut dk, mut dv) = (zeros(batch * key_heads * keys * size), zeros(batch * key_heads * keys * value_size));
    let mut products = zeros(batch * heads * queries);
    products
        .par_iter_mut()
        .zip(y.par_chunks_exact(value_size))
        .zip(dy.par_chunks_exact(value_size))
        .each(|((product, y), dy)| *product = product_of_rows(y, dy));
    // Keys are cut into parts, each with its own gradient of the queries. The number of parts does not depend on the
    // threads.
    let count = problem.documents.len() * key_heads;
    let part_of = |keys: usize| keys.div_ceil(KEYS).div_ceil(PARTS.div_ceil(count)) * KEYS;
    let parts = problem.documents.iter().map(|document| document.keys.div_ceil(part_of(document.keys))).max();
    let (dq_len, head_len) = (batch * heads * queries * size, queries * size);
    let mut dq = zeros(parts.unwrap_or(0) * dq_len);
    let of_part = |dq| {
        let lengths = problem.by_head(heads).map(|(_, document)| document.queries * size);
        let mut places: Vec<_> = problem.by_head(heads).zip(pieces(dq, lengths)).collect();
        // The heads that share keys come one after the other.
        places.sort_by_key(|((head, document), _)| (head / group, document.query));
        places.into_iter().map(|(_, dq)| dq)
    };
    let mut of_parts: Vec<_> = dq.chunks_exact_mut(dq_len).map(of_part).collect();
    let lengths = |size| problem.by_head(key_heads).map(move |(_, document)| document.keys * size);
    let of_keys = pieces(&mut dk, lengths(size)).zip(pieces(&mut dv, lengths(value_size)));
    let mut tasks = Vec::new();
    for ((pair, document), (dk, dv)) in problem.by_head(key_heads).zip(of_keys) {
        let part = part_of(document.keys);
        let mut keys = dk.chunks_mut(part * size).zip(dv.chunks_mut(part * value_size)).enumerate();
        for dq in &mut of_parts {
            let dq: Vec<_> = dq.by_ref().take(group).collect();
            if let Some((index, (dk, dv))) = keys.next() {
                tasks.push(((pair, document), index * part, dq, [dk, dv]));
            }
        }
    }
    let work = |workspace: &mut Workspace<F>, (place, key, mut dq, of_keys): (_, _, Vec<&mut [_]>, _)| {
        let (pair, document) = place;
        let task = BackwardTask { problem, qkv, dy, normalisers, products: &products, mask, pair, document };
        task.run(key, &mut dq, of_keys, workspace)
    };
    tasks.into_par_iter().try_each_with(|| Workspace::new(problem, true), work)?;
    if dq.len() > dq_len {
        let mut total = zeros(dq_len);
        total.par_chunks_exact_mut(head_len).enumerate().each(|(head, total)| {
            for dq in dq.chunks_exact(dq_len) {
                add(total, &dq[head * head_len..][..head_len]);
            }
        });
        dq = total;
    }
    Ok([dq, dk, dv])
}

/// The backward pass for a document of one head of keys, and the heads of queries that see it.
struct BackwardTask<'a, T: Element> {
    problem: &'a Problem,
    qkv: [&'a [T]; 3],
    dy: &'a [T],
    normalisers: &'a [T::Real],
    /// Σ y dy of each query.
    products: &'a [T::Real],
    mask: Option<Mask<'a, T::Real>>,
    pair: usize,
    document: Document,
}

impl<T: Element> BackwardTask<'_, T> {
    /// Adds to the gradients of each head's queries, and of the keys and values from `first` on.
    fn run<F: Element<Real = T::Real>>(
        &self,
        first: usize,
        dq: &mut [&mut [T::Real]],
        [dk, dv]: [&mut [T::Real]; 2],
        workspace: &mut Workspace<F>,
    ) -> Result<()> {
        let Problem { heads, group, queries, keys, size, value_size, .. } = *self.problem;
        let Workspace { scores, gradients, factors: [of_q, of_k, of_v, of_dy, scaled_q, of_weights], .. } = workspace;
        let scale = T::Real::from_f64(self.problem.scale);
        let (by_key, by_value) = (Strides::rows(size), Strides::rows(value_size));
        let [q, k, v] = self.qkv;
        let start = self.pair * keys + self.document.key;
        let (k, v) = (&k[start * size..], &v[start * value_size..]);
        let key_blocks = dk.chunks_mut(KEYS * size).zip(dv.chunks_mut(KEYS * value_size)).enumerate();
        for (key_block, (dk, dv)) in key_blocks {
            let (key, count) = (first + key_block * KEYS, dk.len() / size);
            let k = factors(&k[key * size..][..count * size], of_k);
            let v = factors(&v[key * value_size..][..count * value_size], of_v);
            for (member, dq) in dq.iter_mut().enumerate() {
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
                    let row = head * queries + self.document.query + query;
                    let q = &q[row * size..][..rows * size];
                    let (scaled_q, left) = scaled(q, self.problem.scale, scaled_q);
                    let q = factors(q, of_q);
                    let dy = factors(&self.dy[row * value_size..][..rows * value_size], of_dy);
                    let transposed = Strides::transposed(size);
                    gemm((rows, count, size), scores, false, (scaled_q, by_key), (k, transposed), 1)?;
                    let normalisers = &self.normalisers[row..][..rows];
                    for (query, (scores, normaliser)) in scores.chunks_exact_mut(count).zip(normalisers).enumerate() {
                        block.complete(self.problem, left, self.mask, query, scores);
                        weights_of_row(scores, *normaliser);
                    }
                    let transposed = Strides::transposed(count);
                    let weights = rounded::<T, F>(&scores[..rows * count], of_weights);
                    gemm((count, value_size, rows), dv, true, (weights, transposed), (dy, by_value), 1)?;
                    let of_value = Strides::transposed(value_size);
                    gemm((rows, count, value_size), gradients, false, (dy, by_value), (v, of_value), 1)?;
                    let sums = &self.products[row..][..rows];
                    let rows_of = scores.chunks_exact_mut(count).zip(gradients.chunks_exact(count)).zip(sums);
                    for ((weights, gradients), sum) in rows_of {
                        gradients_of_row(weights, gradients, *sum, scale);
                    }
                    let scores = rounded::<T, F>(&scores[..rows * count], of_weights);
                    gemm((rows, size, count), dq, true, (scores, Strides::rows(count)), (k, by_key), 1)?;
                    gemm((count, size, rows), dk, true, (scores, transposed), (q, by_key), 1)?;
                }
            }
        }
        Ok(())
    }
}
