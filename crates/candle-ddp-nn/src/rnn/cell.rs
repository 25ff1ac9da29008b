//! The cells of LSTM and GRU between products: vectors of gates.
use crate::activation::sigmoid;
use candle_core::WithDType;
use candle_ddp_tensor::kernels::Kernel;
use candle_ddp_tensor::{Element, Real, vectorise};

/// The elementwise part of a step, of some rows. `hidden` is the length of a state.
pub(super) trait Cell: Send + Sync + 'static {
    const NAME: &'static str;
    /// Its arguments, for messages.
    const INPUT: &'static str;
    const STATE: &'static str;
    const LENGTHS: &'static str;
    /// The number of gates.
    const GATES: usize;
    /// The number of states: h, and c if there is one.
    const STATES: usize;
    /// Whether the recurrent product has another gradient than the product of the input.
    const DIFFERS: bool;
    /// The kernels of a step and of its gradient.
    const KERNELS: [Kernel; 2];

    /// Keeps what the backward pass needs and `forward` changes, `hidden` elements per row.
    fn keep<R: Real>(hidden: usize, recurrent: &[R], c: &[R], kept: &mut [R]);

    /// Turns both products into gates (in `gates`), and the states into the next ones.
    fn forward<R: Real>(hidden: usize, gates: &mut [R], recurrent: &[R], h: &mut [R], c: &mut [R]);

    /// Turns the gradients of the next states into those of the states, as far as these do not come from the recurrent product, and
    /// writes the gradients of the products.
    fn backward<T: Element>(
        hidden: usize,
        kept: [&[T]; 3],
        d_states: [&mut [T::Real]; 2],
        d_products: [&mut [T::Real]; 2],
    );
}

/// Gates: input, forget, cell, output.
#[derive(Clone, Debug)]
pub(super) struct Lstm;

/// Gates: reset, update, new.
#[derive(Clone, Debug)]
pub(super) struct Gru;

impl Cell for Lstm {
    const NAME: &'static str = "LSTM";
    const INPUT: &'static str = "the input of LSTM";
    const STATE: &'static str = "the state of LSTM";
    const LENGTHS: &'static str = "the lengths of LSTM";
    const GATES: usize = 4;
    const STATES: usize = 2;
    const DIFFERS: bool = false;
    const KERNELS: [Kernel; 2] = [Kernel::LstmStep, Kernel::LstmGradient];

    fn keep<R: Real>(_: usize, _: &[R], c: &[R], kept: &mut [R]) {
        kept.copy_from_slice(c);
    }

    fn forward<R: Real>(hidden: usize, gates: &mut [R], recurrent: &[R], h: &mut [R], c: &mut [R]) {
        vectorise!(|| {
            let rows = gates.chunks_exact_mut(4 * hidden).zip(recurrent.chunks_exact(4 * hidden));
            for ((gates, recurrent), (h, c)) in rows.zip(h.chunks_exact_mut(hidden).zip(c.chunks_exact_mut(hidden))) {
                let ([i, f, g, o], [ri, rf, rg, ro]) = (split_mut(hidden, gates), split(hidden, recurrent));
                for at in 0..hidden {
                    i[at] = sigmoid(i[at] + ri[at]);
                    f[at] = sigmoid(f[at] + rf[at]);
                    g[at] = (g[at] + rg[at]).tanh();
                    o[at] = sigmoid(o[at] + ro[at]);
                    c[at] = f[at] * c[at] + i[at] * g[at];
                    h[at] = o[at] * c[at].tanh();
                }
            }
        });
    }

    /// Kept are the gates, the earlier c, and the earlier h.
    fn backward<T: Element>(
        hidden: usize,
        [gates, earlier, _]: [&[T]; 3],
        [dh, dc]: [&mut [T::Real]; 2],
        [d_gates, _]: [&mut [T::Real]; 2],
    ) {
        vectorise!(|| {
            let one = T::Real::from_f64(1.0);
            let rows = gates.chunks_exact(4 * hidden).zip(earlier.chunks_exact(hidden));
            let states = dh.chunks_exact_mut(hidden).zip(dc.chunks_exact_mut(hidden));
            for (((gates, earlier), (dh, dc)), d_gates) in rows.zip(states).zip(d_gates.chunks_exact_mut(4 * hidden)) {
                let ([i, f, g, o], [di, df, dg, d_o]) = (split(hidden, gates), split_mut(hidden, d_gates));
                for at in 0..hidden {
                    let [i, f, g, o] = [i[at].widen(), f[at].widen(), g[at].widen(), o[at].widen()];
                    let earlier = earlier[at].widen();
                    let tanh = (f * earlier + i * g).tanh();
                    let d = dc[at] + dh[at] * o * (one - tanh * tanh);
                    di[at] = d * g * i * (one - i);
                    df[at] = d * earlier * f * (one - f);
                    dg[at] = d * i * (one - g * g);
                    d_o[at] = dh[at] * tanh * o * (one - o);
                    dc[at] = d * f;
                    dh[at] = T::Real::default();
                }
            }
        });
    }
}

