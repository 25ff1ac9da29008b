//! The secret of a run: who gets it, and where it cannot be seen.
use super::*;
use candle_ddp_rendezvous::Error;
use candle_ddp_rendezvous::{Secret, Store, TcpStore, TcpStoreOptions};

const GIVEN: &str = "a secret that the user has given to all";
/// Prints the variables.
const PRINT: &str = r#"echo "[$CANDLE_DDP_SECRET] [$CANDLE_DDP_SECRET_FILE]""#;

/// A ddprun without a secret in its environment.
fn ddprun(place: &Sandbox, args: &[&str]) -> Command {
    let mut command = place.ddprun(args);
    command.env_remove("CANDLE_DDP_SECRET").env_remove("CANDLE_DDP_SECRET_FILE");
    command
}

fn printed(command: &mut Command) -> String {
    let ran = Ran::new(command);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    ran.stdout
}

#[test]
fn each_run_has_its_own() {
    let place = Sandbox::new();
    let run = || printed(&mut ddprun(&place, &["--nproc-per-node", "2", "sh", "-c", PRINT]));
    let runs = [run(), run()];
    for run in &runs {
        let lines: Vec<&str> = run.lines().collect();
        let [one, two] = lines[..] else { panic!("{run}") };
        let digits = one.strip_prefix('[').and_then(|rest| rest.strip_suffix("] []")).unwrap();
        assert!(one == two && digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit()), "{run}");
    }
    assert_ne!(runs[0], runs[1]);
}

#[test]
fn the_users_secret_goes_to_the_workers() {
    let place = Sandbox::new();
    let print = ["sh", "-c", PRINT];
    let file = place.path("secret");
    std::fs::write(&file, format!("{GIVEN}\n")).unwrap();
    let run = |args: &[&str], variables: &[(&str, &str)]| {
        printed(ddprun(&place, &[args, &print].concat()).envs(variables.iter().copied()))
    };
    let path = file.to_str().unwrap();
    assert_eq!(run(&[], &[("CANDLE_DDP_SECRET", GIVEN)]), format!("[{GIVEN}] []\n"));
    assert_eq!(run(&[], &[("CANDLE_DDP_SECRET_FILE", path)]), format!("[{GIVEN}] []\n"));
    assert_eq!(run(&["--no-secret"], &[("CANDLE_DDP_SECRET", GIVEN), ("CANDLE_DDP_SECRET_FILE", path)]), "[] []\n");
    assert_eq!(run(&["--no-secret"], &[]), "[] []\n");
}

#[test]
fn a_secret_that_cannot_be_one_is_refused_and_not_shown() {
    let place = Sandbox::new();
    let ran = Ran::new(ddprun(&place, &["true"]).env("CANDLE_DDP_SECRET", "hunter2hunter2"));
    assert_ne!(ran.code, Some(0));
    ran.says("CANDLE_DDP_SECRET=\"(hidden)\": the secret has 14 characters, but must have at least 32");
    assert!(!ran.stderr.contains("hunter2"), "{ran:?}");
    let ran = Ran::new(ddprun(&place, &["true"]).env("CANDLE_DDP_SECRET_FILE", place.path("none")));
    ran.says("none (CANDLE_DDP_SECRET_FILE): No such file");
}

