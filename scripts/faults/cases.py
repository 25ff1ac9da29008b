"""The faults, the moments at which they happen, and the expected outcomes."""

import re
from dataclasses import dataclass, replace

FAULTS = {
    "kill": "kill -9",
    "stop": "SIGSTOP for ever",
    "pause": "SIGSTOP for 5 s",
    "panic": "panic",
    "exit": "exit(0)",
    "error": "`Err` from main",
    "closed": "closed sockets",
    "half_open": "half-open sockets",
    "garbage": "garbage in the stream",
    "disk": "ENOSPC",
    "memory": "no memory for segments",
    "descriptors": "EMFILE",
}
MOMENTS = {
    "rendezvous": "rendezvous",
    "construction": "construction",
    "forward": "forward",
    "all_reduce": "in an all-reduce",
    "comparison": "while the others compare a checkpoint",
    "checkpoint": "in a checkpoint write",
}
ENGINES = {"shm": "CPU, shared memory", "tcp": "CPU, TCP", "hosts": "CPU, two hosts", "nccl": "NCCL"}
# The victims: rank 0, a middle one, the last.
VICTIMS = {2: [0, 1], 4: [0, 2, 3]}
# Labels stand for hosts, each of which has two ranks.
WORLDS = {"hosts": [4]}

# Faults that a process causes itself. The script causes the others, except limits of the process.
OWN = {"panic", "exit", "error"}
LIMITS = {"disk", "memory", "descriptors"}

# The time-out of groups in seconds: short where it is what ends the run.
SHORT, LONG = 8, 30
# After a time-out, ranks ask each other for the cause for up to this many seconds.
DIAGNOSIS = 5
# The length of the pause.
PAUSE = 5


@dataclass(frozen=True)
class Case:
    engine: str
    world: int
    fault: str
    moment: str
    victim: int

    def __str__(self):
        title = f"{FAULTS[self.fault]}, {MOMENTS[self.moment]}, rank {self.victim} of {self.world}"
        return f"{title}, {ENGINES[self.engine]}"


def meaningless(engine, fault, moment):
    """Returns why a combination does not apply, or None."""
    if fault == "disk" and moment != "checkpoint":
        return "nothing is written to a disk then"
    if engine == "nccl" and fault in ["closed", "half_open", "garbage"]:
        return "NCCL's connections are its own"
    if engine == "shm" and fault in ["closed", "half_open", "garbage"] and moment != "rendezvous":
        return "the ranks of one host have no connections to each other"
    if (engine, fault, moment) == ("nccl", "descriptors", "construction"):
        return "the emulated GPU loads its kernels from files then"
    if (fault, moment) == ("descriptors", "comparison"):
        return "a comparison opens nothing"
    if fault == "memory" and engine != "shm":
        return "only shared memory has segments"
    if fault == "memory" and moment not in ["rendezvous", "construction"]:
        return "segments are made when a group is: in the rendezvous, and for the checkpointer"
    return None


def all_cases(engines):
    """Returns the cases, and the combinations that do not apply, by (engine, fault, moment)."""
    cases, left_out = [], {}
    for engine in engines:
        for fault in FAULTS:
            for moment in MOMENTS:
                if reason := meaningless(engine, fault, moment):
                    left_out[engine, fault, moment] = reason
                else:
                    cases += [Case(engine, world, fault, moment, victim) for world in WORLDS.get(engine, VICTIMS) for victim in VICTIMS[world]]
    return cases, left_out


def quick_cases():
    """Every fault once, with moments, victims and transports taking turns."""
    chosen = [
        ("shm", 4, "kill", "all_reduce", 2),
        ("tcp", 2, "kill", "checkpoint", 1),
        ("shm", 4, "kill", "comparison", 1),
        ("tcp", 4, "stop", "forward", 0),
        ("shm", 2, "pause", "all_reduce", 1),
        ("shm", 4, "panic", "construction", 3),
        ("tcp", 2, "exit", "all_reduce", 0),
        ("shm", 2, "error", "forward", 1),
        ("tcp", 4, "closed", "all_reduce", 2),
        ("tcp", 2, "half_open", "forward", 1),
        ("tcp", 2, "garbage", "forward", 0),
        ("shm", 2, "disk", "checkpoint", 1),
        ("shm", 2, "memory", "rendezvous", 0),
        ("tcp", 2, "descriptors", "rendezvous", 1),
        ("shm", 4, "kill", "rendezvous", 3),
        ("hosts", 4, "kill", "all_reduce", 2),
        ("hosts", 4, "stop", "forward", 3),
    ]
    return [Case(*case) for case in chosen]


