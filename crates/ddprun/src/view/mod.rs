//! Shows runs: their status, metrics, verdicts, last calls and timelines. It starts no process.
pub(crate) mod metrics_server;
mod page;
pub(crate) mod status;
mod torchfrtrace;

use crate::console::{Console, Target, message};
use crate::error::Result;
use crate::tail;
use candle_ddp_base::flight_record;
use std::path::Path;

/// Merges the timelines of all ranks.
pub(crate) fn merge_traces(folder: &Path) -> Result<()> {
    let (path, ranks, old) = candle_ddp_base::trace::merge_newest(folder)?;
    old.iter().for_each(|file| message(candle_ddp_base::trace::left_out(file)));
    message(format_args!("{} shows {ranks} ranks: open it at https://ui.perfetto.dev", path.display()));
    Ok(())
}

/// Says which rank parted from the others.
pub(crate) fn explain(folder: &Path, torchfrtrace: Option<&Path>) -> Result<()> {
    let records = flight_record::read_folder(folder)?;
    message(flight_record::explain(&records));
    if let Some(output) = torchfrtrace {
        let (records, _) = flight_record::newest(&records);
        torchfrtrace::write(&records, output)?;
        let is_partial = records.iter().any(|record| records.len() < record.world_size);
        let partial = if is_partial { " --allow-incomplete-ranks" } else { "" };
        message(format_args!("PyTorch's analyser reads them with: torchfrtrace{partial} {}", output.display()));
    }
    Ok(())
}

/// Writes the page about a run.
pub(crate) fn report(folder: &Path, output: Option<&Path>) -> Result<()> {
    let (path, notes) = page::write(folder, output)?;
    // Names of files may have line breaks.
    notes.iter().for_each(|note| message(tail::line(note)));
    message(format_args!("{} shows the run: open it in a browser", path.display()));
    Ok(())
}

/// Shows the status of a run.
pub(crate) fn status(address: &str, no_secret: bool, json: bool) -> Result<()> {
    let text = status::of_run(address, no_secret, json)?;
    // The text is lost if stdout has no reader.
    let _ = Console::get().show(0, Target::Stdout, text.into_bytes());
    Ok(())
}
