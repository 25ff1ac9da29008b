//! Layers and functions against PyTorch's and candle's, and the gradients of candle's operations.
#![allow(clippy::unwrap_used)] // a failed test may panic
mod autocast;
mod bf16;
mod candle_gradients;
mod checkpoint;
mod conv;
mod documents;
mod dropout;
mod empty;
mod functions;
mod lora;
mod loss;
mod no_grad;
mod norms;
mod pool;
mod rnn;
mod views;

use candle_core::Device;

/// The tests of all devices, on this one.
fn on_cpu(_: &str, test: impl FnOnce(&Device)) {
    test(&Device::Cpu);
}

candle_ddp_testing::layer_tests!(on_cpu);
