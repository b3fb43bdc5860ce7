#include "atoll/cluster/agent_store.h"

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <functional>
#include <thread>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "atoll/base/future.h"
#include "atoll/base/status.h"
#include "atoll/base/text.h"

namespace Atoll::cluster {
namespace {

constexpr size_t kMaxAddressBytes = 512;

/// The world's size is part of it: an elastic job that changes it starts anew without a restart count, and
/// must not find the coordinator of before.
std::string CoordinatorKey(const Launch& launch) {
  return absl::StrCat("atoll/", launch.job, "/", launch.world_size, "/coordinator");
}

std::string StoreAddress(const Launch& launch) {
  return absl::StrCat("torchrun's store at ", launch.coordinator_host, ":", launch.coordinator_port);
}

/// c10d says everything with exceptions and texts of several lines (a backtrace): the first line is enough.
absl::Status StatusOf(const std::exception& error, const Launch& launch) {
  absl::string_view text = error.what();
  text = text.substr(0, text.find('\n'));
  std::string lower = absl::AsciiStrToLower(text);
  bool late = absl::StrContains(lower, "timeout") || absl::StrContains(lower, "timed out");
  std::string message = absl::StrCat(StoreAddress(launch), ": ", text);
  return late ? absl::DeadlineExceededError(message) : absl::UnavailableError(message);
}

/// Runs `use` with a client of the store, on a thread of its own: a process that holds the port and never
/// answers blocks c10d in recv without a limit. Such a thread is left behind; the process is about to fail.
absl::StatusOr<std::string> WithStore(const Launch& launch, absl::Duration limit,
                                      std::function<absl::StatusOr<std::string>(c10d::TCPStore&)> use) {
  base::Promise<std::string> promise;
  std::thread([launch, limit, promise, use = std::move(use)] {
    auto give_up = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(limit);
    absl::StatusOr<std::string> result;
    try {
      c10d::TCPStoreOptions options;
      options.port = static_cast<uint16_t>(launch.coordinator_port);
      options.waitWorkers = false;
      options.timeout = absl::ToChronoMilliseconds(limit);
      c10d::TCPStore store(launch.coordinator_host, options);
      auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(give_up - std::chrono::steady_clock::now());
      store.setTimeout(std::max(left, std::chrono::milliseconds(1)));
      result = use(store);
    } catch (const std::exception& error) {
      result = StatusOf(error, launch);
    }
    promise.Set(std::move(result));
  }).detach();
  // c10d's own limit comes first and says more.
  absl::StatusOr<std::string> result = promise.future().Wait(limit + absl::Seconds(2));
  if (absl::IsDeadlineExceeded(result.status())) {
    return base::Annotate(result.status(), StoreAddress(launch));
  }
  return result;
}

}  // namespace

absl::Status PublishCoordinator(const Launch& launch, absl::string_view host, int port,
                                absl::Duration limit) {
  std::string value =
      absl::StrContains(host, ':') ? absl::StrCat("[", host, "]:", port) : absl::StrCat(host, ":", port);
  auto publish = [key = CoordinatorKey(launch), value](c10d::TCPStore& store) -> absl::StatusOr<std::string> {
    store.set(key, std::vector<uint8_t>(value.begin(), value.end()));
    // A read back says that the store has it: set alone only hands it to the socket.
    store.get(key);
    return std::string();
  };
  return base::Annotate(WithStore(launch, limit, publish).status(), "publish the coordinator's address");
}

absl::StatusOr<std::string> FindCoordinator(const Launch& launch, absl::Duration limit) {
  auto find = [key = CoordinatorKey(launch)](c10d::TCPStore& store) -> absl::StatusOr<std::string> {
    std::vector<uint8_t> value = store.get(key);
    return std::string(value.begin(), value.end());
  };
  absl::StatusOr<std::string> address = WithStore(launch, limit, find);
  if (!address.ok()) {
    return base::Annotate(address.status(), absl::StrCat("find the coordinator (rank 0) of job ", launch.job,
                                                         " within ", base::DurationText(limit)));
  }
  if (address->size() > kMaxAddressBytes || !absl::StrContains(*address, ':')) {
    return absl::DataLossError(absl::StrCat(StoreAddress(launch), " holds no address of a coordinator"));
  }
  return address;
}

absl::Status WriteTorchElasticError(absl::string_view message, const Environment& environment) {
  std::string path = environment("TORCHELASTIC_ERROR_FILE").value_or("");
  if (path.empty()) return absl::OkStatus();
  std::string text;
  for (char c : message) {
    if (c == '"' || c == '\\') {
      absl::StrAppend(&text, "\\", std::string(1, c));
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&text, "\\u%04x", static_cast<unsigned>(c));
    } else {
      text += c;
    }
  }
  // torchrun shows py_callstack.
  std::string json = absl::StrFormat(
      R"({"message": {"message": "%s", "extraInfo": {"py_callstack": "%s", "timestamp": "%d"}}})", text, text,
      absl::ToUnixSeconds(absl::Now()));
  std::FILE* file = std::fopen(path.c_str(), "we");
  if (file == nullptr) return base::ErrnoStatus(errno, absl::StrCat("open ", path));
  bool written = std::fwrite(json.data(), 1, json.size(), file) == json.size();
  if (std::fclose(file) != 0 || !written) return base::ErrnoStatus(errno, absl::StrCat("write ", path));
  return absl::OkStatus();
}

}  // namespace Atoll::cluster
