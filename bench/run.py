#!/usr/bin/env python3
"""Our numbers beside the peers': ./dev bench NAME [CASE ...] [--json FILE] [--plot DIR] [--pairs N] [--seconds S]

A case has sides: ours, and those it is compared with. Each is a server and callers, processes of their own, that stay
for the whole case; they measure in turns, and who has no turn is stopped, so that none takes time from another. Of
every pair (ours, peer) comes a ratio, above 1 where ours is better, and the median of the pairs counts.
"""
import argparse
import dataclasses
import json
import os
import platform
import select
import signal
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import plot  # pylint: disable=wrong-import-position

HANG_LIMIT_S = 180
LEAST_PAIRS = 5
MIB = 1 << 20
RESOLUTION = {'% of a core': 0.01}  # What is below counts as this.
SMALLER_IS_BETTER = ('us', 'ns/parameter', '% of a core', 'KiB', 'descriptors')


@dataclasses.dataclass(frozen=True)
class Side:
    """What is run: PROGRAM serve WAY, and callers PROGRAM call WAY CASE NAME ADDRESS."""
    name: str
    program: str
    way: str
    case: str
    serves: bool = True
    connections: int = 1  # Of one caller.


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    unit: str
    ours: Side
    peers: tuple
    callers: int = 1
    each: float = 1  # Bytes or parameters of one operation.
    measure: str = 'work'

    @property
    def sides(self):
        return (self.ours, *self.peers)


def atoll(case, way='unix+cma', **more):
    return Side('atoll', 'rpc_side', way, case, **more)


def raw(case, way='unix+cma+hop', **more):
    return Side('raw_tensorpipe', 'pipe_side', f'raw:{way}', case, **more)


def torch_rpc(case, **more):
    return Side('torch_rpc', 'torch_rpc_side.py', '', case, **more)


def uv(case, **more):
    return Side('tensorpipe_uv', 'pipe_side', 'uv', case, **more)


def call_case(name, unit, case=None, **more):
    case = case or name
    return Case(name, unit, atoll(case), (raw(case), torch_rpc(case)), **more)


def transport_case(name, unit, case, way, **more):
    ours = Side('atoll', 'pipe_side', f'pipe:{way}', case)
    return Case(name, unit, ours, (raw(case, way), uv(case)), **more)


def idle_case(name, unit, measure, **more):
    return Case(name, unit, atoll('idle', connections=16), (torch_rpc('idle'), uv('empty_call')), measure=measure, **more)


MANY_TENSORS_BYTES = 25557032 * 4
BENCHES = {
    'rpc': ('calls, bytes and the transport alone', [
        call_case('empty_call', 'us'),
        call_case('calls_in_flight', 'calls/s'),
        call_case('push_64mib', 'GB/s', each=64 * MIB),
        call_case('pull_64mib', 'GB/s', each=64 * MIB),
        call_case('small_tensor', 'us'),
        call_case('many_tensors', 'GB/s', each=MANY_TENSORS_BYTES),
        call_case('many_to_one', 'calls/s', callers=4),
        transport_case('transport_round_trip_tcp', 'us', 'empty_call', 'tcp'),
        transport_case('transport_round_trip_unix', 'us', 'empty_call', 'unix'),
        transport_case('transport_throughput_tcp', 'GB/s', 'push_64mib', 'tcp', each=64 * MIB),
        transport_case('transport_throughput_tls', 'GB/s', 'push_64mib', 'tcp+tls', each=64 * MIB),
        transport_case('transport_throughput_unix_basic', 'GB/s', 'push_64mib', 'unix+basic', each=64 * MIB),
    ]),
    'latency': ('the times of single empty calls: p50, p99, p99.9', [
        call_case(name, 'us', 'empty_call', measure=name) for name in ('p50', 'p99', 'p99.9')]),
    'clients': ('empty calls a second of 1 to 16 callers, one at a time each', [
        call_case(f'clients_{count}', 'calls/s', 'empty_call', callers=count) for count in (1, 2, 4, 8, 16)]),
    'idle': ('what a server costs whose callers say nothing', [
        idle_case('cpu', '% of a core', 'cpu', callers=4),
        idle_case('memory_a_connection', 'KiB', 'memory'),
        idle_case('descriptors_a_connection', 'descriptors', 'descriptors'),
    ]),
    'adam': ("the owner's pass: the gradients of 1, 2 or 4 workers, one thread", [
        Case(f'gradients_{count}', 'ns/parameter', Side('atoll', 'adam_side', 'ours', str(count), serves=False),
             (Side('torch_sums_and_fused', 'adam_side', 'torch', str(count), serves=False),), each=16 * MIB)
        for count in (1, 2, 4)]),
}


