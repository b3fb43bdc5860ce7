"""What a stranger, or a member gone wrong, may send: our handshake and TensorPipe's frames, by hand.

The formats are those of docs/wire.md, written here a second time and independently of the library.
"""
import hashlib
import hmac
import os
import socket
import struct
import threading

MAGIC = b"AtollTP\n"
VERSION = 1
CHALLENGE, REFUSE_VERSION, REFUSE_FINGERPRINT = 1, 2, 4
NO_LANE = 255


def connect(address, limit_s):
    """To "unix:@name" or "host:port"."""
    if address.startswith("unix:@"):
        raw = socket.socket(socket.AF_UNIX)
        target = "\0" + address[len("unix:@"):]
    else:
        raw = socket.socket(socket.AF_INET)
        host, port = address.rsplit(":", 1)
        target = (host, int(port))
    # Blocking, since a Unix socket with a full backlog would say EAGAIN otherwise; with the hang limit.
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(limit_s), 0))
    try:
        raw.connect(target)
    except OSError:
        raw.close()
        raise
    raw.settimeout(limit_s)
    return raw


def send(raw, data):
    """Whether it was taken: the other end may be gone already."""
    try:
        raw.sendall(data)
        return True
    except (BrokenPipeError, ConnectionResetError):
        return False


def receive(raw, size):
    """`size` bytes, or fewer if the connection ends."""
    data = b""
    while len(data) < size:
        try:
            more = raw.recv(size - len(data))
        except ConnectionResetError:
            break
        if not more:
            break
        data += more
    return data


def end(*sockets):
    """Ends their connections for both sides; those that are over already are left alone."""
    for raw in sockets:
        try:
            raw.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def until_end(raw):
    """What still comes until the other end closes; fails by the hang limit if it does not."""
    data = b""
    while True:
        more = receive(raw, 1 << 16)
        data += more
        if len(more) < 1 << 16:
            return data


def string(text):
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<I", len(data)) + data


def frame(data):
    return struct.pack("<Q", len(data)) + data


def frames(data):
    """The whole frames at the beginning of `data`."""
    result = []
    while len(data) >= 8:
        size, = struct.unpack_from("<Q", data)
        if len(data) < 8 + size:
            break
        result.append(data[8:8 + size])
        data = data[8 + size:]
    return result


def parse(data, kinds):
    """Values one after the other: s, a string; Q, a u64; B, a byte; n, a nonce or proof."""
    values, at = [], 0
    for kind in kinds:
        if kind == "s":
            size, = struct.unpack_from("<I", data, at)
            at += 4
        else:
            size = 32 if kind == "n" else struct.calcsize(kind)
        part = data[at:at + size]
        values.append(part if kind in "sn" else struct.unpack("<" + kind, part)[0])
        at += size
    return values


class Greeting:
    """Our side of one handshake, as a client."""

    def __init__(self, job, key, fingerprint, name="stranger", listener=0, lane=0, version=VERSION):
        self.job, self.key, self.fingerprint, self.name = job, key, fingerprint, name
        self.listener, self.lane, self.version = listener, lane, version
        self.incarnation = 1 + int.from_bytes(os.urandom(7), "little")
        self.nonce = os.urandom(32)
        self.server = None  # Name, incarnation, fingerprint, nonce.
        self.server_proof = b""

    def body(self):
        return (string(self.job) + string(self.name) + struct.pack("<QBB", self.incarnation, self.listener, self.lane) +
                string(self.fingerprint) + self.nonce)

    def hello(self):
        body = self.body()
        return MAGIC + struct.pack("<II", self.version, len(body)) + body

    def take_reply(self, raw):
        """The kind of the reply (None: there was none) and its body."""
        head = receive(raw, 5)
        if len(head) < 5:
            return None, b""
        kind, size = struct.unpack("<BI", head)
        body = receive(raw, size)
        if kind == CHALLENGE:
            *server, self.server_proof = parse(body, "sQsnn")
            self.server = tuple(server)
        return kind, body

    def proof(self, direction):
        name, incarnation, fingerprint, nonce = self.server
        text = (string("atoll transport handshake") + string(direction) + struct.pack("<I", self.version) +
                string(self.job) + string(self.name) + struct.pack("<Q", self.incarnation) +
                string(name) + struct.pack("<Q", incarnation) + struct.pack("<BB", self.listener, self.lane) +
                string(self.nonce) + string(nonce) + string(self.fingerprint) + string(fingerprint))
        return hmac.new(self.key, text, hashlib.sha256).digest()

    def server_knows_the_key(self):
        return hmac.compare_digest(self.server_proof, self.proof("server"))


class Listener:
    """Where a process of a job is expected, somebody else answers every hello with `answer(hello)`."""

    def __init__(self, answer, limit_s):
        self._answer, self._limit_s = answer, limit_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            raw.settimeout(self._limit_s)
            with raw:
                head = receive(raw, 16)
                body = receive(raw, struct.unpack_from("<I", head, 12)[0]) if len(head) == 16 else b""
                send(raw, self._answer(body))
                until_end(raw)

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def refusal(kind, text):
    return struct.pack("<B", kind) + string(text)


