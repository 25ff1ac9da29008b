//! The kernels that each operation launches, and their order; the same on a GPU and on the test machine without one.
use super::launches::Arguments;
use super::operands::{Extent, Rule};
use super::source::Kernel;
use super::table::{Entry, Table};
use crate::Result;
use candle_core::DType;

/// Executes launches in order.
pub trait Machine {
    /// A table that kernels can read.
    type Words;
    /// Numbers that kernels write.
    type Numbers;

    /// Returns the words in the machine's memory.
    fn upload(&self, words: &[u64]) -> Result<Self::Words>;

    /// Memory for `count` numbers, whose values are undefined.
    fn numbers(&self, count: usize) -> Result<Self::Numbers>;

    /// Copies `values` to the beginning of `numbers`.
    fn write(&self, numbers: &mut Self::Numbers, values: &[f64]) -> Result<()>;

    /// Returns the first `count` numbers after all launched work has completed.
    fn read(&self, numbers: &Self::Numbers, count: usize) -> Result<Vec<f64>>;

    /// Returns the address of `numbers` for kernels. It is valid as long as `numbers` lives.
    fn address(&self, numbers: &Self::Numbers) -> u64;

    /// Launches a kernel with a table that was uploaded.
    fn launch(
        &self,
        kernel: (Kernel, DType),
        blocks: u32,
        table: (&Self::Words, &Table),
        numbers: Option<&mut Self::Numbers>,
    ) -> Result<()>;

    /// Launches a kernel whose arguments are passed by value.
    fn launch_by_value(&self, kernel: (Kernel, DType), blocks: u32, arguments: &Arguments) -> Result<()>;
}

/// Updates parameters of `dtype`, each of which is one entry.
pub fn update_whole<M: Machine>(machine: &M, rule: Rule, dtype: DType, entries: &[Entry]) -> Result<()> {
    let table = &Table::new(entries)?;
    if table.chunks == 0 {
        return Ok(());
    }
    let words = &machine.upload(&table.words)?;
    let launch = |kernel, sums| machine.launch((kernel, dtype), table.chunks, (words, table), sums);
    match rule {
        Rule::Adam => launch(Kernel::Adam, None),
        Rule::Sgd => launch(Kernel::Sgd, None),
        Rule::Lamb => {
            let mut sums = lamb_sums(machine, dtype, (words, table))?;
            launch(Kernel::LambUpdate, Some(&mut sums))
        }
    }
}

fn lamb_sums<M: Machine>(machine: &M, dtype: DType, table: (&M::Words, &Table)) -> Result<M::Numbers> {
    let Table { parts, chunks, .. } = *table.1;
    let mut sums = machine.numbers(2 * (parts as usize + chunks as usize))?;
    machine.launch((Kernel::LambMoments, dtype), chunks, table, Some(&mut sums))?;
    machine.launch((Kernel::LambSums, dtype), parts, table, Some(&mut sums))?;
    Ok(sums)
}

/// Launches the sums that [`update`] needs, if any. [`read_sums`] returns those of each entry.
pub fn prepare<M: Machine>(machine: &M, rule: Rule, dtype: DType, entries: &[Entry]) -> Result<Option<M::Numbers>> {
    let table = Table::new(entries)?;
    if rule != Rule::Lamb || table.chunks == 0 {
        return Ok(None);
    }
    lamb_sums(machine, dtype, (&machine.upload(&table.words)?, &table)).map(Some)
}

pub fn read_sums<M: Machine>(machine: &M, sums: Option<&M::Numbers>, entries: usize) -> Result<Vec<[f64; 2]>> {
    let Some(sums) = sums else { return Ok(vec![[0.; 2]; entries]) };
    Ok(machine.read(sums, 2 * entries)?.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect())
}

/// Updates parts of parameters; `sums` has the sums over the whole parameter for each part.
pub fn update<M: Machine>(machine: &M, rule: Rule, dtype: DType, entries: &[Entry], sums: &[[f64; 2]]) -> Result<()> {
    if rule != Rule::Lamb {
        return update_whole(machine, rule, dtype, entries);
    }
    let table = &Table::new(entries)?;
    if table.chunks == 0 {
        return Ok(());
    }
    let words = &machine.upload(&table.words)?;
    let mut numbers = machine.numbers(2 * entries.len())?;
    machine.write(&mut numbers, &sums.concat())?;
    machine.launch((Kernel::LambUpdate, dtype), table.chunks, (words, table), Some(&mut numbers))
}

/// Launches the measurement of all entries together; [`read_extent`] returns it.
pub fn measure<M: Machine>(machine: &M, dtype: DType, entries: &[Entry]) -> Result<Option<M::Numbers>> {
    measured(machine, Kernel::Measure, dtype, entries)
}

/// Multiplies the elements by the first scalar. [`read_extent`] returns their magnitude after the multiplication.
pub fn rescale_measured<M: Machine>(machine: &M, dtype: DType, entries: &[Entry]) -> Result<Option<M::Numbers>> {
    measured(machine, Kernel::Rescale, dtype, entries)
}

/// Measures all entries together, and scales their parameters, which are their gradients, if the norm is greater than the first scalar:
/// the root of the sum of squares, or the largest absolute value if the second scalar is not 0. [`read_extent`] returns the magnitude
/// before.
pub fn clip<M: Machine>(machine: &M, dtype: DType, entries: &[Entry]) -> Result<Option<M::Numbers>> {
    let mut sums = measure(machine, dtype, entries)?;
    if sums.is_some() {
        let table = &Table::new(entries)?;
        let words = &machine.upload(&table.words)?;
        machine.launch((Kernel::Clip, dtype), table.chunks, (words, table), sums.as_mut())?;
    }
    Ok(sums)
}

fn measured<M: Machine>(machine: &M, kernel: Kernel, dtype: DType, entries: &[Entry]) -> Result<Option<M::Numbers>> {
    let table = &Table::new(entries)?;
    if table.chunks == 0 {
        return Ok(None);
    }
    let words = &machine.upload(&table.words)?;
    let mut sums = machine.numbers(2 * (1 + table.chunks as usize))?;
    machine.launch((kernel, dtype), table.chunks, (words, table), Some(&mut sums))?;
    machine.launch((Kernel::Total, dtype), 1, (words, table), Some(&mut sums))?;
    Ok(Some(sums))
}

pub fn read_extent<M: Machine>(machine: &M, extent: Option<&M::Numbers>) -> Result<Extent> {
    let Some(extent) = extent else { return Ok(Extent::default()) };
    Ok(match machine.read(extent, 2)?[..] {
        [squares, largest] => Extent { squares, largest },
        _ => Extent { squares: f64::NAN, largest: f64::NAN },
    })
}

/// Runs [`Kernel::Rescale`] or [`Kernel::Clamp`] with the first scalar, or a copy with the first two.
pub fn change<M: Machine>(machine: &M, kernel: Kernel, dtype: DType, entries: &[Entry]) -> Result<()> {
    let table = &Table::new(entries)?;
    if table.chunks == 0 {
        return Ok(());
    }
    machine.launch((kernel, dtype), table.chunks, (&machine.upload(&table.words)?, table), None)
}
