//! The buckets' storage.
use crate::Result;
use crate::backend::{Label, Work};
use crate::ddp::buckets::count;
use crate::ddp::buckets::groups::Groups;
use crate::ddp::buckets::plan::ParameterInfo;
use crate::ddp::buckets::sums::{Sum, Write};
use crate::error::GRADIENTS;
use crate::kernels::Assignment;
use crate::placement::Cut;
use crate::process_group::ProcessGroup;
use crate::tensor::copy;
use crate::tensor::finite::non_finite;
use crate::trace::{self, Trace};
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Shape, Tensor};

/// A gradient that has not been copied into its bucket yet.
struct Arrival {
    slot: usize,
    gradient: Tensor,
    write: Write,
}

/// For example `the gradients of fc1.weight, fc1.bias and 4 more parameters (bucket 0)`.
fn label(parameters: &[ParameterInfo], number: usize, members: &[usize]) -> Label {
    const NAMED: usize = 2;
    let names: Vec<&str> = members.iter().take(NAMED).map(|index| parameters[*index].name.as_str()).collect();
    let names = names.join(", ");
    Label::register(match members.len().saturating_sub(NAMED) {
        0 => format!("{GRADIENTS}{names} (bucket {number})"),
        1 => format!("{GRADIENTS}{names} and 1 more parameter (bucket {number})"),
        more => format!("{GRADIENTS}{names} and {more} more parameters (bucket {number})"),
    })
}

/// The numbers that a rank sends to the others in a synchronised pass.
#[derive(Clone, Copy, Debug)]
pub(in crate::ddp) struct Message {
    /// Whether it was asked to stop.
    pub(in crate::ddp) is_stop_asked: bool,
    /// Whether it has a number that is not finite, if anybody looks.
    pub(in crate::ddp) is_non_finite: Option<bool>,
    /// Its count, in a weighted pass.
    pub(in crate::ddp) count: Option<f64>,
}

/// The place for a count in a bucket.
struct CountRoom {
    /// A view that follows the used flags.
    slots: Tensor,
    /// A view of the whole bucket with it.
    sent: Tensor,
}

/// The lengths of a bucket's parts, in elements.
struct Lengths {
    flags: usize,
    with_flags: usize,
    for_count: usize,
    with_count: usize,
}

/// A flat tensor with the gradients of some parameters, followed by the used flags: one element per parameter, which
/// after the all-reduce is above zero if any rank used that parameter.
pub(in crate::ddp) struct Bucket {
    /// The memory of this sum, the flags and the count; None between uses under ZeRO, where all buckets share some memory.
    storage: Option<Tensor>,
    lengths: Lengths,
    /// How the gradients are cut for the ranks over which the model is spread, if it is.
    pub(in crate::ddp) cut: Cut,
    shapes: Vec<Shape>,
    pub(in crate::ddp) tensor: Tensor,
    pub(in crate::ddp) members: Vec<usize>,
    /// The gradients, as views of the same storage.
    pub(in crate::ddp) sum: Sum,
    /// Under virtual ranks, memory for further sums, of subtrees that are not complete.
    pub(in crate::ddp) stack: Vec<Sum>,
    /// Whether gradients arrive in a dtype whose numbers all exist in the bucket's.
    pub(in crate::ddp) is_exact: bool,
    /// A view of `tensor` after the gradients: the used flags, and in the first bucket two more, which say whether this rank was
    /// asked to stop, and whether its loss is not finite.
    flags: Tensor,
    /// The flags of a rank that used all members and has nothing else to say, which is the common case; made once.
    usual_flags: Tensor,
    /// The room for the count of a weighted pass, which only the first bucket has.
    count: Option<CountRoom>,
    /// Whether each member's gradient has arrived in this backward pass.
    pub(in crate::ddp) arrived: Vec<bool>,
    pub(in crate::ddp) missing: usize,
    arrivals: Vec<Arrival>,
    pub(in crate::ddp) work: Option<Work>,
    /// The purpose of the bucket's collectives, for messages.
    pub(in crate::ddp) label: Label,
}

impl Bucket {
    /// Returns the bucket that is sent with this `number`.
    pub(in crate::ddp) fn new(
        parameters: &[ParameterInfo],
        number: usize,
        members: Vec<usize>,
        groups: &Groups,
    ) -> Result<Self> {
        let world_size = groups.main().world_size();
        let first = &parameters[members[0]];
        let (dtype, device) = (first.dtype, &first.device);
        let shapes: Vec<Shape> = members.iter().map(|index| parameters[*index].shape.clone()).collect();
        let within = groups.within().world_size();
        // The parts of a hybrid model are added up by several ranks each.
        let adders = if groups.main().virtual_ranks().is_some() { world_size / within } else { 1 };
        let cut = Cut::new(shapes.iter().map(Shape::elem_count), within).divisible(adders);
        let flags = members.len() + if number == 0 { 2 } else { 0 };
        let align = |count: usize| if device.is_cuda() { aligned(count, dtype, world_size) } else { count };
        let with_flags = align(cut.elements() + flags);
        let for_count = if number == 0 { count::elements(dtype, world_size) } else { 0 };
        let with_count = align(with_flags + for_count);
        let usual_flags = flag_tensor((0..flags).map(|flag| flag < members.len()), world_size, dtype, device)?;
        let none = usual_flags.narrow(0, 0, 0)?;
        let mut bucket = Self {
            storage: None,
            lengths: Lengths { flags, with_flags, for_count, with_count },
            cut,
            shapes,
            sum: Sum::none(&none),
            stack: Vec::new(),
            is_exact: members.iter().all(|index| is_exact(parameters[*index].arrives_as, dtype)),
            count: None,
            flags: none.clone(),
            usual_flags,
            arrived: vec![false; members.len()],
            missing: members.len(),
            arrivals: Vec::new(),
            work: None,
            label: label(parameters, number, &members),
            tensor: none,
            members,
        };
        bucket.occupy(Tensor::zeros(bucket.length(), dtype, device)?)?;
        Ok(bucket)
    }

