#!/usr/bin/env python3
"""Checks that no dependency in Cargo.lock needs a newer Rust than this crate says it does.

    scripts/check_rust_version.py
"""

import json
import subprocess
import sys


def version(text):
    return tuple(int(part) for part in text.split("."))


def main():
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--all-features"]
    packages = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["packages"]
    ours = next(package["rust_version"] for package in packages if package["name"] == "candle-ddp")
    newer = [package for package in packages if version(package["rust_version"] or "1.0") > version(ours)]
    for package in newer:
        print(f"{package['name']} {package['version']} needs Rust {package['rust_version']}")
    if newer:
        sys.exit(f"Cargo.toml says that Rust {ours} is enough: `cargo update` with an older version, or raise rust-version")


if __name__ == "__main__":
    main()
