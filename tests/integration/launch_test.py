"""How jobs are started: help, one command line under torchrun, the demo, a user's own program."""
import json
import os
import signal
import subprocess
import sys
import unittest

from harness import BIN, ROOT, JobTest, free_port

DEMO = os.path.join(ROOT, "tools", "demo.py")


class Help(JobTest):

    def test_every_program_explains_itself(self):
        for program in ("atoll-server", "atoll-worker", "atoll-run"):
            helped = self.program(program, "--help")
            self.expect_code(helped, 0)
            self.assertEqual(helped.err, "")
            for text in (program + ": ", "--owners", "--coordinator", "ATOLL_OWNERS" if program != "atoll-run" else
                         "MASTER_ADDR", "--grace=10s", "Exit codes:"):
                self.assertIn(text, helped.out)
            self.assertLessEqual(max(len(line) for line in helped.out.split("\n")), 110)
            version = self.program(program, "--version")
            self.expect_code(version, 0)
            self.assertRegex(version.out, rf"^{program} \d+\.\d+\.\d+$")
        self.assertIn("--model", self.program("atoll-worker", "--help").out)
        self.assertIn("--model", self.program("atoll-run", "--help").out)
        self.assertNotIn("--model=", self.program("atoll-server", "--help").out.split("Flags of")[1])


class Torchrun(JobTest):

    def torchrun(self, *flags):
        # This is run by the Python beside torch, which without a CUDA toolkit may be unable to load it.
        if subprocess.run([sys.executable, "-c", "import torch.distributed.run"], capture_output=True,
                          check=False).returncode:
            self.skipTest(f"ATOLL_TEST_SKIPPED: {sys.executable} cannot import torch.distributed.run")
        return self.start("torchrun", [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", "--master-port=0",
            "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--no-python",
            os.path.join(BIN, "atoll-run"), "--owners=2", "--data=synthetic:128", "--epochs=1",
            f"--key_file={self.key_file}", f"--summary={self.folder}/{{name}}.json", *flags])

    def test_one_command_line_starts_the_whole_job(self):
        self.expect_code(self.torchrun(), 0)
        checksums = set()
        for name in ("worker0", "worker1"):
            with open(os.path.join(self.folder, name + ".json"), encoding="utf-8") as file:
                checksums.add(json.load(file)["checksum"])
        self.assertEqual(len(checksums), 1)

    def test_an_error_is_shown_in_torchruns_summary(self):
        process = self.torchrun("--model=resnet")
        self.assertNotEqual(process.wait(), 0)
        self.assertIn("there is no model 'resnet'", process.err)


class Demo(JobTest):

    def demo(self, *flags):
        return self.start("demo", [sys.executable, DEMO, "--bin", BIN, "--data", "synthetic:512", "--model", "mlp",
                                   *flags], env={"TMPDIR": self.folder})

    def test_the_table_and_the_facts(self):
        facts_file = os.path.join(self.folder, "facts.json")
        demo = self.demo("--epochs", "3", "--json", facts_file, "--min-accuracy", "0.5")
        self.expect_code(demo, 0)
        with open(facts_file, encoding="utf-8") as file:
            facts = json.load(file)
        self.assertTrue(facts["passed"] and facts["checksums_equal"])
        self.assertGreater(facts["accuracy"], 0.5)
        self.assertLessEqual(facts["accuracy"], 1.0)
        self.assertEqual(len(facts["owners"]), 2)
        self.assertEqual(len(facts["workers"]), 2)
        self.assertEqual(facts["bytes_per_step"], 2 * 2 * 4 * facts["parameters"])
        for text in (r"epoch 3/3 +step 12/12 +loss", r"accuracy +\d", r"owner1 +[\d,]+ parameters, [\d,]+ bytes",
                     r"worker1 +parameter checksum", r"replicas +equal", r"bytes moved a step"):
            self.assertRegex(demo.out, text)
        self.assertNotIn("\r", demo.out)

    def test_too_low_an_accuracy_fails(self):
        demo = self.demo("--epochs", "1", "--lr", "0", "--min-accuracy", "0.99", "--owners", "1", "--workers", "1")
        self.expect_code(demo, 1)
        self.assertIn("is below 0.99", demo.err)

    def test_what_a_worker_says_is_passed_on(self):
        demo = self.start("demo", [sys.executable, DEMO, "--bin", BIN, "--data", "/nowhere/data"])
        self.expect_code(demo, 1)
        self.assertIn("/nowhere/data", demo.err)

    def children(self, process):
        with open(f"/proc/{process.process.pid}/task/{process.process.pid}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]

    def test_an_interrupt_leaves_nothing_behind(self):
        for numbers in ([signal.SIGINT, signal.SIGINT], [signal.SIGTERM], [signal.SIGHUP, signal.SIGTERM]):
            demo = self.demo("--epochs", "1000000")
            demo.wait_line("step ")
            children = self.children(demo)
            self.assertEqual(len(children), 4)
            demo.signal(numbers[0])
            for again in numbers[1:]:
                demo.process.send_signal(again)
            # Of two at once either may be seen first: each may go to another thread of the demo.
            self.assertIn(demo.wait(), [128 + number for number in numbers], demo.transcript())
            for pid in children:
                self.assertFalse(os.path.exists(f"/proc/{pid}"), f"process {pid} is still there")
            self.assertEqual([name for name in os.listdir(self.folder) if name.startswith("atoll-demo")], [])

    def test_a_file_that_cannot_be_written_is_refused_before_the_work(self):
        for path in ("/nowhere/facts.json", self.folder):
            demo = self.demo("--json", path)
            self.expect_code(demo, 2)
            self.assertIn(f"--json: cannot write {path}", demo.err)
            self.assertEqual(demo.out, "")


class Summary(JobTest):

    def test_a_file_that_cannot_be_written_is_refused_before_the_work(self):
        for path in ("/nowhere/summary.json", self.folder):
            worker = self.program("atoll-worker", "--owners=1", "--workers=1", "--rank=1", f"--summary={path}",
                                  f"--key_file={self.key_file}", f"--coordinator=127.0.0.1:{free_port()}")
            self.expect_error(worker, 2, "--summary", path)


class FirstJob(JobTest):

    def test_the_example_trains(self):
        # As its text says: nothing but numbers; on one host the key is made by whoever comes first.
        port = free_port()
        env = {"WORLD_SIZE": "3", "ATOLL_OWNERS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
               "ATOLL_JOB": f"first-{port}", "XDG_RUNTIME_DIR": self.folder}
        owner = self.start("owner0", [os.path.join(BIN, "atoll-server")], env={**env, "RANK": "0"})
        examples = [self.start(f"first_job{index}", [os.path.join(BIN, "first_job")],
                               env={**env, "RANK": str(1 + index)}) for index in (0, 1)]
        for process in examples + [owner]:
            self.expect_code(process, 0)
        losses = [float(line.split()[-1]) for line in examples[0].out.split("\n") if "loss" in line]
        self.assertGreaterEqual(len(losses), 2)
        self.assertLess(losses[-1], losses[0] / 4)

    def test_without_a_job_it_says_so(self):
        process = self.program("first_job")
        self.assertNotEqual(process.wait(), 0)
        self.assertIn("owner", process.err)


if __name__ == "__main__":
    unittest.main(verbosity=2)
