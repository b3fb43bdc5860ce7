#!/usr/bin/env python3
"""./dev on machines that are not fit: it says what is missing and what to do, and installs nothing.

Each test runs a copy of ./dev with commands of its own first in PATH (dpkg-query, id, df ...), which show it another
machine than this one.
"""
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ALL_INSTALLED = 'echo -n installed'
NONE_INSTALLED = 'exit 1'
PLENTY = 'echo Filesystem; echo / 0 0 900000000 0 /'


class DevTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix='atoll-dev-')
        self.addCleanup(self.folder.cleanup)
        self.tree = os.path.join(self.folder.name, 'tree')
        self.commands = os.path.join(self.folder.name, 'commands')
        os.mkdir(self.commands)
        os.makedirs(os.path.join(self.tree, 'tools'))
        shutil.copy(os.path.join(ROOT, 'dev'), self.tree)
        shutil.copytree(os.path.join(ROOT, 'tools', 'dev'), os.path.join(self.tree, 'tools', 'dev'))
        self.environment = dict(os.environ, PATH=f'{self.commands}:{os.environ["PATH"]}')
        for name in ('ATOLL_CUDA_HOME', 'ATOLL_SKIP_PACKAGES', 'ATOLL_OS_RELEASE'):
            self.environment.pop(name, None)
        # Whatever goes wrong here, nothing is installed.
        self.put('apt-get', 'echo apt-get must not run >&2; exit 1')
        self.put('df', PLENTY)
        self.put('id', 'echo 0')

    def put(self, name, script):
        path = os.path.join(self.commands, name)
        with open(path, 'w') as file:
            file.write(f'#!/bin/sh\n{script}\n')
        os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)

    def fake_torch(self, version='2.11.0'):
        torch = os.path.join(self.folder.name, 'site-packages', 'torch')
        os.makedirs(os.path.join(torch, 'lib'))
        open(os.path.join(torch, 'lib', 'libtorch_cpu.so'), 'w').close()
        with open(os.path.join(torch, 'version.py'), 'w') as file:
            file.write(f"__version__ = '{version}+cu130'\n")
        return torch

    def dev(self, *arguments):
        return subprocess.run([os.path.join(self.tree, 'dev'), *arguments], env=self.environment,
                              capture_output=True, text=True, timeout=60, cwd='/')

    def refused(self, *arguments):
        done = self.dev(*arguments)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        return done.stderr

    def test_alone_it_explains_itself(self):
        done = self.dev()
        self.assertEqual(done.returncode, 0)
        for command in ('demo', 'test', 'setup', 'build', 'bench', 'check'):
            self.assertIn(f'./dev {command}', done.stdout)

    def test_an_unknown_command_is_named(self):
        done = self.dev('tset')
        self.assertEqual(done.returncode, 2)
        self.assertIn("'tset'", done.stderr)

    def test_unknown_options_are_refused_before_any_work(self):
        for command in ('build', 'test', 'check', 'setup'):
            self.assertIn("unknown option '--fast'", self.refused(command, '--fast'))
        self.assertIn('no other sanitizer', self.refused('test', '--asan', '--tsan'))

    def test_without_root_it_says_what_to_run(self):
        self.put('dpkg-query', NONE_INSTALLED)
        self.put('id', 'echo 1000')
        text = self.refused('setup')
        self.assertIn('needs root', text)
        self.assertRegex(text, r'sudo apt-get install .*libabsl-dev')

    def test_only_what_is_missing_is_asked_for(self):
        self.put('dpkg-query', 'case "$*" in *mold) exit 1 ;; *) echo -n installed ;; esac')
        self.put('id', 'echo 1000')
        self.assertRegex(self.refused('setup'), r'install --no-install-recommends mold\n')

    def test_another_distribution(self):
        self.put('dpkg-query', NONE_INSTALLED)
        other = os.path.join(self.folder.name, 'os-release')
        with open(other, 'w') as file:
            file.write('ID=other\nVERSION_ID=1\nPRETTY_NAME="Other Linux 1"\n')
        self.environment['ATOLL_OS_RELEASE'] = other
        text = self.refused('setup')
        self.assertIn('Other Linux 1', text)
        self.assertIn('ATOLL_SKIP_PACKAGES=1', text)

    def test_no_network_for_packages(self):
        self.put('dpkg-query', NONE_INSTALLED)
        self.put('apt-get', 'echo "E: could not resolve" >&2; exit 100')
        text = self.refused('setup')
        self.assertIn('no network', text)
        self.assertIn('build/logs/apt-update.log', text)

    def test_no_network_for_torch(self):
        self.put('dpkg-query', ALL_INSTALLED)
        venv = os.path.join(self.tree, '.venv', 'bin')
        os.makedirs(venv)
        with open(os.path.join(venv, 'python'), 'w') as file:
            file.write('#!/bin/sh\necho could not find a version that satisfies torch >&2\nexit 1\n')
        os.chmod(os.path.join(venv, 'python'), 0o755)
        text = self.refused('setup')
        self.assertIn('no network', text)
        self.assertIn('./dev build --torch DIR', text)

    def test_too_little_disk(self):
        self.put('dpkg-query', ALL_INSTALLED)
        self.put('df', 'echo Filesystem; echo / 0 0 1000000 0 /')
        self.assertRegex(self.refused('setup'), r'too little disk: .* needs about 6 GB')

    def test_no_compiler(self):
        self.environment['ATOLL_SKIP_PACKAGES'] = '1'
        # A PATH that has all but g++.
        for name in ('bash', 'env', 'awk', 'basename', 'cat', 'cmp', 'cp', 'dirname', 'flock', 'grep', 'mkdir', 'nproc',
                     'readlink', 'sed', 'tail', 'uname'):
            os.symlink(shutil.which(name), os.path.join(self.commands, name))
        self.environment['PATH'] = self.commands
        self.assertIn('no compiler', self.refused('setup'))

    def test_an_installed_torch_is_used_without_a_network(self):
        self.put('dpkg-query', ALL_INSTALLED)
        torch = self.fake_torch()
        # The build itself is another test's: here CMake only says that it was called, and with which torch.
        self.put('cmake', 'echo "$*"; exit 1')
        done = self.dev('build', '--torch', os.path.dirname(torch))
        self.assertIn('failed', done.stderr)
        self.assertIn(f'-DATOLL_TORCH_DIR={torch}', done.stderr)
        self.assertFalse(os.path.exists(os.path.join(self.tree, '.venv')))

    def test_another_torch_is_refused(self):
        self.put('dpkg-query', ALL_INSTALLED)
        self.assertRegex(self.refused('build', '--torch', self.fake_torch('2.9.1')), r'is 2\.9\.1.*needed is 2\.11\.0')
        self.assertIn('no torch in', self.refused('build', '--torch', '/nowhere'))


if __name__ == '__main__':
    unittest.main(verbosity=2)
