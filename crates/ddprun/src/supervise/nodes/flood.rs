//! A store without a secret, to which anybody may write.
use super::tests::{node, terms};
use super::{Address, Coordinator, Entry, INBOX, Link, News, PREFIX};
use crate::command::{Pace, Rendezvous};
use crate::verdict::Verdicts;
use candle_ddp_rendezvous::{Listening, TcpStore, host_store};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

/// More messages come than one thread reads.
#[test]
fn a_flood_of_messages_stops_no_time_out() {
    let listening = Listening::at("127.0.0.1", 0, true, PATIENCE).unwrap();
    let server = host_store(&listening, None, None, false, 2, &[]).unwrap();
    let (port, inbox) = (server.port(), format!("{PREFIX}/{INBOX}"));
    let terms = terms(2, 2, 0);
    let pace = Pace { join_timeout: Duration::from_secs(3), keep_alive_max_attempt: 1000, ..Pace::default() };
    let rendezvous = Rendezvous { terms: terms.clone(), pace: pace.clone(), is_static: true };
    let coordinator = Coordinator::start(&server, None, rendezvous, Verdicts::new(None, ""), None).unwrap();
    let (tell, news) = channel();
    let address = Address { host: "127.0.0.1".into(), port, secret: None };
    let tell = move |piece| tell.send(piece).unwrap_or_default();
    let link = Link::join(address, node(0, Some(0), terms), &pace, Some(coordinator), tell).unwrap();
    assert!(matches!(news.recv_timeout(PATIENCE).unwrap(), News::Joined { is_spare: false, .. }));
    let is_over = AtomicBool::new(false);
    let told = std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let store = TcpStore::connect("127.0.0.1", port, PATIENCE).unwrap();
                while !is_over.load(Ordering::Relaxed) && store.queue_push(&inbox, b"nonsense").is_ok() {
                    std::hint::spin_loop();
                }
            });
        }
        let told = news.recv_timeout(PATIENCE);
        is_over.store(true, Ordering::Relaxed);
        told
    });
    let Ok(News::Entry(Entry::Failed { reason, .. })) = told else { panic!("{told:?}") };
    assert!(reason.starts_with("1 of 2 nodes joined within 3 s"), "{reason}");
    drop((link, server));
}
