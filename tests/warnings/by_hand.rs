//! Ranks that were started by hand, without a launcher: the resources that they take.
#![cfg(target_os = "linux")]
use crate::common::{free_port, skip, test_process};
use crate::logger::during;
use candle_ddp::{InitOptions, init_process_group};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

/// The folder in which a rank writes its findings.
const FOLDER: &str = "CANDLE_DDP_TEST_BY_HAND";

/// The addresses at which this process accepts connections.
fn listeners() -> Vec<String> {
    let own: Vec<String> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| Some(std::fs::read_link(entry.ok()?.path()).ok()?.to_string_lossy().into_owned()))
        .collect();
    let mut found = Vec::new();
    for table in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        for line in std::fs::read_to_string(table).unwrap_or_default().lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            const LISTENS: &str = "0A";
            if fields[3] == LISTENS && own.contains(&format!("socket:[{}]", fields[9])) {
                found.push(fields[1].split(':').next().unwrap().to_string());
            }
        }
    }
    found
}

/// The entry point of ranks.
#[test]
#[ignore = "started by other tests"]
fn rank_by_hand() {
    let folder = std::env::var_os(FOLDER).unwrap();
    let variable = |name: &str| std::env::var(name).unwrap();
    let rank: usize = variable("BY_HAND_RANK").parse().unwrap();
    if variable("BY_HAND_EARLY") == "1" {
        rayon::current_num_threads();
    }
    let options = InitOptions {
        init_method: format!("tcp://127.0.0.1:{}", variable("BY_HAND_PORT")),
        rank: Some(rank),
        world_size: Some(2),
        timeout: Duration::from_secs(120),
        ..Default::default()
    };
    let (pg, mut warnings) = during(|| init_process_group(options).unwrap());
    warnings.retain(|text| text.contains("RAYON"));
    let report = (rayon::current_num_threads(), warnings, listeners());
    std::fs::write(Path::new(&folder).join(rank.to_string()), serde_json::to_string(&report).unwrap()).unwrap();
    pg.barrier().unwrap();
}

type Report = (usize, Vec<String>, Vec<String>);

/// Two ranks, with rayon's threads started before or not, and `RAYON_NUM_THREADS`.
fn run(early: bool, threads: Option<&str>) -> [Report; 2] {
    let folder = tempfile::tempdir().unwrap();
    let port = free_port();
    let start = |rank: usize| {
        let mut command = test_process(module_path!(), "rank_by_hand");
        command.env(FOLDER, folder.path());
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("SLURM") || name.contains("NUM_THREADS"))
        {
            command.env_remove(name);
        }
        command.envs(threads.map(|threads| ("RAYON_NUM_THREADS", threads)));
        command.env("BY_HAND_RANK", rank.to_string()).env("BY_HAND_PORT", port.to_string());
        command.env("BY_HAND_EARLY", if early { "1" } else { "0" });
        command.stdout(Stdio::null()).spawn().unwrap()
    };
    let ranks = [0, 1].map(start);
    for mut rank in ranks {
        assert!(rank.wait().unwrap().success());
    }
    [0, 1].map(|rank: usize| {
        serde_json::from_str(&std::fs::read_to_string(folder.path().join(rank.to_string())).unwrap()).unwrap()
    })
}

#[test]
fn ranks_of_one_host_share_its_processors_and_listen_where_they_were_told() {
    let cpus = std::thread::available_parallelism().unwrap().get();
    if cpus < 2 {
        return skip(
            "ranks_of_one_host_share_its_processors_and_listen_where_they_were_told",
            "it needs two processors",
        );
    }
    let share = cpus / 2;
    let [first, second] = run(false, None);
    assert_eq!((first.0, second.0), (share, share));
    assert_eq!((first.1.len(), second.1.len()), (1, 0), "{first:?} {second:?}");
    let warning = &first.1[0];
    assert!(warning.starts_with("2 ranks share the") && warning.contains("has limited rayon to"), "{warning}");
    assert!(warning.contains(&format!("Set RAYON_NUM_THREADS={share} ")), "{warning}");
    // 127.0.0.1, as the kernel writes it.
    assert_eq!(first.2, ["0100007F"], "only the store, and only on the address that was given");

    let [first, second] = run(true, None);
    assert_eq!((first.0, second.0), (cpus, cpus));
    assert!(
        first.1.len() == 1 && first.1[0].contains(&format!("already has {cpus} threads in each rank")),
        "{first:?}"
    );

    let [first, second] = run(false, Some("3"));
    assert_eq!((first.0, first.1.len(), second.0, second.1.len()), (3, 0, 3, 0));
}
