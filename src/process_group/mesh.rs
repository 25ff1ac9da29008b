//! Ranks in rows and columns.
use super::ProcessGroup;
use crate::backend::{CallSite, label};
use crate::{Error, Result};
use std::panic::Location;

/// The ranks of a group as an array of several dimensions, such as hosts and the devices of each, with a group for each line of it:
/// PyTorch's `DeviceMesh`. Made by [`ProcessGroup::mesh`].
#[derive(Clone, Debug)]
pub struct DeviceMesh {
    dims: Vec<Dimension>,
}

#[derive(Clone, Debug)]
struct Dimension {
    name: String,
    /// The ranks that differ from this one in this dimension alone.
    group: ProcessGroup,
}

impl ProcessGroup {
    /// Arranges the ranks in an array of shape `shape`, the last dimension running fastest, whose dimensions have these `names`. Each
    /// rank gets a group for each dimension: of the ranks that differ from it in this dimension alone, in their order. PyTorch's
    /// `init_device_mesh`.
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
        CallSite::during(Location::caller(), || label::MESH.during(|| self.make_mesh(shape, names)))
    }

    fn make_mesh(&self, shape: &[usize], names: &[&str]) -> Result<DeviceMesh> {
        let world = self.world_size();
        let all =
            self.all_gather_object(&(shape.to_vec(), names.iter().map(ToString::to_string).collect::<Vec<_>>()))?;
        if let Some(other) = all.iter().position(|theirs| *theirs != all[0]) {
            let [first, other_text] =
                [0, other].map(|rank| format!("{:?} with {:?} on rank {rank}", all[rank].0, all[rank].1));
            return Err(Error::invalid(
                "shape",
                format!("it must be the same on all ranks, but is {first}, {other_text}"),
            ));
        }
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
        let mut dims = Vec::new();
        for (dim, name) in names.iter().enumerate() {
            let stride: usize = shape[dim + 1..].iter().product();
            let place = |rank: usize| rank / stride % shape[dim];
            let mut own = None;
            // The lines begin at the ranks whose place is 0. All ranks must call `new_group` for all of them, in the same order.
            for first in (0..world).filter(|rank| place(*rank) == 0) {
                let line: Vec<usize> = (0..shape[dim]).map(|at| first + at * stride).collect();
                own = self.new_group(&line)?.or(own);
            }
            let name = name.to_string();
            let group = own.ok_or_else(|| Error::invalid("shape", "this rank is in no line"))?;
            dims.push(Dimension { name, group });
        }
        Ok(DeviceMesh { dims })
    }
}

impl DeviceMesh {
    /// The group of the ranks that differ from this one in the dimension `name` alone.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if no dimension has this name.
    pub fn get_group(&self, name: &str) -> Result<&ProcessGroup> {
        let found = self.dims.iter().find(|dim| dim.name == name);
        let names: Vec<&str> = self.dims.iter().map(|dim| dim.name.as_str()).collect();
        let unknown = || Error::invalid("name", format!("the mesh has the dimensions {names:?}, but no {name:?}"));
        Ok(&found.ok_or_else(unknown)?.group)
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
    pub fn mesh_dim_names(&self) -> Vec<&str> {
        self.dims.iter().map(|dim| dim.name.as_str()).collect()
    }
}
