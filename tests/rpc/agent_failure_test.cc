// What an agent does when things break: cuts, deaths, restarts, shutdowns, junk; and that loans come back.
#include <dirent.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <random>
#include <sstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "agent_fixture.h"
#include "atoll/base/log.h"
#include "atoll/rpc/wire.h"

namespace Atoll::rpc {
namespace {

using base::GetRan;
using base::Ran;
using ::testing::HasSubstr;

class AgentFailureTest : public AgentTest {};
INSTANTIATE_TEST_SUITE_P(Transports, AgentFailureTest, ::testing::Values(Over::kFake, Over::kReal),
                         [](const auto& info) { return info.param == Over::kFake ? "Fake" : "Real"; });

int CountEntries(const char* path) {
  DIR* dir = opendir(path);
  int count = 0;
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}

// What the descriptors of this process are, for the text of a failure.
std::string DescribeFiles() {
  std::string text;
  for (int fd = 0; fd < 1024; ++fd) {
    char target[256];
    ssize_t length = readlink(absl::StrCat("/proc/self/fd/", fd).c_str(), target, sizeof(target));
    if (length > 0)
      absl::StrAppend(&text, fd, "=", absl::string_view(target, static_cast<size_t>(length)), " ");
  }
  return text;
}

int CountText(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST_P(AgentFailureTest, APushThatIsCutInTheMiddleArrivesOnce) {
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

TEST_P(AgentFailureTest, CutsDuringTrafficLoseAndRepeatNothing) {
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

TEST_P(AgentFailureTest, LoansReturnOnceOnEveryPath) {
  Agent& a = Start("a");
  AgentOptions small;
  small.window_bytes = 1;
  small.queue_bytes = 1;
  small.reconnect_limit = absl::Hours(1);
  Agent& c = Start("c", small);
  Agent& b = Start("b");
  Introduce(a, b);
  Introduce(c, b);
  ServeEcho(a);
  ServeEcho(b);
  absl::Mutex mu;
  std::vector<Responder> parked;
  ASSERT_TRUE(b.Register({"park"}, [&](ServerCall call) {
                 absl::MutexLock lock(&mu);
                 parked.push_back(std::move(call.responder));
               }).ok());
  std::atomic<int> returned{0};
  int expected = 0;
  auto call = [&](Agent& from, const char* to, const char* method, int64_t count, CallOptions options = {}) {
    Payload request = Body("");
    request.tensors.push_back(Lend(at::ones({count}), [&] { ++returned; }));
    request.tensors.push_back(Lend(at::ones({count}).t(), [&] { ++returned; }));
    expected += 2;
    return from.Call(to, {method}, std::move(request), std::move(options));
  };
  for (int64_t count : {10, 1 << 20}) {
    EXPECT_TRUE(call(a, "b", "echo", count).Wait(kHang).ok());
    EXPECT_FALSE(call(a, "b", "unknown", count).Wait(kHang).ok());
    EXPECT_FALSE(call(a, "nobody", "echo", count).Wait(kHang).ok());
    EXPECT_TRUE(call(a, "a", "echo", count).Wait(kHang).ok());
    EXPECT_FALSE(call(a, "a", "unknown", count).Wait(kHang).ok());
    EXPECT_FALSE(call(a, "b", "BAD", count).Wait(kHang).ok());
    CallOptions soon;
    soon.timeout = absl::Milliseconds(10);
    EXPECT_TRUE(absl::IsDeadlineExceeded(call(a, "b", "park", count, soon).Wait(kHang).status()));
    Payload bad;
    bad.tensors.push_back(Lend(at::ones({count}), [&] { ++returned; }));
    bad.tensors.push_back(Lend(at::Tensor(), [&] { ++returned; }));
    expected += 2;
    EXPECT_FALSE(a.Call("b", {"echo"}, std::move(bad)).Wait(kHang).ok());
    Payload note;
    note.tensors.push_back(Lend(at::ones({count}), [&] { ++returned; }));
    ++expected;
    EXPECT_TRUE(a.Send("b", {"echo"}, std::move(note)).Wait(kHang).ok());
    EXPECT_TRUE(Eventually([&] { return returned == expected; })) << returned << " of " << expected;
  }
  // Unsent behind a window of one, refused by the queue, and dropped with the agent.
  std::vector<base::Future<Received>> left;
  for (int i = 0; i < 8; ++i) left.push_back(call(c, "b", "park", 1 << 18));
  Stop("c");
  for (auto& future : left) EXPECT_FALSE(future.Wait(kHang).ok());
  EXPECT_TRUE(Eventually([&] { return returned == expected; })) << returned << " of " << expected;
  // In flight when the peer ends, and a reply that nobody waits for.
  auto last = call(a, "b", "park", 1 << 20);
  std::vector<Responder> late;
  EXPECT_TRUE(Eventually([&] {
    absl::MutexLock lock(&mu);
    return !parked.empty();
  }));
  {
    absl::MutexLock lock(&mu);
    late.swap(parked);
  }
  a.RemovePeer(b.self(), absl::UnavailableError("test"));
  EXPECT_FALSE(last.Wait(kHang).ok());
  int replies = 0;
  for (Responder& responder : late) {
    Payload reply;
    reply.tensors.push_back(Lend(at::ones({1 << 20}), [&] { ++returned; }));
    ++replies;
    std::move(responder).Reply(std::move(reply));
  }
  expected += replies;
  Stop("a");
  Stop("b");
  EXPECT_EQ(returned, expected);
}

TEST_P(AgentFailureTest, AnEndWithoutAFarewellFailsItsCallsWithOneLine) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  std::atomic<int> arrived{0};
  absl::Mutex mu;
  std::vector<Responder> parked;
  ASSERT_TRUE(b.Register({"park"}, [&](ServerCall call) {
                 absl::MutexLock lock(&mu);
                 parked.push_back(std::move(call.responder));
                 ++arrived;
               }).ok());
  base::Promise<base::MemberId> dead;
  a.OnPeerDead([&](const base::MemberId& id, absl::Status status) { dead.Set(id); });
  std::vector<base::Future<Received>> futures;
  for (int i = 0; i < 100; ++i) futures.push_back(a.Call("b", {"park"}, Body("")));
  ASSERT_TRUE(Eventually([&] { return arrived == 100; }));
  ::testing::internal::CaptureStderr();
  b.endpoint()->Close();
  for (auto& future : futures) {
    absl::Status status = future.Wait(kHang).status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_EQ(GetRan(status), Ran::kMaybe);
    EXPECT_THAT(std::string(status.message()), HasSubstr("park v1 on " + b.self().ToString()));
  }
  auto who = dead.future().Wait(kHang);
  ASSERT_TRUE(who.ok());
  EXPECT_EQ(*who, b.self());
  std::string lines = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(CountText(lines, "peer " + b.self().ToString()), 1) << lines;
  EXPECT_THAT(lines, HasSubstr("calls_in_flight=100"));
  // It stays dead, and that is known before anything is sent.
  absl::Status later = a.Call("b", {"park"}, Body("")).Wait(kHang).status();
  EXPECT_TRUE(absl::IsUnavailable(later));
  EXPECT_EQ(GetRan(later), Ran::kNo);
  EXPECT_FALSE(a.FindPeer("b").has_value());
  {
    absl::MutexLock lock(&mu);
    parked.clear();
  }
}

TEST_P(AgentFailureTest, AFarewellIsNoAlarm) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServeEcho(b);
  base::Promise<base::Unit> gone;
  a.OnPeerDead([&](const base::MemberId&, absl::Status) { gone.Set(base::Unit{}); });
  ASSERT_TRUE(a.Call("b", {"echo"}, Body("")).Wait(kHang).ok());
  ::testing::internal::CaptureStderr();
  EXPECT_TRUE(b.Shutdown(kHang).ok());
  EXPECT_TRUE(gone.future().Wait(kHang).ok());
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  EXPECT_TRUE(absl::IsUnavailable(a.Call("b", {"echo"}, Body("")).Wait(kHang).status()));
}

TEST_P(AgentFailureTest, ARestartedMemberTakesItsNameAgain) {
  Agent& a = Start("a");
  Agent& old = Start("b");
  Introduce(a, old);
  ServeEcho(a);
  ServeEcho(old);
  ASSERT_TRUE(a.Call("b", {"echo"}, Body("")).Wait(kHang).ok());
  base::MemberId old_id = old.self();
  // The old life ends without a word; the new one speaks first.
  old.endpoint()->Close();
  Stop("b");
  Agent& fresh = Start("b");
  ServeEcho(fresh);
  fresh.AddPeer({a.self(), a.addresses()});
  auto reply = fresh.Call("a", {"echo"}, Body("new")).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  a.AddPeer({fresh.self(), fresh.addresses()});
  ASSERT_TRUE(a.Call("b", {"echo"}, Body("")).Wait(kHang).ok());
  EXPECT_EQ(a.FindPeer("b")->id, fresh.self());
  // Nobody brings the old one back.
  a.AddPeer({old_id, fresh.addresses()});
  EXPECT_EQ(a.FindPeer("b")->id, fresh.self());
}

TEST_P(AgentFailureTest, ANewIncarnationEndsTheCallsOfTheOld) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  absl::Mutex mu;
  std::vector<Responder> parked;
  absl::Notification arrived;
  ASSERT_TRUE(b.Register({"park"}, [&](ServerCall call) {
                 absl::MutexLock lock(&mu);
                 parked.push_back(std::move(call.responder));
                 arrived.Notify();
               }).ok());
  auto call = a.Call("b", {"park"}, Body(""));
  ASSERT_TRUE(arrived.WaitForNotificationWithTimeout(kHang));
  a.AddPeer({{"b", base::NewIncarnation()}, b.addresses()});
  absl::Status status = call.Wait(kHang).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(GetRan(status), Ran::kMaybe);
  // The address answers as the old one: so the new one is not there.
  EXPECT_EQ(GetRan(a.Call("b", {"park"}, Body("")).Wait(kHang).status()), Ran::kNo);
  absl::MutexLock lock(&mu);
  parked.clear();
}

TEST_P(AgentFailureTest, ShutdownWithCallsOutstandingIsBounded) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  absl::Mutex mu;
  std::vector<Responder> parked;
  std::atomic<int> arrived{0};
  ASSERT_TRUE(b.Register({"park"}, [&](ServerCall call) {
                 absl::MutexLock lock(&mu);
                 parked.push_back(std::move(call.responder));
                 ++arrived;
               }).ok());
  std::vector<base::Future<Received>> futures;
  for (int i = 0; i < 10; ++i) futures.push_back(a.Call("b", {"park"}, Body("")));
  ASSERT_TRUE(Eventually([&] { return arrived == 10; }));
  EXPECT_TRUE(a.Shutdown(kHang).ok());
  EXPECT_TRUE(a.Shutdown(kHang).ok());
  for (auto& future : futures) {
    absl::Status status = future.Wait(kHang).status();
    EXPECT_TRUE(absl::IsCancelled(status)) << status;
    EXPECT_EQ(GetRan(status), Ran::kMaybe);
  }
  EXPECT_TRUE(absl::IsCancelled(a.Call("b", {"park"}, Body("")).Wait(kHang).status()));
  EXPECT_TRUE(absl::IsCancelled(a.Send("b", {"park"}, Body("")).Wait(kHang).status()));
  // Late answers find nobody, and hurt nobody.
  std::vector<Responder> late;
  {
    absl::MutexLock lock(&mu);
    late.swap(parked);
  }
  late.clear();
  Stop("b");
  Stop("a");
}

TEST_P(AgentFailureTest, RespondersMayOutliveTheirAgent) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  absl::Mutex mu;
  std::vector<Responder> parked;
  std::atomic<int> arrived{0};
  ASSERT_TRUE(b.Register({"park"}, [&](ServerCall call) {
                 absl::MutexLock lock(&mu);
                 parked.push_back(std::move(call.responder));
                 ++arrived;
               }).ok());
  auto call = a.Call("b", {"park"}, Body(""));
  ASSERT_TRUE(Eventually([&] { return arrived == 1; }));
  Stop("b");
  EXPECT_FALSE(call.Wait(kHang).ok());
  int returned = 0;
  Payload reply;
  reply.tensors.push_back(Lend(at::ones({1 << 20}), [&] { ++returned; }));
  std::move(parked[0]).Reply(std::move(reply));
  EXPECT_EQ(returned, 1);
}

