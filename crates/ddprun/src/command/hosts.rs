//! The machines of `--hosts`.
use std::str::FromStr;

/// A machine, as ssh finds it, and the number of its workers if the list says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    /// A name of ssh's, perhaps with a user: `train@node0`.
    pub(crate) name: String,
    pub(crate) workers: Option<usize>,
}

/// Machines with commas between them, as in `node0,node1:4`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hosts(pub(crate) Vec<Host>);

impl FromStr for Hosts {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.split(',').map(|entry| entry.trim().parse()).collect::<Result<_, _>>().map(Self)
    }
}

impl FromStr for Host {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} must be HOST or HOST:WORKERS, as in node0,node1:4");
        let (name, workers) = match text.rsplit_once(':') {
            // An IPv6 address without brackets has no number.
            Some((name, workers)) if !name.contains(':') || name.ends_with(']') => {
                let workers = workers.parse().ok().filter(|workers| *workers > 0).ok_or_else(wrong)?;
                (name, Some(workers))
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

impl Hosts {
    /// The number of workers on each machine, which is the same on all; `default` where the list does not say.
    pub(crate) fn workers(&self) -> Result<Option<usize>, String> {
        let Some(first) = self.0.first() else { return Ok(None) };
        match self.0.iter().find(|host| host.workers != first.workers) {
            Some(other) => {
                let number = |host: &Host| host.workers.map_or_else(|| "no number".to_string(), |n| n.to_string());
                Err(format!(
                    "{} has {}, but {} has {}: give all the same number of workers, or none and --nproc-per-node",
                    first.name,
                    number(first),
                    other.name,
                    number(other)
                ))
            }
            None => Ok(first.workers),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_machines() {
        let hosts: Hosts = "node0:4, train@node1:4,[fd00::1]:4".parse().unwrap();
        assert_eq!(hosts.0.iter().map(|host| &host.name[..]).collect::<Vec<_>>(), ["node0", "train@node1", "fd00::1"]);
        assert_eq!(hosts.workers(), Ok(Some(4)));
        assert_eq!("fd00::1,b".parse::<Hosts>().unwrap().workers(), Ok(None));
        let error = "a:2,b".parse::<Hosts>().unwrap().workers().unwrap_err();
        assert!(error.starts_with("a has 2, but b has no number"), "{error}");
        for wrong in ["", "a,", ":4", "a:0", "a:x", "-oProxyCommand=x", "a b"] {
            assert!(wrong.parse::<Hosts>().unwrap_err().contains("HOST:WORKERS"), "{wrong}");
        }
    }
}
