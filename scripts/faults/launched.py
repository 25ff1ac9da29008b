"""A program of ranks under the launcher, in its own folder."""

import os
import signal
import subprocess
import time
from pathlib import Path

# How long a run may take to come to an event.
PATIENCE = 120
# The allowance for starting, ending and reporting, in seconds, on a machine with nothing else to do.
SLACK = 5


class Wrong(Exception):
    """A run did not end as expected."""


def slack():
    """Returns the allowance with the present load."""
    return SLACK * min(max(1, os.getloadavg()[0] / (os.cpu_count() or 1)), 4)


class Launched:
    """One run. Its processes do not outlive the `with` block."""

    def __init__(self, command, folder, variables):
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
        environment |= {"CANDLE_DDP_TEST_FOLDER": folder, "RAYON_NUM_THREADS": 1, "TMPDIR": self.temporary, **variables}
        environment = {name: str(value) for name, value in environment.items()}
        self.output = folder / "output"
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # Only after a failure is anything left to end.
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()

    def read(self, name):
        return (self.folder / name).read_text() if (self.folder / name).exists() else None

    def tell(self, name):
        (self.folder / name).touch()

    def text(self):
        return self.output.read_text(errors="replace")

    def wait_for(self, what, found, patience=PATIENCE):
        """Waits until `found` returns something, and returns that."""
        end = time.monotonic() + patience
        while not (result := found()):
            if self.process.poll() is not None and not found():
                raise Wrong(f"the run ended before {what}: {self.text()[-2000:]}")
            if time.monotonic() > end:
                raise Wrong(f"no {what} within {patience} s")
            time.sleep(0.005)
        return result

    def end(self, limit):
        """Waits for the launcher to end, and returns its exit code."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise Wrong(f"HANG: the run has not ended {limit:.0f} s after the fault: {self.text()[-2000:]}") from None

    def processes(self):
        """Returns the processes that belong to this run."""
        mark, found = f"CANDLE_DDP_TEST_FOLDER={self.folder}\0".encode(), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    environment = (entry / "environ").read_bytes()
                    zombie = (entry / "stat").read_text().rsplit(") ", 1)[1][0] in "ZX"
                except OSError:
                    continue
                if mark in environment + b"\0" and not zombie:
                    found.append(int(entry.name))
        return found
