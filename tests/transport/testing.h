// Endpoints and blocking calls for tests of transport.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>

#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "atoll/base/future.h"
#include "atoll/base/ids.h"
#include "atoll/tests/transport/certificates.h"
#include "atoll/transport/endpoint.h"
#include "atoll/transport/pipe.h"

namespace Atoll::transport::testing {

/// A hang limit, far above what anything here takes.
inline constexpr absl::Duration kLimit = absl::Seconds(60);
inline constexpr char kKey[] = "sixteen bytes or more of a test key";

/// Waits for counters, which tell nobody when they change. False at the limit.
template <class Condition>
bool Poll(Condition&& condition) {
  for (int64_t left_ms = absl::ToInt64Milliseconds(kLimit); left_ms > 0; --left_ms) {
    if (condition()) return true;
    poll(nullptr, 0, 1);
  }
  return false;
}

enum class Way { kTcp4, kTcp6, kUnix, kTcpPsk, kTcpCert };

inline std::string WayName(Way way) {
  switch (way) {
    case Way::kTcp4:
      return "TcpV4";
    case Way::kTcp6:
      return "TcpV6";
    case Way::kUnix:
      return "Unix";
    case Way::kTcpPsk:
      return "TcpPsk";
    case Way::kTcpCert:
      return "TcpCert";
  }
  return "?";
}

inline EndpointOptions Options(const std::string& name, Way way = Way::kTcp4) {
  EndpointOptions options;
  options.job = "test";
  options.self = {name, base::NewIncarnation()};
  options.key.bytes = kKey;
  options.bind = way == Way::kTcp6 ? "::1" : "127.0.0.1";
  options.enable_unix = way == Way::kUnix;
  if (way == Way::kTcpPsk) options.tls.mode = base::TlsMode::kPsk;
  if (way == Way::kTcpCert) options.tls = SharedIdentity();
  return options;
}

/// False where the machine has no ::1.
inline bool Possible(Way way) { return way != Way::kTcp6 || CreateEndpoint(Options("probe", way)).ok(); }

/// An endpoint and the pipes that came to it.
class Member {
 public:
  explicit Member(EndpointOptions options) : options_(options) {
    auto endpoint = CreateEndpoint(std::move(options));
    EXPECT_TRUE(endpoint.ok()) << endpoint.status();
    endpoint_ = *std::move(endpoint);
    endpoint_->OnPipe([this](std::shared_ptr<Pipe> pipe) {
      absl::MutexLock lock(&mu_);
      pipes_.push_back(std::move(pipe));
    });
  }
  ~Member() {
    endpoint_->Close();
    endpoint_->Join();
  }
  Endpoint& endpoint() { return *endpoint_; }
  const EndpointOptions& options() const { return options_; }
  base::MemberId id() const { return options_.self; }

  /// The next pipe that a peer opened; null if none comes.
  std::shared_ptr<Pipe> Accepted() {
    absl::MutexLock lock(&mu_);
    auto any = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return !pipes_.empty(); };
    if (!mu_.AwaitWithTimeout(absl::Condition(&any), kLimit)) return nullptr;
    std::shared_ptr<Pipe> pipe = std::move(pipes_.front());
    pipes_.pop_front();
    return pipe;
  }

  absl::StatusOr<std::shared_ptr<Pipe>> Connect(std::vector<std::string> addresses,
                                                base::MemberId expected = {}, Lane lane = Lane::kControl,
                                                absl::Duration limit = kLimit) {
    base::Promise<std::shared_ptr<Pipe>> promise;
    endpoint_->Connect(
        std::move(addresses), std::move(expected), lane, limit,
        [promise](absl::StatusOr<std::shared_ptr<Pipe>> pipe) { promise.Set(std::move(pipe)); });
    return promise.future().Wait(2 * kLimit);
  }
  absl::StatusOr<std::shared_ptr<Pipe>> Connect(Member& peer, Lane lane = Lane::kControl) {
    return Connect(peer.endpoint().addresses(), peer.id(), lane);
  }

 private:
  const EndpointOptions options_;
  std::shared_ptr<Endpoint> endpoint_;
  absl::Mutex mu_;
  std::deque<std::shared_ptr<Pipe>> pipes_ ABSL_GUARDED_BY(mu_);
};

/// Two members and a pipe between them.
struct PipePair {
  void Connect() {
    auto pipe = client_->Connect(*server_);
    ASSERT_TRUE(pipe.ok()) << pipe.status();
    near_ = *pipe;
    far_ = server_->Accepted();
    ASSERT_NE(far_, nullptr);
  }

  std::unique_ptr<Member> server_, client_;
  std::shared_ptr<Pipe> near_, far_;
};

inline base::Future<base::Unit> StartWrite(Pipe& pipe, Message message) {
  base::Promise<base::Unit> promise;
  pipe.Write(std::move(message), [promise](absl::Status status) {
    if (status.ok()) {
      promise.Set(base::Unit{});
    } else {
      promise.Set(status);
    }
  });
  return promise.future();
}

inline absl::Status Write(Pipe& pipe, Message message) {
  return StartWrite(pipe, std::move(message)).Wait(kLimit).status();
}

inline base::Future<Descriptor> StartReadDescriptor(Pipe& pipe) {
  base::Promise<Descriptor> promise;
  pipe.ReadDescriptor(
      [promise](absl::StatusOr<Descriptor> descriptor) { promise.Set(std::move(descriptor)); });
  return promise.future();
}

inline absl::StatusOr<Descriptor> ReadDescriptor(Pipe& pipe) {
  return StartReadDescriptor(pipe).Wait(kLimit);
}

inline absl::Status Read(Pipe& pipe, std::vector<Buffer> into) {
  base::Promise<base::Unit> promise;
  pipe.Read(std::move(into), [promise](absl::Status status) {
    if (status.ok()) {
      promise.Set(base::Unit{});
    } else {
      promise.Set(status);
    }
  });
  return promise.future().Wait(kLimit).status();
}

/// A whole message, its tensors in strings.
struct Received {
  std::string header;
  std::vector<std::string> tensors;
};

inline absl::StatusOr<Received> Receive(Pipe& pipe) {
  absl::StatusOr<Descriptor> descriptor = ReadDescriptor(pipe);
  if (!descriptor.ok()) return descriptor.status();
  Received received;
  received.header = std::move(descriptor->header);
  std::vector<Buffer> into;
  for (const Descriptor::Tensor& tensor : descriptor->tensors)
    received.tensors.emplace_back(tensor.bytes, '\0');
  for (std::string& tensor : received.tensors) into.push_back({tensor.data(), tensor.size(), {}, nullptr});
  if (into.empty()) return received;
  absl::Status status = Read(pipe, std::move(into));
  if (!status.ok()) return status;
  return received;
}

/// Bytes that differ at each place and for each seed.
inline std::string Pattern(size_t bytes, uint64_t seed) {
  std::string text(bytes, '\0');
  uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
  size_t i = 0;
  for (; i + 8 <= bytes; i += 8) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::memcpy(&text[i], &state, 8);
  }
  std::memcpy(text.data() + i, &state, bytes - i);
  return text;
}

inline Message MessageOf(std::string header, std::vector<std::string>& tensors) {
  Message message;
  message.header = std::move(header);
  for (std::string& tensor : tensors) message.tensors.push_back({tensor.data(), tensor.size(), {}, nullptr});
  return message;
}

}  // namespace Atoll::transport::testing
