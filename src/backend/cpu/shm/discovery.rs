//! Finds out which ranks can share memory.
//!
//! Every rank creates a file for its memory and tells the others over TCP where it is. Every rank tries to map the
//! others' files, and reports which ones it could map. Then all ranks know who maps whose memory, and so which ranks
//! form a host. Nothing is configured, and host names do not matter: ranks that can map each other's memory share it.
use super::group::ShmGroup;
use super::layout::Layout;
use super::peer_info::{PeerInfo, SegmentInfo, name};
use super::segment::Segment;
use crate::backend::cpu::hosts::Hosts;
use crate::backend::cpu::transport::{Inflow, Outflow, Transport};
use crate::backend::cpu::transport_error::TransportError;
use crate::host::boot_id;
use crate::random::random_bytes;
use rustix::fd::AsRawFd;
use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The result of the discovery.
pub(crate) struct Discovered {
    pub(crate) hosts: Hosts,
    /// `None` on a rank that is alone on its host.
    pub(crate) shm: Option<ShmGroup>,
    /// The layout of shared memory on all hosts; `None` if no two ranks could share memory.
    pub(crate) layout: Option<Layout>,
    /// Ranks that run on the same kernel but could not share memory with this one.
    pub(crate) apart: Vec<usize>,
    /// Why they could not, as far as this rank knows.
    pub(crate) complaints: Vec<String>,
}

/// How long to wait for the other ranks before checking for cancellation.
const SLICE: Duration = Duration::from_millis(500);

/// One rank's part in the discovery.
pub(crate) struct Discovery<'a> {
    pub(crate) transport: &'a Transport,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// Whether this rank shares memory; otherwise it uses TCP.
    pub(crate) shares: bool,
    /// The number of bytes that a slot holds for each peer.
    pub(crate) part: usize,
    /// Replaces the identity of the running kernel, for tests.
    pub(crate) label: Option<&'a str>,
    pub(crate) deadline: Instant,
    /// Called repeatedly while waiting for other ranks.
    pub(crate) is_cancelled: &'a dyn Fn() -> bool,
}

