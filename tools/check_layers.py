#!/usr/bin/env python3
"""Fails if an #include goes up in the order of the folders.

Usage: check_layers.py ROOT TABLE

TABLE has a line for each folder, lower ones first: "name: folders it may include". A line
"!prefix: folders" lists the only folders that may include <prefix...>: the fence around a foreign library.
A file *_core.{h,cc} decides and does no I/O: it may include base, the standard library, Abseil, other cores, ids,
options, messages, and the prefixes in the line "~core: prefixes"; nothing that locks, waits, or asks the system.
"""
import os
import re
import sys

INCLUDE = re.compile(r'\s*#\s*include\s*["<]([^">]+)[">]')
SOURCE = re.compile(r'\.(h|cc|cu|cuh)$')
CORE = re.compile(r'_core\.(h|cc)$')
ALLOWED_IN_CORE = re.compile(r'(_core|messages|ids|options)\.h$')
IMPURE = re.compile(r'(thread|mutex|condition_variable|fstream|iostream|unistd\.h|sys/.*|netinet/.*|absl/synchronization/.*'
                    r'|absl/time/clock\.h|(atoll/)?base/(executor|future|clock)\.h)$')


def read_table(path):
    """Returns ({folder: folders it may include}, {foreign prefix: folders that may include it}, errors).

    The prefixes of "~core" stand in the first under that name."""
    folders, fences, errors = {}, {}, []
    for line in open(path):
        line = line.split('#')[0].strip()
        if not line:
            continue
        name, listed = (part.strip() for part in line.split(':', 1))
        if name.startswith('!'):
            fences[name[1:]] = set(listed.split())
            continue
        if name == '~core':
            folders[name] = tuple(listed.split())
            continue
        for dependency in listed.split():
            if dependency not in folders:
                errors.append(f'{path}: {name} may include {dependency}, which is not listed before it')
        folders[name] = set(listed.split())
    return folders, fences, errors


def check_file(path, folder, folders, fences):
    is_core = CORE.search(path)
    for number, line in enumerate(open(path, errors='replace'), 1):
        found = INCLUDE.match(line)
        if not found:
            continue
        name = found[1].removeprefix('atoll/')
        target = name.split('/')[0] if found[1].startswith('atoll/') else None
        where = f'{path}:{number}'
        if '/' in name and not found[1].startswith('atoll/') and name.split('/')[0] in folders:
            yield f'{where}: write "atoll/{name}"'
        if is_core and (IMPURE.match(found[1]) or (
                '/' in name and target != 'base' and not name.startswith('absl/')
                and not ALLOWED_IN_CORE.search(name) and not found[1].startswith(folders.get('~core', ())))):
            yield f'{where}: a core may not include {found[1]}'
        if target is not None and target not in folders:
            yield f'{where}: there is no folder {target} in the table of layers'
        elif target is not None and target != folder and target not in folders[folder]:
            yield f'{where}: {folder} may not include {target}'
        for prefix, users in fences.items():
            if found[1].startswith(prefix) and folder not in users:
                yield f'{where}: only {", ".join(sorted(users))} may include {prefix}'


def main():
    root, table = sys.argv[1:]
    folders, fences, errors = read_table(table)
    files = 0
    for folder in sorted(folders.keys() - {'~core'}):
        for where, _, names in os.walk(os.path.join(root, folder)):
            for name in sorted(names):
                if SOURCE.search(name):
                    files += 1
                    errors += check_file(os.path.join(where, name), folder, folders, fences)
    print('\n'.join(errors) or f'{files} files in {len(folders) - 1} folders')
    sys.exit(bool(errors))


if __name__ == '__main__':
    main()
