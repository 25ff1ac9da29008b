//! Attention on CUDA: products by cuBLAS, and kernels between them, for as many rows at a time as fit into the
//! workspace. Neighbouring heads of queries that share keys and values form one matrix with group × queries rows.
use super::problem::{Document, Problem};
use candle_core::backend::BackendStorage;
use candle_core::{CudaDevice, DType, Result, Storage, Tensor};
use candle_ddp_tensor::accumulator;
use candle_ddp_tensor::function::{Function, apply};
use candle_ddp_tensor::kernels::{
    self, Address, Factor, Grid, Kernel, Launch, Output, Product, Target, address, address_or_none, supported,
};

/// The name of attention, for messages, and with heads side by side.
pub(super) const APART: &str = "scaled_dot_product_attention";
pub(super) const PACKED: &str = "scaled_dot_product_attention_qkvpacked";

/// The maximum memory for the scores, weights and gradients of a block, unless a single row needs more.
const WORKSPACE: usize = 64 << 20;

/// The tensors are contiguous, and there are queries and keys.
pub(super) fn attention([q, k, v]: [&Tensor; 3], problem: Problem) -> Result<Tensor> {
    supported(q.dtype(), APART)?;
    let qkv = [q, k, v].map(Tensor::detach);
    if problem.is_packed() {
        let (y, documents) = Documents::forward(problem, qkv)?;
        let (storage, layout) = y.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { candle_core::bail!("attention's result is not on the GPU") };
        return apply(&[q, k, v], (Storage::Cuda(storage.try_clone(layout)?), y.shape().clone()), documents);
    }
    let (y, normalisers) = Attention::of(&problem, q)?.forward(&qkv)?;
    apply(&[q, k, v], y.into_result(), Backward { problem, qkv, normalisers })
}

/// Values that the backward pass needs.
struct Backward {
    problem: Problem,
    qkv: [Tensor; 3],
    normalisers: Output,
}

impl Function for Backward {
    fn name(&self) -> &'static str {
        APART
    }

    fn backward(&self, dy: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        gradients(&self.problem, &self.qkv, &self.normalisers, dy)
    }
}

/// Documents that share rows, computed one after the other.
struct Documents {
    problem: Problem,
    qkv: [Tensor; 3],
    /// Of each document.
    normalisers: Vec<Output>,
}

impl Documents {
    /// The result, and what the backward pass needs.
    fn forward(problem: Problem, qkv: [Tensor; 3]) -> Result<(Tensor, Self)> {
        let y = Tensor::zeros(problem.output_shape(), qkv[0].dtype(), qkv[0].device())?;
        let mut normalisers = Vec::with_capacity(problem.documents.len());
        for document in &problem.documents {
            let (alone, parts) = (problem.alone(document), Self::parts(&qkv, document)?);
            let (part, of_document) = Attention::of(&alone, &parts[0])?.forward(&parts)?;
            Self::set(&y, document, part)?;
            normalisers.push(of_document);
        }
        Ok((y, Self { problem, qkv, normalisers }))
    }

    /// The tokens of a document, which has as many queries as keys.
    fn parts<const N: usize>(tensors: &[Tensor; N], document: &Document) -> Result<[Tensor; N]> {
        let Document { sample, query, queries, .. } = *document;
        let mut parts = tensors.clone();
        for part in &mut parts {
            *part = part.narrow(0, sample, 1)?.narrow(2, query, queries)?.contiguous()?;
        }
        Ok(parts)
    }

    fn set(whole: &Tensor, document: &Document, part: Output) -> Result<()> {
        let part = part.into_tensor().to_dtype(whole.dtype())?;
        whole.narrow(0, document.sample, 1)?.slice_set(&part, 2, document.query)
    }
}

