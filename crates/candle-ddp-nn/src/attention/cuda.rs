//! Attention on CUDA: products by cuBLAS, and kernels for what is between them, for as many rows at a time as the
//! workspace takes. Neighbouring heads of queries that share keys and values are one matrix, of group × queries rows.
use super::problem::Problem;
use crate::channels::accumulator;
use candle_core::{CudaDevice, DType, Result, Tensor};
use candle_ddp_tensor::function::{Function, apply};
use candle_ddp_tensor::kernels::{
    self, Address, Factor, Grid, Kernel, Launch, Output, Product, Target, address, address_or_none, supported,
};

/// What the scores, weights and gradients of a block take at most, unless a single row needs more.
const WORKSPACE: usize = 64 << 20;

/// The tensors are contiguous, and there are queries and keys.
pub(super) fn attention([q, k, v]: [&Tensor; 3], problem: Problem) -> Result<Tensor> {
    supported(q.dtype(), "scaled_dot_product_attention")?;
    let qkv = [q, k, v].map(Tensor::detach);
    let (y, normalisers) = Attention::of(&problem, q)?.forward(&qkv)?;
    apply(&[q, k, v], y.into_result(), Backward { problem, qkv, normalisers })
}

/// What the backward pass needs.
struct Backward {
    problem: Problem,
    qkv: [Tensor; 3],
    normalisers: Output,
}

impl Function for Backward {
    fn name(&self) -> &'static str {
        "scaled_dot_product_attention"
    }

    fn backward(&self, dy: &Tensor, _: &[bool]) -> Result<Vec<Option<Tensor>>> {
        let gradients = Attention::of(&self.problem, dy)?.backward(&self.qkv, &self.normalisers, dy)?;
        Ok(gradients.into_iter().map(Some).collect())
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
            self.launch(Kernel::AttentionWeights, &block, &tensors)?;
            let (weights, values) = (dense(weights), self.of_keys(&block, v, self.dtype, value_size));
            let y = target(self.of_rows(&block, y.address()?, value_size), self.dtype, false);
            self.product(&block, [block.rows, value_size, block.keys], weights, values, y)?;
        }
        Ok((y, normalisers))
    }

    /// The gradients of q, k and v, for which the weights are computed again.
    fn backward(&self, qkv: &[Tensor; 3], normalisers: &Output, dy: &Tensor) -> Result<[Tensor; 3]> {
        let (&Problem { size, value_size, .. }, acc) = (self.problem, self.accumulator());
        let [q, k, v, dy] = [address(&qkv[0])?, address(&qkv[1])?, address(&qkv[2])?, address(dy)?];
        let dq = Output::new(self.device, self.dtype, qkv[0].shape())?;
        // Sums over blocks.
        let dk = Output::zeros(self.device, acc, qkv[1].shape())?;
        let dv = Output::zeros(self.device, acc, qkv[2].shape())?;
        let wide = self.matrices::<2>(acc)?;
        let narrow = self.narrow_matrices::<2>()?;
        let [weights, gradients] = narrow.as_ref().unwrap_or(&wide);
        let (weights, gradients) = (weights.address()?, gradients.address()?);
        let [scores, of_weights] = [wide[0].address()?, wide[1].address()?];
        for block in self.blocks(2) {
            self.scores(&block, [q, k], scores)?;
            let (queries, of_y) = (self.of_rows(&block, q, size), self.of_rows(&block, dy, value_size));
            let (keys, values) =
                (self.of_keys(&block, k, self.dtype, size), self.of_keys(&block, v, self.dtype, value_size));
            let to = target(dense(of_weights), acc, false);
            self.product(&block, [block.rows, block.keys, value_size], of_y, transposed(values), to)?;
            let tensors = [scores, of_weights, weights, gradients, normalisers.address()?, self.mask()?];
            self.launch(Kernel::AttentionGradients, &block, &tensors)?;
            let to = target(self.of_rows(&block, dq.address()?, size), self.dtype, false);
            self.product(&block, [block.rows, size, block.keys], dense(gradients), keys, to)?;
            let to = target(self.of_keys(&block, dk.address()?, acc, size), acc, true);
            self.product(&block, [block.keys, size, block.rows], transposed(dense(gradients)), queries, to)?;
            let to = target(self.of_keys(&block, dv.address()?, acc, value_size), acc, true);
            self.product(&block, [block.keys, value_size, block.rows], transposed(dense(weights)), of_y, to)?;
        }
        Ok([dq.into_tensor(), dk.into_tensor().to_dtype(self.dtype)?, dv.into_tensor().to_dtype(self.dtype)?])
    }

    fn accumulator(&self) -> DType {
        accumulator(self.dtype)
    }

    /// How many scores a block has at most, if it needs so many matrices for them.
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
        let largest = self.blocks(N).iter().map(|block| block.items * block.rows * block.keys).max().unwrap_or(0);
        let matrices =
            (0..N).map(|_| Output::new(self.device, dtype, largest)).collect::<candle_ddp_tensor::Result<Vec<_>>>()?;
        matrices.try_into().map_err(|_| candle_core::Error::Msg("another number of matrices".to_string()))
    }

    /// The same in the dtype of the tensors, or none where that is the dtype of the arithmetic: the kernels then put their
    /// results where their arguments are.
    fn narrow_matrices<const N: usize>(&self) -> Result<Option<[Output; N]>> {
        (self.dtype != self.accumulator()).then(|| self.matrices(self.dtype)).transpose()
    }

    /// The block's rows of a tensor that has one for each query.
    fn of_rows<'t>(&self, block: &Block, tensor: Address<'t>, size: usize) -> Factor<'t> {
        let rows = self.problem.rows_of_item();
        let address = tensor.skip((block.item * rows + block.row) * size, self.dtype);
        Factor { address, transposed: false, stride: Some(rows * size) }
    }

    /// The block's rows of a tensor that has one for each key.
    fn of_keys<'t>(&self, block: &Block, tensor: Address<'t>, dtype: DType, size: usize) -> Factor<'t> {
        let keys = self.problem.keys;
        Factor { address: tensor.skip(block.item * keys * size, dtype), transposed: false, stride: Some(keys * size) }
    }

    /// The products of the block's queries and keys.
    fn scores(&self, block: &Block, [q, k]: [Address; 2], to: Address) -> Result<()> {
        let Problem { size, .. } = *self.problem;
        let keys = transposed(self.of_keys(block, k, self.dtype, size));
        let to = target(dense(to), self.accumulator(), false);
        self.product(block, [block.rows, block.keys, size], self.of_rows(block, q, size), keys, to)
    }

    fn product(&self, block: &Block, [m, n, k]: [usize; 3], a: Factor, b: Factor, c: Target) -> Result<()> {
        Ok(kernels::product(self.device, Product { batch: block.items, m, n, k, dtype: self.dtype, a, b, c })?)
    }

    fn mask(&self) -> Result<Address<'_>> {
        Ok(address_or_none(self.problem.mask.as_ref())?)
    }

    fn launch(&self, kernel: Kernel, block: &Block, tensors: &[Address]) -> Result<()> {
        let Problem { heads, group, queries, scale, is_causal, .. } = *self.problem;
        let rows_of_item = self.problem.rows_of_item();
        let block_numbers = [block.item, block.row, block.rows, block.keys, rows_of_item];
        let numbers = [queries, heads / group, group, usize::from(is_causal)];
        let numbers = [&block_numbers[..], &numbers, &self.problem.mask_strides()].concat();
        let grid = Grid::Blocks(block.items * block.rows);
        let launch = Launch { kernel, dtype: self.dtype, grid, tensors, numbers: &numbers, reals: &[scale] };
        Ok(kernels::launch(self.device, launch)?)
    }
}

