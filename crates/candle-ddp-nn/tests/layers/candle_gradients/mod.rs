//! The gradients of all differentiable operations of candle_core and candle_nn against central differences in f64.
//!
//! Every case is run with contiguous, transposed and narrowed inputs, and with inputs that have other uses before and
//! after the operation. Most have several samples and channels. The table in this crate's README names the operations
//! whose gradients are not right. A test that fails after an update of candle may be good news.
mod attention;
mod convolutions;
mod elementwise;
mod indexing;
mod kinks;
mod layers;
mod measure;
mod ops;
mod replacements;
mod resampling;
mod shapes;

use candle_core::{DType, Result, Tensor};
use measure::{LAYOUTS, Numerical, measure};
use std::collections::BTreeSet;

/// The result of candle's backward pass for an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gradient {
    /// The numerical gradient; it may be absent where that is zero.
    Right,
    /// A wrong gradient, or a result that differs from the one for contiguous inputs.
    Wrong,
    /// No gradient and no error, although the result depends on the input.
    Missing,
    /// The backward pass returns an error.
    Error,
    /// The forward pass returns an error.
    Refused,
}
use Gradient::{Error, Missing, Refused, Right, Wrong};

/// Applies an operation to its inputs.
type Operation = Box<dyn Fn(&[Tensor]) -> Result<Tensor>>;

/// A differentiable operation with inputs and the expected gradient.
struct Case {
    /// The name in the documentation: methods of `Tensor` by name, everything else with its path.
    name: &'static str,
    /// Distinguishes this case from other cases of the operation.
    variant: &'static str,
    shapes: Vec<Vec<usize>>,
    operation: Operation,
    values: Values,
    /// dtype of the inputs.
    dtype: DType,
    /// Step of the differences, and error allowed relative to the largest derivative.
    precision: (f64, f64),
    /// One entry for each of `LAYOUTS`.
    expected: [Gradient; 3],
    /// Why the gradient is not right.
    reason: &'static str,
}

/// Values of the inputs: at least 0.2 away from 0, where many operations have a kink.
#[derive(Clone, Copy)]
enum Values {
    Both,
    Positive,
    /// These values, repeated in turn.
    These(&'static [f64]),
}

fn case<const N: usize>(
    name: &'static str,
    shapes: [&[usize]; N],
    operation: impl Fn([&Tensor; N]) -> Result<Tensor> + 'static,
) -> Case {
    Case {
        name,
        variant: "",
        shapes: shapes.iter().map(|shape| shape.to_vec()).collect(),
        operation: Box::new(move |inputs| operation(std::array::from_fn(|index| &inputs[index]))),
        values: Values::Both,
        dtype: DType::F64,
        precision: (1e-5, 2e-8),
        expected: [Right; 3],
        reason: "",
    }
}

impl Case {
    fn variant(self, variant: &'static str) -> Self {
        Self { variant, ..self }
    }

    fn positive(self) -> Self {
        Self { values: Values::Positive, ..self }
    }

    fn values(self, values: &'static [f64]) -> Self {
        Self { values: Values::These(values), ..self }
    }

    /// For operations that do not take f64.
    fn single(self) -> Self {
        Self { dtype: DType::F32, precision: (1e-2, 2e-3), ..self }
    }

    fn is(self, expected: Gradient, reason: &'static str) -> Self {
        Self { expected: [expected; 3], reason, ..self }
    }

    /// Expects another result for inputs that are not contiguous.
    fn strided(self, expected: Gradient) -> Self {
        Self { expected: [self.expected[0], expected, expected], ..self }
    }

    /// Expects another result for transposed inputs.
    fn transposed(self, expected: Gradient) -> Self {
        Self { expected: [self.expected[0], expected, self.expected[2]], ..self }
    }

    /// Whether the documentation need not mention this case. If an operation accepts only contiguous inputs, its error
    /// says so.
    fn is_trainable(&self) -> bool {
        self.expected[0] == Right && self.expected.iter().all(|gradient| matches!(gradient, Right | Refused))
    }
}

fn cases() -> Vec<Case> {
    [
        elementwise::cases(),
        shapes::cases(),
        indexing::cases(),
        convolutions::cases(),
        resampling::cases(),
        ops::cases(),
        attention::cases(),
        layers::cases(),
        replacements::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[test]
fn every_operation_is_differentiated_as_expected() {
    let mut unexpected = Vec::new();
    for case in cases() {
        let numerical = Numerical::of(&case);
        for layout in LAYOUTS {
            let expected = if layout.is_contiguous(&case) { case.expected[0] } else { case.expected[layout as usize] };
            let (actual, what) = measure(&case, layout, &numerical);
            if actual != expected {
                let Case { name, variant, reason, .. } = &case;
                unexpected.push(format!("{name} {variant} ({layout:?}): {actual:?} {what}, not {expected:?} {reason}"));
            }
        }
    }
    assert!(unexpected.is_empty(), "{} cases:\n{}", unexpected.len(), unexpected.join("\n"));
}

/// Returns the names in backticks; `path::{a, b}` gives two names.
fn names(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).flat_map(expand).collect()
}

fn expand(name: &str) -> Vec<String> {
    match name.split_once('{').zip(name.rsplit_once('}')) {
        Some(((path, _), (list, _))) => {
            let list = &list[path.len() + 1..];
            list.split(", ").map(|last| format!("{path}{last}")).collect()
        }
        None => vec![name.to_string()],
    }
}

#[test]
fn the_documentation_names_every_operation_that_is_not_trained_right() {
    let text = include_str!("../../../README.md");
    let section = text.split("## What candle does not train").nth(1).unwrap();
    let rows: Vec<Vec<&str>> =
        section.lines().filter(|line| line.starts_with("| `")).map(|line| line.split('|').collect()).collect();
    let cases = cases();
    let all: BTreeSet<String> = cases.iter().map(|case| case.name.to_string()).collect();
    let wrong: BTreeSet<String> =
        cases.iter().filter(|case| !case.is_trainable()).map(|case| case.name.to_string()).collect();
    let documented: BTreeSet<String> = rows.iter().flat_map(|row| names(row[1])).collect();
    let missing: Vec<_> = wrong.difference(&documented).collect();
    let right: Vec<_> = documented.difference(&wrong).collect();
    assert!(missing.is_empty() && right.is_empty(), "not documented: {missing:?}; documented and right: {right:?}");
    // The gradient of a replacement must be right.
    for row in &rows {
        assert!(row.len() == 5 && row[2].len() > 2 && row[3].len() > 2, "{row:?}");
        for name in names(row[3]) {
            assert!(all.contains(&name) && !wrong.contains(&name), "{name} is no replacement: {row:?}");
        }
    }
}
