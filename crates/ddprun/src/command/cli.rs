//! The command line as typed. [`Config`](super::Config) holds its meaning.
use super::mode::Mode;
use super::options::{BUILD, Options, RANKS, like_torchruns};
use super::ranks::Ranks;
use clap::builder::BoolishValueParser;
use std::ffi::OsString;

const AFTER_HELP: &str = "\
Examples:
  ddprun --nproc-per-node 2 target/release/train --epochs 3
  ddprun --nproc-per-node 2 --example digits -- --epochs 3
  ddprun --nproc-per-node 2 python train.py
  ddprun --hosts node0,node1 --nproc-per-node 8 target/release/train
  ddprun check --nproc-per-node 2
  ddprun status node0:29500

A command must be the first argument. To start a program of that name, write `ddprun -- status` or `ddprun ./status`.

Every worker gets torchrun's environment variables: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and so on. \
Its standard input is empty. ddprun forwards its output line by line; if ddprun runs on a terminal, so does the worker.

When a run ends, ddprun also ends every process that its workers started, even those in their own session: with \
SIGTERM, then with SIGKILL after --shutdown-timeout. After a successful run it waits one second first, and names the \
processes that it ends; start services that should outlive the run separately. If ddprun itself is killed by SIGKILL, \
the kernel kills the workers, but grandchildren survive; use `exec` in wrapper scripts.

If ddprun's output is not read, the workers block, as on any full pipe. At the end of a run ddprun waits while the \
reader keeps reading. If nothing is read for --shutdown-timeout (at most 5 s after a signal), it discards the rest and \
reports how many bytes were lost.

Options can also be set by torchrun's environment variables, such as PET_NNODES; the command line takes precedence. \
torchrun's --monitor-interval and --start-method are accepted and ignored.

SIGUSR1 and SIGUSR2 are forwarded to the processes that have a handler for them, and do not end the run.

Exit code: 0 if every worker exited with 0, even after a signal; otherwise 128 + N if the run was ended by signal N, or \
the exit code of the first worker that failed (128 + N if it was killed by signal N); 2 for an invalid command line; cargo's own code if the build \
failed; 126 if the program is not executable, 127 if it was not found; 1 for everything else.";

