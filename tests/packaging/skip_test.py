#!/usr/bin/env python3
"""A test binary counts as skipped only where all of its cases were, and never where one failed.

Usage: skip_test.py PROBE SKIP_CODE
"""
import subprocess
import sys
import unittest

PROBE, SKIP_CODE = sys.argv[1], int(sys.argv[2])


class SkipTest(unittest.TestCase):
    def code(self, *cases):
        return subprocess.run([PROBE, '--gtest_filter=' + ':'.join(f'SkipProbe.{c}' for c in cases)],
                              capture_output=True, timeout=60).returncode

    def test_only_where_all_were_skipped(self):
        self.assertEqual(self.code('Skips'), SKIP_CODE)
        self.assertEqual(self.code('Skips', 'SkipsToo'), SKIP_CODE)
        self.assertEqual(self.code('Skips', 'Passes'), 0)
        self.assertEqual(self.code('Passes'), 0)

    def test_never_where_one_failed(self):
        self.assertEqual(self.code('Fails'), 1)
        self.assertEqual(self.code('Skips', 'Fails'), 1)


if __name__ == '__main__':
    unittest.main(argv=sys.argv[:1], verbosity=2)
