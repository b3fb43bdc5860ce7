#!/usr/bin/env python3
"""The README is true: its blocks are pasted into one shell, in order, in the root of a clone, and do what it says.

The clone is one of links, with a `dev` that only looks whether there is such a command. Only the data (made up, so
that it takes seconds) and the coordinator's port (a free one) are put in. How to install Atoll and to build against
it is packaging_test.py's. The blocks of docs/security.md run too, those of several hosts on this one.
"""
import argparse
import glob
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, 'tools'))
from loopback import free_port  # pylint: disable=wrong-import-position
README = pathlib.Path(ROOT, 'README.md').read_text()
INSTALL = 'cmake --install'  # What the blocks of packaging_test.py begin with.
HANG_LIMIT_S = 240
arguments = None

DEV = '''#!/bin/sh
[ -e tools/dev/"$1".sh ] || { echo "./dev has no command $1" >&2; exit 1; }
echo "dev $*"
'''
TORCHRUN = f'''#!/bin/sh
# A port of its own, which without these is a fixed one.
exec {sys.executable} -m torch.distributed.run --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --rdzv-id=$$ "$@"
'''


def blocks(text, language):
    """The fenced blocks of `language`, in order."""
    return [found.strip('\n') for found in re.findall(rf'^```{language}\n(.*?)^```', text, re.S | re.M)]


def clean_environment():
    """Ours without any launcher's variables, and without what would help programs find their libraries."""
    return {k: v for k, v in os.environ.items()
            if not re.match(r'(ATOLL_|SLURM_|OMPI_|PET_|TORCHELASTIC_)|(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_|LD_LIBRARY_PATH$)', k)}


def make_clone(folder, build):
    """A clone in `folder`, built in `build`: of links, so that pasted lines find what they name."""
    os.makedirs(os.path.join(folder, 'build'))
    os.symlink(build, os.path.join(folder, 'build', 'release'))
    os.makedirs(os.path.join(folder, '.venv', 'bin'))
    for name in os.listdir(ROOT):
        if not name.startswith(('.', 'build')) and name != 'dev':
            os.symlink(os.path.join(ROOT, name), os.path.join(folder, name))
    for path, text in (('dev', DEV), ('.venv/bin/torchrun', TORCHRUN)):
        pathlib.Path(folder, path).write_text(text)
        os.chmod(os.path.join(folder, path), 0o755)
    return folder


def paste(root, pasted, environment):
    """Into one shell in `root`, one block after the other; what it and all it started said."""
    # As a prompt would: what fails does not end the shell, but here it is told.
    script = '\n'.join(f'{one}\necho "block {number} ends in $PWD"' for number, one in enumerate(pasted))
    shell = subprocess.Popen(['bash', '-c', script], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             env={**clean_environment(), 'PWD': root, **environment}, text=True, errors='replace',
                             start_new_session=True)
    try:
        return shell.communicate(timeout=HANG_LIMIT_S)[0]
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()


def have_torchrun():
    return subprocess.run([sys.executable, '-c', 'import torch.distributed.run'], capture_output=True).returncode == 0


class ReadmeTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix='atoll-readme-')
        self.addCleanup(folder.cleanup)
        self.root = make_clone(os.path.join(folder.name, 'clone'), os.path.dirname(os.path.abspath(arguments.bin)))
        self.environment = {'XDG_RUNTIME_DIR': folder.name}  # Keys that are made for jobs lie there.

    def test_every_block_of_the_readme_in_order(self):
        port = free_port()
        pasted = [one.replace('fashion-mnist', 'synthetic:640').replace('29500', str(port))
                  for one in blocks(README, 'sh') if not one.startswith(INSTALL)]
        self.assertEqual(len(pasted), 3, 'a job by hand, one under torchrun, and one of the example')
        if not have_torchrun():
            print(f'ATOLL_TEST_SKIPPED: {sys.executable} cannot import torch.distributed.run')
            pasted[1] = ':'
        said = paste(self.root, pasted, {**self.environment, 'MASTER_PORT': str(port)})
        by_hand, torchrun, example = re.split(r'block \d ends in .*\n', said)[:3]
        self.assertEqual(re.findall(r'block \d ends in (.*)', said), [self.root] * 3, said)
        self.assertNotRegex(said, r'error:|No such file|not found')
        self.assertIn('dev build', by_hand)
        for name in ('owner0: done', 'worker0: done after 5 steps', 'accuracy', 'worker1: done'):
            self.assertIn(name, by_hand)
        if pasted[1] != ':':
            for name in ('owner0: done', 'owner1: done', 'worker0: done', 'worker1: done'):
                self.assertIn(name, torchrun)
        self.assertIn('owner0: done', example)
        sums = re.findall(r'worker [01]: checksum ([0-9a-f]{8})', example)
        self.assertEqual(len(sums), 2, example)
        self.assertEqual(sums[0], sums[1], example)

    def test_no_block_leaves_the_shell_in_another_state(self):
        for path in [os.path.join(ROOT, 'README.md'), os.path.join(ROOT, 'CONTRIBUTING.md'),
                     *glob.glob(os.path.join(ROOT, 'docs', '*.md'))]:
            for one in blocks(pathlib.Path(path).read_text(), 'sh'):
                for line in one.split('\n'):
                    self.assertNotRegex(line, r'^\s*(cd|export|pushd|set|unset|source|\.) ', path)

    def test_the_blocks_about_security(self):
        if shutil.which('openssl') is None:
            self.skipTest('ATOLL_TEST_SKIPPED: this machine has no openssl command')
        text = pathlib.Path(ROOT, 'docs', 'security.md').read_text()
        # Nobody else comes to these jobs: that they begin to wait for others shows that all they were given is right.
        pasted = [one.replace('10.0.0.1:29500', f'127.0.0.1:{free_port()}') for one in blocks(text, 'sh')]
        self.assertEqual(len(pasted), 3)
        said = paste(self.root, pasted, {**self.environment, 'ATOLL_JOIN_LIMIT': '1s',
                                         'PATH': f'{arguments.bin}:{os.environ["PATH"]}'})
        self.assertRegex(said, r'atoll-server owner0: error: .*2 of 3 ranks did not come within 1s: 1, 2\n')
        self.assertRegex(said, r'atoll-worker worker0: error: cannot join the job: no coordinator let us in within 1s')
        self.assertEqual(said.count('error:'), 2, said)

    def test_the_code_is_that_of_the_example(self):
        example = pathlib.Path(ROOT, 'examples/first_job/first_job.cc').read_text()
        known = {line.strip() for line in example.split('\n')}
        for one in blocks(README, 'cpp'):
            for line in one.split('\n'):
                self.assertIn(line.strip(), known)
        self.assertLess(example.count('\n'), 100)
        self.assertIn(f'one of {example.count(chr(10))} lines', README)

    def test_the_examples_launch_lines_are_the_readmes(self):
        example = pathlib.Path(ROOT, 'examples/first_job/first_job.cc').read_text()
        comment = '\n'.join(line[5:] for line in example.split('\n') if line.startswith('//   '))
        self.assertIn(comment, blocks(README, 'sh'))


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--bin', default=os.path.join(ROOT, 'build/release/bin'))
    arguments, rest = parser.parse_known_args()
    unittest.main(argv=sys.argv[:1] + rest, verbosity=2)
