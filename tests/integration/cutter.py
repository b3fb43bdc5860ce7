"""A network that breaks: proxies between the processes of a job, which cut connections at given byte counts.

Members tell each other where they listen. On the way through here these addresses are replaced by those of the
proxies (the wire is not encrypted, and all ports have the same number of digits), so that every connection between
the two goes through here, those made after a cut too, whoever makes them.
"""
import socket
import struct
import threading

import raw_peer

TO_OWNER, FROM_OWNER = 0, 1


class Network:
    """All connections between one owner and one worker, and when they are cut.

    A cut is (direction, count): when so many bytes have gone that way since the cut before. Exactly that many get
    through; then the connection that carried them ends, and what it had under way in both directions is lost. One
    that has carried no more than `spared` bytes that way is let pass: the next of the others is cut.
    """

    def __init__(self, limit_s):
        self._limit_s = limit_s
        self._changed = threading.Lock()
        self._routes = []    # (the real address, ours), as bytes of the same size.
        self._listeners, self._open = [], []
        self._cuts = []      # Still to come.
        self._counts = [0, 0]
        self._spared = 0
        self.made = []       # Of each cut made: (direction, bytes that its connection had carried that way).
        self.connections = 0

    def stand_before(self, target_port, own_port, forward):
        """Listens at `own_port` for connections to `target_port`; what these send goes in direction `forward`."""
        target, own = (f"127.0.0.1:{port}" for port in (target_port, own_port))
        assert len(target) == len(own), (target, own)
        listener = socket.create_server(("127.0.0.1", own_port))
        with self._changed:
            self._routes.append((target.encode(), own.encode()))
            self._listeners.append(listener)
        threading.Thread(target=self._accept, args=(listener, target, forward), daemon=True).start()
        return own

    def cut(self, cuts, spared=0):
        with self._changed:
            self._cuts, self._counts, self._spared = list(cuts), [0, 0], spared

    def close(self):
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._changed:
            for raw in self._open:
                raw.close()

    def _accept(self, listener, target, forward):
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = raw_peer.connect(target, self._limit_s)
            except OSError:  # Not there yet, or not any more: so it looks from the other side too.
                client.close()
                continue
            for raw in (client, server):
                raw.settimeout(None)
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._changed:
                self.connections += 1
                self._open += [client, server]
            for source, sink, direction in ((client, server, forward), (server, client, 1 - forward)):
                threading.Thread(target=self._pump, args=(source, sink, direction), daemon=True).start()

    def _pass(self, direction, size, carried):
        """How many of `size` bytes get through, and the number of the cut behind them, or 0."""
        with self._changed:
            before = self._counts[direction]
            self._counts[direction] += size
            if not self._cuts or self._cuts[0][0] != direction or before + size < self._cuts[0][1]:
                return size, 0
            let_through = max(self._cuts[0][1] - before, 0)
            if carried + let_through <= self._spared:
                return size, 0
            size = let_through
            self._cuts.pop(0)
            self._counts = [0, 0]
            self.made.append((direction, carried + size))
            return size, len(self.made)

    def _pump(self, source, sink, direction):
        carried, cut = 0, 0
        try:
            while cut == 0:
                data = source.recv(1 << 16)
                if not data:
                    break
                for target, own in self._routes:
                    data = data.replace(target, own)
                size, cut = self._pass(direction, len(data), carried)
                sink.sendall(data[:size])
                carried += size
            if cut % 2:  # Every other cut is a reset for who sent.
                source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                source.close()
        except OSError:
            pass
        raw_peer.end(source, sink)
