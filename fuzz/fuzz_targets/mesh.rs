#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| candle_ddp::fuzzing::mesh(data));