impl Discovery<'_> {
    /// Finds the hosts, together with all other ranks.
    pub(crate) fn meet(&self) -> Result<Discovered, TransportError> {
        let Self { rank, world_size, .. } = *self;
        let mut complaints = Vec::new();
        let announce = || -> Result<_, String> {
            let token = u128::from_le_bytes(random_bytes().map_err(|error| error.to_string())?);
            Ok((Segment::announce(&name(token)).map_err(|error| error.to_string())?, token))
        };
        let file = match self.shares.then(announce).transpose() {
            Ok(file) => file,
            Err(error) => {
                complaints.push(format!("a file for shared memory: {error}"));
                None
            }
        };
        let offer = file.as_ref().map(|(fd, token)| SegmentInfo {
            pid: std::process::id(),
            fd: fd.as_raw_fd() as u32,
            token: *token,
        });
        let own = PeerInfo { kernel: self.label.map_or_else(kernel, hash), offer };
        let infos = self.gather(&own.encode())?;
        let infos: Vec<Option<PeerInfo>> = infos.iter().map(|info| PeerInfo::decode(info)).collect();

        // Segments have the same layout on all hosts, so that all ranks divide data alike.
        let largest = infos.iter().map(|info| candidates(&infos, info.as_ref())).max().unwrap_or(0);
        let layout = (largest > 1).then(|| Layout::new(largest, self.part));
        let segment = match (layout, file.as_ref()) {
            (Some(layout), Some((fd, _))) if candidates(&infos, Some(&own)) > 1 => {
                let reserved = Segment::reserve(fd, layout.size());
                let complain = |error| complaints.push(format!("{} bytes of shared memory: {error}", layout.size()));
                reserved.map_err(complain).ok().map(Arc::new)
            }
            _ => None,
        };
        let reserved = self.gather(&[u8::from(segment.is_some())])?;

        let mut segments: Vec<Option<Arc<Segment>>> = vec![None; world_size];
        if let (Some(layout), Some(segment)) = (layout, segment) {
            for (peer, info) in infos.iter().enumerate().filter(|(peer, _)| *peer != rank) {
                let Some(info) = info.as_ref().filter(|info| info.kernel == own.kernel) else { continue };
                let opened = match &info.offer {
                    _ if reserved[peer] != [1] => Err("it has none".to_string()),
                    Some(offer) => open(offer, &layout),
                    None => Err("it offers none".to_string()),
                };
                match opened {
                    Ok(segment) => segments[peer] = Some(Arc::new(segment)),
                    Err(reason) => complaints.push(format!("that of rank {peer}: {reason}")),
                }
            }
            segments[rank] = Some(segment);
        }
        let maps: Vec<u8> = segments.iter().map(|segment| u8::from(segment.is_some())).collect();
        let maps = self.gather(&maps)?;

        let hosts = Hosts::new(rank, world_size, |a, b| maps[a][b] == 1);
        let same_kernel = |peer: &usize| infos[*peer].as_ref().is_some_and(|info| info.kernel == own.kernel);
        let apart = (0..world_size).filter(|peer| hosts.member(*peer).is_none()).filter(same_kernel).collect();
        let shared: Vec<Arc<Segment>> = hosts.members().iter().filter_map(|peer| segments[*peer].clone()).collect();
        let shm = match layout {
            Some(layout) if shared.len() > 1 => Some(ShmGroup::new(hosts.index(), layout, &shared)),
            _ => None,
        };
        Ok(Discovered { hosts, shm, layout, apart, complaints })
    }

    /// Gathers every rank's `own`, which has the same length on all ranks.
    fn gather(&self, own: &[u8]) -> Result<Vec<Vec<u8>>, TransportError> {
        let Self { transport, rank, world_size, deadline, .. } = *self;
        let mut all = vec![own.to_vec(); world_size];
        let peers = || (0..world_size).filter(|peer| *peer != rank);
        let mut sends: Vec<Outflow> = peers().map(|peer| Outflow::new(peer, None)).collect();
        sends.iter_mut().for_each(|flow| flow.push(own));
        let mut recvs = Vec::with_capacity(world_size);
        for (peer, part) in all.iter_mut().enumerate().filter(|(peer, _)| *peer != rank) {
            let mut flow = Inflow::new(peer, None);
            flow.push(&mut part[..]);
            recvs.push(flow);
        }
        loop {
            match transport.exchange(&mut sends, &mut recvs, deadline.min(Instant::now() + SLICE)) {
                // Data that was already sent or received is skipped.
                Err(TransportError::TimedOut { .. }) if Instant::now() < deadline && !(self.is_cancelled)() => {}
                result => break result?,
            }
        }
        drop(recvs);
        Ok(all)
    }
}

/// The number of ranks that offer memory on the same kernel as `info`, including that one: only these can share it.
fn candidates(infos: &[Option<PeerInfo>], info: Option<&PeerInfo>) -> usize {
    let Some(info) = info.filter(|info| info.offer.is_some()) else { return 0 };
    infos.iter().flatten().filter(|other| other.kernel == info.kernel && other.offer.is_some()).count()
}

fn open(offer: &SegmentInfo, layout: &Layout) -> Result<Segment, String> {
    let fd = i32::try_from(offer.fd).map_err(|error| error.to_string())?;
    Segment::open(offer.pid, fd, &offer.name(), layout.size()).map_err(|error| error.to_string())
}

/// The boot id as a number; zeros if the system does not tell.
fn kernel() -> [u8; 16] {
    u128::from_str_radix(&boot_id().replace('-', ""), 16).unwrap_or(0).to_be_bytes()
}

/// A boot id made from a label: equal labels give equal ids.
fn hash(label: &str) -> [u8; 16] {
    let mut hasher = DefaultHasher::new();
    hasher.write(label.as_bytes());
    u128::from(hasher.finish()).to_be_bytes()
}
