"""What strangers and members gone wrong do to a job's owners: one method for each kind of attack."""
import select
import socket
import ssl
import struct

import raw_peer
from harness import HANG_LIMIT_S, monotonic

TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
METHODS = ["membership.join", "membership.heartbeat", "membership.event", "membership.report", "membership.gather",
           "membership.leave", "membership.ping", "rref.create", "rref.find", "rref.release", "rref.call", "nothing"]


class Attacker:
    """Knows the job's key, where its owners listen, and what an honest worker sent when it joined."""

    def __init__(self, test, job, key, rng):
        self.test, self.job, self.key, self.random = test, job, key, rng
        self.fingerprint = "?"
        self.doors = []            # Addresses, by owner.
        self.all_doors = []
        self.flights = []          # (sent, heard) of each connection.
        self.recorded_frames = []  # Of those: TensorPipe's first two.
        self.slow_left = None

    def any_door(self):
        return self.random.choice(self.all_doors)

    def greeting(self, **kwargs):
        return raw_peer.Greeting(kwargs.pop("job", self.job.id), kwargs.pop("key", self.key),
                                 kwargs.pop("fingerprint", self.fingerprint), **kwargs)

    def learn_fingerprint(self):
        with raw_peer.connect(self.all_doors[0], HANG_LIMIT_S) as raw:
            greeting = self.greeting(fingerprint="?")
            raw_peer.send(raw, greeting.hello())
            kind, body = greeting.take_reply(raw)
        self.test.assertEqual(kind, raw_peer.REFUSE_FINGERPRINT)
        self.fingerprint = body.decode().split("'")[1]

    def ends(self, raw, sent):
        """What the server answers before it hangs up."""
        raw_peer.send(raw, sent)
        answer = raw_peer.until_end(raw)
        raw.close()
        return answer

    def greet(self, address, key=None, **kwargs):
        """(socket, greeting) after all three messages of the handshake."""
        raw = raw_peer.connect(address, HANG_LIMIT_S)
        greeting = self.greeting(**({"key": key} if key else {}), **kwargs)
        raw_peer.send(raw, greeting.hello())
        kind, body = greeting.take_reply(raw)
        if kind != raw_peer.CHALLENGE:
            return raw, None
        raw_peer.send(raw, greeting.proof("client"))
        return raw, greeting

    def let_in(self, raw):
        """Whether TensorPipe answers behind the door: who is not authenticated hears nothing and is cut off."""
        raw_peer.send(raw, raw_peer.frame(raw_peer.new_pipe()) + raw_peer.frame(raw_peer.brochure(raw_peer.BASIC)))
        head = raw_peer.receive(raw, 8)
        if len(head) < 8:
            self.test.assertEqual(head, b"")
            return None
        answer = raw_peer.receive(raw, struct.unpack("<Q", head)[0])
        return raw_peer.un_nop(answer)

    def an_honest_peer_is_let_in(self):
        for address in self.all_doors:
            raw, greeting = self.greet(address)
            with raw:
                self.test.assertIsNotNone(greeting, address)
                self.test.assertTrue(greeting.server_knows_the_key(), address)
                self.test.assertIsNotNone(self.let_in(raw), address)

    def connect_and_close(self):
        raw = raw_peer.connect(self.any_door(), HANG_LIMIT_S)
        if self.random.random() < 0.5:  # A reset instead of an end.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()

    def other_protocols(self):
        hello = ssl.MemoryBIO()
        tls = TLS.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost")
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            pass
        noise = self.random.randbytes(self.random.randrange(1, 5000))
        for data in (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", noise, b"\0" * 100):
            self.test.assertEqual(self.ends(raw_peer.connect(self.any_door(), HANG_LIMIT_S), data), b"")
        answer = self.ends(raw_peer.connect(self.any_door(), HANG_LIMIT_S), hello.read())
        self.test.assertTrue(answer == b"" or b"--tls=none" in answer, answer)  # A peer with TLS is told.

    def huge_lengths(self):
        for length in (4097, 1 << 31, (1 << 32) - 1, 0):
            head = raw_peer.MAGIC + struct.pack("<II", 1, length)
            raw = raw_peer.connect(self.any_door(), HANG_LIMIT_S)
            self.test.assertEqual(self.ends(raw, head + b"x" * min(length, 5000)), b"")
        body = bytearray(self.greeting().body())
        struct.pack_into("<I", body, 0, (1 << 32) - 1)  # Of the job's name.
        raw = raw_peer.connect(self.any_door(), HANG_LIMIT_S)
        self.test.assertEqual(self.ends(raw, raw_peer.MAGIC + struct.pack("<II", 1, len(body)) + body), b"")

    def damaged_hello(self):
        hello = bytearray(self.greeting().hello())
        for _ in range(self.random.randrange(1, 4)):
            hello[self.random.randrange(len(hello))] = self.random.randrange(256)
        raw = raw_peer.connect(self.any_door(), HANG_LIMIT_S)
        raw_peer.send(raw, bytes(hello[:self.random.randrange(len(hello) + 1)]))
        try:
            raw.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # It was quicker.
        raw_peer.until_end(raw)
        raw.close()

    def wrong_key(self):
        raw, greeting = self.greet(self.any_door(), key=self.random.randbytes(32))
        with raw:
            self.test.assertIsNotNone(greeting)
            self.test.assertFalse(greeting.server_knows_the_key())
            self.test.assertIsNone(self.let_in(raw))

    def replay(self):
        """What an honest worker sent when it joined, all its connections, to every door of its server."""
        for sent, heard in self.flights:
            raw = raw_peer.connect(self.random.choice(self.doors[0]), HANG_LIMIT_S)
            answer = self.ends(raw, sent)
            challenge = 5 + struct.unpack_from("<I", heard, 1)[0]
            # A new challenge, with which the recorded proof does not fit, and nothing behind it.
            self.test.assertEqual(answer[:5], heard[:5])
            self.test.assertLessEqual(len(answer), challenge)
            self.test.assertNotEqual(answer, heard[:len(answer)])

    def reflection(self):
        address = self.any_door()
        raw = raw_peer.connect(address, HANG_LIMIT_S)
        greeting = self.greeting()
        raw_peer.send(raw, greeting.hello())
        _, body = greeting.take_reply(raw)
        raw_peer.send(raw, greeting.server_proof)  # Its own, back at it.
        with raw:
            self.test.assertIsNone(self.let_in(raw))
        # In its name and with its nonce, so that as much as possible is the same.
        mirror = self.greeting(name=greeting.server[0].decode())
        mirror.incarnation, mirror.nonce = greeting.server[1], greeting.server[3]
        with raw_peer.connect(address, HANG_LIMIT_S) as raw:
            raw_peer.send(raw, mirror.hello())
            mirror.take_reply(raw)
            raw_peer.send(raw, mirror.server_proof)
            self.test.assertIsNone(self.let_in(raw))
        raw = raw_peer.connect(address, HANG_LIMIT_S)
        self.test.assertEqual(self.ends(raw, struct.pack("<BI", 1, len(body)) + body), b"")

    # --- An authenticated peer that has gone wrong ------------------------------------------------------

    def damaged(self, data):
        data = bytearray(data)
        for _ in range(self.random.randrange(1, 6)):
            at = self.random.randrange(len(data))
            how = self.random.randrange(4)
            if how == 0:
                data[at] = self.random.randrange(256)
            elif how == 1:
                data[at] ^= 1 << self.random.randrange(8)
            elif how == 2:
                data[at:at] = self.random.randbytes(self.random.randrange(1, 9))
            else:
                del data[at:at + self.random.randrange(1, 9)]
            if not data:
                data = bytearray(b"\0")
        return bytes(data)

    def junk_frames(self):
        """The first frames of a connection that was greeted with the right key."""
        rng, frame = self.random, raw_peer.frame
        noise = rng.randbytes(rng.randrange(0, 3000))
        huge = struct.pack("<Q", rng.choice([16385, 65537, 1 << 20, 1 << 31, 1 << 40, (1 << 63) + 5, (1 << 64) - 1]))
        packet, brochure = rng.choice(self.recorded_frames)
        kind = rng.randrange(9)
        return [
            lambda: noise,
            lambda: frame(noise),
            lambda: huge + noise,
            lambda: frame(self.damaged(packet)) + frame(brochure),
            lambda: frame(packet) + frame(self.damaged(brochure)),
            lambda: frame(packet) + huge + noise,
            lambda: frame(packet) + frame(noise),
            lambda: frame(raw_peer.join_pipe(rng.randrange(1 << 64))),
            lambda: (frame(packet) + frame(brochure))[:rng.randrange(len(packet) + len(brochure) + 16)],
        ][kind]()

    def authenticated_junk(self):
        lane = self.random.choice([0, 0, 0, 0, 1, 1, raw_peer.NO_LANE, 7])
        listener = self.random.choice([0, 0, 0, 0, 0, 1, 2, 200])
        raw, _ = self.greet(self.any_door(), name=f"junk{self.random.randrange(8)}", lane=lane, listener=listener)
        with raw:
            raw_peer.send(raw, self.junk_frames())
            try:
                raw.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # It was quicker.
            raw_peer.until_end(raw)

    def junk_in_a_session(self):
        """A whole pipe, by hand, and then junk where messages of the session are expected."""
        rng, address = self.random, self.any_door()
        name, lane = f"junk{rng.randrange(8)}", rng.randrange(2)
        raw, greeting = self.greet(address, name=name, lane=lane)
        parts = [raw]
        answer = self.let_in(raw)
        self.test.assertIsNotNone(answer)
        self.test.assertEqual(answer[0], b"atoll")
        registrations = [answer[2][1], *struct.unpack("<Q", answer[4][b"basic"])]
        for registration in registrations:
            part = raw_peer.connect(address, HANG_LIMIT_S)
            further = self.greeting(name=name, lane=raw_peer.NO_LANE)
            further.incarnation = greeting.incarnation
            raw_peer.send(part, further.hello())
            further.take_reply(part)
            raw_peer.send(part, further.proof("client") + raw_peer.frame(raw_peer.join_pipe(registration)))
            parts.append(part)
        message = lambda header: raw_peer.frame(raw_peer.descriptor(header))
        raw_peer.send(raw, message(raw_peer.session_hello()))
        if lane == 0:  # First as it should be, to be sure that what follows is read there.
            raw_peer.send(raw, message(raw_peer.request(1, "membership.ping", b"")))
            self.test.assertTrue(raw_peer.take_answer(raw), "a session by hand is not understood any more\n" +
                                 self.job.owners[0].err + self.job.owners[1].err)
        number = 2 - lane
        noise = rng.randbytes(rng.randrange(0, 2000))
        junk = [
            lambda: raw_peer.frame(noise),
            lambda: noise,
            lambda: message(noise),
            lambda: message(raw_peer.prefix(rng.randrange(6), rng.randrange(6), rng.randrange(6), rng.randrange(4),
                                            rng.randrange(4), rng.randrange(4)) + noise),
            lambda: message(self.damaged(raw_peer.session_hello())),
            lambda: message(self.damaged(raw_peer.request(number, rng.choice(METHODS), noise))),
            lambda: message(self.damaged(raw_peer.bundle(raw_peer.request(number, rng.choice(METHODS), noise),
                                                         raw_peer.prefix(rng.randrange(6), rng.randrange(6))))),
            lambda: raw_peer.frame(self.damaged(raw_peer.descriptor(raw_peer.request(number, "membership.ping", b"")))),
            lambda: b"".join(message(raw_peer.request(number + i, rng.choice(METHODS), rng.randbytes(rng.randrange(200))))
                             for i in range(5)),
        ]
        raw_peer.send(raw, rng.choice(junk)())
        # Whatever it makes of that: the connection ends when ours does.
        for part in parts:
            try:
                part.shutdown(socket.SHUT_WR)
            except OSError:
                pass
        for part in parts:
            raw_peer.until_end(part)
            part.close()

    # --- Slow -------------------------------------------------------------------------------------------

    def slow_strangers(self):
        """20 sockets that send a byte each half second, until the server has cut off every one."""
        greeting = self.greeting(name="slow")
        poll, waiting = select.poll(), {}
        for index in range(20):
            address = self.doors[1][index % 2]
            if index < 15:
                raw, left = raw_peer.connect(address, HANG_LIMIT_S), greeting.hello()
            else:  # Known, but then as slow.
                raw, _ = self.greet(address, name="slow")
                left = raw_peer.frame(raw_peer.new_pipe())
            waiting[raw.fileno()] = [raw, left]
            poll.register(raw, select.POLLIN)
        begin = monotonic()
        while waiting and monotonic() - begin < HANG_LIMIT_S:
            ended = {number for number, _ in poll.poll(500)}  # Nothing is said to them, so this is an end.
            for number, (raw, left) in list(waiting.items()):
                if number in ended or not raw_peer.send(raw, left[:1]):
                    poll.unregister(raw)
                    raw.close()
                    del waiting[number]
                else:
                    waiting[number][1] = left[1:] or b"\0"
        self.slow_left = len(waiting)
        for raw, _ in waiting.values():
            raw.close()
