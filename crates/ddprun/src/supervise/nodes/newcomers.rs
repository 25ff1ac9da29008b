//! Tests of nodes that take the place of others, and of nodes that are not fit.
use super::message::{Entry, Message, Round, Slot};
use super::run::Action;
use super::tests::{Fixture, start};
use crate::check::Fitness;
use crate::command::Layout;
use candle_ddp_rendezvous::{Decision, Generations, Member};
use std::time::Duration;

/// A node comes whose slowest core makes `product` MFLOP/s. Returns why it is refused.
fn come(fixture: &mut Fixture, slot: Slot, product: u64) -> Option<String> {
    fixture.ask(slot, |node| node.fitness = Some(Fitness::of(product, 10_000)))
}

/// The check of these nodes together.
fn check(restart_count: u32, slots: &[Slot]) -> Action {
    match start(0, restart_count, slots) {
        Action::Start(round, slots) => Action::Start(Round { is_check: true, ..round }, slots),
        other => other,
    }
}

/// Two nodes that check their connections.
fn in_check(is_static: bool, min_nodes: usize, max_restarts: u32) -> Fixture {
    let mut fixture = Fixture::new(min_nodes, 2, max_restarts, is_static);
    (0..2).for_each(|slot| assert_eq!(come(&mut fixture, slot, 40_000), None));
    assert_eq!(fixture.actions(), [check(0, &[0, 1])]);
    fixture
}

#[test]
fn the_run_starts_after_a_check_without_findings_and_counts_no_restart() {
    for is_static in [true, false] {
        let mut fixture = in_check(is_static, 2, 0);
        (0..2).for_each(|slot| fixture.tell(slot, Message::Finished));
        let reason = fixture.restart_reason();
        assert_eq!(reason, "the connections between the 2 nodes are fit (--check): the run starts");
        (0..2).for_each(|slot| fixture.tell(slot, Message::Ended(None)));
        assert_eq!(fixture.actions(), [Action::Clear, start(0, 0, &[0, 1])]);
        (0..2).for_each(|slot| fixture.tell(slot, Message::Finished));
        assert_eq!(fixture.entries(), [Entry::Done]);
    }
}

#[test]
fn a_check_that_finds_something_ends_the_run_whatever_restarts_are_left() {
    let mut fixture = in_check(true, 2, 3);
    fixture.tell(0, Message::Finished);
    fixture.fail(1, 1);
    let reason = "rank 1 on node 1 (host host1) exited with code 1, in the check before the run (--check)";
    assert_eq!(fixture.failure(), (reason.to_string(), 1));
}

#[test]
fn a_node_that_leaves_or_comes_during_the_check_changes_who_is_checked() {
    // Its part of the check is done, but the run needs it.
    let mut fixture = in_check(true, 2, 0);
    fixture.tell(1, Message::Finished);
    fixture.tell(1, Message::Leave { reason: "SIGTERM".to_string(), signal: None });
    assert!(fixture.failure().0.starts_with("node 1 (host host1) leaves: SIGTERM"));
    let mut fixture = in_check(false, 1, 0);
    fixture.tell(1, Message::Gone);
    fixture.restart_reason();
    fixture.tell(0, Message::Ended(None));
    // A single node has no connections, and a restart that no worker has seen does not count.
    assert_eq!(fixture.actions(), [Action::Clear, start(0, 0, &[0])]);
}

const SLOW: &str = "the machine of host host1 is not fit for the run: its slowest core multiplies matrices at 20.0 GFLOP/s, on \
                    others at 40.0 GFLOP/s (--check)";

#[test]
fn a_slow_node_is_refused_before_it_joins_and_another_may_come() {
    let mut fixture = Fixture::new(2, 2, 0, false);
    assert_eq!(come(&mut fixture, 0, 40_000), None);
    assert_eq!(come(&mut fixture, 1, 20_000).as_deref(), Some(SLOW));
    assert_eq!(fixture.actions(), []);
    fixture.tell(1, Message::Bye);
    assert_eq!(come(&mut fixture, 2, 39_000), None);
    assert_eq!(fixture.actions(), [check(0, &[0, 2])]);
    // Nor while the run goes on, as a spare.
    assert!(come(&mut fixture, 3, 20_000).is_some());
    assert_eq!(fixture.actions(), []);
}

#[test]
fn a_slow_node_that_came_first_is_refused_when_faster_ones_are_there() {
    let mut fixture = Fixture::new(2, 2, 0, false);
    assert_eq!(come(&mut fixture, 1, 20_000), None);
    assert_eq!(come(&mut fixture, 0, 40_000), None);
    assert_eq!(fixture.actions(), [Action::Write(Entry::Refuse { slot: 1, reason: SLOW.to_string() })]);
    assert_eq!(come(&mut fixture, 2, 40_000), None);
    assert_eq!(fixture.actions(), [check(0, &[0, 2])]);
}

#[test]
fn a_slow_node_that_the_run_needs_ends_it() {
    let mut fixture = Fixture::new(2, 2, 0, true);
    assert_eq!(come(&mut fixture, 0, 40_000), None);
    assert!(come(&mut fixture, 1, 20_000).is_some());
    assert_eq!(fixture.failure(), (SLOW.to_string(), 1));
    // It hosts the store.
    let mut fixture = Fixture::new(2, 3, 0, false);
    for (slot, product) in [(0, 20_000), (1, 40_000), (2, 40_000)] {
        assert_eq!(come(&mut fixture, slot, product), None);
    }
    assert!(fixture.failure().0.starts_with("the machine of host host0 is not fit"));
}

