#!/usr/bin/env python3
"""The demo: owners and workers as separate processes of this machine train a classifier.

Starts atoll-server and atoll-worker processes on a free loopback port with a fresh job key, shows how far
they are, and ends with a table of what was reached. Exit codes: 0 all is as it should be; 1 a process
failed, the accuracy is too low, or (sync) the replicas differ; 2 wrong arguments; 130, 143 or 129 it was
ended by Ctrl-C, SIGTERM or SIGHUP, and so were its processes.
"""
import argparse
import ctypes
import errno
import json
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

from loopback import free_port

PR_SET_PDEATHSIG = 1
STOP_LIMIT_S = 15  # For children to end in order after SIGTERM; a bit more than their --grace.


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """With the defaults of what has one."""

    def _get_help_string(self, action):
        return action.help if action.default is None else super()._get_help_string(action)


def arguments():
    parser = argparse.ArgumentParser(
        prog="./dev demo", description=__doc__.split("\n\n")[0],
        formatter_class=HelpFormatter)
    parser.add_argument("--bin", default="build/release/bin", metavar="DIR",
                        help="where atoll-server and atoll-worker are")
    parser.add_argument("--owners", type=int, default=2, metavar="N", help="owner processes")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="worker processes")
    parser.add_argument("--model", default="convnet", help="convnet, mlp or linear")
    parser.add_argument("--data", default="fashion-mnist",
                        help="fashion-mnist, synthetic, synthetic:N (N made-up images), or a folder of IDX files")
    parser.add_argument("--policy", default="sync", choices=["sync", "async"],
                        help="a step is the mean over all workers, or each worker's gradients are applied as they come")
    parser.add_argument("--epochs", type=int, default=4, metavar="N", help="how often every image is used")
    parser.add_argument("--batch", type=int, default=0, metavar="N",
                        help="images a step of each worker; 0: 128 over all workers together")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--lr-decay", default="linear", choices=["none", "linear"],
                        help="linear: from --lr at the first step to 0 after the last")
    parser.add_argument("--seed", type=int, default=1, metavar="N",
                        help="of the model's first values and of the order of images")
    parser.add_argument("--min-accuracy", type=float, default=None, metavar="FRACTION",
                        help="fail below it; unset: 0.88 on fashion-mnist, else 0")
    parser.add_argument("--json", metavar="FILE", help="write the facts of the table there")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS",
                        help="fail if it takes longer")
    parser.add_argument("--check-arguments", action="store_true", help=argparse.SUPPRESS)  # And no more.
    args = parser.parse_args()
    for name in ("owners", "workers", "epochs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} should be at least 1")
    if args.batch < 0:
        parser.error("--batch should be at least 1, or 0 for 128 over all workers together")
    if not args.limit > 0:
        parser.error("--limit should be more than 0 seconds")
    if args.min_accuracy is not None and not 0 <= args.min_accuracy <= 1:
        parser.error("--min-accuracy should be a fraction, from 0 to 1")
    if args.batch == 0:
        args.batch = max(1, 128 // args.workers)
    if args.min_accuracy is None:
        args.min_accuracy = 0.88 if args.data == "fashion-mnist" else 0.0
    for program in () if args.check_arguments else ("atoll-server", "atoll-worker"):
        if not os.access(os.path.join(args.bin, program), os.X_OK):
            parser.error(f"{program} is not in {args.bin}: build first (./dev build), or name its folder with --bin")
    if args.json:
        try:  # Now, not after minutes of training.
            write_file(args.json, None)
        except OSError as error:
            parser.error(f"--json: cannot write {args.json}: {error.strerror}")
    return args


def write_file(path, text):
    """The whole file or nothing; without a text only tries that it could be written."""
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if os.path.exists(path) and not os.path.isfile(path):
        # A device, a pipe: written into, not replaced; a pipe without a reader is an error.
        with open(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "w", encoding="utf-8") as file:
            file.write(text or "")
        return
    path = os.path.realpath(path)
    part = f"{path}.{os.getpid()}.part"
    try:
        with open(part, "w", encoding="utf-8") as file:
            if text is not None:
                file.write(text)
        if text is not None:
            os.replace(part, path)
    finally:
        if os.path.exists(part):
            os.remove(part)


def human_bytes(value):
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000


class Child:
    """One process of the job, its output read by threads of ours."""

    def __init__(self, name, command, events):
        self.name = name
        self.errors = []  # Lines of its standard error, the last 200.
        libc = ctypes.CDLL(None)

        def before_exec():  # If this script is killed, no child stays behind.
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

        # A session of its own: Ctrl-C reaches this script alone, which then ends the children in order.
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True, errors="replace",
                                        start_new_session=True, preexec_fn=before_exec)
        self.readers = [threading.Thread(target=self._read_out, args=(events,), daemon=True),
                        threading.Thread(target=self._read_errors, daemon=True)]
        for reader in self.readers:
            reader.start()

    def _read_out(self, events):
        for line in self.process.stdout:
            events.put((self, line.rstrip("\n")))
        self.process.wait()
        events.put((self, None))

    def _read_errors(self):
        for line in self.process.stderr:
            self.errors = self.errors[-199:] + [line.rstrip("\n")]

    def why(self):
        for reader in self.readers:
            reader.join(timeout=5)
        code = self.process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return "\n".join([f"{self.name} {how}"] + ["  " + line for line in self.errors[-10:]])


