// What the tests of rref share: an object that records what happens to it, and members that know each other.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "atoll/base/clock.h"
#include "atoll/rref/rref.h"
#include "atoll/transport/endpoint.h"

namespace Atoll::rref {

inline constexpr absl::Duration kHang = absl::Seconds(60);

/// What all objects of a test's class have seen.
class Record {
 public:
  void Made() {
    absl::MutexLock lock(&mu_);
    ++made_;
    ++alive_;
  }
  void Destroyed() {
    absl::MutexLock lock(&mu_);
    --alive_;
    last_destroyed_on_ = std::this_thread::get_id();
  }
  void Allocated() {
    std::function<void()> hook;
    {
      absl::MutexLock lock(&mu_);
      ++allocated_;
      hook = on_allocate_;
    }
    if (hook) hook();
  }
  /// Runs in each allocation for a request's tensors from now on.
  void OnAllocate(std::function<void()> hook) {
    absl::MutexLock lock(&mu_);
    on_allocate_ = std::move(hook);
  }
  std::thread::id last_destroyed_on() const {
    absl::MutexLock lock(&mu_);
    return last_destroyed_on_;
  }
  void Gone(const std::string& member) {
    absl::MutexLock lock(&mu_);
    gone_.push_back(member);
  }
  int made() const {
    absl::MutexLock lock(&mu_);
    return made_;
  }
  int alive() const {
    absl::MutexLock lock(&mu_);
    return alive_;
  }
  int allocated() const {
    absl::MutexLock lock(&mu_);
    return allocated_;
  }
  bool AwaitAlive(int count) const {
    auto reached = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return alive_ == count; };
    absl::MutexLock lock(&mu_);
    return base::AwaitFor(mu_, absl::Condition(&reached), kHang);
  }
  bool AwaitGone(const std::vector<std::string>& members) const {
    auto reached = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return gone_ == members; };
    absl::MutexLock lock(&mu_);
    return base::AwaitFor(mu_, absl::Condition(&reached), kHang);
  }

 private:
  mutable absl::Mutex mu_;
  int made_ ABSL_GUARDED_BY(mu_) = 0, alive_ ABSL_GUARDED_BY(mu_) = 0, allocated_ ABSL_GUARDED_BY(mu_) = 0;
  std::function<void()> on_allocate_ ABSL_GUARDED_BY(mu_);
  std::thread::id last_destroyed_on_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> gone_ ABSL_GUARDED_BY(mu_);
};

/// Methods: "get" gives the text it was made with, "add_one" its tensors plus one, "pages" says of each
/// tensor whether it begins on a page, "hang" never answers.
class TestObject : public Object {
 public:
  TestObject(std::string text, Record* record) : text_(std::move(text)), record_(record) { record_->Made(); }
  ~TestObject() override { record_->Destroyed(); }

  void Call(rpc::ServerCall call) override {
    rpc::Payload reply;
    if (call.method.name == "get") {
      reply.body = text_ + call.request.body;
    } else if (call.method.name == "add_one") {
      for (at::Tensor& tensor : call.request.tensors) reply.tensors.push_back(rpc::Copy(tensor.add(1)));
    } else if (call.method.name == "pages") {
      for (const at::Tensor& tensor : call.request.tensors) {
        reply.body += reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 4096 == 0 ? 'y' : 'n';
      }
    } else if (call.method.name == "hang") {
      absl::MutexLock lock(&mu_);
      hanging_.push_back(std::move(call.responder));
      return;
    } else {
      return std::move(call.responder).Reply(absl::UnimplementedError("no method " + call.method.name));
    }
    std::move(call.responder).Reply(std::move(reply));
  }
  absl::StatusOr<std::vector<at::Tensor>> Allocate(const base::MemberId& caller, const rpc::MethodId& method,
                                                   absl::string_view body,
                                                   absl::Span<const rpc::TensorMeta> metas) override {
    if (body == "refuse") return absl::ResourceExhaustedError("no room");
    if (!metas.empty()) record_->Allocated();
    return Object::Allocate(caller, method, body, metas);
  }
  void OnPeerGone(const base::MemberId& member, const absl::Status&) override { record_->Gone(member.name); }

 private:
  const std::string text_;
  Record* const record_;
  absl::Mutex mu_;
  std::vector<rpc::Responder> hanging_ ABSL_GUARDED_BY(mu_);
};

inline Factory TestFactory(Record* record, absl::Notification* proceed = nullptr) {
  return [record, proceed](const base::MemberId&,
                           rpc::Received arguments) -> absl::StatusOr<std::shared_ptr<Object>> {
    if (proceed != nullptr) proceed->WaitForNotification();
    if (arguments.body == "fail") return absl::InvalidArgumentError("asked to fail");
    if (arguments.body == "throw") throw std::runtime_error("asked to throw");
    if (arguments.body == "throw 7") throw 7;
    return std::make_shared<TestObject>(arguments.body, record);
  };
}

inline rpc::Payload Body(std::string body) {
  rpc::Payload payload;
  payload.body = std::move(body);
  return payload;
}

/// Members with objects of their own, that all know each other.
class SpacesTest : public ::testing::Test {
 protected:
  struct Member {
    std::shared_ptr<transport::Endpoint> endpoint;
    std::unique_ptr<rpc::Agent> agent;
    std::unique_ptr<ObjectSpace> objects;
    ~Member() {
      objects.reset();
      agent.reset();
    }
  };
  Member& Start(const std::string& name) {
    transport::EndpointOptions endpoint;
    endpoint.job = "object-space-test";
    endpoint.self = {name, base::NewIncarnation()};
    endpoint.key.bytes = "a key of at least sixteen bytes";
    auto member = std::make_unique<Member>();
    member->endpoint = *transport::CreateEndpoint(endpoint);
    rpc::AgentOptions options;
    options.self = endpoint.self;
    options.endpoint = member->endpoint;
    member->agent = *rpc::Agent::Start(options);
    member->objects = *ObjectSpace::Create(member->agent.get());
    for (auto& [other, known] : members_) {
      known->agent->AddPeer({member->agent->self(), member->agent->addresses()});
      member->agent->AddPeer({known->agent->self(), known->agent->addresses()});
    }
    return *(members_[name] = std::move(member));
  }
  void TearDown() override { members_.clear(); }

  std::map<std::string, std::unique_ptr<Member>> members_;
};

/// Makes a call that cannot be sent, with a loan. Expects that the loan ends, then the call, each once and in
/// another thread than this: a caller may hold what they lock.
inline absl::Status RefusedElsewhere(const RRef& rref, const std::string& method) {
  absl::Notification done;
  absl::Status status;
  std::thread::id returned_on, replied_on;
  rpc::Payload request;
  request.tensors.push_back(rpc::Lend(at::zeros({4}), [&] {
    EXPECT_EQ(returned_on, std::thread::id());
    returned_on = std::this_thread::get_id();
  }));
  rref.Call({method}, std::move(request), {}, [&](absl::StatusOr<rpc::Received> reply) {
    replied_on = std::this_thread::get_id();
    EXPECT_NE(returned_on, std::thread::id());
    status = reply.status();
    done.Notify();
  });
  EXPECT_TRUE(done.WaitForNotificationWithTimeout(kHang));
  EXPECT_NE(returned_on, std::this_thread::get_id());
  EXPECT_NE(replied_on, std::this_thread::get_id());
  EXPECT_EQ(base::GetRan(status), base::Ran::kNo) << status;
  return status;
}

}  // namespace Atoll::rref
