"""Jobs over network namespaces and containers that share little: docs/scenarios/users.md, 34 and 36. As root."""
import os
import secrets
import shutil
import subprocess
import unittest

from harness import BIN, JobTest

CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc", "--uts", "--"]


def can_have_namespaces():
    """Empty, or why not."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    name = f"atoll-probe-{os.getpid()}"
    for command in (["ip", "netns", "add", name], ["ip", "netns", "exec", name, "ip", "link", "set", "lo", "up"],
                    [*CONTAINER, "true"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            return f"{' '.join(command)}: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return ""


WHY_NOT = can_have_namespaces()


@unittest.skipIf(WHY_NOT, f"ATOLL_TEST_SKIPPED: {WHY_NOT}")
class Containers(JobTest):
    """Two hosts, `a` (10.77.0.1, fd77::1) and `b` (10.77.0.2, fd77::2), and a cable between them."""

    def setUp(self):
        super().setUp()
        tag = secrets.token_hex(3)
        self.hosts = {side: f"atoll-{tag}-{side}" for side in "ab"}
        self.interfaces = {side: f"v{tag}{side}" for side in "ab"}
        for name in self.hosts.values():
            self.ip("netns", "add", name)
            self.addCleanup(subprocess.run, ["ip", "netns", "del", name], check=False)
        self.ip("-n", self.hosts["a"], "link", "add", self.interfaces["a"], "type", "veth", "peer", "name",
                self.interfaces["b"], "netns", self.hosts["b"])
        for number, side in enumerate("ab", 1):
            host, interface = self.hosts[side], self.interfaces[side]
            self.ip("-n", host, "addr", "add", f"10.77.0.{number}/24", "dev", interface)
            # Without a check for duplicates the address is there at once.
            self.ip("-n", host, "-6", "addr", "add", f"fd77::{number}/64", "dev", interface, "nodad")
            self.ip("-n", host, "-6", "addr", "add", f"fe80::77:{number}/64", "dev", interface, "nodad")
            for one in ("lo", interface):
                self.ip("-n", host, "link", "set", one, "up")

    def ip(self, *arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

    def program_in(self, side, program, *flags, wrap=(), **kwargs):
        return self.start(f"{program} in {side}", ["ip", "netns", "exec", self.hosts[side], *wrap,
                                                  os.path.join(BIN, program), *flags], **kwargs)

    def flags(self, rank, coordinator, *more):
        return [f"--rank={rank}", "--owners=1", "--workers=2", f"--coordinator={coordinator}", "--job=containers",
                f"--key_file={self.key_file}", "--lease=30s", *more]

    WORKER = ("--model=mlp", "--data=synthetic:256", "--epochs=1", "--progress=json")

    def train(self, coordinator="10.77.0.1:29500", owner=(), worker=(), other=(), wrap_owner=(), wrap_worker=(),
              wrap_other=(), other_host="b"):
        """An owner in a, workers in b and in `other_host`; what they say at their ends, and the owner."""
        server = self.program_in("a", "atoll-server", *self.flags(0, coordinator, *owner), wrap=wrap_owner)
        workers = [self.program_in("b", "atoll-worker", *self.flags(1, coordinator, *self.WORKER, *worker),
                                   wrap=wrap_worker),
                   self.program_in(other_host, "atoll-worker", *self.flags(2, coordinator, *self.WORKER, *other),
                                   wrap=wrap_other)]
        for process in [*workers, server]:
            self.expect_code(process, 0)
        checksums = {process.done()["checksum"] for process in workers}
        self.assertEqual(len(checksums), 1)
        return server

    # Scenario users 34.
    def test_two_hosts(self):
        server = self.train()
        self.assertIn("10.77.0.1:29500", server.out)

    # Scenario users 34: neither network, nor processes, nor shared memory are common.
    def test_containers_that_share_nothing(self):
        self.train(wrap_owner=CONTAINER, wrap_worker=CONTAINER, wrap_other=CONTAINER)

    # Scenario users 34: as with a host's network in each container.
    def test_containers_that_share_a_network_alone(self):
        self.train(wrap_owner=CONTAINER, wrap_worker=CONTAINER, wrap_other=CONTAINER, other_host="a")

    # Scenario users 34: Unix sockets are there, but who is behind one is another user to the other.
    def test_containers_of_other_users(self):
        user = ["unshare", "--user", "--map-user=1000", "--"]
        self.train(wrap_other=user, other_host="a")

    # Scenario users 34.
    def test_the_address_is_an_interface_an_address_or_any(self):
        for bind_a, bind_b in ((self.interfaces["a"], self.interfaces["b"]), ("10.77.0.1", "10.77.0.2"),
                               ("0.0.0.0", "0.0.0.0"), ("::", "::")):
            with self.subTest(bind_a):
                self.train(owner=[f"--bind={bind_a}"], worker=[f"--bind={bind_b}"], other=[f"--bind={bind_b}"])

    # Scenario users 34.
    def test_ipv6(self):
        server = self.train(coordinator="[fd77::1]:29500")
        self.assertIn("[fd77::1]:29500", server.out)

    # Scenario users 34: of a link-local address each host says the scope in its own words.
    def test_a_link_local_address(self):
        server = self.program_in("a", "atoll-server",
                                 *self.flags(0, f"[fe80::77:1%{self.interfaces['a']}]:29500"))
        coordinator = f"[fe80::77:1%{self.interfaces['b']}]:29500"
        workers = [self.program_in("b", "atoll-worker", *self.flags(rank, coordinator, *self.WORKER))
                   for rank in (1, 2)]
        for process in [*workers, server]:
            self.expect_code(process, 0)

    def dead_interface(self, side, number):
        """One that leads nowhere: 172.18.NUMBER.1, on both hosts the same."""
        host, names = self.hosts[side], (f"dead{number}", f"peer{number}")
        self.ip("-n", host, "link", "add", names[0], "type", "veth", "peer", "name", names[1])
        self.ip("-n", host, "addr", "add", f"172.18.{number}.1/24", "dev", names[0])
        for one in names:
            self.ip("-n", host, "link", "set", one, "up")

    # Scenario users 36: a host with many adapters, most of which lead nowhere for the other.
    def test_many_interfaces(self):
        for side in "ab":
            for number in range(20):
                self.dead_interface(side, number)
        self.train(owner=["--bind=0.0.0.0"], worker=["--bind=0.0.0.0"], other=["--bind=0.0.0.0"])

    # Scenario users 34: as behind a mapped address. Where the workers say that they are is the owner's own host to it.
    def test_workers_that_only_reach_out(self):
        for side in "ab":
            self.dead_interface(side, 0)
        self.train(worker=["--bind=172.18.0.1"], other=["--bind=172.18.0.1"])

    # Scenario users 34.
    def test_an_address_that_leads_nowhere_is_named(self):
        for coordinator in ("10.88.0.1:29500", "10.77.0.9:29500"):
            with self.subTest(coordinator):
                worker = self.program_in("b", "atoll-worker", *self.flags(1, coordinator, *self.WORKER,
                                                                          "--join_limit=2s"))
                self.expect_error(worker, 1, coordinator, "within 2s")
        worker = self.program_in("b", "atoll-worker", *self.flags(1, "no-such-host.invalid:29500", *self.WORKER,
                                                                  "--join_limit=2s"))
        self.expect_error(worker, 1, "no-such-host.invalid")

    # Scenario users 34: a worker that tells others an address of its own host alone.
    def test_loopback_is_no_address_among_hosts(self):
        worker = self.program_in("b", "atoll-worker", *self.flags(1, "10.77.0.1:29500", *self.WORKER,
                                                                  "--bind=127.0.0.1"))
        self.expect_error(worker, 2, "127.0.0.1 cannot be reached from the coordinator's host 10.77.0.1")


if __name__ == "__main__":
    unittest.main(verbosity=2)
