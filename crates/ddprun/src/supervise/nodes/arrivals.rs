//! Tests of how nodes come together: when they start, those that are late, and those with other options or other numbers of
//! workers.
use super::message::{Entry, Exited, Message, Slot};
use super::run::Action;
use super::tests::{Fixture, start};
use crate::command::{Layout, Pace};
use crate::supervise::worker::Exit;
use candle_ddp_rendezvous::{Decision, Generations, Member};
use std::time::Duration;

#[test]
fn nodes_that_do_not_come_in_time_end_the_run() {
    let join_timeout = Pace::default().join_timeout;
    for (is_static, absent) in [
        (
            false,
            ": start ddprun with the same options on the others, look at its output there, or give them more time \
             (--rdzv-conf join_timeout=SECONDS)",
        ),
        (true, ": look at the output of ddprun with --node-rank 1"),
    ] {
        let mut fixture = Fixture::new(2, 2, 0, is_static);
        assert_eq!(fixture.actions(), []);
        fixture.join(0);
        fixture.now += join_timeout - Duration::from_millis(1);
        assert_eq!(fixture.actions(), []);
        fixture.now += Duration::from_millis(1);
        assert_eq!(fixture.failure(), (format!("1 of 2 nodes joined within 600 s{absent}"), 1));
    }
    // The time begins anew with each meeting.
    let mut fixture = Fixture::of_two(2, 1, false);
    fixture.now += join_timeout;
    fixture.tell(1, Message::Gone);
    fixture.restart_reason();
    fixture.tell(0, Message::Ended(None));
    assert_eq!(fixture.actions(), [Action::Clear]);
    fixture.now += join_timeout - Duration::from_millis(1);
    assert_eq!(fixture.actions(), []);
    fixture.now += Duration::from_millis(1);
    fixture.failure();
}

#[test]
fn the_first_round_waits_for_more_nodes_than_it_needs() {
    let last_call_timeout = Pace::default().last_call_timeout;
    let mut fixture = Fixture::new(1, 3, 0, false);
    fixture.join(0);
    assert_eq!(fixture.actions(), []);
    // Too few nodes in between: the last call begins anew.
    fixture.now += last_call_timeout / 2;
    fixture.tell(0, Message::Gone);
    assert_eq!(fixture.actions(), []);
    fixture.join(1);
    assert_eq!(fixture.actions(), []);
    fixture.now += last_call_timeout / 2;
    fixture.join(2);
    assert_eq!(fixture.actions(), []);
    fixture.now += last_call_timeout / 2;
    assert_eq!(fixture.actions(), [start(0, 0, &[1, 2])]);
    // Later rounds do not wait.
    fixture.tell(1, Message::Gone);
    fixture.restart_reason();
    fixture.tell(2, Message::Ended(None));
    assert_eq!(fixture.actions(), [Action::Clear, start(1, 1, &[2])]);
}

/// Whichever comes first, each node learns why the run does not begin.
#[test]
fn a_node_with_other_options_ends_a_fixed_number_of_nodes_before_they_begin() {
    let join = |fixture: &mut Fixture, slot: Slot, max_restarts: u32, run_id: &str| {
        fixture.ask(slot, |node| (node.terms.max_restarts, node.terms.run_id) = (max_restarts, run_id.to_string()))
    };
    let reason = "--max-restarts is 2 on host host1, but 0 on the node that hosts the store: give all nodes the same";
    let mut fixture = Fixture::new(2, 2, 0, true);
    assert_eq!(join(&mut fixture, 0, 0, "a"), None);
    assert!(join(&mut fixture, 1, 2, "a").unwrap().starts_with("--max-restarts is 2 here, but 0 on the node"));
    assert_eq!(fixture.failure(), (reason.to_string(), 1));
    // The store remains until both have read the reason.
    fixture.tell(0, Message::Bye);
    assert!(!fixture.run.is_over());
    fixture.tell(1, Message::Gone);
    assert!(fixture.run.is_over());

    let mut fixture = Fixture::new(2, 2, 0, true);
    assert!(join(&mut fixture, 1, 2, "a").is_some());
    fixture.failure();
    // Even if that node is gone by then.
    fixture.tell(1, Message::Gone);
    assert!(!fixture.run.is_over());
    assert_eq!(join(&mut fixture, 0, 0, "a").unwrap(), format!("the run has ended: {reason}"));
    fixture.tell(0, Message::Gone);
    assert!(fixture.run.is_over());

    // A node of another run is here by mistake, a range needs no particular node, and a run in progress needs none.
    for (least, run_id) in [(2, "b"), (1, "a")] {
        let mut fixture = Fixture::new(least, 2, 0, true);
        assert!(join(&mut fixture, 1, 2, run_id).is_some());
        assert_eq!(fixture.actions(), []);
    }
    let mut fixture = Fixture::of_two(2, 0, true);
    assert!(join(&mut fixture, 2, 2, "a").is_some());
    assert_eq!(fixture.actions(), []);
}

