"""Ports for jobs on this machine: for the demo and for the tests."""
import random
import socket

_held = []  # What marks ports as ours, as long as this process lives.


def _range():
    """Ports outside of those that the system gives to whoever connects: between look and use none of them takes it."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            low, high = (int(word) for word in file.read().split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    below, above = range(10240, low), range(high + 1, 65536)
    return below if len(below) >= len(above) else above


def free_port():
    """A port that nobody listens at, and that no other process which asks here gets while this one lives."""
    ports = _range()
    for port in random.sample(ports, min(len(ports), 1000)):
        mark = socket.socket(socket.AF_UNIX)
        try:
            mark.bind(f"\0atoll-loopback-port-{port}")
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # As the programs do.
                probe.bind(("127.0.0.1", port))
        except OSError:
            mark.close()
            continue
        _held.append(mark)
        return port
    raise OSError("no free port on 127.0.0.1")


def free_ports(count):
    """The first of so many ports in a row that nobody listens at; ours as free_port's are."""
    for _ in range(1000):
        first = free_port()
        marks = len(_held)
        try:
            for port in range(first + 1, first + count):
                mark = socket.socket(socket.AF_UNIX)
                _held.append(mark)
                mark.bind(f"\0atoll-loopback-port-{port}")
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            while len(_held) > marks:
                _held.pop().close()
            continue
        return first
    raise OSError(f"no {count} free ports in a row on 127.0.0.1")
