//! A batch's way to the devices and back.
use super::device::device_name;
use crate::error::describe;
use crate::{Error, Result};
use candle_core::{Device, Tensor};

/// Splits `tensor` along dimension 0 and puts the parts on the devices, in their order: PyTorch's `scatter`. Gradients
/// come back through it.
///
/// As with `torch.chunk`, all parts but the last have `ceil(rows / devices)` rows, so that there may be fewer parts than
/// devices. A tensor without rows is one part. A part that is where it belongs shares the tensor's storage.
///
/// # Errors
/// A tensor without dimensions, no devices, and the devices' errors.
pub fn scatter(tensor: &Tensor, devices: &[Device]) -> Result<Vec<Tensor>> {
    let Some(&rows) = tensor.dims().first() else {
        return Err(Error::invalid("tensor", "it has no dimension 0 along which it could be split over the devices"));
    };
    if devices.is_empty() {
        return Err(Error::invalid("devices", "there is none"));
    }
    let size = rows.div_ceil(devices.len()).max(1);
    let parts = (0..rows.max(1)).step_by(size).map(|start| tensor.narrow(0, start, size.min(rows - start)));
    let moves = parts.zip(devices).map(|(part, device)| Ok((part?, device))).collect::<Result<Vec<_>>>()?;
    transfer(&moves)
}

/// Puts `tensors` one below the other in dimension 0, on `output_device`: PyTorch's `gather`. Gradients go back through
/// it. Tensors without dimensions become a list.
///
/// # Errors
/// No tensors, or tensors whose dtypes or shapes differ in more than dimension 0.
pub fn gather(tensors: &[Tensor], output_device: &Device) -> Result<Tensor> {
    let Some(first) = tensors.first() else {
        return Err(Error::invalid("tensors", "there is none to be gathered"));
    };
    for (index, tensor) in tensors.iter().enumerate().skip(1) {
        if tensor.dtype() != first.dtype()
            || tensor.rank() != first.rank()
            || tensor.dims().iter().skip(1).ne(first.dims().iter().skip(1))
        {
            let reason = format!(
                "number {index}, from device {}, is {} and number 0 is {}: only dimension 0 may differ",
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

/// Moves each tensor to its device; one that is there stays as it is.
pub(super) fn transfer(moves: &[(Tensor, &Device)]) -> Result<Vec<Tensor>> {
    // candle would copy all of the storage that a view shows a part of.
    let mut whole = moves.to_vec();
    for (tensor, device) in &mut whole {
        if !tensor.device().same_device(device) {
            *tensor = tensor.force_contiguous()?;
        }
    }
    transfer_whole(&whole)
}

/// The same with tensors that show all of their storage. When this returns the sources may be freed.
///
/// A copy from one GPU to another is put on the destination's stream, behind what the source's stream has now; but whoever
/// frees the source waits for its own stream only. So the copies are waited for.
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

    /// What `torch.chunk` does for as many rows and devices.
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
    fn what_cannot_be_split_or_joined_is_refused() {
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
