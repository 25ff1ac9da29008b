use candle_core::DeviceLocation;

/// Returns PyTorch's name of a device, such as `cpu` or `cuda:1`.
pub(super) fn device_name(location: DeviceLocation) -> String {
    match location {
        DeviceLocation::Cpu => "cpu".to_string(),
        DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
        DeviceLocation::Metal { gpu_id } => format!("metal:{gpu_id}"),
    }
}
