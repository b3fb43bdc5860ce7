"""The whole main job, as ./dev demo runs it, in both policies. Minutes each: label `slow`."""
import json
import os
import sys
import unittest

from harness import BIN, ROOT, JobTest


class WholeDemo(JobTest):

    def demo(self, *flags):
        facts_file = os.path.join(self.folder, "facts.json")
        demo = self.start("demo", [sys.executable, os.path.join(ROOT, "tools", "demo.py"), "--bin", BIN,
                                   "--json", facts_file, *flags])
        self.expect_code(demo, 0)
        with open(facts_file, encoding="utf-8") as file:
            return json.load(file)

    def test_sync(self):
        facts = self.demo()
        self.assertGreaterEqual(facts["accuracy"], 0.88)
        self.assertTrue(facts["checksums_equal"])
        self.assertEqual(facts["train_images"], 60000)
        self.assertEqual(facts["test_images"], 10000)

    def test_async_learns_too(self):
        facts = self.demo("--policy", "async", "--min-accuracy", "0.85")
        self.assertEqual(facts["policy"], "async")
        self.assertGreaterEqual(facts["accuracy"], 0.85)


if __name__ == "__main__":
    unittest.main(verbosity=2)
