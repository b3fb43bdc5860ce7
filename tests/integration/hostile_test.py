"""Hostile bytes at the doors of a job that trains: it goes on, loses no call, and new honest peers join.

ATOLL_TEST_SEED repeats a run's junk (the seed is printed).
"""
import os
import random
import re
import resource
import signal
import struct
import threading
import unittest

import attacks
import raw_peer
from harness import HANG_LIMIT_S, JobTest, monotonic

STEADY = 2   # Workers that must not notice anything; a third one is killed and comes again.
MODEL = ["--model=mlp", "--data=synthetic:1024", "--epochs=1000000", "--evaluate=false"]


def descriptors_of(process):
    return len(os.listdir(f"/proc/{process.process.pid}/fd"))


def memory_peak_of(process):
    with open(f"/proc/{process.process.pid}/status", encoding="utf-8") as file:
        return int(re.search(r"VmHWM:\s+(\d+) kB", file.read()).group(1)) << 10


class Attack(attacks.Attacker):
    """One job, and all that is done to it."""

    def __init__(self, test, seed):
        with open(test.key_file, "rb") as file:
            key = file.read()
        super().__init__(test, test.job(owners=2, workers=STEADY + 1, worker=MODEL), key, random.Random(seed))
        self.sockets = []
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
            self.test.assertIsNone(process.process.poll(), process.transcript())

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

    # --- Many, and too many -----------------------------------------------------------------------------

    def connect(self, address):
        self.sockets.append(raw_peer.connect(address, HANG_LIMIT_S))

    def close_all(self):
        for raw in self.sockets:
            raw.close()
        self.sockets.clear()

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

    def end(self):
        """All are told to end. Both steady workers within the same step, but for one that was just done with its."""
        test, job, (first, second) = self.test, self.job, self.steady
        self.late.signal(signal.SIGTERM)
        test.expect_code(self.late, 143)
        second.signal(signal.SIGSTOP)
        first.signal(signal.SIGTERM)
        second.signal(signal.SIGTERM)
        second.signal(signal.SIGCONT)
        for worker in self.steady:
            test.expect_code(worker, 143)
        for owner in job.owners:
            test.expect_code(owner, 0)
        summaries = sorted((worker.done() for worker in self.steady), key=lambda summary: summary["steps"])
        steps = [summary["steps"] for summary in summaries]
        print("  steps:", steps, flush=True)
        test.assertLessEqual(steps[1] - steps[0], 1)
        if steps[0] == steps[1]:
            test.assertEqual(summaries[0]["checksum"], summaries[1]["checksum"], summaries)
        # Each step was made once, by every owner.
        for owner in job.owners:
            test.assertRegex(owner.out, rf"model: \d+ parameters, \d+ bytes of optimizer state, {steps[1]} steps")
        print("  lines of log:", [len(process.err.split("\n")) for process in self.steady + job.owners], flush=True)
        for process in self.steady + job.owners:
            test.assertLess(len(process.err.split("\n")), 200, process.transcript())
            test.assertNotRegex(process.err, r"check failed|exception|Sanitizer|terminate|runtime error")
            test.assertNotRegex(process.err, r"F\d{4} |E\d{4} ")


class Hostile(JobTest):

    # Scenario users 147.
    def test_the_job_goes_on(self):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        seed = int(os.environ.get("ATOLL_TEST_SEED", "1"))
        print(f"seed {seed}", flush=True)
        attack = Attack(self, seed)
        self.addCleanup(attack.close_all)
        attack.run()
        attack.end()


if __name__ == "__main__":
    unittest.main(verbosity=2)
