#!/usr/bin/env python3
"""Fails if a source file is far beyond the size that reads well; warns from 500 lines on.

Usage: check_sizes.py ROOT
"""
import subprocess
import sys

WARN, FAIL = 500, 900

root = sys.argv[1]
listed = subprocess.run(['git', '-C', root, 'ls-files', '--cached', '--others', '--exclude-standard', '--',
                         '*.h', '*.cc', '*.cu', '*.py', '*.sh'], check=True, capture_output=True, text=True)
failed = False
for name in listed.stdout.split('\n')[:-1]:
    try:
        lines = sum(1 for _ in open(f'{root}/{name}', errors='replace'))
    except FileNotFoundError:
        continue
    if lines > WARN:
        print(f'{"error" if lines > FAIL else "warning"}: {name} has {lines} lines; split it')
    failed |= lines > FAIL
sys.exit(failed)
