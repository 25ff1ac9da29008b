//! Caches of keys and values with the names and signatures of [`candle_nn::kv_cache`], through which gradients flow.
//!
//! candle's caches cut the graph: the tensors that they return have no gradient. Here a tensor that candle tracks
//! stays tracked until [`reset`](KvCache::reset); call that before every training forward pass. Without tracked
//! tensors, the caches work like candle's.
#[doc(no_inline)]
pub use candle_nn::kv_cache::*;

use candle_core::{Device, Result, Tensor};
use candle_ddp_tensor::function::{argument, is_tracked};
use candle_nn::kv_cache as plain;

/// Concatenates the earlier contents and `src`.
fn join(before: Option<&Tensor>, src: &Tensor, dim: usize) -> Result<Tensor> {
    match before {
        None => argument(src).contiguous(),
        Some(before) => Tensor::cat(&[argument(before), argument(src)], dim),
    }
}

/// Keys or values, which grow along one dimension.
#[derive(Clone, Debug)]
pub struct Cache {
    plain: plain::Cache,
    /// The whole contents, once a part of it is tracked; `plain` is empty then.
    tracked: Option<Tensor>,
}

impl Cache {
    /// An empty cache that grows along `dim`, with room for `max_seq_len` at first.
    pub fn new(dim: usize, max_seq_len: usize) -> Self {
        Self { plain: plain::Cache::new(dim, max_seq_len), tracked: None }
    }

    /// The dimension along which the cache grows.
    pub fn dim(&self) -> usize {
        self.plain.dim()
    }

    /// The length for which the cache has room.
    pub fn max_seq_len(&self) -> usize {
        self.plain.max_seq_len()
    }

    /// The length of the cached sequence.
    pub fn current_seq_len(&self) -> usize {
        let tracked = self.tracked.as_ref().and_then(|tracked| tracked.dim(self.dim()).ok());
        tracked.unwrap_or(self.plain.current_seq_len())
    }

    /// The cache's memory, whose beginning is in use.
    pub fn all_data(&self) -> &Option<Tensor> {
        if self.tracked.is_some() { &self.tracked } else { self.plain.all_data() }
    }

    /// The contents of the cache, if there are any.
    ///
    /// # Errors
    /// Returns candle's errors.
    pub fn current_data(&self) -> Result<Option<Tensor>> {
        if self.tracked.is_some() { Ok(self.tracked.clone()) } else { self.plain.current_data() }
    }

    /// Empties the cache.
    pub fn reset(&mut self) {
        self.plain.reset();
        self.tracked = None;
    }

    /// Adds `src` at the end.
    ///
    /// # Errors
    /// Returns an error if the tensor differs from the others in another dimension.
    pub fn append(&mut self, src: &Tensor) -> Result<()> {
        if self.tracked.is_none() && !is_tracked(src) {
            return self.plain.append(&src.detach());
        }
        self.tracked = Some(join(self.current_data()?.as_ref(), src, self.dim())?);
        self.plain.reset();
        Ok(())
    }
}

/// Keys and values.
#[derive(Clone, Debug)]
pub struct KvCache {
    k: Cache,
    v: Cache,
}

impl KvCache {
    /// An empty cache that grows along `dim`, with room for `max_seq_len` at first.
    pub fn new(dim: usize, max_seq_len: usize) -> Self {
        Self { k: Cache::new(dim, max_seq_len), v: Cache::new(dim, max_seq_len) }
    }

    /// Adds keys and values at the end, and returns all of them.
    ///
    /// # Errors
    /// Returns an error if the tensors differ from the others in another dimension.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        self.k.append(k)?;
        self.v.append(v)?;
        Ok((self.k()?.unwrap_or_else(|| k.clone()), self.v()?.unwrap_or_else(|| v.clone())))
    }
}

/// The last `max_seq_len` keys or values, in a ring.
#[derive(Clone, Debug)]
pub struct RotatingCache {
    plain: plain::RotatingCache,
    /// The same contents as in `plain`, once a part of them is tracked.
    tracked: Option<Tensor>,
}

impl RotatingCache {
    /// An empty ring of `max_seq_len` places along `dim`.
    pub fn new(dim: usize, max_seq_len: usize) -> Self {
        Self { plain: plain::RotatingCache::new(dim, max_seq_len), tracked: None }
    }

    /// The dimension of the ring.
    pub fn dim(&self) -> usize {
        self.plain.dim()
    }

    /// The number of places in the ring.
    pub fn max_seq_len(&self) -> usize {
        self.plain.max_seq_len()
    }

    /// The place where the next element goes.
    pub fn offset(&self) -> usize {
        self.plain.offset()
    }

    /// The total length of everything that was appended.
    pub fn current_seq_len(&self) -> usize {
        self.plain.current_seq_len()
    }

    /// The positions of the elements that [`append`](Self::append) would return for another `seq_len`.
    pub fn positions(&self, seq_len: usize) -> Vec<usize> {
        self.plain.positions(seq_len)
    }

