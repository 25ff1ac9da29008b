//! Checks that every engine makes on the calling thread before anything is sent.
use super::Collective;
use super::collective::Arguments;
use crate::{Error, Result};
use candle_core::{DType, Device, Storage, Tensor};
use candle_ddp_engine::{Call, CallSite, Channel, Element, Extent, Label, Operation, ReduceOp, ShapeCode, significant};
use std::ops::Range;

/// Checks whether an engine can reach a tensor. If not, the error says where the tensor is and what to do; it follows
/// the tensor's description.
pub(super) type CheckDevice<'a> = &'a dyn Fn(&Tensor) -> std::result::Result<(), String>;

/// Checks the tensors and arguments of `collective` on one rank of a group, and labels the call.
pub(super) fn check(
    rank: usize,
    world_size: usize,
    check_device: CheckDevice,
    collective: &Collective,
) -> Result<(Call, Channel)> {
    let (call, channel) = call_of(rank, world_size, check_device, collective)?;
    Ok((Call { label: Label::current(), place: CallSite::current(), ..call }, channel))
}

fn call_of(
    rank: usize,
    world_size: usize,
    check_device: CheckDevice,
    collective: &Collective,
) -> Result<(Call, Channel)> {
    let arguments = collective.arguments();
    let Arguments { operation, output, input, reduction, root, peer } = arguments;
    let checker = Checker { rank, world_size, check_device, name: operation.name() };
    let channel = match peer {
        None => Channel::Collectives,
        Some(peer) => checker.message(operation, peer)?,
    };
    // The tensor whose elements are counted, and the other one, if there may be one.
    let [output_name, input_name] = arguments.names();
    let (output, input) = ((output_name, output), (input_name, input));
    let [output_extent, input_extent] = operation.extents();
    let ((name, counted), (other_name, other), extent) = match input_extent {
        Extent::One => (input, output, output_extent),
        _ => (output, input, input_extent),
    };
    let Some(counted) = counted else { return Ok((Call::bare(operation), channel)) };
    let call = checker.call(operation, counted, reduction, root)?;
    let other = match (extent, root) {
        (Extent::AllOnRoot, Some(root)) => checker.on_root(other_name, other, root)?,
        _ => other,
    };
    if let Some(other) = other {
        let (whole, part) = ((other_name, other), (name, counted));
        if extent == Extent::One {
            checker.exchange(whole, part)?;
        } else {
            // In an in-place all-gather, the input is this rank's part of the output.
            let each = counted.elem_count();
            let own = (output_extent == Extent::All).then(|| rank * each..(rank + 1) * each);
            checker.pair(whole, part, own)?;
        }
    }
    Ok((call, channel))
}

impl Collective {
    /// Makes the checks of this crate's engines on rank `rank` of a group of `world_size` whose tensors are on `device`:
    /// ranks exist, and tensors are contiguous, on that device, of a supported dtype, and fit together, in whole rows and
    /// without overlapping. An engine makes them before it sends anything, since the sizes of its buffers follow from the
    /// tensors.
    ///
    /// # Errors
    /// Returns an error that names the call and the tensor, and says what to do.
    pub fn check(&self, rank: usize, world_size: usize, device: &Device) -> Result<()> {
        check(rank, world_size, &|tensor| on_device(tensor, device), self).map(drop)
    }
}

/// Checks whether `tensor` is on `device`, the group's, for a [`CheckDevice`].
pub(crate) fn on_device(tensor: &Tensor, device: &Device) -> std::result::Result<(), String> {
    if tensor.device().same_device(device) {
        return Ok(());
    }
    let (is, belongs) = (tensor.device().location(), device.location());
    Err(if is == belongs {
        format!(
            "is on {is:?} through another candle Device than this group's, and so on another stream: use the group's own \
             (ProcessGroup::device) for all tensors"
        )
    } else {
        format!("is on {is:?}, but this group works on {belongs:?}: move it with to_device(pg.device())")
    })
}

