//! Checkpoints of several ranks: all succeed, or all fail.
use super::hashes::OfRanks;
use super::{LoadOptions, LoadReport};
use crate::backend::Purpose;
use crate::error::describe;
use crate::panic::lock;
use crate::placement::Placement;
use crate::process_group::ProcessGroup;
use crate::state::file::{Hashed, Part, Values, WriteJob};
use crate::tensor::copy::copy;
use crate::{Error, Result};
use candle_core::{Device, Tensor, Var};
use candle_ddp_state::weights::{Prepared, Source};
use candle_nn::VarMap;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

static SAVE: Purpose = Purpose::of("save_distributed");
static LOAD: Purpose = Purpose::of("load_distributed");

/// Rank 0 writes the variables of `varmap`, as [`save`](super::save) does; every rank calls it. Once it returns, the
/// file exists, and every rank on the same file system may read it. Under [sharding](crate::Sharding) all ranks send rank 0 their
/// pieces while it writes, in parts of a few MiB; no rank ever has more of the model than its own pieces.
///
/// The file takes its name only after all ranks have confirmed that everything has succeeded so far, on GPUs too. So
/// an earlier file is never replaced by the variables of a failed run, as long as they are trained with `group`.
/// Writing may take longer than the group's time-out; it fails only if there is no progress for that long (and for 10
/// minutes).
///
/// # Errors
/// On every rank: rank 0 gets its own error, the others [`Error::RankFailed`](crate::Error::RankFailed) with its
/// text; or all get the group's failure. An earlier file stays, unless the group fails at the very moment in which
/// the new, complete file takes its name. Under sharding also [`Error::Mismatch`] for variables that are not the same on all ranks, and
/// [`Error::Parameter`] for a variable of which no rank has a part.
pub fn save_distributed(group: &ProcessGroup, varmap: &VarMap, path: impl AsRef<Path>) -> Result<()> {
    let saving = Saving::new(varmap);
    let names = saving.sizes().into_iter().map(|(name, _)| name).collect();
    SAVE.during(|| saving.write(group, &[(path.as_ref().to_path_buf(), names)]))
}

/// The variables of a model that are saved by several ranks.
pub(super) struct Saving(pub(super) BTreeMap<String, Var>);

impl Saving {
    pub(super) fn new(varmap: &VarMap) -> Self {
        Self(lock(varmap.data()).clone().into_iter().collect())
    }

    /// The sizes of the whole variables in bytes, by name.
    pub(super) fn sizes(&self) -> Vec<(String, u64)> {
        let size = |var: &Var| Placement::of(var).shape.elem_count() * var.dtype().size_in_bytes();
        self.0.iter().map(|(name, var)| (name.clone(), size(var) as u64)).collect()
    }

    /// Rank 0 writes files of these variables. Every rank must call it.
    pub(super) fn write(&self, group: &ProcessGroup, files: &[(PathBuf, Vec<String>)]) -> Result<()> {
        let (is_first, is_sharded) = (group.rank() == 0, self.0.values().any(|var| Placement::of(var).is_sharded()));
        let values = |name: &String| {
            let var = self.0.get(name)?;
            let placement = Placement::of(var);
            let values = match placement.is_sharded() {
                true => Values::Sent(var.dtype(), placement.shape),
                false => Values::Here(var.as_tensor().clone()),
            };
            Some((name.clone(), values))
        };
        let job =
            |(path, names): &(PathBuf, Vec<String>)| WriteJob::of(path, names.iter().filter_map(values).collect());
        // Of a plain model only rank 0's variables count.
        let jobs = files.iter().filter(|_| is_first || is_sharded).map(job).collect::<Result<Vec<_>>>();
        if !is_sharded {
            return group.write_together(jobs).map(drop);
        }
        let holders = self.holders(group, jobs.as_ref().err());
        let (mut jobs, holders) = (jobs?, holders?);
        let parts: Vec<Part> = jobs.iter().flat_map(WriteJob::parts).collect();
        let mut parts = parts.iter();
        if !is_first {
            jobs.clear();
        }
        let mut send = || parts.next().map_or(Ok(None), |part| holders.send(group, part));
        group.write_sent(Ok(jobs), &mut send).map(drop)
    }

