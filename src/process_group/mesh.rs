//! Ranks in rows and columns.
use super::ProcessGroup;
use super::reports::same_on_all;
use crate::backend::{CallSite, Purpose, Role};
use crate::panic::lock;
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::panic::Location;
use std::sync::{Arc, Mutex};

static MESH: Purpose = Purpose::of("mesh");

/// The ranks of a group as an array of several dimensions, such as hosts and the devices of each, with a group for each line of it:
/// PyTorch's `DeviceMesh`. Made by [`ProcessGroup::mesh`].
#[derive(Clone, Debug)]
pub struct DeviceMesh {
    dims: Vec<Dimension>,
    whole: Arc<Whole>,
}

#[derive(Clone, Debug)]
struct Dimension {
    name: String,
    /// The dimensions of the whole mesh that it consists of, in their order.
    of: Vec<usize>,
    /// The ranks that differ from this one in this dimension alone.
    group: ProcessGroup,
}

/// The whole mesh, whose slices the others are.
#[derive(Debug)]
struct Whole {
    pg: ProcessGroup,
    shape: Vec<usize>,
    /// Whether the groups are parts of `pg` that the program does not know.
    of_parts: bool,
    /// This rank's groups, by the dimensions in which their ranks differ.
    groups: Mutex<BTreeMap<Vec<usize>, ProcessGroup>>,
}

impl ProcessGroup {
    /// Arranges the ranks in an array of shape `shape`, the last dimension running fastest, whose dimensions have these `names`. Each
    /// rank gets a group for each dimension: of the ranks that differ from it in this dimension alone, in their order. If these are all
    /// ranks, it is this group. PyTorch's `init_device_mesh`.
    ///
    /// Every rank of this group must call it with the same arguments.
    ///
    /// ```
    /// # fn main() -> candle_ddp::Result<()> {
    /// candle_ddp::spawn(4, |pg| {
    ///     // Ranks 0 and 1 are on the first host, 2 and 3 on the second.
    ///     let mesh = pg.mesh(&[2, 2], &["host", "device"])?;
    ///     assert_eq!(mesh.get_coordinate(), [pg.rank() / 2, pg.rank() % 2]);
    ///     let neighbours = mesh.get_group("device")?.all_gather_object(&pg.rank())?;
    ///     assert_eq!(neighbours, if pg.rank() < 2 { [0, 1] } else { [2, 3] });
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the shape does not have as many elements as there are ranks, if there is not a different name
    /// for each dimension, or, on every rank, if ranks pass different arguments; and errors of [`new_group`](Self::new_group).
    #[track_caller]
    pub fn mesh(&self, shape: &[usize], names: &[&str]) -> Result<DeviceMesh> {
        CallSite::during(Location::caller(), || MESH.during(|| self.make_mesh(shape, names, false)))
    }

    /// The groups in which `ranks` consecutive ranks are, a divisor of the world size, and those of the ranks that have the same place in
    /// these. They are parts of this group. Every rank must call it.
    #[track_caller]
    pub(crate) fn hybrid(&self, ranks: usize) -> Result<(Self, Self)> {
        let shape = [self.world_size() / ranks, ranks];
        let make = || MESH.during(|| self.make_mesh(&shape, &["replicate", "shard"], true));
        let mesh = CallSite::during(Location::caller(), make)?;
        let (within, mut across) = (mesh.get_group("shard")?.clone(), mesh.get_group("replicate")?.clone());
        if ranks == 1 {
            // The mesh has the group itself here. Ranks call it at other times than this one.
            let all: Vec<usize> = (0..self.world_size()).collect();
            across = self
                .split_off(&all, Some(Role::Group))?
                .ok_or_else(|| Error::invalid("sharding", "this rank is in no group"))?;
        }
        Ok((within, across))
    }

    fn make_mesh(&self, shape: &[usize], names: &[&str], of_parts: bool) -> Result<DeviceMesh> {
        let world = self.world_size();
        same_on_all("shape", &self.all_gather_object(&format!("{shape:?} with {names:?}"))?)?;
        if shape.iter().try_fold(1usize, |size, extent| size.checked_mul(*extent)) != Some(world) {
            let reason =
                format!("the product of its extents must be the number of ranks, {world}, not that of {shape:?}");
            return Err(Error::invalid("shape", reason));
        }
        let is_repeated = |(index, name): (usize, &&str)| names[..index].contains(name);
        if names.len() != shape.len() || names.iter().enumerate().any(is_repeated) {
            let reason =
                format!("there must be a different name for each of the {} dimensions, not {names:?}", shape.len());
            return Err(Error::invalid("names", reason));
        }
        let whole = Whole { pg: self.clone(), shape: shape.to_vec(), of_parts, groups: Mutex::default() };
        let dims = names.iter().enumerate();
        let dims = dims.map(|(dim, name)| whole.dimension(name, vec![dim])).collect::<Result<_>>()?;
        Ok(DeviceMesh { dims, whole: Arc::new(whole) })
    }
}

impl Whole {
    fn dimension(&self, name: &str, of: Vec<usize>) -> Result<Dimension> {
        let group = self.group(&of)?;
        Ok(Dimension { name: name.to_string(), of, group })
    }