/// Two tensors of a call, by their arguments' names.
fn describe(whole: (&str, &Tensor), part: (&str, &Tensor)) -> String {
    let [whole, part] = [whole, part]
        .map(|(name, tensor)| format!("{name} is {}", crate::error::describe(tensor.dtype(), tensor.shape())));
    format!("{whole}, {part}")
}

struct Checker<'a> {
    rank: usize,
    world_size: usize,
    check_device: CheckDevice<'a>,
    name: &'static str,
}

impl Checker<'_> {
    fn call(
        &self,
        operation: Operation,
        tensor: &Tensor,
        reduction: Option<ReduceOp>,
        root: Option<usize>,
    ) -> Result<Call> {
        let element = self.tensor(tensor)?;
        if reduction == Some(ReduceOp::Avg) && !element.is_float() {
            return Err(self.refuse(format!(
                "ReduceOp::Avg needs floating point, but this is {}: use ReduceOp::Sum and divide",
                tensor.dtype().as_str()
            )));
        }
        if let Some(root) = root {
            self.in_world(root)?;
        }
        Ok(Call {
            element: Some(element),
            reduction,
            root,
            count: tensor.elem_count() as u64,
            shape: ShapeCode::of(tensor.dims()),
            ..Call::bare(operation)
        })
    }

    fn tensor(&self, tensor: &Tensor) -> Result<Element> {
        let described = || crate::error::describe(tensor.dtype(), tensor.shape());
        if let Err(reason) = (self.check_device)(tensor) {
            return Err(self.refuse(format!("{} {reason}", described())));
        }
        if !tensor.is_contiguous() {
            return Err(self.refuse(format!(
                "{} with strides {:?} is not contiguous: pass a contiguous() copy",
                described(),
                tensor.stride()
            )));
        }
        element(tensor.dtype()).ok_or_else(|| Error::UnsupportedDType {
            operation: self.name.to_string(),
            dtype: tensor.dtype(),
            supported: Element::SUPPORTED,
        })
    }

    /// Checks that both tensors can be used, and that `whole` has a part for each rank, as large as `part`, which may be the
    /// elements `place` of `whole`.
    fn pair(&self, whole: (&str, &Tensor), part: (&str, &Tensor), place: Option<Range<usize>>) -> Result<()> {
        self.same_dtype(whole, part)?;
        self.times(whole, part, self.world_size)?;
        self.rows(whole, self.world_size, part, 1)?;
        self.distinct(whole, part, place)
    }

    /// Checks the tensors of an all-to-all. The output may lack this rank's own part.
    fn exchange(&self, output: (&str, &Tensor), input: (&str, &Tensor)) -> Result<()> {
        let (count, world_size) = (input.1.elem_count(), self.world_size);
        if !count.is_multiple_of(world_size) {
            return Err(self.refuse(format!(
                "input has {count} elements, which cannot be split into {world_size} equal parts, one for each rank"
            )));
        }
        self.same_dtype(output, input)?;
        let lacks_own = output.1.elem_count() != count && output.1.elem_count() == count - count / world_size;
        if !lacks_own {
            self.times(output, input, 1)?;
        }
        self.rows(input, world_size, output, if lacks_own { world_size - 1 } else { world_size })?;
        self.distinct(output, input, None)
    }

    fn same_dtype(&self, whole: (&str, &Tensor), part: (&str, &Tensor)) -> Result<()> {
        self.tensor(whole.1)?;
        self.tensor(part.1)?;
        if whole.1.dtype() != part.1.dtype() {
            return Err(self.refuse(format!("{}: they must have the same dtype", describe(whole, part))));
        }
        Ok(())
    }

    /// Checks that `whole` has `times` the elements of `part`.
    fn times(&self, whole: (&str, &Tensor), part: (&str, &Tensor), times: usize) -> Result<()> {
        if Some(whole.1.elem_count()) != part.1.elem_count().checked_mul(times) {
            let times = if times == 1 { String::new() } else { format!("{times} (world_size) times ") };
            return Err(self.refuse(format!(
                "{}: {} must have {times}as many elements as {}",
                describe(whole, part),
                whole.0,
                part.0
            )));
        }
        Ok(())
    }

    /// Checks that the parts of two tensors, so many of each, are whole rows of the same shape. One-dimensional tensors are
    /// buffers without rows: of these, only the number of elements counts.
    fn rows(&self, a: (&str, &Tensor), parts_of_a: usize, b: (&str, &Tensor), parts_of_b: usize) -> Result<()> {
        let mut shapes = [const { None }; 2];
        for (shape, ((name, tensor), parts)) in shapes.iter_mut().zip([(a, parts_of_a), (b, parts_of_b)]) {
            let [rows, rest @ ..] = tensor.dims() else { continue };
            if rest.is_empty() || tensor.elem_count() == 0 {
                continue;
            }
            if !rows.is_multiple_of(parts) {
                return Err(self.refuse(format!(
                    "{}: dimension 0 of {name} has size {rows}, which cannot be split into {parts} equal parts, one for each \
                     rank. Pad it, or pass flatten_all() of both tensors if they have no rows",
                    describe(a, b)
                )));
            }
            *shape = Some([&[rows / parts], rest].concat());
        }
        if let [Some(of_a), Some(of_b)] = &shapes
            && !significant(of_a).eq(significant(of_b))
        {
            return Err(self.refuse(format!(
                "{}: each rank's part is {of_a:?} in {} and {of_b:?} in {}, but must have the same shape, or one of the \
                 tensors must be one-dimensional: pass its flatten_all()",
                describe(a, b),
                a.0,
                b.0
            )));
        }
        Ok(())
    }

    /// Checks that `part` shares no memory with `whole`, or is its elements `place`.
    fn distinct(&self, whole: (&str, &Tensor), part: (&str, &Tensor), place: Option<Range<usize>>) -> Result<()> {
        if overlap(whole.1, part.1) {
            let size = whole.1.dtype().size_in_bytes();
            let start = byte_range(whole.1).start;
            let is_place =
                |place: &Range<usize>| byte_range(part.1) == (start + place.start * size..start + place.end * size);
            if !place.as_ref().is_some_and(is_place) {
                let but = if place.is_some() { ", or this rank's own part of output as input" } else { "" };
                return Err(self.refuse(format!("{} and {} overlap: pass a copy() of one{but}", whole.0, part.0)));
            }
        }
        Ok(())
    }

    /// Checks the tensor that only the root passes.
    fn on_root<'a>(
        &self,
        argument: &'static str,
        tensor: Option<&'a Tensor>,
        root: usize,
    ) -> Result<Option<&'a Tensor>> {
        let (name, rank) = (self.name, self.rank);
        match tensor {
            None if rank == root => {
                Err(Error::invalid(argument, format!("{name}: rank {rank} is the root and must pass it")))
            }
            Some(_) if rank != root => {
                let reason = format!("{name}: rank {rank} must pass None, for only the root (rank {root}) has it");
                Err(Error::invalid(argument, reason))
            }
            tensor => Ok(tensor),
        }
    }

    fn in_world(&self, rank: usize) -> Result<()> {
        if rank < self.world_size { Ok(()) } else { Err(Error::RankOutOfRange { rank, world_size: self.world_size }) }
    }

    /// The channel of a message.
    fn message(&self, operation: Operation, peer: usize) -> Result<Channel> {
        self.in_world(peer)?;
        if peer == self.rank {
            let reason = format!("{}: rank {peer} is this rank itself, which needs no message", self.name);
            return Err(Error::invalid("peer", reason));
        }
        Ok(if operation == Operation::Send { Channel::SendTo(peer) } else { Channel::RecvFrom(peer) })
    }

    fn refuse(&self, reason: String) -> Error {
        Error::InvalidTensor { rank: self.rank, operation: self.name.to_string(), reason }
    }
}

