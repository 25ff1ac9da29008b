//! The thread that watches the board of this rank's host.
use crate::gone::Ended;
use crate::group::Group;
use crate::question::Question;
use crate::shm::{Board, Life};
use std::time::Duration;

/// How often a thread looks at the board without being asked to, and whether others live; with very many ranks on a host, this
/// often for each.
const TICK: Duration = Duration::from_millis(100);
const TICK_OF_EACH: Duration = Duration::from_millis(1);
const LONGEST_TICK: Duration = Duration::from_millis(900);
/// The number of ranks that a rank checks at a time, besides the next one that lives.
const CHECKS: usize = 7;

/// Looks at the board whenever a rank of this host rings, until the group tells it to end.
///
/// Each rank checks whether the next one lives, and tells all if it does not. So with any number of ranks, an end is noticed at
/// the next tick, even if many end at once. It checks a few others in turn, in case that a rank's own watcher is stopped.
pub(crate) fn run(group: &Group) -> Result<(), String> {
    let Some(board) = group.shm.as_ref().map(|shm| &shm.board) else { return Ok(()) };
    let (own, ranks) = (group.hosts.index(), group.hosts.members().len());
    let mut known = vec![Life::Here; ranks];
    let tick = TICK.max(TICK_OF_EACH * ranks as u32).min(LONGEST_TICK);
    let (mut turn, mut notes) = (0, 0);
    while !group.is_over() {
        let seen = board.events();
        for question in Question::ALL {
            if let Some(asked) = board.asked(question) {
                board.answer(question, asked, &group.report(question));
            }
        }
        for (member, peer) in group.neighbours() {
            look(group, board, (member, peer), &mut known[member]);
        }
        let noted = board.notes();
        if std::mem::replace(&mut notes, noted) != noted {
            group.read_notes();
        }
        group.collect_answers();
        board.wait(seen, tick)?;
        if board.events() == seen {
            let after = |offset: usize| (own + 1 + offset % (ranks - 1)) % ranks;
            let next = (0..ranks - 1).map(after).find(|member| is_unknown(known[*member]));
            let others = (0..CHECKS.min(ranks - 1)).map(|offset| after(turn + offset));
            next.into_iter()
                .chain(others)
                .filter(|member| is_unknown(known[*member]))
                .for_each(|peer| board.check(peer));
            turn = (turn + CHECKS) % (ranks - 1);
        }
    }
    Ok(())
}

/// Whether the end of such a rank would be news.
fn is_unknown(life: Life) -> bool {
    matches!(life, Life::Here | Life::Failed)
}

/// Tells the group what is new about a rank.
fn look(group: &Group, board: &Board, (member, peer): (usize, usize), known: &mut Life) {
    let (before, now) = (*known, board.life(member));
    if now == before {
        return;
    }
    *known = now;
    if now.has_failed() && before == Life::Here {
        group.on_told(board.failure(member).as_deref(), peer);
    }
    match now {
        Life::Left => group.on_left(peer),
        Life::Gone { .. } => group.on_closed(peer, Ended::Closed),
        Life::Here | Life::Failed => {}
    }
}
