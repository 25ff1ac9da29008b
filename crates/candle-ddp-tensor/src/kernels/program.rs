//! The kernels that each operation launches, and their order.
use super::gpu::{Gpu, Numbers, Words};
use super::operands::{Extent, Rule};
use super::source::Kernel;
use super::table::{Entry, Table};
use crate::Result;
use candle_core::DType;

/// Updates parameters of `dtype`, each of which is one entry, by gradients of the dtype `gradients`. Where `verdict` is not 0, it is the address of a number: if that is not
/// finite, Adam and SGD change nothing.
pub(super) fn update_whole(
    gpu: &Gpu,
    rule: Rule,
    (dtype, gradients): (DType, DType),
    entries: &[Entry],
    verdict: u64,
) -> Result<()> {
    let table = &Table::new(entries)?;
    if table.chunks == 0 {
        return Ok(());
    }
    let words = &gpu.upload(&table.words)?;
    let launch = |kernel, sums| gpu.launch((kernel, dtype), table.chunks, (words, table), sums);
    match rule {
        Rule::Adam => launch(Kernel::adam_from(dtype, gradients), verdict),
        Rule::Sgd => launch(Kernel::Sgd, verdict),
        Rule::Lamb => launch(Kernel::LambUpdate, gpu.address(&lamb_sums(gpu, dtype, (words, table))?)),
    }
}

fn lamb_sums(gpu: &Gpu, dtype: DType, table: (&Words, &Table)) -> Result<Numbers> {
    let Table { parts, chunks, .. } = *table.1;
    let sums = gpu.numbers(2 * (parts as usize + chunks as usize))?;
    gpu.launch((Kernel::LambMoments, dtype), chunks, table, gpu.address(&sums))?;
    gpu.launch((Kernel::LambSums, dtype), parts, table, gpu.address(&sums))?;
    Ok(sums)
}

/// Launches the sums that [`update`] needs, if any. [`read_sums`] returns those of each entry.
pub(super) fn prepare(gpu: &Gpu, rule: Rule, dtype: DType, entries: &[Entry]) -> Result<Option<Numbers>> {
    let table = Table::new(entries)?;
    if rule != Rule::Lamb || table.chunks == 0 {
        return Ok(None);
    }
    lamb_sums(gpu, dtype, (&gpu.upload(&table.words)?, &table)).map(Some)
}

pub(super) fn read_sums(gpu: &Gpu, sums: Option<&Numbers>, entries: usize) -> Result<Vec<[f64; 2]>> {
    let Some(sums) = sums else { return Ok(vec![[0.; 2]; entries]) };
    Ok(gpu.read(sums, 2 * entries)?.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect())
}

/// Updates parts of parameters; `sums` has the sums over the whole parameter for each part.
pub(super) fn update(gpu: &Gpu, rule: Rule, dtype: DType, entries: &[Entry], sums: &[[f64; 2]]) -> Result<()> {
    if rule != Rule::Lamb {
        return update_whole(gpu, rule, (dtype, dtype), entries, 0);
    }
    let table = &Table::new(entries)?;
    if table.chunks == 0 {
        return Ok(());
    }
    let words = &gpu.upload(&table.words)?;
    let mut numbers = gpu.numbers(2 * entries.len())?;
    gpu.write(&mut numbers, &sums.concat())?;
    gpu.launch((Kernel::LambUpdate, dtype), table.chunks, (words, table), gpu.address(&numbers))
}

/// Launches the measurement of all entries together; [`read_extent`] returns it.
pub(super) fn measure(gpu: &Gpu, dtype: DType, entries: &[Entry]) -> Result<Option<Numbers>> {
    measured(gpu, Kernel::Measure, dtype, entries)
}

/// Multiplies the elements by the first scalar. [`read_extent`] returns their magnitude after the multiplication.
pub(super) fn rescale_measured(gpu: &Gpu, dtype: DType, entries: &[Entry]) -> Result<Option<Numbers>> {
    measured(gpu, Kernel::Rescale, dtype, entries)
}

/// Measures all entries together, and scales their parameters, which are their gradients, if the norm is greater than the first scalar:
/// the root of the sum of squares, or the largest absolute value if the second scalar is not 0. The norm before is the third number.
pub(super) fn clip(gpu: &Gpu, dtype: DType, entries: &[Entry]) -> Result<Option<Numbers>> {
    let Some(sums) = measure(gpu, dtype, entries)? else { return Ok(None) };
    let table = &Table::new(entries)?;
    let words = &gpu.upload(&table.words)?;
    gpu.launch((Kernel::Clip, dtype), table.chunks, (words, table), gpu.address(&sums))?;
    Ok(Some(sums))
}

fn measured(gpu: &Gpu, kernel: Kernel, dtype: DType, entries: &[Entry]) -> Result<Option<Numbers>> {
    let table = &Table::new(entries)?;
    if table.chunks == 0 {
        return Ok(None);
    }
    let words = &gpu.upload(&table.words)?;
    let sums = gpu.numbers(2 * (1 + table.chunks as usize))?;
    gpu.launch((kernel, dtype), table.chunks, (words, table), gpu.address(&sums))?;
    gpu.launch((Kernel::Total, dtype), 1, (words, table), gpu.address(&sums))?;
    Ok(Some(sums))
}

pub(super) fn read_extent(gpu: &Gpu, extent: Option<&Numbers>) -> Result<Extent> {
    let Some(extent) = extent else { return Ok(Extent::default()) };
    Ok(match gpu.read(extent, 2)?[..] {
        [squares, largest] => Extent { squares, largest },
        _ => Extent { squares: f64::NAN, largest: f64::NAN },
    })
}

/// Runs [`Kernel::Rescale`] or [`Kernel::Clamp`] with the first scalar, or a copy with the first two.
pub(super) fn change(gpu: &Gpu, kernel: Kernel, dtype: DType, entries: &[Entry]) -> Result<()> {
    let table = &Table::new(entries)?;
    if table.chunks == 0 {
        return Ok(());
    }
    gpu.launch((kernel, dtype), table.chunks, (&gpu.upload(&table.words)?, table), 0)
}
