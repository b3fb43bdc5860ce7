"""Starts the real programs on loopback, watches what they say, and leaves nothing behind.

Nothing here sleeps: a test waits for a line, or for an end, each with a hang limit that is far beyond what it
should take on a busy machine.
"""
import concurrent.futures
import ctypes
import json
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

BIN = os.environ.get("ATOLL_BIN", "build/release/bin")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tools"))
from loopback import free_port, free_ports  # pylint: disable=wrong-import-position

# Programs leave alone what they are started to ignore: here they are started as from a terminal.
for ending in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(ending) is signal.SIG_IGN:
        signal.signal(ending, signal.SIG_DFL)

HANG_LIMIT_S = float(os.environ.get("ATOLL_TEST_HANG_LIMIT", "240"))
# How a status or a measured duration prints itself.
RAW = re.compile(r"\[atoll/|\b(CANCELLED|INVALID_ARGUMENT|DEADLINE_EXCEEDED|NOT_FOUND|ALREADY_EXISTS|PERMISSION_DENIED|"
                 r"RESOURCE_EXHAUSTED|FAILED_PRECONDITION|ABORTED|OUT_OF_RANGE|INTERNAL|UNAVAILABLE|DATA_LOSS|"
                 r"UNAUTHENTICATED): |\d\.\d{4,}[mµn]?s\b")
_PRCTL = ctypes.CDLL(None).prctl


def _die_with_parent():
    _PRCTL(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed test leaves nothing behind either.


class Process:
    """A program that runs, and the lines that it has said."""

    def __init__(self, name, command, env=None, cwd=None):
        self.name = name
        self.command = command
        self._changed = threading.Condition()
        self._lines = {"out": [], "err": []}
        self._open = 2
        # No launcher of the machine that runs the tests may show through.
        clean = {key: value for key, value in os.environ.items()
                 if not re.match(r"(ATOLL_|SLURM_|OMPI_|PET_|TORCHELASTIC_)|(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_)", key)}
        clean.update(env or {})
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True, errors="replace", env=clean, cwd=cwd,
                                        preexec_fn=_die_with_parent)
        for key, stream in (("out", self.process.stdout), ("err", self.process.stderr)):
            threading.Thread(target=self._read, args=(key, stream), daemon=True).start()

    def _read(self, key, stream):
        for line in stream:
            with self._changed:
                self._lines[key].append(line.rstrip("\n"))
                self._changed.notify_all()
        stream.close()
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def wait_line(self, pattern, after=0):
        """The first line (of either stream) that matches; fails if the process ends without it."""
        found = []

        def look():
            for key in ("out", "err"):
                for line in self._lines[key]:
                    if re.search(pattern, line):
                        found.append(line)
                        return True
            return self._open == 0

        with self._changed:
            in_time = self._changed.wait_for(look, timeout=HANG_LIMIT_S)
        if not found:
            raise AssertionError(f"{self.name} {'ended' if in_time else 'hangs'} without a line like '{pattern}'\n"
                                 + self.transcript())
        return found[0]

    def wait_news(self, limit_s=1):
        """Until it says something more, or has ended, or for so long: the pace of a loop that looks."""
        with self._changed:
            before = len(self._lines["out"]) + len(self._lines["err"])
            self._changed.wait_for(lambda: self._open == 0 or
                                   len(self._lines["out"]) + len(self._lines["err"]) > before, timeout=limit_s)

    def wait(self):
        """The exit code (negative: the signal that killed it)."""
        try:
            code = self.process.wait(timeout=HANG_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} hangs\n" + self.transcript()) from None
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0, timeout=HANG_LIMIT_S)
        if raw := RAW.search(self.err):  # Whatever it says, it says to people.
            raise AssertionError(f"'{raw[0]}' is for programs\n" + self.transcript())
        return code

    def signal(self, number):
        if self.process.poll() is not None:
            raise AssertionError(f"{self.name} ended too early for the test\n" + self.transcript())
        self.process.send_signal(number)
        if number == signal.SIGSTOP:  # Until its last thread has stopped.
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def out(self):
        with self._changed:
            return "\n".join(self._lines["out"])

    @property
    def err(self):
        with self._changed:
            return "\n".join(self._lines["err"])

    def events(self, kind):
        """What a worker said with --progress=json."""
        with self._changed:
            lines = list(self._lines["out"])
        parsed = [json.loads(line) for line in lines if line.startswith("{")]
        return [event for event in parsed if event["event"] == kind]

    def done(self):
        events = self.events("done")
        if len(events) != 1:
            raise AssertionError(f"{self.name} has no summary\n" + self.transcript())
        return events[0]

    def transcript(self):
        return (f"--- {self.name}, exit code {self.process.poll()}: {' '.join(self.command)}\n"
                f"--- standard output, the last lines:\n" + "\n".join(self.out.split("\n")[-30:]) +
                f"\n--- standard error:\n{self.err}\n")


