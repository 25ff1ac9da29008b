//! Tensors from files.
use bytemuck::Pod;
use candle_core::{DType, Device, Tensor, WithDType};
use half::{bf16, f16};
use std::io::{self, Read};

/// A tensor of a file, or the reason why it cannot be read.
pub type Readable = Result<Tensor, String>;

/// Reads a tensor from the next bytes of `source`, directly into its memory.
pub fn read_tensor(source: &mut impl Read, dtype: DType, shape: &[usize]) -> io::Result<Readable> {
    fn typed<T: WithDType + Pod>(source: &mut impl Read, shape: &[usize]) -> io::Result<candle_core::Result<Tensor>> {
        let mut values = vec![T::zeroed(); shape.iter().product()];
        source.read_exact(bytemuck::cast_slice_mut(&mut values))?;
        Ok(Tensor::from_vec(values, shape, &Device::Cpu))
    }
    let tensor = match dtype {
        DType::U8 => typed::<u8>(source, shape),
        DType::U32 => typed::<u32>(source, shape),
        DType::I16 => typed::<i16>(source, shape),
        DType::I32 => typed::<i32>(source, shape),
        DType::I64 => typed::<i64>(source, shape),
        DType::BF16 => typed::<bf16>(source, shape),
        DType::F16 => typed::<f16>(source, shape),
        DType::F32 => typed::<f32>(source, shape),
        DType::F64 => typed::<f64>(source, shape),
        DType::F8E4M3 => {
            let mut bytes = vec![0; shape.iter().product()];
            source.read_exact(&mut bytes)?;
            Ok(Tensor::from_raw_buffer(&bytes, dtype, shape, &Device::Cpu))
        }
        _ => {
            return Ok(Err(format!("tensors of dtype {} cannot be read", dtype.as_str())));
        }
    };
    Ok(tensor?.map_err(|error| error.to_string()))
}
