//! A rank's answer to the question where it stands.
use crate::call::{Call, Channel};
use crate::call_site::CallSite;
use crate::texts;
use candle_ddp_base::wire::{Reader, Writer};

/// A rank's place in its program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    /// Its number in the group of all ranks.
    pub(crate) rank: usize,
    /// The threads of the program that have made calls or groups, and are not over, sorted.
    pub(crate) threads: Vec<u64>,
    /// The groups that it is in.
    pub(crate) groups: Vec<GroupReport>,
    /// The groups that it makes.
    pub(crate) makings: Vec<Making>,
}

/// A thread that makes a group, and waits until all of its ranks do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Making {
    /// Identifies the group on all ranks.
    pub(crate) id: u64,
    /// The group from which it is split off.
    pub(crate) parent: u64,
    /// The group for messages.
    pub(crate) name: String,
    /// Its ranks, numbered as in the group of all ranks.
    pub(crate) ranks: Vec<u64>,
    pub(crate) thread: u64,
    /// No other group that this rank has made has this number.
    pub(crate) number: u64,
    /// Where the program waits.
    pub(crate) place: CallSite,
}

/// A rank's place in a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupReport {
    /// Identifies the group on all ranks.
    pub(crate) id: u64,
    /// The group for messages.
    pub(crate) name: String,
    /// The rank's number there.
    pub(crate) rank: usize,
    /// Whether a thread may make calls there that has not made any call yet.
    pub(crate) is_open: bool,
    /// The threads of this library that have made calls there, and are not over, sorted.
    pub(crate) helpers: Vec<u64>,
    /// The channels that have had calls.
    pub(crate) lanes: Vec<Lane>,
    pub(crate) waits: Vec<Wait>,
    /// For a group on a GPU: the rank's next call there runs behind everything that the program's stream waits for up to this number.
    pub(crate) next: Option<u64>,
    pub(crate) stream_waits: Vec<StreamWait>,
}

/// How far a rank is in a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lane {
    pub(crate) channel: Channel,
    /// The last call that was started; it may still be queued.
    pub(crate) started: u64,
    /// The call that is running or, on a GPU, the first one that is not over.
    pub(crate) running: Option<(u64, Call)>,
    /// That call runs behind everything that the program's stream waits for up to this number.
    pub(crate) behind: u64,
    /// Whether the running call is a message that cannot end before its receiver has come.
    pub(crate) needs_receiver: bool,
}

/// A thread that waits until a call is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wait {
    pub(crate) thread: u64,
    pub(crate) channel: Channel,
    pub(crate) sequence: u64,
    /// Where the program waits.
    pub(crate) place: CallSite,
    /// Whether the thread continues only once the call is over. Otherwise, what it puts on the GPU runs after the call.
    pub(crate) is_held: bool,
}

/// The program's stream on the GPU waits until a call is over: whatever is put on it from now on runs later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamWait {
    pub(crate) channel: Channel,
    pub(crate) sequence: u64,
    /// The waits of a process are numbered in their order.
    pub(crate) number: u64,
}

impl Lane {
    /// Whether a thread waits for the running call, or for one after it.
    pub(crate) fn is_awaited(&self, wait: &Wait) -> bool {
        self.running.is_some_and(|(sequence, _)| sequence <= wait.sequence)
    }
}

impl GroupReport {
    pub(crate) fn lane(&self, channel: Channel) -> Option<&Lane> {
        self.lanes.iter().find(|lane| lane.channel == channel)
    }
}

impl Report {
    /// Whether the rank has, or makes, a group.
    pub(crate) fn has(&self, id: u64) -> bool {
        self.groups.iter().any(|group| group.id == id) || self.makings.iter().any(|making| making.id == id)
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.u32(self.rank as u32);
        write_numbers(&mut writer, &self.threads);
        writer.u32(self.groups.len() as u32);
        let mut codes = Vec::new();
        for group in &self.groups {
            writer.u64(group.id).text(&group.name).u32(group.rank as u32).u8(u8::from(group.is_open));
            write_numbers(&mut writer, &group.helpers);
            writer.u32(group.lanes.len() as u32);
            for Lane { channel, started, running, behind, needs_receiver } in &group.lanes {
                write_channel(&mut writer, *channel);
                writer.u64(*started).u64(*behind).u8(u8::from(running.is_some())).u8(u8::from(*needs_receiver));
                if let Some((sequence, call)) = running {
                    call.encode(writer.u64(*sequence));
                    codes.extend(call.codes());
                }
            }
            writer.u32(group.waits.len() as u32);
            for Wait { thread, channel, sequence, place, is_held } in &group.waits {
                write_channel(&mut writer, *channel);
                writer.u64(*thread).u64(*sequence).u32(place.code()).u8(u8::from(*is_held));
                codes.push(place.code());
            }
            writer.u8(u8::from(group.next.is_some())).u64(group.next.unwrap_or_default());
            writer.u32(group.stream_waits.len() as u32);
            for StreamWait { channel, sequence, number } in &group.stream_waits {
                write_channel(&mut writer, *channel);
                writer.u64(*sequence).u64(*number);
            }
        }
        writer.u32(self.makings.len() as u32);
        for Making { id, parent, name, ranks, thread, number, place } in &self.makings {
            writer.u64(*id).u64(*parent).text(name).u64(*thread).u64(*number).u32(place.code());
            write_numbers(&mut writer, ranks);
            codes.push(place.code());
        }
        texts::encode(codes, &mut writer);
        writer.0
    }

