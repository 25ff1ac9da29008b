//! `ddprun`: starts the ranks of a distributed program and looks after them.
fn main() -> std::process::ExitCode {
    candle_ddp::launch::main()
}
