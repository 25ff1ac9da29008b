//! A test of the links between the GPUs, before the first call: some machines deliver wrong data, or none, when one GPU reads the memory of
//! another, and NCCL does not notice.
use super::calls::Buffer;
use super::comm::{Comm, WaitError};
use super::status::{NcclFailure, Status};
use super::stream::{Done, Streams};
use super::wait::{PATIENCE, cancellation_check};
use super::{cuda_error, cuda_failure};
use candle_ddp_engine::device_group::{DeviceGroup, Fence};
use cudarc::nccl::sys::{ncclDataType_t, ncclRedOp_t};
use std::time::Duration;

/// The variable that leaves the test out.
pub(super) const VARIABLE: &str = "CANDLE_DDP_LINK_TEST";
const OPERATION: &str = "the test of the links between the GPUs";
/// As many numbers as NCCL sends over all of its channels, in 1 MiB.
const COUNT: usize = 1 << 18;

/// The numbers of a rank: multiples of rank 0's.
fn numbers(rank: usize) -> Vec<u32> {
    (0..COUNT as u32).map(|index| (index ^ 0x5bd1).wrapping_mul(rank as u32 + 1)).collect()
}

/// Adds numbers of all ranks, and compares with the sum.
pub(super) fn test(comm: &mut Comm, streams: &Streams, group: &DeviceGroup) -> Result<(), WaitError> {
    const PAUSE: Duration = Duration::from_micros(200);
    let reason = format!(
        "copies between GPUs may be broken: look whether NCCL_P2P_DISABLE=1 helps. {VARIABLE}=0 leaves this test out"
    );
    let mut check = cancellation_check(group, OPERATION.to_string(), reason, PATIENCE);
    let memory = streams.nccl.clone_htod(&numbers(group.rank)).map_err(cuda_failure)?;
    let buffer = Buffer {
        address: streams.address(&memory),
        count: COUNT,
        dtype: ncclDataType_t::ncclUint32,
        bytes_per_element: size_of::<u32>(),
    };
    // SAFETY: the memory is on the device, and is freed in the order of the stream.
    if unsafe { comm.all_reduce(buffer, ncclRedOp_t::ncclSum, streams.target()) }? == Status::InProgress {
        comm.settle(OPERATION, &mut check)?;
    }
    let done = Done::new(None);
    streams.end(&done).map_err(cuda_failure)?;
    while !done.is_over().map_err(|reason| NcclFailure::other(OPERATION, &reason))? {
        comm.status(OPERATION)?;
        check().map_err(WaitError::Group)?;
        std::thread::sleep(PAUSE);
    }
    let sum = streams.nccl.clone_dtoh(&memory).map_err(|error| NcclFailure::other(OPERATION, &cuda_error(error)))?;
    let total = (1..=group.world_size as u32).fold(0, u32::wrapping_add);
    let wrong = sum.iter().zip(numbers(0)).position(|(sum, first)| *sum != first.wrapping_mul(total));
    let Some(index) = wrong else { return Ok(()) };
    let reason = format!(
        "number {index} of the sum over all ranks is wrong: copies between GPUs are broken, in most cases because PCIe ACS or the \
         IOMMU interferes. Disable them in the BIOS, or set NCCL_P2P_DISABLE=1 on all ranks, which is slower ({VARIABLE}=0 leaves \
         this test out)"
    );
    Err(NcclFailure::other(OPERATION, &reason).into())
}
