//! How matrices lie in memory.

/// The layout of a matrix in memory: the distances from one row, and from one column, to the next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Strides {
    pub(crate) row: usize,
    pub(crate) column: usize,
}

impl Strides {
    /// Row by row, each of `columns` elements.
    pub(crate) fn rows(columns: usize) -> Self {
        Self { row: columns, column: 1 }
    }

    /// The transpose of a matrix that lies row by row in rows of `columns` elements.
    pub(crate) fn transposed(columns: usize) -> Self {
        Self { row: 1, column: columns }
    }

    /// The number of elements that a matrix spans.
    pub(super) fn span(self, rows: usize, columns: usize) -> usize {
        if rows == 0 || columns == 0 {
            return 0;
        }
        // More than any slice has, if it cannot be counted.
        let [down, across] = [(rows - 1).saturating_mul(self.row), (columns - 1).saturating_mul(self.column)];
        down.saturating_add(across).saturating_add(1)
    }
}