#[test]
fn nodes_without_a_check_are_not_compared() {
    let mut fixture = Fixture::new(3, 3, 0, true);
    fixture.join(0);
    fixture.join(2);
    assert_eq!(come(&mut fixture, 1, 1), None);
    assert_eq!(fixture.actions(), [start(0, 0, &[0, 1, 2])]);
}

/// Two nodes of an elastic run, and a spare.
fn with_spare() -> (Fixture, Generations) {
    let mut fixture = Fixture::of_two(2, 0, false);
    let log = fixture.announce(2);
    fixture.join(2);
    assert_eq!(fixture.actions(), []);
    (fixture, log)
}

#[test]
fn a_spare_takes_the_place_of_a_node_that_is_lost_or_leaves() {
    let leave = Message::Leave { reason: "ddprun received SIGTERM".into(), signal: Some(15) };
    for lost in [Message::Gone, leave] {
        let (mut fixture, log) = with_spare();
        fixture.tell(1, lost);
        let entries = fixture.entries();
        let [Entry::Admit(admission)] = entries.as_slice() else { panic!("{entries:?}") };
        assert_eq!((admission.slot, admission.node_rank, &admission.layout), (2, 1, &Layout::even(2, 1)));
        assert_eq!(admission.incarnations, [1]);
        let (reason, end) =
            (&admission.reason, "A spare takes its place (host host2): the others continue with it, 2 ranks in all");
        assert!(reason.starts_with("node 1 (host host1) ") && reason.ends_with(end), "{reason}");
        let members = [(0, 0), (1, 1)].map(|(rank, incarnation)| Member { rank, incarnation });
        assert_eq!(log.get(1).unwrap(), Some(Decision::Members(members.into())));
        assert_eq!(log.get(2).unwrap(), None);
        // It belongs to the run: the next loss is too much.
        fixture.tell(2, Message::Gone);
        fixture.failure();
    }
}

#[test]
fn a_spare_that_is_gone_takes_no_place() {
    let (mut fixture, log) = with_spare();
    fixture.tell(2, Message::Gone);
    assert_eq!(fixture.actions(), []);
    fixture.tell(1, Message::Gone);
    fixture.failure();
    assert!(matches!(log.get(1).unwrap(), Some(Decision::Failed { .. })));
}

/// Programs that do not run elastically are started again, with the spare.
#[test]
fn all_start_again_with_a_spare() {
    let mut fixture = Fixture::of_two(2, 0, false);
    fixture.join(2);
    fixture.tell(1, Message::Gone);
    fixture.restart_reason();
    fixture.tell(0, Message::Ended(None));
    assert_eq!(fixture.actions(), [Action::Clear, start(1, 1, &[0, 2])]);
}

/// A node that has failed its own check comes.
fn come_unfit(fixture: &mut Fixture, slot: Slot) -> Option<String> {
    fixture.ask(slot, |node| node.unfit = Some("no disk".to_string()))
}

const UNFIT: &str = "the machine of host host1 is not fit for the run: no disk";

#[test]
fn a_node_that_has_failed_its_own_check_ends_a_run_that_needs_it() {
    let mut fixture = Fixture::new(3, 3, 0, true);
    assert_eq!(come(&mut fixture, 0, 40_000), None);
    assert_eq!(come_unfit(&mut fixture, 1).as_deref(), Some(UNFIT));
    assert_eq!(fixture.failure(), (UNFIT.to_string(), 1));
    // The store remains until the last node, which comes late, has learned of it.
    fixture.tell(1, Message::Gone);
    fixture.tell(0, Message::Bye);
    assert_eq!(fixture.actions(), []);
    assert!(!fixture.run.is_over());
    assert_eq!(come(&mut fixture, 2, 40_000), Some(format!("the run has ended: {UNFIT}")));
    fixture.tell(2, Message::Gone);
    assert_eq!(fixture.actions(), []);
    assert!(fixture.run.is_over());
    // It may never come.
    let mut fixture = Fixture::new(2, 2, 0, true);
    assert!(come_unfit(&mut fixture, 0).is_some());
    fixture.tell(0, Message::Gone);
    fixture.failure();
    assert!(!fixture.run.is_over());
    fixture.now += Duration::from_secs(30);
    assert_eq!(fixture.actions(), []);
    assert!(fixture.run.is_over());
    // Another one may come in its place, unless it hosts the store.
    let mut fixture = Fixture::new(2, 2, 0, false);
    assert_eq!(come(&mut fixture, 0, 40_000), None);
    assert_eq!(come_unfit(&mut fixture, 1).as_deref(), Some(UNFIT));
    assert_eq!(fixture.actions(), []);
    let mut fixture = Fixture::new(1, 3, 0, false);
    assert!(come_unfit(&mut fixture, 0).is_some());
    assert_eq!(fixture.failure().0, UNFIT.replace("host1", "host0"));
}

#[test]
fn nodes_with_different_versions_start_no_run() {
    let mut fixture = Fixture::new(2, 2, 0, true);
    fixture.join(0);
    let own = fixture.run.terms.version.clone();
    fixture.run.terms.version = "0.0.1".to_string();
    let refusal = fixture.ask(1, |node| node.terms.version.clone_from(&own)).unwrap();
    assert!(
        refusal.starts_with(&format!("the version of ddprun is {own} here, but 0.0.1 on the node that")),
        "{refusal}"
    );
    let (reason, code) = fixture.failure();
    assert!(code == 1 && reason.starts_with(&format!("the version of ddprun is {own} on host host1, but")), "{reason}");
}
