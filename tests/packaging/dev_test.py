#!/usr/bin/env python3
"""./dev on machines that are not fit: it says what is missing and what to do, and installs nothing.

Each test runs a copy of ./dev with commands of its own first in PATH (dpkg-query, id, df ...), which show it another
machine than this one.
"""
import importlib.util
import os
import shutil
import stat
import subprocess
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
        for name in ('demo.py', 'loopback.py'):
            shutil.copy(os.path.join(ROOT, 'tools', name), os.path.join(self.tree, 'tools'))
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

    def dev(self, *arguments, cwd='/'):
        return subprocess.run([os.path.join(self.tree, 'dev'), *arguments], env=self.environment,
                              capture_output=True, text=True, timeout=120, cwd=cwd)

    def only_commands(self, *without):
        """A PATH that has what ./dev itself uses, and no more."""
        for name in ('awk', 'basename', 'bash', 'cat', 'cmake', 'cmp', 'cp', 'dirname', 'env', 'flock', 'grep', 'mkdir',
                     'ninja', 'nproc', 'python3', 'readlink', 'rm', 'sed', 'tail', 'uname'):
            if name not in without:
                self.put(name, f'exec {shutil.which(name)} "$@"')
        self.environment['PATH'] = self.commands

    def fake_build(self):
        """A machine on which all is installed, and a build that takes no time; what CMake was given, one a line."""
        self.put('dpkg-query', ALL_INSTALLED)
        given = os.path.join(self.folder.name, 'given-to-cmake')
        self.put('cmake', f'for a in "$@"; do echo "$a" >>{given}; [ "$b" != -B ] || : >"$a/build.ninja"; b=$a; done')
        self.put('ninja', 'exit 0')
        self.put('ctest', self.ctest_of(('unit', 'slow'), ('base_test', 'rref_test')))
        return given

    @staticmethod
    def ctest_of(labels, names):
        """A ctest that knows these, and says how it was called to run them."""
        listed = '; '.join(f'echo "  Test #{number}: {name}"' for number, name in enumerate(names, 1))
        return (f'case "$*" in *--print-labels*) echo "All Labels:"; printf "  %s\\n" {" ".join(labels)} ;; '
                f'*\ -N*) {listed} ;; *) echo "ctest $*" ;; esac')

    def said(self, *arguments, **options):
        done = self.dev(*arguments, **options)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

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
        self.put('dpkg-query', 'echo dpkg-query must not run >&2; exit 1')
        for command in ('build', 'test', 'check', 'setup'):
            self.assertIn(f"{command}: unknown option '--fast'", self.refused(command, '--fast'))
        self.assertIn('no other sanitizer', self.refused('test', '--asan', '--tsan'))
        for wrong in ('none', '0', '-1', '2x', ''):
            self.assertIn('--repeat', self.refused('test', '--repeat', wrong))
        for wrong, why in ((['--fast'], 'unrecognized arguments: --fast'), (['--owners=0'], '--owners should be at least 1'),
                           (['--min-accuracy=88'], 'from 0 to 1'), (['--json', '/nowhere/x'], 'cannot write /nowhere/x')):
            done = self.dev('demo', *wrong)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(why, done.stderr)

    def test_every_command_has_help_and_does_nothing_else(self):
        self.put('dpkg-query', 'echo dpkg-query must not run >&2; exit 1')
        for command in ('setup', 'build', 'test', 'check'):
            for arguments in ([command, '--help'], [command, '-h']):
                text = self.said(*arguments)
                self.assertTrue(text.startswith(f'  ./dev {command} '), text)
                self.assertEqual(text.count('./dev'), 1, text)
        self.assertIn('--asan', self.said('build', 'atoll-server', '--help'))
        self.assertIn('--min-accuracy', self.said('demo', '--help'))

    def test_an_unknown_test_is_refused_before_the_build(self):
        given = self.fake_build()
        self.said('build', '--torch', self.fake_torch())
        self.put('ninja', 'echo ninja must not run >&2; exit 1')
        for unknown in ('nosuch', '(', 'base_tests'):
            text = self.refused('test', unknown)
            self.assertIn(f"no test has '{unknown}'", text)
            self.assertIn('Labels are unit, slow; tests:\n     base_test rref_test\n', text)
        self.put('ctest', 'case "$*" in *--print-labels*) ;; *-LE*) echo "Total Tests: 0" ;; '
                 '*) echo "  Test #1: soak" ;; esac')
        self.assertIn('./dev test soak --all', self.refused('test', 'soak'))
        self.assertTrue(os.path.exists(given))

    def test_an_unknown_target_is_refused_before_the_build(self):
        self.fake_build()
        self.said('build', '--torch', self.fake_torch())
        self.put('ninja', 'case "$*" in *query*rref_test) exit 0 ;; *query*) exit 1 ;; '
                 '*targets*) printf "%s: phony\\n" edit_cache rref_test a/b all ;; *) echo "ninja $*" >&2 ;; esac')
        text = self.refused('build', 'rref_test', 'rref_tset')
        self.assertIn("no target 'rref_tset'", text)
        self.assertRegex(text, r'     rref_test *\n$')

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
        self.fake_venv('case "$*" in *--version) exit 0 ;; esac; echo could not find torch >&2; exit 1')
        text = self.refused('setup')
        self.assertIn('no network', text)
        self.assertIn('./dev build --torch DIR', text)

    def fake_venv(self, script):
        python = os.path.join(self.tree, '.venv', 'bin', 'python')
        os.makedirs(os.path.dirname(python))
        with open(python, 'w') as file:
            file.write(f'#!/bin/sh\n{script}\n')
        os.chmod(python, 0o755)
        return python

    def test_a_half_made_virtual_environment_is_made_anew(self):
        if importlib.util.find_spec('ensurepip') is None:
            self.skipTest('this machine cannot make virtual environments')
        self.put('dpkg-query', ALL_INSTALLED)
        self.environment['PIP_NO_INDEX'] = '1'
        python = self.fake_venv('echo No module named pip >&2; exit 1')
        self.assertIn('could not install torch', self.refused('setup'))
        self.assertEqual(subprocess.run([python, '-m', 'pip', '--version'], capture_output=True).returncode, 0)

    def test_too_little_disk(self):
        self.put('dpkg-query', ALL_INSTALLED)
        self.put('df', 'echo Filesystem; echo / 0 0 1000000 0 /')
        self.assertRegex(self.refused('setup'), r'too little disk: .* needs about 4 GB')

    def test_no_compiler(self):
        self.environment['ATOLL_SKIP_PACKAGES'] = '1'
        self.only_commands()
        self.assertIn('no compiler', self.refused('setup'))

    def test_without_packages_what_is_missing_is_named(self):
        self.environment['ATOLL_SKIP_PACKAGES'] = '1'
        self.only_commands('ninja')
        self.put('g++', 'while read -r line; do case $line in missing*gtest*) echo "$line" ;; esac; done')
        text = self.refused('setup')
        self.assertIn('ninja (ninja-build)', text)
        self.assertIn('gtest/gtest.h (libgtest-dev)', text)
        self.assertNotIn('cmake', text)

    def test_without_packages_what_is_here_is_found(self):
        # This machine builds the tree: nothing may be said to be missing.
        self.environment['ATOLL_SKIP_PACKAGES'] = '1'
        given = self.fake_build()
        self.said('build', '--torch', self.fake_torch())
        self.assertTrue(os.path.exists(given))

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

    def test_relative_paths_are_the_callers(self):
        given = self.fake_build()
        torch = self.fake_torch()
        self.said('build', '--torch', 'torch', cwd=os.path.dirname(torch))
        with open(given) as file:
            self.assertIn(f'-DATOLL_TORCH_DIR={torch}\n', file.readlines())
        self.put('python3', 'pwd; echo "$@"')
        where, words = self.said('demo', '--json', 'out.json', cwd=self.commands).strip().split('\n')[-2:]
        self.assertEqual(where, self.commands)
        self.assertEqual(words, f'{self.tree}/tools/demo.py --bin {self.tree}/build/release/bin --json out.json')

    def test_folders_with_blanks(self):
        given = self.fake_build()
        torch = self.fake_torch()
        blank = os.path.join(self.folder.name, 'two words')
        os.rename(os.path.dirname(torch), blank)
        self.environment['ATOLL_CUDA_HOME'] = os.path.join(blank, 'cuda')
        self.said('build', '--torch', blank)
        with open(given) as file:
            lines = file.readlines()
        self.assertIn(f'-DATOLL_TORCH_DIR={blank}/torch\n', lines)
        self.assertIn(f'-DATOLL_CUDA_HOME={blank}/cuda\n', lines)

    def test_cmake_runs_again_when_the_toolkit_has_changed(self):
        given = self.fake_build()
        cuda = os.path.join(self.folder.name, 'cuda')
        self.environment['ATOLL_CUDA_HOME'] = cuda
        self.said('build', '--torch', self.fake_torch())
        os.remove(given)
        self.said('build')
        self.assertFalse(os.path.exists(given), 'nothing has changed')
        os.makedirs(os.path.join(cuda, 'bin'))
        os.symlink('/bin/true', os.path.join(cuda, 'bin', 'nvcc'))
        self.said('build')
        self.assertTrue(os.path.exists(given))

    def test_a_part_is_a_label_or_else_a_name(self):
        self.fake_build()
        # Much more than a pipe holds behind the label: whoever stops reading at it kills ctest.
        self.put('ctest', self.ctest_of(('unit', '$(seq 100000)'), ('rref_test',)))
        self.said('build', '--torch', self.fake_torch())
        self.assertIn('-L ^unit$', self.said('test', 'unit'))
        self.assertRegex(self.said('test', 'rref'), r'ctest .* -R rref\n')

    def test_slow_tests_run_when_asked_for(self):
        self.fake_build()
        self.said('build', '--torch', self.fake_torch())
        self.assertIn('-LE ^slow$', self.said('test'))
        self.assertNotIn('-LE', self.said('test', '--all'))
        self.assertNotIn('-LE', self.said('test', 'slow'))

    def test_what_was_skipped_is_said(self):
        self.fake_build()
        self.said('build', '--torch', self.fake_torch())
        log = os.path.join(self.tree, 'build', 'release', 'Testing', 'Temporary', 'LastTest.log')
        os.makedirs(os.path.dirname(log))
        with open(log, 'w') as file:
            file.write('x.cc:1: Skipped\nATOLL_TEST_SKIPPED: no GPU here\n' * 2)
        self.assertIn('[test] skipped: no GPU here (2)\n', self.said('test'))

    def test_check_needs_to_know_the_files(self):
        self.fake_build()
        self.put('git', 'echo "fatal: detected dubious ownership" >&2; exit 128')
        text = self.refused('check')
        self.assertIn('dubious ownership', text)
        self.assertIn('safe.directory', text)


if __name__ == '__main__':
    unittest.main(verbosity=2)
