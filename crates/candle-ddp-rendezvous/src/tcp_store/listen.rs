//! Choosing the addresses on which a store listens: those at which ranks reach it, and as few others as possible,
//! because anyone who reaches the store can read and write it.
use super::address::{LOOPBACK, is_own, no_loopback, resolve};
use crate::{Error, Result};
use candle_ddp_base::deadline::deadline_after;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::Duration;

/// The time-out for resolving the store's own host name.
const RESOLVE: Duration = Duration::from_secs(10);
/// How often another free port is tried if the first is taken on another address.
const ATTEMPTS: usize = 20;

/// The addresses on which a store listens.
#[derive(Debug, PartialEq, Eq)]
pub struct Listening {
    /// The addresses, all with the same port.
    pub addresses: Vec<SocketAddr>,
    /// The reason for listening on all interfaces, if one address should have been enough.
    pub warning: Option<String>,
    /// The reason why the name of the host has no address here.
    pub unresolved: Option<String>,
}

/// Returns the address of all interfaces: IPv6 and, if the system has no IPv6 or no dual-stack sockets, IPv4.
pub(super) fn all_interfaces(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))
}

impl Listening {
    /// Chooses the addresses for a job with the master address `host`. `is_one_host` means that the whole job is known
    /// to run on this host.
    ///
    /// # Errors
    /// Returns [`Io`](candle_ddp_base::Error::Io) for a loopback address that this host does not have: no rank could reach the store.
    pub fn at(host: &str, port: u16, is_one_host: bool, timeout: Duration) -> Result<Self> {
        let deadline = deadline_after(timeout.min(RESOLVE));
        Self::choose(host, port, is_one_host, resolve(host, port, deadline), is_own)
    }

    fn choose(
        host: &str,
        port: u16,
        is_one_host: bool,
        resolved: std::result::Result<Vec<SocketAddr>, String>,
        is_own: impl Fn(&SocketAddr) -> bool,
    ) -> Result<Self> {
        let all = |warning| Ok(Self { addresses: vec![all_interfaces(port)], warning, unresolved: None });
        let warn = |reason: String| {
            let port = if port == 0 { "its port".to_string() } else { format!("port {port}") };
            all(Some(format!("{reason}, so the store listens on all interfaces: anyone who reaches {port} can use it")))
        };
        let resolved = match resolved {
            Ok(resolved) => resolved,
            Err(reason) => return Ok(Self { unresolved: Some(reason.clone()), ..warn(reason)? }),
        };
        let mut addresses: Vec<SocketAddr> = Vec::new();
        for address in resolved.iter().filter(|address| is_own(address)) {
            if !addresses.contains(address) {
                addresses.push(*address);
            }
        }
        if addresses.is_empty() && resolved.iter().all(|address| address.ip().is_loopback()) {
            let [v4, v6] = LOOPBACK.map(|own| is_own(&SocketAddr::new(own, 0)));
            return Err(Error::io(
                format!("cannot host the store on {host}: {}", no_loopback(v4, v6)),
                Errno::ADDRNOTAVAIL,
            ));
        }
        if addresses.is_empty() {
            // This happens with a Kubernetes service, or with address translation in a cloud.
            let found: Vec<String> = resolved.iter().map(|address| address.ip().to_string()).collect();
            return warn(format!("{host} ({}) is not an address of this host", found.join(", ")));
        }
        // Debian's /etc/hosts maps a host's own name to 127.0.1.1, while the name servers that other hosts query map it
        // to the address at which they reach this host.
        let is_name = !host.contains(':') && host.parse::<Ipv4Addr>().is_err() && !is_localhost(host);
        if is_name && !is_one_host && addresses.iter().all(|address| address.ip().is_loopback()) {
            log::info!(
                "{host} resolves to this host's loopback interface, so the store listens on all interfaces for other hosts"
            );
            return all(None);
        }
        Ok(Self { addresses, warning: None, unresolved: None })
    }
}

/// Returns whether the name means the loopback interface on every host.
fn is_localhost(host: &str) -> bool {
    let host = host.trim_end_matches('.').to_ascii_lowercase();
    let first = host.split('.').next().unwrap_or_default();
    let names = ["localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"];
    names.contains(&first) || host.ends_with(".localhost")
}

/// Listens on all of `addresses`, which have the same port. If that is 0, chooses one that is free on all of them.
pub(super) fn listen(addresses: &[SocketAddr]) -> Result<Vec<TcpListener>> {
    let mut attempt = 0;
    loop {
        attempt += 1;
        let mut listeners = Vec::with_capacity(addresses.len());
        let mut port = addresses.first().map_or(0, SocketAddr::port);
        let is_free = port == 0;
        let failed = addresses.iter().find_map(|address| {
            let mut address = *address;
            address.set_port(port);
            match listen_on(address).and_then(|listener| Ok((rustix::net::getsockname(&listener)?, listener))) {
                Ok((name, listener)) => {
                    port = SocketAddr::try_from(name).map_or(port, |name| name.port());
                    listeners.push(listener);
                    None
                }
                Err(errno) => Some((address, errno)),
            }
        });
        match failed {
            None => return Ok(listeners),
            Some((_, Errno::ADDRINUSE)) if is_free && attempt < ATTEMPTS => {}
            Some((address, errno)) => return Err(cannot_host(address, errno)),
        }
    }
}