impl Function for Documents {
    fn name(&self) -> &'static str {
        APART
    }

    fn backward(&self, dy: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let Self { problem, qkv, normalisers } = self;
        let zeros = qkv.iter().map(|t| Tensor::zeros(t.shape(), dy.dtype(), dy.device()));
        let gradients = zeros.collect::<Result<Vec<_>>>()?;
        for (document, normalisers) in problem.documents.iter().zip(normalisers) {
            let (alone, [dy]) = (problem.alone(document), Self::parts(std::array::from_ref(dy), document)?);
            let of_document = Attention::of(&alone, &dy)?.backward(&Self::parts(qkv, document)?, normalisers, &dy)?;
            for (gradient, part) in gradients.iter().zip(of_document) {
                Self::set(gradient, document, part)?;
            }
        }
        Ok(gradients.into_iter().map(Some).collect())
    }
}

/// The gradients of q, k and v.
pub(super) fn gradients(
    problem: &Problem,
    qkv: &[Tensor; 3],
    normalisers: &Output,
    dy: &Tensor,
) -> Result<Vec<Option<Tensor>>> {
    let gradients = Attention::of(problem, dy)?.backward(qkv, normalisers, dy)?;
    gradients.into_iter().map(|gradient| gradient.into_tensor().to_dtype(dy.dtype()).map(Some)).collect()
}

/// The same for heads side by side: `qkv` has the shape (B, T, 3 × H × D), the result (B, T, H × D).
pub(super) fn packed(qkv: &Tensor, problem: Problem) -> Result<Tensor> {
    supported(qkv.dtype(), PACKED)?;
    let sides = Heads::new(&problem);
    let parts = sides.apart(&qkv.detach())?;
    let (y, normalisers) = Attention::of(&problem, qkv)?.forward(&parts)?;
    let y = Heads { parts: 1, ..sides }.merge(qkv, &[&y])?;
    apply(&[qkv], y.into_result(), Packed(Backward { problem, qkv: parts, normalisers }))
}

struct Packed(Backward);

impl Function for Packed {
    fn name(&self) -> &'static str {
        PACKED
    }

    fn backward(&self, dy: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let Self(Backward { problem, qkv, normalisers }) = self;
        packed_gradients(problem, qkv, normalisers, dy)
    }
}

/// The gradients of heads side by side.
pub(super) fn packed_gradients(
    problem: &Problem,
    qkv: &[Tensor; 3],
    normalisers: &Output,
    dy: &Tensor,
) -> Result<Vec<Option<Tensor>>> {
    let sides = Heads::new(problem);
    let by_head = Heads { parts: 1, ..sides }.split(dy)?;
    let [dq, dk, dv] = Attention::of(problem, dy)?.backward(qkv, normalisers, &by_head)?;
    Ok(vec![Some(sides.merge(dy, &[&dq, &dk, &dv])?.into_tensor())])
}

/// The heads of tokens, side by side in memory, or each by itself.
#[derive(Clone, Copy)]
pub(super) struct Heads {
    batch: usize,
    tokens: usize,
    parts: usize,
    heads: usize,
    size: usize,
}

impl Heads {
    /// Queries, keys and values.
    pub(super) fn new(&Problem { batch, queries, heads, size, .. }: &Problem) -> Self {
        Self { batch, tokens: queries, parts: 3, heads, size }
    }

    /// The three parts, with each head by itself.
    pub(super) fn apart(&self, together: &Tensor) -> Result<[Tensor; 3]> {
        let parts = self.split(together)?;
        Ok([parts.get(0)?, parts.get(1)?, parts.get(2)?])
    }

    /// A tensor (parts, batch, heads, tokens, size) of heads side by side.
    fn split(&self, together: &Tensor) -> Result<Tensor> {
        let Self { batch, tokens, parts, heads, size } = *self;
        let dtype = together.dtype();
        let apart = Output::new(together.device().as_cuda_device()?, dtype, &[parts, batch, heads, tokens, size][..])?;
        let tensors = [address(together)?, apart.address()?];
        self.launch(Kernel::SplitHeads, together, &tensors, (parts, Address::vector(&tensors, size, dtype)))?;
        Ok(apart.into_tensor())
    }