    /// The elements of the memory that it needs.
    pub(in crate::ddp) fn length(&self) -> usize {
        self.lengths.with_count.max(self.cut.length())
    }

    pub(in crate::ddp) fn is_vacant(&self) -> bool {
        self.storage.is_none()
    }

    /// Gives it the memory `storage`, of at least its [`length`](Self::length), which may have any contents.
    pub(in crate::ddp) fn occupy(&mut self, storage: Tensor) -> Result<()> {
        let Lengths { flags, with_flags, for_count, with_count } = self.lengths;
        let sum = Sum::new(&storage, self.cut.elements(), self.cut.length(), &self.shapes)?;
        let tensor = storage.narrow(0, 0, with_flags)?;
        if for_count > 0 {
            let slots = storage.narrow(0, with_flags, for_count)?;
            self.count = Some(CountRoom { slots, sent: storage.narrow(0, 0, with_count)? });
        }
        self.flags = tensor.narrow(0, self.cut.elements(), flags)?;
        (self.sum, self.tensor, self.storage) = (sum, tensor, Some(storage));
        Ok(())
    }

    /// Takes its memory away, if it has any.
    pub(in crate::ddp) fn vacate(&mut self) -> Result<Option<Tensor>> {
        let none = self.usual_flags.narrow(0, 0, 0)?;
        self.sum = Sum::none(&none);
        (self.count, self.flags, self.tensor) = (None, none.clone(), none);
        Ok(self.storage.take())
    }

    /// The sum at `depth` of the stack; the lowest is the bucket itself.
    pub(in crate::ddp) fn sum_at(&self, depth: usize) -> &Sum {
        depth.checked_sub(1).map_or(&self.sum, |above| &self.stack[above])
    }

    /// Takes the gradient of the member `slot`.
    pub(in crate::ddp) fn put(&mut self, slot: usize, gradient: &Tensor, write: Write) -> Result<()> {
        self.arrivals.push(Arrival { slot, gradient: gradient.clone(), write });
        self.arrived[slot] = true;
        self.missing -= 1;
        // On a CPU each gradient is copied at once, while it is in the cache. On a GPU one launch copies all
        // gradients of a bucket, since launches dominate the cost.
        if self.tensor.device().is_cpu() || self.missing == 0 { self.flush() } else { Ok(()) }
    }

    /// Writes what the bucket carries besides the gradients: which members this rank `used` (None: all), and its message. Returns
    /// what is to be sent.
    pub(in crate::ddp) fn seal(
        &self,
        used: Option<&[bool]>,
        message: Message,
        group: &ProcessGroup,
    ) -> Result<&Tensor> {
        let (rank, world_size) = (group.rank(), group.world_size());
        let (dtype, device) = (self.tensor.dtype(), self.tensor.device());
        let Message { is_stop_asked, is_non_finite, count } = message;
        let is_non_finite = is_non_finite == Some(true);
        if used.is_none() && !is_stop_asked && !is_non_finite {
            copy::copy(&self.flags, &self.usual_flags)?;
        } else {
            let used = (0..self.members.len()).map(|slot| used.is_none_or(|used| used[slot]));
            let flags = used.chain([is_stop_asked, is_non_finite]).take(self.flags.elem_count());
            copy::copy(&self.flags, &flag_tensor(flags, world_size, dtype, device)?)?;
        }
        let (Some(room), Some(count)) = (&self.count, count) else { return Ok(&self.tensor) };
        copy::copy(&room.slots, &count::encode(count, rank, world_size, dtype, device)?)?;
        Ok(&room.sent)
    }

    /// Waits for its all-reduce, with this `number`.
    pub(in crate::ddp) fn finish(&self, number: usize, trace: Option<&Trace>) -> Result<()> {
        let Some(work) = &self.work else { return Ok(()) };
        work.wait()?;
        let bytes = self.tensor.elem_count() * self.tensor.dtype().size_in_bytes();
        if let Some(trace) = trace {
            trace::collective(trace, work, format_args!("all-reduce of bucket {number}, {bytes} bytes"));
        }
        Ok(())
    }

