//! Tensors of a block that are gathered in one call.
use crate::Result;
use crate::backend::{Label, Work};
use crate::ddp::groups::Groups;
use crate::ddp::reduction::shard::cut;
use crate::placement::Placement;
use crate::process_group::ProcessGroup;
use crate::tensor::{copy, hold};
use candle_core::{DType, Device, Tensor, Var};

/// The tensors of one kind, one after the other, cut into as many equal parts as there are ranks; the last part may extend beyond them.
/// A bucket of their gradients is cut in the same way.
pub(super) struct Flat {
    members: Vec<Member>,
    /// The dtype in which the model computes with them.
    held_as: DType,
    device: Device,
    /// The elements of a part.
    part: usize,
    label: Label,
}

struct Member {
    /// The tensor that the model holds, which has memory while the block computes.
    tensor: Tensor,
    /// This rank's elements.
    piece: Var,
    /// Where the piece begins in this rank's part.
    at: usize,
    elements: usize,
}

/// A [`Flat`] on its way from all ranks.
pub(super) struct Gathering {
    whole: Tensor,
    work: Option<Work>,
}

impl Flat {
    /// Takes rank 0's values of `tensors`: those that the model holds, with their whole variables. Returns this rank's pieces as well.
    pub(super) fn scatter(groups: &Groups, name: &str, tensors: &[(Tensor, Var)]) -> Result<(Self, Vec<Var>)> {
        let group = groups.within();
        let (rank, world_size) = (group.rank(), group.world_size());
        let (first, var) = &tensors[0];
        let (held_as, dtype, device) = (first.dtype(), var.dtype(), var.device().clone());
        let all: usize = tensors.iter().map(|(tensor, _)| tensor.elem_count()).sum();
        let part = all.div_ceil(world_size);
        let whole = (rank == 0).then(|| Tensor::zeros(part * world_size, dtype, &device)).transpose()?;
        if let Some(whole) = &whole {
            let views = copy::views(whole, tensors.iter().map(|(tensor, _)| tensor.shape()))?;
            copy::copy_all(views.iter().zip(tensors.iter().map(|(_, var)| var.as_tensor())))?;
        }
        let own = Tensor::zeros(part, dtype, &device)?;
        group.scatter(&own, whole.as_ref(), 0)?;
        drop(whole);
        if let Some(across) = groups.across() {
            across.broadcast(&own, 0)?;
        }
        let spread = groups.spread();
        let (mut offset, mut members, mut pieces) = (0, Vec::new(), Vec::new());
        for (tensor, _) in tensors {
            let elements = tensor.elem_count();
            let range = cut(offset, elements, rank, part);
            let at = (offset + range.start).saturating_sub(rank * part);
            let values = own.narrow(0, at.min(part - range.len()), range.len())?;
            let piece = Placement { shape: tensor.shape().clone(), range, spread }.variable(&values)?;
            members.push(Member { tensor: tensor.clone(), piece: piece.clone(), at, elements });
            pieces.push(piece);
            offset += elements;
            hold::release(tensor, name)?;
        }
        let label = Label::register(format!("the parameters of {name}"));
        Ok((Self { members, held_as, device, part, label }, pieces))
    }

    /// Starts to gather the current values.
    pub(super) fn gather(&self, group: &ProcessGroup) -> Result<Gathering> {
        let own = Tensor::zeros(self.part, self.held_as, &self.device)?;
        let pieces = self.members.iter().filter(|member| member.piece.elem_count() > 0);
        let places = pieces.clone().map(|member| own.narrow(0, member.at, member.piece.elem_count()));
        let places = places.collect::<candle_core::Result<Vec<_>>>()?;
        let values = pieces.map(|member| member.piece.as_detached_tensor().flatten_all());
        let values = values.collect::<candle_core::Result<Vec<_>>>()?;
        copy::copy_all(places.iter().zip(&values))?;
        if group.world_size() == 1 {
            return Ok(Gathering { whole: own, work: None });
        }
        let whole = Tensor::zeros(self.part * group.world_size(), self.held_as, &self.device)?;
        let work = self.label.during(|| group.all_gather_async(&whole, &own))?;
        Ok(Gathering { whole, work: Some(work) })
    }

    /// Gives the model's tensors what was gathered.
    pub(super) fn fill(&self, gathering: &Gathering) -> Result<()> {
        gathering.work.as_ref().map_or(Ok(()), Work::wait)?;
        let mut offset = 0;
        for Member { tensor, elements, .. } in &self.members {
            hold::fill(tensor, &gathering.whole.narrow(0, offset, *elements)?)?;
            offset += elements;
        }
        Ok(())
    }

    /// The bytes of the whole tensors.
    pub(super) fn bytes(&self) -> usize {
        self.members.iter().map(|member| member.elements).sum::<usize>() * self.held_as.size_in_bytes()
    }

    /// Frees the memory of the model's tensors, which belong to `owner`.
    pub(super) fn release(&self, owner: &str) -> Result<()> {
        Ok(self.members.iter().try_for_each(|member| hold::release(&member.tensor, owner))?)
    }

    /// Whether `tensor` has the memory of one of the model's tensors.
    pub(super) fn shares(&self, tensor: &Tensor) -> bool {
        self.members.iter().any(|member| hold::shares(&member.tensor, tensor))
    }
}