    /// Every rank must call it.
    fn holders(&self, group: &ProcessGroup, failed: Option<&Error>) -> Result<Holders> {
        let line = |(name, var): (&String, &Var)| {
            let placement = Placement::of(var);
            let what = if placement.is_sharded() { "piece of " } else { "" };
            format!("{what}{name} {}", describe(var.dtype(), &placement.shape))
        };
        let report = failed.map_or_else(|| Ok(self.0.iter().map(line).collect::<Vec<_>>().join("\n")), Err);
        if let Some((rank, difference)) = group.compare(report, "it could not save its model")? {
            return Err(Error::Mismatch { what: "model", rank, difference });
        }
        let placed = self.0.iter().map(|(name, var)| (name, var, Placement::of(var)));
        let pieces: Vec<_> = placed.filter(|(_, _, placement)| placement.is_sharded()).collect();
        let own: Vec<_> = pieces.iter().map(|(_, _, Placement { range, .. })| (range.start, range.end)).collect();
        let all = group.all_gather_object(&own)?;
        let of_all = |index: usize| all.iter().filter_map(move |own| own.get(index).map(|(start, end)| *start..*end));
        let pieces = pieces.into_iter().enumerate().map(|(index, (name, var, _))| {
            Ok((name.clone(), (var.as_detached_tensor().flatten_all()?, of_all(index).collect())))
        });
        Ok(Holders(pieces.collect::<Result<_>>()?))
    }
}

/// This rank's elements of each variable that is spread, as a list, with the ranges of all ranks.
struct Holders(BTreeMap<String, (Tensor, Vec<Range<usize>>)>);

impl Holders {
    /// Sends rank 0 what this rank has of a part. Rank 0 returns it.
    fn send(&self, group: &ProcessGroup, part: &Part) -> Result<Option<Tensor>> {
        let Part { name, dtype, elements } = part;
        let missing = |at: usize| {
            Error::parameter(name, format!("no rank has its element {at}, and the others cannot be saved alone"))
        };
        let (own, ranges) = self.0.get(name).ok_or_else(|| missing(0))?;
        let rank = group.rank();
        let whole = (rank == 0).then(|| Tensor::zeros(elements.len(), *dtype, own.device())).transpose()?;
        let mut at = elements.start;
        while at < elements.end {
            // The first of several that have the same elements.
            let holder = ranges.iter().position(|range| range.contains(&at)).ok_or_else(|| missing(at))?;
            let end = elements.end.min(ranges[holder].end);
            let mine = || own.narrow(0, at - ranges[holder].start, end - at);
            let place = |whole: &Tensor| whole.narrow(0, at - elements.start, end - at);
            match &whole {
                Some(whole) if holder == 0 => copy(&place(whole)?, &mine()?)?,
                Some(whole) => group.recv(&place(whole)?, holder)?,
                None if holder == rank => group.send(&mine()?, 0)?,
                None => {}
            }
            at = end;
        }
        Ok(whole.map(|whole| whole.to_device(&Device::Cpu)).transpose()?)
    }
}

/// Every rank reads a checkpoint into its variables, as [`load_with`](super::load_with) does. On several hosts, each
/// host needs a copy of the file. Under [sharding](crate::Sharding) each rank reads its pieces only, and the ranks check the file's hash
/// together.
///
/// # Errors
/// If the file does not fit on one rank, every rank returns an error and no rank changes anything: that rank gets its
/// own error, the others [`Error::RankFailed`](crate::Error::RankFailed).
pub fn load_distributed(
    group: &ProcessGroup,
    varmap: &VarMap,
    path: impl AsRef<Path>,
    options: LoadOptions,
) -> Result<LoadReport> {
    let path = path.as_ref();
    let is_sharded = lock(varmap.data()).values().any(|var| Placement::of(var).is_sharded());
    let hashed = if is_sharded { Hashed::Needed } else { Hashed::All };
    let source = Source::open(path, options.key.as_deref());
    let read = source.and_then(|source| Prepared::read(varmap, path, source, &options, hashed));
    LOAD.during(|| {
        let (prepared, hashes) = group.agree(read)?;
        match is_sharded {
            true => OfRanks(hashes).check(group)?,
            false => group.agree(hashes.check())?,
        }
        group.agree(prepared.apply())
    })
}
