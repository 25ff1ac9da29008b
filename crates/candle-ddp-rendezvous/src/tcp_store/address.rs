//! The addresses of hosts: those of a name, this host's own, and its loopback interface.
use candle_ddp_base::descriptors::is_shortage;
use candle_ddp_base::thread;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::mpsc;
use std::time::Instant;

/// Resolves `host` in a separate thread, because a name server that is down takes long.
pub(super) fn resolve(host: &str, port: u16, deadline: Instant) -> std::result::Result<Vec<SocketAddr>, String> {
    // Brackets belong to IPv6 addresses with a port, but are accepted without one.
    let host = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let (sender, receiver) = mpsc::channel();
    let name = host.to_string();
    let lookup = move || {
        // The receiver is gone after the deadline.
        let _ = sender.send((name.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>));
    };
    thread::spawn("candle-ddp-resolver", lookup).map_err(|error| error.to_string())?;
    match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
        Ok(Ok(addresses)) if addresses.is_empty() => Err(format!("the name {host:?} has no address")),
        Ok(Ok(addresses)) => Ok(addresses),
        Ok(Err(error)) => Err(format!("cannot resolve the name {host:?}: {error}")),
        Err(_) => Err(format!("cannot resolve the name {host:?}: the name server does not answer")),
    }
}

pub(super) const LOOPBACK: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];

/// The address at which the processes of a host reach each other: IPv4's, unless the host has only IPv6.
pub fn loopback() -> IpAddr {
    let [v4, v6] = LOOPBACK;
    let is_own = |ip| is_own(&SocketAddr::new(ip, 0));
    if !is_own(v4) && is_own(v6) { v6 } else { v4 }
}

/// Why a loopback address cannot be used. `v4` and `v6` say whether this host has those of IPv4 and IPv6.
pub(super) fn no_loopback(v4: bool, v6: bool) -> &'static str {
    match (v4, v6) {
        (false, true) => "this host has IPv6 only: use ::1",
        (true, false) => "this host has IPv4 only: use 127.0.0.1",
        (true, true) => "this host has no such loopback address: use 127.0.0.1 or ::1",
        (false, false) => "this host's loopback interface is down (`ip link set lo up`)",
    }
}

/// Why no connection can be made to the loopback address `address`.
pub(super) fn no_way_to(address: SocketAddr) -> String {
    let [v4, v6] = LOOPBACK.map(|ip| is_own(&SocketAddr::new(ip, 0)));
    format!("{address} cannot be reached: {}", no_loopback(v4, v6))
}

/// Returns whether an interface of this host has the address. A loopback interface must be up too: this host may bind to
/// 127.0.0.1 while it is down, but connect to nothing there.
pub(super) fn is_own(address: &SocketAddr) -> bool {
    const ANY: u16 = 9;
    let (ip, mut address) = (address.ip(), *address);
    address.set_port(0);
    // Connecting a datagram socket looks up a route to the address, and sends nothing.
    match UdpSocket::bind(address) {
        Ok(socket) => !ip.is_loopback() || socket.connect((ip, ANY)).is_ok(),
        // The error of listening there will say which resource has run out.
        Err(error) => is_shortage(&error),
    }
}
