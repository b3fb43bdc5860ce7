"""Whole jobs, end to end: what they learn, and that every replica holds the same."""
import json
import os
import unittest

from harness import JobTest


class Jobs(JobTest):

    def test_sync_learns_and_all_replicas_are_equal(self):
        job = self.job(worker=["--model=mlp", "--data=synthetic:1024", "--epochs=3",
                               f"--summary={self.folder}/{{name}}.json"])
        summaries = job.run()
        self.assertEqual(len({s["checksum"] for s in summaries}), 1, summaries)
        first, second = summaries
        self.assertGreater(first["accuracy"], 0.6)
        self.assertIsNone(second["accuracy"])
        for summary in summaries:
            self.assertEqual(summary["steps"], 3 * 1024 // 32)
            self.assertEqual(summary["images"], 3 * 512)
            self.assertEqual(summary["fewest_contributors"], 2)
            self.assertFalse(summary["stopped"])
            # A worker of owners apart sends all gradients and receives all parameters, once a step.
            self.assertEqual(summary["bytes_sent_per_step"], 4 * summary["parameters"])
            self.assertEqual(summary["bytes_received_per_step"], 4 * summary["parameters"])
        shards = first["shards"]
        self.assertEqual([shard["owner"] for shard in shards], ["owner0", "owner1"])
        self.assertEqual(sum(shard["parameters"] for shard in shards), first["parameters"])
        for shard in shards:
            self.assertEqual(shard["steps"], 96)
            # Two floats a parameter, and a step count for each piece of one.
            self.assertGreater(shard["state_bytes"], 8 * shard["parameters"])
            self.assertLess(shard["state_bytes"], 8 * shard["parameters"] + 1000)
        for index in (0, 1):
            with open(os.path.join(self.folder, f"worker{index}.json"), encoding="utf-8") as file:
                written = json.load(file)
            self.assertEqual(written["checksum"], summaries[index]["checksum"])
        for owner in job.owners:
            owner.wait_line("worker0 left")
            owner.wait_line(r"model: \d+ parameters, \d+ bytes of optimizer state, 96 steps")
            owner.wait_line("done")
        events = job.workers[0].events("progress")
        self.assertEqual([e["epoch"] for e in events if e["end_of_epoch"]], [1, 2, 3])
        self.assertEqual(events[-1]["step"], events[-1]["steps"])

    def test_results_do_not_depend_on_the_number_of_owners(self):
        checksums = set()
        for owners in (1, 3):
            summaries = self.job(owners=owners, worker=["--model=convnet", "--data=synthetic:128"]).run()
            checksums |= {summary["checksum"] for summary in summaries}
        self.assertEqual(len(checksums), 1, checksums)

    def test_one_worker_and_one_owner(self):
        summary, = self.job(owners=1, workers=1).run()
        self.assertEqual(summary["steps"], 32)

    def test_async_learns_and_counts_every_push(self):
        summaries = self.job(worker=["--policy=async", "--model=mlp", "--data=synthetic:1024",
                                     "--epochs=3"]).run()
        self.assertGreater(summaries[0]["accuracy"], 0.6)
        for summary in summaries:
            self.assertEqual(summary["steps"], 96)

    def test_other_transports(self):
        for flags in (["--nocma"], ["--nounix_sockets", "--nocma"]):
            summaries = self.job(common=flags).run()
            self.assertEqual(len({s["checksum"] for s in summaries}), 1, summaries)

    def test_fashion_mnist_itself(self):
        if not os.path.exists("/usr/share/datasets/fashion-mnist"):
            self.skipTest("Debian's dataset-fashion-mnist is not installed")
        summaries = self.job(worker=["--data=fashion-mnist", "--max_steps=20"]).run()
        self.assertEqual(summaries[0]["train_images"], 60000)
        self.assertEqual(summaries[0]["test_images"], 10000)
        self.assertGreater(summaries[0]["accuracy"], 0.3)
        self.assertEqual(len({s["checksum"] for s in summaries}), 1, summaries)

    def test_plain_progress_is_for_people(self):
        job = self.job(owners=1, workers=1, progress="plain").start()
        self.expect_code(job.workers[0], 0)
        self.assertRegex(job.workers[0].out, r"worker0: epoch 2/2 step 32/32 loss [\d.]+ \d+ images/s [\d.]+ .?B/s")
        self.assertRegex(job.workers[0].out, r"worker0: done after 32 steps.*accuracy .*parameter checksum \w{8}")


if __name__ == "__main__":
    unittest.main(verbosity=2)
