//! A layer as operations on tensors, step by step: on CUDA.
use super::cell::Cell;
use super::layer::Layer;
use super::steps::Steps;
use crate::linear::Linear;
use crate::view::{cat, narrow};
use candle_core::{Module, Result, Tensor};
use candle_ddp_tensor::accumulator;
use candle_ddp_tensor::function::argument;

impl Layer {
    /// What [`run`](Self::run) returns. 16 bits are calculated in f32, and rounded at the end.
    pub(super) fn by_steps<C: Cell>(
        &self,
        x: &Tensor,
        states: &[Tensor],
        steps: &Steps,
        cells: bool,
    ) -> Result<Tensor> {
        let (dtype, wide) = (x.dtype(), accumulator(x.dtype()));
        if dtype != wide {
            let cast = |x: &Tensor| argument(x).to_dtype(wide);
            let bias = |bias: &Option<Tensor>| bias.as_ref().map(cast).transpose();
            let (w_ih, w_hh) = (cast(&self.w_ih)?, cast(&self.w_hh)?);
            let layer = Self { w_ih, w_hh, b_ih: bias(&self.b_ih)?, b_hh: bias(&self.b_hh)? };
            let states = states.iter().map(cast).collect::<Result<Vec<_>>>()?;
            return layer.by_steps::<C>(&cast(x)?, &states, steps, cells)?.to_dtype(dtype);
        }
        let (batch, hidden) = (steps.batch(), self.hidden()?);
        let gates = Linear::new(self.w_ih.clone(), self.b_ih.clone()).forward(x)?;
        let recurrent = Linear::new(self.w_hh.clone(), self.b_hh.clone());
        let split = |x: &Tensor| -> Result<Vec<Tensor>> {
            (0..C::GATES).map(|gate| narrow(x, 1, gate * hidden, hidden)).collect()
        };
        let mut states = states.to_vec();
        let mut results = Vec::new();
        for (start, count) in steps.order() {
            let active = states.iter().map(|state| narrow(state, 0, 0, count)).collect::<Result<Vec<_>>>()?;
            let products = [narrow(&gates, 0, start, count)?, recurrent.forward(&active[0])?];
            let next = C::step(&split(&products[0])?, &split(&products[1])?, &active)?;
            results.push((start, next.clone()));
            let whole = |(next, state): (Tensor, &Tensor)| match count == batch {
                true => Ok(next),
                false => cat(&[&next, &narrow(state, 0, count, batch - count)?], 0),
            };
            states = next.into_iter().zip(&states).map(whole).collect::<Result<_>>()?;
        }
        results.sort_by_key(|(start, _)| *start);
        let outputs = results.iter().map(|(_, next)| &next[0]).chain(&states);
        let cells = results.iter().filter(|_| cells).map(|(_, next)| &next[C::STATES - 1]);
        cat(&outputs.chain(cells).collect::<Vec<_>>(), 0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::cell::{Gru, Lstm};
    use super::super::steps::Packing;
    use super::*;
    use candle_core::{Device, Var};

    fn numbers(shape: &[usize], step: f64) -> Var {
        let values: Vec<f64> = (0..shape.iter().product()).map(|index| (index as f64 * step).sin()).collect();
        Var::from_tensor(&Tensor::from_vec(values, shape, &Device::Cpu).unwrap()).unwrap()
    }

    fn check<C: Cell>() {
        let packing = Packing::new(&[2, 4, 1, 4], 4, |step, sequence| 4 * step + sequence, &Device::Cpu).unwrap();
        let width = 3 * C::GATES;
        let vars = [&[11, 2][..], &[4, 3], &[4, 3], &[width, 2], &[width, 3], &[width], &[width]]
            .map(|shape| numbers(shape, 0.7));
        let [x, h, c, w_ih, w_hh, b_ih, b_hh] = vars.each_ref().map(|var| var.as_tensor().clone());
        let states = &[h, c][..C::STATES];
        for (biases, is_reverse, cells) in [([None, None], false, true), ([Some(b_ih), Some(b_hh)], true, false)] {
            let [b_ih, b_hh] = biases;
            let layer = Layer { w_ih: w_ih.clone(), w_hh: w_hh.clone(), b_ih, b_hh };
            let steps = packing.steps.directed(is_reverse);
            let results = [Layer::run::<C>, Layer::by_steps::<C>].map(|run| {
                let y = run(&layer, &x, states, &steps, cells && C::STATES > 1).unwrap();
                let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
                let gradients = vars.iter().filter_map(|var| grads.get(var).cloned());
                let all: Vec<Tensor> = std::iter::once(y).chain(gradients).collect();
                all.iter().map(|tensor| tensor.flatten_all().unwrap().to_vec1::<f64>().unwrap()).collect::<Vec<_>>()
            });
            assert_eq!(results[0].len(), results[1].len());
            for (one, steps) in results[0].iter().zip(&results[1]) {
                assert_eq!(one.len(), steps.len());
                let error = one.iter().zip(steps).map(|(one, steps)| (one - steps).abs()).fold(0., f64::max);
                assert!(error < 1e-12, "{}: {error}", C::NAME);
            }
        }
    }

    #[test]
    fn steps_are_those_of_one_operation() {
        check::<Lstm>();
        check::<Gru>();
    }
}