TEST_P(AgentFailureTest, AHandlerThatNeverReturnsDoesNotHoldTheEnd) {
  auto release = std::make_shared<absl::Notification>();
  auto ended = std::make_shared<absl::Notification>();
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  absl::Notification started;
  ASSERT_TRUE(b.Register({"hang"}, [release, ended, &started](ServerCall call) {
                 started.Notify();
                 release->WaitForNotification();
                 ended->Notify();
               }).ok());
  auto call = a.Call("b", {"hang"}, Body(""));
  ASSERT_TRUE(started.WaitForNotificationWithTimeout(kHang));
  absl::Status status = b.Shutdown(absl::Milliseconds(50));
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("handlers that still run"));
  Stop("b");
  EXPECT_FALSE(call.Wait(kHang).ok());
  release->Notify();
  EXPECT_TRUE(ended->WaitForNotificationWithTimeout(kHang));
}

TEST_P(AgentFailureTest, TwentyLivesLeaveNothingBehind) {
  auto live = [&] {
    Agent& a = Start("a");
    Agent& b = Start("b");
    Introduce(a, b);
    ServeEcho(b);
    Payload request = Body("");
    request.tensors.push_back(Copy(at::ones({100000})));
    ASSERT_TRUE(a.Call("b", {"echo"}, std::move(request)).Wait(kHang).ok());
    Stop("a");
    Stop("b");
  };
  live();  // What is loaded or made once.
  int files = CountEntries("/proc/self/fd");
  int threads = CountEntries("/proc/self/task");
  for (int i = 0; i < 20; ++i) live();
  EXPECT_EQ(CountEntries("/proc/self/fd"), files) << DescribeFiles();
  EXPECT_TRUE(Eventually([&] { return CountEntries("/proc/self/task") <= threads; }));
}

