//! `ddprun`: starts and supervises the ranks of a distributed program.
fn main() -> std::process::ExitCode {
    ddprun::main()
}
