//! Tensors of a block that are gathered in one call.
use crate::Result;
use crate::backend::{Label, Work};
use crate::ddp::buckets::groups::Groups;
use crate::placement::{Cut, Placement};
use crate::process_group::ProcessGroup;
use crate::tensor::{copy, hold};
use candle_core::{DType, Device, Tensor, Var};

/// The tensors of one kind. A bucket of their gradients is cut in the same way.
pub(super) struct Flat {
    /// The tensors that the model holds, which have memory while the block computes.
    tensors: Vec<Tensor>,
    /// This rank's elements of each.
    pieces: Vec<Var>,
    cut: Cut,
    /// The dtype in which the model computes with them.
    held_as: DType,
    device: Device,
    label: Label,
}

/// A [`Flat`] on its way from all ranks.
pub(super) struct Gathering {
    whole: Tensor,
    work: Option<Work>,
}

impl Flat {
    /// Takes rank 0's values of `tensors`: those that the model holds, with their whole values. Returns this rank's pieces as well.
    pub(super) fn scatter(groups: &Groups, name: &str, tensors: &[(Tensor, Tensor)]) -> Result<(Self, Vec<Var>)> {
        let group = groups.within();
        let (first, value) = &tensors[0];
        let (held_as, dtype, device) = (first.dtype(), value.dtype(), value.device().clone());
        let cut = Cut::new(tensors.iter().map(|(tensor, _)| tensor.elem_count()), group.world_size());
        let whole = (group.rank() == 0).then(|| Tensor::zeros(cut.length(), dtype, &device)).transpose()?;
        if let Some(whole) = &whole {
            let views = copy::views(whole, tensors.iter().map(|(tensor, _)| tensor.shape()))?;
            copy::copy_all(views.iter().zip(tensors.iter().map(|(_, value)| value)))?;
        }
        let own = Tensor::zeros(cut.part(), dtype, &device)?;
        group.scatter(&own, whole.as_ref(), 0)?;
        drop(whole);
        if let Some(across) = groups.across() {
            across.broadcast(&own, 0)?;
        }
        let (rank, spread) = (group.rank(), groups.spread());
        let piece = |(number, (tensor, _)): (usize, &(Tensor, Tensor))| {
            let placement = Placement { shape: tensor.shape().clone(), range: cut.range(number, rank), spread };
            let piece = placement.variable(&cut.piece(&own, number, rank)?)?;
            hold::release(tensor, name)?;
            Ok(piece)
        };
        let pieces = tensors.iter().enumerate().map(piece).collect::<Result<Vec<_>>>()?;
        let tensors = tensors.iter().map(|(tensor, _)| tensor.clone()).collect();
        let label = Label::register(format!("the parameters of {name}"));
        Ok((Self { tensors, pieces: pieces.clone(), cut, held_as, device, label }, pieces))
    }

    /// Starts to gather the current values.
    pub(super) fn gather(&self, group: &ProcessGroup) -> Result<Gathering> {
        let own = copy::unfilled(self.cut.part(), self.held_as, &self.device)?;
        let pieces = self.pieces.iter().enumerate().filter(|(_, piece)| piece.elem_count() > 0);
        let places = pieces.clone().map(|(number, _)| self.cut.piece(&own, number, group.rank()));
        let places = places.collect::<Result<Vec<_>>>()?;
        let values = pieces.map(|(_, piece)| piece.as_detached_tensor().flatten_all());
        let values = values.collect::<candle_core::Result<Vec<_>>>()?;
        copy::copy_all(places.iter().zip(&values))?;
        if group.world_size() == 1 {
            return Ok(Gathering { whole: own, work: None });
        }
        let whole = copy::unfilled(self.cut.length(), self.held_as, &self.device)?;
        let work = self.label.during(|| group.all_gather_async(&whole, &own))?;
        Ok(Gathering { whole, work: Some(work) })
    }

    /// Gives the model's tensors what was gathered.
    pub(super) fn fill(&self, gathering: &Gathering) -> Result<()> {
        gathering.work.as_ref().map_or(Ok(()), Work::wait)?;
        let source = |(number, tensor)| Ok((tensor, self.cut.whole(&gathering.whole, number)?));
        let tensors = self.tensors.iter().enumerate().map(source).collect::<Result<Vec<_>>>()?;
        Ok(hold::fill_all(&tensors)?)
    }

    /// The bytes of the whole tensors.
    pub(super) fn bytes(&self) -> usize {
        self.cut.elements() * self.held_as.size_in_bytes()
    }

    /// Frees the memory of the model's tensors, which belong to `owner`.
    pub(super) fn release(&self, owner: &str) -> Result<()> {
        Ok(self.tensors.iter().try_for_each(|tensor| hold::release(tensor, owner))?)
    }

    /// Whether `tensor` has the memory of one of the model's tensors.
    pub(super) fn shares(&self, tensor: &Tensor) -> bool {
        self.tensors.iter().any(|own| hold::shares(own, tensor))
    }
}
