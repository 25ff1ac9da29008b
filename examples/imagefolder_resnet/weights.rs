//! Weights to begin with, such as torchvision's for ImageNet.
use candle_ddp::checkpoint::{self, LoadOptions};
use candle_ddp::{ProcessGroup, Result};
use candle_nn::VarMap;
use std::path::Path;
use std::sync::Arc;

/// Loads a `.pth` or safetensors file with the names of torchvision's ResNets. The last layer keeps its initial values if the
/// file's is for another number of classes.
pub(crate) fn load(pg: &ProcessGroup, varmap: &VarMap, path: &Path, classes: usize) -> Result<()> {
    let head = checkpoint::read(path)?.remove("fc.weight");
    let fits = head.is_some_and(|weight| weight.dims().first() == Some(&classes));
    let options = LoadOptions { skip: Arc::new(move |name| !fits && name.starts_with("fc.")), ..Default::default() };
    let report = checkpoint::load_with(varmap, path, options)?;
    if pg.rank() == 0 {
        let fc = if fits { "" } else { "; the last layer begins anew" };
        println!("{} variables are from {}{fc}", report.loaded.len(), path.display());
    }
    Ok(())
}
