// A transport inside one process, that can be cut at will: endpoints by name, pipes that copy. For tests of
// what stands on transport. Callbacks run on one loop thread an endpoint, as the contract says.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "atoll/base/executor.h"
#include "atoll/transport/endpoint.h"
#include "atoll/transport/refusal.h"

namespace Atoll::rpc {

class FakeNetwork : public std::enable_shared_from_this<FakeNetwork> {
 public:
  static std::shared_ptr<FakeNetwork> Create() { return std::shared_ptr<FakeNetwork>(new FakeNetwork); }
  std::shared_ptr<transport::Endpoint> CreateEndpoint(base::MemberId self,
                                                      transport::MessageLimits limits = {}) {
    auto endpoint = std::make_shared<EndpointImpl>(shared_from_this(), std::move(self), limits);
    absl::MutexLock lock(&mu_);
    endpoints_[absl::StrCat("fake:", endpoint->self_.name)] = endpoint;
    return endpoint;
  }

  /// Ends every pipe between the two, as a cut cable would.
  void Cut(const std::string& a, const std::string& b) {
    std::vector<std::shared_ptr<PipeImpl>> pipes;
    {
      absl::MutexLock lock(&mu_);
      for (const auto& weak : pipes_) {
        auto pipe = weak.lock();
        if (pipe == nullptr) continue;
        std::pair<std::string, std::string> ends(pipe->self_name_, pipe->peer_.member.name);
        if (ends == std::pair(a, b) || ends == std::pair(b, a)) pipes.push_back(pipe);
      }
    }
    for (const auto& pipe : pipes) pipe->Close(absl::UnavailableError("the cable was cut"));
  }
  /// The next `count` reads of tensors copy half of their bytes, and then the pipe is cut.
  void CutReads(int count) { cut_reads_.store(count); }
  /// While set, reads of tensors copy half and then wait: until it is unset, or the pipe ends.
  void HoldReads(bool hold) {
    std::vector<std::shared_ptr<PipeImpl>> pipes;
    {
      absl::MutexLock lock(&mu_);
      hold_reads_ = hold;
      for (const auto& weak : pipes_) {
        if (auto pipe = weak.lock()) pipes.push_back(pipe);
      }
    }
    for (const auto& pipe : pipes) pipe->ContinueRead();
  }
  int held_reads() const {
    absl::MutexLock lock(&mu_);
    return held_reads_;
  }
  /// From now on a read that is held ends well when its pipe ends: its bytes were all there.
  void FinishReadsAtTheEnd() {
    absl::MutexLock lock(&mu_);
    finish_reads_ = true;
  }
  /// The endpoint of `name` breaks, as one where a callback threw: its pipes end, and it connects no more.
  void Break(const std::string& name) {
    std::shared_ptr<EndpointImpl> endpoint;
    {
      absl::MutexLock lock(&mu_);
      endpoint = endpoints_[absl::StrCat("fake:", name)].lock();
    }
    if (endpoint != nullptr) endpoint->Break();
  }
  /// From now on no connection is made: each fails with Unavailable and this text, as where a network is away.
  void SetUnreachable(std::string why) {
    absl::MutexLock lock(&mu_);
    unreachable_ = std::move(why);
  }
  uint64_t connects() const { return connects_.load(); }
  uint64_t messages() const { return messages_.load(); }
  int cut_reads_left() const { return cut_reads_.load(); }

 private:
  FakeNetwork() = default;

  // Runs callbacks in order on a thread of its own.
  class Loop {
   public:
    Loop() : thread_([this] { Run(); }) {}
    ~Loop() { Join(); }
    // After the end of the thread a task is dropped: it would hold what holds the loop.
    void Post(base::Task task) {
      absl::MutexLock lock(&mu_);
      if (!ended_) tasks_.push_back(std::move(task));
    }
    void Join() {
      {
        absl::MutexLock lock(&mu_);
        stop_ = true;
      }
      if (thread_.joinable()) thread_.join();
    }