@dataclass(frozen=True)
class Expected:
    """The expected outcome."""

    # The run continues, and has the result of a run without a fault. `None`: either is right.
    continues: bool | None
    # How long after the fault survivors may take, in seconds, without the allowance for a busy machine.
    within: float
    # The reason in the error of a survivor.
    reason: str = ""
    # Whether the launcher may end survivors before their own bound.
    launcher_first: bool = False
    # Whether the launcher's report must name the victim first.
    headline: bool = True
    # Whether errors may name another rank instead of the victim.
    others: bool = False


def timeout(case):
    """Returns the time-out of the group."""
    slow = case.fault in ["stop", "half_open"] or (case.fault, case.moment) in [
        ("exit", "rendezvous"),
        ("descriptors", "rendezvous"),
    ]
    return SHORT if slow else LONG


def expected(case):
    wanted = expected_on_cpus(case)
    if case.engine != "nccl":
        return wanted
    # Over NCCL, ranks learn of a death from the store, by heartbeats that are missing for 10 s, and by NCCL's own errors.
    reason = wanted.reason and f"{wanted.reason}|ended without|heartbeat|nccl"
    return replace(wanted, within=wanted.within + 10, reason=reason, launcher_first=True)


def expected_on_cpus(case):
    late = timeout(case)
    fault, moment = case.fault, case.moment
    early = moment == "rendezvous"
    match fault:
        case "kill":
            # In the rendezvous, others notice within ten seconds, and the launcher does at once.
            return Expected(False, 10 if early else 0, "is gone|has ended|ended during|gave no sign of life", launcher_first=early)
        case "stop":
            reason = "does not answer|gave no sign of life|missing: |have not|not connect|do not answer|no connection"
            # On two hosts, one rank has a connection to the victim and waits for that goodbye when the others have ended.
            return Expected(False, late + DIAGNOSIS + told(case), reason, launcher_first=case.engine == "hosts")
        case "pause":
            return Expected(True, PAUSE)
        case "panic" | "error":
            return Expected(False, 0, "the fault that was asked for|panicked", launcher_first=early)
        case "exit":
            reason = "missing: |ended during" if early else "is gone|has ended|left the group"
            return Expected(False, late if early else 0, reason)
        case "closed" if early:
            # The store's clients may connect again.
            return Expected(None, 10, ".", launcher_first=True, headline=False)
        case "closed":
            return Expected(False, 0, "is gone|was lost", headline=False, others=case.world == 2)
        case "half_open" if early:
            return Expected(None, late, ".", launcher_first=True, headline=False)
        case "half_open" if case.engine == "hosts":
            # Only the connections between two hosts are broken: a rank may name the other end, or one that waits for it.
            reason = "does not answer|do not answer|was lost|too slow, or the network is|has not started this collective"
            # Only the leader of a host has all of its connections by the time of the construction.
            continues = None if moment == "construction" and case.victim % 2 == 1 else False
            return Expected(continues, late + DIAGNOSIS, reason, launcher_first=True, headline=False, others=True)
        case "half_open":
            return Expected(False, late + DIAGNOSIS + told(case), "does not answer|do not answer|was lost", headline=False)
        case "garbage" if early:
            return Expected(None, 10, ".", launcher_first=True, headline=False)
        case "garbage":
            return Expected(False, 0, "is not a message|does not come from this engine", headline=False)
        case "disk":
            return Expected(False, 0, "No space left on device", headline=False, others=True)
        case "memory":
            return Expected(True, 0)
        case "descriptors" if moment == "checkpoint":
            return Expected(False, 0, "Too many open files")
        case "descriptors" if early:
            # The few that a run needs may still be available.
            return Expected(None, late, ".", launcher_first=True, headline=False)
        case "descriptors" if case.engine == "hosts" and moment == "construction" and case.victim % 2 == 1:
            # Only the leader of a host has its connections by then; a rank waits for three seconds for others.
            return Expected(False, 3, "Too many open files")
        case "descriptors":
            return Expected(True, 0)
    raise ValueError(fault)


def told(case):
    """Returns for how much longer a rank waits until the victim has read why the checkpointer's group failed, which it tells the others."""
    return 3 if case.moment == "checkpoint" else 0


def names(text, rank):
    """Whether an error names a rank as the one that failed."""
    patterns = [
        rf"\brank {rank} (is gone|ended the group|left the group|failed|does not answer|sent it|gave no|has not)",
        rf"\brank {rank} ended the group",
        rf"the process of rank {rank} has ended",
        rf"connection to rank {rank} ",
        rf"the data from rank {rank} ",
        rf"\[(\d+, )*{rank}(, \d+)*\]",
        rf"missing: (\d+, )*{rank}\b",
    ]
    return any(re.search(pattern, text) for pattern in patterns)
