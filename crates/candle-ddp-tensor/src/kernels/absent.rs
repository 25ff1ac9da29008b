//! The kernels' interface in builds without CUDA, where no tensor is on a GPU.
use super::launches::{Address, AttendShape, AttendTensors, ConvShape, Convolve, Epilogue, Launch, Product};
use super::operands::{AddedNorm, Assignment, Extent, NormOperands, Operands, Rule};
use crate::{Error, Result};
use candle_core::{CudaDevice, CudaStorage, DType, Device, Layout, Shape, Storage, Tensor};

fn absent() -> Error {
    let hint =
        "candle-ddp was built without the feature `cuda`: build with `--features cuda`, or `nccl`, which includes it";
    candle_ddp_base::Error::unavailable("a kernel for CUDA", hint).into()
}

pub fn take(_: &Device, _: DType) -> bool {
    false
}

pub fn preload(_: &Device, _: &[DType]) -> Result<()> {
    Ok(())
}

pub fn keep_memory(_: &Device) -> Result<()> {
    Ok(())
}

pub fn peak_memory(_: &Device) -> Result<Option<u64>> {
    Ok(None)
}

pub fn allocates_nothing(_: &CudaDevice) -> bool {
    false
}

pub fn release(_: &mut CudaStorage) -> Result<()> {
    Err(absent())
}

pub fn has_own_stream(_: &Device) -> Result<bool> {
    Err(absent())
}

pub fn update_whole(_: Rule, _: &[Operands], _: Option<&Tensor>) -> Result<()> {
    Err(absent())
}

pub fn prepare(_: Rule, _: &[Operands]) -> Result<Vec<[f64; 2]>> {
    Err(absent())
}

pub fn update(_: Rule, _: &[Operands], _: &[[f64; 2]]) -> Result<()> {
    Err(absent())
}

pub fn assign(_: &[Assignment]) -> Result<()> {
    Err(absent())
}

pub fn measure(_: &[&Tensor]) -> Result<Extent> {
    Err(absent())
}

pub fn rescale(_: &[&Tensor], _: f64) -> Result<()> {
    Err(absent())
}

pub fn rescale_measured(_: &[&Tensor], _: f64) -> Result<Extent> {
    Err(absent())
}

pub fn rescale_judged(_: &[&Tensor], _: f64) -> Result<Option<Tensor>> {
    Err(absent())
}

#[derive(Debug)]
pub enum Incoming {}

impl Incoming {
    pub fn receive(self) -> Result<[f64; 2]> {
        match self {}
    }
}

pub fn send(_: &Tensor) -> Result<Incoming> {
    Err(absent())
}

pub fn judge(_: &[&Tensor]) -> Result<Option<Tensor>> {
    Err(absent())
}

pub fn clip(_: &[&Tensor], _: f64, _: bool) -> Result<Option<Tensor>> {
    Err(absent())
}

pub fn clamp(_: &[&Tensor], _: f64) -> Result<()> {
    Err(absent())
}

#[derive(Debug)]
pub enum NormStatistics {}

pub fn norm_forward(_: NormOperands) -> Result<((Storage, Shape), NormStatistics)> {
    Err(absent())
}

pub fn add_norm_forward(_: NormOperands, _: &Tensor) -> Result<Option<AddedNorm<NormStatistics>>> {
    Err(absent())
}

pub fn norm_backward(
    _: NormOperands,
    _: &Tensor,
    statistics: &NormStatistics,
    _: Option<&Tensor>,
) -> Result<(Tensor, Tensor, Tensor)> {
    match *statistics {}
}

pub fn address(_: &Tensor) -> Result<Address<'_>> {
    Err(absent())
}

pub fn written_address(_: &Tensor) -> Result<Address<'_>> {
    Err(absent())
}

pub fn address_or_none(_: Option<&Tensor>) -> Result<Address<'_>> {
    Err(absent())
}

pub fn storage_address<'a>(_: &'a CudaStorage, _: &Layout) -> Result<Address<'a>> {
    Err(absent())
}

#[derive(Debug)]
pub enum Output {}

impl Output {
    pub fn new(_: &CudaDevice, _: DType, _: impl Into<Shape>) -> Result<Self> {
        Err(absent())
    }

    pub fn copy_of(_: &CudaStorage, _: &Layout) -> Result<Self> {
        Err(absent())
    }

    pub fn nothing(_: &CudaDevice) -> Result<Self> {
        Err(absent())
    }

    pub fn zeros(_: &CudaDevice, _: DType, _: impl Into<Shape>) -> Result<Self> {
        Err(absent())
    }

    pub fn dtype(&self) -> DType {
        match *self {}
    }

    pub fn address(&self) -> Result<Address<'_>> {
        match *self {}
    }

    pub fn into_parts(self) -> (CudaStorage, Shape) {
        match self {}
    }

    pub fn into_result(self) -> (Storage, Shape) {
        match self {}
    }

    pub fn into_tensor(self) -> Tensor {
        match self {}
    }
}

#[derive(Debug)]
pub enum Temporary {}

impl Temporary {
    pub fn new(_: &CudaDevice, _: DType, _: usize) -> Result<Self> {
        Err(absent())
    }

    pub fn address(&self) -> Result<Address<'_>> {
        match *self {}
    }
}

pub fn launch(_: &CudaDevice, _: Launch) -> Result<()> {
    Err(absent())
}

pub fn product(_: &CudaDevice, _: Product) -> Result<()> {
    Err(absent())
}

pub fn product_with(_: &CudaDevice, _: Product, _: Epilogue) -> Result<bool> {
    Err(absent())
}

pub fn scaled_product(_: &CudaDevice, _: Product, _: Address) -> Result<()> {
    Err(absent())
}

pub fn has_cudnn() -> Result<bool> {
    Ok(false)
}

pub fn can_convolve(_: &CudaDevice, _: (Convolve, DType), _: &ConvShape) -> Result<bool> {
    Err(absent())
}

pub fn convolve(_: &CudaDevice, _: (Convolve, DType), _: &ConvShape, _: [Address; 3], _: bool) -> Result<bool> {
    Err(absent())
}

pub fn is_attention_fast() -> Result<bool> {
    Ok(false)
}

pub fn may_attend(_: DType, _: &AttendShape) -> Result<bool> {
    Ok(false)
}

pub fn attend(_: &CudaDevice, _: DType, _: &AttendShape, _: f64, _: &AttendTensors) -> Result<bool> {
    Err(absent())
}

#[derive(Debug)]
pub enum Constants {}

impl Constants {
    pub fn new(_: &CudaDevice, _: &[f64]) -> Result<Self> {
        Err(absent())
    }

    pub fn address(&self) -> Address<'_> {
        match *self {}
    }
}