/// The command line of `ddprun`: torchrun's options, with `-` or `_` between words.
#[derive(Debug, Clone, clap::Parser)]
#[command(
    name = "ddprun",
    version,
    about = "Starts and supervises the ranks of a distributed program, on one machine or several",
    long_about = None,
    after_help = AFTER_HELP,
    next_line_help = true,
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true,
    subcommand_help_heading = "Commands",
    mut_args = like_torchruns,
    mut_subcommands = |command| command.mut_args(like_torchruns)
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) mode: Option<Mode>,

    /// torchrun's option to run a Python module; refused with a hint.
    #[arg(short, long, env = "PET_MODULE", value_parser = BoolishValueParser::new(), hide = true)]
    pub(crate) module: bool,

    /// This machine's address in torchrun's rendezvous; refused with a hint.
    #[arg(long, env = "PET_LOCAL_ADDR", value_name = "HOST", hide = true)]
    pub(crate) local_addr: Option<String>,

    /// torchrun's polling interval for its workers; ignored, because ddprun is notified when a worker exits.
    #[arg(long, env = "PET_MONITOR_INTERVAL", value_name = "SECONDS", hide = true)]
    pub(crate) monitor_interval: Option<String>,

    /// torchrun's start method for Python processes; ignored.
    #[arg(long, env = "PET_START_METHOD", value_name = "NAME", hide = true)]
    pub(crate) start_method: Option<String>,

    /// The program and its arguments; with --example, --bin or --bench, only the arguments.
    #[arg(value_name = "PROGRAM [ARGS]", trailing_var_arg = true)]
    pub(crate) command: Vec<OsString>,

    #[command(flatten, next_help_heading = RANKS)]
    pub(crate) ranks: Ranks,

    /// Builds and runs this example of the current cargo package. cargo reports the path, so workspaces and
    /// CARGO_TARGET_DIR work. Arguments for the example follow `--`.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["bin", "bench"], help_heading = BUILD)]
    pub(crate) example: Option<String>,

    /// Builds and runs this binary of the current cargo package. Arguments for the binary follow `--`.
    #[arg(long, value_name = "NAME", conflicts_with = "bench", help_heading = BUILD)]
    pub(crate) bin: Option<String>,

    /// Builds and runs this bench of the current cargo package, one with `harness = false`. Arguments for it follow `--`.
    #[arg(long, value_name = "NAME", help_heading = BUILD)]
    pub(crate) bench: Option<String>,

    /// Workspace package that contains the example, binary or bench. [default: cargo's choice]
    #[arg(short, long, value_name = "NAME", help_heading = BUILD)]
    pub(crate) package: Option<String>,

    /// Cargo features to build with, separated by commas; may be repeated. [default: the package's own]
    #[arg(long, value_name = "LIST", help_heading = BUILD)]
    pub(crate) features: Vec<String>,

    /// Cargo profile to build with. [default: release, because training in a debug build is many times slower]
    #[arg(long, value_name = "NAME", conflicts_with = "debug", help_heading = BUILD)]
    pub(crate) profile: Option<String>,

    /// Builds without optimisation; short for --profile dev.
    #[arg(long, help_heading = BUILD)]
    pub(crate) debug: bool,

    #[command(flatten, next_help_heading = RANKS)]
    pub(crate) options: Options,

    /// Sets LOCAL_RANK=0 for every worker, and CUDA_VISIBLE_DEVICES to the one GPU that it may use.
    #[arg(long, env = "PET_VIRTUAL_LOCAL_RANK", value_parser = BoolishValueParser::new())]
    pub(crate) virtual_local_rank: bool,

    /// Accepted for compatibility with torchrun, which needs it for compiled programs: ddprun always runs PROGRAM
    /// directly.
    #[arg(long, env = "PET_NO_PYTHON", value_parser = BoolishValueParser::new())]
    pub(crate) no_python: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Command, CommandFactory};
    use std::path::{Path, PathBuf};

    /// The pages of the repository. A published package has none.
    fn pages() -> Vec<PathBuf> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let folder = std::fs::read_dir(root.join("docs")).into_iter().flatten().flatten().map(|entry| entry.path());
        let others = ["README.md", "crates/ddprun/README.md", "CONTRIBUTING.md"].map(|name| root.join(name));
        folder.chain(others).filter(|page| page.extension().is_some_and(|kind| kind == "md") && page.exists()).collect()
    }

    /// Checks the flags of ddprun in `call`, which is what follows its name, and returns how many they are.
    fn check(command: &Command, call: &str, page: &Path) -> usize {
        let mut words = call.split_whitespace().peekable();
        let subcommand = words.peek().and_then(|word| command.find_subcommand(word));
        let (command, mut flags) = (subcommand.unwrap_or(command), 0);
        words.next_if(|_| subcommand.is_some());
        while let Some(word) = words.next() {
            let Some(flag) = word.strip_prefix("--").filter(|flag| !flag.is_empty()) else {
                // The program, whose flags follow.
                if subcommand.is_none() && !word.starts_with(['-', '\u{2026}', '[']) || word == "--" {
                    break;
                }
                continue;
            };
            let (name, value) = flag.split_once('=').map_or((flag, None), |(name, value)| (name, Some(value)));
            let name = name.trim_end_matches([',', '.', ';', ':', ')', ']']);
            let is_it = |argument: &&clap::Arg| {
                let aliases = argument.get_all_aliases().unwrap_or_default();
                argument.get_long() == Some(name) || aliases.contains(&name)
            };
            let argument = command.get_arguments().find(is_it);
            let argument =
                argument.unwrap_or_else(|| panic!("{}: there is no --{name}: ddprun {call}", page.display()));
            flags += 1;
            if value.is_none() && argument.get_num_args().is_some_and(|values| values.min_values() > 0) {
                words.next();
            }
        }
        flags
    }

    #[test]
    fn pages_name_no_flag_that_is_not_there() {
        let mut command = Cli::command();
        command.build();
        let pages = pages();
        let mut flags = 0;
        for page in &pages {
            let text = std::fs::read_to_string(page).unwrap().replace("\\\n", " ");
            let call = |(at, name): (usize, &str)| {
                let call = text[at + name.len()..].split(['`', '\n', '#', '|', '&', '"', '\'']).next()?;
                // Of cargo, it is the package.
                let before = text[..at].trim_end();
                match before.ends_with("-p") || before.ends_with("crates/") {
                    true => call.split_once("-- ").map(|(_, call)| call),
                    false => Some(call),
                }
            };
            let calls = text.match_indices("ddprun ").filter_map(call);
            flags += calls.map(|call| check(&command, call, page)).sum::<usize>();
        }
        assert!(pages.is_empty() || flags > 60, "{flags}");
    }

    #[test]
    fn the_help_has_all_commands() {
        let mut command = Cli::command();
        let help = command.render_long_help().to_string();
        assert!(help.contains("Usage: ddprun [OPTIONS] [PROGRAM [ARGS]]...\n       ddprun <COMMAND>\n"), "{help}");
        let (_, section) = help.split_once("\nCommands:\n").unwrap();
        let (section, _) = section.split_once("\n\nArguments:").unwrap();
        let is_name = |line: &&str| line.starts_with("  ") && !line.starts_with("   ");
        let listed: Vec<&str> = section.lines().filter(is_name).map(str::trim).collect();
        let commands = command.get_subcommands().filter(|command| !command.is_hide_set());
        let known: Vec<&str> = commands.map(clap::Command::get_name).collect();
        assert_eq!(listed, known, "{section}");
        assert_eq!(known, ["status", "check", "host-store", "new", "explain", "report", "merge-traces"]);
        // Each says what it does.
        assert!(command.get_subcommands().all(|command| command.get_about().is_some()));
    }
}
