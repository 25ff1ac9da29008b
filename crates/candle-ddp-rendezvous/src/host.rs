//! Identifies this host.

/// The host's name; containers have their own names.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The id that the running kernel generated at boot, such as `1b4e28ba-2fa1-11d2-883f-0016d3cca427`; it is the same in
/// all containers of a host. Empty if the system does not provide it.
pub fn boot_id() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    text.trim().to_string()
}
