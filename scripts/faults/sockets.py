"""The sockets of other processes, and the harm that a network or a broken program may do to them. Needs Linux 5.6."""

import ctypes
import os
import socket
import struct
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
PIDFD_GETFD = 438
TCP_USER_TIMEOUT = 18
SO_ATTACH_FILTER = 26
ESTABLISHED, LISTEN = "01", "0A"
# Neither a handshake, nor a header, nor a frame, nor a request to the store.
GARBAGE = b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: something else\r\n\r\n" * 4


def of(pid, ends=None):
    """Returns the established TCP connections of a process: (descriptor, own end, other end), in the order of descriptors.
    `ends` are those of the system, whose table is long when other programs have many connections.
    """
    ends = table(ESTABLISHED) if ends is None else ends
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:[") and (inode := target[8:-1]) in ends:
            found.append((int(fd), *ends[inode]))
    return sorted(found)


def table(state):
    """Returns both ends of each of the system's TCP sockets in a state, by inode."""
    ends = {}
    for name in ["tcp", "tcp6"]:
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state:
                ends[fields[9]] = (fields[1], fields[2])
    return ends


def port(end):
    return int(end.rsplit(":", 1)[1], 16)


def is_listening(number):
    return any(port(own) == number for own, _ in table(LISTEN).values())


def take(pid, fd):
    """Returns a socket of another process. Both have it from then on."""
    pidfd = os.pidfd_open(pid)
    try:
        got = LIBC.syscall(PIDFD_GETFD, pidfd, fd, 0)
    finally:
        os.close(pidfd)
    if got < 0:
        raise OSError(ctypes.get_errno(), f"taking socket {fd} of process {pid}")
    return socket.socket(fileno=got)


def is_control(sock):
    """Whether a connection of the CPU engine is one of the monitors: only those give up on data without an answer."""
    return sock.getsockopt(socket.IPPROTO_TCP, TCP_USER_TIMEOUT) > 0


def close(sock):
    """Ends a connection in both directions."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other end was first


def deafen(sock):
    """Makes the system drop whatever arrives, as if the cable were cut: neither end notices."""
    drop = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))  # return 0
    program = struct.pack("@HP", 1, ctypes.addressof(drop))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def disturb(sock):
    """Sends bytes that belong to none of the protocols here."""
    try:
        sock.send(GARBAGE, socket.MSG_DONTWAIT)
    except OSError:
        pass  # full, or closed
