//! How ranks find out that they can share memory, and do.
//!
//! Every rank makes a segment and tells the others, over TCP, where it is; every rank tries to map those of the others,
//! and tells which ones it could. It is done when everybody sees everybody's. Nothing is configured and no name is
//! compared: who can map the memory of that random name shares it.
use super::card::{Card, Offer, name};
use super::layout::Layout;
use super::room::Room;
use super::segment::Segment;
use super::transport::{Inflow, Outflow, Stall, Transport};
use rustix::fd::AsRawFd;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::time::Instant;

/// What came of it.
pub(in super::super) enum Meeting {
    Room(Room),
    /// Ranks on several hosts, or told to use TCP, or this host refuses: what there is to say.
    Apart {
        peers: Vec<usize>,
        reason: String,
        same_host: bool,
    },
}

/// Meets the other ranks. `layout` is `None` on a rank that wants TCP.
pub(in super::super) fn meet(
    transport: &Transport,
    rank: usize,
    world_size: usize,
    layout: Option<Layout>,
    deadline: Instant,
) -> Result<Meeting, Stall> {
    let token = random_token();
    let mut complaints: Vec<(usize, String)> = Vec::new();
    let created = layout.and_then(|layout| match Segment::create(&name(token), layout.size()) {
        Ok((segment, fd)) => Some((layout, Arc::new(segment), fd)),
        Err(error) => {
            complaints.push((rank, format!("{} bytes of shared memory: {error}", layout.size())));
            None
        }
    });
    let offer = created.as_ref().map(|(layout, _, fd)| Offer {
        pid: std::process::id(),
        fd: fd.as_raw_fd() as u32,
        token,
        layout: *layout,
    });
    let own = Card { boot: boot_id(), offer };
    let cards = gather(transport, rank, world_size, &own.encode(), deadline)?;
    let cards: Vec<Option<Card>> = cards.iter().map(|card| Card::decode(card)).collect();

    let mut segments = Vec::new();
    if let Some((layout, segment, _)) = &created {
        for (peer, card) in cards.iter().enumerate() {
            if peer == rank {
                segments.push(segment.clone());
                continue;
            }
            match open(card.as_ref(), layout) {
                Ok(segment) => segments.push(Arc::new(segment)),
                Err(reason) => complaints.push((peer, reason)),
            }
        }
    }
    // A rank that maps nothing (it was told to use TCP) sees nothing.
    let sees_all = [u8::from(segments.len() == world_size)];
    let all_see_all = gather(transport, rank, world_size, &sees_all, deadline)?;
    let blind: Vec<usize> = (0..world_size).filter(|peer| all_see_all[*peer] != [1]).collect();
    let same_host = cards.iter().flatten().all(|card| card.boot == own.boot);
    match created {
        Some((layout, ..)) if blind.is_empty() => {
            log::debug!("rank {rank}: {world_size} ranks share memory");
            Ok(Meeting::Room(Room::new(rank, layout, &segments)))
        }
        _ => {
            let (peers, reason) = match complaints.is_empty() {
                true => (blind, "they cannot map the memory of all ranks".to_string()),
                false => {
                    let (peers, reasons): (Vec<usize>, Vec<String>) = complaints.into_iter().unzip();
                    (peers, reasons.join("; "))
                }
            };
            Ok(Meeting::Apart { peers, reason, same_host })
        }
    }
}

fn open(card: Option<&Card>, layout: &Layout) -> Result<Segment, String> {
    let offer = card.and_then(|card| card.offer.as_ref()).ok_or("it offers none")?;
    if offer.layout != *layout {
        return Err(format!("its memory is laid out as {:?}, not as {layout:?}", offer.layout));
    }
    let fd = i32::try_from(offer.fd).map_err(|error| error.to_string())?;
    Segment::open(offer.pid, fd, &offer.name(), layout.size()).map_err(|error| error.to_string())
}

/// Every rank's `own`, which has the same length on all ranks.
fn gather(
    transport: &Transport,
    rank: usize,
    world_size: usize,
    own: &[u8],
    deadline: Instant,
) -> Result<Vec<Vec<u8>>, Stall> {
    let mut all = vec![own.to_vec(); world_size];
    let peers = || (0..world_size).filter(|peer| *peer != rank);
    let mut sends: Vec<Outflow> = peers().map(|peer| Outflow::new(peer, None)).collect();
    sends.iter_mut().for_each(|flow| flow.push(own));
    let mut recvs = Vec::with_capacity(world_size);
    for (peer, part) in all.iter_mut().enumerate().filter(|(peer, _)| *peer != rank) {
        let mut flow = Inflow::new(peer, None);
        flow.push(part);
        recvs.push(flow);
    }
    transport.exchange(&mut sends, &mut recvs, deadline)?;
    drop(recvs);
    Ok(all)
}

fn random_token() -> u128 {
    let half = || u128::from(RandomState::new().build_hasher().finish());
    half() << 64 | half()
}

/// Zeros where the system does not tell.
fn boot_id() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    u128::from_str_radix(&text.trim().replace('-', ""), 16).unwrap_or(0).to_be_bytes()
}
