//! Processes as users start them: without a launcher, by an MPI, with too few file descriptors, with an address that cannot work.
use crate::meeting::{all_succeed, launched, start, start_in};
use candle_ddp_testing::skip;
use candle_ddp_testing::test_process;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// The standard error of a process that fails.
fn error_of(rank: Child) -> String {
    let output = rank.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{text}");
    text
}

#[test]
fn without_a_launcher_a_process_is_a_world_of_one_and_says_so() {
    let output = start(&[]).wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    let said: Vec<&str> = text.lines().filter(|line| line.contains("without a launcher")).collect();
    assert!(
        said.len() == 1 && said[0].contains("world size 1") && said[0].contains("ddprun --nproc-per-node"),
        "{text}"
    );
    // Half of a launcher's variables is an error.
    assert!(error_of(start(&[("RANK", "0".to_string())])).contains("WORLD_SIZE is not set"));
    assert!(error_of(start(&[("MASTER_ADDR", "localhost".to_string())])).contains("RANK is not set"));
}

/// The variables of Open MPI's mpirun.
fn open_mpi(rank: usize, size: usize, local_size: usize, job: &str) -> Vec<(&'static str, String)> {
    vec![
        ("OMPI_COMM_WORLD_RANK", rank.to_string()),
        ("OMPI_COMM_WORLD_SIZE", size.to_string()),
        ("OMPI_COMM_WORLD_LOCAL_RANK", rank.to_string()),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", local_size.to_string()),
        ("PMIX_NAMESPACE", job.to_string()),
    ]
}

#[test]
fn the_ranks_of_an_mpi_job_meet_by_its_id() {
    let job = format!("prterun-test-{}@1", std::process::id());
    all_succeed((0..3).map(|rank| start(&open_mpi(rank, 3, 3, &job))).collect());
    let text = error_of(start(&open_mpi(1, 3, 2, &job)));
    assert!(text.contains("MASTER_ADDR is not set") && text.contains("-x MASTER_ADDR=HOST"), "{text}");
}