impl Cell for Gru {
    const NAME: &'static str = "GRU";
    const INPUT: &'static str = "the input of GRU";
    const STATE: &'static str = "the state of GRU";
    const LENGTHS: &'static str = "the lengths of GRU";
    const GATES: usize = 3;
    const STATES: usize = 1;
    const DIFFERS: bool = true;
    const KERNELS: [Kernel; 2] = [Kernel::GruStep, Kernel::GruGradient];

    /// The new gate's recurrent product, which the reset gate multiplies.
    fn keep<R: Real>(hidden: usize, recurrent: &[R], _: &[R], kept: &mut [R]) {
        let rows = kept.chunks_exact_mut(hidden).zip(recurrent.chunks_exact(3 * hidden));
        rows.for_each(|(kept, row)| kept.copy_from_slice(&row[2 * hidden..]));
    }

    fn forward<R: Real>(hidden: usize, gates: &mut [R], recurrent: &[R], h: &mut [R], _: &mut [R]) {
        vectorise!(|| {
            let rows = gates.chunks_exact_mut(3 * hidden).zip(recurrent.chunks_exact(3 * hidden));
            for ((gates, recurrent), h) in rows.zip(h.chunks_exact_mut(hidden)) {
                let ([r, z, n], [rr, rz, rn]) = (split_mut(hidden, gates), split(hidden, recurrent));
                for at in 0..hidden {
                    r[at] = sigmoid(r[at] + rr[at]);
                    z[at] = sigmoid(z[at] + rz[at]);
                    n[at] = (n[at] + r[at] * rn[at]).tanh();
                    h[at] = (h[at] - n[at]) * z[at] + n[at];
                }
            }
        });
    }

    /// Kept are the gates, the new gate's recurrent product, and the earlier h.
    fn backward<T: Element>(
        hidden: usize,
        [gates, products, earlier]: [&[T]; 3],
        [dh, _]: [&mut [T::Real]; 2],
        [d_gates, d_recurrent]: [&mut [T::Real]; 2],
    ) {
        vectorise!(|| {
            let one = T::Real::from_f64(1.0);
            let kept =
                gates.chunks_exact(3 * hidden).zip(products.chunks_exact(hidden).zip(earlier.chunks_exact(hidden)));
            let results = d_gates.chunks_exact_mut(3 * hidden).zip(d_recurrent.chunks_exact_mut(3 * hidden));
            for (((gates, (product, earlier)), dh), (d_gates, d_recurrent)) in
                kept.zip(dh.chunks_exact_mut(hidden)).zip(results)
            {
                let [r, z, n] = split(hidden, gates);
                let ([dr, dz, dn], [rr, rz, rn]) = (split_mut(hidden, d_gates), split_mut(hidden, d_recurrent));
                for at in 0..hidden {
                    let [r, z, n] = [r[at].widen(), z[at].widen(), n[at].widen()];
                    let d = dh[at] * (one - z) * (one - n * n);
                    dn[at] = d;
                    rn[at] = d * r;
                    let d_reset = d * product[at].widen() * r * (one - r);
                    (dr[at], rr[at]) = (d_reset, d_reset);
                    let d_update = dh[at] * (earlier[at].widen() - n) * z * (one - z);
                    (dz[at], rz[at]) = (d_update, d_update);
                    dh[at] *= z;
                }
            }
        });
    }
}

/// The gates of a row.
#[inline(always)]
fn split<E, const N: usize>(hidden: usize, row: &[E]) -> [&[E]; N] {
    std::array::from_fn(
        #[inline(always)]
        |gate| &row[gate * hidden..][..hidden],
    )
}

/// The gates of a row.
#[inline(always)]
fn split_mut<E, const N: usize>(hidden: usize, mut row: &mut [E]) -> [&mut [E]; N] {
    std::array::from_fn(
        #[inline(always)]
        |_| {
            let (gate, rest) = std::mem::take(&mut row).split_at_mut(hidden);
            row = rest;
            gate
        },
    )
}
