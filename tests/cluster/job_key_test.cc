#include "atoll/cluster/job_key.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

namespace Atoll::cluster {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

class JobKeyTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "atoll-key-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { fs::remove_all(directory_); }

  std::string Write(const std::string& content, mode_t mode = 0600) {
    std::string path = directory_ + "/file";
    std::ofstream(path, std::ios::binary) << content;
    chmod(path.c_str(), mode);
    return path;
  }
  std::string Shared() const { return directory_ + "/shared"; }
  Environment Runtime() const {
    return [this](absl::string_view name) -> std::optional<std::string> {
      if (name == "XDG_RUNTIME_DIR") return directory_;
      return std::nullopt;
    };
  }

  std::string directory_;
};

void ExpectRefused(const std::string& path, absl::StatusCode code, const std::string& part) {
  absl::Status status = ReadKeyFile(path).status();
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  EXPECT_THAT(std::string(status.message()), HasSubstr(path));
}

TEST_F(JobKeyTest, ReadsAFileWithoutItsLastNewline) {
  EXPECT_EQ(*ReadKeyFile(Write("0123456789abcdef\n")), "0123456789abcdef");
  EXPECT_EQ(*ReadKeyFile(Write("0123456789abcdef")), "0123456789abcdef");
  EXPECT_EQ(*ReadKeyFile(Write("0123456789abcdef\n\n")), "0123456789abcdef\n") << "one newline only";
  std::string binary(4096, '\0');
  EXPECT_EQ(*ReadKeyFile(Write(binary)), binary);
  EXPECT_EQ(*ReadKeyFile(Write(binary + "\n")), binary);
  EXPECT_TRUE(ReadKeyFile(Write("0123456789abcdef", 0400)).ok());
}

TEST_F(JobKeyTest, RefusesAFileThatIsNoSecret) {
  for (mode_t mode : {0640, 0604, 0620, 0602, 0610, 0644}) {
    ExpectRefused(Write("0123456789abcdef", mode), absl::StatusCode::kPermissionDenied, "chmod go=");
  }
  ExpectRefused(Write("0123456789abcdef", 0640), absl::StatusCode::kPermissionDenied, "mode 640");
  ExpectRefused(Write("0123456789abcde"), absl::StatusCode::kInvalidArgument, "15 bytes");
  ExpectRefused(Write("0123456789abcde\n"), absl::StatusCode::kInvalidArgument, "15 bytes");
  ExpectRefused(Write(""), absl::StatusCode::kInvalidArgument, "0 bytes");
  ExpectRefused(Write(std::string(4097, 'x')), absl::StatusCode::kInvalidArgument, "4096");
  ExpectRefused(Write(std::string(1 << 20, 'x')), absl::StatusCode::kInvalidArgument, "too many");
  ExpectRefused(directory_, absl::StatusCode::kInvalidArgument, "not a regular file");
  ExpectRefused(directory_ + "/none", absl::StatusCode::kNotFound, "open the key file");
  std::string fifo = directory_ + "/fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  ExpectRefused(fifo, absl::StatusCode::kInvalidArgument, "not a regular file");
}

TEST_F(JobKeyTest, RefusesTheFileOfAnotherUser) {
  if (geteuid() != 0) GTEST_SKIP() << "ATOLL_TEST_SKIPPED: only root can give a file away";
  std::string path = Write("0123456789abcdef");
  ASSERT_EQ(chown(path.c_str(), 12345, 0), 0);
  ExpectRefused(path, absl::StatusCode::kPermissionDenied, "belongs to user 12345");
}

