//! The state machine of a run, without a network or a clock: what the coordinator decides about messages, silence, last wills
//! and time.
use super::message::{Entry, Exited, Message, Node, Round, Slot};
use super::reports::REPORTS;
use super::run::{Action, Run};
use crate::command::{Layout, Pace, Rendezvous, Terms, version};
use crate::supervise::worker::Exit;
use crate::verdict::{How, Verdict};
use candle_ddp_rendezvous::{Decision, Generations, HashStore};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A run whose nodes have a worker each, and its clock. With `is_static`, a node's rank is its slot.
pub(super) struct Fixture {
    pub(super) run: Run,
    pub(super) is_static: bool,
    pub(super) now: Instant,
    pub(super) survived: Vec<Verdict>,
}

/// The options of a run.
pub(super) fn terms(min_nodes: usize, max_nodes: usize, max_restarts: u32) -> Terms {
    Terms { run_id: "a".into(), min_nodes, max_nodes, max_restarts, version: version() }
}

/// The node that a process describes when it joins.
pub(super) fn node(slot: Slot, node_rank: Option<usize>, terms: Terms) -> Node {
    Node { host: format!("host{slot}"), node_rank, hosts: slot == 0, terms, workers: 1, fitness: None, unfit: None }
}

impl Fixture {
    pub(super) fn new(min_nodes: usize, max_nodes: usize, max_restarts: u32, is_static: bool) -> Self {
        let terms = terms(min_nodes, max_nodes, max_restarts);
        let store = Arc::new(HashStore::new(Duration::from_secs(1)));
        let run = Run::new(Rendezvous { terms, pace: Pace::default(), is_static }, store);
        Self { run, is_static, now: Instant::now(), survived: Vec::new() }
    }

    /// A run of two nodes, which have met.
    pub(super) fn of_two(min_nodes: usize, max_restarts: u32, is_static: bool) -> Self {
        let mut fixture = Self::new(min_nodes, 2, max_restarts, is_static);
        fixture.join(0);
        fixture.join(1);
        assert_eq!(fixture.actions(), [start(0, 0, &[0, 1])]);
        fixture
    }

    /// A node comes, and is welcome.
    #[track_caller]
    pub(super) fn join(&mut self, slot: Slot) {
        assert_eq!(self.ask(slot, |_| ()), None);
    }

    /// A node comes that differs from others by a `change`. Returns why it is refused.
    #[track_caller]
    pub(super) fn ask(&mut self, slot: Slot, change: impl FnOnce(&mut Node)) -> Option<String> {
        let node_rank = self.is_static.then_some(usize::try_from(slot).unwrap());
        let mut node = node(slot, node_rank, self.run.terms.clone());
        change(&mut node);
        self.tell(slot, Message::Join(node));
        match self.run.actions.remove(0) {
            Action::Welcome(_, refusal) => refusal,
            other => panic!("{other:?}"),
        }
    }

    /// The ranks say that they run elastically, with `least` of them or more. Returns the log of their generations.
    pub(super) fn announce(&self, least: usize) -> Generations {
        let log = Generations::new(Generations::agent_prefix(0), Arc::clone(&self.run.store));
        log.announce(least).unwrap();
        log
    }

    pub(super) fn tell(&mut self, slot: Slot, message: Message) {
        self.run.on_message(slot, message);
    }

    /// The worker of a node fails.
    pub(super) fn fail(&mut self, slot: Slot, code: u8) {
        let rank = usize::try_from(slot).unwrap();
        self.tell(slot, Message::Exited(Exited { rank, exit: Exit::Code(code.into()) }));
    }

    /// The actions of the run until now, without the verdicts on failures after which it continues.
    pub(super) fn actions(&mut self) -> Vec<Action> {
        self.run.on_time(self.now);
        let mut actions = std::mem::take(&mut self.run.actions);
        actions.retain(|action| match action {
            Action::Write(Entry::Failure(verdict)) => {
                self.survived.push((**verdict).clone());
                false
            }
            _ => true,
        });
        actions
    }