/// Neither the arguments of a process nor anything that ddprun says shows it, whoever looks.
#[test]
fn it_is_neither_in_arguments_nor_in_output() {
    let place = Sandbox::new();
    // The worker looks for its secret in the arguments of all processes; the pattern itself comes from the environment.
    let script = r#"
        sleep 5 & child=$!
        for process in /proc/[0-9]*; do
            tr '\0' ' ' <$process/cmdline 2>/dev/null
        done >arguments
        ps -ef >>arguments 2>/dev/null
        kill $child
        grep -q "ddprun" arguments || echo "no arguments were read"
        grep -qF "$CANDLE_DDP_SECRET" arguments && echo "found"
        printf %s "$CANDLE_DDP_SECRET" >found
        exit 3"#;
    let mut command = ddprun(&place, &["--nproc-per-node", "1", "--log-dir", "logs", "--tee", "3", "sh", "-c", script]);
    let ran = Ran::new(command.env("RUST_LOG", "trace"));
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(3), ""), "{ran:?}");
    let secret = std::fs::read_to_string(place.path("found")).unwrap();
    assert_eq!(secret.len(), 64);
    assert!(!ran.stderr.contains(&secret), "{ran:?}");
    // Nor is it in any file of the run.
    let logs =
        Command::new("grep").args(["-rF", &secret]).args([place.path("logs"), place.path("tmp")]).output().unwrap();
    assert_eq!(logs.status.code(), Some(1), "{logs:?}");
}

/// Runs two nodes, each with its secret in the environment, if it has one.
fn on_two_nodes(args: &[&str], given: [Option<&str>; 2]) -> (Vec<Ran>, u16) {
    let (place, port) = (Sandbox::new(), free_port());
    let node = |node_rank: usize| {
        let own = [format!("--node-rank={node_rank}"), format!("--master-port={port}")];
        let own: Vec<&str> = own.iter().map(String::as_str).collect();
        let common = ["--nnodes=2", "--master-addr=127.0.0.1", "sh", "-c", PRINT];
        let mut command = ddprun(&place, &[args, &own, &common].concat());
        command.envs(given[node_rank].map(|secret| ("CANDLE_DDP_SECRET", secret)));
        Running::new(command.stdout(Stdio::piped()).stderr(Stdio::piped()))
    };
    (nodes::finish(vec![node(0), node(1)]), port)
}

#[test]
fn several_machines_need_the_users() {
    let (all, port) = on_two_nodes(&[], [None; 2]);
    for ran in all {
        assert_eq!(ran.stdout, "[] []\n", "{ran:?}");
        ran.says(&format!("this run has no secret, so anyone who reaches port {port} can use its store: give all"));
    }
    for (args, given, printed) in
        [(&[][..], Some(GIVEN), format!("[{GIVEN}] []\n")), (&["--no-secret"], None, "[] []\n".to_string())]
    {
        for ran in on_two_nodes(args, [given; 2]).0 {
            assert_eq!(ran.stdout, printed, "{ran:?}");
            assert!(!ran.stderr.contains("secret"), "{ran:?}");
        }
    }
}

#[test]
fn a_machine_with_another_secret_is_refused() {
    let other = "another secret than that of the others";
    for given in [Some(other), None] {
        let (all, _) = on_two_nodes(&["--rdzv-conf=join_timeout=3"], [Some(GIVEN), given]);
        assert!(all.iter().all(|ran| ran.code != Some(0) && ran.stdout.is_empty()), "{all:?}");
        all[1].says("secret");
        assert!(!all[1].stderr.contains(GIVEN) && !all[1].stderr.contains(other), "{all:?}");
    }
}

