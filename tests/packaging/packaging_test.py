#!/usr/bin/env python3
"""Installs a build to a fresh prefix, moves the prefix, and builds and runs an out-of-tree project with it.

Also: what is built may be carried to another machine with the same torch, so nothing may need a shared
Abseil, GoogleTest or TensorPipe, and torch is found by run path.
"""
import argparse
import glob
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(ROOT, 'tools'))
import readme_test  # pylint: disable=wrong-import-position
from loopback import free_port  # pylint: disable=wrong-import-position
arguments = None


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, **options)
    if done.returncode != 0:
        raise AssertionError(f'{" ".join(command)}: exit code {done.returncode}\n{done.stdout[-6000:]}\n'
                             f'{done.stderr[-6000:]}')
    return done.stdout


def dynamic(path):
    """Returns (libraries needed, run path) of an executable."""
    text = run('readelf', '-d', '-W', path)
    path = re.search(r'\((?:RPATH|RUNPATH)\).*\[(.*)\]', text)
    return re.findall(r'\(NEEDED\).*\[(.*)\]', text), path[1] if path else ''


def clean_environment():
    """Ours without what would help a program find its libraries."""
    return {k: v for k, v in os.environ.items() if k != 'LD_LIBRARY_PATH'}


class PackagingTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix='atoll-packaging-')
        first = os.path.join(cls.folder.name, 'first')
        run(arguments.cmake, '--install', arguments.build, '--prefix', first)
        cls.prefix = os.path.join(cls.folder.name, 'moved')
        os.rename(first, cls.prefix)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def check_portable(self, path):
        needed, run_path = dynamic(path)
        foreign = [n for n in needed if re.match(r'lib(absl|gtest|gmock|tensorpipe|nop|uv|atoll)', n)]
        self.assertEqual(foreign, [], f'{path} needs libraries that another machine may lack')
        self.assertNotIn('', run_path.split(':')[1:], f'{path} looks for libraries in the current folder')
        if any(n.startswith('libtorch') for n in needed):
            self.assertIn(os.path.join(arguments.torch, 'lib'), run_path.split(':'))
        if os.path.basename(path) != 'cuda_test':  # Has kernels of its own.
            self.assertFalse([n for n in needed if 'cuda' in n], f'{path} cannot start without CUDA')

    def test_binaries_of_the_build_run_elsewhere(self):
        found = [p for folder in ('bin', 'tests') for p in glob.glob(os.path.join(arguments.build, folder, '*'))
                 if os.path.isfile(p) and os.access(p, os.X_OK)]
        self.assertTrue(found)
        for path in found:
            with self.subTest(os.path.basename(path)):
                if pathlib.Path(path).read_bytes()[:4] == b'\x7fELF':
                    self.check_portable(path)

    def test_installed_binaries_start(self):
        found = glob.glob(os.path.join(self.prefix, 'bin', '*'))
        self.assertEqual({'atoll-server', 'atoll-worker', 'atoll-run'}, {os.path.basename(p) for p in found})
        for path in found:
            with self.subTest(os.path.basename(path)):
                self.check_portable(path)
                # It says the name first.
                text = run(path, '--version', env=clean_environment())
                self.assertIn('atoll', text.split()[0])

    def test_a_project_of_its_own(self):
        build = os.path.join(self.folder.name, 'build')
        run(arguments.cmake, '-S', os.path.join(HERE, 'project'), '-B', build, '-G', 'Ninja',
            f'-DCMAKE_PREFIX_PATH={self.prefix}')
        # Nothing of the tree it came from may be left in the package.
        for path in glob.glob(os.path.join(self.prefix, 'lib*', 'cmake', 'Atoll', '*.cmake')):
            self.assertNotIn(os.path.join(arguments.build, ''), pathlib.Path(path).read_text(), path)
        run(arguments.cmake, '--build', build)
        self.assertIn('out of tree: ok', run(os.path.join(build, 'out_of_tree'), str(free_port()),
                                                 env=clean_environment()))

    def test_the_readmes_own_job(self):
        """The README's lines to install, and to build a job of one's own; then that job, with an installed owner."""
        heading = 'A first job of your own'
        folder = os.path.join(self.folder.name, 'readme')
        os.makedirs(os.path.join(folder, 'my_job'))
        pathlib.Path(folder, 'my_job', 'CMakeLists.txt').write_text('\n'.join(readme_test.block(heading, 'cmake')))
        shutil.copy(os.path.join(ROOT, 'examples/first_job/first_job.cc'), os.path.join(folder, 'my_job', 'my_job.cc'))
        prefix = os.path.join(folder, 'prefix')
        script = '\n'.join(readme_test.block(heading, 'sh'))
        for there, here in (('build/release', arguments.build), ('/opt/atoll', prefix)):
            self.assertIn(there, script)
            script = script.replace(there, here)
        run('bash', '-ec', script, cwd=folder)
        port = free_port()
        environment = {**readme_test.clean_environment(), 'WORLD_SIZE': '3', 'ATOLL_OWNERS': '1', 'ATOLL_JOB': f'own-{port}',
                       'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port), 'XDG_RUNTIME_DIR': folder}
        environment.pop('LD_LIBRARY_PATH', None)
        job = os.path.join(folder, 'my_job', 'build', 'my_job')
        processes = [subprocess.Popen([program], env={**environment, 'RANK': str(rank)}, text=True, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT)
                     for rank, program in enumerate((os.path.join(prefix, 'bin', 'atoll-server'), job, job))]
        try:
            outputs = [process.communicate(timeout=300)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, output in zip(processes, outputs):
            self.assertEqual(process.returncode, 0, output)
        self.assertIn('loss', outputs[1])

    def test_every_installed_header_is_there_by_its_folder(self):
        root = os.path.join(self.prefix, 'include', 'atoll')
        headers = {os.path.relpath(os.path.join(where, name), root)
                   for where, _, names in os.walk(root) for name in names}
        for expected in ('base/status.h', 'client/session.h', 'client/trainer.h', 'rpc/agent.h', 'rref/rref.h'):
            self.assertIn(expected, headers)
        # What a header includes of ours is installed too.
        for header in sorted(headers):
            for included in re.findall(r'#include "atoll/([^"]+)"', pathlib.Path(root, header).read_text()):
                self.assertIn(included, headers, f'{header} includes it')


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--build', required=True)
    parser.add_argument('--cmake', default='cmake')
    parser.add_argument('--torch', required=True)
    arguments, rest = parser.parse_known_args()
    unittest.main(argv=sys.argv[:1] + rest, verbosity=2)