/// Variables that were left in a shell, for example: the user learns of them long before the time-out.
#[test]
fn ranks_that_do_not_come_are_named_with_the_variables_that_promise_them() {
    let owned = |variables: &[(&'static str, &str)]| -> Vec<(&'static str, String)> {
        variables.iter().map(|(name, value)| (*name, value.to_string())).collect()
    };
    let at = |port: u16| owned(&[("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port.to_string())]);
    let slurm = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_NODELIST", "localhost")];
    let job = std::process::id().to_string();
    let cases = [
        (
            [owned(&slurm), owned(&[("SLURM_JOB_ID", &job)])].concat(),
            "SLURM_PROCID=0 and SLURM_NTASKS=4 (set by Slurm)",
        ),
        (
            open_mpi(0, 4, 4, &format!("prterun-left-{job}@1")),
            "OMPI_COMM_WORLD_RANK=0 and OMPI_COMM_WORLD_SIZE=4 (set by Open MPI)",
        ),
        (
            [
                owned(&[("PMI_RANK", "0"), ("PMI_SIZE", "4"), ("MPI_LOCALRANKID", "0")]),
                at(candle_ddp_testing::free_port()),
            ]
            .concat(),
            "PMI_RANK=0 and PMI_SIZE=4 (set by MPICH or Intel MPI)",
        ),
        (
            [owned(&[("RANK", "0"), ("WORLD_SIZE", "4")]), at(candle_ddp_testing::free_port())].concat(),
            "RANK=0 and WORLD_SIZE=4 (set by ddprun, torchrun or a script)",
        ),
        // Nobody hosts the store.
        (
            [owned(&[("RANK", "1"), ("WORLD_SIZE", "4")]), at(candle_ddp_testing::free_port())].concat(),
            "RANK=1 and WORLD_SIZE=4 (set by ddprun, torchrun or a script)",
        ),
    ];
    let processes: Vec<_> = cases.into_iter().map(|(variables, expected)| (start(&variables), expected)).collect();
    for (mut process, expected) in processes {
        let stderr = BufReader::new(process.stderr.take().unwrap());
        let mut lines = stderr.lines().map_while(Result::ok);
        let said = lines.find(|line| line.contains("if nothing starts the other ranks, unset ")).unwrap_or_default();
        let is_alive = process.try_wait().unwrap().is_none();
        process.kill().unwrap();
        process.wait().unwrap();
        assert!(said.contains(expected), "{expected}: {said:?}");
        assert!(is_alive, "{said}");
        if !expected.contains("RANK=1 ") {
            assert!(said.contains("for 3 of 4 ranks: 1, 2, 3. This process has "), "{said}");
        }
    }
}

#[test]
fn blanks_in_an_address_do_not_count() {
    let port = candle_ddp_testing::free_port();
    let blank = |rank: usize| {
        let mut variables = launched(rank, 2, port);
        variables.extend([("MASTER_ADDR", " 127.0.0.1".to_string()), ("MASTER_PORT", format!("{port} "))]);
        start(&variables)
    };
    all_succeed(vec![blank(0), blank(1)]);
    let mut two = launched(0, 2, port);
    two.push(("MASTER_ADDR", "127.0.0.1 localhost".to_string()));
    let text = error_of(start(&two));
    assert!(text.contains("MASTER_ADDR=\"127.0.0.1 localhost\": it must be the name or address of one host"), "{text}");
}

#[test]
fn a_world_larger_than_any_is_an_error_at_once() {
    let mut variables = launched(0, 2, 29_500);
    variables.push(("WORLD_SIZE", usize::MAX.to_string()));
    let text = error_of(start(&variables));
    assert!(text.contains("WORLD_SIZE=\"18446744073709551615\": it must be at most 1048576"), "{text}");
}

/// The shell command `before`, and then the process of a rank.
fn after(before: &str, variables: &[(&str, String)]) -> Child {
    let rank = test_process("rendezvous::meeting", "rank_process");
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("{before} && exec \"$0\" \"$@\"")).arg(rank.get_program()).args(rank.get_args());
    start_in(shell, variables)
}

#[test]
fn the_soft_limit_of_descriptors_is_raised() {
    let port = candle_ddp_testing::free_port();
    let others = (1..8).map(|rank| start(&launched(rank, 8, port)));
    let ranks = std::iter::once(after("ulimit -Sn 16", &launched(0, 8, port))).chain(others);
    all_succeed(ranks.collect());
}

#[test]
fn too_low_a_limit_of_descriptors_is_an_error_at_once() {
    // No other rank ever comes.
    let text = error_of(after("ulimit -n 64", &launched(0, 16, candle_ddp_testing::free_port())));
    let needed = "must be at least 80: this process needs 64 for the store of 16 rank(s)";
    assert!(text.contains("ulimit -n: it is 64 ") && text.contains(needed), "{text}");
}

/// Returns whether a process of this user may have its own network. If not, reports that `test` is skipped.
fn has_namespaces(test: &str) -> bool {
    let tried =
        Command::new("unshare").args(["-rn", "ip", "link"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    let has = tried.is_ok_and(|status| status.success());
    if !has {
        skip(test, "this system cannot create network namespaces, or has no `ip`");
    }
    has
}

#[test]
fn an_address_that_cannot_work_is_an_error_at_once() {
    if !has_namespaces("an_address_that_cannot_work_is_an_error_at_once") {
        return;
    }
    // In a new network namespace, the loopback interface is down.
    for rank in [0, 1] {
        let mut variables = launched(rank, 2, 29_500);
        variables.push(("MASTER_ADDR", "127.0.0.1".to_string()));
        let rank_process = test_process("rendezvous::meeting", "rank_process");
        let mut command = Command::new("unshare");
        command.arg("-rn").arg(rank_process.get_program()).args(rank_process.get_args());
        let text = error_of(start_in(command, &variables));
        assert!(text.contains("this host's loopback interface is down"), "{text}");
    }
}

#[test]
fn by_default_a_host_with_ipv6_only_uses_its_loopback_address() {
    const TEST: &str = "by_default_a_host_with_ipv6_only_uses_its_loopback_address";
    if !std::path::Path::new("/proc/net/if_inet6").exists() {
        return skip(TEST, "this system has no IPv6");
    }
    if !has_namespaces(TEST) {
        return;
    }
    let rank = test_process("rendezvous::meeting", "rank_process");
    let script = "ip link set lo up && ip addr del 127.0.0.1/8 dev lo && exec \"$0\" \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["-rn", "sh", "-c", script]).arg(rank.get_program()).args(rank.get_args());
    all_succeed(vec![start_in(command, &open_mpi(0, 1, 1, "ipv6"))]);
}