    /// A tensor (batch, tokens, parts × heads × size) of heads in memory by themselves. Later parts may have the dtype of the
    /// arithmetic.
    fn merge(&self, like: &Tensor, apart: &[&Output]) -> Result<Output> {
        let Self { batch, tokens, parts, heads, size } = *self;
        let dtype = like.dtype();
        let together = Output::new(like.device().as_cuda_device()?, dtype, (batch, tokens, parts * heads * size))?;
        let mut tensors = vec![together.address()?];
        for part in apart {
            tensors.push(part.address()?);
        }
        let wide = apart.iter().position(|part| part.dtype() != dtype).unwrap_or(parts);
        let vector = if wide < parts { 1 } else { Address::vector(&tensors, size, dtype) };
        self.launch(Kernel::MergeHeads, like, &tensors, (wide, vector))?;
        Ok(together)
    }

    fn launch(&self, kernel: Kernel, like: &Tensor, tensors: &[Address], (wide, vector): (usize, usize)) -> Result<()> {
        let Self { batch, tokens, parts, heads, size } = *self;
        let numbers = &[batch, tokens, parts, heads, size, wide, vector];
        let grid = Grid::Threads(batch * tokens * parts * heads * size / vector);
        let launch = Launch { kernel, dtype: like.dtype(), grid, tensors, numbers, reals: &[] };
        Ok(kernels::launch(like.device().as_cuda_device()?, launch)?)
    }
}

struct Attention<'a> {
    problem: &'a Problem,
    device: &'a CudaDevice,
    dtype: DType,
}

impl<'a> Attention<'a> {
    fn of(problem: &'a Problem, like: &'a Tensor) -> Result<Self> {
        Ok(Self { problem, device: like.device().as_cuda_device()?, dtype: like.dtype() })
    }

    /// The result, and the logarithm of the sum of e^score of each query.
    fn forward(&self, [q, k, v]: &[Tensor; 3]) -> Result<(Output, Output)> {
        let Problem { value_size, .. } = *self.problem;
        let [q, k, v] = [address(q)?, address(k)?, address(v)?];
        let y = Output::new(self.device, self.dtype, self.problem.output_shape())?;
        let normalisers =
            Output::new(self.device, self.accumulator(), self.problem.items() * self.problem.rows_of_item())?;
        let [scores] = self.matrices(self.accumulator())?;
        let narrow = self.narrow_matrices::<1>()?;
        let weights = narrow.as_ref().map_or(&scores, |[weights]| weights).address()?;
        let scores = scores.address()?;
        for block in self.blocks(1) {
            self.scores(&block, [q, k], scores)?;
            let tensors = [scores, weights, normalisers.address()?, self.mask()?];
            self.launch(Kernel::AttentionWeights, &block, &tensors, 2)?;
            let (weights, values) = (block.scores(weights), self.of_keys(&block, v, self.dtype, value_size));
            let y = target(self.of_rows(&block, y.address()?, value_size), self.dtype, false);
            self.product(&block, [block.rows, value_size, block.keys], weights, values, y)?;
        }
        Ok((y, normalisers))
    }

