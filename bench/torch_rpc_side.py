"""Calls through Python's torch.distributed.rpc between processes of this host, with its own choice of transport.

  torch_rpc_side.py serve CALLERS
  torch_rpc_side.py call CALLERS CASE RANK STORE
Driven by run.py as the C++ sides are (side.h has the protocol).
"""
import collections
import ctypes
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time

import torch
import torch.distributed.rpc as rpc

WORDS = 16 << 20  # Of eight bytes, as in side.h: 128 MiB.
SEED_STEP = 1 << 32
CALLS_IN_FLIGHT = 256
CALLS_IN_FLIGHT_EACH = 16
BULK_WORDS = 8 << 20
SMALL_WORDS = 512


def filled(words, seed):
    return torch.arange(words, dtype=torch.int64) + seed * SEED_STEP


def check(tensors, seed):
    flat = torch.cat([t.flatten() for t in tensors])
    if not torch.equal(flat, filled(flat.numel(), seed)):
        raise RuntimeError('wrong bytes came')


# What runs on the server.
_last = []
_kept = None


def nothing():
    return None


def put(tensors):
    _last[:] = [tensors] if isinstance(tensors, torch.Tensor) else tensors


def get():
    return _kept


def fill(words, seed):
    global _kept  # pylint: disable=global-statement
    _kept = filled(words, seed)


def check_last(seed):
    check(_last, seed)


def resnet50_words():
    """The bytes of a ResNet-50's parameters: 161 tensors, 102 MB."""
    sizes, inputs = [64 * 3 * 7 * 7, 64, 64], 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            sizes += [planes * inputs, planes, planes, planes * planes * 9, planes, planes,
                      planes * planes * 4, planes * 4, planes * 4]
            if block == 0:
                sizes += [planes * 4 * inputs, planes * 4, planes * 4]
            inputs = planes * 4
    return [size // 2 for size in sizes + [1000 * 2048, 1000]]


class Caller:
    """before(seed), once(), finish(), check(): as Work in side.h."""

    def __init__(self, case):
        self.calls = collections.deque()
        self.window = {'calls_in_flight': CALLS_IN_FLIGHT, 'many_to_one': CALLS_IN_FLIGHT_EACH}.get(case, 1)
        sizes = {'push_64mib': [BULK_WORDS], 'small_tensor': [SMALL_WORDS], 'many_tensors': resnet50_words()}.get(case)
        self.seed = 0
        self.data = self.got = None
        if sizes:
            self.data = torch.zeros(sum(sizes), dtype=torch.int64)
            pieces = list(self.data.split(sizes))
            self.once = lambda: rpc.rpc_sync('server', put, (pieces if len(pieces) > 1 else pieces[0],))
        elif case == 'pull_64mib':
            self.once = self.pull
        elif self.window > 1:
            self.once = self.post
        elif case in ('empty_call', 'idle'):
            self.once = lambda: rpc.rpc_sync('server', nothing)
        else:
            sys.exit(f'torch_rpc_side: no case {case}')
        self.case = case

    def pull(self):
        self.got = rpc.rpc_sync('server', get)

    def post(self):
        if len(self.calls) >= self.window:
            self.calls.popleft().wait()
        self.calls.append(rpc.rpc_async('server', nothing))

    def before(self):
        self.seed += 1
        if self.data is not None:
            self.data.copy_(filled(self.data.numel(), self.seed))
        if self.case == 'pull_64mib':
            rpc.rpc_sync('server', fill, (BULK_WORDS, self.seed))

    def finish(self):
        while self.calls:
            self.calls.popleft().wait()

    def check(self):
        if self.data is not None:
            rpc.rpc_sync('server', check_last, (self.seed,))
        if self.case == 'pull_64mib':
            check([self.got], self.seed)

    def repeat(self, seconds):
        times = []
        begin = before = time.monotonic()
        while True:
            self.once()
            now = time.monotonic()
            times.append(now - before)
            before = now
            if now - begin >= seconds:
                break
        self.finish()
        return begin, time.monotonic(), times


def start(name, rank, callers, store):
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, init_method=f'file://{store}', rpc_timeout=120)
    rpc.init_rpc(name, rank=rank, world_size=callers + 1, rpc_backend_options=options)


def serve(callers):
    folder = tempfile.mkdtemp(prefix='atoll-bench-')
    try:
        store = os.path.join(folder, 'store')
        print(store, flush=True)
        start('server', 0, callers, store)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # All have met: it is not needed any more.
    sys.stdin.read()


def call(callers, case, rank, store):
    start(f'caller{rank}', rank, callers, store)
    caller = Caller(case)
    print('ready', flush=True)
    for line in sys.stdin:
        caller.before()
        caller.repeat(float(line) / 4)
        begin, end, times = caller.repeat(float(line))
        caller.check()
        counts = collections.Counter(round(math.log(t * 1e9) / math.log(1.02)) for t in times)
        print(json.dumps({'begin': begin, 'end': end, 'ops': len(times), 'times': counts}), flush=True)


if __name__ == '__main__':
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    torch.set_num_threads(1)
    if sys.argv[1] == 'serve':
        serve(int(sys.argv[2]))
    else:
        call(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
    sys.stdout.flush()
    os._exit(0)  # Without a farewell: the other side ends too.
