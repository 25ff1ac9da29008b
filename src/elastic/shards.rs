//! A rank's share of the states that are spread over the ranks: its own shard, and the one that it mirrors.
use super::placement::{self, Transfer, owner};
use super::shard::{Layout, Shard};
use crate::backend::{P2pOp, Purpose, Work};
use crate::process_group::{ProcessGroup, report_length};
use crate::state::{Dict, Saved, StateDict, insert_needed};
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

pub(super) static ELASTIC: Purpose = Purpose::of("elastic::run's synchronisation of the state");
static ELASTIC_MIRROR: Purpose = Purpose::of("the shards that elastic::State mirrors");

/// The shards of the last two commits.
///
/// Ranks are at most one commit apart, and a rank that is ahead cannot continue before all others have followed. So the
/// surviving ranks all have the last commit of the rank that is furthest behind: each of them has its own shard of that
/// commit, and the one that it mirrors.
#[derive(Debug, Default)]
pub(super) struct Shards {
    link: Option<Link>,
    /// The newest last.
    held: Vec<Held>,
}

/// Shards of one commit.
#[derive(Clone, Debug)]
pub(super) struct Held {
    commit: u64,
    /// The size of the group that made the commit.
    world_size: usize,
    /// By the ranks of that group.
    shards: BTreeMap<usize, Shard>,
}

/// A rank's report about [`Held`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Holding {
    pub(super) commit: u64,
    world_size: usize,
    shards: Vec<usize>,
}

/// This rank's neighbours in the group of the present generation.
#[derive(Debug)]
struct Link {
    group: ProcessGroup,
    /// The rank that mirrors this one.
    to: usize,
    /// The rank that this one mirrors.
    from: usize,
    sent: Option<Layout>,
    received: Option<Layout>,
}

impl Shards {
    pub(super) fn holdings(&self) -> Vec<Holding> {
        let holding = |Held { commit, world_size, shards }: &Held| Holding {
            commit: *commit,
            world_size: *world_size,
            shards: shards.keys().copied().collect(),
        };
        self.held.iter().map(holding).collect()
    }

    /// Whether commit `commit` has shards.
    pub(super) fn has(&self, commit: u64) -> bool {
        self.held.iter().any(|held| held.commit == commit)
    }

    /// The keys of commit `commit` that are known here.
    pub(super) fn keys(&self, commit: u64) -> impl Iterator<Item = &str> {
        let shards = self.held.iter().filter(move |held| held.commit == commit).flat_map(|held| held.shards.values());
        shards.flat_map(Shard::keys)
    }

    /// Copies this rank's part of the states, and exchanges it with the neighbours. Every rank must call it. Without a
    /// group, no rank could continue after this one's end, so nothing is copied.
    pub(super) fn commit(&mut self, commit: u64, live: &BTreeMap<String, Tensor>) -> Result<()> {
        self.held.retain(|held| held.commit < commit);
        let mut spare = match self.held.len() {
            0 | 1 => BTreeMap::new(),
            _ => self.held.remove(0).shards,
        };
        let Some(link) = self.link.as_mut().filter(|_| !live.is_empty()) else { return Ok(()) };
        let (rank, world_size) = (link.group.rank(), link.group.world_size());
        let own = Shard::copy_of(live, spare.remove(&rank), link.group.device())?;
        let mut shards = BTreeMap::new();
        if world_size > 1 {
            let spare = spare.remove(&link.from);
            shards.insert(link.from, ELASTIC_MIRROR.during(|| link.exchange(&own, spare))?);
        }
        shards.insert(rank, own);
        self.held.push(Held { commit, world_size, shards });
        Ok(())
    }

    /// Gives `part` its state as of commit `commit`. Every rank must call it; they communicate if a group of another
    /// size made the commit. Returns false if the part is not in that commit.
    pub(super) fn restore(&self, commit: u64, name: &str, part: &mut dyn StateDict) -> Result<bool> {
        let held = self.held.iter().find(|held| held.commit == commit);
        let (Some(Link { group, .. }), Some(held)) = (&self.link, held) else { return Ok(false) };
        let own = |shard: usize| held.shards.get(&shard).map_or(Ok(Dict::new()), |shard| shard.part(name));
        let mut all = vec![Dict::new(); held.world_size];
        if held.world_size == group.world_size() {
            all[group.rank()] = own(group.rank())?;
        } else {
            let share = part.share()?;
            for (shard, dict) in all.iter_mut().enumerate() {
                let root = owner(shard, group.world_size());
                let own = if root == group.rank() { own(shard)? } else { Dict::new() };
                for (key, tensor) in ELASTIC.during(|| group.broadcast_tensors(&own, root))? {
                    let needed = share.needs(&key, tensor.elem_count());
                    let mut part = tensor.flatten_all()?.narrow(0, needed.start, needed.len())?;
                    if (1..tensor.elem_count()).contains(&needed.len()) {
                        part = part.copy()?; // frees the rest
                    }
                    insert_needed(dict, &key, tensor.dims(), needed, part)?;
                }
            }
        }
        if all.iter().all(Dict::is_empty) {
            return Ok(false);
        }
        part.prepare(Saved::Shards(all), group.rank(), group.world_size())?().map(|()| true)
    }