TEST_P(AgentFailureTest, OppositeOrdersWithAWindowOfOneDoNotDeadlock) {
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

TEST_P(AgentFailureTest, ASmallWindowAndQueuePushBack) {
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

TEST_P(AgentFailureTest, AnAddressWhereNobodyListensIsDeath) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Peer peer{b.self(), b.addresses()};
  Stop("b");
  a.AddPeer(peer);
  absl::Status status = a.Call("b", {"echo"}, Body("")).Wait(kHang).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(GetRan(status), Ran::kNo);
  EXPECT_THAT(std::string(status.message()), HasSubstr("refused"));
  absl::Status met = a.Meet(peer.addresses, kHang).Wait(kHang).status();
  EXPECT_TRUE(absl::IsUnavailable(met)) << met;
}

TEST_P(AgentFailureTest, AnotherAtTheAddressIsDeath) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  a.AddPeer({{"b", base::NewIncarnation()}, b.addresses()});
  absl::Status status = a.Call("b", {"echo"}, Body("")).Wait(kHang).status();
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(GetRan(status), Ran::kNo);
  EXPECT_FALSE(a.FindPeer("b").has_value());
}

// A peer that knows the key and speaks nonsense.
TEST_P(AgentFailureTest, JunkOfAnAuthenticatedPeerEndsItsPipesOnly) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServeEcho(b);
  std::mt19937 random(7);
  std::string request = EncodeRequest({"echo"}, absl::Seconds(1), false, "x", {});
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

