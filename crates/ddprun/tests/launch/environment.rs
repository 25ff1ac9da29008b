//! The environment that workers start with.
use crate::nodes::{Nodes, finish};
use crate::{Ran, Running, Sandbox, free_port};
use candle_ddp_rendezvous::{Store, TcpStore};
use candle_ddp_testing::skip;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::Stdio;
use std::time::Duration;

/// Returns torchrun's variables of each rank.
fn environments(ran: &Ran) -> BTreeMap<usize, BTreeMap<String, String>> {
    let mut all = BTreeMap::new();
    for line in ran.stdout.lines() {
        let (rank, variable) = line.split_once(' ').unwrap();
        let (name, value) = variable.split_once('=').unwrap();
        let set: &mut BTreeMap<_, _> = all.entry(rank.parse().unwrap()).or_default();
        set.insert(name.to_owned(), value.to_owned());
    }
    all
}

const PRINT: &str = r#"env | grep -E 'RANK|WORLD|ROLE|MASTER|TORCHELASTIC' | sed "s/^/$RANK /""#;

#[test]
fn every_worker_gets_the_environment_of_torchrun() {
    let sandbox = Sandbox::new();
    let ran = sandbox.run(&["--nproc-per-node", "2", "--run-id", "a1", "--role", "trainer"], PRINT);
    assert_eq!(ran.code, Some(0));
    let all = environments(&ran);
    assert_eq!(all.keys().copied().collect::<Vec<_>>(), [0, 1]);
    for (rank, variables) in &all {
        let mut rest = variables.clone();
        let port: u16 = rest.remove("MASTER_PORT").unwrap().parse().unwrap();
        assert!(port >= 1024);
        assert_eq!(all[&0]["MASTER_PORT"], port.to_string());
        let error_file = rest.remove("TORCHELASTIC_ERROR_FILE").unwrap();
        assert!(error_file.ends_with(&format!("/attempt_0/{rank}/error.json")), "{error_file}");
        let rank = rank.to_string();
        let expected = [
            ("GROUP_RANK", "0"),
            ("GROUP_WORLD_SIZE", "1"),
            ("LOCAL_RANK", rank.as_str()),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("RANK", rank.as_str()),
            ("ROLE_NAME", "trainer"),
            ("ROLE_RANK", rank.as_str()),
            ("ROLE_WORLD_SIZE", "2"),
            ("TORCHELASTIC_MAX_RESTARTS", "0"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("TORCHELASTIC_RUN_ID", "a1"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("WORLD_SIZE", "2"),
        ];
        let expected: BTreeMap<String, String> = expected.map(|(name, value)| (name.into(), value.into())).into();
        assert_eq!(rest, expected);
    }
}

#[test]
fn a_second_machine_continues_the_ranks_of_the_first() {
    let nodes = Nodes::new(2);
    let all: Vec<_> = nodes.run(&["--nproc_per_node=3"], PRINT).iter().map(environments).collect();
    assert_eq!(all[0].keys().copied().collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(all[1].keys().copied().collect::<Vec<_>>(), [3, 4, 5]);
    for (rank, variables) in &all[1] {
        assert_eq!(variables["LOCAL_RANK"], (rank - 3).to_string());
        assert_eq!(variables["ROLE_RANK"], rank.to_string());
        assert_eq!(variables["GROUP_RANK"], "1");
        assert_eq!(variables["GROUP_WORLD_SIZE"], "2");
        assert_eq!(variables["WORLD_SIZE"], "6");
        assert_eq!(variables["MASTER_ADDR"], "127.0.0.1");
        assert_eq!(variables["MASTER_PORT"], nodes.port.to_string());
    }
}

/// Kubeflow's Trainer sets these variables.
#[test]
fn options_come_from_the_variables_of_torchrun() {
    let sandbox = Sandbox::new();
    let port = free_port().to_string();
    let start = |node_rank: &'static str, args: &[&str]| {
        let variables = [
            ("PET_NNODES", "2"),
            ("PET_NPROC_PER_NODE", "2"),
            ("PET_NODE_RANK", node_rank),
            ("PET_MASTER_ADDR", "127.0.0.1"),
            ("PET_MASTER_PORT", &port),
            ("PET_RDZV_ID", "job7"),
            ("PET_ROLE", "trainer"),
            ("PET_RDZV_BACKEND", "static"),
            ("PET_RDZV_CONF", "timeout=30"),
            ("PET_NO_PYTHON", "1"),
            ("PET_STANDALONE", "0"),
        ];
        let mut command = sandbox.ddprun(&[args, &["sh", "-c", PRINT]].concat());
        Running::new(command.envs(variables).stdout(Stdio::piped()).stderr(Stdio::piped()))
    };
    let all = finish(vec![start("0", &[]), start("1", &[])]);
    let all = environments(&all[1]);
    assert_eq!(all.keys().copied().collect::<Vec<_>>(), [2, 3]);
    for variables in all.values() {
        assert_eq!((&variables["MASTER_ADDR"], &variables["MASTER_PORT"]), (&"127.0.0.1".to_string(), &port));
        assert_eq!((variables["WORLD_SIZE"].as_str(), variables["GROUP_RANK"].as_str()), ("4", "1"));
        assert_eq!((variables["TORCHELASTIC_RUN_ID"].as_str(), variables["ROLE_NAME"].as_str()), ("job7", "trainer"));
    }
    // Options on the command line take precedence.
    let one = "--nproc-per-node=1";
    let all = finish(vec![start("0", &[one]), start("0", &[one, "--node-rank=1"])]);
    assert_eq!(environments(&all[1]).keys().copied().collect::<Vec<_>>(), [1], "{all:?}");
}

#[test]
fn the_store_exists_during_the_whole_run() {
    let sandbox = Sandbox::new();
    let child = sandbox.start(
        &["--standalone"],
        r#"echo $MASTER_PORT >port.new; mv port.new port; while [ ! -e go ]; do sleep 0.01; done"#,
    );
    let port = sandbox.wait_for("port").parse().unwrap();
    let store = TcpStore::connect("127.0.0.1", port, Duration::from_secs(30)).unwrap();
    store.set("a", b"1").unwrap();
    assert_eq!(store.get("a").unwrap(), b"1");
    std::fs::write(sandbox.path("go"), "").unwrap();
    assert_eq!(Ran::of(child).code, Some(0));
}

/// mimalloc keeps the memory of a step for the next one, CUDA loads kernels before a call can wait for another rank, and streams have
/// queues of their own, GPUs the order of their slots, and a worker that hangs in the driver ends itself; unless the user wants something else.
#[test]
fn workers_get_settings_of_allocators_and_cuda() {
    let sandbox = Sandbox::new();
    let defaults = [
        ("MIMALLOC_PURGE_DELAY", "10000"),
        ("CUDA_MODULE_LOADING", "EAGER"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        ("CANDLE_DDP_ABORT_TIMEOUT", "300"),
    ];
    for (name, default) in defaults {
        let script = format!("echo ${name}");
        let mut command = sandbox.ddprun(&["sh", "-c", &script]);
        assert_eq!(Ran::new(command.env_remove(name)).stdout, format!("{default}\n"), "{name}");
        let mut command = sandbox.ddprun(&["sh", "-c", &script]);
        assert_eq!(Ran::new(command.env(name, "5")).stdout, "5\n", "{name}");
    }
}

#[test]
fn cores_are_shared_out_unless_the_user_sets_the_threads() {
    let sandbox = Sandbox::new();
    let cores = std::thread::available_parallelism().unwrap().get();
    let script = "echo $RAYON_NUM_THREADS,$OMP_NUM_THREADS";
    let ran = sandbox.run(&["--nproc-per-node", "2"], script);
    let each = (cores / 2).max(1);
    assert_eq!(ran.sorted(), [format!("{each},{each}"), format!("{each},{each}")]);
    assert_eq!(ran.stderr.lines().count(), 1);
    ran.says(&format!("RAYON_NUM_THREADS={each} and OMP_NUM_THREADS={each}"));

    let mut command = sandbox.ddprun(&["--nproc-per-node", "2", "sh", "-c", script]);
    let ran = Ran::new(command.env("OMP_NUM_THREADS", "7"));
    assert_eq!(ran.sorted(), [format!("{each},7"), format!("{each},7")]);
    assert!(!ran.stderr.contains("OMP_NUM_THREADS"), "{}", ran.stderr);

    let ran = sandbox.run(&[], script);
    assert_eq!((ran.stdout.as_str(), ran.stderr.as_str()), (",\n", ""));
}

#[test]
fn one_worker_per_core() {
    let sandbox = Sandbox::new();
    let cores = std::thread::available_parallelism().unwrap().get();
    assert_eq!(sandbox.run(&["--nproc-per-node", "cpu"], "echo x").stdout.lines().count(), cores);
}

#[test]
fn standard_input_is_empty() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.ddprun(&["sh", "-c", "cat; echo end"]);
    let mut child = Running::new(command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()));
    let mut stdin = child.child().stdin.take().unwrap();
    // The worker may exit before everything is written.
    let _ = stdin.write_all(b"text\n");
    drop(stdin);
    assert_eq!(Ran::of(child).stdout, "end\n");
}

#[test]
fn the_store_listens_only_where_its_workers_reach_it() {
    let is_served = |ip: &str, port: u16| TcpStream::connect((ip, port)).is_ok();
    for args in [&[][..], &["--standalone"], &["--master-addr=localhost"], &["--master-addr=127.0.0.1"]] {
        let sandbox = Sandbox::new();
        let _running = sandbox.start(args, "echo $MASTER_PORT > port; exec sleep 60");
        let port = sandbox.wait_for("port").parse().unwrap();
        assert!(is_served("127.0.0.1", port), "{args:?}");
        // All of 127.0.0.0/8 are addresses of every host.
        assert!(!is_served("127.0.0.2", port), "{args:?}");
    }
    // An address reserved for documentation, which no host has.
    let sandbox = Sandbox::new();
    let mut running = sandbox.start(&["--master-addr=203.0.113.5"], "echo $MASTER_PORT > port; exec sleep 60");
    let mut lines = BufReader::new(running.child().stderr.take().unwrap()).lines();
    let line = lines.find(|line| line.as_ref().unwrap().contains("--master-addr")).unwrap().unwrap();
    assert!(line.contains("203.0.113.5") && line.contains("listens on all interfaces"), "{line}");
    assert!(is_served("127.0.0.2", sandbox.wait_for("port").parse().unwrap()));
}

#[test]
fn foreign_connections_to_the_store_are_reported() {
    let sandbox = Sandbox::new();
    let mut running = sandbox.start(&[], "echo $MASTER_PORT > port; exec sleep 60");
    let port: u16 = sandbox.wait_for("port").parse().unwrap();
    TcpStream::connect(("127.0.0.1", port)).unwrap().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut lines = BufReader::new(running.child().stderr.take().unwrap()).lines();
    let line = lines.find(|line| line.as_ref().unwrap().contains("the store's server")).unwrap().unwrap();
    assert!(line.starts_with("ddprun: ") && line.contains("closes the connection of 127.0.0.1"), "{line}");
}

#[test]
fn an_unresolvable_master_is_reported_at_once() {
    let sandbox = Sandbox::new();
    let args = ["--nnodes=2", "--node-rank=1", "--master-addr=no-such-host.invalid", "--nproc-per-node=1"];
    let mut running = sandbox.start(&args, "exec sleep 60");
    let mut lines = BufReader::new(running.child().stderr.take().unwrap()).lines();
    let line = lines.find(|line| line.as_ref().unwrap().contains("--master-addr")).unwrap().unwrap();
    assert!(line.contains("cannot resolve the name \"no-such-host.invalid\""), "{line}");
    assert!(running.child().try_wait().unwrap().is_none(), "the run must continue, because the name may resolve later");
}

/// The node that would host the store there.
#[test]
fn a_master_that_has_no_address_on_its_own_machine_is_an_error() {
    let ran = Sandbox::new().run(&["--master-addr=no-such-host.invalid"], "true");
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{ran:?}");
    ran.says("--master-addr: cannot resolve the name \"no-such-host.invalid\": ");
    ran.says("It must be a name or an address of this machine");
    // On several machines the name may take a moment.
    let args = ["--nnodes=2", "--node-rank=0", "--master-addr=no-such-host.invalid", "--master-port=1"];
    let ran = Sandbox::new().run(&args, "true");
    ran.ends(2, &["cannot resolve the name \"no-such-host.invalid\": ", "Trying again for 10 s"]);
    for wrong in ["node0 node1", "a:b"] {
        let ran = Sandbox::new().run(&["--master-addr", wrong], "true");
        ran.ends(2, &[&format!("--master-addr: {wrong:?} must be one name or address")]);
    }
}

#[test]
fn blanks_around_an_address_do_not_count() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.ddprun(&["sh", "-c", "echo $WORLD_SIZE $MASTER_PORT $TORCHELASTIC_MAX_RESTARTS"]);
    let port = free_port();
    command.env("PET_NPROC_PER_NODE", " 2").env("PET_NNODES", "1 ").env("PET_MASTER_PORT", format!("{port}\n"));
    command.env("PET_MAX_RESTARTS", " 3 ").env("PET_NODE_RANK", " 0");
    let ran = Ran::new(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
    assert_eq!((ran.code, ran.sorted()), (Some(0), vec![format!("2 {port} 3").as_str(); 2]), "{ran:?}");
    let ran = Sandbox::new().run(&["--master-addr", " 127.0.0.1\t"], "echo \"[$MASTER_ADDR]\"");
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(0), "[127.0.0.1]\n"), "{ran:?}");
}

