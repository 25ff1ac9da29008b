use super::facts::Facts;
use super::gpus::Gpu;
use super::measured::{Measured, Verdict};
use super::network::Link;
use super::outliers::{judge, of_most};
use super::table;

/// Two ranks on each of these nodes, which are all well.
fn healthy(nodes: usize) -> Vec<Measured> {
    let facts = Facts {
        ddprun: "0.1.0".to_string(),
        kernel: "6.12".to_string(),
        cpu: "EPYC".to_string(),
        cores: 4,
        load: Some(0.1),
        memory: Some(8 << 30),
        shm: Some(4 << 30),
        memfd: true,
        nofile: Some(4096),
        memlock: Some(8 << 20),
        ports: Some(28_000),
        ..Facts::default()
    };
    let rank = |rank: usize| {
        let host = rank / 2;
        let link = |peer: usize| match peer / 2 == host {
            true => Link { peer, latency: 1.0, bandwidth: 10.0 },
            false => Link { peer, latency: 30.0, bandwidth: 1.0 },
        };
        Measured {
            rank,
            node_rank: host,
            host: format!("host{host}"),
            host_id: format!("id{host}"),
            products: [0, 1].map(|core| (Some(rank % 2 * 2 + core), 40.0 - core as f64)).into(),
            copy: 10.0,
            links: (0..2 * nodes).filter(|peer| *peer != rank).map(link).collect(),
            all_reduce: vec![2.0, 120.0, 12_000.0],
            clock: rank.is_multiple_of(2).then_some(0.001),
            facts: rank.is_multiple_of(2).then(|| facts.clone()),
        }
    };
    (0..2 * nodes).map(rank).collect()
}

fn facts(ranks: &mut [Measured], rank: usize) -> &mut Facts {
    ranks[rank].facts.as_mut().unwrap()
}

/// The only outlier.
#[track_caller]
fn outlier(ranks: &[Measured]) -> String {
    let Verdict { outliers, notes } = judge(ranks, 1.5);
    assert_eq!((outliers.len(), &notes[..]), (1, &[][..]), "{outliers:?}");
    outliers[0].clone()
}

#[test]
fn healthy_nodes_have_no_outliers() {
    for nodes in 1..4 {
        assert_eq!(judge(&healthy(nodes), 1.5), Verdict::default(), "{nodes}");
    }
}

#[test]
fn of_two_the_faster_one_counts() {
    assert_eq!(
        [vec![], vec![1.0, 2.0], vec![3.0, 1.0, 2.0], vec![4.0, 1.0, 3.0, 2.0]].map(of_most),
        [None, Some(2.0), Some(2.0), Some(3.0)]
    );
}

#[test]
fn a_throttled_core_is_named_with_its_rank() {
    for nodes in [1, 2] {
        let mut ranks = healthy(nodes);
        ranks[1].products[1].1 = 20.0;
        let text = outlier(&ranks);
        let expected =
            "rank 1 (node 0, host host0): core 3 multiplies matrices at 20.0 GFLOP/s, others at 40.0 (2.0 times";
        assert!(text.starts_with(expected), "{text}");
    }
}

#[test]
fn slow_memory_is_named_with_its_rank() {
    let mut ranks = healthy(2);
    ranks[2].copy = 3.0;
    assert!(
        outlier(&ranks).starts_with("rank 2 (node 1, host host1): memory is copied at 3.0 GB/s, elsewhere at 10.0")
    );
}

#[test]
fn ranks_that_share_cores_are_not_compared() {
    let mut ranks = healthy(1);
    ranks[0].products = vec![(None, 1.0)];
    let Verdict { outliers, notes } = judge(&ranks, 1.5);
    assert!(outliers.is_empty() && notes[0].contains("more ranks than cores"), "{outliers:?} {notes:?}");
}

fn slow_down(ranks: &mut [Measured], is_slow: impl Fn(usize, usize) -> bool) {
    for rank in ranks {
        let own = rank.rank;
        for link in rank.links.iter_mut().filter(|link| is_slow(own, link.peer)) {
            (link.latency, link.bandwidth) = (400.0, link.bandwidth / 10.0);
        }
    }
}

#[test]
fn a_slow_connection_is_named_with_both_ranks() {
    let mut ranks = healthy(3);
    slow_down(&mut ranks, |a, b| (a.min(b), a.max(b)) == (1, 4));
    let text = outlier(&ranks);
    let pair =
        "rank 1 (node 0, host host0) and rank 4 (node 2, host host2): their connection is slow: 0.10 GB/s and 400 µs";
    assert!(text.starts_with(pair), "{text}");
}

#[test]
fn a_rank_whose_connections_are_all_slow_is_named_once() {
    let mut ranks = healthy(3);
    slow_down(&mut ranks, |a, b| a / 2 != b / 2 && (a == 5 || b == 5));
    let text = outlier(&ranks);
    assert!(
        text.starts_with("rank 5 (node 2, host host2): every connection to other hosts is slow, at best 0.10"),
        "{text}"
    );
}