    /// In the first bucket after the all-reduce: above zero if any rank was asked to stop.
    pub(in crate::ddp) fn stop_flag(&self) -> Result<Tensor> {
        Ok(self.flags.narrow(0, self.members.len(), 1)?)
    }

    /// In the first bucket after the all-reduce: whether the loss of any rank is not finite.
    pub(in crate::ddp) fn non_finite_flag(&self) -> Result<bool> {
        Ok(self.are_set(self.members.len() + 1, 1)?[0])
    }

    /// The count of all ranks, after the all-reduce of a weighted pass.
    pub(in crate::ddp) fn total_count(&self) -> Result<f64> {
        self.count.as_ref().map_or(Ok(0.), |room| count::decode(&room.slots))
    }

    /// Whether any rank used each member, after the all-reduce.
    pub(in crate::ddp) fn used(&self) -> Result<Vec<bool>> {
        self.are_set(0, self.members.len())
    }

    /// After the all-reduce, for a GPU: [`judge`](crate::tensor::finite::judge)'s pair for each member, at its slot, whose second number is
    /// finite if any rank used the member.
    pub(in crate::ddp) fn verdicts(&self) -> Result<Tensor> {
        let flags = self.flags.narrow(0, 0, self.members.len())?.to_dtype(DType::F64)?;
        let zeros = flags.zeros_like()?;
        // 0 / 0 is NaN.
        Ok(Tensor::cat(&[&zeros.narrow(0, 0, 1)?, &zeros.div(&flags)?], 0)?)
    }

    fn are_set(&self, first: usize, count: usize) -> Result<Vec<bool>> {
        let flags = self.flags.narrow(0, first, count)?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        Ok(flags.into_iter().map(|flag| flag > 0.0).collect())
    }

    /// Copies all gradients that have arrived into the bucket.
    pub(in crate::ddp) fn flush(&mut self) -> Result<()> {
        let assignments: Vec<Assignment> = (self.arrivals.iter())
            .map(|arrival| Assignment {
                destination: &self.sum_at(arrival.write.depth).gradients[arrival.slot],
                source: &arrival.gradient,
                factor: arrival.write.factor,
                accumulate: arrival.write.accumulate,
            })
            .collect();
        copy::assign(&assignments)?;
        self.arrivals.clear();
        Ok(())
    }

    /// The members' gradients times `factor`, in the dtypes of their variables: views of the bucket if it has that dtype,
    /// otherwise views of one converted copy.
    pub(in crate::ddp) fn converted(&self, parameters: &[ParameterInfo], factor: f64) -> Result<Vec<Tensor>> {
        let dtype = parameters[self.members[0]].leaves_as;
        if dtype == self.tensor.dtype() {
            copy::scale(&self.sum.flat, factor)?;
            return Ok(self.sum.gradients.clone());
        }
        let (storage, shape) = copy::snapshot_tensor(&self.sum.flat, dtype)?;
        let flat = Tensor::from_storage(storage, shape, BackpropOp::none(), false);
        copy::scale(&flat, factor)?;
        Ok(copy::views(&flat, self.sum.gradients.iter().map(Tensor::shape))?)
    }

    /// Returns the first member whose gradient in the sum at `depth` contains an infinity or a NaN, and which of the two.
    pub(in crate::ddp) fn first_not_finite(&self, depth: usize) -> Result<Option<(usize, &'static str)>> {
        let Sum { flat, gradients, .. } = self.sum_at(depth);
        if non_finite(flat)?.is_none() {
            return Ok(None);
        }
        for (member, gradient) in self.members.iter().zip(gradients) {
            if let Some(value) = non_finite(gradient)? {
                return Ok(Some((*member, value)));
            }
        }
        Ok(None)
    }

    /// Forgets the backward pass, which has ended.
    pub(in crate::ddp) fn reset(&mut self) {
        self.arrived.fill(false);
        self.missing = self.members.len();
        self.arrivals.clear();
        self.work = None;
    }
}

/// The length, with zeros behind, at which the parts of all ranks begin at addresses that GPUs read best.
fn aligned(count: usize, dtype: DType, world_size: usize) -> usize {
    const BYTES: usize = 16;
    count.next_multiple_of(BYTES / dtype.size_in_bytes() * world_size)
}

/// Whether every number of the dtype `from` exists in `to`.
fn is_exact(from: DType, to: DType) -> bool {
    from == to || to == DType::F64 || (to == DType::F32 && from != DType::F64)
}

/// Returns flags whose sum over the ranks is at most 1.
fn flag_tensor(flags: impl Iterator<Item = bool>, world_size: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let values: Vec<f64> = flags.map(|flag| if flag { 1.0 / world_size as f64 } else { 0.0 }).collect();
    let length = values.len();
    Ok(Tensor::from_vec(values, length, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_all_ranks_are_aligned() {
        let lengths = [(1001, DType::F32, 3), (1001, DType::BF16, 8), (1024, DType::F64, 4)];
        assert_eq!(lengths.map(|(count, dtype, ranks)| aligned(count, dtype, ranks)), [1008, 1024, 1024]);
    }
}
