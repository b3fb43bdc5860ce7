"""Processes that are killed, stopped or told to end, while the job runs."""
import signal

from harness import JobTest, run_side_by_side

# Two steps an epoch: a progress line comes at once, and thousands of steps are still to be done.
LONG = ["--data=synthetic:64", "--epochs=1000000", "--evaluate=false"]
SOME = LONG + ["--max_steps=2000"]


class Failures(JobTest):

    def test_a_killed_worker_is_missed_but_the_job_goes_on(self):
        job = self.job(worker=SOME).start().wait_training()
        job.workers[1].signal(signal.SIGKILL)
        self.expect_code(job.workers[0], 0)
        for owner in job.owners:
            self.expect_code(owner, 0)
            self.assertIn("worker1 died", owner.out)
        summary = job.workers[0].done()
        self.assertEqual(summary["steps"], 2000)
        self.assertEqual(summary["fewest_contributors"], 1)

    def test_a_stopped_worker_is_declared_dead_and_hears_of_it(self):
        job = self.job(common=["--lease=4s"], worker=SOME).start().wait_training()
        job.workers[1].signal(signal.SIGSTOP)
        self.expect_code(job.workers[0], 0)
        self.assertEqual(job.workers[0].done()["fewest_contributors"], 1)
        job.workers[1].signal(signal.SIGCONT)
        self.expect_error(job.workers[1], 1)
        for owner in job.owners:
            self.expect_code(owner, 0)

    def test_a_killed_owner_ends_the_job_with_its_name(self):
        job = self.job(worker=LONG).start().wait_training()
        job.owners[1].signal(signal.SIGKILL)
        for worker in job.workers:
            self.expect_error(worker, 1, "owner1")
        self.expect_error(job.owners[0], 1, "owner1 died")

    def test_a_killed_coordinator_ends_the_job_with_its_name(self):
        job = self.job(common=["--lease=4s"], worker=LONG).start().wait_training()
        job.owners[0].signal(signal.SIGKILL)
        for worker in job.workers:
            self.expect_error(worker, 1, "owner0")
        self.expect_error(job.owners[1], 1)

    def test_all_workers_killed_ends_the_owners(self):
        job = self.job(worker=LONG).start().wait_training()
        for worker in job.workers:
            worker.signal(signal.SIGKILL)
        for owner in job.owners:
            self.expect_error(owner, 1, "worker0 died", "worker1 died")

    def test_a_worker_told_to_end_leaves_in_order(self):
        job = self.job(worker=SOME).start().wait_training()
        job.workers[1].signal(signal.SIGTERM)
        self.expect_code(job.workers[1], 143)
        self.assertIn("SIGTERM: ending in order", job.workers[1].err)
        self.assertTrue(job.workers[1].done()["stopped"])
        self.expect_code(job.workers[0], 0)
        for owner in job.owners:
            self.expect_code(owner, 0)
            self.assertIn("worker1 left", owner.out)

    def test_all_told_to_end(self):
        for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
            job = self.job(worker=LONG).start().wait_training()
            for process in job.owners + job.workers:
                process.signal(number)
            for process in job.workers + job.owners:
                self.expect_code(process, code)
                self.assertNotIn("again", process.err)

    def test_owners_told_to_end_give_workers_time_and_then_leave(self):
        job = self.job(common=["--grace=2s"], worker=LONG).start().wait_training()
        for owner in job.owners:
            owner.signal(signal.SIGTERM)
        for owner in job.owners:
            self.expect_code(owner, 143)
        for worker in job.workers:
            self.expect_error(worker, 1, "owner")

    def test_a_coordinator_told_to_end_alone_takes_all_with_it(self):
        job = self.job(common=["--grace=4s"], worker=LONG).start().wait_training()
        job.owners[0].signal(signal.SIGTERM)
        self.expect_code(job.owners[0], 143)
        self.assertNotIn("ending at once", job.owners[0].err)
        self.expect_error(job.owners[1], 1, "coordinator")
        for worker in job.workers:
            self.expect_error(worker, 1, "owner0")

    def test_a_second_signal_ends_at_once(self):
        job = self.job(common=["--grace=1000s"], worker=LONG).start().wait_training()
        job.owners[0].signal(signal.SIGTERM)
        job.owners[0].wait_line("SIGTERM: ending in order")
        job.owners[0].signal(signal.SIGINT)
        self.expect_code(job.owners[0], 130)
        self.assertIn("SIGINT again: ending at once", job.owners[0].err)

    def test_a_signal_while_waiting_for_the_others_ends_at_once(self):
        job = self.job()
        owner = job.start_owner(0)
        owner.wait_line("waiting for job")
        owner.signal(signal.SIGTERM)
        self.expect_code(owner, 143)


if __name__ == "__main__":
    run_side_by_side()
