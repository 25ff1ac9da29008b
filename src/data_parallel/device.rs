use candle_core::DeviceLocation;

/// `cpu`, `cuda:1`: PyTorch's names.
pub(super) fn device_name(location: DeviceLocation) -> String {
    match location {
        DeviceLocation::Cpu => "cpu".to_string(),
        DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
        DeviceLocation::Metal { gpu_id } => format!("metal:{gpu_id}"),
    }
}
