//! Assignment of gradients to buckets.
use crate::backend::Purpose;
use crate::ddp::model::options::Buckets;
use crate::{Error, Result};
use candle_core::{DType, Device, DeviceLocation, Shape};

pub(in crate::ddp) static DDP_ORDER: Purpose = Purpose::of("the order of DistributedDataParallel's buckets");

const MIB: f64 = (1 << 20) as f64;

/// The facts about a parameter that determine its bucket.
#[derive(Clone, Debug)]
pub(crate) struct ParameterInfo {
    pub(in crate::ddp) name: String,
    pub(in crate::ddp) shape: Shape,
    /// The block to which it belongs, under sharding: its gradients are a bucket.
    pub(in crate::ddp) block: Option<usize>,
    /// The dtype in which its gradient is all-reduced.
    pub(in crate::ddp) dtype: DType,
    /// The dtype in which its gradient arrives, which is the dtype of the tensor the model computes with.
    pub(in crate::ddp) arrives_as: DType,
    /// The dtype in which its gradient is returned: the variable's, unless the options say otherwise.
    pub(in crate::ddp) leaves_as: DType,
    pub(in crate::ddp) device: Device,
    /// Whether no rank needs to use it in the first synchronised backward pass.
    pub(in crate::ddp) may_be_unused: bool,
}

impl ParameterInfo {
    fn bytes(&self) -> usize {
        self.shape.elem_count() * self.dtype.size_in_bytes()
    }
}

/// The sizes in bytes at which a bucket is full.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BucketCaps {
    first: usize,
    others: usize,
}

impl BucketCaps {
    /// Converts sizes in MiB, as in PyTorch's `bucket_cap_mb`; 0 gives every parameter its own bucket.
    pub(in crate::ddp) fn new(buckets: Buckets) -> Result<Self> {
        let bytes = |argument, mib: f64| {
            if mib >= 0.0 {
                // The cast saturates: infinity means one bucket for all parameters.
                Ok((mib * MIB) as usize)
            } else {
                Err(Error::invalid(argument, format!("it must be a size in MiB of at least 0, not {mib}")))
            }
        };
        let Buckets { first_bucket_mb: first, bucket_cap_mb: others, .. } = buckets;
        Ok(Self { first: bytes("first_bucket_mb", first)?, others: bytes("bucket_cap_mb", others)? })
    }
}

/// Assigns parameters to buckets. `order` is the order in which their gradients are expected.
///
/// A bucket holds gradients of one dtype, of variables of one dtype, on one device. A parameter is appended to the
/// open bucket of its kind, which closes at its cap; the first bucket of a kind has a smaller cap, so that
/// communication begins early (PyTorch's `compute_bucket_assignment_by_size`). The last buckets are small too, each
/// with at most half of the remaining bytes, because little or no computation hides their all-reduce. The buckets are
/// returned in the order in which they are expected to fill up.
pub(in crate::ddp) fn plan(parameters: &[ParameterInfo], order: &[usize], caps: BucketCaps) -> Vec<Vec<usize>> {
    struct Open {
        kind: (DType, DType, DeviceLocation),
        cap: usize,
        bytes: usize,
        /// Bytes of all parameters of this kind that are not in a bucket yet.
        left: usize,
        members: Vec<usize>,
        last: usize,
    }
    let kind_of = |parameter: &ParameterInfo| (parameter.dtype, parameter.leaves_as, parameter.device.location());
    if parameters.iter().any(|parameter| parameter.block.is_some()) {
        return by_blocks(parameters, kind_of);
    }
    let mut open: Vec<Open> = Vec::new();
    let mut closed: Vec<(usize, Vec<usize>)> = Vec::new();
    for (position, &index) in order.iter().enumerate() {
        let parameter = &parameters[index];
        let kind = kind_of(parameter);
        let at = open.iter().position(|bucket| bucket.kind == kind).unwrap_or_else(|| {
            let left = order.iter().map(|index| &parameters[*index]).filter(|other| kind_of(other) == kind);
            let left = left.map(ParameterInfo::bytes).sum();
            open.push(Open { kind, cap: caps.first, bytes: 0, left, members: Vec::new(), last: 0 });
            open.len() - 1
        });
        let bucket = &mut open[at];
        bucket.members.push(index);
        bucket.bytes += parameter.bytes();
        bucket.left -= parameter.bytes();
        bucket.last = position;
        if bucket.bytes >= bucket.cap {
            closed.push((position, std::mem::take(&mut bucket.members)));
            (bucket.bytes, bucket.cap) = (0, caps.others.min(caps.first.max(bucket.left / 2)));
        }
    }
    closed.extend(open.into_iter().filter(|bucket| !bucket.members.is_empty()).map(|open| (open.last, open.members)));
    closed.sort_by_key(|(last, _)| *last);
    closed.into_iter().map(|(_, members)| members).collect()
}