    /// The gradients of q, k and v; the latter two have the dtype of the arithmetic if they are sums over blocks. The weights
    /// are recomputed.
    fn backward(&self, qkv: &[Tensor; 3], normalisers: &Output, dy: &Tensor) -> Result<[Output; 3]> {
        let (&Problem { size, value_size, .. }, acc) = (self.problem, self.accumulator());
        let blocks = self.blocks(2);
        let (rows, keys) = (self.problem.rows_of_item(), self.problem.keys);
        // The first block of each item has all keys that a query sees.
        let is_all_seen = blocks.iter().all(|block| !block.is_first || block.keys == keys);
        let sums = if blocks.iter().all(|block| block.rows == rows) { self.dtype } else { acc };
        let [q, k, v, dy] = [address(&qkv[0])?, address(&qkv[1])?, address(&qkv[2])?, address(dy)?];
        let dq = Output::new(self.device, self.dtype, qkv[0].shape())?;
        let new = |like: &Tensor| match is_all_seen {
            true => Output::new(self.device, sums, like.shape()),
            false => Output::zeros(self.device, sums, like.shape()),
        };
        let (dk, dv) = (new(&qkv[1])?, new(&qkv[2])?);
        let wide = self.matrices::<2>(acc)?;
        let narrow = self.narrow_matrices::<2>()?;
        let [weights, gradients] = narrow.as_ref().unwrap_or(&wide);
        let (weights, gradients) = (weights.address()?, gradients.address()?);
        let [scores, of_weights] = [wide[0].address()?, wide[1].address()?];
        for block in blocks {
            let adds_up = !block.is_first;
            self.scores(&block, [q, k], scores)?;
            let (queries, of_y) = (self.of_rows(&block, q, size), self.of_rows(&block, dy, value_size));
            let (keys, values) =
                (self.of_keys(&block, k, self.dtype, size), self.of_keys(&block, v, self.dtype, value_size));
            let to = target(block.scores(of_weights), acc, false);
            self.product(&block, [block.rows, block.keys, value_size], of_y, transposed(values), to)?;
            let tensors = [scores, of_weights, weights, gradients, normalisers.address()?, self.mask()?];
            self.launch(Kernel::AttentionGradients, &block, &tensors, 4)?;
            let to = target(self.of_rows(&block, dq.address()?, size), self.dtype, false);
            let (weights, gradients) = (block.scores(weights), block.scores(gradients));
            self.product(&block, [block.rows, size, block.keys], gradients, keys, to)?;
            let to = target(self.of_keys(&block, dk.address()?, sums, size), sums, adds_up);
            self.product(&block, [block.keys, size, block.rows], transposed(gradients), queries, to)?;
            let to = target(self.of_keys(&block, dv.address()?, sums, value_size), sums, adds_up);
            self.product(&block, [block.keys, value_size, block.rows], transposed(weights), of_y, to)?;
        }
        Ok([dq, dk, dv])
    }

    fn accumulator(&self) -> DType {
        accumulator(self.dtype)
    }

    /// The maximum number of scores in a block that needs this many matrices for them.
    fn room(&self, matrices: usize) -> usize {
        let (wide, narrow) = (self.accumulator(), self.dtype);
        let bytes = wide.size_in_bytes() + if narrow == wide { 0 } else { narrow.size_in_bytes() };
        WORKSPACE / (matrices * bytes)
    }

    fn blocks(&self, matrices: usize) -> Vec<Block> {
        blocks(self.problem, self.room(matrices))
    }

    /// Memory for the largest block.
    fn matrices<const N: usize>(&self, dtype: DType) -> Result<[Output; N]> {
        let largest = self.blocks(N).iter().map(|block| block.items * block.rows * block.columns()).max().unwrap_or(0);
        let matrices =
            (0..N).map(|_| Output::new(self.device, dtype, largest)).collect::<candle_ddp_tensor::Result<Vec<_>>>()?;
        matrices.try_into().map_err(|_| candle_core::Error::Msg("an unexpected number of matrices".to_string()))
    }

    /// The same in the dtype of the tensors. None if that is the dtype of the arithmetic: the kernels then write
    /// their results over their arguments.
    fn narrow_matrices<const N: usize>(&self) -> Result<Option<[Output; N]>> {
        (self.dtype != self.accumulator()).then(|| self.matrices(self.dtype)).transpose()
    }

