//! A shuffle that reads a dataset in pieces.
use super::order::{generator, shuffle};
use super::randperm::permutation;
use super::{EpochOrder, Order};
use candle_ddp_state::{Error, Result};

/// How [`BlockShuffle`] shuffles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockOptions {
    /// The number of neighbouring samples that are a block, which is read as a whole: a few megabytes of them on a disk. Default: 256.
    pub block: usize,
    /// The number of blocks that have their samples mixed. Default: 16.
    pub window: usize,
    /// How many orders there are side by side, each with its part of the blocks: the order takes one sample of each in turn.
    /// If it is a multiple of the number of ranks, each rank reads its own blocks, so that hosts need not read the same
    /// shards. It belongs to the order, so it must stay when the number of ranks changes. Default: 1, with which all ranks read
    /// the same blocks at the same time, as is best on one host, where they share the system's cache.
    pub lanes: usize,
}

impl Default for BlockOptions {
    fn default() -> Self {
        Self { block: 256, window: 16, lanes: 1 }
    }
}

/// A shuffle that keeps reads nearly sequential, for data that does not fit into memory, such as [`TarShards`](super::TarShards):
/// blocks of neighbouring samples come in a random order, and the samples of a window of blocks are mixed. At any time the ranks
/// read one window (for each lane), which the system's cache, or a [`RangeCache`](super::RangeCache), should hold.
///
/// ```
/// use candle_ddp::data::{BlockOptions, BlockShuffle, DataLoader, LoaderOptions};
///
/// # candle_ddp::spawn(2, |pg| {
/// // Any dataset whose neighbours lie next to each other; here, the numbers from 0 to 9,999.
/// let order = BlockShuffle::new(10_000, BlockOptions { block: 100, window: 4, ..Default::default() })?;
/// let options = LoaderOptions { batch_size: 10, ..Default::default() };
/// let loader = DataLoader::with_order(0..10_000, order, &pg, options, Ok)?;
/// let first = loader.iter().next().expect("a batch")?;
/// let mut blocks: Vec<usize> = first.iter().map(|index| index / 100).collect();
/// blocks.sort_unstable();
/// blocks.dedup();
/// assert!(blocks.len() <= 4);
/// # Ok(())
/// # })?;
/// # Ok::<(), candle_ddp::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct BlockShuffle {
    dataset_len: usize,
    options: BlockOptions,
}

impl BlockShuffle {
    /// A shuffle of a dataset of `len` samples.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `len` or an option is 0.
    pub fn new(len: usize, options: BlockOptions) -> Result<Self> {
        let BlockOptions { block, window, lanes } = options;
        for (argument, value) in [("len", len), ("block", block), ("window", window), ("lanes", lanes)] {
            if value == 0 {
                return Err(Error::invalid(argument, "it must be at least 1, not 0"));
            }
        }
        Ok(Self { dataset_len: len, options })
    }
}

impl Order for BlockShuffle {
    fn dataset_len(&self) -> usize {
        self.dataset_len
    }

    fn epoch_order(&self, seed: u64, epoch: u64) -> Result<EpochOrder> {
        let BlockOptions { block, window, lanes } = self.options;
        let blocks = permutation(self.dataset_len.div_ceil(block), seed.wrapping_add(epoch));
        let mut random = generator(*b"blockshu", seed, epoch);
        let mut lane_of = |lane: usize| {
            let of_lane: Vec<usize> = blocks.iter().skip(lane).step_by(lanes).collect();
            let mut samples = Vec::with_capacity(of_lane.len() * block.min(self.dataset_len));
            for mixed in of_lane.chunks(window) {
                let begin = samples.len();
                for number in mixed {
                    let first = number * block;
                    samples.extend(first..first.saturating_add(block).min(self.dataset_len));
                }
                shuffle(&mut samples[begin..], &mut random);
            }
            samples
        };
        // No more lanes than have a block.
        let lanes: Vec<Vec<usize>> = (0..lanes.min(blocks.len())).map(&mut lane_of).collect();
        let longest = lanes.iter().map(Vec::len).max().unwrap_or(0);
        let places = (0..longest).flat_map(|place| lanes.iter().filter_map(move |lane| lane.get(place).copied()));
        Ok(places.collect())
    }
}
