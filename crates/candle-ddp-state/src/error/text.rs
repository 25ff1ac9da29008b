//! How messages show lists of names.
use candle_ddp_base::text::some;

/// `; {what} (3): a, b, c` for each list that is not empty; long ones are cut.
pub(super) fn list(lists: &[(&str, &[String])]) -> String {
    let mut text = String::new();
    for (what, names) in lists.iter().filter(|(_, names)| !names.is_empty()) {
        text += &format!("; {what} ({}): {}", names.len(), some(names));
    }
    text
}

/// One number, or a list.
pub(super) fn steps(numbers: &[u64]) -> String {
    match numbers {
        [number] => number.to_string(),
        _ => format!("{numbers:?}"),
    }
}

/// `on rank 2`, or `on any rank`.
pub(super) fn on_ranks(rank: Option<usize>) -> String {
    rank.map_or("on any rank".to_string(), |rank| format!("on rank {rank}"))
}

/// Advice for a rank that has no samples in a step.
pub(super) fn without_samples(rank: Option<usize>) -> &'static str {
    match rank {
        Some(_) => {
            ". A rank without samples in a step calls `backward_with(&zero, &[&ddp], Backward { count: Some(0.), .. })`, \
             and the others give their counts"
        }
        None => "",
    }
}

/// The number that is not finite, its place, and the remedy.
pub(super) fn non_finite(parameter: Option<&str>, rank: Option<usize>, value: &str, steps: u64) -> String {
    let what = match (parameter, rank) {
        (Some(parameter), Some(rank)) => format!("the gradient of {parameter} on rank {rank} contains {value}"),
        (Some(parameter), None) => format!(
            "the mean of the gradients of {parameter} over all ranks contains {value}, although the gradients of each rank are finite, \
             so it is too large for the dtype in which they are sent"
        ),
        (None, Some(rank)) => format!(
            "the loss on rank {rank} is {value}, although its gradients are finite, as when all targets of a cross entropy are ignored"
        ),
        (None, None) => format!("the gradients contain {value}"),
    };
    let row = if steps > 1 { format!(", and {steps} steps in a row were not finite") } else { String::new() };
    let place =
        rank.map_or("the inputs and the loss".to_string(), |rank| format!("the inputs and the loss of rank {rank}"));
    format!("{what}{row} (DdpOptions::on_non_finite): look at {place}, or lower the learning rate")
}

/// Few names as they are; many names as their longest common prefixes, as long as these are few: `encoder.0.* (16),
/// encoder.1.* (16), head`.
pub(super) fn by_prefix(names: &[String]) -> String {
    const FEW: usize = 8;
    let parts = |name: &str| name.split('.').count();
    let longest = names.iter().map(|name| parts(name)).max().unwrap_or(0);
    let groups = |depth: usize| {
        let mut groups: Vec<(String, usize)> = Vec::new();
        for name in names {
            let prefix = match parts(name) > depth {
                true => name.split('.').take(depth).chain(["*"]).collect::<Vec<_>>().join("."),
                false => name.clone(),
            };
            match groups.iter_mut().find(|(of, _)| *of == prefix) {
                Some((_, count)) => *count += 1,
                None => groups.push((prefix, 1)),
            }
        }
        groups
    };
    let groups = (1..=longest).rev().map(groups).find(|groups| groups.len() <= FEW).unwrap_or_else(|| groups(1));
    let shown: Vec<String> = groups
        .into_iter()
        .map(|(prefix, count)| if prefix.ends_with(".*") { format!("{prefix} ({count})") } else { prefix })
        .collect();
    some(&shown)
}

/// `rank 3`, or `ranks 1, 2, 5`.
pub(super) fn ranks_named(ranks: &[usize]) -> String {
    let names: Vec<_> = ranks.iter().map(usize::to_string).collect();
    format!("{} {}", if ranks.len() == 1 { "rank" } else { "ranks" }, some(&names))
}

/// `sample 17 of the dataset`, or `the batch of the samples 3, 8, 1`.
pub(super) fn samples(indices: &[usize]) -> String {
    match indices {
        [index] => format!("sample {index} of the dataset"),
        _ => format!("the batch of the samples {}", some(&indices.iter().map(usize::to_string).collect::<Vec<_>>())),
    }
}
