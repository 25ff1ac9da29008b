use crate::{Error, Result};
use std::path::PathBuf;
use std::str::FromStr;

/// Where ranks rendezvous: a parsed init method, in the forms that PyTorch's `init_process_group` accepts.
///
/// - `env://`: at MASTER_ADDR and MASTER_PORT, as set by a launcher;
/// - `tcp://host:port`: at this address of rank 0 (`tcp://[::1]:29500` for IPv6);
/// - `file:///path`: in a file that all ranks can write to.
///
/// Each form may end with `?rank=R&world_size=W`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InitMethod {
    /// The location.
    pub location: Location,
    /// The query's `rank`.
    pub rank: Option<usize>,
    /// The query's `world_size`.
    pub world_size: Option<usize>,
}

/// The location that an [`InitMethod`] specifies.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Location {
    /// The location that the environment specifies.
    Environment,
    /// A [`TcpStore`](super::TcpStore).
    Tcp {
        /// The host's name, or its address without brackets.
        host: String,
        /// The port.
        port: u16,
    },
    /// A [`FileStore`](super::FileStore).
    File(PathBuf),
}

const FORMS: &str = "use env://, tcp://host:port or file:///path";

fn invalid(text: &str, reason: impl std::fmt::Display) -> Error {
    Error::invalid("init_method", format!("{text:?}: {reason}"))
}

impl FromStr for InitMethod {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (scheme, rest) = text.split_once("://").ok_or_else(|| invalid(text, FORMS))?;
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let location = match scheme {
            "env" if place.is_empty() => Location::Environment,
            "env" => return Err(invalid(text, "env:// takes no address: it comes from MASTER_ADDR and MASTER_PORT")),
            "tcp" => tcp(text, place)?,
            "file" if place.starts_with('/') && place.len() > 1 => Location::File(PathBuf::from(place)),
            "file" => return Err(invalid(text, "the path must be absolute, with three slashes: file:///path")),
            scheme => return Err(invalid(text, format!("the scheme {scheme} is unknown: {FORMS}"))),
        };
        let mut method = Self { location, rank: None, world_size: None };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let field = match name {
                "rank" => &mut method.rank,
                "world_size" => &mut method.world_size,
                name => return Err(invalid(text, format!("{name} is unknown: the query takes rank and world_size"))),
            };
            let number = value.parse().map_err(|_| invalid(text, format!("{name}={value} is not a number")))?;
            if field.replace(number).is_some() {
                return Err(invalid(text, format!("{name} is given twice")));
            }
        }
        Ok(method)
    }
}

fn tcp(text: &str, place: &str) -> Result<Location> {
    let place = place.strip_suffix('/').unwrap_or(place);
    let (host, port) = match place.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or_else(|| invalid(text, "the bracket [ is not closed"))?;
            host.split('%')
                .next()
                .and_then(|host| host.parse::<std::net::Ipv6Addr>().ok())
                .ok_or_else(|| invalid(text, format!("{host} is not an IPv6 address, and only those take brackets")))?;
            (host, port.strip_prefix(':').unwrap_or_default())
        }
        None => {
            let (host, port) = place.rsplit_once(':').unwrap_or((place, ""));
            if host.contains(':') {
                return Err(invalid(text, "an IPv6 address needs brackets: tcp://[::1]:29500"));
            }
            (host, port)
        }
    };
    if host.is_empty() || host.contains(|c: char| c.is_whitespace() || "/@".contains(c)) {
        return Err(invalid(text, format!("{host:?} is not a host name or address: use tcp://host:port")));
    }
    if port.is_empty() {
        return Err(invalid(text, "the port is missing: use tcp://host:port"));
    }
    let port = port.parse().map_err(|_| invalid(text, format!("{port:?} is not a port (0 to 65535)")))?;
    Ok(Location::Tcp { host: host.to_string(), port })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> InitMethod {
        text.parse().unwrap()
    }

    fn tcp(host: &str, port: u16) -> Location {
        Location::Tcp { host: host.to_string(), port }
    }

    #[test]
    fn accepts_every_form() {
        assert_eq!(parse("env://"), InitMethod { location: Location::Environment, rank: None, world_size: None });
        assert_eq!(parse("tcp://10.1.1.20:23456").location, tcp("10.1.1.20", 23456));
        assert_eq!(parse("tcp://node-1.cluster.local:1/").location, tcp("node-1.cluster.local", 1));
        assert_eq!(parse("tcp://[::1]:29500").location, tcp("::1", 29500));
        assert_eq!(parse("tcp://[fe80::1%eth0]:29500").location, tcp("fe80::1%eth0", 29500));
        assert_eq!(parse("file:///tmp/run 1").location, Location::File(PathBuf::from("/tmp/run 1")));
        let query = parse("tcp://h:1?rank=3&world_size=4");
        assert_eq!((query.location, query.rank, query.world_size), (tcp("h", 1), Some(3), Some(4)));
        assert_eq!(parse("file:///f?world_size=2").world_size, Some(2));
        assert_eq!(parse("env://?rank=1").rank, Some(1));
    }

    #[test]
    fn errors_name_the_invalid_part() {
        for (text, expected) in [
            ("", "use env://"),
            ("localhost:29500", "use env://"),
            ("http://a:1", "scheme http is unknown"),
            ("env://host", "takes no address"),
            ("tcp://host", "port is missing"),
            ("tcp://host:", "port is missing"),
            ("tcp://:29500", "not a host name"),
            ("tcp://user@host:1", "not a host name"),
            ("tcp://host:65536", "\"65536\" is not a port"),
            ("tcp://host:x", "\"x\" is not a port"),
            ("tcp://::1:29500", "needs brackets"),
            ("tcp://[::1:29500", "not closed"),
            ("tcp://[::1]", "port is missing"),
            ("tcp://[::1]29500", "port is missing"),
            ("tcp://[host]:1", "not an IPv6 address"),
            ("file://tmp/x", "three slashes"),
            ("file:///", "three slashes"),
            ("tcp://h:1?rank=-1", "rank=-1 is not a number"),
            ("tcp://h:1?rank", "rank= is not a number"),
            ("tcp://h:1?ranks=1", "ranks is unknown"),
            ("tcp://h:1?rank=1&rank=2", "given twice"),
        ] {
            let error = text.parse::<InitMethod>().unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("init_method"), "{text}: {error}");
        }
    }

    proptest::proptest! {
        #[test]
        fn never_panics(text in "(env|tcp|file)://[\\[\\]:/?&=%@a-z0-9]{0,40}") {
            let _ = text.parse::<InitMethod>();
        }
    }
}