    /// The group of the ranks that differ from this one in `dims` alone. Every rank must call it.
    fn group(&self, dims: &[usize]) -> Result<ProcessGroup> {
        // Ranks do not differ in a dimension of one place.
        let dims: Vec<usize> = dims.iter().copied().filter(|dim| self.shape[*dim] > 1).collect();
        let mut groups = lock(&self.groups);
        if let Some(group) = groups.get(&dims) {
            return Ok(group.clone());
        }
        let strides = (0..self.shape.len()).map(|dim| self.shape[dim + 1..].iter().product::<usize>());
        let strides: Vec<usize> = strides.collect();
        let mut lines = BTreeMap::<usize, Vec<usize>>::new();
        for rank in 0..self.pg.world_size() {
            let own = |dim: &usize| rank / strides[*dim] % self.shape[*dim] * strides[*dim];
            // The first rank of a line is at place 0 in each of `dims`.
            lines.entry(rank - dims.iter().map(own).sum::<usize>()).or_default().push(rank);
        }
        let mut own = None;
        if lines.len() == 1 {
            own = Some(self.pg.clone());
        } else {
            // All ranks must call `new_group` for all lines, in the same order.
            let role = self.of_parts.then_some(if dims == [0] { Role::Copies } else { Role::Group });
            for line in lines.values() {
                own = self.pg.split_off(line, role)?.or(own);
            }
        }
        let group = own.ok_or_else(|| Error::invalid("shape", "this rank is in no line"))?;
        groups.insert(dims, group.clone());
        Ok(group)
    }
}

impl DeviceMesh {
    /// The group of the ranks that differ from this one in the dimension `name` alone.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if no dimension has this name.
    pub fn get_group(&self, name: &str) -> Result<&ProcessGroup> {
        Ok(&self.dims[self.index(name)?].group)
    }

    fn index(&self, name: &str) -> Result<usize> {
        let names = self.names();
        let unknown = || Error::invalid("name", format!("the mesh has the dimensions {names:?}, but no {name:?}"));
        names.iter().position(|own| *own == name).ok_or_else(unknown)
    }

    /// The mesh of some dimensions, in their order: of the ranks that differ from this one in these alone. It has the same groups, and
    /// sends nothing. PyTorch's `mesh["replicate", "shard"]`.
    ///
    /// ```
    /// # fn main() -> candle_ddp::Result<()> {
    /// candle_ddp::spawn(8, |pg| {
    ///     let mesh = pg.mesh(&[2, 2, 2], &["replicate", "shard", "tensor"])?;
    ///     // All ranks with the same part of the tensors.
    ///     let data = mesh.slice(&["replicate", "shard"])?.flatten("data")?;
    ///     let ranks = data.get_group("data")?.all_gather_object(&pg.rank())?;
    ///     assert_eq!(ranks, if pg.rank() % 2 == 0 { [0, 2, 4, 6] } else { [1, 3, 5, 7] });
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] for no names, unknown ones, or ones in another order.
    pub fn slice(&self, names: &[&str]) -> Result<Self> {
        let found = names.iter().map(|name| self.index(name)).collect::<Result<Vec<_>>>()?;
        if found.is_empty() || !found.is_sorted_by(|one, next| one < next) {
            let own = self.names();
            return Err(Error::invalid("names", format!("they must be some of {own:?} in this order, not {names:?}")));
        }
        let dims = found.into_iter().map(|index| self.dims[index].clone()).collect();
        Ok(Self { dims, whole: Arc::clone(&self.whole) })
    }

    /// The mesh whose only dimension, `name`, consists of all dimensions of this one, the last running fastest: PyTorch's `_flatten`.
    /// Its group is made once for the same dimensions of a mesh and its slices.
    ///
    /// Every rank of the group that [`mesh`](ProcessGroup::mesh) was called on must call it, on a mesh of the same dimensions.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] on every rank if ranks call it on different dimensions, and errors of
    /// [`new_group`](ProcessGroup::new_group).
    #[track_caller]
    pub fn flatten(&self, name: &str) -> Result<Self> {
        let of: Vec<usize> = self.dims.iter().flat_map(|dim| dim.of.iter().copied()).collect();
        let flatten = || {
            let dims = format!("{:?} as {name:?}", self.names());
            same_on_all("dimensions", &self.whole.pg.all_gather_object(&dims)?)?;
            self.whole.dimension(name, of)
        };
        let dims = vec![CallSite::during(Location::caller(), || MESH.during(flatten))?];
        Ok(Self { dims, whole: Arc::clone(&self.whole) })
    }

    /// This rank's place in each dimension.
    pub fn get_coordinate(&self) -> Vec<usize> {
        self.dims.iter().map(|dim| dim.group.rank()).collect()
    }

    /// The extents of the dimensions.
    pub fn shape(&self) -> Vec<usize> {
        self.dims.iter().map(|dim| dim.group.world_size()).collect()
    }

    /// The names of the dimensions.
    fn names(&self) -> Vec<&str> {
        self.dims.iter().map(|dim| dim.name.as_str()).collect()
    }
}
