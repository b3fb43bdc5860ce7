"""What users of other systems reported of starting, ending and restarting jobs: docs/scenarios/users.md, init.md."""
import os
import signal
import socket

from harness import BIN, HANG_LIMIT_S, JobTest, free_port, free_ports, monotonic, run_side_by_side

LONG = ["--data=synthetic:64", "--epochs=1000000", "--evaluate=false"]


def listening_ports(process):
    """TCP ports that a process listens at."""
    sockets = set()
    for name in os.listdir(f"/proc/{process.process.pid}/fd"):
        try:
            target = os.readlink(f"/proc/{process.process.pid}/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            sockets.add(target[len("socket:["):-1])
    ports = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/{process.process.pid}/net/{table}", encoding="ascii") as file:
            for line in file.readlines()[1:]:
                words = line.split()
                if words[3] == "0A" and words[9] in sockets:
                    ports.add(int(words[1].split(":")[1], 16))
    return ports


class Ports(JobTest):

    # Scenario users 37.
    def test_nothing_listens_outside_the_range(self):
        first = free_ports(8)
        last = first + 7
        job = self.job(common=[f"--coordinator=127.0.0.1:{first}", f"--port={first}-{last}", "--nounix_sockets"],
                       worker=LONG)
        # Whoever comes before the coordinator leaves it its port.
        worker = job.start_worker(0)
        begin = monotonic()
        while not listening_ports(worker):
            worker.wait_news(0.1)
            self.assertLess(monotonic() - begin, HANG_LIMIT_S, worker.transcript())
        self.assertEqual(listening_ports(worker), {first + 1})
        for index in range(2):
            job.start_owner(index)
        job.start_worker(1)
        job.wait_training()
        self.assertEqual(listening_ports(job.owners[0]), {first})
        taken = [listening_ports(process) for process in job.owners + job.workers]
        for ports in taken:
            self.assertEqual(len(ports), 1, taken)
        self.assertEqual(len(set.union(*taken)), 4, taken)
        self.assertLessEqual(max(set.union(*taken)), last)
        for process in job.owners + job.workers:
            process.signal(signal.SIGTERM)
        for process in job.workers + job.owners:
            self.expect_code(process, 143)

    # Scenario users 37.
    def test_a_range_without_a_free_port_is_said(self):
        first = free_ports(2)
        held = [socket.socket() for _ in range(2)]
        for index, one in enumerate(held):
            self.addCleanup(one.close)
            one.bind(("127.0.0.1", first + index))
            one.listen()
        job = self.job(owners=1, workers=1, common=[f"--port={first}-{first + 1}"])
        self.expect_error(job.start_worker(0), 1,
                          f"cannot listen on 127.0.0.1, ports {first} to {first + 1}: in use")

    def test_ranges_that_cannot_be(self):
        for port in ("7010-7000", "0-7", "70000", "7000-", "a-b"):
            worker = self.program("atoll-worker", "--owners=1", "--workers=1", "--rank=1", f"--port={port}",
                                  f"--key_file={self.key_file}")
            self.expect_error(worker, 2, f"--port='{port}'", "7000-7010")


class Lives(JobTest):

    # Scenario users 16.
    def test_a_job_again_and_again_on_its_addresses(self):
        job = self.job(owners=1, workers=1)
        checksums = set()
        for _ in range(3):
            owner, worker = job.start_owner(0), job.start_worker(0)
            self.expect_code(worker, 0)
            self.expect_code(owner, 0)
            checksums.add(worker.done()["checksum"])
        self.assertEqual(len(checksums), 1)

    # Scenario init 9: one that was stopped in an earlier life of the job wakes up in a later one.
    def test_a_straggler_of_an_earlier_life_does_not_disturb(self):
        job = self.job(owners=1, workers=1, worker=LONG).start().wait_training()
        owner, worker = job.owners[0], job.workers[0]
        worker.signal(signal.SIGSTOP)
        owner.signal(signal.SIGKILL)
        owner.wait()
        second = job.start_owner(0)
        fresh = job.start_worker(0)
        fresh.wait_line('"event": "progress"')
        worker.signal(signal.SIGCONT)
        self.expect_error(worker, 1, "owner0")
        fresh.signal(signal.SIGTERM)
        self.expect_code(fresh, 143)
        self.expect_code(second, 0)
        self.assertNotIn("died", second.out)

    # Scenario users 43, 46.
    def test_who_leaves_makes_no_noise(self):
        job = self.job(owners=2, workers=3, worker=["--data=synthetic:96", "--epochs=1000000", "--evaluate=false",
                                                    "--max_steps=1500"]).start().wait_training()
        job.workers[2].signal(signal.SIGTERM)
        self.expect_code(job.workers[2], 143)
        for process in job.workers[:2] + job.owners:
            self.expect_code(process, 0)
            self.assertEqual(process.err, "", process.transcript())
        for owner in job.owners:
            self.assertEqual(owner.out.count("worker2 left"), 1, owner.transcript())

    # Scenario users 45, 46.
    def test_every_example_with_one_two_and_three_workers(self):
        for workers in (1, 2, 3):
            port = free_port()
            env = {"WORLD_SIZE": str(1 + workers), "ATOLL_OWNERS": "1", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port), "ATOLL_JOB": f"example-{port}", "ATOLL_KEY_FILE": self.key_file}
            processes = [self.start("owner0", [os.path.join(BIN, "atoll-server")], env={**env, "RANK": "0"})]
            processes += [self.start(f"first_job{index}", [os.path.join(BIN, "first_job")],
                                     env={**env, "RANK": str(1 + index)}) for index in range(workers)]
            for process in processes:
                self.expect_code(process, 0)
                self.assertEqual(process.err, "", process.transcript())

    # Scenario init 12: the end of a job whose workers were killed has no wait without end.
    def test_two_dead_workers_hold_up_no_end(self):
        job = self.job(owners=1, workers=3, worker=LONG).start().wait_training()
        for worker in job.workers[:2]:
            worker.signal(signal.SIGKILL)
        job.workers[2].signal(signal.SIGTERM)
        self.expect_code(job.workers[2], 143)
        owner = job.owners[0]
        self.expect_code(owner, 0)
        for name in ("worker0 died", "worker1 died", "worker2 left"):
            self.assertIn(name, owner.out)


if __name__ == "__main__":
    run_side_by_side(at_a_time=3)
