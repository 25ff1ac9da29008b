//! Very many nodes of an elastic run, with a rank each: what they cost while they run, and when one dies.
//!
//! ```text
//! unshare --net sh -c 'ip link set lo up; CANDLE_DDP_NODES=125,250,500,1000 cargo test -p ddprun --release --lib many -- --nocapture'
//! ```
//!
//! Agents are threads of this process that speak the real protocol with the real coordinator over TCP, and ranks those that make
//! the calls of `candle_ddp::elastic::run`, without training. Bytes are those of the loopback device with all headers, so the
//! program must be alone in its network namespace; processor time is that of all of them together.
use super::tests::terms;
use super::{Address, Coordinator, Entry, Link, Message, News};
use crate::command::{Pace, Rendezvous};
use crate::verdict::Verdicts;
use candle_ddp_base::deadline::deadline_after;
use candle_ddp_base::descriptors;
use candle_ddp_base::reading::Reading;
use candle_ddp_env::PROCESS;
use candle_ddp_rendezvous::{
    Decision, Error, Generations, Listening, Meeting, Member, RendezvousOptions, RunStore, Secret,
};
use candle_ddp_rendezvous::{Result, Store, host_store};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(300);

/// Without `CANDLE_DDP_NODES`, a few nodes, whose ranks must continue without the one that dies.
#[test]
fn nodes_continue_without_one_that_dies() {
    let sizes = PROCESS.text("CANDLE_DDP_NODES").unwrap_or_else(|| "6".to_string());
    // How long the nodes run before one dies.
    let wait = Duration::from_secs(if sizes == "6" { 0 } else { 5 });
    descriptors::raise_limit();
    println!(
        "| nodes | start: ms | B per node | running: B/s per node | CPU ms/s per node | a death: ms | B per node |"
    );
    println!("|---|---|---|---|---|---|---|");
    for nodes in sizes.split(',') {
        println!("{}", run(nodes.parse().unwrap(), wait));
    }
}

/// A barrier, at which nobody waits for ever for a thread that has panicked.
struct Steps {
    threads: usize,
    /// The number of calls so far.
    calls: Mutex<usize>,
    changed: Condvar,
}

impl Steps {
    fn wait(&self) {
        let mut calls = self.calls.lock().unwrap();
        *calls += 1;
        self.changed.notify_all();
        let goal = calls.next_multiple_of(self.threads);
        let (calls, _) = self.changed.wait_timeout_while(calls, TIMEOUT, |calls| *calls < goal).unwrap();
        let have_all_come = *calls >= goal;
        drop(calls);
        assert!(have_all_come, "another node has failed");
    }
}

/// One row of the table.
fn run(nodes: usize, wait: Duration) -> String {
    let secret = Some(Secret::random().unwrap());
    let listening = Listening::at("127.0.0.1", 0, true, TIMEOUT).unwrap();
    let server = host_store(&listening, None, secret.as_ref(), false, nodes, &[]).unwrap();
    let port = server.port();
    // Between the steps, all ranks and this thread wait for each other.
    let step = Steps { threads: nodes + 1, calls: Mutex::new(0), changed: Condvar::new() };
    let (step, victim) = (&step, nodes - 1);
    let terms = terms(nodes, nodes, 0);
    let pace = Pace { join_timeout: TIMEOUT, ..Pace::default() };
    let before = Reading::now();
    let rendezvous = Rendezvous { terms: terms.clone(), pace: pace.clone(), is_static: true };
    let coordinator = Coordinator::start(&server, secret.clone(), rendezvous, Verdicts::new(None, ""), None);
    let mut coordinator = Some(coordinator.unwrap());
    std::thread::scope(|scope| {
        for node in 0..nodes {
            let address = Address { host: "127.0.0.1".into(), port, secret: secret.clone() };
            let own = super::tests::node(node as u64, Some(node), terms.clone());
            let (tell, news) = channel();
            let tell = move |piece| tell.send(piece).unwrap_or_default();
            let link = Link::join(address, own, &pace, coordinator.take(), tell).unwrap();
            let options = RendezvousOptions {
                init_method: format!("tcp://127.0.0.1:{port}"),
                // Rank 0 would host the store.
                rank: Some(node + 1),
                world_size: Some(nodes + 1),
                timeout: TIMEOUT,
                secret: secret.clone(),
                ..Default::default()
            };
            scope.spawn(move || live((link, news), &options, node, (nodes, victim), step).unwrap());
        }
        step.wait();
        let met = Reading::now();
        std::thread::sleep(wait);
        let ran = Reading::now();
        step.wait();
        step.wait();
        let after = Reading::now();
        step.wait();
        let each = |whole: f64| whole / nodes as f64;
        let seconds = wait.as_secs_f64().max(1e-3);
        format!(
            "| {nodes} | {:.0} | {:.0} | {:.0} | {:.2} | {:.0} | {:.0} |",
            met.ms_since(&before),
            each(met.bytes_since(&before)),
            each(ran.bytes_since(&met)) / seconds,
            each(ran.cpu_ms_since(&met)) / seconds,
            after.ms_since(&ran),
            each(after.bytes_since(&ran)),
        )
    })
}

