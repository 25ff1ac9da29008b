//! The store with very many clients: what each rank costs while ranks wait for the last one, when they meet, and when one dies.
//!
//! ```text
//! unshare --net sh -c 'ip link set lo up; cargo bench -p candle-ddp-rendezvous --bench many_clients -- 125 250 500 1000'
//! ```
//!
//! Ranks are threads that speak the real protocol over TCP, and rank 0 hosts the store, all in one process. Bytes are those of
//! the loopback device with all headers, so the program must be alone in its network namespace; processor time is that of all
//! ranks and the store together.
use candle_ddp_base::descriptors;
use candle_ddp_base::reading::Reading;
use candle_ddp_rendezvous::{RendezvousOptions, Secret, rendezvous};
use std::net::TcpListener;
use std::sync::Barrier;
use std::time::Duration;

/// How long all ranks wait for the last one.
const WAIT: Duration = Duration::from_secs(5);
const TIMEOUT: Duration = Duration::from_secs(300);

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

fn main() -> Result<()> {
    let sizes: Vec<usize> = std::env::args().skip(1).filter_map(|argument| argument.parse().ok()).collect();
    let sizes = if sizes.is_empty() { vec![8] } else { sizes };
    descriptors::raise_limit();
    println!(
        "| ranks | waiting: B/s per rank | CPU ms/s per rank | meeting: ms | B per rank | a death: ms | B per rank |"
    );
    println!("|---|---|---|---|---|---|---|");
    for ranks in sizes {
        println!("{}", run(ranks)?);
    }
    Ok(())
}

/// One row of the table.
fn run(ranks: usize) -> Result<String> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let secret = Some(Secret::random()?);
    // Between the steps, all ranks and this thread wait for each other.
    let step = Barrier::new(ranks + 1);
    let (step, last) = (&step, ranks - 1);
    std::thread::scope(|scope| {
        let rank = |rank: usize| {
            let init_method = format!("tcp://127.0.0.1:{port}");
            let (rank, world_size) = (Some(rank), Some(ranks));
            let options = RendezvousOptions {
                init_method,
                rank,
                world_size,
                timeout: TIMEOUT,
                secret: secret.clone(),
                ..Default::default()
            };
            scope.spawn(move || {
                // The others would wait for it.
                if let Err(error) = live(options, last, step) {
                    eprintln!("error: {error}");
                    std::process::exit(1);
                }
            })
        };
        let mut threads: Vec<_> = (0..last).map(rank).collect();
        // Until all others have come.
        std::thread::sleep(WAIT);
        let early = Reading::now();
        std::thread::sleep(WAIT);
        let late = Reading::now();
        threads.push(rank(last));
        step.wait();
        let met = Reading::now();
        step.wait();
        let before = Reading::now();
        step.wait();
        let after = Reading::now();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a rank panicked"))?;
        let each = |whole: f64| whole / ranks as f64;
        Ok(format!(
            "| {ranks} | {:.0} | {:.2} | {:.0} | {:.0} | {:.0} | {:.0} |",
            each(late.bytes_since(&early)) / WAIT.as_secs_f64(),
            each(late.cpu_ms_since(&early)) / WAIT.as_secs_f64(),
            met.ms_since(&late),
            each(met.bytes_since(&late)),
            after.ms_since(&before),
            each(after.bytes_since(&before)),
        ))
    })
}

/// One rank: meets the others, waits for the death of the last one, and agrees with the others on what comes next.
fn live(options: RendezvousOptions, last: usize, step: &Barrier) -> Result<()> {
    let met = rendezvous(options)?;
    step.wait();
    let (store, rank) = (met.store, met.rank);
    let will = store.last_will(&format!("gone/{rank}"), b"gone")?;
    step.wait();
    let dead = format!("gone/{last}");
    if rank == last {
        drop(will);
    } else {
        store.wait(&[&dead], Some(TIMEOUT))?;
        store.compare_set("generation/1", b"", rank.to_string().as_bytes())?;
    }
    step.wait();
    Ok(())
}
