//! Gram-Schmidt orthogonalisation on any device.
use crate::Result;
use candle_core::{D, Tensor};

/// The share of a row's length that must remain after the earlier rows are projected out; anything below is rounding
/// error.
const INDEPENDENT: f64 = 1e-6;

/// Makes the rows orthogonal to each other and of length 1 by the Gram-Schmidt method; with `epsilon`, lengths are
/// slightly less. A row that depends on earlier ones becomes zeros. Does not wait for a GPU.
pub(super) fn orthonormal(rows: &Tensor, epsilon: f64) -> Result<Tensor> {
    let length = |row: &Tensor| row.sqr()?.sum_keepdim(D::Minus1)?.sqrt();
    let one_where_zero = |length: &Tensor| length + length.eq(0.0)?.to_dtype(length.dtype())?;
    let mut basis: Vec<Tensor> = Vec::with_capacity(rows.dim(0)?);
    let mut lengths: Vec<Tensor> = Vec::with_capacity(rows.dim(0)?);
    for row in 0..rows.dim(0)? {
        let row = rows.narrow(0, row, 1)?;
        // Squares of values far from 1 would leave the range of f32.
        let largest = row.abs()?.max_keepdim(D::Minus1)?;
        let mut row = row.broadcast_div(&one_where_zero(&largest)?)?;
        let before = length(&row)?;
        if !basis.is_empty() {
            let basis = Tensor::cat(&basis, 0)?;
            // The second pass removes the rounding errors of the first.
            for _ in 0..2 {
                row = (&row - row.matmul(&basis.t()?)?.matmul(&basis)?)?;
            }
        }
        let after = length(&row)?;
        let independent = after.gt(&(before * INDEPENDENT)?)?.to_dtype(row.dtype())?;
        basis.push(row.broadcast_div(&one_where_zero(&after)?)?.broadcast_mul(&independent)?);
        lengths.push((after * largest)?);
    }
    let basis = Tensor::cat(&basis, 0)?;
    if epsilon == 0.0 {
        return Ok(basis);
    }
    let lengths = Tensor::cat(&lengths, 0)?;
    Ok(basis.broadcast_mul(&(&lengths / (&lengths + epsilon)?)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn values(tensor: &Tensor) -> Vec<Vec<f32>> {
        tensor.to_vec2().unwrap()
    }

    #[test]
    fn rows_become_orthonormal_and_dependent_ones_zero() {
        for scale in [1.0, 1e-25, 1e25] {
            let rows = [[3f32, 0., 4., 0.], [6., 0., 8., 0.], [1., 1., 1., 1.], [0., 0., 0., 0.], [1., 2., 0., -1.]];
            let rows = (Tensor::new(&rows, &Device::Cpu).unwrap() * scale).unwrap();
            let basis = orthonormal(&rows, 0.0).unwrap();
            let products = values(&basis.matmul(&basis.t().unwrap()).unwrap());
            for (i, products) in products.iter().enumerate() {
                for (j, product) in products.iter().enumerate() {
                    let expected = if i == j && ![1, 3].contains(&i) { 1.0 } else { 0.0 };
                    assert!((product - expected).abs() < 1e-6, "{i}, {j}: {product}, scale {scale}");
                }
            }
            assert_eq!(values(&basis)[0], [0.6, 0., 0.8, 0.]);
        }
    }

    #[test]
    fn what_rounding_leaves_of_a_dependent_row_counts_as_nothing() {
        let value = |row: usize, column: usize| ((row * 37 + column * 11) as f32 * 0.7).sin();
        let mut rows: Vec<Vec<f32>> = (0..2).map(|row| (0..50).map(|column| value(row, column)).collect()).collect();
        rows.push((0..50).map(|column| 0.3 * rows[0][column] + 0.7 * rows[1][column]).collect());
        let basis = values(&orthonormal(&Tensor::new(rows, &Device::Cpu).unwrap(), 0.0).unwrap());
        assert_eq!(basis[2], [0.; 50]);
    }

    #[test]
    fn epsilon_is_added_to_the_length() {
        let rows = Tensor::new(&[[3f32, 4.]], &Device::Cpu).unwrap();
        assert_eq!(values(&orthonormal(&rows, 5.0).unwrap()), [[0.3, 0.4]]);
    }
}