def stop_all(children):
    """Ends every child that still runs, in order if it can. Nothing is left when this returns."""
    running = [child for child in children if child.process.poll() is None]
    for child in running:
        child.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_LIMIT_S
    for child in running:
        try:
            child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


class Progress:
    """One updating line on a terminal, else a line every few seconds."""

    PLAIN_EVERY_S = 5.0

    def __init__(self, args):
        self.args = args
        self.latest = {}
        self.terminal = sys.stdout.isatty()
        self.open_line = False
        self.next_plain = 0.0

    def update(self, event):
        self.latest[event["name"]] = event
        if event["name"] != "worker0":
            return  # Its figures count when worker0 reports.
        text = self.text(event)
        if self.terminal:
            width = shutil.get_terminal_size().columns
            sys.stdout.write("\r" + text[:width - 1] + "\x1b[K")
            self.open_line = True
        elif event["end_of_epoch"] or time.monotonic() >= self.next_plain:
            self.next_plain = time.monotonic() + self.PLAIN_EVERY_S
            print(text)
        sys.stdout.flush()
        if event["end_of_epoch"]:
            self.finish_line()

    def text(self, event):
        images = sum(e["images_per_second"] for e in self.latest.values())
        moved = sum(e["bytes_per_second"] for e in self.latest.values())
        loss = event["loss"] if event["loss"] is not None else float("nan")
        return (f"epoch {event['epoch']}/{event['epochs']}  step {event['step']}/{event['steps']}  "
                f"loss {loss:.4f}  {images:,.0f} images/s  {human_bytes(moved)}/s")

    def finish_line(self):
        if self.open_line:
            print()
            self.open_line = False


class Failed(Exception):
    pass


class Interrupted(BaseException):
    """A signal asked for the end; its number is the argument."""


# But not what our parent had us ignore (nohup).
ENDING_SIGNALS = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
                  if signal.getsignal(number) is not signal.SIG_IGN]


def handle_signals(handler):
    for number in ENDING_SIGNALS:
        signal.signal(number, handler)


def interrupt(number, _):
    handle_signals(signal.SIG_IGN)  # However often it is asked for: ending in order leaves nothing behind.
    raise Interrupted(number)


