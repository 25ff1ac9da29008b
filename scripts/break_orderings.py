#!/usr/bin/env python3
"""Weakens the protocol of shared memory in one place at a time, and shows that the model (crates/candle-ddp-engine/model) notices.

    scripts/break_orderings.py [NAME]

It works on a copy, and fails if a test passes that ought to fail.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINE = "crates/candle-ddp-engine"
MODEL = f"{ENGINE}/model"
SHM = f"{ENGINE}/src/shm"

# Name: (file, original text, replacement).
BREAKS = {
    "the stamp is stored without release": (
        "stream.rs",
        "self.segment.word(line).store(self.position, Ordering::Release)",
        "self.segment.word(line).store(self.position, Ordering::Relaxed)",
    ),
    "the stamp is loaded without acquire": (
        "stream.rs",
        "self.segment.word(self.ring.line(self.position)).load(Ordering::Acquire)",
        "self.segment.word(self.ring.line(self.position)).load(Ordering::Relaxed)",
    ),
    "passed slots are counted without release": (
        "stream.rs",
        "inbox.own.word(inbox.passed).store(inbox.position, Ordering::Release)",
        "inbox.own.word(inbox.passed).store(inbox.position, Ordering::Relaxed)",
    ),
    "passed slots are looked at without acquire": (
        "stream.rs",
        "passed.load(Ordering::Acquire)",
        "passed.load(Ordering::Relaxed)",
    ),
    "a slot is reused too early": ("stream.rs", "< slots as i32", "<= slots as i32"),
    "the stamp comes before the payload": (
        "stream.rs",
        "        fill(Slot::new(&self.segment, self.ring.slot(position)))?;\n",
        "        self.segment.word(line).store(position.wrapping_add(1), Ordering::Release);\n"
        "        fill(Slot::new(&self.segment, self.ring.slot(position)))?;\n",
    ),
    "the writer does not ring": ("stream.rs", "reader.eventcount.ring_if_awaited(self.rank);", "let _ = reader;"),
    "the reader does not ring": ("stream.rs", "            inbox.writer_eventcount.ring_if_awaited(inbox.rank);\n", ""),
    "no fence before the writer looks for a sleeper": (
        "stream.rs",
        "        fence(Ordering::SeqCst);\n        for reader",
        "        for reader",
    ),
    "no fence before the reader looks for a sleeper": (
        "stream.rs",
        "        fence(Ordering::SeqCst);\n        for inbox",
        "        for inbox",
    ),
    "no fence before the last check": (
        "eventcount.rs",
        "            fence(Ordering::SeqCst);\n            if ready()",
        "            if ready()",
    ),
    "no last check before the sleep": (
        "eventcount.rs",
        "            if ready() {\n                return Ok(());\n            }\n            self.check_closed",
        "            self.check_closed",
    ),
    "the number of rings is read after the last check": (
        "eventcount.rs",
        "futex_wait(self.eventcount.rings(), rings,",
        "futex_wait(self.eventcount.rings(), self.eventcount.rings().load(Ordering::Relaxed),",
    ),
    "a ring does not count": (
        "eventcount.rs",
        "        self.rings().fetch_add(1, Ordering::Release);\n",
        "",
    ),
    "a ring wakes nobody": ("eventcount.rs", "        futex_wake(self.rings());\n", ""),
    "closing does not ring": ("eventcount.rs", "    eventcounts.for_each(|eventcount| eventcount.ring());\n", "    drop(eventcounts);\n"),
    "the group is closed after the rings": (
        "eventcount.rs",
        "    closed.store(true, Ordering::Release);\n    eventcounts.for_each(|eventcount| eventcount.ring());\n",
        "    eventcounts.for_each(|eventcount| eventcount.ring());\n    closed.store(true, Ordering::Release);\n",
    ),
    "rings are counted without release": (
        "eventcount.rs",
        "self.rings().fetch_add(1, Ordering::Release);",
        "self.rings().fetch_add(1, Ordering::Relaxed);",
    ),
}


def model(folder):
    """Runs the model in `folder`. Returns whether it failed, and the names of the tests that did."""
    manifest = folder / MODEL / "Cargo.toml"
    environment = {**os.environ, "CARGO_TARGET_DIR": str(ROOT / MODEL / "target/breaks")}
    build = ["cargo", "test", "--locked", "--no-run", "--message-format=json", "--manifest-path", manifest]
    built = subprocess.run(build, env=environment, capture_output=True, text=True)
    if built.returncode:
        sys.exit(f"it does not compile:\n{built.stderr}")
    messages = [json.loads(line) for line in built.stdout.splitlines()]
    [program] = [message["executable"] for message in messages if message.get("executable")]
    # Loom may panic while it panics, which ends the process.
    run = subprocess.run([program], capture_output=True, text=True)
    return run.returncode != 0, sorted(set(re.findall(r"^    [\w:]*properties::(\w+)$", run.stdout, re.MULTILINE)))


def main():
    names = sys.argv[1:] or list(BREAKS)
    unnoticed = []
    for name in names:
        file, old, new = BREAKS[name]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            for part in [f"{ENGINE}/src", MODEL]:
                # Without the modification times of the originals, which cargo would mistake for the last build's.
                ignore = shutil.ignore_patterns("target")
                shutil.copytree(ROOT / part, folder / part, ignore=ignore, copy_function=shutil.copyfile)
            path = folder / SHM / file
            text = path.read_text()
            if old not in text:
                sys.exit(f"{name}: {file} has no {old!r} any more")
            path.write_text(text.replace(old, new))
            failed, tests = model(folder)
        print(f"{name}: {'noticed by ' + ', '.join(tests) if failed else 'NOT NOTICED'}", flush=True)
        if not failed:
            unnoticed.append(name)
    sys.exit(f"{len(unnoticed)} of {len(names)} were not noticed" if unnoticed else 0)


if __name__ == "__main__":
    main()