    /// The block's rows of a tensor that has one for each query.
    fn of_rows<'t>(&self, block: &Block, tensor: Address<'t>, size: usize) -> Factor<'t> {
        let rows = self.problem.rows_of_item();
        let address = tensor.skip((block.item * rows + block.row) * size, self.dtype);
        Factor { address, transposed: false, stride: Some(rows * size), row: None }
    }

    /// The block's rows of a tensor that has one for each key.
    fn of_keys<'t>(&self, block: &Block, tensor: Address<'t>, dtype: DType, size: usize) -> Factor<'t> {
        let keys = self.problem.keys;
        let address = tensor.skip(block.item * keys * size, dtype);
        Factor { address, transposed: false, stride: Some(keys * size), row: None }
    }

    /// The products of the block's queries and keys.
    fn scores(&self, block: &Block, [q, k]: [Address; 2], to: Address) -> Result<()> {
        let Problem { size, .. } = *self.problem;
        let keys = transposed(self.of_keys(block, k, self.dtype, size));
        let to = target(block.scores(to), self.accumulator(), false);
        self.product(block, [block.rows, block.keys, size], self.of_rows(block, q, size), keys, to)
    }

    fn product(&self, block: &Block, [m, n, k]: [usize; 3], a: Factor, b: Factor, c: Target) -> Result<()> {
        Ok(kernels::product(self.device, Product { batch: block.items, m, n, k, dtype: self.dtype, a, b, c })?)
    }

    fn mask(&self) -> Result<Address<'_>> {
        Ok(address_or_none(self.problem.mask.as_ref())?)
    }

    /// The first `matrices` tensors have the block's rows and columns.
    fn launch(&self, kernel: Kernel, block: &Block, tensors: &[Address], matrices: usize) -> Result<()> {
        let Problem { heads, group, queries, scale, is_causal, .. } = *self.problem;
        let rows_of_item = self.problem.rows_of_item();
        let block_numbers = [block.item, block.row, block.rows, block.keys, rows_of_item];
        let numbers = [queries, heads / group, group, usize::from(is_causal)];
        let columns = block.columns();
        let in_memory = [columns, Address::vector(&tensors[..matrices], columns, self.dtype)];
        let numbers = [&block_numbers[..], &numbers, &self.problem.mask_strides(), &in_memory].concat();
        let grid = Grid::Blocks(block.items * block.rows);
        let launch = Launch { kernel, dtype: self.dtype, grid, tensors, numbers: &numbers, reals: &[scale] };
        Ok(kernels::launch(self.device, launch)?)
    }
}

fn transposed(factor: Factor) -> Factor {
    Factor { transposed: true, ..factor }
}

fn target(Factor { address, stride, row, .. }: Factor, dtype: DType, accumulate: bool) -> Target {
    Target { address, dtype, stride, row, accumulate }
}

/// The unit of computation: some rows (queries) of some items (each a sample's head of keys), with the keys up to the
/// last key that any of these queries sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    item: usize,
    items: usize,
    row: usize,
    rows: usize,
    keys: usize,
    /// Whether no block before has the same items.
    is_first: bool,
}

impl Block {
    /// The number of elements from one row of scores to the next: rows of any dtype begin at addresses that are multiples of 16, for
    /// which cuBLAS has faster kernels.
    fn columns(&self) -> usize {
        self.keys.next_multiple_of(COLUMNS)
    }

    /// The block's scores, or numbers like them.
    fn scores<'a>(&self, address: Address<'a>) -> Factor<'a> {
        let columns = self.columns();
        Factor { address, transposed: false, stride: Some(self.rows * columns), row: Some(columns) }
    }
}

const COLUMNS: usize = 8;
/// The number of rows in a block is a multiple of this, if a block has more but not all rows: the tiles of cuBLAS.
const ROWS: usize = 128;
/// Into at most so many blocks are causal rows split, if there are several blocks anyway. Four of them have 5/8 of all scores, eight
/// 9/16.
const SPLITS: usize = 8;

