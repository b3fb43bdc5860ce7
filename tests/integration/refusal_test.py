"""Wrong input of every kind: one clear line, an exit code that is not 0, in bounded time."""
import gzip
import json
import os
import signal
import socket
import struct

import raw_peer
from harness import BIN, HANG_LIMIT_S, JobTest, first_to_end, free_port, run_side_by_side


def idx_images(count, rows, columns):
    return struct.pack(">IIII", 0x803, count, rows, columns) + bytes(count * rows * columns)


def idx_labels(count, label=1):
    return struct.pack(">II", 0x801, count) + bytes([label]) * count


class WrongFlags(JobTest):
    """Refused before the job is joined: code 2, and nobody else is needed."""

    def refused(self, program, *flags):
        process = self.program(program, "--owners=1", "--workers=1", f"--key_file={self.key_file}", *flags)
        self.expect_error(process, 2)
        return process.err

    def worker(self, *flags):
        return self.refused("atoll-worker", "--rank=1", *flags)

    def data_folder(self, **files):
        good = {"train-images-idx3-ubyte": idx_images(40, 8, 8), "train-labels-idx1-ubyte": idx_labels(40),
                "t10k-images-idx3-ubyte": idx_images(10, 8, 8), "t10k-labels-idx1-ubyte": idx_labels(10)}
        good.update({name.replace("_", "-"): content for name, content in files.items()})
        for name, content in good.items():
            self.write(name + ".gz", content if content[:2] == b"\x1f\x8b" else gzip.compress(content))
        return self.folder

    def test_names_that_are_not_known(self):
        self.assertIn("known are convnet, mlp, linear", self.worker("--model=resnet", "--data=synthetic"))
        self.assertIn("known is adam", self.worker("--optimizer=sgd"))
        self.assertIn("known are fashion-mnist, synthetic", self.worker("--data=cifar"))
        self.assertIn("sync or async", self.worker("--policy=maybe"))

    def test_wrong_data(self):
        self.assertIn("/nowhere/data", self.worker("--data=/nowhere/data"))
        folder = self.data_folder(**{"train_images_idx3_ubyte": idx_images(40, 8, 8)[:-5]})
        self.assertIn("train-images-idx3-ubyte.gz is truncated", self.worker(f"--data={folder}"))
        self.data_folder(**{"train_images_idx3_ubyte": gzip.compress(idx_images(40, 8, 8))[:-9]})
        self.assertIn("train-images-idx3-ubyte.gz is truncated", self.worker(f"--data={folder}"))
        self.data_folder(**{"t10k_labels_idx1_ubyte": idx_labels(10, 77)})
        self.assertIn("t10k-labels-idx1-ubyte.gz: label 0 is 77", self.worker(f"--data={folder}"))

    def test_shapes_that_do_not_fit(self):
        folder = self.data_folder(train_images_idx3_ubyte=idx_images(40, 3, 9),
                                  t10k_images_idx3_ubyte=idx_images(10, 3, 9))
        self.assertIn("convnet needs images of at least 4 x 4, but these are 3 x 9",
                      self.worker(f"--data={folder}", "--model=convnet"))

    def test_numbers_of_training(self):
        self.assertIn("--lr is -1", self.worker("--lr=-1"))
        self.assertIn("--beta2 is 1.5", self.worker("--beta2=1.5"))
        self.assertIn("--batch is 0", self.worker("--batch=0"))
        self.assertIn("--threads=0", self.worker("--threads=0"))
        self.assertIn("did you mean --model", self.worker("--modle=mlp"))

    def test_numbers_of_the_job(self):
        self.assertIn("--lease=0", self.refused("atoll-server", "--lease=0"))
        self.assertIn("owners are ranks 0 to 0", self.refused("atoll-server", "--rank=1"))
        self.assertIn("should be from 0 to 1", self.worker("--rank=7"))

    def test_wrong_keys(self):
        self.assertIn("open.key", self.refused(
            "atoll-server", f"--key_file={self.write('open.key', 'k' * 32, 0o644)}"))
        self.assertIn("short.key", self.refused(
            "atoll-server", f"--key_file={self.write('short.key', 'k' * 5)}"))
        self.assertIn("/nowhere/key", self.refused("atoll-server", "--key_file=/nowhere/key"))
        process = self.program("atoll-server", "--owners=1", "--workers=1", env={"ATOLL_KEY": "short"})
        self.expect_error(process, 2, "ATOLL_KEY")
        self.assertNotIn("'short'", process.err)


