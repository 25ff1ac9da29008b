//! Identifies this host.
use crate::hash::fnv1a_64;
use candle_ddp_env::PROCESS;

/// The variable that replaces the identity of the host: ranks with the same value count as being on one.
const LABEL: &str = "CANDLE_DDP_CPU_HOST";

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

/// The identity of the machine: the running kernel's [`boot_id`], or the name if there is none. Names do not identify machines:
/// clones have the same name, and each container of a machine has another one. `label`, or else the variable
/// `CANDLE_DDP_CPU_HOST`, replaces the identity.
pub fn host_identity(label: Option<&str>) -> u128 {
    let label = label.map(str::to_string).or_else(|| PROCESS.text(LABEL));
    let boot = || u128::from_str_radix(&boot_id().replace('-', ""), 16).ok();
    let hash = |name: &str| u128::from(fnv1a_64(name.as_bytes()));
    label.map(|label| hash(&label)).or_else(boot).unwrap_or_else(|| hash(&host_name()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_replaces_the_identity_of_the_kernel() {
        let [a, b] = ["a", "b"].map(|label| host_identity(Some(label)));
        assert!(a != b && a == host_identity(Some("a")) && a != host_identity(None));
    }
}
