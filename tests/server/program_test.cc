#include "atoll/cluster/program.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/flags/declare.h"
#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"

ABSL_DECLARE_FLAG(std::string, owners);
ABSL_DECLARE_FLAG(std::string, workers);
ABSL_DECLARE_FLAG(bool, cma);

namespace Atoll::cluster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::ExitedWithCode;
using ::testing::HasSubstr;

class Program : public ::testing::Test {
 protected:
  /// Reads `arguments` into the flags, which are as before after the test.
  std::vector<std::string> Parse(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "program");
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    return ParseFlags(static_cast<int>(pointers.size()), pointers.data(), {"program", "Text of program.\n"});
  }
  Environment Env() {
    return [this](absl::string_view name) -> std::optional<std::string> {
      const auto found = environment_.find(std::string(name));
      return found == environment_.end() ? std::nullopt : std::optional<std::string>(found->second);
    };
  }
  std::string Error(std::optional<Role> role = std::nullopt) {
    const auto launch = LaunchFromFlags(role, Env());
    return launch.ok() ? "no error" : std::string(launch.status().message());
  }

  std::map<std::string, std::string> environment_ = {{"ATOLL_KEY", "0123456789abcdef"}};
  absl::FlagSaver saver_;
};

TEST_F(Program, ReadsFlagsInEveryForm) {
  EXPECT_THAT(Parse({"--owners=3", "--workers", "4", "--nocma"}),
              ElementsAre("--owners=3", "--workers=4", "--cma=false"));
  EXPECT_EQ(absl::GetFlag(FLAGS_owners), "3");
  EXPECT_EQ(absl::GetFlag(FLAGS_workers), "4");
  EXPECT_FALSE(absl::GetFlag(FLAGS_cma));
  EXPECT_THAT(Parse({"--cma"}), ElementsAre("--cma=true"));
  EXPECT_TRUE(absl::GetFlag(FLAGS_cma));
}

// Scenario init 2.
TEST_F(Program, WrongCommandLinesEndWithTwoAndSayWhy) {
  EXPECT_EXIT(Parse({"--worker=3"}), ExitedWithCode(2), "no flag --worker; did you mean --workers");
  EXPECT_EXIT(Parse({"--zzzzzzzzzzzz"}), ExitedWithCode(2), "no flag --zzzzzzzzzzzz \\(see --help\\)");
  EXPECT_EXIT(Parse({"--lease=5 apples"}), ExitedWithCode(2),
              "--lease='5 apples': it should be a time, such as");
  EXPECT_EXIT(Parse({"--lease=5"}), ExitedWithCode(2),
              "--lease='5': it should be a time, such as 500ms, 10s");
  EXPECT_EXIT(Parse({"--cma=maybe"}), ExitedWithCode(2), "--cma='maybe': it should be true or false");
  // As "--key_file=$KEY" gives where there is no $KEY: not the same as no flag.
  EXPECT_EXIT(Parse({"--key_file="}), ExitedWithCode(2), "--key_file has an empty value: leave the flag out");
  EXPECT_EXIT(Parse({"--workers"}), ExitedWithCode(2), "--workers has no value");
  EXPECT_EXIT(Parse({"train"}), ExitedWithCode(2), "'train' is no flag");
  EXPECT_EXIT(Parse({"--"}), ExitedWithCode(2), "'--' is no flag");
  EXPECT_EXIT(Parse({"--=3"}), ExitedWithCode(2), "there is no flag --");
  EXPECT_EXIT(Parse({"--nojob"}), ExitedWithCode(2), "no flag --nojob");
}

TEST_F(Program, HelpAndVersionEndWithZero) {
  // EXPECT_EXIT sees standard error only.
  EXPECT_EXIT((dup2(2, 1), Parse({"--help"})), ExitedWithCode(0), "Text of program(.|\n)*--grace=10s");
  EXPECT_EXIT((dup2(2, 1), Parse({"--version"})), ExitedWithCode(0), "program [0-9]+\\.[0-9]+\\.[0-9]+");
}