    /// The entries for the nodes until now.
    pub(super) fn entries(&mut self) -> Vec<Entry> {
        let entry = |action| match action {
            Action::Write(entry) => Some(entry),
            _ => None,
        };
        self.actions().into_iter().filter_map(entry).collect()
    }

    /// Asserts that all workers are now started again, and returns the reason.
    #[track_caller]
    pub(super) fn restart_reason(&mut self) -> String {
        match self.entries().as_slice() {
            [Entry::Restart { reason }] => reason.clone(),
            other => panic!("{other:?} instead of a restart"),
        }
    }

    /// Asserts that the run has now failed, and returns the reason and the exit code.
    #[track_caller]
    pub(super) fn failure(&mut self) -> (String, u8) {
        match self.entries().as_slice() {
            [Entry::Failed { reason, code, .. }] => (reason.clone(), *code),
            other => panic!("{other:?} instead of a failure"),
        }
    }
}

/// The verdict of a node on its worker.
fn failed(rank: usize, code: u8) -> Verdict {
    let of_host = Some(format!("host{rank}"));
    Verdict { rank: Some(rank), node: Some(rank), host: of_host, ..Verdict::now(How::Exit, code, "it failed") }
}

pub(super) fn start(attempt: u64, restart_count: u32, slots: &[Slot]) -> Action {
    Action::Start(
        Round { attempt, restart_count, layout: Layout::even(slots.len(), 1), is_check: false, node_rank: None },
        slots.to_vec(),
    )
}

#[test]
fn nodes_meet_and_finish() {
    let mut fixture = Fixture::new(2, 2, 0, true);
    fixture.join(1);
    assert_eq!(fixture.actions(), []);
    fixture.join(0);
    assert_eq!(fixture.actions(), [start(0, 0, &[0, 1])]);
    fixture.tell(0, Message::Finished);
    assert_eq!(fixture.actions(), []);
    fixture.tell(1, Message::Finished);
    assert_eq!(fixture.entries(), [Entry::Done]);
    for slot in [1, 0] {
        assert!(!fixture.run.is_over());
        fixture.tell(slot, Message::Bye);
    }
    assert!(fixture.run.is_over());
}

#[test]
fn a_node_that_is_silent_or_gone_is_lost() {
    type Loss = fn(&mut Run);
    let losses: [(Loss, &str); 2] = [
        (|run| run.on_silence(1), "node 1 (host host1) has given no sign of life for 5 s"),
        (|run| run.on_message(1, Message::Gone), "node 1 (host host1) is gone: its ddprun ended without a word"),
    ];
    for (lose, begins) in losses {
        let mut fixture = Fixture::of_two(1, 0, false);
        lose(&mut fixture.run);
        let reason = fixture.restart_reason();
        assert!(reason.starts_with(begins) && reason.ends_with("Restarting all workers, on 1 node(s)"), "{reason}");
        fixture.tell(0, Message::Ended(None));
        assert_eq!(fixture.actions(), [Action::Clear, start(1, 1, &[0])]);
        fixture.tell(1, Message::Gone);
        assert_eq!(fixture.actions(), []);
        let mut fixture = Fixture::of_two(2, 1, true);
        lose(&mut fixture.run);
        let (reason, code) = fixture.failure();
        assert!(reason.starts_with(begins) && code == 1, "{reason}");
    }
}

#[test]
fn a_last_will_after_a_goodbye_means_nothing() {
    let mut fixture = Fixture::of_two(1, 0, false);
    fixture.tell(1, Message::Leave { reason: "ddprun received SIGTERM".into(), signal: Some(15) });
    let reason = fixture.restart_reason();
    assert!(reason.starts_with("node 1 (host host1) leaves: ddprun received SIGTERM"), "{reason}");
    fixture.tell(1, Message::Bye);
    fixture.tell(1, Message::Gone);
    assert_eq!(fixture.actions(), []);

    // A node that has finished waits for the others, but not for ever.
    let mut fixture = Fixture::of_two(2, 0, true);
    fixture.tell(1, Message::Finished);
    for message in
        [Message::Leave { reason: "it has waited long enough".into(), signal: None }, Message::Bye, Message::Gone]
    {
        fixture.tell(1, message);
        assert_eq!(fixture.actions(), []);
    }
    fixture.tell(0, Message::Finished);
    assert_eq!(fixture.entries(), [Entry::Done]);
    assert!(!fixture.run.is_over(), "the other one still needs the store");
}