/// A run whose worker tells the store's port, and a secret, and ends when told to.
fn waiting(place: &Sandbox, args: &[&str], given: Option<&str>) -> (Running, u16, String) {
    let script = r#"echo "$MASTER_PORT $CANDLE_DDP_SECRET" >place.new; mv place.new place
                    while [ ! -e go ]; do sleep 0.01; done"#;
    let mut command = ddprun(place, &[args, &["sh", "-c", script]].concat());
    command.envs(given.map(|secret| ("CANDLE_DDP_SECRET", secret)));
    let running = Running::new(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
    let place = place.wait_for("place");
    let (port, secret) = place.split_once(' ').unwrap_or((&place, ""));
    (running, port.parse().unwrap(), secret.to_string())
}

#[test]
fn the_store_is_open_to_pytorch_until_a_worker_has_the_secret() {
    let place = Sandbox::new();
    let (running, port, secret) = waiting(&place, &[], None);
    let plain = TcpStore::connect("127.0.0.1", port, PATIENCE).unwrap();
    plain.set("a", b"theirs").unwrap();
    let options = TcpStoreOptions { timeout: PATIENCE, secret: Some(Secret::new(&secret).unwrap()) };
    let member = TcpStore::connect_with("127.0.0.1", port, options).unwrap();
    assert!(!member.check(&["a"]).unwrap());
    assert!(matches!(plain.get("a"), Err(Error::Secret { .. })));
    std::fs::write(place.path("go"), "").unwrap();
    let ran = Ran::of(running);
    ran.ends(0, &["it does not have the job's secret"]);
}

/// Whoever may connect: other users of the machine.
#[test]
fn a_run_that_made_its_secret_shows_its_status_to_nobody_else() {
    let place = Sandbox::new();
    let (running, port, secret) = waiting(&place, &["--run-id=private"], None);
    let args = ["status", "--no-secret", &format!("127.0.0.1:{port}")];
    let ran = Ran::new(&mut ddprun(&place, &args));
    assert!(ran.code == Some(1) && !ran.stdout.contains("private"), "{ran:?}");
    ran.says("the run has a secret that this process does not have");
    let ran = Ran::new(ddprun(&place, &args[..1]).arg(args[2]).env("CANDLE_DDP_SECRET", secret));
    assert!(ran.code == Some(0) && ran.stdout.starts_with("run private: running"), "{ran:?}");
    std::fs::write(place.path("go"), "").unwrap();
    assert_eq!(Ran::of(running).code, Some(0));
}

#[test]
fn the_users_secret_keeps_everybody_else_out() {
    let place = Sandbox::new();
    let (running, port, secret) = waiting(&place, &[], Some(GIVEN));
    assert_eq!(secret, GIVEN);
    let error = TcpStore::connect("127.0.0.1", port, PATIENCE).err().unwrap();
    assert!(matches!(error, Error::Secret { .. }), "{error}");
    std::fs::write(place.path("go"), "").unwrap();
    assert_eq!(Ran::of(running).code, Some(0));
}

#[test]
fn without_a_secret_the_store_is_as_torchruns() {
    let place = Sandbox::new();
    let (running, port, _) = waiting(&place, &["--no-secret"], Some(GIVEN));
    TcpStore::connect("127.0.0.1", port, PATIENCE).unwrap().set("a", b"1").unwrap();
    let options = TcpStoreOptions { timeout: PATIENCE, secret: Some(Secret::new(GIVEN).unwrap()) };
    let error = TcpStore::connect_with("127.0.0.1", port, options).err().unwrap();
    assert!(matches!(error, Error::Secret { .. }), "{error}");
    std::fs::write(place.path("go"), "").unwrap();
    assert_eq!(Ran::of(running).code, Some(0));
}

/// Whoever starts it.
#[test]
fn a_file_that_others_can_read_is_reported() {
    use std::os::unix::fs::PermissionsExt;
    let place = Sandbox::new();
    let file = place.path("secret");
    std::fs::write(&file, GIVEN).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    let port = free_port();
    let store = format!("127.0.0.1:{port}");
    for args in [&["true"][..], &["status", &store]] {
        let ran = Ran::new(ddprun(&place, args).env("CANDLE_DDP_SECRET_FILE", &file));
        assert_eq!(ran.stderr.matches("chmod 600").count(), 1, "{args:?}: {ran:?}");
    }
}

/// The node with the store says why the other one does not come.
#[test]
fn a_node_with_another_secret_is_reported_on_both() {
    for given in
        [[Some(GIVEN), Some("another secret that the user has given")], [Some(GIVEN), None], [None, Some(GIVEN)]]
    {
        let (all, _) = on_two_nodes(&["--rdzv-conf", "join_timeout=3"], given);
        for ran in &all {
            assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""), "{given:?}: {ran:?}");
        }
        all[0].says("the store's server closes the connection of 127.0.0.1:");
    }
}