TEST_F(Program, ByHandOnOneHostNumbersAreEnough) {
  Parse({"--owners=1", "--workers=2", "--rank=2", "--job=j1"});
  const auto flagged = LaunchFromFlags(Role::kWorker, Env());
  ASSERT_TRUE(flagged.ok()) << flagged.status();
  EXPECT_EQ(flagged->launch.name, "worker1");
  EXPECT_EQ(flagged->launch.world_size, 3);
  EXPECT_EQ(flagged->launch.job, "j1");
  EXPECT_EQ(flagged->launch.coordinator_host, "127.0.0.1");
  EXPECT_EQ(flagged->launch.bind, "127.0.0.1");
  EXPECT_EQ(flagged->launch.key, "0123456789abcdef");
}

TEST_F(Program, AnOwnerByHandIsRankZero) {
  Parse({"--owners=1", "--workers=2"});
  const auto flagged = LaunchFromFlags(Role::kOwner, Env());
  ASSERT_TRUE(flagged.ok()) << flagged.status();
  EXPECT_EQ(flagged->launch.rank, 0);
  EXPECT_THAT(Error(Role::kWorker),
              HasSubstr("--rank (RANK) is not set: it should be this process's rank, a"));
}

TEST_F(Program, FlagsWinOverTheEnvironment) {
  environment_["RANK"] = "3";
  environment_["WORLD_SIZE"] = "4";
  environment_["MASTER_ADDR"] = "localhost";
  environment_["MASTER_PORT"] = "1234";
  environment_["ATOLL_OWNERS"] = "1";
  environment_["TORCHELASTIC_RUN_ID"] = "run";
  environment_["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  auto flagged = LaunchFromFlags(Role::kWorker, Env());
  ASSERT_TRUE(flagged.ok()) << flagged.status();
  EXPECT_EQ(flagged->launch.name, "worker2");
  EXPECT_TRUE(flagged->launch.agent_store);
  Parse({"--rank=1", "--coordinator=[::1]:77", "--name=ada", "--join_limit=5s"});
  flagged = LaunchFromFlags(Role::kWorker, Env());
  ASSERT_TRUE(flagged.ok()) << flagged.status();
  EXPECT_EQ(flagged->launch.rank, 1);
  EXPECT_EQ(flagged->launch.name, "ada");
  EXPECT_EQ(flagged->launch.coordinator_host, "::1");
  EXPECT_EQ(flagged->launch.coordinator_port, 77);
  EXPECT_EQ(flagged->launch.join_limit, absl::Seconds(5));
  EXPECT_FALSE(flagged->launch.agent_store);
}

TEST_F(Program, SaysWhichFlagOrVariableIsWrong) {
  EXPECT_THAT(Error(), HasSubstr("the job has no owner"));
  environment_["RANK"] = "x";
  environment_["WORLD_SIZE"] = "4";
  environment_["MASTER_ADDR"] = "localhost";
  EXPECT_THAT(Error(), HasSubstr("--rank (RANK)='x': it should be this process's rank, a"));
  Parse({"--rank=y"});
  EXPECT_THAT(Error(), AllOf(HasSubstr("--rank='y'"), Not(HasSubstr("RANK"))));
  Parse({"--rank=1", "--owners=2"});
  EXPECT_THAT(Error(Role::kWorker), HasSubstr("--rank=1 is an owner's: owners are ranks 0 to 1"));
  Parse({"--owners=4"});
  EXPECT_THAT(Error(), HasSubstr("the job has no worker"));
  Parse({"--owners=2", "--workers=3", "--world_size=4"});
  EXPECT_THAT(Error(), HasSubstr("contradicts"));
  Parse({"--owners=2", "--workers=-1", "--world_size=4"});
  EXPECT_THAT(Error(), HasSubstr("--workers='-1'"));
  for (const char* wrong : {"host", "host:", ":29500", "host:0", "host:65536", "host:x"}) {
    absl::FlagSaver before;
    Parse({"--coordinator", wrong});
    EXPECT_THAT(Error(), HasSubstr("should be HOST:PORT")) << wrong;
  }
  environment_["ATOLL_LOG_LEVEL"] = "quiet";
  EXPECT_THAT(Error(), HasSubstr("--log_level (ATOLL_LOG_LEVEL)='quiet'"));
  Parse({"--log_level=loud"});
  EXPECT_THAT(Error(), HasSubstr("--log_level='loud'"));
}

TEST_F(Program, NamesTheFlagsOfAJobByHand) {
  EXPECT_THAT(Error(), HasSubstr("--owners (ATOLL_OWNERS) should say"));
  Parse({"--owners=1"});
  EXPECT_THAT(Error(), HasSubstr("--workers, or --world_size (WORLD_SIZE), should say"));
  Parse({"--rank=1"});
  EXPECT_THAT(Error(), HasSubstr("--workers with --owners, or --world_size"));
  Parse({"--workers=2", "--rank=3"});
  EXPECT_THAT(Error(),
              HasSubstr("--rank=3 in a world of 3, by --owners and --workers: it should be from 0 to 2"));
  Parse({"--rank=1"});
  const std::pair<const char*, const char*> wrong[] = {
      {"--owners=x", "--owners='x': it should be a whole number"},
      {"--job=a/b", "--job 'a/b' should be of"},
      {"--name=a b", "--name 'a b' should be of"},
      {"--join_limit=5", "--join_limit='5'"},
      {"--tls=on", "--tls='on'"}};
  for (const auto& [flag, error] : wrong) {
    absl::FlagSaver before;
    Parse({flag});
    EXPECT_THAT(Error(), HasSubstr(error));
    EXPECT_THAT(Error(), Not(HasSubstr("ATOLL_")));
  }
}

TEST_F(Program, SaysWhenTheCoordinatorMustBeNamed) {
  environment_["RANK"] = "1";
  environment_["WORLD_SIZE"] = "3";
  Parse({"--owners=1"});
  EXPECT_THAT(Error(), AllOf(HasSubstr("--coordinator (MASTER_ADDR) is not set"),
                             HasSubstr("only where --workers or --world_size is given")));
  Parse({"--world_size=3"});
  EXPECT_EQ(Error(), "no error");
  environment_["MASTER_PORT"] = "http";
  EXPECT_THAT(Error(), HasSubstr("--coordinator (MASTER_PORT)='http'"));
  Parse({"--coordinator=localhost:77"});
  EXPECT_EQ(Error(), "no error");
}

TEST_F(Program, TooFewOpenFilesAreSaidWithTheNumberNeeded) {
  Parse({"--owners=2", "--workers=40", "--rank=1"});
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  auto error_at = [&](rlim_t limit, std::optional<Role> role) {
    rlimit lower = before;
    lower.rlim_cur = limit;
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &lower), 0);
    const std::string error = Error(role);
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
    return error;
  };
  EXPECT_THAT(error_at(128, Role::kOwner),
              HasSubstr("the limit on open files (ulimit -n) is 128: with 41 peers owner1 needs 184"));
  EXPECT_EQ(error_at(184, Role::kOwner), "no error");
  Parse({"--nounix_sockets"});
  EXPECT_THAT(error_at(184, Role::kOwner), HasSubstr("needs 430"));
  Parse({"--rank=2"});
  EXPECT_EQ(error_at(40, Role::kWorker), "no error");  // It has connections to owners alone.
}

