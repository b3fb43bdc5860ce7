#!/usr/bin/env python3
"""Fails if a document names what is not there: a link's target, a file of the tree, a heading, a command.

Usage: check_docs.py ROOT
Looks at every *.md of the tree: relative links and their #fragments; `paths/of/the/tree.cc` in backticks
(also `folder/name_core`, without its suffix); `./dev COMMAND`. In docs/scenarios/*.md also the rows of the tables,
`| 12 | what holds | proof |` below `| scenario | ...`: a number comes once, and the proof is one or more tests that
exist, separated by <br> (`tests/rpc/x_test.cc: Suite.Name`, `tests/integration/x_test.py: test_name`), or begins
with "not here: " or "later: ", and says why; a comment `Scenario rpc 12.` of a test has its row in
docs/scenarios/rpc.md.
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
SCENARIOS = 'docs/scenarios/'
ROW = re.compile(r'^\| *(\d+) *\|(.*)\|\s*$')
PROOF = re.compile(r'^`?(tests/[\w./-]+): *(\w+)(?:\.(\w+))?`?$')
COMMENT = re.compile(r'^ *(?://|#) Scenarios? (\w+ [\d, and]+(?:, \w+ [\d, and]+)*)[.:]', re.M)
TABLE_ROWS = re.compile(r'([a-z_]+) ([\d, and]*\d)')


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


def has_test(text, first, second):
    """Whether a file with `text` has the test `first`.`second` of GoogleTest, or of Python (`second` may be None)."""
    if re.search(rf'^(?:TYPED_)?TEST(?:_[FP])?\(\s*{first},\s*{second}\s*\)', text, re.M):
        return True
    found = re.search(rf'^\s*(?:async )?def {second or first}\(', text, re.M) and (second or first).startswith('test')
    return bool(found and (second is None or re.search(rf'^class {first}\b', text, re.M)))


def check_rows(root, name):
    """The rows of a document of scenarios."""
    seen = set()
    for number, line in enumerate(open(os.path.join(root, name)), 1):
        row = ROW.match(line)
        if not row:
            if line.startswith('|') and not re.match(r'^\| *(scenario *\||-)', line):
                yield f'{name}:{number}: a row should begin with the number of its scenario'
            continue
        where = f'{name}:{number}: scenario {row[1]}'
        if row[1] in seen:
            yield f'{where} comes twice'
        seen.add(row[1])
        cells = row[2].split('|')
        proof = cells[-1].strip()
        if len(cells) != 2 or not cells[0].strip():
            yield f'{where}: a row is | number | what holds | proof |'
        elif not re.match(r'(not here|later): \S', proof):
            for part in proof.split('<br>'):
                test = PROOF.match(part.strip())
                path = test and os.path.join(root, test[1])
                if not test:
                    yield (f"{where}: '{part.strip()}' is no 'tests/folder/file_test.cc: Suite.Name', nor a reason "
                           "('not here: ...', 'later: ...')")
                elif not os.path.isfile(path):
                    yield f'{where}: {test[1]} is not in the tree'
                elif not has_test(open(path).read(), test[2], test[3]):
                    yield f'{where}: {test[1]} has no test {part.strip().partition(":")[2].strip()}'


def check_comments(root):
    """Tests that say of which scenario they are."""
    for path in sorted(glob.glob(os.path.join(root, 'tests/**/*'), recursive=True)):
        if not path.endswith(('.cc', '.h', '.py')):
            continue
        named = [pair for rows in COMMENT.findall(open(path).read()) for pair in TABLE_ROWS.findall(rows)]
        for table, numbers in named:
            document = os.path.join(root, SCENARIOS, table + '.md')
            rows = re.findall(r'^\| *(\d+) *\|', open(document).read(), re.M) if os.path.exists(document) else []
            for number in re.findall(r'\d+', numbers):
                if number not in rows:
                    yield (f'{os.path.relpath(path, root)}: scenario {table} {number} has no row in '
                           f'{SCENARIOS}{table}.md')


def main():
    root = sys.argv[1]
    listed = subprocess.run(['git', '-C', root, 'ls-files', '--cached', '--others', '--exclude-standard', '--',
                             '*.md'], check=True, capture_output=True, text=True).stdout.split('\n')[:-1]
    commands = {os.path.basename(p)[:-3] for p in glob.glob(os.path.join(root, 'tools/dev/*.sh'))} - {'common'}
    errors = []
    for name in listed:
        if os.path.exists(os.path.join(root, name)):
            errors += check(root, name, commands)
            if name.startswith(SCENARIOS):
                errors += check_rows(root, name)
    errors += check_comments(root)
    print('\n'.join(errors) or f'{len(listed)} documents')
    sys.exit(bool(errors))


if __name__ == '__main__':
    main()
