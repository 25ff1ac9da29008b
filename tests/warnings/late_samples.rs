//! A loader says for which sample it waits before its time-out.
use crate::common::Made;
use crate::logger::{LOG, of_two_ranks};
use candle_ddp::data::{DataLoader, LoaderOptions, SamplerOptions};
use candle_ddp::seed::Generator;
use std::time::{Duration, Instant};

#[test]
fn a_sample_that_is_late_is_named_with_and_without_workers() {
    for num_workers in [0, 2] {
        let warnings = of_two_ranks(|pg| {
            let sampler = SamplerOptions { shuffle: false, ..Default::default() };
            let timeout = Some(Duration::from_millis(400));
            let options = LoaderOptions { num_workers, timeout, sampler, ..Default::default() };
            // Sample 3 comes when a warning has named it.
            let late = Made(6, |index, _: &mut Generator| {
                let since = Instant::now();
                while index == 3 && !LOG.0.lock().unwrap().iter().any(|text| text.contains("sample 3")) {
                    assert!(since.elapsed() < Duration::from_secs(60), "no warning has named it");
                    std::thread::sleep(Duration::from_millis(1));
                }
                Ok(index)
            });
            let loader = DataLoader::with_collate(late, &pg, options, Ok)?;
            // With workers, a batch may be an error.
            assert_eq!(loader.iter().filter(|batch| batch.is_ok() || num_workers > 0).count(), 3);
            Ok(())
        });
        let named = warnings.iter().find(|text| text.contains("sample 3")).unwrap();
        assert!(named.starts_with("rank 1's DataLoader has waited 0 s for "), "{named}");
        let expected = match num_workers {
            0 => "sample 3, which Dataset::get reads on the program's own thread",
            _ => "It ends after 400ms, with an error (LoaderOptions.timeout)",
        };
        assert!(named.contains(expected), "{named}");
    }
}