def start(args, folder, events, children):
    key_file = os.path.join(folder, "job.key")
    with open(os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    port = free_port()
    common = [f"--owners={args.owners}", f"--workers={args.workers}", f"--coordinator=127.0.0.1:{port}",
              f"--key_file={key_file}", f"--job=demo-{os.getpid()}"]
    for index in range(args.owners):
        command = [os.path.join(args.bin, "atoll-server"), f"--rank={index}"] + common
        children.append(Child(f"owner{index}", command, events))
    for index in range(args.workers):
        command = [os.path.join(args.bin, "atoll-worker"), f"--rank={args.owners + index}"] + common + [
            f"--model={args.model}", f"--data={args.data}", f"--policy={args.policy}", f"--epochs={args.epochs}",
            f"--batch={args.batch}", f"--lr={args.lr}", f"--lr_decay={args.lr_decay}", f"--seed={args.seed}",
            "--progress=json"]
        children.append(Child(f"worker{index}", command, events))


def train(args, events, children):
    """Follows the job to its end; the workers' summaries, by name. Raises Failed."""
    deadline = time.monotonic() + args.limit
    progress = Progress(args)
    summaries = {}
    running = len(children)
    while running > 0:
        try:
            child, line = events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            progress.finish_line()
            raise Failed(f"not done within --limit={args.limit:g} seconds") from None
        if line is None:
            running -= 1
            if child.process.returncode != 0:
                progress.finish_line()
                raise Failed(child.why())
            continue
        if not child.name.startswith("worker"):
            continue  # Owners say in words who came and went.
        event = json.loads(line)
        if event["event"] == "progress":
            progress.update(event)
        elif event["event"] == "done":
            summaries[child.name] = event
        elif event["event"] == "start" and child.name == "worker0":
            print(f"{event['model']} with {event['parameters']:,} parameters on {event['data']}: "
                  f"{event['train_images']:,} images to train, {event['test_images']:,} to test; "
                  f"{args.owners} owners, {args.workers} workers, Adam, {args.policy}", flush=True)
    progress.finish_line()
    missing = [child.name for child in children if child.name.startswith("worker") and child.name not in summaries]
    if missing:
        raise Failed(f"{', '.join(missing)} ended without a summary")
    return summaries


def facts_of(args, summaries, seconds):
    first = summaries["worker0"]
    checksums = {name: summary["checksum"] for name, summary in sorted(summaries.items())}
    return {
        "accuracy": first["accuracy"],
        "seconds": round(seconds, 3),
        "training_seconds": first["seconds"],
        "images_per_second": sum(s["images"] for s in summaries.values()) / first["seconds"],
        "model": first["model"], "data": first["data"], "policy": args.policy, "epochs": args.epochs,
        "batch": args.batch, "lr": args.lr, "lr_decay": args.lr_decay, "seed": args.seed,
        "steps": first["steps"], "parameters": first["parameters"], "loss": first["loss"],
        "train_images": first["train_images"], "test_images": first["test_images"],
        "owners": [{"name": s["owner"], "parameters": s["parameters"], "state_bytes": s["state_bytes"],
                    "steps": s["steps"]} for s in first["shards"]],
        "workers": [{"name": name, "steps": s["steps"], "images": s["images"], "checksum": s["checksum"],
                     "bytes_sent_per_step": s["bytes_sent_per_step"],
                     "bytes_received_per_step": s["bytes_received_per_step"]}
                    for name, s in sorted(summaries.items())],
        "bytes_per_step": sum(s["bytes_sent_per_step"] + s["bytes_received_per_step"]
                              for s in summaries.values()),
        "checksums": checksums,
        "checksums_equal": len(set(checksums.values())) == 1,
    }


def print_table(facts):
    accuracy = facts["accuracy"]
    rows = [
        ("accuracy", f"{accuracy * 100:.2f} % of {facts['test_images']:,} test images"),
        ("time", f"{facts['seconds']:.1f} s, of it {facts['training_seconds']:.1f} s training "
                 f"({facts['images_per_second']:,.0f} images/s)"),
        ("steps", f"{facts['steps']:,} of {facts['batch']} images a worker, last epoch's loss {facts['loss']:.4f}"),
        ("bytes moved a step", f"{human_bytes(facts['bytes_per_step'])} by all workers together"),
    ]
    for owner in facts["owners"]:
        rows.append((owner["name"], f"{owner['parameters']:,} parameters, {owner['state_bytes']:,} bytes of "
                                    f"optimizer state, {owner['steps']:,} steps"))
    for worker in facts["workers"]:
        rows.append((worker["name"], f"parameter checksum {worker['checksum']}; a step sends "
                                     f"{human_bytes(worker['bytes_sent_per_step'])}, receives "
                                     f"{human_bytes(worker['bytes_received_per_step'])}"))
    if facts["policy"] == "sync":
        rows.append(("replicas", "equal" if facts["checksums_equal"] else "DIFFERENT"))
    width = max(len(name) for name, _ in rows)
    print()
    for name, text in rows:
        print(f"  {name:<{width}}  {text}")


def judge(args, facts):
    if facts["accuracy"] is None:
        return "worker0 measured no accuracy"
    if facts["accuracy"] < args.min_accuracy:
        return f"the accuracy {facts['accuracy']:.4f} is below {args.min_accuracy:g}"
    if args.policy == "sync" and not facts["checksums_equal"]:
        return "the replicas' parameters differ"
    return None


def main():
    args = arguments()
    if args.check_arguments:
        return 0
    events, children = queue.Queue(), []
    folder = tempfile.mkdtemp(prefix="atoll-demo-")
    begin = time.monotonic()
    try:
        handle_signals(interrupt)
        start(args, folder, events, children)
        summaries = train(args, events, children)
    except Failed as failure:
        print(f"demo failed: {failure}", file=sys.stderr)
        return 1
    except Interrupted as interrupted:
        print("\ninterrupted: ending the job", file=sys.stderr)
        return 128 + interrupted.args[0]
    finally:
        handle_signals(signal.SIG_IGN)
        stop_all(children)
        shutil.rmtree(folder, ignore_errors=True)
        handle_signals(signal.SIG_DFL)
    facts = facts_of(args, summaries, time.monotonic() - begin)
    problem = judge(args, facts)
    facts["passed"] = problem is None
    if facts["accuracy"] is not None:
        print_table(facts)
    if args.json:
        try:
            write_file(args.json, json.dumps(facts, indent=2) + "\n")
        except OSError as error:
            problem = problem or f"cannot write {args.json}: {error.strerror}"
    if problem is not None:
        print(f"demo failed: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
