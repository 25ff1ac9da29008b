//! Scattering a batch over the devices and gathering the results.
use super::device::device_name;
use crate::error::describe;
use crate::{Error, Result};
use candle_core::{Device, Tensor};

/// Splits `tensor` along dimension 0 and moves the parts to the devices, in order: PyTorch's `scatter`. Differentiable.
///
/// As with `torch.chunk`, all parts but the last have `ceil(rows / devices)` rows, so there may be fewer parts than
/// devices. A tensor without rows is a single part. A part that is already on its device shares the tensor's storage.
///
/// # Errors
/// Returns an error if the tensor has no dimensions, if there are no devices, or if a copy fails.
pub fn scatter(tensor: &Tensor, devices: &[Device]) -> Result<Vec<Tensor>> {
    let Some(&rows) = tensor.dims().first() else {
        return Err(Error::invalid(
            "tensor",
            "it must have a dimension 0 to split over the devices, but it is a scalar",
        ));
    };
    if devices.is_empty() {
        return Err(Error::invalid("devices", "there must be at least one device"));
    }
    let size = rows.div_ceil(devices.len()).max(1);
    let parts = (0..rows.max(1)).step_by(size).map(|start| tensor.narrow(0, start, size.min(rows - start)));
    let moves = parts.zip(devices).map(|(part, device)| Ok((part?, device))).collect::<Result<Vec<_>>>()?;
    transfer(&moves)
}

/// Concatenates `tensors` along dimension 0 on `output_device`: PyTorch's `gather`. Differentiable. Scalars become a
/// vector.
///
/// # Errors
/// Returns an error if there are no tensors, or if their dtypes differ or their shapes differ in more than dimension 0.
pub fn gather(tensors: &[Tensor], output_device: &Device) -> Result<Tensor> {
    let Some(first) = tensors.first() else {
        return Err(Error::invalid("tensors", "there must be at least one tensor"));
    };
    for (index, tensor) in tensors.iter().enumerate().skip(1) {
        if tensor.dtype() != first.dtype()
            || tensor.rank() != first.rank()
            || tensor.dims().iter().skip(1).ne(first.dims().iter().skip(1))
        {
            let reason = format!(
                "tensor {index}, from device {}, is {}, but tensor 0 is {}: only dimension 0 may differ",
                device_name(tensor.device().location()),
                describe(tensor.dtype(), tensor.shape()),
                describe(first.dtype(), first.shape())
            );
            return Err(Error::invalid("tensors", reason));
        }
    }
    let moves = tensors
        .iter()
        .map(|tensor| Ok((if tensor.rank() == 0 { tensor.unsqueeze(0)? } else { tensor.clone() }, output_device)))
        .collect::<Result<Vec<_>>>()?;
    Ok(Tensor::cat(&transfer(&moves)?, 0)?)
}

/// Moves each tensor to its device; a tensor that is already there is returned unchanged.
pub(super) fn transfer(moves: &[(Tensor, &Device)]) -> Result<Vec<Tensor>> {
    // candle would copy the whole storage of a view.
    let mut whole = moves.to_vec();
    for (tensor, device) in &mut whole {
        if !tensor.device().same_device(device) {
            *tensor = tensor.force_contiguous()?;
        }
    }
    transfer_whole(&whole)
}

/// Like [`transfer`], for tensors that cover their whole storage. The sources may be freed when this returns.
///
/// A copy between GPUs runs on the destination's stream, after the work enqueued on the source's stream. But freeing
/// the source waits only for the source's stream, so this function waits for the copies.
pub(super) fn transfer_whole(moves: &[(Tensor, &Device)]) -> Result<Vec<Tensor>> {
    let moved =
        moves.iter().map(|(tensor, device)| tensor.to_device(device)).collect::<candle_core::Result<Vec<_>>>()?;
    for (_, device) in moves.iter().filter(|(tensor, device)| !tensor.device().same_device(device)) {
        device.synchronize()?;
    }
    Ok(moved)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::DType;

    /// Returns the result of `torch.chunk` for this number of rows and devices.
    #[test]
    fn parts_are_those_of_torch_chunk() {
        let sizes = |rows: usize, devices: usize| -> Vec<usize> {
            let tensor = Tensor::zeros((rows, 2), DType::F32, &Device::Cpu).unwrap();
            let parts = scatter(&tensor, &vec![Device::Cpu; devices]).unwrap();
            parts.iter().map(|part| part.dim(0).unwrap()).collect()
        };
        assert_eq!(sizes(8, 2), [4, 4]);
        assert_eq!(sizes(7, 3), [3, 3, 1]);
        assert_eq!(sizes(5, 4), [2, 2, 1]);
        assert_eq!(sizes(2, 4), [1, 1]);
        assert_eq!(sizes(3, 1), [3]);
        assert_eq!(sizes(0, 2), [0]);
    }

    #[test]
    fn invalid_tensors_are_refused() {
        let scalar = Tensor::zeros((), DType::F32, &Device::Cpu).unwrap();
        assert!(scatter(&scalar, &[Device::Cpu]).unwrap_err().to_string().contains("dimension 0"));
        assert!(scatter(&scalar.unsqueeze(0).unwrap(), &[]).is_err());
        assert!(gather(&[], &Device::Cpu).is_err());
        let (two, three) = (
            Tensor::zeros((1, 2), DType::F32, &Device::Cpu).unwrap(),
            Tensor::zeros((1, 3), DType::F32, &Device::Cpu).unwrap(),
        );
        let error = gather(&[two, three], &Device::Cpu).unwrap_err().to_string();
        assert!(error.contains("f32[1, 3]") && error.contains("f32[1, 2]") && error.contains("cpu"), "{error}");
        let list = gather(&[scalar.clone(), scalar], &Device::Cpu).unwrap();
        assert_eq!(list.dims(), [2]);
    }
}