/// All nodes then end in the same way.
#[test]
fn a_signal_to_a_node_that_the_run_needs_ends_it_everywhere() {
    for (is_static, slot) in [(true, 1), (true, 0), (false, 1), (false, 0)] {
        let mut fixture = Fixture::of_two(2, 0, is_static);
        fixture.tell(slot, Message::Leave { reason: "ddprun received SIGTERM".into(), signal: Some(15) });
        let entries = fixture.entries();
        let [Entry::Failed { reason, code: 143, signal: Some(15) }] = entries.as_slice() else { panic!("{entries:?}") };
        assert!(
            reason.starts_with(&format!("node {slot} (host host{slot}) leaves: ddprun received SIGTERM")),
            "{reason}"
        );
        // The store remains until the workers of both have exited, whatever happens to them.
        fixture.fail(0, 7);
        fixture.tell(1 - slot, Message::Leave { reason: "ddprun received SIGTERM".into(), signal: Some(15) });
        for slot in [1, 0] {
            assert!(!fixture.run.is_over());
            fixture.tell(slot, Message::Bye);
            assert_eq!(fixture.actions(), []);
        }
        assert!(fixture.run.is_over());
    }
}

#[test]
fn a_run_whose_workers_save_after_a_signal_ends_well() {
    for (last, is_well) in [(0, true), (3, false)] {
        let mut fixture = Fixture::of_two(2, 0, true);
        fixture.tell(1, Message::Leave { reason: "ddprun received SIGTERM".into(), signal: Some(15) });
        fixture.fail(1, 0);
        assert!(!fixture.run.has_saved());
        fixture.fail(0, last);
        (0..2).for_each(|slot| fixture.tell(slot, Message::Bye));
        fixture.actions();
        assert_eq!((fixture.run.is_over(), fixture.run.has_saved()), (true, is_well));
    }
}

/// Two nodes, whose ranks accept at least `least`, and a signal that ends the run. Returns the log of their generations.
fn stopped(least: usize) -> (Fixture, Generations) {
    let mut fixture = Fixture::new(3, 3, 5, true);
    (0..3).for_each(|slot| fixture.join(slot));
    fixture.actions();
    let log = fixture.announce(least);
    fixture.tell(0, Message::Leave { reason: "ddprun received SIGTERM".into(), signal: Some(15) });
    assert!(matches!(fixture.entries()[..], [Entry::Failed { signal: Some(15), .. }]));
    assert_eq!(log.get(1).unwrap(), None);
    (fixture, log)
}

