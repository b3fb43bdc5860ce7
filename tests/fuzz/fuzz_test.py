#!/usr/bin/env python3
"""Runs every seed of the corpus through its decoder, and so many mutations of them: fuzz_test.py PROGRAM CORPUS."""
import os
import shutil
import subprocess
import sys
import tempfile

RUNS = int(os.environ.get("ATOLL_FUZZ_RUNS", "20000"))


def main():
    program, corpus = sys.argv[1:]
    decoders = subprocess.run([program, "--list"], check=True, capture_output=True, text=True).stdout.split()
    assert sorted(decoders) == sorted(os.listdir(corpus)), f"{decoders} are not the folders of {corpus}"
    failed = []
    for decoder in decoders:
        folder = tempfile.mkdtemp(prefix="atoll-fuzz-")
        try:
            seeds = os.path.join(corpus, decoder)
            done = subprocess.run(
                [program, f"-runs={RUNS}", "-seed=1", "-max_len=4096", "-timeout=60", "-rss_limit_mb=4096",
                 f"-artifact_prefix={folder}/", os.path.join(folder), seeds],
                env=dict(os.environ, ATOLL_FUZZ=decoder), capture_output=True, text=True, errors="replace", check=False)
            last = done.stderr.strip().split("\n")[-1]
            print(f"{decoder}: {len(os.listdir(seeds))} seeds, exit code {done.returncode}: {last}", flush=True)
            if done.returncode != 0:
                failed.append(decoder)
                print(done.stderr[-8000:])
                for name in os.listdir(folder):
                    if name.startswith(("crash-", "leak-", "timeout-", "oom-")):
                        with open(os.path.join(folder, name), "rb") as file:
                            print(f"{name}: {file.read().hex()}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(1 if failed or not decoders else 0)


main()