/// A bucket for each kind of parameter in each block. The last block comes first, and what is outside of blocks, 0, last: its gradients
/// are complete at the end.
fn by_blocks<K: PartialEq>(parameters: &[ParameterInfo], kind_of: impl Fn(&ParameterInfo) -> K) -> Vec<Vec<usize>> {
    let mut buckets: Vec<Vec<usize>> = Vec::new();
    for (index, parameter) in parameters.iter().enumerate() {
        let fits = |bucket: &&mut Vec<usize>| {
            let first = &parameters[bucket[0]];
            first.block == parameter.block && kind_of(first) == kind_of(parameter)
        };
        match buckets.iter_mut().find(fits) {
            Some(bucket) => bucket.push(index),
            None => buckets.push(vec![index]),
        }
    }
    buckets.sort_by_key(|bucket| std::cmp::Reverse(parameters[bucket[0]].block));
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(sizes: &[(usize, DType)]) -> Vec<ParameterInfo> {
        let info = |(index, (elements, dtype)): (usize, &(usize, DType))| ParameterInfo {
            name: format!("p{index}"),
            block: None,
            shape: Shape::from(*elements),
            dtype: *dtype,
            arrives_as: *dtype,
            leaves_as: *dtype,
            device: Device::Cpu,
            may_be_unused: false,
        };
        sizes.iter().enumerate().map(info).collect()
    }

    fn caps(first: usize, others: usize) -> BucketCaps {
        BucketCaps { first, others }
    }

    #[test]
    fn a_bucket_closes_once_it_has_reached_its_cap() {
        let parameters = parameters(&[(10, DType::F32); 6]);
        // 40 bytes each: the first bucket closes at 40, the next at 100 (so after three).
        assert_eq!(plan(&parameters, &[5, 4, 3, 2, 1, 0], caps(40, 100)), [vec![5], vec![4, 3, 2], vec![1], vec![0]]);
        assert_eq!(plan(&parameters, &[0, 1, 2], caps(0, 0)), [vec![0], vec![1], vec![2]]);
        assert_eq!(plan(&parameters, &[0, 1, 2], caps(usize::MAX, usize::MAX)), [vec![0, 1, 2]]);
    }

    #[test]
    fn buckets_become_smaller_towards_the_end() {
        let parameters = parameters(&[(10, DType::F32); 16]);
        let order: Vec<usize> = (0..16).collect();
        let sizes: Vec<usize> = plan(&parameters, &order, caps(40, 160)).iter().map(Vec::len).collect();
        // After the first bucket: at most 4 (the cap), and never more than half of the rest.
        assert_eq!(sizes, [1, 4, 4, 4, 2, 1]);
    }

    #[test]
    fn dtypes_do_not_share_buckets_and_buckets_come_in_order_of_completion() {
        let (f, h) = (DType::F32, DType::BF16);
        let parameters = parameters(&[(10, f), (10, h), (10, f), (10, h), (10, f)]);
        // f32 closes at its second member (position 2); bf16 (20 bytes each) stays open until the end.
        let plan = plan(&parameters, &[0, 1, 2, 3, 4], caps(80, 80));
        assert_eq!(plan, [vec![0, 2], vec![1, 3], vec![4]]);
    }

    #[test]
    fn sizes_are_checked() {
        assert!(BucketCaps::new(Buckets { bucket_cap_mb: f64::INFINITY, ..Default::default() }).is_ok());
        for bad in [-1.0, f64::NAN] {
            let error = BucketCaps::new(Buckets { bucket_cap_mb: bad, ..Default::default() }).unwrap_err().to_string();
            assert!(error.contains("bucket_cap_mb"), "{error}");
        }
    }
}