    /// Decodes a report, and learns the texts that come with it.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let (rank, threads) = (reader.rank()?, read_numbers(&mut reader)?);
        let groups = (0..reader.u32()?).map(|_| read_group(&mut reader)).collect::<Option<_>>()?;
        let makings = (0..reader.u32()?).map(|_| read_making(&mut reader)).collect::<Option<_>>()?;
        texts::decode(&mut reader)?;
        Some(Self { rank, threads, groups, makings })
    }
}

fn read_making(reader: &mut Reader) -> Option<Making> {
    let (id, parent, name) = (reader.u64()?, reader.u64()?, reader.text()?);
    let (thread, number, place) = (reader.u64()?, reader.u64()?, CallSite::from_code(reader.u32()?));
    Some(Making { id, parent, name, ranks: read_numbers(reader)?, thread, number, place })
}

fn read_group(reader: &mut Reader) -> Option<GroupReport> {
    let (id, name, rank, is_open) = (reader.u64()?, reader.text()?, reader.rank()?, reader.u8()? != 0);
    let helpers = read_numbers(reader)?;
    let lanes = (0..reader.u32()?).map(|_| {
        let (channel, started, behind) = (read_channel(reader)?, reader.u64()?, reader.u64()?);
        let (is_running, needs_receiver) = (reader.u8()? != 0, reader.u8()? != 0);
        let running = match is_running {
            true => Some((reader.u64()?, Call::decode(reader)?)),
            false => None,
        };
        Some(Lane { channel, started, running, behind, needs_receiver })
    });
    let lanes = lanes.collect::<Option<_>>()?;
    let waits = (0..reader.u32()?).map(|_| {
        let channel = read_channel(reader)?;
        let (thread, sequence, place) = (reader.u64()?, reader.u64()?, CallSite::from_code(reader.u32()?));
        Some(Wait { thread, channel, sequence, place, is_held: reader.u8()? != 0 })
    });
    let waits = waits.collect::<Option<_>>()?;
    let (is_on_gpu, next) = (reader.u8()? != 0, reader.u64()?);
    let stream_waits = (0..reader.u32()?)
        .map(|_| Some(StreamWait { channel: read_channel(reader)?, sequence: reader.u64()?, number: reader.u64()? }));
    let stream_waits = stream_waits.collect::<Option<_>>()?;
    Some(GroupReport { id, name, rank, is_open, helpers, lanes, waits, next: is_on_gpu.then_some(next), stream_waits })
}

fn write_numbers(writer: &mut Writer, numbers: &[u64]) {
    writer.u32(numbers.len() as u32);
    numbers.iter().for_each(|number| _ = writer.u64(*number));
}

fn read_numbers(reader: &mut Reader) -> Option<Vec<u64>> {
    (0..reader.u32()?).map(|_| reader.u64()).collect()
}

fn write_channel(writer: &mut Writer, channel: Channel) {
    match channel {
        Channel::Collectives => writer.u8(0),
        Channel::SendTo(peer) => writer.u8(1).u32(peer as u32),
        Channel::RecvFrom(peer) => writer.u8(2).u32(peer as u32),
    };
}

fn read_channel(reader: &mut Reader) -> Option<Channel> {
    match reader.u8()? {
        0 => Some(Channel::Collectives),
        1 => Some(Channel::SendTo(reader.rank()?)),
        2 => Some(Channel::RecvFrom(reader.rank()?)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::Operation;

    #[test]
    fn reports_can_be_encoded_and_decoded() {
        let call = Call { count: 8, ..Call::bare(Operation::AllReduce) };
        let channels = [Channel::Collectives, Channel::SendTo(3), Channel::RecvFrom(4)];
        let lane = |channel| {
            let is_first = channel == channels[0];
            let running = (channel != channels[1]).then_some((7, call));
            Lane { channel, started: 1 << 40, running, behind: 1 << 41, needs_receiver: is_first }
        };
        let wait = |channel| Wait { thread: 9, channel, sequence: 7, place: CallSite::from_code(3), is_held: true };
        let stream_wait = |channel| StreamWait { channel, sequence: 8, number: 1 << 42 };
        let group = GroupReport {
            id: u64::MAX,
            name: "the group of all ranks".to_string(),
            rank: 1,
            is_open: true,
            helpers: vec![4],
            lanes: channels.map(lane).to_vec(),
            waits: channels.map(wait).to_vec(),
            next: Some(u64::MAX),
            stream_waits: channels.map(stream_wait).to_vec(),
        };
        let on_cpus = GroupReport { next: None, stream_waits: Vec::new(), ..group.clone() };
        let making = Making {
            id: 5,
            parent: u64::MAX,
            name: "the companion".to_string(),
            ranks: vec![2, 3],
            thread: 9,
            number: 1,
            place: CallSite::from_code(4),
        };
        let (threads, groups) = (vec![1, 1 << 50], vec![group, on_cpus]);
        let report = Report { rank: 2, threads, groups, makings: vec![making] };
        let bytes = report.encode();
        assert_eq!(Report::decode(&bytes), Some(report));
        for cut in 0..bytes.len() {
            assert_eq!(Report::decode(&bytes[..cut]), None, "cut at {cut}");
        }
    }
}
