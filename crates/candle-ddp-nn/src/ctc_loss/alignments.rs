//! The forward-backward algorithm of Graves et al., "Connectionist Temporal Classification" (2006), section 4.1, in logarithms.
//!
//! An alignment goes through states: a blank, the first label, a blank, …, the last label, a blank. At each time it stays, goes to the
//! next state, or passes over a blank between two different labels. It begins in one of the first two states, and ends in one of the
//! last two.

/// All alignments of a sample's labels with its times.
pub(super) struct Alignments {
    labels: Vec<usize>,
    blank: usize,
    /// The number of times.
    pub(super) length: usize,
    /// For each time and state, ln of the probability of all beginnings of alignments that are in this state at this time.
    beginnings: Vec<f64>,
    /// −ln of the probability of all alignments.
    pub(super) loss: f64,
}

impl Alignments {
    /// `log_prob` returns ln of the probability of a class at a time.
    pub(super) fn new(labels: Vec<usize>, length: usize, blank: usize, log_prob: impl Fn(usize, usize) -> f64) -> Self {
        let mut this = Self { labels, blank, length, beginnings: Vec::new(), loss: 0.0 };
        let states = this.states();
        let mut beginnings = vec![f64::NEG_INFINITY; length * states];
        for time in 0..length {
            let (before, now) = beginnings.split_at_mut(time * states);
            let before = before.rchunks(states).next();
            for (state, now) in now[..states].iter_mut().enumerate() {
                let before = match before {
                    None if state < 2 => 0.0,
                    None => f64::NEG_INFINITY,
                    Some(before) => {
                        let passed =
                            if state >= 2 && this.is_passed(state - 1) { before[state - 2] } else { f64::NEG_INFINITY };
                        ln_sum([before[state], if state > 0 { before[state - 1] } else { f64::NEG_INFINITY }, passed])
                    }
                };
                *now = before + log_prob(time, this.class(state));
            }
        }
        let last = beginnings.rchunks(states).next();
        this.loss = match last {
            Some(last) => -ln_sum([
                last[states - 1],
                if states > 1 { last[states - 2] } else { f64::NEG_INFINITY },
                f64::NEG_INFINITY,
            ]),
            // Without times, there is one alignment of nothing.
            None if this.labels.is_empty() => 0.0,
            None => f64::INFINITY,
        };
        this.beginnings = beginnings;
        this
    }

    /// The number of states.
    pub(super) fn states(&self) -> usize {
        2 * self.labels.len() + 1
    }

    fn class(&self, state: usize) -> usize {
        if state.is_multiple_of(2) { self.blank } else { self.labels[state / 2] }
    }

    /// The classes of all states.
    pub(super) fn classes(&self) -> impl Iterator<Item = usize> {
        (0..self.states()).map(|state| self.class(state))
    }

    /// Whether alignments may pass over this state: a blank between two different labels.
    fn is_passed(&self, state: usize) -> bool {
        state.is_multiple_of(2) && self.class(state - 1) != self.class(state + 1)
    }

    /// For each time and state, the share of the alignments that are in this state at this time, by probability. Without an alignment,
    /// the numbers mean nothing.
    pub(super) fn occupied(&self, log_prob: impl Fn(usize, usize) -> f64) -> Vec<f64> {
        let states = self.states();
        let mut occupied = vec![0.0; self.length * states];
        // ln of the probability of all ends of alignments from this state on, without this time, and with it.
        let (mut ends, mut with_now) = (vec![f64::NEG_INFINITY; states], vec![f64::NEG_INFINITY; states]);
        for time in (0..self.length).rev() {
            for (state, end) in ends.iter_mut().enumerate() {
                let next = |by: usize| with_now.get(state + by).copied().unwrap_or(f64::NEG_INFINITY);
                *end = if time + 1 < self.length {
                    let passed = state + 2 < states && self.is_passed(state + 1);
                    ln_sum([next(0), next(1), if passed { next(2) } else { f64::NEG_INFINITY }])
                } else if state + 2 >= states {
                    0.0
                } else {
                    f64::NEG_INFINITY
                };
            }
            for state in 0..states {
                let place = time * states + state;
                occupied[place] = (self.beginnings[place] + ends[state] + self.loss).exp();
                with_now[state] = ends[state] + log_prob(time, self.class(state));
            }
        }
        occupied
    }
}

/// ln of the sum of the numbers whose logarithms these are.
fn ln_sum(logarithms: [f64; 3]) -> f64 {
    let largest = logarithms.into_iter().fold(f64::NEG_INFINITY, f64::max);
    if largest == f64::NEG_INFINITY {
        return logarithms.into_iter().sum(); // NaN if one is
    }
    largest + logarithms.into_iter().map(|logarithm| (logarithm - largest).exp()).sum::<f64>().ln()
}