    /// Brings the shards of commit `commit` to the ranks of a new group that need them; `holdings` say what these ranks
    /// have. Nothing changes here before [`settle`](Self::settle).
    pub(super) fn gather(
        &self,
        commit: u64,
        holdings: &[Vec<Holding>],
        ring: &[usize],
        group: &ProcessGroup,
    ) -> Result<Option<Held>> {
        let of_commit = |holdings: &Vec<Holding>| holdings.iter().find(|holding| holding.commit == commit).cloned();
        let holdings: Vec<Option<Holding>> = holdings.iter().map(of_commit).collect();
        let Some(world_size) = holdings.iter().flatten().map(|holding| holding.world_size).next() else {
            return Ok(None);
        };
        let held: Vec<&[usize]> =
            holdings.iter().map(|held| held.as_ref().map_or(&[][..], |held| &held.shards)).collect();
        let transfers = placement::transfers(world_size, &held, ring).map_err(|shard| lost(shard, commit))?;
        let mut shards =
            self.held.iter().find(|held| held.commit == commit).map_or_else(BTreeMap::new, |held| held.shards.clone());
        let cpu = group.cpu_group()?;
        let on = |flat: &Tensor| if flat.device().is_cpu() { &cpu } else { group };
        for Transfer { shard, from, to } in transfers {
            let layout = group.broadcast_object(shards.get(&shard).map(|shard| &shard.layout), from)?;
            if group.rank() == from
                && let Some(shard) = shards.get(&shard)
            {
                for flat in shard.flats.iter().filter(|flat| flat.elem_count() > 0) {
                    on(flat).isend(flat, to)?.synchronize()?;
                }
            }
            if group.rank() == to {
                let received = Shard::empty(layout, None, group.device())?;
                for flat in received.flats.iter().filter(|flat| flat.elem_count() > 0) {
                    on(flat).irecv(flat, from)?.synchronize()?;
                }
                shards.insert(shard, received);
            }
        }
        Ok(Some(Held { commit, world_size, shards }))
    }

    /// Begins a generation with the [gathered](Self::gather) shards.
    pub(super) fn settle(&mut self, gathered: Option<Held>, ring: &[usize], group: &ProcessGroup) {
        self.held = gathered.into_iter().collect();
        let (to, from) = (placement::mirror(ring, group.rank()), placement::mirrored(ring, group.rank()));
        self.link = Some(Link { group: group.clone(), to, from, sent: None, received: None });
    }

    /// Releases the group.
    pub(super) fn unlink(&mut self) {
        self.link = None;
    }
}

fn lost(shard: usize, commit: u64) -> Error {
    Error::Unavailable {
        what: format!("the shard of rank {shard} in commit {commit} (of the states that are sharded over the ranks)"),
        hint: "its process has ended, and so has the rank that mirrored it: continue from the last checkpoint"
            .to_string(),
    }
}

impl Link {
    /// Sends this rank's shard to the rank that mirrors it, and receives the one that this rank mirrors, into `spare`
    /// if that fits.
    fn exchange(&mut self, own: &Shard, spare: Option<Shard>) -> Result<Shard> {
        let cpu = self.group.cpu_group()?;
        // The layout stays the same from one commit to the next.
        let news = (self.sent.as_ref() != Some(&own.layout)).then_some(&own.layout);
        let news = self.exchange_layout(&cpu, news)?;
        let layout = news.or_else(|| self.received.take()).unwrap_or_default();
        let received = Shard::empty(layout, spare, self.group.device())?;
        // On a GPU a batch is one kernel. Messages by themselves would be a kernel each, which must all find room there.
        let batch = |on_cpu: bool| {
            let here = |flat: &&Tensor| flat.elem_count() > 0 && flat.device().is_cpu() == on_cpu;
            let sends = own.flats.iter().filter(here).map(|flat| P2pOp::Send { tensor: flat.clone(), peer: self.to });
            let recvs =
                received.flats.iter().filter(here).map(|flat| P2pOp::Recv { tensor: flat.clone(), peer: self.from });
            sends.chain(recvs).collect::<Vec<_>>()
        };
        let works = [cpu.batch_isend_irecv(&batch(true))?, self.group.batch_isend_irecv(&batch(false))?];
        works.iter().try_for_each(Work::synchronize)?;
        (self.sent, self.received) = (Some(own.layout.clone()), Some(received.layout.clone()));
        Ok(received)
    }

    /// Exchanges the layouts that have changed.
    fn exchange_layout(&self, cpu: &ProcessGroup, news: Option<&Layout>) -> Result<Option<Layout>> {
        /// Far more than the layout of any model.
        const LONGEST: usize = 64 << 20;
        let invalid =
            |error: serde_json::Error| Error::invalid("parts", format!("their layout cannot be sent: {error}"));
        let own = serde_json::to_vec(&news).map_err(invalid)?;
        let length = self.exchange_tensor(cpu, &Tensor::new(&[own.len() as i64], &Device::Cpu)?, 1)?;
        let length = report_length(self.from, length.to_vec1::<i64>()?[0], LONGEST)?;
        let own = Tensor::from_slice(&own, own.len(), &Device::Cpu)?;
        let bytes = self.exchange_tensor(cpu, &own, length)?.to_vec1::<u8>()?;
        serde_json::from_slice(&bytes).map_err(invalid)
    }

    fn exchange_tensor(&self, cpu: &ProcessGroup, own: &Tensor, elements: usize) -> Result<Tensor> {
        let received = Tensor::zeros(elements, own.dtype(), &Device::Cpu)?;
        let sent = cpu.isend(own, self.to)?;
        cpu.recv(&received, self.from)?;
        sent.wait()?;
        Ok(received)
    }
}
