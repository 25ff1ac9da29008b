//! Ranks whose connections go through a proxy that delays, stalls, resets and corrupts data: the results are right, or all
//! ranks get an error in time.
use crate::rank::{Collective, Rank, Tensor};
use candle_ddp_engine::{CpuOptions, CpuTransport, Error, ReduceOp, Result};
use candle_ddp_rendezvous::{HashStore, Store};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

/// The time-out where a test waits for it: longer than a healthy call on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(4);
/// The time-out, or the wait, where it shows only that something hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a connection is for (`Kind` in the engine). The numbers are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Data,
    Direct,
    Control,
}

const KINDS: [Kind; 3] = [Kind::Data, Kind::Direct, Kind::Control];

/// The effect on the bytes that pass.
#[derive(Clone, Copy, Debug)]
enum Weather {
    Clear,
    /// Everything comes later.
    Late(Duration),
    /// Everything comes in pieces of three bytes.
    Crumbs,
    /// Nothing passes on connections of this kind, or of any kind.
    Stalled(Option<Kind>),
    /// Connections of this kind are reset, or all.
    Reset(Option<Kind>),
    /// One byte is inverted: the one after this many others that the higher rank sends next on this connection.
    Corrupt(Kind, usize),
}

impl Weather {
    fn meets(concerned: Option<Kind>, kind: Kind) -> bool {
        concerned.is_none_or(|concerned| concerned == kind)
    }
}

/// The network between two ranks.
#[derive(Clone)]
struct Network(Arc<(Mutex<Weather>, Barrier)>);

impl Network {
    fn set(&self, weather: Weather) {
        *self.0.0.lock().unwrap() = weather;
    }

    /// Changes the weather while nothing is under way. Both ranks call it.
    fn change(&self, weather: Weather) {
        self.0.1.wait();
        self.set(weather);
        self.0.1.wait();
    }

    /// Listens for the connections of the higher rank, and passes them on to `listener`, the lower rank.
    fn proxy(&self, listener: SocketAddr) -> SocketAddr {
        let near = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = near.local_addr().unwrap();
        let network = self.clone();
        std::thread::spawn(move || {
            let mut passed = Vec::new();
            while let Ok((caller, _)) = near.accept() {
                let kind = kind_of(&caller);
                // A rank that was refused finds nobody the next time.
                if passed.contains(&kind) {
                    continue;
                }
                passed.push(kind);
                let Ok(called) = TcpStream::connect(listener) else { return };
                for (from, to, upwards) in [(&caller, &called, true), (&called, &caller, false)] {
                    from.set_nodelay(true).unwrap();
                    from.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let network = network.clone();
                    std::thread::spawn(move || network.pass(from, to, kind, upwards));
                }
            }
        });
        address
    }

    /// Forwards the bytes of one side until it ends.
    fn pass(&self, mut from: TcpStream, mut to: TcpStream, kind: Kind, upwards: bool) {
        let mut buffer = vec![0; 1 << 16];
        loop {
            let weather = *self.0.0.lock().unwrap();
            let size = if matches!(weather, Weather::Crumbs) { 3 } else { buffer.len() };
            let count = match weather {
                Weather::Reset(concerned) if Weather::meets(concerned, kind) => {
                    // Closing it then sends a reset.
                    rustix::net::sockopt::set_socket_linger(&from, Some(Duration::ZERO)).unwrap();
                    return;
                }
                Weather::Stalled(concerned) if Weather::meets(concerned, kind) => {
                    std::thread::sleep(Duration::from_millis(5));
                    continue;
                }
                _ => match from.read(&mut buffer[..size]) {
                    Ok(0) => {
                        let _ = to.shutdown(Shutdown::Write);
                        return;
                    }
                    Ok(count) => count,
                    Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => continue,
                    Err(_) => return,
                },
            };
            let mut passing = self.0.0.lock().unwrap();
            match &mut *passing {
                Weather::Corrupt(corrupt, behind) if *corrupt == kind && upwards => {
                    match buffer[..count].get_mut(*behind) {
                        Some(byte) => {
                            *byte ^= 0xff;
                            *passing = Weather::Clear;
                        }
                        None => *behind -= count,
                    }
                }
                _ => {}
            }
            drop(passing);
            if let Weather::Late(time) = weather {
                std::thread::sleep(time);
            }
            if to.write_all(&buffer[..count]).is_err() {
                return;
            }
        }
    }
}