class HeldTest : public AgentTest {};
INSTANTIATE_TEST_SUITE_P(Transports, HeldTest, ::testing::Values(Over::kFake),
                         [](const auto&) { return "Fake"; });

TEST_P(HeldTest, ADeadlineWhileTheReplyLandsGivesTheMemoryBack) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ASSERT_TRUE(b.Register({"pull"}, [&](ServerCall call) {
                 network_->HoldReads(true);
                 Payload reply;
                 reply.tensors.push_back(Copy(at::ones({1 << 20})));
                 std::move(call.responder).Reply(std::move(reply));
               }).ok());
  ServeEcho(b);
  at::Tensor into = at::zeros({1 << 20});
  CallOptions options;
  options.timeout = absl::Milliseconds(200);
  options.reply_into = {into};
  absl::Status status = a.Call("b", {"pull"}, Body(""), options).Wait(kHang).status();
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
  ASSERT_TRUE(b.Register({"pull"}, [&](ServerCall call) {
                 network_->HoldReads(true);
                 Payload reply;
                 reply.tensors.push_back(Copy(at::ones({1 << 20})));
                 std::move(call.responder).Reply(std::move(reply));
               }).ok());
  CallOptions options;
  options.reply_into = {at::zeros({1 << 20})};
  auto call = a.Call("b", {"pull"}, Body(""), options);
  ASSERT_TRUE(Eventually([&] { return network_->held_reads() > 0; }));
  a.RemovePeer(b.self(), absl::UnavailableError("its lease ended"));
  absl::Status status = call.Wait(kHang).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  network_->HoldReads(false);
}