/// As torch.distributed.launch does.
#[test]
fn workers_get_their_local_rank_as_an_argument() {
    let run = |options: &[&str]| {
        let args = [options, &["--nproc-per-node=2", "sh", "-c", "echo \"$@\"", "sh", "--epochs", "3"]].concat();
        let ran = Ran::new(&mut Sandbox::new().ddprun(&args));
        assert_eq!(ran.code, Some(0), "{ran:?}");
        ran.sorted().join(", ")
    };
    assert_eq!(run(&[]), "--epochs 3, --epochs 3");
    assert_eq!(run(&["--pass-local-rank"]), "--epochs 3 --local-rank=0, --epochs 3 --local-rank=1");
    assert_eq!(run(&["--pass-local-rank=--local_rank"]), "--epochs 3 --local_rank=0, --epochs 3 --local_rank=1");
    assert_eq!(
        run(&["--pass-local-rank", "--virtual-local-rank"]),
        "--epochs 3 --local-rank=0, --epochs 3 --local-rank=0"
    );
}

#[test]
fn brackets_around_an_address_are_removed() {
    let ran = Sandbox::new().run(&["--master-addr=[::1]"], "echo $MASTER_ADDR");
    assert_eq!(ran.stdout, "::1\n", "{ran:?}");
}

#[test]
fn each_worker_sees_one_gpu_with_virtual_local_ranks() {
    let sandbox = Sandbox::new();
    let args = ["--nproc-per-node", "2", "--virtual-local-rank", "sh", "-c"];
    let script = "echo $RANK $LOCAL_RANK $LOCAL_WORLD_SIZE $CUDA_VISIBLE_DEVICES";
    for (visible, expected) in [(None, ["0 0 2 0", "1 0 2 1"]), (Some("5, GPU-7,9"), ["0 0 2 5", "1 0 2 GPU-7"])] {
        let mut command = sandbox.ddprun(&[&args[..], &[script]].concat());
        command.envs(visible.map(|visible| ("CUDA_VISIBLE_DEVICES", visible)));
        let ran = Ran::new(&mut command);
        assert_eq!(ran.sorted(), expected, "{ran:?}");
    }
    let ran = Ran::new(sandbox.ddprun(&[&args[..], &[script]].concat()).env("CUDA_VISIBLE_DEVICES", "3"));
    ran.ends(2, &["each of 2 workers needs its own GPU, but CUDA_VISIBLE_DEVICES is \"3\""]);
}

#[test]
fn workers_are_bound_to_processors() {
    let sandbox = Sandbox::new();
    let script = "grep Cpus_allowed_list /proc/self/status";
    let ran = sandbox.run(&["--nproc-per-node", "2", "--numa-binding", "exclusive"], script);
    if ran.code == Some(2) {
        let says = |part| ran.stderr.contains(part);
        assert!(says("does not provide") || says("share a NUMA node of 1 cores"), "{ran:?}");
        return skip(
            "workers_are_bound_to_processors",
            "this machine does not provide the location of its cores, or has only one",
        );
    }
    // No processor is in both lists.
    let lists = ran.sorted();
    assert!(ran.code == Some(0) && lists.len() == 2 && lists[0] != lists[1], "{ran:?}");
}
