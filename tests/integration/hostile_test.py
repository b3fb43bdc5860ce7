"""Hostile bytes at the doors of a job that trains: it goes on, loses no call, and new honest peers join.

ATOLL_TEST_SEED repeats a run's junk (the seed is printed).
"""
import os
import random
import re
import resource
import select
import signal
import socket
import ssl
import struct
import threading
import unittest

import raw_peer
from harness import HANG_LIMIT_S, JobTest, monotonic

STEADY = 2   # Workers that must not notice anything; a third one is killed and comes again.
MODEL = ["--model=mlp", "--data=synthetic:1024", "--epochs=1000000", "--evaluate=false"]
TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
METHODS = ["membership.join", "membership.heartbeat", "membership.event", "membership.report", "membership.gather",
           "membership.leave", "membership.ping", "rref.create", "rref.find", "rref.release", "rref.call", "nothing"]


class TooShort(Exception):
    """The job was done before the attack was."""


def descriptors_of(process):
    return len(os.listdir(f"/proc/{process.process.pid}/fd"))


def memory_peak_of(process):
    with open(f"/proc/{process.process.pid}/status", encoding="utf-8") as file:
        return int(re.search(r"VmHWM:\s+(\d+) kB", file.read()).group(1)) << 10


class Attack:
    """One job, and all that is done to it."""

    def __init__(self, test, steps, seed):
        self.test = test
        self.random = random.Random(seed)
        self.sockets = []
        self.slow_left = None
        self.job = test.job(owners=2, workers=STEADY + 1, worker=MODEL + [f"--max_steps={steps}"])
        with open(test.key_file, "rb") as file:
            self.key = file.read()
        self.fingerprint = "?"
        self.late = None

    # --- The honest side --------------------------------------------------------------------------------

    def start(self):
        """The third worker reaches the coordinator through a recorder."""
        job = self.job
        for index in range(job.owner_count):
            job.start_owner(index)
        for index in range(STEADY):
            job.start_worker(index)
        self.recorder = raw_peer.Recorder(f"127.0.0.1:{job.port}", HANG_LIMIT_S)
        self.late = job.start_worker(STEADY, extra=[f"--coordinator={self.recorder.address}"])
        self.steady = job.workers[:STEADY]
        for worker in job.workers:
            worker.wait_line('"event": "progress"')
        self.doors = []
        for owner in job.owners:
            line = owner.wait_line("serving at ")
            self.doors.append(line[line.index("serving at ") + len("serving at "):].split(", "))
        self.test.assertTrue(all(door[0].startswith("unix:@") for door in self.doors), self.doors)
        self.all_doors = [address for doors in self.doors for address in doors]
        self.descriptors = [descriptors_of(owner) for owner in job.owners]
        self.memory = [memory_peak_of(owner) for owner in job.owners]

    def steps(self):
        """How far the slower of the steady workers says it is."""
        result = []
        for worker in self.steady:
            out = worker.out
            line = out[out.rindex('{"event": "progress"'):]
            result.append(int(re.search(r'"step": (\d+)', line).group(1)))
        return min(result)

    def alive(self):
        for process in self.job.owners + self.steady:
            code = process.process.poll()
            if code == 0 or '"event": "done"' in process.out:
                raise TooShort
            self.test.assertIsNone(code, process.transcript())

    def while_training(self, one, times=1):
        """Calls `one` at least `times` times, and until steps have been made meanwhile."""
        begin, done, start = self.steps(), 0, monotonic()
        while done < times or self.steps() <= begin:
            self.alive()
            one()
            done += 1
            self.test.assertLess(monotonic() - start, HANG_LIMIT_S, "no step is made during the attack")

    def look(self):
        """The pace of a loop: a line a tenth of a second, or so, comes from each worker."""
        self.alive()
        self.steady[0].wait_news()

    def a_new_peer_comes_while(self, one):
        """The third worker is killed, comes again with the same rank, and trains."""
        self.late.signal(signal.SIGKILL)
        self.late.wait()
        self.late = self.job.start_worker(STEADY)
        start = monotonic()
        while '"event": "progress"' not in self.late.out:
            one()
            self.alive()
            self.test.assertIsNone(self.late.process.poll(), self.late.transcript())
            self.test.assertLess(monotonic() - start, HANG_LIMIT_S, "no new peer joins during the attack\n" +
                                 self.late.transcript())

    # --- The hostile side -------------------------------------------------------------------------------

    def connect(self, address):
        try:
            self.sockets.append(raw_peer.connect(address, HANG_LIMIT_S))
        except ConnectionRefusedError:
            for process in self.job.owners + self.steady:
                process.process.wait(HANG_LIMIT_S)
            self.alive()  # The job has ended; in peace, it is hoped.
            raise

    def close_all(self):
        for raw in self.sockets:
            raw.close()
        self.sockets.clear()

    def any_door(self):
        return self.random.choice(self.all_doors)

    def greeting(self, **kwargs):
        return raw_peer.Greeting(kwargs.pop("job", self.job_id()), kwargs.pop("key", self.key),
                                 kwargs.pop("fingerprint", self.fingerprint), **kwargs)

    def job_id(self):
        return next(flag for flag in self.job.common if flag.startswith("--job="))[len("--job="):]

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
        for data in (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", hello.read(), noise, b"\0" * 100):
            self.test.assertEqual(self.ends(raw_peer.connect(self.any_door(), HANG_LIMIT_S), data), b"")

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

    # --- Slow, many, and too many -----------------------------------------------------------------------

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

    def a_thousand_idle(self):
        """At the coordinator; among them a worker comes anew."""
        for index in range(1000):
            self.connect(self.doors[0][index % 2])
        self.while_training(self.look)
        self.a_new_peer_comes_while(self.look)
        self.while_training(self.look)
        # At most 256 strangers stay: the oldest had to go.
        for raw in self.sockets[:700]:
            self.test.assertEqual(raw_peer.until_end(raw), b"")
        self.close_all()

    def out_of_descriptors(self):
        """The second owner has none left, all of them held by strangers; then again a worker comes."""
        owner = self.job.owners[1]
        limit = descriptors_of(owner) + 16
        resource.prlimit(owner.process.pid, resource.RLIMIT_NOFILE, (limit, limit))

        def more():
            for address in self.doors[1]:
                self.connect(address)
            self.look()

        while descriptors_of(owner) < limit - 1:
            more()
            self.test.assertLess(len(self.sockets), 2000, f"{descriptors_of(owner)} of {limit} are in use")
        for _ in range(100):
            self.connect(self.random.choice(self.doors[1]))
        self.while_training(more)
        self.a_new_peer_comes_while(more)
        self.while_training(more)
        self.close_all()

    # --- All of it --------------------------------------------------------------------------------------

    def run(self):
        self.start()
        self.learn_fingerprint()
        self.an_honest_peer_is_let_in()
        self.flights = [flight for flight in self.recorder.flights() if len(flight[1]) > 5]
        self.test.assertTrue(self.flights)
        self.recorded_frames = []
        for sent, _ in self.flights:
            greeted = 16 + struct.unpack_from("<I", sent, 12)[0] + 32
            first = raw_peer.frames(sent[greeted:])
            if len(first) >= 2 and first[0][:2] == b"\xb8\x00":
                self.recorded_frames.append(first[:2])
        self.test.assertTrue(self.recorded_frames)
        slow = threading.Thread(target=self.slow_strangers, daemon=True)
        slow.start()
        for name, one, times in (("connect and close", self.connect_and_close, 1000),
                                 ("other protocols", self.other_protocols, 100),
                                 ("huge lengths", self.huge_lengths, 20),
                                 ("damaged hellos", self.damaged_hello, 500),
                                 ("wrong keys", self.wrong_key, 200),
                                 ("replays", self.replay, 20),
                                 ("reflections", self.reflection, 50),
                                 ("junk of a member", self.authenticated_junk, 800),
                                 ("junk in a session", self.junk_in_a_session, 100)):
            self.phase(name, lambda: self.while_training(one, times))
        self.recorder.close()
        self.phase("a thousand idle", self.a_thousand_idle)
        slow.join(HANG_LIMIT_S)
        self.test.assertEqual(self.slow_left, 0, "slow strangers are never cut off")
        self.phase("out of descriptors", self.out_of_descriptors)
        self.phase("afterwards", self.an_honest_peer_is_let_in)
        self.alive()
        self.nothing_is_left_behind()
        self.late.signal(signal.SIGTERM)
        self.test.expect_code(self.late, 143)

    def phase(self, name, run):
        begin, step = monotonic(), self.steps()
        run()
        print(f"  {name}: {monotonic() - begin:.1f} s, {self.steps() - step} steps meanwhile", flush=True)

    def nothing_is_left_behind(self):
        for owner, descriptors, memory in zip(self.job.owners, self.descriptors, self.memory):
            begin = monotonic()
            while descriptors_of(owner) > descriptors + 4:
                self.look()
                self.test.assertLess(monotonic() - begin, HANG_LIMIT_S,
                                     f"{owner.name} had {descriptors} descriptors and keeps {descriptors_of(owner)}")
            self.test.assertLess(memory_peak_of(owner), memory + (256 << 20))

    def end(self, steps):
        test, job = self.test, self.job
        for process in self.steady + job.owners:
            test.expect_code(process, 0)
        summaries = [worker.done() for worker in self.steady]
        test.assertEqual(len({summary["checksum"] for summary in summaries}), 1, summaries)
        for summary in summaries:
            test.assertEqual(summary["steps"], steps)
            test.assertEqual([shard["steps"] for shard in summary["shards"]], [steps, steps])
        print("  lines of log:", [len(process.err.split("\n")) for process in self.steady + job.owners], flush=True)
        for process in self.steady + job.owners:
            test.assertLess(len(process.err.split("\n")), 200, process.transcript())
            test.assertNotRegex(process.err, r"check failed|exception|Sanitizer|terminate|runtime error")
            test.assertNotRegex(process.err, r"F\d{4} |E\d{4} ")


class Hostile(JobTest):

    def test_the_job_goes_on(self):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        seed = int(os.environ.get("ATOLL_TEST_SEED", "1"))
        print(f"seed {seed}", flush=True)
        # The same job in peace says how many steps last for the attack.
        begin = monotonic()
        peace = self.job(owners=2, workers=STEADY + 1, worker=MODEL + ["--max_steps=300"]).run()
        around = monotonic() - begin - peace[0]["seconds"]
        steps = int(300 / peace[0]["seconds"] * (14 + 3 * around))
        for _ in range(4):
            attack = Attack(self, steps, seed)
            try:
                attack.run()
            except TooShort:
                print(f"  {steps} steps were done before the attack was: again, with more", flush=True)
                steps *= 3
                continue
            finally:
                attack.close_all()
            return attack.end(steps)
        self.fail("the job is always done before the attack is")


if __name__ == "__main__":
    unittest.main(verbosity=2)
