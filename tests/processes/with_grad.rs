//! Collectives with a gradient in programs: any number of ranks trains as one process does on the whole batch.
use crate::common::{launch_example, succeed};

/// The numbers that a run on `world_size` ranks prints.
fn printed(world_size: usize, program: &str, arguments: &[&str]) -> Vec<f64> {
    let [stdout, _] = succeed(launch_example(program, world_size).args(arguments));
    stdout.split([' ', '\n']).filter_map(|word| word.parse().ok()).collect()
}

fn trains_as_one(program: &str, arguments: &[&str], world_sizes: &[usize]) -> Vec<f64> {
    let arguments = [&["--dtype", "f64"], arguments].concat();
    let one = printed(1, program, &arguments);
    for &world_size in world_sizes {
        let several = printed(world_size, program, &arguments);
        assert_eq!(one.len(), several.len());
        for (one, several) in one.iter().zip(&several) {
            assert!((one - several).abs() <= 1e-12 * one.abs(), "{world_size} ranks: {several}, not {one}");
        }
    }
    one
}

#[test]
fn simclr_and_clip_train_as_one_process() {
    for (arguments, world_sizes) in
        [(&["--steps", "40"][..], &[2, 4][..]), (&["--steps", "40", "--objective", "clip"], &[3])]
    {
        let numbers = trains_as_one("contrastive", arguments, world_sizes);
        let [loss_of_20, loss_of_40, found, count] = numbers[..] else { panic!("{numbers:?}") };
        // By chance, 1 of 48 is found.
        assert!(loss_of_40 < loss_of_20 && found > 20.0 && count == 48.0, "{numbers:?}");
    }
}

#[test]
fn experts_on_several_ranks_train_as_on_one() {
    let losses = trains_as_one("mixture_of_experts", &["--steps", "40"], &[2, 3, 4]);
    assert!(losses.len() == 2 && losses[1] < losses[0], "{losses:?}");
}

#[test]
fn a_batch_that_cannot_be_divided_is_refused() {
    let output = launch_example("contrastive", 2).args(["--batch-size", "5"]).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("a multiple of the number of ranks, 2, not 5"), "{stderr}");
}

/// On 4 ranks, each of two sequences is spread over two.
#[test]
fn sequences_that_are_spread_over_ranks_train_as_on_one() {
    let losses = trains_as_one("long_sequences", &["--steps", "20"], &[2]);
    assert!(losses.len() == 2 && losses[1] < 0.9 * losses[0], "{losses:?}");
    let program = ["--dtype", "f64", "--steps", "20", "--shard", "--sequence-ranks", "2"];
    for (several, one) in printed(4, "long_sequences", &program).iter().zip(&losses) {
        assert!((several - one).abs() <= 1e-12 * one, "{several}, not {one}");
    }
}
