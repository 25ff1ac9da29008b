//! The records of a group.
use crate::flight_record::record::{CallRecord, ChannelKind, GroupRecord};
use std::collections::BTreeMap;

/// The records of one group, by rank.
pub(super) type Group<'a> = BTreeMap<usize, &'a GroupRecord>;

pub(super) fn collectives_of(group: &GroupRecord) -> impl DoubleEndedIterator<Item = &CallRecord> {
    group.calls.iter().filter(|call| call.channel == ChannelKind::Collectives)
}
