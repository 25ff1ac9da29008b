//! Building a cargo target and locating the result.
use crate::child;
use crate::error::{Error, Result};
use candle_ddp_env::PROCESS;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};

/// An example, a binary or a bench of the cargo package in the current folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CargoTarget {
    /// The target's name.
    pub(crate) name: String,
    /// `"example"`, `"bin"` or `"bench"`.
    pub(crate) kind: &'static str,
    /// The package that contains the target; `None` leaves the choice to cargo.
    pub(crate) package: Option<String>,
    /// Features to build with.
    pub(crate) features: Vec<String>,
    /// The profile; `None` means release.
    pub(crate) profile: Option<String>,
}

impl CargoTarget {
    fn command(&self) -> Command {
        let cargo = PROCESS.path("CARGO").unwrap_or_else(|| PathBuf::from("cargo"));
        let mut command = Command::new(cargo);
        // With "render-diagnostics", warnings and errors appear on stderr as usual and only artifacts come as JSON.
        command.args(["build", "--message-format=json-render-diagnostics"]);
        command.arg(format!("--{}={}", self.kind, self.name));
        command.arg(format!("--profile={}", self.profile.as_deref().unwrap_or("release")));
        command.args(self.package.iter().map(|package| format!("--package={package}")));
        command.args(self.features.iter().map(|features| format!("--features={features}")));
        command
    }

    /// Builds the target, showing cargo's progress on stderr. Returns the program, or the status with which the build has failed.
    pub(crate) fn build(&self) -> Result<Result<PathBuf, ExitStatus>> {
        let mut command = self.command();
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        child::bind_to_launcher(&mut command);
        let program = command.get_program().to_string_lossy().into_owned();
        let mut cargo = command.spawn().map_err(|error| Error::Program {
            program,
            error,
            hint: "--example, --bin and --bench need cargo: install it, or set CARGO to its path".into(),
        })?;
        let mut executable = None;
        if let Some(stdout) = cargo.stdout.take() {
            for line in BufReader::new(stdout).lines() {
                let line = line.map_err(|error| Error::io("reading cargo's messages", error))?;
                executable = self.executable(&line).or(executable);
            }
        }
        let status = cargo.wait().map_err(|error| Error::io("waiting for cargo", error))?;
        match executable {
            _ if !status.success() => Ok(Err(status)),
            Some(path) => Ok(Ok(path)),
            None => Err(Error::NoExecutable { kind: self.kind, name: self.name.clone() }),
        }
    }

    /// Returns the path of the executable if cargo's `message` is about this target.
    fn executable(&self, message: &str) -> Option<PathBuf> {
        let message: serde_json::Value = serde_json::from_str(message).ok()?;
        let target = message.get("target")?;
        let ours = message.get("reason")? == "compiler-artifact"
            && target.get("name")? == self.name.as_str()
            && target.get("kind")?.as_array()?.iter().any(|kind| kind == self.kind);
        ours.then(|| message.get("executable")?.as_str().map(PathBuf::from)).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_targets_own_message_is_used() {
        let target = CargoTarget { name: "a".into(), kind: "example", package: None, features: vec![], profile: None };
        let message = |reason: &str, name: &str, kind: &str, path: &str| {
            format!(r#"{{"reason":"{reason}","target":{{"name":"{name}","kind":["{kind}"]}},"executable":{path}}}"#)
        };
        let found = |text: &str| target.executable(text);
        assert_eq!(found(&message("compiler-artifact", "a", "example", "\"/x/a\"")), Some("/x/a".into()));
        assert_eq!(found(&message("compiler-artifact", "a", "bin", "\"/x/a\"")), None);
        assert_eq!(found(&message("compiler-artifact", "b", "example", "\"/x/b\"")), None);
        assert_eq!(found(&message("compiler-artifact", "a", "example", "null")), None);
        assert_eq!(found(&message("build-finished", "a", "example", "\"/x/a\"")), None);
        assert_eq!(found("warning: not JSON"), None);
        let target = CargoTarget { kind: "bench", ..target };
        let message = message("compiler-artifact", "a", "bench", "\"/x/a-1\"");
        assert_eq!(target.executable(&message), Some("/x/a-1".into()));
    }
}
