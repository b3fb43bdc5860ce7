// What an agent does when its connections break or crawl: cuts in the middle, small windows, junk, replies that
// are landing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "agent_fixture.h"
#include "atoll/rpc/wire.h"

namespace Atoll::rpc {
namespace {

using base::GetRan;
using base::Ran;

class AgentCutTest : public AgentTest {};
INSTANTIATE_AGENT_TESTS(AgentCutTest);

// Where the fake transport holds a reply in the middle.
class HeldTest : public AgentTest {
 protected:
  /// "pull" answers with 4 MiB that stop before they land.
  void ServeHeldPull(Agent& agent) {
    ASSERT_TRUE(agent
                    .Register({"pull"},
                              [this](ServerCall call) {
                                network_->HoldReads(true);
                                Payload reply;
                                reply.tensors.push_back(Copy(at::ones({1 << 20})));
                                std::move(call.responder).Reply(std::move(reply));
                              })
                    .ok());
  }
};
INSTANTIATE_FAKE_AGENT_TESTS(HeldTest);

TEST_P(AgentCutTest, APushThatIsCutInTheMiddleArrivesOnce) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  constexpr int64_t kCount = 16 << 20;  // 64 MiB.
  std::atomic<int> ran{0}, allocated{0}, returned{0};
  MethodOptions options;
  options.allocate = [&](const base::MemberId&, absl::string_view,
                         absl::Span<const TensorMeta> metas) -> absl::StatusOr<std::vector<at::Tensor>> {
    // The header is here, the bytes are not.
    if (++allocated == 1 && !fake()) Cut("a", "b");
    return std::vector<at::Tensor>{at::empty(metas[0].sizes, at::kFloat)};
  };
  ASSERT_TRUE(b.Register(
                   {"push"},
                   [&](ServerCall call) {
                     ++ran;
                     Payload reply;
                     reply.tensors.push_back(Lend(call.request.tensors[0]));
                     std::move(call.responder).Reply(std::move(reply));
                   },
                   options)
                  .ok());
  if (fake()) network_->CutReads(2);
  at::Tensor sent = at::arange(kCount, at::kFloat);
  Payload request;
  request.tensors.push_back(Lend(sent, [&] { ++returned; }));
  CallOptions into;
  into.reply_into = {at::zeros({kCount})};
  auto reply = a.Call("b", {"push"}, std::move(request), into).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(ran, 1);
  EXPECT_EQ(allocated, 1);  // What had begun to land is used again.
  EXPECT_EQ(network_->cut_reads_left(), 0);
  EXPECT_TRUE(reply->tensors[0].equal(sent));
  EXPECT_TRUE(Eventually([&] { return returned == 1; }));
}

TEST_P(AgentCutTest, CutsDuringTrafficLoseAndRepeatNothing) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  constexpr int kCalls = 400;
  std::vector<std::atomic<int>> ran(2 * kCalls);
  auto serve = [&](Agent& agent, int base) {
    ASSERT_TRUE(agent
                    .Register({"count"},
                              [&ran, base](ServerCall call) {
                                ++ran[static_cast<size_t>(base + std::stoi(call.request.body))];
                                Payload reply = Body(call.request.body);
                                for (at::Tensor& tensor : call.request.tensors)
                                  reply.tensors.push_back(Copy(tensor));
                                std::move(call.responder).Reply(std::move(reply));
                              })
                    .ok());
  };
  serve(a, 0);
  serve(b, kCalls);
  std::atomic<bool> stop{false};
  std::atomic<int> ended{0};
  std::thread cutter([&] {
    // A cut after each tenth of the calls.
    for (int tenth = 0; tenth < 10 && !stop; ++tenth) {
      while (ended < tenth * 2 * kCalls / 10 && !stop) std::this_thread::yield();
      Cut("a", "b");
    }
  });
  std::vector<base::Future<Received>> futures;
  auto request = [&](int i) {
    Payload payload = Body(absl::StrCat(i));
    payload.tensors.push_back(Copy(at::full({i % 7 == 0 ? 50000 : 100}, i, at::kInt)));
    return payload;
  };
  for (int i = 0; i < kCalls; ++i) {
    for (auto [from, to] : {std::pair(&a, "b"), std::pair(&b, "a")}) {
      futures.push_back(from->Call(to, {"count"}, request(i)));
      futures.back().Then([&](const absl::StatusOr<Received>&) { ++ended; });
    }
  }
  for (int i = 0; i < 2 * kCalls; ++i) {
    auto reply = futures[static_cast<size_t>(i)].Wait(kHang);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->tensors[0][5].item<int>(), i / 2);
  }
  stop = true;
  cutter.join();
  // Callbacks run on the pool, perhaps after Wait has returned; they count in our frame.
  ASSERT_TRUE(Eventually([&] { return ended == 2 * kCalls; }));
  for (auto& count : ran) EXPECT_EQ(count, 1);
}

TEST_P(AgentCutTest, OppositeOrdersWithAWindowOfOneDoNotDeadlock) {
  AgentOptions small;
  small.window_bytes = 1;
  small.worker_threads = 1;
  Agent& owner = Start("owner", small);
  Agent& first = Start("first", small);
  Agent& second = Start("second", small);
  Introduce(first, owner);
  Introduce(second, owner);
  // A bucket is answered when it has come from both.
  absl::Mutex mu;
  std::map<std::string, std::vector<Responder>> buckets;
  ASSERT_TRUE(owner
                  .Register({"push"},
                            [&](ServerCall call) {
                              std::vector<Responder> complete;
                              {
                                absl::MutexLock lock(&mu);
                                auto& bucket = buckets[call.request.body];
                                bucket.push_back(std::move(call.responder));
                                if (bucket.size() == 2) complete.swap(bucket);
                              }
                              for (Responder& responder : complete) std::move(responder).Reply(Body(""));
                            })
                  .ok());
  std::vector<base::Future<Received>> futures;
  for (int i = 0; i < 20; ++i) {
    for (bool is_first : {true, false}) {
      Payload request = Body(absl::StrCat(is_first ? i : 19 - i));
      request.tensors.push_back(Copy(at::ones({i % 2 == 0 ? 100 : 100000})));
      futures.push_back((is_first ? first : second).Call("owner", {"push"}, std::move(request)));
    }
  }
  for (auto& future : futures) EXPECT_TRUE(future.Wait(kHang).ok());
}