TEST_F(Program, KeyFilesAreChecked) {
  Parse({"--owners=1", "--workers=1", "--rank=0", "--key_file=/nowhere/key"});
  EXPECT_THAT(Error(), AllOf(HasSubstr("/nowhere/key"), HasSubstr("--key_file")));
  std::string path = ::testing::TempDir() + "/atoll-key-XXXXXX";
  close(mkstemp(path.data()));
  std::ofstream(path) << "0123456789abcdef0123456789abcdef";
  chmod(path.c_str(), 0644);
  Parse({"--key_file=" + path});
  EXPECT_THAT(Error(), HasSubstr(path));
  EXPECT_THAT(Error(), Not(HasSubstr("0123456789")));
  chmod(path.c_str(), 0600);
  EXPECT_EQ(Error(), "no error");
  unlink(path.c_str());
}

TEST_F(Program, TlsIsNoneOrAKeyOrFiles) {
  Parse({"--owners=1", "--workers=1", "--rank=0"});
  EXPECT_EQ(LaunchFromFlags(std::nullopt, Env())->launch.tls.mode, base::TlsMode::kNone);
  environment_["ATOLL_TLS"] = "psk";
  EXPECT_EQ(LaunchFromFlags(std::nullopt, Env())->launch.tls.mode, base::TlsMode::kPsk);
  environment_["ATOLL_TLS"] = "on";
  EXPECT_THAT(Error(), AllOf(HasSubstr("--tls (ATOLL_TLS)='on'"), HasSubstr("none, psk or cert")));
  environment_["ATOLL_TLS_CA"] = "ca.pem";
  Parse({"--tls=none"});
  EXPECT_THAT(Error(), AllOf(HasSubstr("--tls_ca (ATOLL_TLS_CA) is given"), HasSubstr("--tls=cert alone")));
  Parse({"--tls=cert"});
  EXPECT_THAT(Error(), AllOf(HasSubstr("--tls_cert (ATOLL_TLS_CERT) is not given")));
  Parse({"--tls_cert=own.pem"});
  EXPECT_THAT(Error(), AllOf(HasSubstr("--tls_key (ATOLL_TLS_KEY) is not given")));
  Parse({"--tls_key=own.key"});
  const auto flagged = LaunchFromFlags(std::nullopt, Env());
  ASSERT_TRUE(flagged.ok()) << flagged.status();
  EXPECT_EQ(flagged->launch.tls.mode, base::TlsMode::kCert);
  EXPECT_EQ(flagged->launch.tls.certificate_file, "own.pem");
  EXPECT_EQ(flagged->launch.tls.key_file, "own.key");
  EXPECT_EQ(flagged->launch.tls.ca_file, "ca.pem");
}