   private:
    void Run() {
      auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return stop_ || !tasks_.empty(); };
      while (true) {
        base::Task task;
        {
          absl::MutexLock lock(&mu_);
          mu_.Await(absl::Condition(&ready));
          if (tasks_.empty()) {
            ended_ = true;
            return;
          }
          task = std::move(tasks_.front());
          tasks_.pop_front();
        }
        std::move(task)();
      }
    }
    absl::Mutex mu_;
    std::deque<base::Task> tasks_ ABSL_GUARDED_BY(mu_);
    bool stop_ ABSL_GUARDED_BY(mu_) = false;
    bool ended_ ABSL_GUARDED_BY(mu_) = false;
    std::thread thread_;
  };

  struct Packet {
    transport::Descriptor descriptor;
    std::vector<std::string> tensors;
  };

  class PipeImpl : public transport::Pipe, public std::enable_shared_from_this<PipeImpl> {
   public:
    PipeImpl(std::shared_ptr<FakeNetwork> network, std::shared_ptr<Loop> loop, std::string self_name,
             transport::PeerInfo peer)
        : network_(std::move(network)),
          loop_(std::move(loop)),
          self_name_(std::move(self_name)),
          peer_(std::move(peer)) {}

    void Write(transport::Message message, absl::AnyInvocable<void(absl::Status)> done) override {
      network_->messages_.fetch_add(1);
      if (absl::Status above = Above(ours_, message); !above.ok()) {
        return std::move(done)(transport::MessageError(above));
      }
      if (absl::Status above = Above(theirs_, message); !above.ok()) {
        Close(above);
        return std::move(done)(above);
      }
      Packet packet;
      packet.descriptor.header = std::move(message.header);
      for (const auto& buffer : message.tensors) {
        packet.descriptor.tensors.push_back({buffer.bytes, {}, {}});
        packet.tensors.emplace_back(static_cast<const char*>(buffer.data), buffer.bytes);
      }
      absl::Status status;
      std::shared_ptr<PipeImpl> other;
      {
        absl::MutexLock lock(&network_->mu_);
        status = closed_;
        other = other_.lock();
        if (status.ok() && other != nullptr) other->inbox_.push_back(std::move(packet));
      }
      if (other != nullptr && status.ok()) other->Deliver();
      std::move(done)(status);  // Inline, as the contract allows: the worst case for the caller's locks.
    }
    void ReadDescriptor(absl::AnyInvocable<void(absl::StatusOr<transport::Descriptor>)> done) override {
      {
        absl::MutexLock lock(&network_->mu_);
        waiting_ = std::move(done);
      }
      Deliver();
    }
    void Read(std::vector<transport::Buffer> into, absl::AnyInvocable<void(absl::Status)> done) override {
      {
        absl::MutexLock lock(&network_->mu_);
        into_ = std::move(into);
        read_done_ = std::move(done);
      }
      ContinueRead();
    }
    // One step of a read that waits, if it may go on.
    void ContinueRead() {
      loop_->Post([self = shared_from_this()] {
        std::vector<std::string> tensors;
        std::vector<transport::Buffer> into;
        absl::AnyInvocable<void(absl::Status)> done;
        absl::Status status;
        bool half = false;
        {
          absl::MutexLock lock(&self->network_->mu_);
          if (!self->read_done_) return;
          status = self->closed_;
          if (self->network_->finish_reads_ && !status.ok()) status = absl::OkStatus();
          half = self->closed_.ok() && self->network_->hold_reads_;
          into = self->into_;
          if (half) {
            tensors = self->arriving_;
            ++self->network_->held_reads_;
          } else {
            tensors = std::move(self->arriving_);
            done = std::move(self->read_done_);
            self->read_done_ = nullptr;
          }
        }
        bool cut = status.ok() && !half && self->network_->cut_reads_.load() > 0;
        if (status.ok()) {
          for (size_t i = 0; i < into.size(); ++i) {
            std::memcpy(into[i].data, tensors[i].data(), half || cut ? into[i].bytes / 2 : into[i].bytes);
          }
        }
        if (half) return;
        if (cut) {
          self->network_->cut_reads_.fetch_sub(1);
          status = absl::UnavailableError("the cable was cut in the middle");
          self->Close(status);
        }
        std::move(done)(status);
      });
    }
    void Close(absl::Status reason) override {
      std::shared_ptr<PipeImpl> other;
      {
        absl::MutexLock lock(&network_->mu_);
        if (!closed_.ok()) return;
        closed_ = reason;
        other = other_.lock();
        if (other != nullptr && other->closed_.ok()) {
          other->closed_ = absl::UnavailableError("the other side closed the pipe");
        }
      }
      Deliver();
      ContinueRead();
      if (other != nullptr) {
        other->Deliver();
        other->ContinueRead();
      }
    }
    const transport::PeerInfo& peer() const override { return peer_; }

