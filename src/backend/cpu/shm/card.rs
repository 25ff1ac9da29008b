//! What a rank tells the others about itself and the memory that it offers.
use super::super::wire::{Reader, Writer};
use super::layout::Layout;

/// One rank's card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Card {
    /// Of the running kernel: ranks on the same host have the same one.
    pub(super) boot: [u8; 16],
    pub(super) processors: Processors,
    /// `None` when this rank has no memory to offer, or was told to use TCP.
    pub(super) offer: Option<Offer>,
}

/// Memory that peers may map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) pid: u32,
    pub(super) fd: u32,
    /// Random, and part of the memory's name: whoever finds that name under the process and the number looks at this
    /// very memory.
    pub(super) token: u128,
    pub(super) layout: Layout,
}

/// The processors that a rank may run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Processors {
    /// As a set of bits.
    pub(super) mask: [u64; 16],
    /// How many of them its control group lets it use at a time.
    pub(super) quota: u32,
}

impl Processors {
    /// Those of this thread, or of its process.
    pub(super) fn available() -> Self {
        let mut mask = [0; 16];
        if let Ok(set) = rustix::thread::sched_getaffinity(None) {
            for processor in (0..mask.len() * 64).filter(|processor| set.is_set(*processor)) {
                mask[processor / 64] |= 1 << (processor % 64);
            }
        }
        let quota = std::thread::available_parallelism().map_or(u32::MAX, |count| count.get() as u32);
        Self { mask, quota }
    }

    /// How many several ranks have together.
    pub(super) fn together<'a>(all: impl Iterator<Item = &'a Self> + Clone) -> u32 {
        let word = |index: usize| all.clone().fold(0, |word, processors| word | processors.mask[index]);
        let union: u32 = (0..16).map(|index| word(index).count_ones()).sum();
        // A quota smaller than a rank's own set is one of control groups, which ranks on one host usually share.
        let is_limited = |processors: &&Self| {
            processors.quota < processors.mask.iter().map(|word| word.count_ones()).sum::<u32>()
        };
        let quota = all.clone().filter(is_limited).map(|processors| processors.quota).min();
        quota.map_or(union, |quota| quota.min(union))
    }
}

impl Offer {
    /// The name of the memory.
    pub(super) fn name(&self) -> String {
        name(self.token)
    }
}

pub(super) fn name(token: u128) -> String {
    format!("candle-ddp-{token:032x}")
}

impl Card {
    pub(super) const BYTES: usize = 16 + 16 * 8 + 4 + 1 + 4 + 4 + 16 + 5 * 8;

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.bytes(&self.boot);
        self.processors.mask.iter().for_each(|word| {
            writer.u64(*word);
        });
        writer.u32(self.processors.quota);
        if let Some(Offer { pid, fd, token, layout }) = &self.offer {
            writer.u8(1).u32(*pid).u32(*fd).bytes(&token.to_le_bytes());
            let Layout { world_size, slots, capacity, direct_slots, direct_capacity } = *layout;
            for number in [world_size, slots, capacity, direct_slots, direct_capacity] {
                writer.u64(number as u64);
            }
        }
        writer.0.resize(Self::BYTES, 0);
        writer.0
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let boot = reader.array()?;
        let mut mask = [0; 16];
        for word in &mut mask {
            *word = reader.u64()?;
        }
        let processors = Processors { mask, quota: reader.u32()? };
        let number = |reader: &mut Reader| usize::try_from(reader.u64()?).ok();
        let offer = match reader.u8()? {
            0 => None,
            _ => Some(Offer {
                pid: reader.u32()?,
                fd: reader.u32()?,
                token: u128::from_le_bytes(reader.array()?),
                layout: Layout {
                    world_size: number(&mut reader)?,
                    slots: number(&mut reader)?,
                    capacity: number(&mut reader)?,
                    direct_slots: number(&mut reader)?,
                    direct_capacity: number(&mut reader)?,
                },
            }),
        };
        Some(Self { boot, processors, offer })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn processors(bits: &[usize], quota: u32) -> Processors {
        let mut mask = [0; 16];
        bits.iter().for_each(|bit| mask[bit / 64] |= 1 << (bit % 64));
        Processors { mask, quota }
    }

    #[test]
    fn a_card_survives_its_journey() {
        let offer = Offer { pid: 7, fd: 8, token: 1 << 100, layout: Layout::new(3, 1000) };
        for offer in [None, Some(offer)] {
            let card = Card { boot: [3; 16], processors: processors(&[0, 1023], 2), offer };
            let bytes = card.encode();
            assert_eq!((bytes.len(), Card::decode(&bytes)), (Card::BYTES, Some(card)));
        }
        assert_eq!(Card::decode(&[1; 20]), None);
    }

    #[test]
    fn processors_are_counted_once_and_within_the_quota() {
        let together = |all: &[Processors]| Processors::together(all.iter());
        assert_eq!(together(&[processors(&[0, 1], 2), processors(&[0, 1], 2)]), 2);
        assert_eq!(together(&[processors(&[0], 1), processors(&[70], 1)]), 2);
        assert_eq!(together(&[processors(&[0, 1, 2, 3], 2), processors(&[0, 1, 2, 3], 2)]), 2);
    }
}