/// What a connection is for, as its first bytes say.
fn kind_of(caller: &TcpStream) -> Kind {
    const PLACE: usize = 20;
    let mut greeting = [0; PLACE + 1];
    while caller.peek(&mut greeting).unwrap() < greeting.len() {
        std::thread::sleep(Duration::from_millis(1));
    }
    KINDS[usize::from(greeting[PLACE])]
}

/// Time-outs of calls, and of the construction.
fn options(timeout: Duration, construction: Duration) -> CpuOptions {
    let transport = Some(CpuTransport::Tcp);
    CpuOptions { timeout, transport, construction_timeout: Some(construction), ..CpuOptions::default() }
}

/// Runs `body` on two ranks, each on its own thread, with a network between them. Returns the results by rank.
fn on_two_ranks<T: Send>(
    weather: Weather,
    options: CpuOptions,
    body: impl Fn(&Network, usize, Result<Rank>) -> T + Sync,
) -> Vec<T> {
    let network = Network(Arc::new((Mutex::new(weather), Barrier::new(2))));
    // Each rank has a store, so that rank 1 sees the proxy's address.
    let stores: [Arc<dyn Store>; 2] = [0, 1].map(|_| Arc::new(HashStore::new(PATIENCE)) as Arc<dyn Store>);
    std::thread::scope(|scope| {
        let rank = |rank: usize| {
            let (store, network, body, options) = (Arc::clone(&stores[rank]), &network, &body, options.clone());
            scope.spawn(move || body(network, rank, Rank::new(store, rank, 2, options)))
        };
        let ranks = [0, 1].map(rank);
        let [published, second] = [0, 1].map(|rank| stores[rank].get(&format!("addr/{rank}")).unwrap());
        let second_address = std::str::from_utf8(&second).unwrap().split_once(' ').unwrap().0;
        let (address, rest) = std::str::from_utf8(&published).unwrap().split_once(' ').unwrap();
        let proxy = network.proxy(address.parse().unwrap());
        stores[1].set("addr/0", format!("{proxy} {rest}").as_bytes()).unwrap();
        stores[0].set("addr/1", &second).unwrap();
        let addresses = format!("{proxy}\n{second_address}\n");
        for store in &stores {
            store.set("addresses", addresses.as_bytes()).unwrap();
            store.set("complete", b"").unwrap();
        }
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Like [`on_two_ranks`] in clear weather, with communicators whose calls have a long time-out.
fn on_two_patient_ranks<T: Send>(body: impl Fn(&Network, Rank) -> T + Sync) -> Vec<T> {
    on_two_ranks(Weather::Clear, options(PATIENCE, PATIENCE), |network, _, communicator| {
        body(network, communicator.unwrap())
    })
}

/// Sums this many elements, which are all r + 1 on rank r, and returns the sums.
fn all_reduce(communicator: &Rank, elements: usize) -> Result<Vec<f32>> {
    let tensor = Tensor::full(communicator.rank() as f32 + 1.0, elements);
    communicator.run(Collective::AllReduce { tensor: tensor.clone(), op: ReduceOp::Sum })?;
    Ok(tensor.values())
}

fn assert_all_reduce(communicator: &Rank, elements: usize) {
    assert!(all_reduce(communicator, elements).unwrap().iter().all(|value| *value == 3.0));
}

/// Rank 1 sends rank 0 a message, and both wait for each other.
fn send_up(communicator: &Rank) -> Result<()> {
    let tensor = Tensor::zeros(4);
    communicator.run(match communicator.rank() {
        0 => Collective::Recv { tensor, peer: 1 },
        _ => Collective::Send { tensor, peer: 0 },
    })?;
    communicator.run(Collective::Barrier)
}

/// Makes calls until the group has failed, and returns that error.
fn until_failure(communicator: &Rank) -> String {
    loop {
        match all_reduce(communicator, 1000) {
            Ok(sums) => assert!(sums.iter().all(|value| *value == 3.0), "a wrong number"),
            Err(error) => {
                assert!(matches!(error, Error::Group(_)), "{error:?}");
                return error.to_string();
            }
        }
    }
}

#[test]
fn a_slow_or_halting_network_changes_no_result() {
    for weather in [Weather::Late(Duration::from_millis(3)), Weather::Crumbs] {
        on_two_ranks(weather, options(PATIENCE, PATIENCE), |_, _, communicator| {
            let communicator = communicator.unwrap();
            for elements in [1, 1000, 20_000] {
                assert_all_reduce(&communicator, elements);
            }
        });
    }
}

#[test]
fn a_short_outage_is_waited_for() {
    on_two_patient_ranks(|network, communicator| {
        assert_all_reduce(&communicator, 10);
        if communicator.rank() == 0 {
            network.set(Weather::Stalled(None));
            std::thread::sleep(Duration::from_millis(300));
            network.set(Weather::Clear);
        }
        assert_all_reduce(&communicator, 100_000);
    });
}

#[test]
fn a_long_outage_ends_at_the_time_out() {
    let outage = |concerned, reason| {
        let errors = on_two_ranks(Weather::Clear, options(TIMEOUT, PATIENCE), |network, _, communicator| {
            let communicator = communicator.unwrap();
            assert_all_reduce(&communicator, 10);
            network.change(Weather::Stalled(concerned));
            until_failure(&communicator)
        });
        for error in errors {
            // The other rank may be a call behind, since data for that one did not arrive either.
            let is_known = error.contains(reason) || error.contains("has not started this collective: its last was");
            assert!(error.contains("timed out after 4s") && is_known, "{concerned:?}: {error}");
        }
    };
    // At once, since most of the test is waiting.
    std::thread::scope(|scope| {
        scope.spawn(|| outage(None, "does not answer: its process is stopped, or its host cannot be reached"));
        scope.spawn(|| outage(Some(Kind::Data), "or the network is"));
    });
}

#[test]
fn a_reset_ends_the_group_at_once() {
    for concerned in [None, Some(Kind::Data), Some(Kind::Control)] {
        let errors = on_two_patient_ranks(|network, communicator| {
            assert_all_reduce(&communicator, 10);
            network.change(Weather::Reset(concerned));
            until_failure(&communicator)
        });
        for error in errors {
            let is_named =
                error.contains("rank 0 is gone") || error.contains("rank 1 is gone") || error.contains("was lost");
            assert!(is_named, "{concerned:?}: {error}");
            assert!(!error.contains("timed out"), "{concerned:?}: {error}");
        }
    }
}

/// The first bytes of a call are its header; then comes the payload.
const HEADER: usize = 40;

/// The part that must be the same on all ranks. Then come the shape, which says nothing for a one-dimensional tensor, and the
/// call's place in the program, which may differ.
const SAME: usize = 32;

#[test]
fn every_byte_of_a_header_counts() {
    std::thread::scope(|scope| {
        for byte in 0..SAME {
            scope.spawn(move || {
                let errors = on_two_patient_ranks(|network, communicator| {
                    assert_all_reduce(&communicator, 10);
                    network.change(Weather::Corrupt(Kind::Data, byte));
                    until_failure(&communicator)
                });
                for error in errors {
                    assert!(error.contains("rank 1"), "byte {byte}: {error}");
                }
            });
        }
    });
}

/// As in Gloo and NCCL, only TCP's checksum protects the payload. `docs/troubleshooting.md` says so.
#[test]
fn a_corrupted_payload_is_not_noticed() {
    let sums = on_two_patient_ranks(|network, communicator| {
        assert_all_reduce(&communicator, 10);
        network.change(Weather::Corrupt(Kind::Data, HEADER));
        all_reduce(&communicator, 4).unwrap()
    });
    assert_eq!(sums[1], [3.0; 4]);
    assert!(sums[0][0] != 3.0 && sums[0][1..] == [3.0; 3], "{sums:?}");
}

#[test]
fn corrupted_frames_of_a_monitor_end_the_group() {
    let errors = on_two_patient_ranks(|network, communicator| {
        assert_all_reduce(&communicator, 10);
        // The highest byte of the length of rank 1's goodbye.
        network.change(Weather::Corrupt(Kind::Control, 3));
        if communicator.rank() == 1 {
            return String::new();
        }
        until_failure(&communicator)
    });
    assert!(errors[0].contains("rank 1 sent it something that is not a message of this engine"), "{errors:?}");
}

#[test]
fn corrupted_handshakes_end_the_group() {
    std::thread::scope(|scope| {
        for kind in KINDS {
            for byte in (0..48).step_by(5) {
                scope.spawn(move || {
                    // A rank that takes the other one for a stranger still waits for it.
                    let options = options(PATIENCE, TIMEOUT);
                    let weather = Weather::Corrupt(kind, byte);
                    let results = on_two_ranks(weather, options, |_, _, communicator| {
                        communicator.and_then(|communicator| send_up(&communicator)).err()
                    });
                    assert!(results.iter().all(Option::is_some), "{kind:?}, byte {byte}: {results:?}");
                });
            }
        }
    });
}