/// The engines' name of `dtype`, if they move and reduce it.
pub(super) fn element(dtype: DType) -> Option<Element> {
    Some(match dtype {
        DType::F32 => Element::F32,
        DType::F64 => Element::F64,
        DType::F16 => Element::F16,
        DType::BF16 => Element::BF16,
        DType::I64 => Element::I64,
        DType::U32 => Element::U32,
        DType::U8 => Element::U8,
        _ => return None,
    })
}

/// The bytes of its storage that a contiguous tensor covers.
pub(super) fn byte_range(tensor: &Tensor) -> Range<usize> {
    let size = tensor.dtype().size_in_bytes();
    let start = tensor.layout().start_offset() * size;
    start..start + tensor.elem_count() * size
}

/// A number that identifies the storage of a contiguous tensor while the tensor lives, and the bytes that the tensor
/// covers. Waits while another thread writes to the storage.
pub(super) fn extent(tensor: &Tensor) -> (usize, Range<usize>) {
    // The address is only compared, never dereferenced.
    (std::ptr::from_ref::<Storage>(&tensor.storage_and_layout().0).addr(), byte_range(tensor))
}

/// Whether two contiguous tensors have bytes in common.
fn overlap(a: &Tensor, b: &Tensor) -> bool {
    let ((a, a_bytes), (b, b_bytes)) = (extent(a), extent(b));
    a == b && intersect(&a_bytes, &b_bytes)
}