TEST_P(HeldTest, AnUnreachablePeerIsDeadAfterTheLimit) {
  AgentOptions options;
  options.reconnect_limit = absl::Milliseconds(300);
  Agent& a = Start("a", options);
  Agent& b = Start("b");
  Introduce(a, b);
  network_->SetUnreachable(true);
  base::Promise<std::string> dead;
  a.OnPeerDead([&](const base::MemberId&, absl::Status status) { dead.Set(std::string(status.message())); });
  absl::Status status = a.Call("b", {"echo"}, Body("")).Wait(kHang).status();
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_EQ(GetRan(status), Ran::kNo);
  auto why = dead.future().Wait(kHang);
  ASSERT_TRUE(why.ok());
  EXPECT_THAT(*why, HasSubstr("network is unreachable"));
}

// A process of its own that is killed.
TEST(AgentProcess, KilledWithAHundredCallsInFlight) {
  char self_path[4096];
  ssize_t length = readlink("/proc/self/exe", self_path, sizeof(self_path));
  ASSERT_GT(length, 0);
  std::string helper(self_path, static_cast<size_t>(length));
  helper = helper.substr(0, helper.rfind('/')) + "/rpc_test_peer";
  int in[2], out[2];
  ASSERT_EQ(pipe2(in, O_CLOEXEC), 0);
  ASSERT_EQ(pipe2(out, O_CLOEXEC), 0);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
  pid_t pid = 0;
  char* arguments[] = {helper.data(), nullptr};
  ASSERT_EQ(posix_spawn(&pid, helper.c_str(), &actions, nullptr, arguments, environ), 0);
  posix_spawn_file_actions_destroy(&actions);
  close(in[0]);
  close(out[1]);
  FILE* lines = fdopen(out[0], "r");
  char line[4096] = "";
  ASSERT_NE(fgets(line, sizeof(line), lines), nullptr);
  std::istringstream words(line);
  uint64_t incarnation = 0;
  words >> incarnation;
  Peer peer{{"victim", base::Incarnation(incarnation)}, {}};
  for (std::string address; words >> address;) peer.addresses.push_back(address);

  transport::EndpointOptions endpoint_options;
  endpoint_options.job = "agent-test";
  endpoint_options.self = {"a", base::NewIncarnation()};
  endpoint_options.key.bytes = "a key of at least sixteen bytes";
  auto endpoint = transport::CreateEndpoint(endpoint_options);
  ASSERT_TRUE(endpoint.ok()) << endpoint.status();
  AgentOptions options;
  options.endpoint = *endpoint;
  options.self = endpoint_options.self;
  auto agent = *Agent::Start(options);
  agent->AddPeer(peer);
  std::vector<base::Future<Received>> futures;
  for (int i = 0; i < 100; ++i) {
    Payload request = Body("");
    if (i % 10 == 0) request.tensors.push_back(Copy(at::ones({1 << 20})));
    futures.push_back(agent->Call("victim", {"park"}, std::move(request)));
  }
  std::string parked;
  while (parked != "100") {
    auto count = agent->Call("victim", {"parked"}, Body("")).Wait(kHang);
    ASSERT_TRUE(count.ok()) << count.status();
    parked = count->body;
  }
  ::testing::internal::CaptureStderr();
  ASSERT_EQ(kill(pid, SIGKILL), 0);
  ASSERT_EQ(waitpid(pid, nullptr, 0), pid);
  for (auto& future : futures) {
    absl::Status status = future.Wait(kHang).status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_EQ(GetRan(status), Ran::kMaybe);
    std::string text(status.message());
    EXPECT_THAT(text, HasSubstr("park v1 on " + peer.id.ToString() + " at unix:@"));
  }
  agent = nullptr;
  std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(CountText(log, "\n"), 1) << log;
  EXPECT_THAT(log, HasSubstr("calls_in_flight=100"));
  fclose(lines);
  close(in[1]);
}

}  // namespace
}  // namespace Atoll::rpc