fn cannot_host(address: SocketAddr, errno: Errno) -> Error {
    let place = match address.ip().is_unspecified() {
        true => format!("port {} of all interfaces", address.port()),
        false => address.to_string(),
    };
    let hint = match errno {
        Errno::ADDRINUSE => {
            ": another program uses it, often an earlier run that is still alive. Stop that program, \
             or choose another port (MASTER_PORT, --master-port)"
        }
        Errno::ADDRNOTAVAIL => ", which is not an address of this host",
        _ => "",
    };
    Error::io(format!("cannot host the store on {place}{hint}"), errno)
}

fn listen_on(address: SocketAddr) -> rustix::io::Result<TcpListener> {
    match bind(address) {
        // The system has no IPv6.
        Err(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL) if address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED) => {
            bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port())))
        }
        result => result,
    }
}

fn bind(address: SocketAddr) -> rustix::io::Result<TcpListener> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    // Connections of the last run in TIME_WAIT must not block the port.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED) {
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    rustix::net::bind(&socket, &address)?;
    // All ranks of a large job connect at the same moment.
    rustix::net::listen(&socket, 4096)?;
    Ok(TcpListener::from(socket))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the addresses chosen on a host with 10.0.0.1 and fd00::1, and whether there is a warning.
    fn choose(host: &str, is_one_host: bool, resolved: &[&str]) -> (Vec<String>, bool) {
        let resolved = resolved.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), 1)).collect();
        let own = |address: &SocketAddr| {
            address.ip().is_loopback() || ["10.0.0.1", "fd00::1"].contains(&address.ip().to_string().as_str())
        };
        let Listening { addresses, warning, unresolved: None } =
            Listening::choose(host, 1, is_one_host, Ok(resolved), own).unwrap()
        else {
            panic!("{host} has no address");
        };
        (addresses.iter().map(|address| address.ip().to_string()).collect(), warning.is_some())
    }

    #[test]
    fn listens_only_where_ranks_reach_the_store() {
        for (host, is_one_host, resolved, expected) in [
            ("127.0.0.1", false, &["127.0.0.1"][..], &["127.0.0.1"][..]),
            ("::1", false, &["::1"], &["::1"]),
            ("localhost", false, &["::1", "127.0.0.1", "127.0.0.1"], &["::1", "127.0.0.1"]),
            ("LocalHost.localdomain.", false, &["127.0.0.1"], &["127.0.0.1"]),
            ("node0", false, &["10.0.0.1", "fd00::1"], &["10.0.0.1", "fd00::1"]),
            ("node0", false, &["10.0.0.9", "10.0.0.1"], &["10.0.0.1"]),
            ("node0", false, &["127.0.1.1", "10.0.0.1"], &["127.0.1.1", "10.0.0.1"]),
            // Debian's mapping of the host's own name, which other hosts resolve to another address.
            ("node0", false, &["127.0.1.1"], &["::"]),
            ("node0", true, &["127.0.1.1"], &["127.0.1.1"]),
            ("0.0.0.0", false, &["10.0.0.1"], &["10.0.0.1"]),
        ] {
            let expected = expected.iter().map(|ip| ip.to_string()).collect();
            assert_eq!(choose(host, is_one_host, resolved), (expected, false), "{host} {resolved:?}");
        }
    }

    #[test]
    fn an_address_of_another_host_means_all_interfaces_with_a_warning() {
        assert_eq!(choose("203.0.113.5", false, &["203.0.113.5"]), (vec!["::".to_string()], true));
        assert_eq!(choose("job-master-0", true, &["10.96.0.7"]), (vec!["::".to_string()], true));
        let unknown = Listening::choose("nowhere", 7, false, Err("the name has no address".to_string()), |_| true);
        let unknown = unknown.unwrap();
        assert_eq!(unknown.addresses, [all_interfaces(7)]);
        assert_eq!(unknown.unresolved.as_deref(), Some("the name has no address"));
        let warning = unknown.warning.unwrap();
        assert!(warning.contains("the name has no address") && warning.contains("all interfaces"), "{warning}");
    }

    #[test]
    fn a_loopback_address_that_the_host_lacks_is_an_error_at_once() {
        let choose = |host: &str, own: &[&str]| {
            let resolved = Ok(vec![SocketAddr::new(host.parse().unwrap(), 0)]);
            let own = |address: &SocketAddr| own.contains(&address.ip().to_string().as_str());
            Listening::choose(host, 0, true, resolved, own).unwrap_err().to_string()
        };
        let error = choose("127.0.0.1", &["fd00::1", "::1"]);
        assert!(error.contains("cannot host the store on 127.0.0.1: this host has IPv6 only: use ::1"), "{error}");
        assert!(choose("::1", &["127.0.0.1"]).contains("this host has IPv4 only: use 127.0.0.1"));
        assert!(choose("127.0.0.1", &["10.0.0.1"]).contains("this host's loopback interface is down"));
        // Elsewhere, a port that is chosen later is not called port 0.
        let warning = Listening::choose("nowhere", 0, true, Err("no name".to_string()), |_| true).unwrap().warning;
        assert!(warning.unwrap().contains("anyone who reaches its port can use it"));
    }

    #[test]
    fn a_free_port_is_free_on_all_addresses() {
        let addresses = ["127.0.0.1:0", "127.0.0.2:0"].map(|address| address.parse().unwrap());
        let listeners = listen(&addresses).unwrap();
        let [one, two] = [&listeners[0], &listeners[1]].map(|listener| listener.local_addr().unwrap());
        assert_eq!((one.port(), one.ip().to_string()), (two.port(), "127.0.0.1".to_string()));
        assert_eq!(two.ip().to_string(), "127.0.0.2");
        assert!(listen(&[one]).unwrap_err().to_string().contains("another program uses it"));
    }
}