/// One node with its rank: meets the others, and continues with them when the node `victim` has died.
fn live(
    (link, news): (Link, Receiver<News>),
    options: &RendezvousOptions,
    node: usize,
    (nodes, victim): (usize, usize),
    step: &Steps,
) -> Result<()> {
    await_entry(&news, |entry| matches!(entry, Entry::Start(round) if round.node_rank == Some(node)));
    let run = RunStore::open(options, deadline_after(TIMEOUT))?;
    let log = Generations::new(Generations::agent_prefix(0), run.store());
    log.announce(1)?;
    let first = log.decide(0, &Decision::everyone(nodes))?;
    assert_eq!((first, log.get(1)?), (Decision::everyone(nodes), None));
    meet(&run, 0, node, nodes)?;
    // As in elastic::run, a thread watches for the next generation.
    let watched = log.clone();
    let watch = std::thread::spawn(move || {
        watched.store().wait(&[&Generations::key(1)], Some(TIMEOUT))?;
        watched.get(1)
    });
    step.wait();
    step.wait();
    if node == victim {
        // Its connections close without a goodbye.
        drop(link);
        step.wait();
    } else {
        await_entry(&news, |entry| matches!(entry, Entry::ScaleDown { .. }));
        let seen = watch.join().map_err(|_| panicked())??;
        log.store().wait(&[&Generations::key(1)], Some(TIMEOUT))?;
        let next = log.get(1)?;
        let left = (0..nodes).filter(|rank| *rank != victim).map(|rank| Member { rank, incarnation: 0 }).collect();
        assert_eq!((&seen, &next), (&next, &Some(Decision::Members(left))));
        assert_eq!(log.get(2)?, None);
        meet(&run, 1, node, nodes - 1)?;
        step.wait();
        link.tell(Message::Finished);
        link.leave(Duration::ZERO, || false);
    }
    step.wait();
    Ok(())
}

fn panicked() -> Error {
    Error::invalid("watch", "the thread that watches has panicked")
}

#[track_caller]
fn await_entry(news: &Receiver<News>, is_it: impl Fn(&Entry) -> bool) {
    loop {
        match news.recv_timeout(TIMEOUT).unwrap() {
            News::Joined { .. } => {}
            News::Entry(entry) if is_it(&entry) => return,
            other => panic!("{other:?}"),
        }
    }
}

/// The meeting of a generation's ranks.
fn meet(run: &RunStore, generation: u64, rank: usize, world_size: usize) -> Result<()> {
    let prefix = format!("{}/{}", Generations::agent_prefix(0), Generations::prefix_of(generation));
    let (met, watcher) = run.meet(Meeting {
        prefix,
        rank,
        world_size,
        is_whole: false,
        deadline: deadline_after(TIMEOUT),
        generation: Some(generation),
        superseded: None,
    })?;
    watcher.conclude(Ok(met), Error::failure).map(drop)
}
