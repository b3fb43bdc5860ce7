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
        """The README's block that installs Atoll, builds a job of one's own and runs it with an installed owner."""
        pasted = [one for one in readme_test.blocks(readme_test.README, 'sh') if one.startswith(readme_test.INSTALL)]
        self.assertEqual(len(pasted), 1)
        folder = os.path.join(self.folder.name, 'readme')
        os.makedirs(os.path.join(folder, 'run'))
        environment = {'HOME': folder, 'XDG_RUNTIME_DIR': os.path.join(folder, 'run'),
                       'PATH': f'{os.path.dirname(shutil.which(arguments.cmake))}:{os.environ["PATH"]}'}
        said = readme_test.paste(readme_test.make_clone(os.path.join(folder, 'clone'), arguments.build),
                                 [pasted[0].replace('29500', str(free_port()))], environment)
        self.assertIn('owner0: done', said)
        self.assertIn('loss', said)
        sums = re.findall(r'worker [01]: checksum ([0-9a-f]{8})', said)
        self.assertEqual(len(sums), 2, said)
        self.assertEqual(sums[0], sums[1], said)

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