TEST_F(JobKeyTest, RanksOfAJobShareAndTheLastOneOutRemoves) {
  auto first = SharedKeyFile::Open(Shared(), "job");
  ASSERT_TRUE(first.ok()) << first.status();
  struct stat info {};
  ASSERT_EQ(stat((*first)->path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  ASSERT_EQ(stat(Shared().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
  EXPECT_EQ((*first)->key().size(), 64u);
  auto second = SharedKeyFile::Open(Shared(), "job");
  auto other = SharedKeyFile::Open(Shared(), "other");
  EXPECT_EQ((*first)->key(), (*second)->key());
  EXPECT_NE((*first)->key(), (*other)->key());

  std::string path = (*first)->path(), key = (*first)->key();
  first->reset();
  EXPECT_TRUE(fs::exists(path));
  EXPECT_EQ((*SharedKeyFile::Open(Shared(), "job"))->key(), key) << "the second still holds it";
  second->reset();
  EXPECT_FALSE(fs::exists(path));
  other->reset();
  EXPECT_TRUE(fs::is_empty(Shared())) << "no drafts are left";
}

TEST_F(JobKeyTest, WhatAKilledJobLeftIsUsedAgain) {
  pid_t child = fork();
  if (child == 0) {
    auto file = SharedKeyFile::Open(Shared(), "job");
    _exit(file.ok() ? 0 : 1);  // Without its destructor.
  }
  int state = 0;
  ASSERT_EQ(waitpid(child, &state, 0), child);
  ASSERT_EQ(state, 0);
  std::string left = *ReadKeyFile(Shared() + "/key-job");
  auto again = SharedKeyFile::Open(Shared(), "job");
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ((*again)->key(), left);
}

TEST_F(JobKeyTest, RanksThatStartAndEndAtOnceNeverDisagree) {
  // Whoever holds the file at the same time as another holds the same key; all of them come and go.
  for (int round = 0; round < 20; ++round) {
    std::vector<std::thread> ranks;
    std::vector<std::string> keys(8);
    absl::Mutex mu;
    int holding = 0;
    for (size_t rank = 0; rank < keys.size(); ++rank) {
      ranks.emplace_back([&, rank] {
        for (int churn = 0; churn < 5; ++churn) SharedKeyFile::Open(Shared(), "job").IgnoreError();
        auto file = SharedKeyFile::Open(Shared(), "job");
        ASSERT_TRUE(file.ok()) << file.status();
        keys[rank] = (*file)->key();
        absl::MutexLock lock(&mu);
        ++holding;
        auto all = [&] { return holding == static_cast<int>(keys.size()); };
        mu.Await(absl::Condition(&all));
      });
    }
    for (std::thread& rank : ranks) rank.join();
    EXPECT_EQ(std::set<std::string>(keys.begin(), keys.end()).size(), 1u);
    EXPECT_TRUE(fs::is_empty(Shared()));
  }
}

TEST_F(JobKeyTest, RefusesADirectoryOrFileThatIsNotOursAlone) {
  ASSERT_EQ(mkdir(Shared().c_str(), 0700), 0);
  chmod(Shared().c_str(), 0755);
  EXPECT_EQ(SharedKeyFile::Open(Shared(), "job").status().code(), absl::StatusCode::kPermissionDenied);
  chmod(Shared().c_str(), 0700);
  std::string path = Shared() + "/key-job";
  std::ofstream(path) << "0123456789abcdef";
  chmod(path.c_str(), 0644);
  EXPECT_EQ(SharedKeyFile::Open(Shared(), "job").status().code(), absl::StatusCode::kPermissionDenied);
  fs::remove(path);
  fs::create_symlink(Write("0123456789abcdef"), path);
  EXPECT_FALSE(SharedKeyFile::Open(Shared(), "job").ok()) << "no symbolic link is followed";
  fs::remove(path);
  fs::remove(Shared());
  fs::create_symlink(directory_, Shared());
  EXPECT_FALSE(SharedKeyFile::Open(Shared(), "job").ok());
  EXPECT_FALSE(SharedKeyFile::Open(directory_, "a/../b").ok());
}

TEST_F(JobKeyTest, EnsureMakesAKeyOnOneHostOnly) {
  Launch launch;
  launch.world_size = 2;
  auto file = EnsureJobKey(launch, Runtime());
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_NE(*file, nullptr);
  EXPECT_EQ((*file)->path(), directory_ + "/atoll/key-atoll");
  EXPECT_EQ(launch.key, (*file)->key());
  auto none = EnsureJobKey(launch, Runtime());
  ASSERT_TRUE(none.ok());
  EXPECT_EQ(*none, nullptr) << "it has one";

  Launch wide;
  wide.world_size = 2;
  wide.coordinator_host = "192.0.2.1";
  absl::Status status = EnsureJobKey(wide, Runtime()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("ATOLL_KEY_FILE"));
}

TEST_F(JobKeyTest, TheDirectoryIsTheUsersOwn) {
  EXPECT_EQ(SharedKeyDirectory(Runtime()), directory_ + "/atoll");
  auto empty = [](absl::string_view) { return std::optional<std::string>(); };
  EXPECT_EQ(SharedKeyDirectory(empty), "/tmp/atoll-" + std::to_string(geteuid()));
}

}  // namespace
}  // namespace Atoll::cluster