/// Blocks of at most `room` scores, or of single rows. A block holds whole items if at least one fits, and otherwise
/// a part of one, or, where that saves scores that no query sees, parts of several. The last rows come first.
fn blocks(problem: &Problem, room: usize) -> Vec<Block> {
    let (all_items, all_rows) = (problem.items(), problem.rows_of_item());
    let rows_in_room = (room / problem.keys.next_multiple_of(COLUMNS).max(1)).max(1);
    let needed = (all_items * all_rows).div_ceil(rows_in_room).clamp(1, SPLITS);
    let wanted = if problem.is_causal { all_rows.div_ceil(needed).next_multiple_of(ROWS) } else { all_rows };
    let rows = wanted.min(rows_in_room).clamp(1, all_rows.max(1));
    let rows = if rows < all_rows && rows > ROWS { rows / ROWS * ROWS } else { rows };
    let items = (rows_in_room / rows).clamp(1, all_items.max(1));
    let block = |item: usize, row: usize| {
        let (items, rows) = (items.min(all_items - item), rows.min(all_rows - row));
        let last = row + rows - 1;
        let is_one_head = row / problem.queries == last / problem.queries;
        let last_query = if is_one_head { last % problem.queries } else { problem.queries - 1 };
        let keys = if problem.is_causal { problem.keys.min(last_query + 1) } else { problem.keys };
        Block { item, items, row, rows, keys, is_first: last + 1 == all_rows }
    };
    let starts = |item| (0..all_rows).step_by(rows).rev().map(move |row| (item, row));
    (0..all_items).step_by(items).flat_map(starts).map(|(item, row)| block(item, row)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::problem::AttentionOptions;
    use super::*;
    use candle_core::Device;
    use std::collections::HashSet;

    #[test]
    fn blocks_have_every_row_once_and_all_keys_that_their_queries_see() {
        for (is_causal, room) in
            [false, true].into_iter().flat_map(|causal| [1, 9, 40, 70, 500].map(|room| (causal, room)))
        {
            let zeros = |shape| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
            let (q, kv) = (zeros((3, 4, 5, 1)), zeros((3, 2, 7, 1)));
            let options = AttentionOptions { is_causal, ..Default::default() };
            let problem = Problem::new([&q, &kv, &kv], &options).unwrap();
            let (mut seen, mut items) = (HashSet::new(), HashSet::new());
            for block in blocks(&problem, room) {
                assert_eq!(block.is_first, items.insert(block.item), "{block:?} in {room}");
                assert!(block.items * block.rows * 8 <= room.max(8), "{block:?} in {room}");
                for item in block.item..block.item + block.items {
                    for row in block.row..block.row + block.rows {
                        assert!(seen.insert((item, row)), "{block:?} in {room}");
                        assert!(block.keys >= if is_causal { row % 5 + 1 } else { 7 }, "{block:?} in {room}");
                    }
                }
            }
            assert_eq!(seen.len(), 3 * 2 * 10);
        }
    }

    /// With room for a quarter of the scores, and for half an item.
    #[test]
    fn causal_blocks_leave_out_scores_that_no_query_sees() {
        let zeros = Tensor::zeros((1, 8, 1024, 1), DType::F32, &Device::Cpu).unwrap();
        let options = AttentionOptions { is_causal: true, ..Default::default() };
        let problem = Problem::new([&zeros; 3], &options).unwrap();
        for (room, count, most) in [(2 << 20, 4, 5.0 / 8.0), (1 << 19, 16, 9.0 / 16.0)] {
            let blocks = blocks(&problem, room);
            let scores: usize = blocks.iter().map(|block| block.items * block.rows * block.columns()).sum();
            assert!(blocks.iter().all(|block| block.rows % ROWS == 0), "{blocks:?}");
            assert_eq!((blocks.len(), scores as f64 / f64::from(8 << 20)), (count, most), "{blocks:?}");
        }
    }
}