    /// The attention mask after another `seq_len` elements, if one is needed: u8, not 0 for hidden elements.
    ///
    /// # Errors
    /// Returns candle's errors.
    pub fn attn_mask(&self, seq_len: usize, device: &Device) -> Result<Option<Tensor>> {
        self.plain.attn_mask(seq_len, device)
    }

    /// The ring's memory.
    pub fn all_data(&self) -> &Option<Tensor> {
        if self.tracked.is_some() { &self.tracked } else { self.plain.all_data() }
    }

    /// The ring, in the order of its places, if anything was appended.
    ///
    /// # Errors
    /// Returns candle's errors.
    pub fn current_data(&self) -> Result<Option<Tensor>> {
        if self.tracked.is_some() { Ok(self.tracked.clone()) } else { self.plain.current_data() }
    }

    /// Empties the ring.
    pub fn reset(&mut self) {
        self.plain.reset();
        self.tracked = None;
    }

    /// Writes `src` to the next places, and returns the ring, or `src` if it is longer than the ring.
    ///
    /// # Errors
    /// Returns an error if the tensor differs from the others in another dimension.
    pub fn append(&mut self, src: &Tensor) -> Result<Tensor> {
        let (dim, room, from) = (self.dim(), self.max_seq_len(), self.offset());
        let (src, before) = (&argument(src), self.current_data()?.as_ref().map(argument));
        let is_tracked = self.tracked.is_some() || is_tracked(src);
        let result = self.plain.append(&src.detach())?;
        if !is_tracked {
            return Ok(result);
        }
        let length = src.dim(dim)?;
        if length >= room {
            self.tracked = Some(src.narrow(dim, length - room, room)?.contiguous()?);
            return Ok(src.clone());
        }
        // Places are written from `from` on, and after the last one from the first on.
        let wrapped = (from + length).saturating_sub(room);
        let mut parts = vec![src.narrow(dim, length - wrapped, wrapped)?];
        if let Some(before) = &before {
            let size = before.dim(dim)?;
            parts.push(before.narrow(dim, wrapped, from.min(size) - wrapped)?);
            parts.push(src.narrow(dim, 0, length - wrapped)?);
            let behind = (from + length).min(size);
            parts.push(before.narrow(dim, behind, size - behind)?);
        } else {
            parts.push(src.narrow(dim, 0, length - wrapped)?);
        }
        parts.retain(|part| part.elem_count() > 0);
        let ring = Tensor::cat(&parts, dim)?;
        self.tracked = Some(ring.clone());
        Ok(ring)
    }
}

/// The last `max_seq_len` keys and values.
#[derive(Clone, Debug)]
pub struct RotatingKvCache {
    k: RotatingCache,
    v: RotatingCache,
}

impl RotatingKvCache {
    /// Empty rings of `max_seq_len` places along `dim`.
    pub fn new(dim: usize, max_seq_len: usize) -> Self {
        Self { k: RotatingCache::new(dim, max_seq_len), v: RotatingCache::new(dim, max_seq_len) }
    }

    /// The place where the next element goes.
    pub fn offset(&self) -> usize {
        self.k.offset()
    }

    /// The positions of the elements that [`append`](Self::append) would return for another `seq_len`.
    pub fn positions(&self, seq_len: usize) -> Vec<usize> {
        self.k.positions(seq_len)
    }

    /// The attention mask after another `seq_len` elements, if one is needed: u8, not 0 for hidden elements.
    ///
    /// # Errors
    /// Returns candle's errors.
    pub fn attn_mask(&self, seq_len: usize, device: &Device) -> Result<Option<Tensor>> {
        self.k.attn_mask(seq_len, device)
    }

    /// Writes keys and values to the next places, and returns the rings, or `k` and `v` if they are longer.
    ///
    /// # Errors
    /// Returns an error if the tensors differ from the others in another dimension.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        Ok((self.k.append(k)?, self.v.append(v)?))
    }
}

/// The methods that caches of keys and values share, whatever kind of cache each of them is.
macro_rules! keys_and_values {
    ($name:ident, $cache:ident, $length:literal) => {
        impl $name {
            /// The keys.
            pub fn k_cache(&self) -> &$cache {
                &self.k
            }

            /// The values.
            pub fn v_cache(&self) -> &$cache {
                &self.v
            }

            /// The keys, mutably.
            pub fn k_cache_mut(&mut self) -> &mut $cache {
                &mut self.k
            }

            /// The values, mutably.
            pub fn v_cache_mut(&mut self) -> &mut $cache {
                &mut self.v
            }

            /// The keys, if anything was appended.
            ///
            /// # Errors
            /// Returns candle's errors.
            pub fn k(&self) -> Result<Option<Tensor>> {
                self.k.current_data()
            }

            /// The values, if anything was appended.
            ///
            /// # Errors
            /// Returns candle's errors.
            pub fn v(&self) -> Result<Option<Tensor>> {
                self.v.current_data()
            }

            #[doc = $length]
            pub fn current_seq_len(&self) -> usize {
                self.k.current_seq_len()
            }

            /// Empties both.
            pub fn reset(&mut self) {
                self.k.reset();
                self.v.reset();
            }
        }
    };
}
keys_and_values!(KvCache, Cache, "The length of the cached sequence.");
keys_and_values!(RotatingKvCache, RotatingCache, "The total length of everything that was appended.");