TEST_F(Program, APortMayBeARange) {
  auto launch_with = [this](const std::string& port) {
    absl::FlagSaver saver;
    Parse({"--owners=1", "--workers=1", "--rank=1", "--port=" + port});
    return PlacementFromFlags(Env());
  };
  const auto range = launch_with("7000-7010");
  ASSERT_TRUE(range.ok()) << range.status();
  EXPECT_EQ(range->port, 7000);
  EXPECT_EQ(range->port_count, 11);
  const auto one = launch_with("7000");
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_EQ(one->port, 7000);
  EXPECT_EQ(one->port_count, 1);
  ASSERT_TRUE(launch_with("0").ok());
  EXPECT_EQ(launch_with("0")->port, 0);
  for (const char* wrong :
       {"-1", "65536", "7010-7000", "0-10", "7000-", "-", "7000-70000", "7000:7010", "x"}) {
    const absl::Status status = launch_with(wrong).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << wrong << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("--port='" + std::string(wrong) + "'"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("--port"));
  }
}

TEST_F(Program, NodeFlagsHaveRanges) {
  EXPECT_TRUE(NodeFlagsFromFlags().ok());
  for (const char* wrong : {"--lease=1ms", "--lease=inf", "--grace=-1s"}) {
    absl::FlagSaver saver;
    Parse({wrong});
    EXPECT_THAT(std::string(NodeFlagsFromFlags().status().message()),
                HasSubstr(std::string(wrong).substr(0, std::string(wrong).find('='))))
        << wrong;
  }
}

