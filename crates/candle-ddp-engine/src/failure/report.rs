//! The ranks' reports to each other about their calls.
use crate::call::{Call, Channel};
use crate::texts;
use candle_ddp_base::wire::{Reader, Writer};

/// The progress of one rank's collectives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProgressReport {
    /// The last collective that was started; it may still be queued. 0 before the first.
    pub started: u64,
    /// The last collective that began to run. 0 before the first.
    pub begun: u64,
    /// The last collectives up to `started`, as far back as they are remembered.
    pub calls: Vec<Call>,
    /// Whether a call is held up because the program keeps the storage of its tensor locked.
    pub waits_for_lock: bool,
    /// The activity of the thread that started the last one, if this library knows it.
    pub activity: Option<String>,
}

impl ProgressReport {
    /// The call at `sequence`, if it is remembered.
    pub(crate) fn call_at(&self, sequence: u64) -> Option<Call> {
        let age = usize::try_from(self.started.checked_sub(sequence)?).ok()?;
        self.calls.get(self.calls.len().checked_sub(1)?.checked_sub(age)?).copied()
    }

    pub(crate) fn encode(&self, writer: &mut Writer) {
        writer.u64(self.started).u64(self.begun).u8(u8::from(self.waits_for_lock));
        writer.text(self.activity.as_deref().unwrap_or_default()).u32(self.calls.len() as u32);
        self.calls.iter().for_each(|call| call.encode(writer));
        // For the texts of errors. The newest calls are the most likely ones there.
        texts::encode(self.calls.iter().rev().flat_map(Call::codes), writer);
    }

    /// Decodes a report, and learns the texts that come with it.
    pub(crate) fn decode(reader: &mut Reader) -> Option<Self> {
        let (started, begun, waits_for_lock) = (reader.u64()?, reader.u64()?, reader.u8()? != 0);
        let activity = Some(reader.text()?).filter(|text| !text.is_empty());
        let count = reader.u32()?;
        let calls = (0..count).map(|_| Call::decode(reader)).collect::<Option<_>>()?;
        texts::decode(reader)?;
        Some(Self { started, begun, calls, waits_for_lock, activity })
    }
}

/// The number of calls of a rank that concern one peer. Calls are numbered from 1, so these are also the sequence
/// numbers of the last ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CallCounts {
    pub collectives: u64,
    /// Messages to that peer.
    pub sent: u64,
    /// Messages from that peer.
    pub received: u64,
}

impl CallCounts {
    /// The number of calls that pair up with the peer's own calls on `channel`.
    pub(crate) fn matching(self, channel: Channel) -> u64 {
        match channel {
            Channel::Collectives => self.collectives,
            Channel::SendTo(_) => self.received,
            Channel::RecvFrom(_) => self.sent,
        }
    }

    pub(crate) fn encode(self, writer: &mut Writer) {
        writer.u64(self.collectives).u64(self.sent).u64(self.received);
    }

    pub(crate) fn decode(reader: &mut Reader) -> Option<Self> {
        Some(Self { collectives: reader.u64()?, sent: reader.u64()?, received: reader.u64()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::label::Label;
    use crate::operation::Operation;
    use crate::shape::ShapeCode;

    #[test]
    fn reports_can_be_encoded_and_decoded() {
        let calls = vec![
            Call::bare(Operation::Barrier),
            Call {
                count: 8,
                label: Label::register("save_distributed"),
                shape: ShapeCode::of(&[2, 4]),
                ..Call::bare(Operation::AllReduce)
            },
        ];
        let activity = Some("reads".to_string());
        let report = ProgressReport { started: 12, begun: 11, calls, waits_for_lock: true, activity };
        let counts = [10, 11, 12, 13].map(|sequence| report.call_at(sequence).map(|call| call.count));
        assert_eq!(counts, [None, Some(0), Some(8), None]);
        let mut writer = Writer::default();
        report.encode(&mut writer);
        assert_eq!(ProgressReport::decode(&mut Reader(&writer.0)), Some(report));
        for cut in 0..writer.0.len() {
            assert_eq!(ProgressReport::decode(&mut Reader(&writer.0[..cut])), None, "cut at {cut}");
        }
    }

    #[test]
    fn a_rank_that_hears_of_a_label_that_it_never_used_shows_its_text() {
        let text = "a label of another rank";
        let written = |call| {
            let mut writer = Writer::default();
            ProgressReport { started: 1, begun: 1, calls: vec![call], ..ProgressReport::default() }.encode(&mut writer);
            writer
        };
        let call = Call { label: Label::of(text), ..Call::bare(Operation::Barrier) };
        // This rank does not know the text, which the other one writes behind its calls.
        let mut writer = written(call);
        assert_eq!(call.to_string(), "barrier()");
        let without = writer.0.len() - 4;
        writer.0.truncate(without);
        writer.u32(1).u32(call.label.code()).text(text);
        let heard = ProgressReport::decode(&mut Reader(&writer.0)).unwrap();
        assert_eq!(heard.calls[0].to_string(), "barrier() for a label of another rank");
        // So would this rank now.
        assert_eq!(written(call).0, writer.0);
    }
}