#[test]
fn while_a_signal_ends_the_run_elastic_ranks_continue_without_those_that_end() {
    let ranks = |log: &Generations, number| match log.get(number).unwrap() {
        Some(Decision::Members(members)) => members.iter().map(|member| member.rank).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    // A worker, one that was to take the place of another, a node that is lost, and one that ends without its ranks.
    let ends: [fn(&mut Fixture); 4] = [
        |fixture| fixture.fail(1, 137),
        |fixture| {
            fixture.tell(1, Message::Exited(Exited { rank: 1, exit: Exit::NotReplaced }));
        },
        |fixture| fixture.tell(1, Message::Gone),
        |fixture| fixture.tell(1, Message::Bye),
    ];
    for end in ends {
        let (mut fixture, log) = stopped(2);
        end(&mut fixture);
        assert_eq!(ranks(&log, 1), [0, 2]);
        // Its goodbye says nothing new.
        fixture.tell(1, Message::Bye);
        assert_eq!(log.get(2).unwrap(), None);
        fixture.fail(0, 137);
        let Some(Decision::Failed { rank: 0, reason }) = log.get(2).unwrap() else { panic!() };
        assert!(reason.contains("no process takes its place, because a signal ends the run"), "{reason}");
        assert_eq!(fixture.actions(), []);
    }
}

/// A node that the run needs leaves because of a signal: all ranks save together, so none gets an error.
#[test]
fn a_signal_to_a_node_of_an_elastic_run_is_no_failure_of_its_ranks() {
    for slot in [0, 1] {
        let mut fixture = Fixture::of_two(2, 5, true);
        let log = fixture.announce(2);
        fixture.tell(slot, Message::Leave { reason: "ddprun received SIGTERM".into(), signal: Some(15) });
        assert!(matches!(fixture.entries()[..], [Entry::Failed { signal: Some(15), .. }]));
        assert_eq!(log.get(1).unwrap(), None);
    }
}

#[test]
fn a_node_that_is_gone_is_not_waited_for() {
    // Before the others start again,
    let mut fixture = Fixture::of_two(2, 1, false);
    fixture.fail(0, 7);
    fixture.restart_reason();
    fixture.tell(0, Message::Ended(None));
    assert_eq!(fixture.actions(), []);
    fixture.tell(1, Message::Gone);
    assert_eq!(fixture.actions(), [Action::Clear]);
    fixture.join(2);
    assert_eq!(fixture.actions(), [start(1, 1, &[0, 2])]);
    // and for its report.
    fixture.fail(0, 8);
    assert_eq!(fixture.failure().1, 8);
    let report = failed(0, 8);
    fixture.tell(0, Message::Report(Some(report.clone())));
    assert_eq!(fixture.actions(), []);
    fixture.tell(2, Message::Gone);
    assert_eq!(fixture.actions(), [Action::Conclude(Box::new(report))]);
}

#[test]
fn too_few_nodes_end_the_run_or_use_up_a_restart() {
    let mut fixture = Fixture::of_two(2, 0, false);
    fixture.tell(1, Message::Gone);
    let (reason, code) = fixture.failure();
    assert!(reason.ends_with("The 1 remaining node(s) are fewer than --nnodes requires (2)"), "{reason}");
    assert_eq!(code, 1);

    let mut fixture = Fixture::of_two(2, 1, false);
    fixture.tell(1, Message::Gone);
    let reason = fixture.restart_reason();
    assert!(reason.ends_with("All workers will be restarted once 2 node(s) are there"), "{reason}");
    fixture.tell(0, Message::Ended(None));
    assert_eq!(fixture.entries(), []);
    fixture.join(2);
    assert_eq!(fixture.actions(), [start(1, 1, &[0, 2])]);
    fixture.tell(2, Message::Gone);
    fixture.failure();
}

#[test]
fn the_last_failure_counts_when_all_restarts_are_used_up() {
    let mut fixture = Fixture::of_two(2, 1, true);
    fixture.fail(1, 7);
    let reason = fixture.restart_reason();
    let expected = "rank 1 on node 1 (host host1) exited with code 7: restarting all workers (restart 1 of 1)";
    assert_eq!(reason, expected);
    for slot in [0, 1] {
        assert_eq!(fixture.actions(), []);
        fixture.tell(slot, Message::Ended(None));
    }
    assert_eq!(fixture.actions(), [Action::Clear, start(1, 1, &[0, 1])]);
    fixture.fail(0, 9);
    assert_eq!(fixture.failure(), ("rank 0 on node 0 (host host0) exited with code 9".to_string(), 9));
}

/// A worker fails because another node has died: no restart is used up, however that becomes known.
#[test]
fn a_failure_is_judged_once_the_other_nodes_are_known_to_live() {
    for lose in [|run: &mut Run| run.on_message(1, Message::Gone), |run: &mut Run| run.on_silence(1)] {
        let mut fixture = Fixture::of_two(1, 1, false);
        fixture.fail(0, 5);
        fixture.run.on_beat(1);
        assert_eq!(fixture.actions(), []);
        lose(&mut fixture.run);
        assert!(fixture.restart_reason().starts_with("node 1 "));
        assert_eq!(fixture.run.restarts.used, 0);
    }
    let mut fixture = Fixture::of_two(1, 1, false);
    fixture.fail(0, 5);
    for _ in 0..2 {
        assert_eq!(fixture.actions(), []);
        fixture.run.on_beat(1);
    }
    assert!(fixture.restart_reason().starts_with("rank 0 on node 0 (host host0) exited with code 5"));
    assert_eq!(fixture.run.restarts.used, 1);
}

/// Of a restart, too, although the worker that failed first was not the cause.
#[test]
fn the_nodes_agree_on_the_verdict_on_a_failure_that_the_run_survives() {
    let mut fixture = Fixture::of_two(2, 2, true);
    fixture.fail(0, 7);
    fixture.restart_reason();
    let killed = Verdict { how: How::Signal, signal: Some(9), exit: None, ..failed(1, 137) };
    fixture.tell(0, Message::Ended(Some(failed(0, 7))));
    fixture.tell(1, Message::Ended(Some(killed.clone())));
    assert_eq!(fixture.actions(), [Action::Clear, start(1, 1, &[0, 1])]);
    assert_eq!(std::mem::take(&mut fixture.survived), std::slice::from_ref(&killed));
    assert_eq!(fixture.run.status().last_failure, Some(killed));
    // If no worker has failed by itself, the end of the process is all that is known.
    fixture.fail(0, 8);
    fixture.restart_reason();
    (0..2).for_each(|slot| fixture.tell(slot, Message::Ended(None)));
    assert_eq!(fixture.actions(), [Action::Clear, start(2, 2, &[0, 1])]);
    let survived = std::mem::take(&mut fixture.survived);
    assert_eq!(survived.iter().map(|verdict| (verdict.rank, verdict.exit)).collect::<Vec<_>>(), [(Some(0), Some(8))]);
    // Nobody has failed if a node joins, or if one is told to end; a node is blamed if it is lost.
    let mut fixture = Fixture::new(1, 3, 0, false);
    (0..2).for_each(|slot| fixture.join(slot));
    fixture.now += Pace::default().last_call_timeout;
    fixture.actions();
    fixture.now += Pace::default().last_call_timeout;
    assert_eq!(fixture.actions(), [start(0, 0, &[0, 1])]);
    fixture.join(2);
    fixture.restart_reason();
    (0..2).for_each(|slot| fixture.tell(slot, Message::Ended(None)));
    assert_eq!((fixture.actions().len(), fixture.survived.len()), (2, 0));
    fixture.tell(1, Message::Gone);
    fixture.restart_reason();
    [0, 2].into_iter().for_each(|slot| fixture.tell(slot, Message::Ended(None)));
    fixture.actions();
    let [lost] = &fixture.survived[..] else { panic!("{:?}", fixture.survived) };
    assert_eq!((lost.how, lost.node, lost.host.as_deref()), (How::Lost, Some(1), Some("host1")));
}

#[test]
fn late_reports_are_not_waited_for() {
    let mut fixture = Fixture::of_two(2, 0, false);
    fixture.fail(0, 7);
    fixture.failure();
    // No report is in yet.
    fixture.now += 10 * REPORTS;
    assert_eq!(fixture.actions(), []);
    let report = Verdict { rank: Some(1), told_by: Some(0), host: None, ..failed(0, 7) };
    fixture.tell(0, Message::Report(Some(report.clone())));
    assert_eq!(fixture.actions(), []);
    fixture.now += REPORTS - Duration::from_millis(1);
    assert_eq!(fixture.actions(), []);
    fixture.now += Duration::from_millis(1);
    assert_eq!(fixture.actions(), [Action::Conclude(Box::new(report))]);
    assert_eq!(fixture.actions(), []);
}
