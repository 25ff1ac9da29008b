//! Checks every public function that takes a tensor: it carries the tensor's gradient, refuses the tensor, or says in its
//! documentation that gradients end there. The functions come from `docs/public-api*.txt`; variables and `GradStore`s, where
//! a graph begins and ends, are no such tensors.
mod listing;
mod rows;

use crate::common::tensor;
use candle_core::{Tensor, Var};
use candle_ddp::Result;
use std::collections::BTreeSet;
use std::path::Path;

/// Makes tensors through which gradients flow to one variable.
struct Tracked(Var);

impl Tracked {
    /// A tensor of at most 600 elements.
    fn of(&self, shape: &[usize]) -> Tensor {
        self.0.narrow(0, 0, shape.iter().product()).unwrap().reshape(shape).unwrap()
    }
}

enum Answer {
    /// The gradient of the result reaches the argument, which `call` passes tracked.
    Carries(fn(&Tracked) -> Result<Tensor>),
    /// An error, which contains this text.
    Refuses(&'static str, fn(&Tracked) -> Result<Tensor>),
    /// The documentation of the function, in this file, says that gradients end there.
    Ends(&'static str),
    /// The call is in a test of this file.
    Test { file: &'static str, call: String },
}

/// The paths of one function, an argument of it, and the answer.
struct Row(Vec<String>, &'static str, Answer);

fn read(file: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file))
        .unwrap_or_else(|error| panic!("{file}: {error}"))
}

#[test]
fn every_function_has_an_answer() {
    let public = listing::arguments();
    assert!(public.len() > 150, "{} arguments: the listing must be read in another way", public.len());
    let mut answered = BTreeSet::new();
    for Row(paths, argument, _) in rows::all() {
        for path in paths {
            let what = format!("{path}, {argument}: two rows");
            assert!(answered.insert((path, argument.to_string())), "{what}");
        }
    }
    let missing: Vec<_> = public.difference(&answered).collect();
    assert!(missing.is_empty(), "carries, refuses or ends gradients? {missing:#?}");
    let surplus: Vec<_> = answered.difference(&public).collect();
    assert!(surplus.is_empty(), "not in docs/public-api*.txt: {surplus:#?}");
}

#[test]
fn every_answer_is_true() {
    for Row(paths, argument, answer) in rows::all() {
        let what = format!("{}, {argument}", paths[0]);
        let tracked = Tracked(Var::from_tensor(&tensor(&[600], 7)).unwrap());
        match answer {
            Answer::Carries(call) => {
                let result = call(&tracked).unwrap_or_else(|error| panic!("{what}: {error}"));
                // Not all sums of results depend on the argument: sums of softmax's results do not.
                let grads = (result.sqr().unwrap() + &result).unwrap().sum_all().unwrap().backward().unwrap();
                let gradient = grads.get(&tracked.0).unwrap_or_else(|| panic!("{what}: the gradient is gone"));
                let largest = gradient.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
                assert!(largest.is_finite() && largest > 1e-6, "{what}: {largest}");
            }
            Answer::Refuses(text, call) => {
                let error = call(&tracked).err().unwrap_or_else(|| panic!("{what}: it was taken")).to_string();
                assert!(error.contains(text), "{what}: {error}");
            }
            Answer::Ends(file) => {
                let (_, name) = paths[0].rsplit_once("::").unwrap();
                let documented = listing::documentation(&read(file), name);
                let says = |text: &String| text.contains("Gradients end here");
                assert!(!documented.is_empty() && documented.iter().all(says), "{what}, {file}: {documented:#?}");
            }
            Answer::Test { file, call } => assert!(read(file).contains(&call), "{what}: {file} has no {call}"),
        }
    }
}
