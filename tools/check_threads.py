#!/usr/bin/env python3
"""Runs clang's lock analysis (-Wthread-safety, as errors) over the tree.

Usage: check_threads.py BUILD JOBS
BUILD holds compile_commands.json of g++: its defines, include folders and standard are used. The pass goes
through ccache, so that only what changed is read again.
"""
import concurrent.futures
import json
import os
import shlex
import shutil
import subprocess
import sys

KEPT = ('-D', '-I', '-std=')


def clang_command(entry):
    words = shlex.split(entry['command'])
    command = [shutil.which('ccache'), 'clang++'] if shutil.which('ccache') else ['clang++']
    # The other warnings are g++'s part; no inline code is generated, so -O0.
    command += ['-fsyntax-only', '-Wno-everything', '-Wthread-safety', '-Werror']
    for i, word in enumerate(words):
        if word.startswith(KEPT):
            command.append(word)
        elif word == '-isystem':
            command += [word, words[i + 1]]
    return command + ['-c', entry['file']]


def run(entry):
    environment = dict(os.environ, CCACHE_BASEDIR=os.getcwd(), CCACHE_NOHASHDIR='1')
    done = subprocess.run(clang_command(entry), cwd=entry['directory'], env=environment, capture_output=True,
                          text=True)
    return entry['file'], done.returncode, done.stderr


def main():
    build, jobs = sys.argv[1:]
    entries = [e for e in json.load(open(os.path.join(build, 'compile_commands.json')))
               if e['file'].endswith('.cc') and os.path.exists(e['file'])]
    entries = list({e['file']: e for e in entries}.values())  # A source of two targets is read once.
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(int(jobs)) as pool:
        for file, code, text in pool.map(run, entries):
            if code != 0:
                failed += 1
                print(f'{os.path.relpath(file)}:\n{text}', end='')
    print(f'{len(entries)} files, {failed} with errors')
    sys.exit(failed != 0)


if __name__ == '__main__':
    main()