TEST(EndWithErrorTest, IsOneLineWhateverTheMessage) {
  EXPECT_EXIT(std::exit(EndWithError("p w0", absl::InternalError("a\nb"), kExitFailed)), ExitedWithCode(1),
              "^p w0: error: a b\n$");
  EXPECT_EXIT(std::exit(EndWithError("p", absl::InternalError(""), kExitUsage)), ExitedWithCode(2),
              "^p: error: internal\n$");
}

/// A child that sets up signals as the programs do, says "ready" and then does `body`. Threads of the parent
/// are not in it.
class Child {
 public:
  Child(absl::Duration grace, bool orderly, bool ends, int ignored = 0) {
    int fds[2];
    EXPECT_EQ(pipe2(fds, O_CLOEXEC), 0);
    pid_ = fork();
    if (pid_ == 0) {
      for (int ending : {SIGTERM, SIGINT, SIGHUP}) signal(ending, ending == ignored ? SIG_IGN : SIG_DFL);
      SetUpProcess();
      {
        int asked[2];
        if (pipe2(asked, O_CLOEXEC) != 0) _exit(98);
        SignalWatch watch("child", grace);
        if (orderly) {
          watch.OnSignal([asked, fds](int) {
            (void)!write(fds[1], "a", 1);
            (void)!write(asked[1], "a", 1);
          });
        }
        (void)!write(fds[1], "r", 1);
        char byte = 0;
        do {  // Without an end: for ever, since the other end of the pipe is open here too.
          if (read(asked[0], &byte, 1) != 1) _exit(97);
        } while (!ends);
        if (watch.signal() == 0) _exit(99);
        _exit(watch.ExitWith(0));
      }
    }
    close(fds[1]);
    out_ = fds[0];
    Await('r');
  }
  ~Child() { close(out_); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  /// Waits until the child has said so: 'r'eady, 'a'sked to end.
  void Await(char what) {
    char said = 0;
    EXPECT_EQ(read(out_, &said, 1), 1);
    EXPECT_EQ(said, what);
  }
  void Send(int signal) { kill(pid_, signal); }
  int Wait() {
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t pid_;
  int out_;
};

TEST(SignalWatchTest, TheFirstSignalEndsInOrder) {
  for (int signal : {SIGTERM, SIGINT, SIGHUP}) {
    Child child(absl::Hours(1), true, true);
    child.Send(signal);
    EXPECT_EQ(child.Wait(), 128 + signal);
  }
}

TEST(SignalWatchTest, WhatTheParentIgnoresStaysIgnored) {
  Child child(absl::Hours(1), true, true, /*ignored=*/SIGHUP);
  child.Send(SIGHUP);
  child.Send(SIGTERM);
  EXPECT_EQ(child.Wait(), 128 + SIGTERM);
}

TEST(SignalWatchTest, TheSecondSignalEndsAtOnce) {
  Child child(absl::Hours(1), true, /*ends=*/false);
  child.Send(SIGTERM);
  child.Await('a');
  child.Send(SIGINT);
  EXPECT_EQ(child.Wait(), 128 + SIGINT);
}

TEST(SignalWatchTest, WithoutAnEndTheGraceIsTheLimit) {
  Child child(absl::Milliseconds(20), true, /*ends=*/false);
  child.Send(SIGTERM);
  EXPECT_EQ(child.Wait(), 128 + SIGTERM);
}

TEST(SignalWatchTest, BeforeThereIsAnythingToPutInOrderItEndsAtOnce) {
  Child child(absl::Hours(1), /*orderly=*/false, true);
  child.Send(SIGTERM);
  EXPECT_EQ(child.Wait(), 128 + SIGTERM);
}

TEST(SignalWatchTest, NamesSignals) {
  EXPECT_EQ(SignalName(SIGTERM), "SIGTERM");
  EXPECT_EQ(SignalName(999), "signal 999");
}

}  // namespace
}  // namespace Atoll::cluster