#[test]
fn a_node_that_is_gone_before_the_start_may_come_again() {
    let mut fixture = Fixture::new(2, 2, 0, false);
    fixture.join(0);
    fixture.join(1);
    fixture.tell(1, Message::Gone);
    assert_eq!(fixture.actions(), []);
    fixture.join(2);
    assert_eq!(fixture.actions(), [start(0, 0, &[0, 2])]);
}

/// A node comes with so many workers, and is welcome.
fn come(fixture: &mut Fixture, slot: Slot, workers: usize) {
    assert_eq!(fixture.ask(slot, |node| node.workers = workers), None);
}

/// The start of nodes with these numbers of workers.
#[track_caller]
fn started(fixture: &mut Fixture, workers: &[usize]) {
    let actions = fixture.actions();
    let Some(Action::Start(round, _)) = actions.last() else { panic!("{actions:?}") };
    let mut layout = Layout::default();
    workers.iter().for_each(|workers| layout.push(*workers));
    assert_eq!(round.layout, layout);
}

#[test]
fn nodes_with_different_numbers_of_workers_get_ranks_in_order() {
    let mut fixture = Fixture::new(2, 2, 1, true);
    come(&mut fixture, 1, 2);
    come(&mut fixture, 0, 3);
    started(&mut fixture, &[3, 2]);
    fixture.tell(1, Message::Exited(Exited { rank: 4, exit: Exit::Code(7) }));
    assert!(fixture.restart_reason().starts_with("rank 4 on node 1 (host host1) exited with code 7"));
    (0..2).for_each(|slot| fixture.tell(slot, Message::Ended(None)));
    started(&mut fixture, &[3, 2]);
    fixture.tell(1, Message::Leave { reason: "ddprun received SIGTERM".into(), signal: Some(15) });
    (0..5).for_each(|rank| fixture.tell(0, Message::Exited(Exited { rank, exit: Exit::Code(0) })));
    assert!(fixture.run.has_saved());
}

/// Three nodes of an elastic run, with 1, 3 and 2 workers, and its log.
fn elastic(min_nodes: usize) -> (Fixture, Generations) {
    let mut fixture = Fixture::new(min_nodes, 3, 0, false);
    [1, 3, 2].into_iter().zip(0..).for_each(|(workers, slot)| come(&mut fixture, slot, workers));
    started(&mut fixture, &[1, 3, 2]);
    let log = fixture.announce(1);
    (fixture, log)
}

fn members(log: &Generations, number: u64) -> Vec<(usize, u64)> {
    match log.get(number).unwrap() {
        Some(Decision::Members(members)) => {
            members.iter().map(|Member { rank, incarnation }| (*rank, *incarnation)).collect()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_node_takes_the_place_of_one_with_as_many_workers() {
    let (mut fixture, log) = elastic(1);
    fixture.tell(1, Message::Gone);
    assert!(matches!(fixture.entries()[..], [Entry::ScaleDown { slot: 1, .. }]));
    assert_eq!(members(&log, 1), [(0, 0), (4, 0), (5, 0)]);
    come(&mut fixture, 3, 3);
    let entries = fixture.entries();
    let [Entry::Admit(admission)] = &entries[..] else { panic!("{entries:?}") };
    assert_eq!((admission.node_rank, &admission.incarnations[..]), (1, &[1, 1, 1][..]));
    assert_eq!(members(&log, 2), [(0, 0), (1, 1), (2, 1), (3, 1), (4, 0), (5, 0)]);
    // Another number of workers fits nowhere: all ranks are numbered again.
    fixture.tell(2, Message::Gone);
    assert_eq!(members(&log, 3).len(), 4);
    fixture.actions();
    come(&mut fixture, 4, 4);
    fixture.restart_reason();
    [0, 3, 4].into_iter().for_each(|slot| fixture.tell(slot, Message::Ended(None)));
    started(&mut fixture, &[1, 3, 4]);
}

#[test]
fn only_a_spare_with_as_many_workers_fills_in() {
    for (workers, fits) in [(3, true), (2, false)] {
        let (mut fixture, _log) = elastic(3);
        come(&mut fixture, 3, workers);
        assert_eq!(fixture.actions(), []);
        fixture.tell(1, Message::Gone);
        let entries = fixture.entries();
        match &entries[..] {
            [Entry::Admit(admission)] => assert!(fits && admission.node_rank == 1, "{entries:?}"),
            [Entry::Restart { .. }] => assert!(!fits, "{entries:?}"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_new_node_of_an_elastic_run_gets_the_ranks_after_all_others() {
    let mut fixture = Fixture::new(1, 3, 0, false);
    [(0, 2), (1, 1)].into_iter().for_each(|(slot, workers)| come(&mut fixture, slot, workers));
    fixture.actions();
    fixture.now += Pace::default().last_call_timeout;
    started(&mut fixture, &[2, 1]);
    let log = fixture.announce(1);
    come(&mut fixture, 2, 2);
    let entries = fixture.entries();
    let [Entry::Admit(admission)] = &entries[..] else { panic!("{entries:?}") };
    assert_eq!((admission.layout.ranks(2), admission.layout.world_size()), (3..5, 5));
    assert_eq!(members(&log, 1), [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0)]);
}
