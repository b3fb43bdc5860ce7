#!/usr/bin/env python3
"""Fails if a document names what is not there: a link's target, a file of the tree, a heading, a command.

Usage: check_docs.py ROOT
Looks at every *.md of the tree: relative links and their #fragments; `paths/of/the/tree.cc` in backticks
(also `folder/name_core`, without its suffix); `./dev COMMAND`.
"""
import glob
import os
import re
import subprocess
import sys

LINK = re.compile(r'\[[^\]]*\]\(([^)\s]+)\)')
CODE = re.compile(r'`([^`\n]+)`')
TREE_PATH = re.compile(r'^[a-z_.]+(/[A-Za-z0-9_.*-]+)+/?$')
DEV = re.compile(r'\./dev ([a-z]+)')


def slug(heading):
    text = re.sub(r'[^\w\- ]', '', heading.strip().lower())
    return text.replace(' ', '-')


def headings(path):
    text = re.sub(r'```.*?```', '', open(path).read(), flags=re.S)
    return {slug(line.lstrip('#')) for line in text.split('\n') if line.startswith('#')}


def exists(root, path):
    return any(glob.glob(os.path.join(root, path + end)) for end in ('', '.h', '.cc', '.py', '_test.cc'))


def check(root, name, commands):
    path = os.path.join(root, name)
    for number, line in enumerate(open(path), 1):
        where = f'{name}:{number}'
        for target in LINK.findall(line):
            if re.match(r'[a-z]+:', target):
                continue
            file, _, fragment = target.partition('#')
            full = os.path.normpath(os.path.join(os.path.dirname(path), file)) if file else path
            if not os.path.exists(full):
                yield f'{where}: the link {target} leads nowhere'
            elif fragment and fragment not in headings(full):
                yield f'{where}: {target}: no such heading'
        for code in CODE.findall(line):
            if TREE_PATH.match(code) and os.path.isdir(os.path.join(root, code.split('/')[0])) \
                    and not code.startswith('build/') and not exists(root, code):
                yield f'{where}: {code} is not in the tree'
        for command in DEV.findall(line):
            if command not in commands:
                yield f'{where}: ./dev has no command {command}'


def main():
    root = sys.argv[1]
    listed = subprocess.run(['git', '-C', root, 'ls-files', '--cached', '--others', '--exclude-standard', '--',
                             '*.md'], check=True, capture_output=True, text=True).stdout.split('\n')[:-1]
    commands = {os.path.basename(p)[:-3] for p in glob.glob(os.path.join(root, 'tools/dev/*.sh'))} - {'common'}
    errors = []
    for name in listed:
        if os.path.exists(os.path.join(root, name)):
            errors += check(root, name, commands)
    print('\n'.join(errors) or f'{len(listed)} documents')
    sys.exit(bool(errors))


if __name__ == '__main__':
    main()
