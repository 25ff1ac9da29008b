//! The machines of `--hosts`.
use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::str::FromStr;

/// A machine, as ssh finds it, and the number of its workers if the list says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    /// A name of ssh's, perhaps with a user: `train@node0`.
    pub(crate) name: String,
    pub(crate) workers: Option<NonZeroUsize>,
}

/// Variables for the workers on all machines, with their values.
pub(crate) type Variables = Vec<(String, OsString)>;

/// The machines of a run.
pub(crate) type Hosts = Vec<Host>;

/// Parses machines with commas between them, as in `node0,node1:4`.
pub(crate) fn parse_list(text: &str) -> Result<Hosts, String> {
    text.split(',').map(|entry| entry.trim().parse()).collect()
}

impl FromStr for Host {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} must be HOST or HOST:WORKERS, as in node0,node1:4");
        let (name, workers) = match text.rsplit_once(':') {
            // An IPv6 address without brackets has no number.
            Some((name, workers)) if !name.contains(':') || name.ends_with(']') => {
                (name, Some(workers.parse().map_err(|_| wrong())?))
            }
            _ => (text, None),
        };
        let name = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
        // ssh would take it for an option.
        let is_option = name.starts_with('-');
        if name.is_empty() || is_option || name.contains(|c: char| c.is_whitespace() || c.is_control()) {
            return Err(wrong());
        }
        Ok(Self { name: name.to_string(), workers })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_machines() {
        let hosts = parse_list("node0:4, train@node1:2,[fd00::1],fd00::2").unwrap();
        let known: Vec<_> =
            hosts.iter().map(|host| (&host.name[..], host.workers.map_or(0, NonZeroUsize::get))).collect();
        assert_eq!(known, [("node0", 4), ("train@node1", 2), ("fd00::1", 0), ("fd00::2", 0)]);
        for wrong in ["", "a,", ":4", "a:0", "a:x", "-oProxyCommand=x", "a b"] {
            assert!(parse_list(wrong).unwrap_err().contains("HOST:WORKERS"), "{wrong}");
        }
    }
}