def first_to_end(processes):
    """One of `processes` that has ended, as soon as there is one."""
    poll, by_descriptor = select.poll(), {}
    try:
        for process in processes:
            descriptor = os.pidfd_open(process.process.pid)
            by_descriptor[descriptor] = process
            poll.register(descriptor, select.POLLIN)
        ended = poll.poll(HANG_LIMIT_S * 1000)
    finally:
        for descriptor in by_descriptor:
            os.close(descriptor)
    if not ended:
        raise AssertionError("none of them ends\n" + "".join(process.transcript() for process in processes))
    return by_descriptor[ended[0][0]]


class JobTest(unittest.TestCase):
    """Gives each test a folder and ends what it started."""

    maxDiff = None

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="atoll-test-")
        self.processes = []
        self.key_file = self.write("job.key", secrets.token_hex(32), 0o600)

    def tearDown(self):
        for process in self.processes:
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, name, text, mode=0o600):
        path = os.path.join(self.folder, name)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode),
                  "wb" if isinstance(text, bytes) else "w") as file:
            file.write(text)
        os.chmod(path, mode)
        return path

    def start(self, name, command, **kwargs):
        process = Process(name, command, **kwargs)
        self.processes.append(process)
        return process

    def start_program(self, name, *flags, env=None):
        """One of ours."""
        return self.start(name, [os.path.join(BIN, name), *flags], env=env)

    def program(self, name, *flags, env=None):
        """One of ours, run to its end."""
        process = self.start_program(name, *flags, env=env)
        process.wait()
        return process

    def job(self, owners=2, workers=2, **kwargs):
        return Job(self, owners, workers, **kwargs)

    def expect_code(self, process, code):
        got = process.wait()
        self.assertEqual(got, code, process.transcript())

    def expect_error(self, process, code, *texts):
        """It ended with `code` and one line on standard error that has each of `texts`."""
        self.expect_code(process, code)
        errors = [line for line in process.err.split("\n") if ": error: " in line]
        self.assertEqual(len(errors), 1, process.transcript())
        for text in texts:
            self.assertIn(text, errors[0])


class Job:
    """Owners and workers of one job. Flags may be given for all workers, or for one by its index."""

    def __init__(self, test, owners, workers, common=(), worker=(), per_worker=None, progress="json"):
        self.test = test
        self.owner_count, self.worker_count = owners, workers
        self.port = free_port()
        self.id = f"test-{os.getpid()}-{self.port}"
        self.common = [f"--owners={owners}", f"--workers={workers}", f"--coordinator=127.0.0.1:{self.port}",
                       f"--job={self.id}", *common]
        self.worker_flags = ["--model=linear", "--data=synthetic:256", "--epochs=2", "--batch=16",
                             f"--progress={progress}", *worker]
        self.per_worker = per_worker or {}
        self.owners, self.workers = [], []

    def start_owner(self, index, key_file=None):
        owner = self.test.start(f"owner{index}", [
            os.path.join(BIN, "atoll-server"), f"--rank={index}",
            f"--key_file={key_file or self.test.key_file}", *self.common])
        self.owners.append(owner)
        return owner

    def start_worker(self, index, key_file=None, extra=(), redirection=""):
        """`redirection` is the shell's: of its standard output."""
        shell = ["sh", "-c", f'exec "$@" {redirection}', "sh"] if redirection else []
        worker = self.test.start(f"worker{index}", [
            *shell, os.path.join(BIN, "atoll-worker"), f"--rank={self.owner_count + index}",
            f"--key_file={key_file or self.test.key_file}", *self.common, *self.worker_flags,
            *self.per_worker.get(index, []), *extra])
        self.workers.append(worker)
        return worker

    def start(self):
        for index in range(self.owner_count):
            self.start_owner(index)
        for index in range(self.worker_count):
            self.start_worker(index)
        return self

    def run(self):
        """To its end, which must be a good one; the workers' summaries."""
        self.start()
        for process in self.workers + self.owners:
            self.test.expect_code(process, 0)
        return [worker.done() for worker in self.workers]

    def wait_training(self):
        """Every worker has made a step."""
        for worker in self.workers:
            worker.wait_line('"event": "progress"')
        return self


def monotonic():
    return time.monotonic()


def run_side_by_side(at_a_time=4):
    """unittest.main for tests that mostly wait: so many of them at a time, the named ones or all."""
    names, module = sys.argv[1:], sys.modules["__main__"]
    loader = unittest.TestLoader()
    tests = loader.loadTestsFromNames(names, module) if names else loader.loadTestsFromModule(module)

    def flat(suite):
        return [test for part in suite for test in (flat(part) if isinstance(part, unittest.TestSuite) else [part])]

    def run(test):
        result, begin = unittest.TestResult(), monotonic()
        test.run(result)
        said = [trouble for _, trouble in result.errors + result.failures]
        print(f"{test.id().removeprefix('__main__.')}: "
              f"{'FAILED' if said else 'skipped' if result.skipped else 'ok'} after {monotonic() - begin:.1f} s",
              flush=True)
        return said

    chosen = flat(tests)
    with concurrent.futures.ThreadPoolExecutor(at_a_time) as pool:
        troubles = [trouble for said in pool.map(run, chosen) for trouble in said]
    print("\n".join(troubles + [f"{len(chosen)} tests, {len(troubles)} failures"]))
    sys.exit(1 if troubles or not chosen else 0)