def fail(text):
    sys.exit(f'bench: {text}')


def choose(name, wanted):
    """The cases of bench `name`, or those of them that are `wanted`."""
    if name not in BENCHES:
        fail(f"there is no benchmark '{name}'. There are: {', '.join(BENCHES)}")
    cases = {case.name: case for case in BENCHES[name][1]}
    for case in wanted:
        if case not in cases:
            fail(f"benchmark '{name}' has no case '{case}'. It has: {', '.join(cases)}")
    return [cases[case] for case in wanted] or list(cases.values())


def ratio_of(unit, ours, peer):
    """Above 1: ours is better."""
    ours, peer = (max(value, RESOLUTION.get(unit, 1e-9)) for value in (ours, peer))
    return peer / ours if unit in SMALLER_IS_BETTER else ours / peer


def row_of(bench, case, peer_name, pairs):
    """One JSON line of `pairs`, each (ours, the peer's)."""
    ours, peer = (statistics.median(column) for column in zip(*pairs))
    ratio = statistics.median(ratio_of(case.unit, *pair) for pair in pairs)
    return {'bench': bench, 'case': case.name, 'ours': figures(ours), 'peer': figures(peer), 'peer_name': peer_name,
            'unit': case.unit, 'ratio': figures(ratio)}


def figures(value):
    return float(f'{value:.4g}')


class Process:
    def __init__(self, environment, *words):
        self.words = words
        self.process = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def say(self, line):
        try:
            self.process.stdin.write(f'{line}\n'.encode())
        except BrokenPipeError:
            pass  # Its silence is noticed.

    def hear(self):
        """A line."""
        line = b''
        while not line.endswith(b'\n'):
            ready, _, _ = select.select([self.process.stdout], [], [], HANG_LIMIT_S)
            piece = self.process.stdout.read(1 << 16) if ready else None
            if not piece:
                fail(f"{' '.join(self.words)} {'ended' if ready else f'said nothing for {HANG_LIMIT_S} s'}")
            line += piece
        return line.decode().strip()

    def signal(self, number):
        if self.process.poll() is None:
            self.process.send_signal(number)

    def end(self):
        self.signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Running:
    """A side at work, stopped but for its turns."""

    def __init__(self, side, callers, machine):
        self.side, self.callers = side, []
        program = [machine.python, os.path.join(HERE, side.program)] if side.program.endswith('.py') else \
            [os.path.join(machine.bin, side.program)]
        way = side.way or str(callers)
        self.server = Process(machine.environment, *program, 'serve', way) if side.serves else None
        try:
            address = self.server.hear() if side.serves else '-'
            for rank in range(1, callers + 1):
                self.callers.append(Process(machine.environment, *program, 'call', way, side.case, str(rank), address))
            for caller in self.callers:
                if caller.hear() != 'ready':
                    fail(f'{side.program}: not ready')
            # Who connects late does so now: a handshake that is stopped midway is too slow for the other end.
            self.turn(0.3)
        except BaseException:
            self.end()
            raise

    @property
    def processes(self):
        return [self.server, *self.callers] if self.server else self.callers

    def signal(self, number):
        for process in self.processes:
            process.signal(number)

    def turn(self, seconds):
        self.signal(signal.SIGCONT)
        for caller in self.callers:
            caller.say(seconds)
        replies = [json.loads(caller.hear()) for caller in self.callers]
        self.signal(signal.SIGSTOP)
        return replies

    def idle(self, seconds):
        """CPU time of the server over `seconds`, in s, and the seconds they were."""
        self.signal(signal.SIGCONT)
        select.select([], [], [], 1)  # What is left to do is done.
        begin = cpu_seconds(self.server.process.pid), os.times().elapsed
        select.select([], [], [], seconds)
        end = cpu_seconds(self.server.process.pid), os.times().elapsed
        self.signal(signal.SIGSTOP)
        return end[0] - begin[0], end[1] - begin[1]

    def end(self):
        self.signal(signal.SIGSTOP)  # None sees another go.
        for process in self.processes:
            process.end()