def challenge(hello, key, name, fingerprint):
    """What a server called `name` answers to a hello's body."""
    job, client, incarnation, listener, lane, client_fingerprint, nonce = parse(hello, "ssQBBsn")
    greeting = Greeting(job, key, client_fingerprint, client, listener, lane)
    greeting.incarnation, greeting.nonce = incarnation, nonce
    greeting.server = (name, greeting.incarnation + 1, fingerprint, os.urandom(32))
    body = (string(name) + struct.pack("<Q", greeting.server[1]) + string(fingerprint) + greeting.server[3] +
            greeting.proof("server"))
    return struct.pack("<BI", CHALLENGE, len(body)) + body


# TensorPipe's frames are libnop values.

def nop(value):
    """int, str or bytes (a string), dict (a map), tuple (a structure)."""
    if isinstance(value, int):
        return bytes([value]) if value < 128 else b"\x83" + struct.pack("<Q", value)
    if isinstance(value, (str, bytes)):
        data = value.encode() if isinstance(value, str) else value
        return b"\xbd" + nop(len(data)) + data
    if isinstance(value, dict):
        return b"\xbb" + nop(len(value)) + b"".join(nop(key) + nop(item) for key, item in value.items())
    if isinstance(value, tuple):
        return b"\xb9" + nop(len(value)) + b"".join(nop(item) for item in value)
    if isinstance(value, list):
        return b"\xba" + nop(len(value)) + b"".join(nop(item) for item in value)
    raise TypeError(value)


def un_nop(data):
    """The value, as above; binaries are bytes, strings too."""

    def value(at):
        prefix = data[at]
        at += 1
        if prefix < 0x80:
            return prefix, at
        if prefix <= 0x87:
            size = 1 << (prefix & 3)
            return int.from_bytes(data[at:at + size], "little", signed=prefix >= 0x84), at + size
        if prefix >= 0xc0:
            return prefix - 256, at
        if prefix == 0xb8:
            index, at = value(at)
            item, at = value(at)
            return (index, item), at
        if prefix == 0xbe:
            return None, at
        count, at = value(at)
        if prefix in (0xbc, 0xbd):
            return data[at:at + count], at + count
        items = []
        for _ in range(2 * count if prefix == 0xbb else count):
            item, at = value(at)
            items.append(item)
        if prefix == 0xbb:
            return dict(zip(items[::2], items[1::2])), at
        return tuple(items), at

    return value(0)[0]


def new_pipe(name="raw"):
    return b"\xb8" + nop(0) + nop((name,))


def join_pipe(registration):
    return b"\xb8" + nop(1) + nop((registration,))


def brochure(channels):
    return nop(({"atoll": "atoll:1"}, channels))


BASIC = {"basic": {("cpu", 0): "any"}}


def descriptor(header):
    return nop((header, [], []))


# Headers of sessions.

def prefix(kind, what=0, flags=0, number=0, call=0, lowest=0):
    return struct.pack("<BBBxxxxxQQQQQ", kind, what, flags, 0, 0, number, call, lowest)


def session_hello(attempt=1):
    limits = struct.pack("<QQQ", 16 << 20, 4096, 1 << 40)
    return prefix(1) + struct.pack("<IQQ", 4, attempt, 0) + limits + struct.pack("<II", 0, 0)


def bundle(*headers):
    return prefix(5) + struct.pack("<I", len(headers)) + b"".join(string(header) for header in headers)


def request(number, method, body):
    return (prefix(3, what=1, flags=1, number=number, call=number, lowest=number) + struct.pack("<q", 0) +
            string(method) + struct.pack("<II", 1, 0) + string(body) + struct.pack("<I", 0))


def take_answer(raw):
    """Whether a reply to a request comes before the end."""
    while True:
        head = receive(raw, 8)
        if len(head) < 8:
            return False
        header = un_nop(receive(raw, struct.unpack("<Q", head)[0]))[0]
        if header[:2] == b"\x03\x02" or header[:1] == b"\x05" and b"\x03\x02" in header:  # In a bundle.
            return True


class Recorder:
    """Stands between an honest process and `target`, and keeps what went through each connection."""

    def __init__(self, target, limit_s):
        self._target, self._limit_s = target, limit_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "127.0.0.1:%d" % self._listener.getsockname()[1]
        self._mu = threading.Lock()
        self._flights = []  # [from the client, from the server], in order of their coming.
        self._open = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            flight = [bytearray(), bytearray()]
            try:
                server = connect(self._target, self._limit_s)
            except OSError:  # Not there yet: so it looks from the other side too.
                client.close()
                continue
            for raw in (client, server):
                raw.settimeout(None)
            with self._mu:
                self._flights.append(flight)
                self._open += [client, server]
            for source, sink, record in ((client, server, flight[0]), (server, client, flight[1])):
                threading.Thread(target=self._pump, args=(source, sink, record), daemon=True).start()

    def _pump(self, source, sink, record):
        try:
            while True:
                data = source.recv(1 << 16)
                if not data:
                    break
                with self._mu:
                    if len(record) < 1 << 20:
                        record += data
                sink.sendall(data)
        except OSError:
            pass
        end(source, sink)

    def flights(self):
        with self._mu:
            return [(bytes(client), bytes(server)) for client, server in self._flights]

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._mu:
            for raw in self._open:
                raw.close()