/// Keys and values, which are copied each time they grow.
#[derive(Clone, Debug)]
pub struct ConcatKvCache {
    k: Option<Tensor>,
    v: Option<Tensor>,
    dim: usize,
}

impl ConcatKvCache {
    /// An empty cache that grows along `dim`.
    pub fn new(dim: usize) -> Self {
        Self { k: None, v: None, dim }
    }

    /// The length of the cached sequence.
    pub fn current_seq_len(&self) -> usize {
        self.k.as_ref().and_then(|k| k.dims().get(self.dim).copied()).unwrap_or(0)
    }

    /// Whether nothing was appended.
    pub fn is_empty(&self) -> bool {
        self.k.is_none()
    }

    /// The dimension along which the cache grows.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Adds keys and values at the end, and returns all of them.
    ///
    /// # Errors
    /// Returns an error if the tensors differ from the others in another dimension.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let (k, v) = (join(self.k.as_ref(), k, self.dim)?, join(self.v.as_ref(), v, self.dim)?);
        (self.k, self.v) = (Some(k.clone()), Some(v.clone()));
        Ok((k, v))
    }

    /// Empties the cache.
    pub fn reset(&mut self) {
        (self.k, self.v) = (None, None);
    }

    /// All keys, if anything was appended.
    pub fn k(&self) -> Option<&Tensor> {
        self.k.as_ref()
    }

    /// All values, if anything was appended.
    pub fn v(&self) -> Option<&Tensor> {
        self.v.as_ref()
    }

    /// All keys, to be changed.
    pub fn k_mut(&mut self) -> Option<&mut Tensor> {
        self.k.as_mut()
    }

    /// All values, to be changed.
    pub fn v_mut(&mut self) -> Option<&mut Tensor> {
        self.v.as_mut()
    }

    /// All keys and values, if anything was appended.
    pub fn into_inner(self) -> Option<(Tensor, Tensor)> {
        self.k.zip(self.v)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};

    fn flat(t: &Tensor) -> Vec<f32> {
        t.flatten_all().unwrap().to_vec1().unwrap()
    }

    /// Rings of tracked and of untracked tensors are equal, for all lengths, and gradients reach the tensors in
    /// them.
    #[test]
    fn rings_are_candles_and_have_gradients() {
        for room in 1..6 {
            for lengths in [[1, 1, 1, 1, 1, 1, 1], [2, 3, 1, 4, 2, 2, 5], [5, 1, 1, 6, 2, 1, 3], [3, 3, 3, 3, 3, 3, 3]]
            {
                let (mut ours, mut candles) = (RotatingCache::new(1, room), plain::RotatingCache::new(1, room));
                for (number, length) in lengths.into_iter().enumerate() {
                    let x = Tensor::rand(0f32, 1.0, (2, length), &Device::Cpu).unwrap();
                    let var = Var::from_tensor(&x).unwrap();
                    // The first one is not tracked.
                    let ring = ours.append(if number == 0 { &x } else { var.as_tensor() }).unwrap();
                    assert_eq!(flat(&ring), flat(&candles.append(&x).unwrap()), "{room} {lengths:?} {number}");
                    let ([a, b], [c, d]) =
                        ([ours.offset(), ours.current_seq_len()], [candles.offset(), candles.current_seq_len()]);
                    assert_eq!((a, b), (c, d));
                    if number > 0 {
                        let gradient = ring.sum_all().unwrap().backward().unwrap();
                        let kept = if length >= room { length } else { length.min(room) };
                        let sum = gradient.get(&var).unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap();
                        assert_eq!(sum, 2.0 * kept as f32);
                    }
                }
            }
        }
    }

    #[test]
    fn what_grows_has_gradients() {
        let x = Var::from_tensor(&Tensor::rand(0f32, 1.0, (1, 3), &Device::Cpu).unwrap()).unwrap();
        let first = Tensor::ones((1, 2), candle_core::DType::F32, &Device::Cpu).unwrap();
        let (mut cache, mut concat) = (KvCache::new(1, 2), ConcatKvCache::new(1));
        for tensor in [&first, x.as_tensor(), x.as_tensor()] {
            cache.append(tensor, &first).unwrap();
            concat.append(tensor, &first).unwrap();
        }
        assert_eq!([cache.current_seq_len(), concat.current_seq_len()], [8, 8]);
        for all in [cache.k().unwrap().unwrap(), concat.k().unwrap().clone()] {
            let gradient = all.sum_all().unwrap().backward().unwrap();
            assert_eq!(flat(gradient.get(&x).unwrap()), [2.0; 3]);
        }
        cache.reset();
        assert_eq!((cache.current_seq_len(), cache.k().unwrap().is_none()), (0, true));
    }
}
