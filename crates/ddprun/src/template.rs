//! `ddprun new`: a package that trains.
use crate::console::message;
use crate::error::{Error, Result, refuse};
use std::fs;
use std::path::{Path, PathBuf};

/// The files of a package. In them, NAME is its name and CANDLE_DDP the source of the library. The program is an example of candle-ddp.
const FILES: [(&str, &str); 4] = [
    ("Cargo.toml", include_str!("../template/Cargo.toml.in")),
    ("src/main.rs", include_str!("../template/main.rs")),
    ("job.sh", include_str!("../template/job.sh")),
    (".gitignore", include_str!("../template/gitignore")),
];

/// Makes the package `path`, which must not exist, or be empty. It appears with all its files or not at all.
pub(crate) fn create(path: &Path, candle_ddp: Option<&Path>) -> Result<()> {
    let name = name_of(path)?;
    let library = library(candle_ddp)?;
    if fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_some()) {
        return refuse("PATH", format!("{} is not empty: name a folder that does not exist yet", path.display()));
    }
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let partial = parent.join(format!(".{name}.{}", std::process::id()));
    let made = write(&partial, name, &library).and_then(|()| fs::rename(&partial, path));
    if let Err(error) = made {
        let _ = fs::remove_dir_all(&partial);
        return Err(Error::io(format!("cannot make {}", path.display()), error));
    }
    let quick = format!("ddprun --profile dev --nproc-per-node 2 --bin {name}");
    let optimised = format!("ddprun --nproc-per-node 2 --bin {name}");
    let next = [
        (quick.as_str(), "trains on two ranks, and continues from ./checkpoints"),
        ("cargo test", "on one rank and on two"),
        (optimised.as_str(), "the same, optimised: builds longer, for real training"),
        ("sbatch job.sh", "on a cluster with Slurm"),
    ];
    let width = next.iter().map(|(command, _)| command.len()).max().unwrap_or_default();
    let next = next.map(|(command, effect)| format!("  {command:width$}  # {effect}")).join("\n");
    let what = "is a package that trains a small network: put your model and your data into its src/main.rs";
    message(format_args!("{path} {what}. In {path}:\n{next}", path = path.display()));
    Ok(())
}

fn write(folder: &Path, name: &str, library: &str) -> std::io::Result<()> {
    for (file, text) in FILES {
        let path = folder.join(file);
        fs::create_dir_all(path.parent().unwrap_or(folder))?;
        let text = text.replace("--example train", "--bin NAME").replace("CANDLE_DDP", library);
        fs::write(path, text.replace("NAME", name))?;
    }
    Ok(())
}

/// The package's name, which is the folder's.
fn name_of(path: &Path) -> Result<&str> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let is_word = |character: char| character.is_ascii_alphanumeric() || "-_".contains(character);
    // Names that cargo refuses for a program, or that would be those of a dependency.
    let taken =
        ["test", "build", "deps", "examples", "incremental", "core", "std", "candle-core", "candle-ddp", "mimalloc"];
    if !name.starts_with(|first: char| first.is_ascii_alphabetic())
        || !name.chars().all(is_word)
        || taken.contains(&name)
    {
        let reason = format!(
            "the folder's name is the package's, so it must begin with a letter, have only letters, digits, - and _, and not be that of \
             another package or a word that cargo uses; {name:?} is not such a name"
        );
        return refuse("PATH", reason);
    }
    Ok(name)
}

/// The library as a dependency in Cargo.toml: the sources `given`, or those that this launcher was built in.
fn library(given: Option<&Path>) -> Result<String> {
    let path = given.map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../.."), Path::to_path_buf);
    let manifest = fs::read_to_string(path.join("Cargo.toml")).unwrap_or_default();
    if !manifest.lines().any(|line| line == "name = \"candle-ddp\"") {
        let reason = format!("{} does not have the sources of candle-ddp: name their folder", path.display());
        return refuse("--candle-ddp", reason);
    }
    let path = path.canonicalize().map_err(|error| Error::io(format!("cannot find {}", path.display()), error))?;
    // TOML reads the strings of JSON.
    let text = path.to_str().and_then(|path| serde_json::to_string(path).ok());
    let text = text.ok_or_else(|| Error::usage("--candle-ddp", format!("{} must be UTF-8", path.display())))?;
    Ok(format!("{{ path = {text} }}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_is_made_once_and_nothing_is_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("my-training");
        create(&path, None).unwrap();
        let manifest = fs::read_to_string(path.join("Cargo.toml")).unwrap();
        assert!(
            manifest.contains("name = \"my-training\"") && manifest.contains("candle-ddp = { path = \"/"),
            "{manifest}"
        );
        assert!(fs::read_to_string(path.join("job.sh")).unwrap().contains("target/release/my-training"));
        assert!(path.join("src/main.rs").is_file() && path.join(".gitignore").is_file());

        fs::write(path.join("src/main.rs"), "mine").unwrap();
        assert!(matches!(create(&path, None), Err(Error::Usage { option: "PATH", .. })));
        assert_eq!(fs::read_to_string(path.join("src/main.rs")).unwrap(), "mine");
        // Nothing is left next to it.
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);

        // An empty folder may exist.
        let empty = folder.path().join("empty");
        fs::create_dir(&empty).unwrap();
        create(&empty, None).unwrap();
    }

    #[test]
    fn names_that_cargo_refuses_and_sources_that_are_not_there_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["1st", "my training", "test", "candle-ddp", ".."] {
            let refused = create(&folder.path().join(name), None);
            assert!(matches!(refused, Err(Error::Usage { option: "PATH", .. })), "{name}");
        }
        let refused = create(&folder.path().join("a"), Some(folder.path()));
        assert!(matches!(refused, Err(Error::Usage { option: "--candle-ddp", .. })));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
