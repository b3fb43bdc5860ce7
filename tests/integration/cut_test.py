"""Connections that break in the middle of a push and of a landing: nothing is lost, nothing is applied twice."""
import random
import unittest

import cutter
from cutter import FROM_OWNER, TO_OWNER
from harness import HANG_LIMIT_S, JobTest, free_port

STEPS = 40
TCP = ["--nounix_sockets", "--nocma"]
WORKER = ["--model=mlp", "--data=synthetic:256", "--epochs=1000", f"--max_steps={STEPS}"]
SMALL = 1 << 14  # What is no value of a parameter has fewer bytes: joining, or all hellos and calls of a connection.


class Cuts(JobTest):

    def setUp(self):
        super().setUp()
        self.network = cutter.Network(HANG_LIMIT_S)

    def tearDown(self):
        super().tearDown()
        self.network.close()

    def expect_as_in_peace(self, cuts, policy="sync", spared=0):
        """Two workers and an owner, which is behind a network that makes `cuts` for worker 0; their summaries."""
        job = self.job(owners=1, workers=2, common=TCP, worker=WORKER + [f"--policy={policy}"])
        worker_port = free_port()
        to_owner = self.network.stand_before(job.port, free_port(), TO_OWNER)
        self.network.stand_before(worker_port, free_port(), FROM_OWNER)
        self.network.cut(cuts, spared)
        job.start_owner(0)
        job.start_worker(0, extra=[f"--coordinator={to_owner}", f"--port={worker_port}"])
        job.start_worker(1)
        for process in job.workers + job.owners:
            self.expect_code(process, 0)
        made = self.network.made
        self.assertEqual([direction for direction, _ in made], [direction for direction, _ in cuts])
        # Sync counts rounds, async each worker's pushes.
        applied = STEPS if policy == "sync" else 2 * STEPS
        self.assertRegex(job.owners[0].out, rf"model: \d+ parameters, \d+ bytes of optimizer state, {applied} steps")
        summaries = [worker.done() for worker in job.workers]
        for summary in summaries:
            self.assertEqual(summary["steps"], STEPS)
            # Each value counts once, however often it set out.
            self.assertEqual(summary["bytes_sent_per_step"], 4 * summary["parameters"])
            self.assertEqual(summary["bytes_received_per_step"], 4 * summary["parameters"])
        return summaries

    def expect_same_results(self, cuts, spared=0):
        summaries = self.expect_as_in_peace(cuts, spared=spared)
        for summary, peaceful in zip(summaries, self.peace()):
            self.assertEqual(summary["fewest_contributors"], 2)
            self.assertEqual([shard["steps"] for shard in summary["shards"]], [STEPS])
            for what in ("checksum", "accuracy", "loss"):
                self.assertEqual(summary[what], peaceful[what])

    def peace(self):
        """The same job, uncut."""
        if not hasattr(Cuts, "_peace"):
            Cuts._peace = self.job(owners=1, workers=2, common=TCP, worker=WORKER).run()
        return Cuts._peace

    def value_bytes(self):
        """Of a whole push, and of a whole landing."""
        return 4 * self.peace()[0]["parameters"]

    def in_the_middle(self, direction):
        size = self.value_bytes()
        cuts = [(direction, count) for count in (size // 2, size // 4, 3 * size // 2, size * 7 // 8)]
        self.expect_same_results(cuts, spared=SMALL)
        for _, carried in self.network.made:
            self.assertGreater(carried, SMALL, self.network.made)

    def test_in_the_middle_of_pushes(self):
        self.in_the_middle(TO_OWNER)

    def test_in_the_middle_of_landings(self):
        self.in_the_middle(FROM_OWNER)

    def test_anywhere(self):
        rng, size = random.Random(1), self.value_bytes()
        self.expect_same_results([(rng.randrange(2), rng.randrange(size // 3, 2 * size)) for _ in range(12)])

    def test_async_applies_every_push_once(self):
        size = self.value_bytes()
        self.expect_as_in_peace([(TO_OWNER, size // 2), (FROM_OWNER, size // 2), (FROM_OWNER, size // 4),
                                 (TO_OWNER, 3 * size // 2)], policy="async")


if __name__ == "__main__":
    unittest.main(verbosity=2)
