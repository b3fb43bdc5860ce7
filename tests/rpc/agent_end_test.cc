// The end of an agent: bounded, whatever is under way; and that it leaves nothing behind, loans included.
#include <dirent.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "absl/strings/str_cat.h"
#include "agent_fixture.h"

namespace Atoll::rpc {
namespace {

using base::GetRan;
using base::Ran;
using ::testing::HasSubstr;

class AgentEndTest : public AgentTest {};
INSTANTIATE_AGENT_TESTS(AgentEndTest);

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

// Scenario users 21.
TEST_P(AgentEndTest, LoansReturnOnceOnEveryPath) {
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
  ServePark(b);
  // Its answer is of a one-way call: nobody takes it.
  std::atomic<int> noted{0};
  ASSERT_TRUE(b.Register({"note"}, [&](ServerCall call) {
                 Payload reply;
                 reply.tensors.push_back(Lend(at::ones({1 << 20}), [&] { ++noted; }));
                 std::move(call.responder).Reply(std::move(reply));
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
    EXPECT_TRUE(a.Send("b", {"note"}, std::move(note)).Wait(kHang).ok());
    EXPECT_TRUE(Eventually([&] { return returned == expected; })) << returned << " of " << expected;
  }
  EXPECT_TRUE(Eventually([&] { return noted == 2; })) << noted << " of 2";
  // Unsent behind a window of one, refused by the queue, and dropped with the agent.
  std::vector<base::Future<Received>> left;
  for (int i = 0; i < 8; ++i) left.push_back(call(c, "b", "park", 1 << 18));
  Stop("c");
  for (auto& future : left) EXPECT_FALSE(future.Wait(kHang).ok());
  EXPECT_TRUE(Eventually([&] { return returned == expected; })) << returned << " of " << expected;
  // In flight when the peer ends, and a reply that nobody waits for.
  Parked parked;
  ASSERT_TRUE(b.Register({"last"}, parked.handler()).ok());
  auto last = call(a, "b", "last", 1 << 20);
  ASSERT_TRUE(parked.Await(1));
  std::vector<Responder> late = parked_.Take();
  late.push_back(std::move(parked.Take()[0]));
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

// Scenario init 14.
TEST_P(AgentEndTest, ShutdownWithCallsOutstandingIsBounded) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServePark(b);
  std::vector<base::Future<Received>> futures;
  for (int i = 0; i < 10; ++i) futures.push_back(a.Call("b", {"park"}, Body("")));
  ASSERT_TRUE(parked_.Await(10));
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
  parked_.Take().clear();
  Stop("b");
  Stop("a");
}

TEST_P(AgentEndTest, RespondersMayOutliveTheirAgent) {
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  ServePark(b);
  auto call = a.Call("b", {"park"}, Body(""));
  ASSERT_TRUE(parked_.Await(1));
  Stop("b");
  EXPECT_FALSE(call.Wait(kHang).ok());
  int returned = 0;
  Payload reply;
  reply.tensors.push_back(Lend(at::ones({1 << 20}), [&] { ++returned; }));
  std::move(parked_.Take()[0]).Reply(std::move(reply));
  EXPECT_EQ(returned, 1);
}

TEST_P(AgentEndTest, AHandlerThatNeverReturnsDoesNotHoldTheEnd) {
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

// Refuses what comes once `agent` shuts down; the loop asks so until it does.
bool RefusesSoon(Agent& from, const std::string& to) {
  absl::Status status;
  do status = from.Call(to, {"echo"}, Body("")).Wait(kHang).status();
  while (status.ok());
  return absl::IsUnavailable(status) && GetRan(status) == Ran::kNo;
}

TEST_P(AgentEndTest, AHandlerThatRunsStillAnswers) {
  Agent& a = Start("a");
  AgentOptions two;
  two.worker_threads = 2;
  Agent& b = Start("b", two);
  Introduce(a, b);
  ServeEcho(b);
  absl::Notification started, go_on;
  ASSERT_TRUE(b.Register({"slow"}, [&](ServerCall call) {
                 started.Notify();
                 go_on.WaitForNotification();
                 Payload reply = Body("done");
                 reply.tensors.push_back(Copy(at::full({1 << 18}, 7.0f)));
                 std::move(call.responder).Reply(std::move(reply));
               }).ok());
  auto call = a.Call("b", {"slow"}, Body(""));
  ASSERT_TRUE(started.WaitForNotificationWithTimeout(kHang));
  absl::Status ended;
  std::thread end([&] { ended = b.Shutdown(kHang); });
  EXPECT_TRUE(RefusesSoon(a, "b"));
  go_on.Notify();
  end.join();
  EXPECT_TRUE(ended.ok()) << ended;
  absl::StatusOr<Received> reply = call.Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->body, "done");
  EXPECT_EQ(reply->tensors[0][12345].item<float>(), 7.0f);
  Stop("a");
}

// As the coordinator of a job ends while it answers the last member's farewell.
TEST_P(AgentEndTest, AHandlerOnTheLoopThatSetsOffTheEndStillAnswers) {
  struct Inline : base::Executor {
    void Schedule(base::Task task) override { std::move(task)(); }
  } inline_executor;
  Agent& a = Start("a");
  Agent& b = Start("b");
  Introduce(a, b);
  absl::Notification started, refuses;
  MethodOptions options;
  options.executor = &inline_executor;
  ASSERT_TRUE(b.Register(
                   {"last"},
                   [&](ServerCall call) {
                     started.Notify();
                     refuses.WaitForNotification();
                     std::move(call.responder).Reply(Body("bye"));
                   },
                   options)
                  .ok());
  auto call = a.Call("b", {"last"}, Body(""));
  ASSERT_TRUE(started.WaitForNotificationWithTimeout(kHang));
  absl::Status ended;
  std::thread end([&] { ended = b.Shutdown(kHang); });
  // Nothing else can come in on the thread that is held: what b itself calls shows that the end has begun.
  while (!absl::IsCancelled(b.Call("nobody", {"echo"}, Body("")).Wait(kHang).status())) {
  }
  refuses.Notify();
  end.join();
  EXPECT_TRUE(ended.ok()) << ended;
  absl::StatusOr<Received> reply = call.Wait(kHang);
  EXPECT_TRUE(reply.ok()) << reply.status();
  Stop("a");
}

TEST_P(AgentEndTest, TwentyLivesLeaveNothingBehind) {
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

}  // namespace
}  // namespace Atoll::rpc
