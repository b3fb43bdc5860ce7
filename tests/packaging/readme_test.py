#!/usr/bin/env python3
"""The README is true: its jobs run as they stand there, and its C++ is that of the example.

Only the data (made up, so that it takes seconds) and the coordinator's port (a free one) are put in. How to install
Atoll and to build against it is packaging_test.py's.
"""
import argparse
import os
import pathlib
import re
import signal
import subprocess
import sys
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, 'tools'))
from loopback import free_port  # pylint: disable=wrong-import-position
README = pathlib.Path(ROOT, 'README.md').read_text()
HANG_LIMIT_S = 240
arguments = None


def block(heading, language):
    """The first fenced block of `language` under a heading, by lines."""
    section = README.split(f'\n## {heading}\n')[1].split('\n## ')[0]
    return re.search(rf'```{language}\n(.*?)```', section, re.S)[1].strip('\n').split('\n')


def clean_environment():
    """Ours without any launcher's variables."""
    return {k: v for k, v in os.environ.items()
            if not re.match(r'(ATOLL_|SLURM_|OMPI_|PET_|TORCHELASTIC_)|(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_)', k)}


class ReadmeTest(unittest.TestCase):
    def test_the_job_by_hand(self):
        lines = block('A job by hand', 'sh')
        self.assertEqual(lines[:2], ['./dev build', 'cd build/release/bin'])
        self.assertEqual(len(lines), 5)
        port = free_port()
        processes = []
        try:
            for line in lines[2:]:
                words = line.removesuffix(' &').replace('=fashion-mnist', '=synthetic:640').split()
                words.append(f'--coordinator=127.0.0.1:{port}')
                processes.append(subprocess.Popen(words, cwd=arguments.bin, env=clean_environment(), text=True, errors='replace',
                                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            outputs = [p.communicate(timeout=HANG_LIMIT_S)[0] for p in processes]
        finally:
            for p in processes:
                if p.poll() is None:
                    p.send_signal(signal.SIGKILL)
                    p.wait()
        for process, output in zip(processes, outputs):
            self.assertEqual(process.returncode, 0, f'{process.args}\n{output}')

    def test_under_torchrun(self):
        if subprocess.run([sys.executable, '-c', 'import torch.distributed.run'], capture_output=True).returncode:
            self.skipTest(f'ATOLL_TEST_SKIPPED: {sys.executable} cannot import torch.distributed.run')
        where, line = block('Under torchrun', 'sh')
        self.assertEqual(where, 'cd build/release/bin')
        torchrun, *words = line.replace('=fashion-mnist', '=synthetic:640').split()
        self.assertEqual(torchrun, '../../../.venv/bin/torchrun')
        # A port of its own, which without these is a fixed one.
        words = ['--rdzv-backend=c10d', '--rdzv-endpoint=localhost:0', f'--rdzv-id=readme-{os.getpid()}', *words]
        done = subprocess.run([sys.executable, '-m', 'torch.distributed.run', *words], cwd=arguments.bin,
                              env=clean_environment(), capture_output=True, text=True, timeout=HANG_LIMIT_S)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn('worker1: ', done.stdout)

    def test_the_code_is_that_of_the_example(self):
        example = pathlib.Path(ROOT, 'examples/first_job/first_job.cc').read_text()
        known = {line.strip() for line in example.split('\n')}
        for line in block('A first job of your own', 'cpp'):
            self.assertIn(line.strip(), known)
        self.assertLess(example.count('\n'), 100)
        self.assertIn(f'one of {example.count(chr(10))} lines', README)


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--bin', default=os.path.join(ROOT, 'build/release/bin'))
    arguments, rest = parser.parse_known_args()
    unittest.main(argv=sys.argv[:1] + rest, verbosity=2)