TEST_P(AgentCutTest, ASmallWindowAndQueuePushBack) {
  AgentOptions small;
  small.window_bytes = 1000;
  small.queue_bytes = 1000;
  Agent& a = Start("a", small);
  Agent& b = Start("b");
  ServeEcho(b);
  // Nobody is there yet: everything queues.
  a.AddPeer({{"later", base::NewIncarnation()}, {}});
  std::vector<base::Future<Received>> futures;
  for (int i = 0; i < 20; ++i) futures.push_back(a.Call("later", {"echo"}, Body(std::string(300, 'x'))));
  absl::Status refused = futures.back().Wait(kHang).status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_EQ(GetRan(refused), Ran::kNo);
  a.RemovePeer(a.FindPeer("later")->id, absl::OkStatus());
  EXPECT_EQ(GetRan(futures[0].Wait(kHang).status()), Ran::kNo);
}

// Scenario users 19.
// A peer that knows the key and speaks nonsense.
TEST_P(AgentCutTest, JunkOfAnAuthenticatedPeerEndsItsPipesOnly) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServeEcho(b);
  std::mt19937 random(7);
  std::string request = EncodeRequest({"echo"}, absl::Seconds(1), false, {}, "x", {});
  std::vector<std::string> junk = {
      "", "x", std::string(48, '\0'), std::string(1000, '\xff'), request, EncodeHello({1, 0, {}})};
  for (int i = 0; i < 14; ++i) {
    std::string mutated = i % 2 == 0 ? request : EncodeHello({static_cast<uint64_t>(i + 2), 0, {"h:1"}});
    for (int k = 0; k < 4; ++k) mutated[random() % mutated.size()] = static_cast<char>(random());
    junk.push_back(mutated);
  }
  for (size_t i = 0; i < junk.size(); ++i) {
    base::MemberId self{absl::StrCat("junk", i), base::NewIncarnation()};
    auto endpoint = NewEndpoint(self);
    endpoint->OnPipe([](std::shared_ptr<transport::Pipe> pipe) { pipe->Close(absl::CancelledError("")); });
    base::Promise<std::shared_ptr<transport::Pipe>> promise;
    endpoint->Connect(b.addresses(), b.self(),
                      i % 2 == 0 ? transport::Lane::kControl : transport::Lane::kBulk, kHang,
                      [promise](auto pipe) { promise.Set(std::move(pipe)); });
    auto pipe = promise.future().Wait(kHang);
    ASSERT_TRUE(pipe.ok()) << pipe.status();
    // A good hello before it, every other time.
    if (i % 3 == 0) (*pipe)->Write({EncodeHello({1, 0, {}}), {}, {}}, [](const absl::Status&) {});
    (*pipe)->Write({junk[i], {}, {}}, [](const absl::Status&) {});
    float data[100] = {};
    (*pipe)->Write({junk[i], {{data, sizeof(data), {}, nullptr}}, {}}, [](const absl::Status&) {});
    ASSERT_TRUE(a.Call("b", {"echo"}, Body("honest")).Wait(kHang).ok());
    endpoint->Close();
    endpoint->Join();
  }
}

TEST_P(HeldTest, ADeadlineWhileTheReplyLandsGivesTheMemoryBack) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServeHeldPull(b);
  ServeEcho(b);
  at::Tensor into = at::zeros({1 << 20});
  CallOptions options;
  options.reply_into = {into};
  absl::Status status;
  // Until the reply had begun to land when the deadline came, however busy the machine is.
  for (options.timeout = absl::Milliseconds(200); options.timeout < kHang;
       options.timeout = 2 * *options.timeout) {
    status = a.Call("b", {"pull"}, Body(""), options).Wait(2 * kHang).status();
    if (!absl::IsDeadlineExceeded(status)) break;
    network_->HoldReads(false);
  }
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_EQ(GetRan(status), Ran::kYes);
  // The memory is ours again: what comes now goes elsewhere.
  into.zero_();
  network_->HoldReads(false);
  Payload big = Body("");
  big.tensors.push_back(Copy(at::ones({1 << 20})));
  ASSERT_TRUE(a.Call("b", {"echo"}, std::move(big)).Wait(kHang).ok());
  EXPECT_EQ(into.count_nonzero().item<int64_t>(), 0);
}

TEST_P(HeldTest, ADeathWhileTheReplyLandsGivesTheMemoryBack) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServeHeldPull(b);
  CallOptions options;
  options.reply_into = {at::zeros({1 << 20})};
  auto call = a.Call("b", {"pull"}, Body(""), options);
  ASSERT_TRUE(Eventually([&] { return network_->held_reads() > 0; }));
  a.RemovePeer(b.self(), absl::UnavailableError("its lease ended"));
  absl::Status status = call.Wait(kHang).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  network_->HoldReads(false);
  Stop("a");  // Else b, which has a reply to send, would wait for it as long as it may.
}

}  // namespace
}  // namespace Atoll::rpc