    // Gives the waiting reader what there is.
    void Deliver() {
      loop_->Post([self = shared_from_this()] {
        absl::AnyInvocable<void(absl::StatusOr<transport::Descriptor>)> done;
        absl::StatusOr<transport::Descriptor> result = transport::Descriptor();
        {
          absl::MutexLock lock(&self->network_->mu_);
          if (!self->waiting_) return;
          if (!self->closed_.ok()) {
            result = self->closed_;
          } else if (!self->inbox_.empty()) {
            result = std::move(self->inbox_.front().descriptor);
            self->arriving_ = std::move(self->inbox_.front().tensors);
            self->inbox_.pop_front();
          } else {
            return;
          }
          done = std::move(self->waiting_);
          self->waiting_ = nullptr;
        }
        std::move(done)(std::move(result));
      });
    }

    static absl::Status Above(const transport::MessageLimits& limits, const transport::Message& message) {
      bool above =
          message.header.size() > limits.max_header_bytes || message.tensors.size() > limits.max_tensors;
      for (const auto& buffer : message.tensors) above = above || buffer.bytes > limits.max_tensor_bytes;
      return above ? absl::InvalidArgumentError("a message above the limits") : absl::OkStatus();
    }

    const std::shared_ptr<FakeNetwork> network_;
    const std::shared_ptr<Loop> loop_;
    transport::MessageLimits ours_, theirs_;  // Set once, before it is used.
    const std::string self_name_;
    const transport::PeerInfo peer_;
    // Under the network's mutex.
    std::weak_ptr<PipeImpl> other_;
    std::deque<Packet> inbox_;
    std::vector<std::string> arriving_;
    std::vector<transport::Buffer> into_;
    absl::AnyInvocable<void(absl::Status)> read_done_;
    absl::AnyInvocable<void(absl::StatusOr<transport::Descriptor>)> waiting_;
    absl::Status closed_;
  };

  class EndpointImpl : public transport::Endpoint {
   public:
    EndpointImpl(std::shared_ptr<FakeNetwork> network, base::MemberId self, transport::MessageLimits limits)
        : self_(std::move(self)),
          limits_(limits),
          network_(std::move(network)),
          loop_(std::make_shared<Loop>()) {}
    ~EndpointImpl() override {
      Close();
      Join();
    }
    std::vector<std::string> addresses() const override { return {absl::StrCat("fake:", self_.name)}; }
    int port() const override { return 1; }
    transport::MessageLimits limits() const override { return limits_; }
    void OnBroken(absl::AnyInvocable<void(absl::Status)> on_broken) override {
      absl::MutexLock lock(&network_->mu_);
      on_broken_ = std::move(on_broken);
    }
    void Break() {
      const absl::Status status = absl::InternalError("a callback threw");
      {
        absl::MutexLock lock(&network_->mu_);
        broken_ = status;
      }
      loop_->Post([this, status] {
        ClosePipes(status);
        if (on_broken_) on_broken_(status);
      });
    }
    void OnPipe(absl::AnyInvocable<void(std::shared_ptr<transport::Pipe>)> on_pipe) override {
      absl::MutexLock lock(&network_->mu_);
      on_pipe_ = std::move(on_pipe);
      for (auto& pipe : early_) loop_->Post([this, pipe] { on_pipe_(pipe); });
      early_.clear();
    }
    void Connect(std::vector<std::string> addresses, base::MemberId expected, transport::Lane lane,
                 absl::Duration limit,
                 absl::AnyInvocable<void(absl::StatusOr<std::shared_ptr<transport::Pipe>>)> done) override {
      network_->connects_.fetch_add(1);
      absl::StatusOr<std::shared_ptr<transport::Pipe>> result = Open(addresses, expected, lane);
      loop_->Post([done = std::move(done), result = std::move(result)]() mutable {
        std::move(done)(std::move(result));
      });
    }
    void Defer(absl::AnyInvocable<void()> task) override { loop_->Post(std::move(task)); }
    Counters counters() const override { return {}; }
    void Close() override {
      {
        absl::MutexLock lock(&network_->mu_);
        closed_ = true;
        network_->endpoints_.erase(absl::StrCat("fake:", self_.name));
      }
      ClosePipes(absl::CancelledError("the endpoint is closed"));
    }
    void Join() override { loop_->Join(); }