def cpu_seconds(pid):
    nanoseconds = 0
    for task in os.listdir(f'/proc/{pid}/task'):
        with open(f'/proc/{pid}/task/{task}/schedstat', encoding='ascii') as file:
            nanoseconds += int(file.read().split()[0])
    return nanoseconds / 1e9


def resident_kib(pid):
    with open(f'/proc/{pid}/status', encoding='ascii') as file:
        return next(int(line.split()[1]) for line in file if line.startswith('VmRSS:'))


def value_of(case, replies):
    """What one turn says, in the case's unit."""
    ops = sum(reply['ops'] for reply in replies)
    elapsed = max(reply['end'] for reply in replies) - min(reply['begin'] for reply in replies)
    return {'us': lambda: elapsed * 1e6 / ops, 'ns/parameter': lambda: elapsed * 1e9 / ops / case.each,
            'calls/s': lambda: ops / elapsed, 'GB/s': lambda: ops * case.each / elapsed / 1e9}[case.unit]()


def bins_of(replies):
    """The histogram of all: {log(1.02) of ns: count}."""
    bins = {}
    for reply in replies:
        for key, count in reply['times'].items():
            bins[int(key)] = bins.get(int(key), 0) + count
    return bins


def percentile_us(bins, percent):
    wanted = sum(bins.values()) * percent / 100
    for key in sorted(bins):
        wanted -= bins[key]
        if wanted <= 0:
            return 1.02**key / 1000
    raise ValueError('no times')


def in_turns(running, rounds, measure):
    """{side: [what measure says of its turns]}, in turns whose order changes."""
    results = {side: [] for side in running}
    for number in range(rounds):
        for side in list(running)[::-1 if number % 2 else 1]:
            results[side].append(measure(running[side]))
    return results


class Machine:
    def __init__(self, arguments):
        self.bin, self.python = arguments.bin, arguments.python
        self.environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'TORCH_CPP_LOG_LEVEL': 'ERROR', 'PYTHONWARNINGS': 'ignore'}

    def facts(self):
        with open('/proc/cpuinfo', encoding='utf-8') as file:
            model = next((line.split(':')[1].strip() for line in file if line.startswith('model name')), 'unknown CPU')
        torch = subprocess.run([self.python, '-c', 'import importlib.metadata as m; print(m.version("torch"))'],
                               capture_output=True, text=True, check=False).stdout.strip() or 'unknown'
        return f'{len(os.sched_getaffinity(0))} cores ({model}), Linux {platform.release()}, torch {torch}, ' \
               f'load {os.getloadavg()[0]:.1f}'


