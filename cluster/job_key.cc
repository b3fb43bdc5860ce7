#include "atoll/cluster/job_key.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "atoll/base/ids.h"
#include "atoll/base/private_file.h"
#include "atoll/base/status.h"

namespace Atoll::cluster {
namespace {

constexpr int kMadeKeyBytes = 32;
/// Openings in a row that met a file which its last holder was just removing.
constexpr int kMaxTries = 100;

/// Reads up to kMaxKeyBytes + 2 bytes, so that one too many is seen.
absl::StatusOr<std::string> ReadAll(int fd, const std::string& path) {
  std::string bytes(kMaxKeyBytes + 2, '\0');
  size_t have = 0;
  while (have < bytes.size()) {
    ssize_t got = pread(fd, bytes.data() + have, bytes.size() - have, static_cast<off_t>(have));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return base::ErrnoStatus(errno, absl::StrCat("read ", path));
    if (got == 0) break;
    have += static_cast<size_t>(got);
  }
  bytes.resize(have);
  return bytes;
}

/// Makes `entry` with a fresh key unless it is there: written under a name of its own, then linked, so that
/// nobody ever sees half a key.
absl::Status MakeKey(int directory, const std::string& entry, const std::string& path) {
  char random[kMadeKeyBytes];
  if (getrandom(random, sizeof(random), 0) != sizeof(random)) return base::ErrnoStatus(errno, "getrandom");
  std::string text = absl::StrCat(absl::BytesToHexString(absl::string_view(random, sizeof(random))), "\n");
  std::string draft = absl::StrCat(".", absl::Hex(base::NewIncarnation().value()), ".new");
  int fd = openat(directory, draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return base::ErrnoStatus(errno, absl::StrCat("make a job key beside ", path));
  absl::Cleanup remove = [&] { unlinkat(directory, draft.c_str(), 0); };
  ssize_t written = write(fd, text.data(), text.size());
  int error = written < 0 ? errno : ENOSPC;
  close(fd);
  if (written != static_cast<ssize_t>(text.size())) {
    return base::ErrnoStatus(error, absl::StrCat("write a job key beside ", path));
  }
  if (linkat(directory, draft.c_str(), directory, entry.c_str(), 0) != 0 && errno != EEXIST) {
    return base::ErrnoStatus(errno, absl::StrCat("make the job key ", path));
  }
  return absl::OkStatus();
}

absl::StatusOr<int> OpenDirectory(const std::string& directory) {
  if (mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    return base::ErrnoStatus(errno, absl::StrCat("make the directory ", directory, " for the job key"));
  }
  int fd = open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return base::ErrnoStatus(errno, absl::StrCat("open the directory ", directory));
  struct stat info {};
  absl::Status status = fstat(fd, &info) == 0 ? base::CheckPrivate(info, directory)
                                              : base::ErrnoStatus(errno, absl::StrCat("stat ", directory));
  if (status.ok() && info.st_uid != geteuid()) {
    status = absl::PermissionDeniedError(
        absl::StrCat(directory, " belongs to user ", info.st_uid, ", not to us (", geteuid(), ")"));
  }
  if (!status.ok()) {
    close(fd);
    return status;
  }
  return fd;
}

bool SameFile(int directory, const std::string& entry, const struct stat& open_file) {
  struct stat now {};
  return fstatat(directory, entry.c_str(), &now, AT_SYMLINK_NOFOLLOW) == 0 &&
         now.st_dev == open_file.st_dev && now.st_ino == open_file.st_ino;
}

absl::StatusOr<std::string> KeyOf(int fd, const struct stat& info, const std::string& path) {
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  }
  ATOLL_RETURN_IF_ERROR(base::CheckPrivate(info, path));
  ATOLL_ASSIGN_OR_RETURN(std::string key, ReadAll(fd, path));
  if (!key.empty() && key.back() == '\n') key.pop_back();
  ATOLL_RETURN_IF_ERROR(base::Annotate(CheckKey(key), path));
  return key;
}

}  // namespace

absl::Status CheckKey(absl::string_view key) {
  if (key.size() >= kMinKeyBytes && key.size() <= kMaxKeyBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "a job key of ", key.size() > kMaxKeyBytes ? "too many" : absl::StrCat(key.size()).c_str(),
      " bytes: it should have ", kMinKeyBytes, " to ", kMaxKeyBytes, " (head -c 32 /dev/urandom | base64)"));
}