/// Whether two ranges of bytes of one storage have some in common.
pub(super) fn intersect(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start.max(b.start) < a.end.min(b.end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    fn zeros(shape: &[usize], dtype: DType) -> Tensor {
        Tensor::zeros(shape, dtype, &Device::Cpu).unwrap()
    }

    fn refusal(collective: Collective) -> String {
        check(1, 2, &|_| Ok(()), &collective).unwrap_err().to_string()
    }

    #[test]
    fn what_cannot_be_done_is_refused_with_advice() {
        let (a, b) = (zeros(&[2, 3], DType::F32), zeros(&[4, 3], DType::F32));
        let sum = ReduceOp::Sum;
        let cases = [
            (Collective::AllReduce { tensor: a.t().unwrap(), op: sum }, "not contiguous: pass a contiguous() copy"),
            (Collective::AllReduce { tensor: zeros(&[1], DType::I32), op: sum }, "does not support dtype I32"),
            (
                Collective::AllReduce { tensor: zeros(&[1], DType::I64), op: ReduceOp::Avg },
                "use ReduceOp::Sum and divide",
            ),
            (Collective::Broadcast { tensor: a.clone(), root: 2 }, "rank 2 is outside of a world of 2"),
            (Collective::AllGather { output: a.clone(), input: b.clone() }, "output is f32[2, 3], input is f32[4, 3]"),
            (Collective::AllGather { output: zeros(&[12], DType::F64), input: a.clone() }, "must have the same dtype"),
            (
                Collective::AllGather { output: b.clone(), input: b.narrow(0, 0, 2).unwrap() },
                "output and input overlap",
            ),
            (Collective::ReduceScatter { output: b.clone(), input: a.clone(), op: sum }, "2 (world_size) times"),
            (
                Collective::AllToAll { output: zeros(&[3], DType::U8), input: zeros(&[3], DType::U8) },
                "cannot be split into 2 equal parts",
            ),
            (Collective::Gather { output: None, input: a.clone(), root: 1 }, "rank 1 is the root and must pass it"),
            (
                Collective::Scatter { output: a.clone(), input: Some(b.clone()), root: 0 },
                "only the root (rank 0) has it",
            ),
            (Collective::Send { tensor: a.clone(), peer: 1 }, "is this rank itself"),
            (Collective::Recv { tensor: a.clone(), peer: 7 }, "rank 7 is outside"),
        ];
        for (collective, expected) in cases {
            let refusal = refusal(collective.clone());
            assert!(refusal.contains(expected), "{collective:?}: {refusal}");
        }
        for rows in [b.narrow(0, 1, 2).unwrap(), zeros(&[2, 0], DType::F32)] {
            check(1, 2, &|_| Ok(()), &Collective::AllReduce { tensor: rows, op: sum }).unwrap();
        }
    }

    #[test]
    fn parts_are_whole_rows_of_one_shape() {
        let tensor = |shape: &[usize]| zeros(shape, DType::F32);
        // On two ranks: the whole, a part, and what the refusal says.
        let cases: [(&[usize], &[usize], Option<&str>); 12] = [
            (&[4, 3], &[2, 3], None),
            // Stacked, flat, or with a dimension of size 1.
            (&[2, 2, 3], &[2, 3], None),
            (&[2, 3], &[3], None),
            (&[12], &[2, 3], None),
            (&[4, 3], &[6], None),
            (&[4, 1, 3], &[2, 3], None),
            (&[2], &[], None),
            (&[0, 3], &[0, 5], None),
            (&[3, 4], &[6], Some(" has size 3, which cannot be split into 2 equal parts")),
            (&[1, 12], &[2, 3], Some(" has size 1, which")),
            (&[4, 3], &[3, 2], Some("part is [2, 3] in ")),
            (&[2, 2, 3], &[6, 1], Some("must have the same shape, or one of the tensors must")),
        ];
        for (whole, part, expected) in cases {
            let (whole, part) = (tensor(whole), tensor(part));
            for collective in [
                Collective::AllGather { output: whole.clone(), input: part.clone() },
                Collective::ReduceScatter { output: part.clone(), input: whole.clone(), op: ReduceOp::Sum },
                Collective::Gather { output: Some(whole.clone()), input: part.clone(), root: 1 },
                Collective::Scatter { output: part.clone(), input: Some(whole.clone()), root: 1 },
            ] {
                match (expected, check(1, 2, &|_| Ok(()), &collective)) {
                    (None, result) => drop(result.unwrap()),
                    (Some(expected), result) => {
                        let refusal = result.unwrap_err().to_string();
                        assert!(refusal.contains(expected), "{}: {refusal}", collective.name());
                    }
                }
            }
        }
        // On three ranks, where the output may lack the own part.
        let cases: [(&[usize], &[usize], Option<&str>); 8] = [
            (&[6, 2], &[6, 2], None),
            (&[6, 2], &[4, 2], None),
            (&[6, 2], &[12], None),
            (&[12], &[4, 2], None),
            (&[12], &[3, 4], None),
            (&[4, 3], &[4, 3], Some("dimension 0 of input has size 4, which cannot be split into 3 equal parts")),
            (&[12], &[4, 3], Some("dimension 0 of output has size 4")),
            (&[6, 2], &[3, 4], Some("part is [2, 2] in input and [1, 4] in output")),
        ];
        for (input, output, expected) in cases {
            let collective = Collective::AllToAll { output: tensor(output), input: tensor(input) };
            let refusal = check(1, 3, &|_| Ok(()), &collective).err().map(|error| error.to_string());
            match (expected, refusal) {
                (None, refusal) => assert_eq!(refusal, None),
                (Some(expected), refusal) => assert!(refusal.as_ref().unwrap().contains(expected), "{refusal:?}"),
            }
        }
    }

    #[test]
    fn views_of_the_same_elements_overlap_and_others_do_not() {
        let tensor = zeros(&[3, 2], DType::I64);
        let row = |index| tensor.narrow(0, index, 1).unwrap();
        assert!(overlap(&tensor, &row(1)) && overlap(&row(2), &tensor) && overlap(&row(0), &row(0)));
        assert!(!overlap(&row(0), &row(1)) && !overlap(&tensor, &tensor.copy().unwrap()));
        assert!(!overlap(&tensor, &tensor.narrow(0, 1, 0).unwrap()));
    }

    #[test]
    fn a_gather_in_place_takes_the_own_part_only() {
        let output = zeros(&[4, 3], DType::F32);
        let gather = |rank: usize| Collective::AllGather {
            output: output.narrow(0, 0, 4).unwrap(),
            input: output.narrow(0, 2 * rank, 2).unwrap(),
        };
        check(1, 2, &|_| Ok(()), &gather(1)).unwrap();
        assert!(refusal(gather(0)).contains("output and input overlap: pass a copy() of one, or this rank's own part"));
        let scatter = Collective::ReduceScatter {
            output: output.narrow(0, 2, 2).unwrap(),
            input: output.clone(),
            op: ReduceOp::Sum,
        };
        assert!(refusal(scatter).ends_with("input and output overlap: pass a copy() of one"));
    }
}
