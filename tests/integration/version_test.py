"""Processes of different versions or builds refuse each other in words, on both sides."""
import re
import signal

import raw_peer
from harness import HANG_LIMIT_S, JobTest, run_side_by_side

OTHER_BUILD = "torch 1.0.0, transport atoll:0, channels none"
# Should a refusal be tried again, then for longer than the hang limit.
PATIENT = ["--join_limit=1000s"]


class AtAnOwner(JobTest):
    """A stranger's hello, while the job trains."""

    def hello(self, job, **kwargs):
        """What the owner answers: kind and text."""
        with open(self.key_file, "rb") as file:
            key = file.read()
        with raw_peer.connect(f"127.0.0.1:{job.port}", HANG_LIMIT_S) as raw:
            greeting = raw_peer.Greeting(job.id, key, **kwargs)
            self.assertTrue(raw_peer.send(raw, greeting.hello()))
            kind, body = greeting.take_reply(raw)
            self.assertEqual(raw_peer.until_end(raw), b"")
        return kind, body.decode()

    def expect_refusal(self, kind, texts, warning, **kwargs):
        job = self.job(owners=1, workers=1, worker=["--max_steps=2000", "--epochs=1000000", "--evaluate=false"]).start()
        owner, worker = job.owners[0], job.workers[0]
        worker.wait_line('"event": "progress"')
        worker.signal(signal.SIGSTOP)  # So that the job is sure to be in the middle.
        for _ in range(3):
            got, text = self.hello(job, **kwargs)
            self.assertEqual(got, kind)
            for part in texts:
                self.assertIn(part, text)
        line = owner.wait_line("refused a connection")
        self.assertRegex(line, "^W")
        self.assertRegex(line, warning)
        worker.signal(signal.SIGCONT)
        self.expect_code(worker, 0)
        self.expect_code(owner, 0)
        self.assertEqual(worker.done()["steps"], 2000)
        # Said once, since a stranger could fill the log with it.
        self.assertEqual(len(re.findall("refused a connection", owner.err)), 1, owner.err)

    def test_another_protocol_version(self):
        self.expect_refusal(raw_peer.REFUSE_VERSION, ["protocol version 77 was offered", "owner0 speaks 1"],
                            "protocol version 77 was offered, owner0 speaks 1", version=77, fingerprint="?")

    def test_another_build(self):
        self.expect_refusal(raw_peer.REFUSE_FINGERPRINT, ["it has 'torch 2.", f"we have '{OTHER_BUILD}'"],
                            rf"build '{OTHER_BUILD}' was offered, we have 'torch 2\.", fingerprint=OTHER_BUILD)


class AtAWorker(JobTest):
    """Who answers at the coordinator's address is of another version."""

    def expect_end(self, answer, *texts):
        job = self.job(owners=1, workers=1, common=PATIENT)
        listener = raw_peer.Listener(lambda hello: answer(job, hello), HANG_LIMIT_S)
        self.addCleanup(listener.close)
        address = f"127.0.0.1:{listener.port}"
        self.expect_error(job.start_worker(0, extra=[f"--coordinator={address}"]), 1, address, *texts)

    def test_another_protocol_version(self):
        self.expect_end(lambda job, hello: raw_peer.refusal(
            raw_peer.REFUSE_VERSION, "protocol version 1 was offered, owner0 speaks 77"),
            "ours is 1", "owner0 speaks 77")

    def test_a_refusal_of_our_build(self):
        self.expect_end(lambda job, hello: raw_peer.refusal(
            raw_peer.REFUSE_FINGERPRINT, f"it has '{OTHER_BUILD}', we have 'whatever'"),
            "another build", f"it has '{OTHER_BUILD}'")

    def test_another_build_that_takes_ours(self):
        """It has the key, and leaves the refusal to us."""
        def answer(job, hello):
            with open(self.key_file, "rb") as file:
                key = file.read()
            return raw_peer.challenge(hello, key, "owner0", OTHER_BUILD)
        self.expect_end(answer, f"another build: it has '{OTHER_BUILD}', we have 'torch 2.")


if __name__ == "__main__":
    run_side_by_side()
