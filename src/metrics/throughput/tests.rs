use super::super::TransformerFlops;
use super::*;
use crate::spawn;

const GPT2: TransformerFlops = TransformerFlops {
    parameters: 123_551_232,
    frozen_parameters: 0,
    layers: 12,
    heads: 12,
    head_dim: 64,
    context: 1024,
};

/// Work of the ranks of a group, without sleeping: the milliseconds of each step are given.
fn run(
    ranks: usize,
    options: ThroughputOptions,
    work: impl Fn(&ProcessGroup, &mut Clocked) -> Result<()> + Sync + Send,
) {
    spawn(ranks, |pg| {
        let throughput = Throughput::new(&pg, options)?;
        let now = throughput.began;
        work(&pg, &mut Clocked { throughput, now })
    })
    .unwrap();
}

struct Clocked {
    throughput: Throughput,
    now: Instant,
}

impl Clocked {
    fn step(&mut self, milliseconds: u64, units: f64) {
        self.now += Duration::from_millis(milliseconds);
        self.throughput.end_step(units, self.now);
    }
}

#[test]
fn steps_count_after_the_warm_up_and_within_the_window() {
    let options = ThroughputOptions { warmup_steps: 2, window: 3, ..Default::default() };
    run(1, options, |pg, clocked| {
        // Nothing is measured yet.
        for milliseconds in [5000, 3000] {
            clocked.step(milliseconds, 1e9);
            let rate = clocked.throughput.rate();
            assert_eq!((rate.steps, rate.units, rate.seconds, rate.mfu), (0, 0., 0., None));
            assert!(rate.units_per_second.is_nan() && rate.flops_per_second.is_none());
        }
        for (milliseconds, units) in [(100, 10.), (200, 10.), (300, 10.), (500, 30.)] {
            clocked.step(milliseconds, units);
        }
        let rate = clocked.throughput.rate();
        assert_eq!((rate.steps, rate.units, rate.seconds, rate.units_per_second), (3, 50., 1., 50.));
        let all = clocked.throughput.compute(pg)?;
        assert_eq!((all.steps, all.units, all.seconds, all.units_per_second), (4, 60., 1.1, 60. / 1.1));
        // A step without units, such as one that was left out, takes its time.
        (0..3).for_each(|_| clocked.step(100, 0.));
        assert_eq!(clocked.throughput.rate().units_per_second, 0.);
        Ok(())
    });
}

#[test]
fn pauses_do_not_count_wherever_they_are() {
    run(1, ThroughputOptions { warmup_steps: 0, ..Default::default() }, |_, clocked| {
        for paused in [0, 400, 0, 700] {
            clocked.throughput.paused += Duration::from_millis(paused);
            clocked.step(100 + paused, 25.);
        }
        assert_eq!(clocked.throughput.rate().units_per_second, 250.);
        // The real clock.
        let before = Instant::now();
        let inside = clocked.throughput.pause(|| {
            let began = Instant::now();
            while began.elapsed() < Duration::from_micros(1) {}
            began.elapsed()
        });
        assert!((inside..=before.elapsed()).contains(&clocked.throughput.paused));
        // More pause than time is no time.
        clocked.throughput.paused = Duration::from_secs(1000);
        clocked.throughput.step(25);
        let rate = clocked.throughput.rate();
        assert_eq!((rate.steps, rate.seconds), (5, 0.4));
        Ok(())
    });
}

#[test]
fn no_time_is_not_a_number() {
    let options =
        ThroughputOptions { warmup_steps: 0, flops_per_unit: Some(1.), peak_flops: Some(1.), ..Default::default() };
    run(1, options, |_, clocked| {
        clocked.step(0, 10.);
        let rate = clocked.throughput.rate();
        assert_eq!((rate.steps, rate.units), (1, 10.));
        assert!(
            rate.units_per_second.is_nan() && rate.flops_per_second.unwrap().is_nan() && rate.mfu.unwrap().is_nan()
        );
        Ok(())
    });
}

/// nanoGPT's notebook transformer_sizing: 100 pieces of 1024 tokens in 755 ms on an A100 are 37.14 %. With more ranks, each
/// of which does as much, so are they.
#[test]
fn the_utilization_is_that_of_nanogpt_on_any_number_of_ranks() {
    let (flops_per_unit, peak_flops) = (Some(GPT2.per_token()), Some(312e12));
    for ranks in [1, 2, 4] {
        run(
            ranks,
            ThroughputOptions { warmup_steps: 0, flops_per_unit, peak_flops, ..Default::default() },
            |pg, clocked| {
                let units = ranks as f64 * 102_400.;
                (0..30).for_each(|_| clocked.step(755, units));
                for rate in [clocked.throughput.rate(), clocked.throughput.compute(pg)?] {
                    assert!((rate.units_per_second / units * 0.755 - 1.).abs() < 1e-12, "{rate:?}");
                    let mfu = rate.mfu.unwrap();
                    assert!((mfu - 0.3714).abs() < 1e-4 && mfu == rate.flops_per_second.unwrap() / 312e12, "{rate:?}");
                }
                Ok(())
            },
        );
    }
}

#[test]
fn unequal_ranks_are_added_up_over_the_slowest() {
    run(3, ThroughputOptions { warmup_steps: 0, flops_per_unit: Some(6.), ..Default::default() }, |pg, clocked| {
        // 10, 20 and 30 units in 1, 2 and 3 seconds; rank 0 has a step less.
        let own = 10 * (pg.rank() + 1);
        for _ in 0..pg.rank().min(1) + 1 {
            clocked.throughput.step(own);
        }
        assert_eq!(clocked.throughput.all.units, (own * 3 * (pg.rank().min(1) + 1)) as f64);
        clocked.throughput.all.time = Duration::from_secs(pg.rank() as u64 + 1);
        let rate = clocked.throughput.compute(pg)?;
        assert_eq!((rate.steps, rate.units, rate.seconds), (2, 110., 3.));
        assert_eq!(rate.flops_per_second, Some(110. / 3. / 3. * 6.));

        let alone = pg.new_group(&[pg.rank()])?;
        let error = alone.map(|alone| clocked.throughput.compute(&alone).unwrap_err().to_string());
        assert!(error.as_ref().is_none_or(|error| error.contains("must have 3 ranks")), "{error:?}");
        Ok(())
    });
}

#[test]
fn options_that_give_no_number_are_refused() {
    let good = ThroughputOptions { flops_per_unit: Some(1.), ..Default::default() };
    let bad = [
        ("window", ThroughputOptions { window: 0, ..good }),
        ("flops_per_unit", ThroughputOptions { flops_per_unit: Some(f64::NAN), ..good }),
        ("flops_per_unit", ThroughputOptions { flops_per_unit: Some(0.), ..good }),
        ("peak_flops", ThroughputOptions { peak_flops: Some(f64::INFINITY), ..good }),
        ("peak_flops", ThroughputOptions { peak_flops: Some(-1.), ..good }),
        ("peak_flops", ThroughputOptions { peak_flops: Some(1.), ..Default::default() }),
    ];
    spawn(1, |pg| {
        for (name, options) in bad {
            match Throughput::new(&pg, options) {
                Err(Error::InvalidArgument { argument, .. }) if argument == name => {}
                other => panic!("{options:?}: {other:?}"),
            }
        }
        Throughput::new(&pg, good).map(drop)
    })
    .unwrap();
}