   private:
    friend class FakeNetwork;
    void ClosePipes(const absl::Status& status) {
      std::vector<std::shared_ptr<PipeImpl>> pipes;
      {
        absl::MutexLock lock(&network_->mu_);
        for (const auto& weak : network_->pipes_) {
          auto pipe = weak.lock();
          if (pipe != nullptr && pipe->loop_ == loop_) pipes.push_back(pipe);
        }
      }
      for (const auto& pipe : pipes) pipe->Close(status);
    }
    absl::StatusOr<std::shared_ptr<transport::Pipe>> Open(const std::vector<std::string>& addresses,
                                                          const base::MemberId& expected,
                                                          transport::Lane lane) {
      absl::MutexLock lock(&network_->mu_);
      if (!network_->unreachable_.empty()) return absl::UnavailableError(network_->unreachable_);
      if (closed_) return absl::CancelledError("the endpoint is closed");
      if (!broken_.ok()) return broken_;
      std::shared_ptr<EndpointImpl> other;
      for (const std::string& address : addresses) {
        auto found = network_->endpoints_.find(address);
        if (found != network_->endpoints_.end()) other = found->second.lock();
        if (other != nullptr) break;
      }
      if (other == nullptr || other->closed_ || !other->broken_.ok())
        return transport::RefusedError("connect: Connection refused");
      if ((!expected.name.empty() && expected.name != other->self_.name) ||
          (expected.incarnation != base::Incarnation() && expected.incarnation != other->self_.incarnation)) {
        return absl::NotFoundError(absl::StrCat("it is ", other->self_.ToString()));
      }
      auto ours = std::make_shared<PipeImpl>(
          network_, loop_, self_.name,
          transport::PeerInfo{other->self_, lane, absl::StrCat("fake:", other->self_.name), true});
      auto theirs = std::make_shared<PipeImpl>(
          network_, other->loop_, other->self_.name,
          transport::PeerInfo{self_, lane, absl::StrCat("fake:", self_.name), false});
      ours->ours_ = theirs->theirs_ = limits_;
      ours->theirs_ = theirs->ours_ = other->limits_;
      ours->other_ = theirs;
      theirs->other_ = ours;
      network_->pipes_.push_back(ours);
      network_->pipes_.push_back(theirs);
      if (!other->on_pipe_) {
        other->early_.push_back(theirs);  // It waits for OnPipe.
      } else {
        other->loop_->Post([other = other.get(), theirs] { other->on_pipe_(theirs); });
      }
      return std::shared_ptr<transport::Pipe>(ours);
    }

    const base::MemberId self_;
    const transport::MessageLimits limits_;
    const std::shared_ptr<FakeNetwork> network_;
    const std::shared_ptr<Loop> loop_;
    absl::Status broken_;
    absl::AnyInvocable<void(absl::Status)> on_broken_;
    absl::AnyInvocable<void(std::shared_ptr<transport::Pipe>)> on_pipe_;
    std::vector<std::shared_ptr<PipeImpl>> early_;
    bool closed_ = false;
  };

  mutable absl::Mutex mu_;
  std::map<std::string, std::weak_ptr<EndpointImpl>> endpoints_ ABSL_GUARDED_BY(mu_);
  std::vector<std::weak_ptr<PipeImpl>> pipes_ ABSL_GUARDED_BY(mu_);
  std::string unreachable_ ABSL_GUARDED_BY(mu_);
  bool hold_reads_ ABSL_GUARDED_BY(mu_) = false;
  bool finish_reads_ ABSL_GUARDED_BY(mu_) = false;
  int held_reads_ ABSL_GUARDED_BY(mu_) = 0;
  std::atomic<int> cut_reads_{0};
  std::atomic<uint64_t> messages_{0};
  std::atomic<uint64_t> connects_{0};
};

}  // namespace Atoll::rpc
