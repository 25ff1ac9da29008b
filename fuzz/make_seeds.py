#!/usr/bin/env python3
"""Writes the first seeds of the fuzz targets to fuzz/seeds, and those of the engine's to its fuzz/seeds: one valid input for every kind of thing that a target reads.

    fuzz/make_seeds.py

The same folders hold inputs that the fuzzer has found, which this leaves alone.
"""
import json
import struct
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
ENGINE = ROOT.parent / "crates/candle-ddp-engine/fuzz"


def seed(target, name, data):
    folder = (ENGINE if target == "mesh" else ROOT) / "seeds" / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


def store():
    def text(value):
        return struct.pack("<Q", len(value)) + value

    def keys(command, *names):
        return bytes([command]) + struct.pack("<Q", len(names)) + b"".join(map(text, names))

    number = lambda value: struct.pack("<q", value)
    requests = {
        "set_get": [b"\x01" + text(b"/a") + text(b"xyz"), b"\x03" + text(b"/a"), b"\x03" + text(b"/b")],
        "compare_set": [b"\x02" + text(b"/a") + text(b"") + text(b"new"), b"\x02" + text(b"/a") + text(b"new") + text(b"newer")],
        "add": [b"\x04" + text(b"init/") + number(1), b"\x04" + text(b"init/") + number(-7)],
        "check_wait": [keys(5, b"/a", b"/b"), keys(6, b"/a", b"/b"), b"\x0c"],
        "wait_set": [keys(6, b"/a"), b"\x01" + text(b"/a") + text(b"1")],
        "keys": [b"\x07", b"\x08" + text(b"/a"), b"\x11"],
        "append": [b"\x09" + text(b"/a") + text(b"b"), b"\x09" + text(b"/a") + text(b"c")],
        "multi": [b"\x0b" + number(2) + text(b"/a") + text(b"1") + text(b"/b") + text(b"2"), keys(10, b"/a", b"/b", b"/c")],
        "ping": [b"\x0d\x04\x03\x02\x01"],
        "queue": [b"\x0e" + text(b"/q") + text(b"v"), b"\x10" + text(b"/q"), b"\x0f" + text(b"/q"), b"\x0f" + text(b"/q")],
        # The server closes the connection of the second client because of its last byte.
        "last_will": [keys(6, b"/q"), b"\xde" + text(b"\x0e" + text(b"/q") + text(b"v")) + b"\xff"],
        "barrier": [b"\x12" + text(b"/b") + number(2), b"\x12" + text(b"/b") + number(2)],
    }
    for name, parts in requests.items():
        # Packets: client, length, bytes. Every request comes from another client, and each in two pieces.
        data = b""
        for client, part in enumerate(parts):
            for piece in [part[:5], part[5:]]:
                data += bytes([client, len(piece)]) + piece
        seed("store_protocol", name, data)


def mesh():
    text = lambda value: struct.pack("<I", len(value)) + value
    call = struct.pack("<BBBBIQI", 1, 0, 0, 0, 2**32 - 1, 20, 0)
    bodies = {
        "goodbye": b"\0" + struct.pack("<QQQ", 7, 8, 9),
        "ack": b"\2",
        "query": b"\3" + struct.pack("<Q", 3),
        "answer": b"\4" + struct.pack("<QQQ", 3, 5, 5) + struct.pack("<BI", 1, 1) + call,
    }
    aborts = {
        "gone": b"\0" + struct.pack("<II", 1, 2) + text(b"all_reduce(f32[20])"),
        "left": b"\1" + struct.pack("<IQ", 1, 8) + text(b"barrier()") + struct.pack("<Q", 9),
        "failed": b"\2" + struct.pack("<I", 1) + text(b"out of memory"),
        "desync": b"\3" + struct.pack("<QI", 4, 1) + text(b"barrier()") + struct.pack("<I", 2) + text(b"all_reduce(u8[1])"),
        "timed_out": b"\4" + struct.pack("<I", 1) + text(b"barrier()") + struct.pack("<QQ", 4, 1000) + text(b"missing: 2"),
    }
    bodies.update({f"abort_{name}": b"\1" + body for name, body in aborts.items()})
    for name, body in bodies.items():
        seed("mesh", name, b"\0\3" + struct.pack("<I", len(body)) + body)
    seed("mesh", "handshake", b"\1cDDP" + struct.pack("<IQIIQQQQ", 8, 1 << 60, 3, 1, 5, 1, 6, 7))
    seed("mesh", "header", b"\2cddp" + struct.pack("<Q", 9) + call)
    seed("mesh", "peer_info", b"\3" + bytes(16) + struct.pack("<QB", 1 << 60, 1))


def weights():
    golden = ROOT.parent / "tests" / "golden"
    for name in ["checkpoint.pt", "checkpoint_run.pth", "checkpoint.safetensors", "checkpoint_output.safetensors"]:
        data = (golden / name).read_bytes()
        seed("checkpoint_file", name, data)
        if name.endswith(("pt", "pth")):
            with zipfile.ZipFile(golden / name) as archive:
                [member] = [member for member in archive.namelist() if member.endswith("/data.pkl")]
                seed("pickle", name, archive.read(member))


def texts():
    index = {
        "format": 1, "step": 7, "best": True, "world_size": 2,
        "parts": [{"name": "model", "sharded": False, "files": [{"name": "model.safetensors", "bytes": 4}]}],
    }
    seed("json", "index", b"\0" + json.dumps(index).encode())

    def record(rank, state):
        call = {
            "channel": "collectives", "sequence": 1, "operation": "all_reduce", "dtype": "f32", "count": 20, "reduction": "sum",
            "root": None, "peer": None, "label": None, "state": state, "scheduled_ns": 1, "started_ns": 2, "completed_ns": None,
        }
        message = {**call, "channel": "send", "operation": "send", "peer": 1 - rank, "reduction": None}
        group = {"name": "world", "ranks": [0, 1], "failure": "rank 1 is gone", "calls": [call, message]}
        return {
            "version": 1, "rank": rank, "world_size": 2, "host": "a", "pid": 7, "reason": "a call timed out", "written_ns": 5,
            "groups": [group],
        }

    records = [json.dumps(record(0, "started")).encode(), json.dumps(record(1, "completed")).encode()]
    seed("json", "records", b"\1" + b"\0".join(records))
    event = {"name": "forward", "ph": "X", "pid": 0, "tid": 0, "ts": 1.5, "dur": 2}
    line = json.dumps(event).encode()
    seed("json", "trace", b"\2[" + line + b",\n" + line + b"]\n")
    seed("json", "torn_trace", b"\2[" + line + b",\n" + line[:20])


store()
mesh()
weights()
texts()