fn dense(address: Address) -> Factor {
    Factor { address, transposed: false, stride: None }
}

fn transposed(factor: Factor) -> Factor {
    Factor { transposed: true, ..factor }
}

fn target(Factor { address, stride, .. }: Factor, dtype: DType, accumulate: bool) -> Target {
    Target { address, dtype, stride, accumulate }
}

/// What is computed at a time: of some items, which are a sample's head of keys each, some rows, which are queries, and
/// the first keys, up to the last that any of these queries sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Block {
    item: usize,
    items: usize,
    row: usize,
    rows: usize,
    keys: usize,
}

/// Blocks of at most `room` scores, or of single rows: of whole items, if one fits, and otherwise of a part of one.
fn blocks(problem: &Problem, room: usize) -> Vec<Block> {
    let (all_items, all_rows) = (problem.items(), problem.rows_of_item());
    let rows_in_room = (room / problem.keys.max(1)).max(1);
    let items = (rows_in_room / all_rows.max(1)).clamp(1, all_items.max(1));
    let rows = rows_in_room.clamp(1, all_rows.max(1));
    let block = |item: usize, row: usize| {
        let (items, rows) = (items.min(all_items - item), rows.min(all_rows - row));
        let last = row + rows - 1;
        let is_one_head = row / problem.queries == last / problem.queries;
        let last_query = if is_one_head { last % problem.queries } else { problem.queries - 1 };
        let keys = if problem.is_causal { problem.keys.min(last_query + 1) } else { problem.keys };
        Block { item, items, row, rows, keys }
    };
    let starts = |item| (0..all_rows).step_by(rows).map(move |row| (item, row));
    (0..all_items).step_by(items).flat_map(starts).map(|(item, row)| block(item, row)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AttentionOptions;
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
            let mut seen = HashSet::new();
            for block in blocks(&problem, room) {
                assert!(block.items * block.rows * 7 <= room.max(7), "{block:?} in {room}");
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
}
