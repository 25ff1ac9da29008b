//! The groups that call: the group of all ranks, some that live as long as the run, and one that is replaced from time to time.
use crate::random::Random;
use candle_ddp::{ProcessGroup, Result};

/// A group, on a rank that may or may not belong to it.
pub(crate) struct Group {
    /// The ranks, as they are numbered in the group of all.
    pub(crate) ranks: Vec<usize>,
    /// `None` if this rank is not one of them.
    pub(crate) member: Option<ProcessGroup>,
}

pub(crate) struct Groups {
    world: ProcessGroup,
    lasting: Vec<Group>,
    newest: Option<Group>,
}

impl Groups {
    pub(crate) fn new(world: &ProcessGroup, random: &mut Random) -> Result<Self> {
        const LASTING: usize = 6;
        let all = Group { ranks: (0..world.world_size()).collect(), member: Some(world.clone()) };
        let mut groups = Self { world: world.clone(), lasting: vec![all], newest: None };
        for _ in 0..LASTING {
            let group = groups.create(random)?;
            groups.lasting.push(group);
        }
        Ok(groups)
    }

    /// A group of at least two ranks, in any order.
    fn create(&self, random: &mut Random) -> Result<Group> {
        let mut ranks: Vec<usize> = (0..self.world.world_size()).collect();
        for last in (1..ranks.len()).rev() {
            ranks.swap(last, random.below(last + 1));
        }
        ranks.truncate(2 + random.below(ranks.len() - 1));
        Ok(Group { member: self.world.new_group(&ranks)?, ranks })
    }

    /// The groups that live as long as the run.
    pub(crate) fn lasting(&self) -> &[Group] {
        &self.lasting
    }

    /// Ends the newest group.
    pub(crate) fn end_newest(&mut self) {
        self.newest = None;
    }

    /// Ends the newest group and makes another one.
    pub(crate) fn renew(&mut self, random: &mut Random) -> Result<()> {
        self.newest = None;
        self.newest = Some(self.create(random)?);
        Ok(())
    }

    /// The group of all ranks every second time.
    pub(crate) fn pick(&self, random: &mut Random) -> &Group {
        if random.once_in(2) {
            return &self.lasting[0];
        }
        let number = random.below(self.lasting.len() + 1);
        self.lasting.get(number).or(self.newest.as_ref()).unwrap_or(&self.lasting[0])
    }
}
