#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| candle_ddp_engine::fuzz_mesh(data));
