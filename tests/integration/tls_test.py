"""Jobs of the real programs over TLS, and what they say when its parts do not fit."""
import os
import shutil
import subprocess

from harness import JobTest, monotonic, run_side_by_side

# All that can be TLS is: processes of one host would use Unix sockets.
TCP = ["--unix_sockets=false", "--cma=false"]


class Certificates:
    """A CA and what it signs, made by the commands of docs/security.md."""

    def __init__(self, folder):
        self.folder = folder
        self.new_authority("ca")
        self.sign("member")

    def path(self, name):
        return os.path.join(self.folder, name)

    def openssl(self, *arguments):
        subprocess.run(["openssl", *arguments], check=True, cwd=self.folder, capture_output=True)

    def new_authority(self, name):
        self.openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                     "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem")

    def sign(self, name, authority="ca"):
        self.openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
                     "-keyout", f"{name}.key", "-out", f"{name}.csr")
        self.openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key",
                     "-CAcreateserial", "-days", "1", "-out", f"{name}.pem")
        os.chmod(self.path(f"{name}.key"), 0o600)

    def flags(self, name="member", authority="ca"):
        return ["--tls=cert", f"--tls_cert={self.path(name)}.pem", f"--tls_key={self.path(name)}.key",
                f"--tls_ca={self.path(authority)}.pem"]


class TlsTest(JobTest):

    def setUp(self):
        super().setUp()
        if shutil.which("openssl") is None:
            self.skipTest("ATOLL_TEST_SKIPPED: this machine has no openssl command")
        self.certificates = Certificates(self.folder)


class Jobs(TlsTest):

    def test_every_mode_trains_to_the_same_parameters(self):
        checksums = set()
        for flags in ([], ["--tls=psk"], self.certificates.flags()):
            for summary in self.job(common=[*TCP, *flags]).run():
                self.assertEqual(summary["fewest_contributors"], 2)
                checksums.add(summary["checksum"])
        self.assertEqual(len(checksums), 1, checksums)

    def test_the_environment_says_it_too(self):
        job = self.job(owners=1, workers=1, common=TCP)
        command = [*self.key_flag(), *job.common]
        owner = self.start_program("atoll-server", *command, env={"ATOLL_TLS": "psk"})
        worker = self.start_program("atoll-worker", "--rank=1", *command, *job.worker_flags, env={"ATOLL_TLS": "psk"})
        self.expect_code(worker, 0)
        self.expect_code(owner, 0)

    def key_flag(self):
        return [f"--key_file={self.key_file}"]


class Refusals(TlsTest):

    def refused(self, owner_flags, worker_flags, right_flags, *texts, owner_says=None):
        """A worker that does not fit ends with a clear line, soon; one that fits then trains."""
        job = self.job(owners=1, workers=1, common=[*TCP, "--join_limit=60s"])
        owner = self.start_program("atoll-server", f"--key_file={self.key_file}", *job.common, *owner_flags)
        owner.wait_line("waiting for job")
        begin = monotonic()
        self.expect_error(job.start_worker(0, extra=worker_flags), 1, f"127.0.0.1:{job.port}", *texts)
        self.assertLess(monotonic() - begin, 50, "it waited for its limit")
        if owner_says:
            owner.wait_line(owner_says)
        self.expect_code(job.start_worker(0, extra=right_flags), 0)
        self.expect_code(owner, 0)

    def test_a_plain_worker_at_an_owner_with_tls(self):
        self.refused(["--tls=psk"], [], ["--tls=psk"], "TLS on one side only, ours is --tls=none",
                     "this endpoint has --tls=psk", "should have the same --tls",
                     owner_says="the peer speaks without TLS, we have --tls=psk")

    def test_a_worker_with_tls_at_a_plain_owner(self):
        self.refused([], ["--tls=psk"], [], "TLS on one side only, ours is --tls=psk", "this endpoint has --tls=none",
                     owner_says="the peer speaks TLS, we have --tls=none")

    def test_another_mode(self):
        self.refused(self.certificates.flags(), ["--tls=psk"], self.certificates.flags(), "--tls=psk",
                     "should have the same", owner_says="the peer has --tls=psk, we have --tls=cert")

    def test_a_certificate_of_another_ca(self):
        self.certificates.new_authority("other")
        self.certificates.sign("stranger", "other")
        with open(self.certificates.path("both.pem"), "w", encoding="utf-8") as both:
            for name in ("ca", "other"):
                with open(self.certificates.path(f"{name}.pem"), encoding="utf-8") as one:
                    both.write(one.read())
        self.refused(self.certificates.flags(), self.certificates.flags("stranger", "both"), self.certificates.flags(),
                     "refuses our certificate", "stranger.pem", owner_says="certificate is not valid for our CA")

    def test_wrong_flags_and_files_end_with_two(self):
        flags = ["--owners=1", "--workers=1", "--coordinator=127.0.0.1:1", f"--key_file={self.key_file}"]
        right = self.certificates.flags()
        open_key = self.write("open.key", "x", 0o644)
        for given, *texts in (
                (["--tls=yes"], "--tls='yes'", "none, psk or cert"),
                (right[:3], "--tls_ca", "is not given"),
                (["--tls=psk", right[1]], "--tls_cert", "for --tls=cert alone"),
                ([right[1]], "--tls_cert", "for --tls=cert alone"),
                ([*right, "--tls_cert=/nowhere/cert.pem"], "/nowhere/cert.pem", "No such file"),
                ([*right, f"--tls_key={open_key}"], open_key, "chmod go="),
                ([*right, f"--tls_key={self.certificates.path('ca.key')}"], "ca.key", "should belong together")):
            process = self.program("atoll-server", *flags, *given)
            self.expect_error(process, 2, *texts)


if __name__ == "__main__":
    run_side_by_side()