#[test]
fn what_a_node_lacks() {
    type Damage = fn(&mut [Measured]);
    let cases: [(Damage, &str); 8] = [
        (|ranks| ranks[2].clock = Some(-3.0), "its clock is 3.0 s behind that of node 0"),
        (|ranks| facts(ranks, 2).memory = Some(1000 << 20), "1.0 GiB of free memory for 2 rank(s)"),
        (|ranks| facts(ranks, 2).memfd = false, "memfd_create"),
        (|ranks| facts(ranks, 2).nofile = Some(64), "a process may open 64 files, and 4 ranks may need 76"),
        (|ranks| facts(ranks, 2).ports = Some(10), "10 free ports"),
        (
            |ranks| facts(ranks, 2).gpu_error = Some("nvidia-smi has not answered".into()),
            "its GPUs cannot be listed: nv",
        ),
        (|ranks| gpus(ranks)[1].memory_errors = 2, "GPU 1 has had 2 uncorrected errors"),
        (
            |ranks| facts(ranks, 2).nccl = Some("2.25.1".into()),
            "NCCL is 2.25.1 on node 1 (host host1), but absent elsewhere",
        ),
    ];
    for (damage, expected) in cases {
        let mut ranks = healthy(2);
        damage(&mut ranks);
        let mut verdict = judge(&ranks, 1.5);
        let text = verdict.outliers.pop().unwrap_or_default();
        assert!(text.contains("node 1 (host host1)") && text.contains(expected), "{expected}: {text}");
        assert!(verdict.outliers.is_empty(), "{verdict:?}");
    }
}

/// Gives both nodes two GPUs, and returns those of the second node.
fn gpus(ranks: &mut [Measured]) -> &mut Vec<Gpu> {
    let gpu = |index| Gpu {
        index,
        name: "H100".to_string(),
        driver: "580".to_string(),
        memory: 81_559,
        used: 1,
        temperature: Some(30),
        is_slowed: false,
        memory_errors: 0,
    };
    facts(ranks, 0).gpus = vec![gpu(0), gpu(1)];
    facts(ranks, 2).gpus = vec![gpu(0), gpu(1)];
    &mut facts(ranks, 2).gpus
}

#[test]
fn what_may_be_intended_is_a_note() {
    let mut ranks = healthy(3);
    facts(&mut ranks, 4).cpu = "Xeon".to_string();
    facts(&mut ranks, 0).load = Some(3.0);
    let Verdict { outliers, notes } = judge(&ranks, 1.5);
    assert!(outliers.is_empty(), "{outliers:?}");
    let expected = [
        "the processor is Xeon (4 cores) on node 2 (host host2), but EPYC (4 cores) elsewhere",
        "node 0 (host host0): its load is 3.0 on 4 core(s): other processes ran in the last minute",
    ];
    assert_eq!(notes, expected);
}

/// With two nodes, each connection is normal; but it may be slow anyway.
#[test]
fn a_network_that_is_slow_everywhere_is_a_note() {
    let mut ranks = healthy(2);
    ranks
        .iter_mut()
        .flat_map(|rank| &mut rank.links)
        .filter(|link| link.bandwidth == 1.0)
        .for_each(|link| link.bandwidth = 0.012);
    let Verdict { outliers, notes } = judge(&ranks, 1.5);
    assert!(outliers.is_empty(), "{outliers:?}");
    assert!(
        notes.len() == 1 && notes[0].starts_with("no connection between hosts carries more than 0.012 GB/s"),
        "{notes:?}"
    );
}

#[test]
fn a_check_in_words() {
    let mut ranks = healthy(1);
    ranks[1].products[1].1 = 20.0;
    let verdict = Verdict { outliers: vec!["rank 1 is slow".to_string()], notes: vec!["it is busy".to_string()] };
    let expected = "
rank  node  host   cores  GFLOP/s  copy GB/s  latency us  messages GB/s
0     0     host0  0..1   39.0     10.0       1.0         10.00
1     0     host0  2..3   20.0     10.0       1.0         10.00

node  clock    memory GiB  /dev/shm GiB  open files  locked memory  ports  cores  processor
0     +1.0 ms  8.0         4.0           4096        8388608        28000  4      EPYC

node  ddprun  kernel  NCCL  driver  GPUs
0     0.1.0   6.12    -     -       -

all-reduce over 2 rank(s): 8 B 2.0 us, 1 MiB 120.0 us (8.74 GB/s), 64 MiB 12.0 ms (5.59 GB/s)

note: it is busy

1 outlier(s):
- rank 1 is slow
";
    assert_eq!(table::text(&ranks, &verdict), expected);
}
