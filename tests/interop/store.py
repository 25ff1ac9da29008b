"""PyTorch's side of tests/interop/store.rs.

client HOST PORT  a TCPStore client of a candle-ddp server
server            a TCPStore server for candle-ddp clients: prints its port, and exits at the end of its standard input
group             a rank of a process group, configured by a launcher's environment
"""
import os
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

LONG = timedelta(seconds=60)
SHORT = timedelta(milliseconds=100)


def expect(actual, expected):
    if actual != expected:
        raise AssertionError(f"got {actual!r}, expected {expected!r}")


def fails(error, call):
    try:
        call()
    except error as caught:
        return caught
    raise AssertionError(f"{call} did not fail")


def client(host, port):
    def connect():
        return dist.TCPStore(host, port, None, False, LONG)

    store = connect()
    # The Rust side has set these keys, and waits for others.
    expect(store.get("from_rust"), bytes(range(256)))
    store.set("from_torch", bytes(range(256)).decode("latin-1"))

    store.set("a", "1")
    store.set("a", "2")
    expect(store.get("a"), b"2")
    store.set("empty", "")
    expect(store.get("empty"), b"")
    large = "x" * (8 << 20)
    store.set("large", large)
    expect(store.get("large"), large.encode())
    expect(store.add("n", 5), 5)
    expect(store.add("n", -7), -2)
    expect(store.get("n"), b"-2")
    expect(store.compare_set("c", "x", "y"), b"x")
    expect(store.check(["c"]), False)
    expect(store.compare_set("c", "", "first"), b"first")
    expect(store.compare_set("c", "x", "second"), b"first")
    expect(store.compare_set("c", "", "second"), b"first")
    expect(store.compare_set("c", "first", "second"), b"second")
    expect(store.check(["a", "c"]), True)
    expect(store.check(["a", "none"]), False)
    before = store.num_keys()
    store.append("log", "one ")
    store.append("log", "two")
    expect(store.get("log"), b"one two")
    store.multi_set(["x", "y"], ["1", "2"])
    expect(store.multi_get(["y", "x"]), [b"2", b"1"])
    expect(store.num_keys(), before + 3)
    expect(store.delete_key("x"), True)
    expect(store.delete_key("x"), False)
    expect(store.num_keys(), before + 2)
    keys = set(store.list_keys())
    if not {"a", "c", "n", "log", "y", "from_rust"} <= keys or "x" in keys:
        raise AssertionError(keys)

    # A wait that times out; the connection must still work afterwards.
    for _ in range(3):
        fails(dist.DistStoreError, lambda: store.wait(["a", "never"], SHORT))
        expect(store.get("a"), b"2")
    store.set_timeout(SHORT)
    fails(dist.DistStoreError, lambda: store.get("never"))
    store.set_timeout(LONG)
    store.wait(["a", "c"], LONG)

    # A wait that ends when another client sets the key.
    other = connect()
    setter = threading.Timer(0.2, lambda: other.set("late", "here"))
    setter.start()
    expect(store.get("late"), b"here")
    setter.join()

    expect(store.queue_len("q"), 0)
    store.queue_push("q", "1")
    store.queue_push("q", "2")
    expect(store.queue_len("q"), 2)
    expect(store.check(["q"]), True)
    expect(store.queue_pop("q"), b"1")
    expect(store.queue_pop("q", False), b"2")
    expect(store.check(["q"]), False)
    fails(dist.QueueEmptyError, lambda: store.queue_pop("q", False))
    pusher = threading.Timer(0.2, lambda: other.queue_push("q", "3"))
    pusher.start()
    expect(store.queue_pop("q"), b"3")
    pusher.join()

    if hasattr(store, "barrier"):
        store.barrier("alone", 1)
        fails(dist.DistStoreError, lambda: store.barrier("two_never", 2, SHORT))
        thread = threading.Thread(target=lambda: other.barrier("two", 2, LONG))
        thread.start()
        store.barrier("two", 2, LONG)
        thread.join()

    prefixed = dist.PrefixStore("room", store)
    expect(prefixed.get("from_rust"), b"in the room")
    prefixed.set("from_torch", "in the room")
    store.set("done", "")


def server():
    store = dist.TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)
    dist.PrefixStore("room", store).set("from_torch", "in the room")
    store.set("from_torch", bytes(range(256)).decode("latin-1"))
    print(f"port {store.port}", flush=True)
    sys.stdin.read()
    expect(dist.PrefixStore("room", store).get("from_rust"), b"in the room")
    expect(store.get("from_rust"), bytes(range(256)))


def group():
    """Runs a rank of a PyTorch process group whose store candle-ddp hosts like a launcher."""
    dist.init_process_group("gloo", timeout=LONG)
    ones = torch.ones(3) * (dist.get_rank() + 1)
    dist.all_reduce(ones)
    expect(ones.tolist(), [3.0] * 3)
    everyone = [None, None]
    dist.all_gather_object(everyone, f"rank {dist.get_rank()}")
    expect(everyone, ["rank 0", "rank 1"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    if mode == "client":
        client(arguments[0], int(arguments[1]))
    elif mode == "server":
        server()
    elif mode == "group":
        group()
    print(f"torch {torch.__version__}: {mode} is done", flush=True)
    # PyTorch's threads sometimes abort an interpreter that exits normally.
    os._exit(0)
