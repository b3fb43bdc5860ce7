#!/usr/bin/env python3
"""The harness of the benchmarks, with sides that are made up: what it counts and writes, not how fast anything is."""
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, 'bench'))
import plot  # pylint: disable=wrong-import-position
import run  # pylint: disable=wrong-import-position

# A side that says what it was told to: the argument CASE is "OPS SECONDS", or a complaint.
SIDE = '''
import json, sys
if sys.argv[1] == 'serve':
    print('here', flush=True)
    sys.stdin.read()
elif sys.argv[3].startswith('!'):
    sys.exit('made up: ' + sys.argv[3])
else:
    assert sys.argv[5] == 'here', sys.argv
    ops, seconds = map(float, sys.argv[3].split())
    print('ready', flush=True)
    for line in sys.stdin:
        print(json.dumps({'begin': 7, 'end': 7 + seconds, 'ops': ops, 'times': {'500': ops}}), flush=True)
'''


def fails(call, *arguments):
    """What it says as it ends with a failure."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            call(*arguments)
    except SystemExit as end:
        return said.getvalue() + (end.code if isinstance(end.code, str) else '')
    raise AssertionError('it did not fail')


class BenchTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix='atoll-bench-')
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.side_program = os.path.join(self.folder, 'side.py')
        with open(self.side_program, 'w', encoding='utf-8') as file:
            file.write(SIDE)

    def side(self, name, case):
        return run.Side(name, self.side_program, 'way', case)

    def bench(self, case, pairs=5):
        """The lines of JSON, and what was printed."""
        path = os.path.join(self.folder, 'out.json')
        arguments = run.parse(['rpc', '--json', path, '--pairs', str(pairs)])
        with contextlib.redirect_stdout(io.StringIO()) as said:
            bench = run.Bench('made-up', arguments)
            self.addCleanup(bench.json.close)
            bench.run([case])
        with open(path, encoding='utf-8') as file:
            return [json.loads(line) for line in file], said.getvalue()

    def test_a_row_has_this_form(self):
        rows, table = self.bench(run.Case('work', 'us', self.side('atoll', '1000 0.5'),
                                          (self.side('slow', '100 1'), self.side('fast', '4000 1'))))
        self.assertEqual(rows, [
            {'bench': 'made-up', 'case': 'work', 'ours': 500.0, 'peer': 10000.0, 'peer_name': 'slow', 'unit': 'us', 'ratio': 20.0},
            {'bench': 'made-up', 'case': 'work', 'ours': 500.0, 'peer': 250.0, 'peer_name': 'fast', 'unit': 'us', 'ratio': 0.5}])
        self.assertRegex(table, r'work +us +500 +10000 +slow +20\.00')

    def test_rates_of_all_callers_count_together(self):
        rows, _ = self.bench(run.Case('work', 'calls/s', self.side('atoll', '1000 0.5'), (self.side('peer', '100 1'),),
                                      callers=3))
        self.assertEqual([(row['ours'], row['peer'], row['ratio']) for row in rows], [(6000.0, 300.0, 20.0)])

    def test_a_ratio_above_one_means_that_ours_is_better(self):
        for unit in ('us', 'ns/parameter', '% of a core', 'KiB', 'descriptors'):
            self.assertEqual(run.ratio_of(unit, 1, 2), 2, unit)
        for unit in ('calls/s', 'GB/s'):
            self.assertEqual(run.ratio_of(unit, 1, 2), 0.5, unit)
        self.assertEqual(run.ratio_of('% of a core', 0, 2), 200)  # Below what can be seen.
        units = {case.unit for _, cases in run.BENCHES.values() for case in cases}
        self.assertEqual(units, {'us', 'ns/parameter', '% of a core', 'KiB', 'descriptors', 'calls/s', 'GB/s'})

    def test_the_median_of_the_pairs_counts(self):
        case = run.Case('work', 'us', None, ())
        # The medians' own ratio would be 2: the second pair shares what slowed both.
        row = run.row_of('made-up', case, 'peer', [(1, 3), (100, 300), (2, 4), (3, 4), (3, 12)])
        self.assertEqual((row['ours'], row['peer'], row['ratio']), (3, 4, 3))

    def test_turns_change_their_order(self):
        order = []
        run.in_turns({'a': 'a', 'b': 'b'}, 3, order.append)
        self.assertEqual(order, ['a', 'b', 'b', 'a', 'a', 'b'])

    def test_a_side_that_ends_is_named(self):
        case = run.Case('work', 'us', self.side('atoll', '10 1'), (self.side('peer', '!'),))
        self.assertRegex(fails(self.bench, case), r'side\.py call .* ended')

    def test_percentiles(self):
        bins = run.bins_of([{'times': {'350': 98}}, {'times': {'350': 1, '580': 1}}])
        self.assertEqual(bins, {350: 99, 580: 1})
        self.assertAlmostEqual(run.percentile_us(bins, 50), 1.02**350 / 1000)
        self.assertAlmostEqual(run.percentile_us(bins, 99.9), 1.02**580 / 1000)

    def test_drawings_are_svg_with_every_side(self):
        path = os.path.join(self.folder, 'drawing.svg')
        bins = {'ours': {350: 99, 580: 1}, 'theirs': {450: 10}}
        plot.histogram(path, bins, run.percentile_us, 'x')
        texts = {e.text for e in xml.etree.ElementTree.parse(path).iter('{http://www.w3.org/2000/svg}text')}
        self.assertLessEqual({'ours', 'theirs', 'p99: 1 µs', 'p99.9: 97 µs'}, texts)
        plot.lines(path, {'ours': {1: 10, 16: 200}, 'theirs': {1: 20, 16: 30}}, 'x', 'y')
        texts = {e.text for e in xml.etree.ElementTree.parse(path).iter('{http://www.w3.org/2000/svg}text')}
        self.assertLessEqual({'ours', 'theirs', '16', '100'}, texts)

    def test_what_cannot_be_run_is_said_before_anything_is_built(self):
        for words, expected in ((['rcp'], r"no benchmark 'rcp'.*rpc, latency"),
                                (['rpc', 'empty'], r"no case 'empty'.*empty_call"),
                                (['rpc', '--pairs', '0'], '--pairs is 1 or more'),
                                (['rpc', '--plot', '/'], 'has no plot'),
                                (['rpc', '--json', '/nowhere/x'], 'no folder /nowhere')):
            done = subprocess.run([os.path.join(ROOT, 'dev'), 'bench', *words], capture_output=True, text=True, timeout=60)
            self.assertNotEqual(done.returncode, 0, words)
            self.assertRegex(done.stderr, expected)
            self.assertEqual(done.stdout, '')

    def test_alone_it_lists(self):
        done = subprocess.run([os.path.join(ROOT, 'dev'), 'bench'], capture_output=True, text=True, timeout=60, check=True)
        for name, (_, cases) in run.BENCHES.items():
            self.assertIn(f'  {name} ', done.stdout)
            for case in cases:
                self.assertIn(case.name, done.stdout)


if __name__ == '__main__':
    unittest.main(verbosity=2)