class Bench:
    """One run of one bench: measures, prints, writes."""

    def __init__(self, name, arguments):
        self.name, self.arguments = name, arguments
        self.machine = Machine(arguments)
        self.json = open(arguments.json, 'w', encoding='utf-8') if arguments.json else None

    def run(self, cases):
        print(f'bench {self.name}: {self.machine.facts()}; {self.arguments.pairs} pairs of {self.arguments.seconds} s')
        print(f"{'case':<32}{'unit':>14}{'ours':>12}{'peer':>12}  {'peer_name':<22}{'ratio':>8}")
        drawn = {}
        if self.name == 'latency':
            self.latency(cases)
            return
        for case in cases:
            if case.measure in ('memory', 'descriptors'):
                results = {side: [self.cost_of_a_connection(side, case.measure)] for side in case.sides}
            else:
                results = self.measure(case)
            for row in self.tell(case, results):
                drawn.setdefault('atoll', {})[case.callers] = row['ours']
                drawn.setdefault(row['peer_name'], {})[case.callers] = row['peer']
        if self.name == 'clients' and self.arguments.plot:
            plot.lines(os.path.join(self.arguments.plot, 'bench_clients.svg'), drawn, 'callers, one call at a time each',
                       'empty calls a second')

    def tell(self, case, results):
        """One row a peer."""
        rows = [row_of(self.name, case, peer.name, list(zip(results[case.ours], results[peer]))) for peer in case.peers]
        for row in rows:
            print(f"{row['case']:<32}{row['unit']:>14}{row['ours']:>12g}{row['peer']:>12g}  {row['peer_name']:<22}{row['ratio']:>8.2f}",
                  flush=True)
            if self.json:
                print(json.dumps(row), file=self.json, flush=True)
        return rows

    def measure(self, case, measure=None):
        if case.measure == 'cpu':
            def measure(running):  # pylint: disable=function-redefined
                used, elapsed = running.idle(2 * self.arguments.seconds)
                return 100 * used / elapsed
        running = {}
        try:
            for side in case.sides:
                running[side] = Running(side, case.callers, self.machine)
            return in_turns(running, self.arguments.pairs,
                            measure or (lambda side: value_of(case, side.turn(self.arguments.seconds))))
        finally:
            for side in running.values():
                side.end()

    def latency(self, cases):
        results = self.measure(cases[0], lambda side: bins_of(side.turn(4 * self.arguments.seconds)))
        for case in cases:
            self.tell(case, {side: [percentile_us(bins, float(case.name[1:])) for bins in each] for side, each in results.items()})
        if self.arguments.plot:
            plot.histogram(os.path.join(self.arguments.plot, 'bench_latency.svg'),
                           {side.name: bins_of([{'times': bins} for bins in each]) for side, each in results.items()},
                           percentile_us, 'time of an empty call, µs')

    def cost_of_a_connection(self, side, what):
        """The difference that four more callers make to the server, by connection."""
        found = []
        for callers in (1, 5):
            running = Running(side, callers, self.machine)
            try:
                pid = running.server.process.pid
                found.append(resident_kib(pid) if what == 'memory' else len(os.listdir(f'/proc/{pid}/fd')))
            finally:
                running.end()
        return (found[1] - found[0]) / 4 / side.connections


def parse(words):
    parser = argparse.ArgumentParser(prog='./dev bench', description=__doc__.split('\n\n')[1],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('name', metavar='NAME', help=', '.join(BENCHES))
    parser.add_argument('cases', metavar='CASE', nargs='*', help='only these')
    parser.add_argument('--json', metavar='FILE', help='one JSON object a line: bench, case, ours, peer, peer_name, unit, ratio')
    parser.add_argument('--plot', metavar='DIR', help='latency, clients: draw an SVG there')
    parser.add_argument('--pairs', metavar='N', type=int, default=LEAST_PAIRS, help=f'default {LEAST_PAIRS}')
    parser.add_argument('--seconds', metavar='S', type=float, default=0.5, help='of one turn, default 0.5')
    # Of tools/dev/bench.sh: where the sides were built, a Python that has torch, and 'only say what must be built'.
    parser.add_argument('--bin', default=os.path.join(HERE, '..', 'build', 'release', 'bin'), help=argparse.SUPPRESS)
    parser.add_argument('--python', default=sys.executable, help=argparse.SUPPRESS)
    parser.add_argument('--programs', action='store_true', help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args(words)
    if arguments.pairs < 1 or not 0 < arguments.seconds <= 60:
        parser.error('--pairs is 1 or more (5, to be believed), --seconds above 0 and at most 60')
    for path in (arguments.json and os.path.dirname(os.path.abspath(arguments.json)), arguments.plot):
        if path and not os.path.isdir(path):
            parser.error(f'there is no folder {path}')
    if arguments.plot and arguments.name in BENCHES and arguments.name not in ('latency', 'clients'):
        parser.error(f"--plot is for latency and clients: '{arguments.name}' has no plot")
    return arguments


def main(words):
    if not words:
        print('Benchmarks (./dev bench NAME [CASE ...], ./dev bench --help):')
        for name, (text, cases) in BENCHES.items():
            print(f'  {name:<10}{text}')
            print(f"            {' '.join(case.name for case in cases)}")
        return
    arguments = parse(words)
    cases = choose(arguments.name, arguments.cases)
    if arguments.programs:
        print(*sorted({side.program for case in cases for side in case.sides if not side.program.endswith('.py')}))
        return
    Bench(arguments.name, arguments).run(cases)
    if arguments.pairs < LEAST_PAIRS:
        print(f'Fewer than {LEAST_PAIRS} pairs: a trial, not figures.')


if __name__ == '__main__':
    main(sys.argv[1:])