absl::StatusOr<std::string> ReadKeyFile(const std::string& path) {
  // Not blocking: a FIFO in its place must not hold us.
  int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return base::ErrnoStatus(errno, absl::StrCat("open the key file ", path));
  absl::Cleanup closer = [fd] { close(fd); };
  struct stat info {};
  if (fstat(fd, &info) != 0) return base::ErrnoStatus(errno, absl::StrCat("stat ", path));
  return KeyOf(fd, info, path);
}

SharedKeyFile::SharedKeyFile(int directory, int file, std::string entry, std::string path, std::string key)
    : directory_(directory),
      file_(file),
      entry_(std::move(entry)),
      path_(std::move(path)),
      key_(std::move(key)) {}

SharedKeyFile::~SharedKeyFile() {
  // Nobody else holds it: whoever opens it before it is gone notices, and makes another.
  struct stat info {};
  if (!fork_mark_.in_child() && flock(file_, LOCK_EX | LOCK_NB) == 0 && fstat(file_, &info) == 0 &&
      SameFile(directory_, entry_, info)) {
    unlinkat(directory_, entry_.c_str(), 0);
  }
  close(file_);
  close(directory_);
}

absl::StatusOr<std::unique_ptr<SharedKeyFile>> SharedKeyFile::Open(const std::string& directory,
                                                                   absl::string_view job) {
  std::string entry = absl::StrCat("key-", job);
  if (absl::StrContains(entry, '/') || entry.size() > 200) {
    return absl::InvalidArgumentError(absl::StrCat("job id '", job, "' cannot name a file"));
  }
  std::string path = absl::StrCat(directory, "/", entry);
  ATOLL_ASSIGN_OR_RETURN(int directory_fd, OpenDirectory(directory));
  absl::Cleanup close_directory = [directory_fd] { close(directory_fd); };
  for (int tries = 0; tries < kMaxTries; ++tries) {
    int fd = openat(directory_fd, entry.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT) {
      ATOLL_RETURN_IF_ERROR(MakeKey(directory_fd, entry, path));
      continue;
    }
    if (fd < 0) return base::ErrnoStatus(errno, absl::StrCat("open the job key ", path));
    absl::Cleanup close_file = [fd] { close(fd); };
    struct stat info {};
    if (flock(fd, LOCK_SH) != 0 || fstat(fd, &info) != 0) {
      return base::ErrnoStatus(errno, absl::StrCat("lock the job key ", path));
    }
    if (!SameFile(directory_fd, entry, info)) continue;  // Its last holder removed it meanwhile.
    absl::StatusOr<std::string> key = KeyOf(fd, info, path);
    if (!key.ok()) return key.status();
    std::move(close_file).Cancel();
    std::move(close_directory).Cancel();
    return std::unique_ptr<SharedKeyFile>(
        new SharedKeyFile(directory_fd, fd, std::move(entry), std::move(path), *std::move(key)));
  }
  return absl::UnavailableError(
      absl::StrCat("the job key ", path, " was removed by others ", kMaxTries, " times in a row"));
}

std::string SharedKeyDirectory(const Environment& environment) {
  std::string runtime = environment("XDG_RUNTIME_DIR").value_or("");
  struct stat info {};
  if (!runtime.empty() && stat(runtime.c_str(), &info) == 0 && S_ISDIR(info.st_mode) &&
      info.st_uid == geteuid() && (info.st_mode & 0700) == 0700) {
    return absl::StrCat(runtime, "/atoll");
  }
  return absl::StrCat("/tmp/atoll-", geteuid());
}

absl::StatusOr<std::unique_ptr<SharedKeyFile>> EnsureJobKey(Launch& launch, const Environment& environment) {
  if (!launch.key.empty()) return std::unique_ptr<SharedKeyFile>();
  if (!OnOneHost(launch)) {
    return absl::InvalidArgumentError(
        "the job has no key, and its ranks are not all on this host: give all of them the same one "
        "(--key_file or ATOLL_KEY_FILE: a file of 16 to 4096 bytes that only you can read, made with "
        "'head -c 32 /dev/urandom | base64 > key; chmod 600 key')");
  }
  ATOLL_ASSIGN_OR_RETURN(std::unique_ptr<SharedKeyFile> file,
                         SharedKeyFile::Open(SharedKeyDirectory(environment), launch.job));
  launch.key = file->key();
  return file;
}

}  // namespace Atoll::cluster