class WrongJobs(JobTest):
    """What only shows between processes: code 1."""

    # Scenario init 16.
    def test_a_port_in_use(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            owner = self.program("atoll-server", "--owners=1", "--workers=1", f"--coordinator=127.0.0.1:{port}",
                                 f"--key_file={self.key_file}")
            self.expect_error(owner, 1, str(port))

    def test_an_address_that_is_not_ours(self):
        owner = self.program("atoll-server", "--owners=1", "--workers=1", "--bind=nosuchif0",
                             f"--coordinator=127.0.0.1:{free_port()}", f"--key_file={self.key_file}")
        self.expect_error(owner, 2, "nosuchif0")
        worker = self.program("atoll-worker", "--owners=1", "--workers=1", "--rank=1", "--bind=nosuchif0",
                              "--data=synthetic", f"--coordinator=127.0.0.1:{free_port()}",
                              f"--key_file={self.key_file}")
        self.expect_error(worker, 2, "nosuchif0")

    # Scenario init 5.
    # Scenario users 6.
    def test_ranks_that_never_come(self):
        self.expect_error(self.job(common=["--join_limit=1s"]).start_owner(0), 1,
                          "3 of 4 ranks did not come within 1s: 1, 2, 3")
        job = self.job()
        owner = job.start_owner(0)
        owner.wait_line("waiting for job")
        worker = job.start_worker(1, extra=["--join_limit=4s"])
        self.expect_error(worker, 1, "2 of 4 ranks did not come within ")
        self.assertRegex(worker.err, r"within \d(\.\d{1,2})?s: 1, 2$")
        owner.signal(signal.SIGTERM)
        self.expect_code(owner, 143)

    def test_a_coordinator_that_never_comes(self):
        job = self.job(common=["--join_limit=1s"])
        self.expect_error(job.start_worker(0), 1, f"127.0.0.1:{job.port}")

    def expect_one_refused(self, first, second, *texts):
        """Of two (index, name) whichever comes later; the job, given its other worker, goes on without it."""
        job = self.job(owners=1, workers=2)
        job.start_owner(0)
        refused = first_to_end([job.start_worker(index, extra=[f"--name={name}"]) for index, name in (first, second)])
        self.expect_error(refused, 1, *texts)
        missing = 1 if first[0] == second[0] or refused is job.workers[1] else 0
        job.start_worker(missing, extra=["--name=eve"])
        for process in job.workers + job.owners:
            if process is not refused:
                self.expect_code(process, 0)

    def test_two_of_one_rank(self):
        self.expect_one_refused((0, "ada"), (0, "bob"), "ada#", "bob#", " (rank 1) cannot join: its rank belongs to ",
                                " (rank 1), which is alive at ")

    # Scenario init 3.
    def test_two_of_one_name(self):
        self.expect_one_refused((0, "ada"), (1, "ada"), "(rank 1)", "(rank 2)",
                                " cannot join: its name belongs to ada#", ", which is alive at ")

    def test_a_worker_of_the_coordinators_name(self):
        job = self.job(owners=1, workers=1)
        owner = job.start_owner(0)
        self.expect_error(job.start_worker(0, extra=["--name=owner0"]), 1,
                          "(rank 1) cannot join: its name belongs to the coordinator owner0#")
        self.expect_code(job.start_worker(0), 0)
        self.expect_code(owner, 0)

    # Scenario users 145.
    def test_a_wrong_key(self):
        job = self.job(owners=1, workers=1)
        owner = job.start_owner(0)
        other = self.write("other.key", "another key of the right size")
        stranger = job.start_worker(0, key_file=other)
        self.expect_error(stranger, 1, "key")
        self.expect_code(job.start_worker(0), 0)
        self.expect_code(owner, 0)

    def test_another_job_at_the_address(self):
        job = self.job(owners=1, workers=1)
        owner = job.start_owner(0)
        self.expect_error(job.start_worker(0, extra=["--job=another"]), 1, "another")
        self.expect_code(job.start_worker(0), 0)
        self.expect_code(owner, 0)

    def test_a_service_that_is_no_job_at_the_address(self):
        other = raw_peer.Listener(lambda hello: b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", HANG_LIMIT_S)
        self.addCleanup(other.close)
        job = self.job(owners=1, workers=1)
        address = f"127.0.0.1:{other.port}"
        self.expect_error(job.start_worker(0, extra=[f"--coordinator={address}", "--join_limit=2s"]), 1,
                          f"{address}: what answers there is not an Atoll endpoint")

    def test_workers_with_different_models(self):
        job = self.job(owners=1, worker=["--attach_limit=5s"], per_worker={1: ["--model=mlp"]}).start()
        refused = first_to_end(job.workers)
        self.expect_error(refused, 1, "attaching the model: owner0: ", "'output.weight'", "'hidden.weight'",
                          "the worker's model 'model' (there) is not the one of this shard (here): ")
        # The other, whose model the owner has, waits for one that comes with the right model, and then says why.
        other, = (worker for worker in job.workers if worker is not refused)
        self.expect_error(other, 1, "not all of 2 workers have attached to 'model': missing worker",
                          "the last that failed is", "is not the one of this shard")

    def test_workers_with_different_learning_rates(self):
        job = self.job(owners=1, per_worker={1: ["--lr=0.5"]}).start()
        codes = [worker.wait() for worker in job.workers]
        self.assertEqual(sorted(codes), [0, 1])
        refused = codes.index(1)
        self.expect_error(job.workers[refused], 1, "owner0: push_gradient: ", "lr=0.001", "lr=0.5",
                          f"hyper-parameters were set by worker {1 - refused}; worker {refused}'s differ")
        self.assertEqual(job.workers[1 - refused].done()["fewest_contributors"], 1)


class StandardOutput(JobTest):
    """What cannot be said is not lost without a word."""

    def test_help_that_nobody_can_read(self):
        for redirection, why in ((">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")):
            for program in ("atoll-server", "atoll-worker", "atoll-run"):
                helped = self.start(program, ["sh", "-c", f'exec "$@" {redirection}', "sh",
                                              os.path.join(BIN, program), "--help"])
                self.expect_error(helped, 1, f"{program}: error: cannot write to standard output: {why}")

    def test_a_worker_trains_on_and_says_at_its_end_that_it_was_not_heard(self):
        job = self.job(owners=1, workers=3)
        summary = os.path.join(self.folder, "summary.json")
        owner = job.start_owner(0)
        heard = job.start_worker(0)
        full = job.start_worker(1, extra=[f"--summary={summary}"], redirection=">/dev/full")
        closed = job.start_worker(2, redirection=">&- <&-")
        self.expect_error(full, 1, "worker1: error: cannot write to standard output: No space left on device")
        self.expect_error(closed, 1, "worker2: error: cannot write to standard output: Bad file descriptor")
        for process in (heard, owner):
            self.expect_code(process, 0)
        with open(summary, encoding="utf-8") as file:
            self.assertEqual(json.load(file)["checksum"], heard.done()["checksum"])


if __name__ == "__main__":
    run_side_by_side()
