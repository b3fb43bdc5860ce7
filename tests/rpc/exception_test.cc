// What user code throws, wherever rpc runs it, ends where it belongs: at who called.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>

#include <c10/util/Exception.h>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "agent_fixture.h"

namespace Atoll::rpc {
namespace {

using base::GetRan;
using base::Ran;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

struct NoStdException {};

class ExceptionTest : public AgentTest {
 protected:
  // What a caller is told when `handler` serves the method.
  absl::Status CallOf(Handler handler, MethodOptions options = {}) {
    const std::string name = absl::StrCat("method", methods_++);
    EXPECT_TRUE(b_.Register({name}, std::move(handler), std::move(options)).ok());
    absl::Status status = a_.Call("b", {name}, Body("")).Wait(kHang).status();
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat(name, " v1 on ", b_.self().ToString())));
    return status;
  }
  // The member goes on, whatever was thrown in it.
  void ExpectAlive() { EXPECT_TRUE(a_.Call("b", {"echo"}, Body("")).Wait(kHang).ok()); }

  void SetUp() override {
    Introduce(a_, b_);
    ServeEcho(a_);
    ServeEcho(b_);
  }

  Agent& a_ = Start("a");
  Agent& b_ = Start("b");
  int methods_ = 0;
};
INSTANTIATE_AGENT_TESTS(ExceptionTest);

std::string Text(const absl::Status& status) { return std::string(status.message()); }

TEST_P(ExceptionTest, OfAHandlerIsTheAnswer) {
  absl::Status status = CallOf([](ServerCall) { throw std::out_of_range("no such chunk"); });
  EXPECT_TRUE(absl::IsInternal(status)) << status;
  EXPECT_EQ(GetRan(status), Ran::kYes);
  EXPECT_THAT(Text(status), HasSubstr("the handler threw std::out_of_range: no such chunk (ran: yes)"));
  status = CallOf([](ServerCall) { throw NoStdException(); });
  EXPECT_TRUE(absl::IsInternal(status)) << status;
  EXPECT_THAT(Text(status), AllOf(HasSubstr("the handler threw Atoll::rpc::"), HasSubstr("NoStdException")));
  EXPECT_THAT(Text(CallOf([](ServerCall) { throw 7; })), HasSubstr("threw int"));
  // The responder is the handler's own, and goes while the stack unwinds.
  status = CallOf([](ServerCall call) {
    Responder mine = std::move(call.responder);
    throw std::runtime_error("too late");
  });
  EXPECT_THAT(Text(status), HasSubstr("threw std::runtime_error: too late"));
  ExpectAlive();
}

TEST_P(ExceptionTest, OfLibTorchHasNoBacktrace) {
  absl::Status status = CallOf([](ServerCall) { TORCH_CHECK(false, "a tensor of another shape"); });
  EXPECT_TRUE(absl::IsInternal(status)) << status;
  EXPECT_THAT(Text(status), HasSubstr("threw c10::Error: a tensor of another shape (ran: yes)"));
  // A real one, from within an operator.
  status = CallOf([](ServerCall) { at::ones({2}).view({3}); });
  EXPECT_THAT(Text(status), AllOf(HasSubstr("c10::Error: "), HasSubstr("shape '[3]' is invalid"),
                                  Not(HasSubstr("frame #")), Not(HasSubstr("Exception raised from"))));
}

TEST_P(ExceptionTest, TextIsShortAndPrintable) {
  absl::Status status =
      CallOf([](ServerCall) { throw std::runtime_error("\n one\nline,\ta bell \a and \xff\n"); });
  EXPECT_THAT(Text(status),
              HasSubstr("threw std::runtime_error: one line, a bell \\x07 and \\xff (ran: yes)"));
  status = CallOf([](ServerCall) { throw std::runtime_error(std::string(1 << 20, 'x')); });
  EXPECT_THAT(Text(status), AllOf(HasSubstr(std::string(1024, 'x')), EndsWith("x... (ran: yes)")));
  EXPECT_LT(status.message().size(), 2048u);
}

TEST_P(ExceptionTest, OfAHandlerOnAnExecutorOfItsOwn) {
  base::InlineExecutor in_line;
  std::shared_ptr<base::SerialExecutor> serial = base::SerialExecutor::Create(b_.pool());
  for (base::Executor* executor : std::initializer_list<base::Executor*>{&in_line, serial.get()}) {
    MethodOptions options;
    options.executor = executor;
    // Twice: the executor goes on.
    for (int i = 0; i < 2; ++i) {
      EXPECT_THAT(Text(CallOf([](ServerCall) { throw std::runtime_error("boom"); }, options)),
                  HasSubstr("the handler threw std::runtime_error: boom"));
    }
  }
  Stop("b");
}

TEST_P(ExceptionTest, OfAHandlerOfOurOwn) {
  ASSERT_TRUE(a_.Register({"throw"}, [](ServerCall) { throw std::runtime_error("boom"); }).ok());
  absl::Status status = a_.Call("a", {"throw"}, Body("")).Wait(kHang).status();
  EXPECT_TRUE(absl::IsInternal(status)) << status;
  EXPECT_EQ(GetRan(status), Ran::kYes);
  EXPECT_THAT(Text(status), HasSubstr("threw std::runtime_error: boom"));
}

// The handler gave the responder away, and then failed: its exception counts, and what the other holder
// answers later gives its loans back and no more.
TEST_P(ExceptionTest, AnswersWhereverTheResponderIs) {
  for (const char* callee : {"a", "b"}) {
    Responder kept;
    absl::Notification is_kept;
    Agent& agent = *agents_[callee];
    ASSERT_TRUE(agent
                    .Register({"keep"},
                              [&](ServerCall call) {
                                kept = std::move(call.responder);
                                is_kept.Notify();
                                throw std::runtime_error("after that");
                              })
                    .ok());
    absl::Status status = a_.Call(callee, {"keep"}, Body("")).Wait(kHang).status();
    EXPECT_THAT(Text(status), HasSubstr("threw std::runtime_error: after that"));
    ASSERT_TRUE(is_kept.WaitForNotificationWithTimeout(kHang));
    absl::Notification returned;
    Payload late;
    late.tensors.push_back(Lend(at::ones({1 << 20}), [&] { returned.Notify(); }));
    std::move(kept).Reply(std::move(late));
    EXPECT_TRUE(returned.WaitForNotificationWithTimeout(kHang));
  }
  ExpectAlive();
}

TEST_P(ExceptionTest, AfterTheAnswerChangesNothing) {
  ASSERT_TRUE(b_.Register({"answer"}, [](ServerCall call) {
                  std::move(call.responder).Reply(Body("answered"));
                  throw std::runtime_error("boom");
                }).ok());
  auto reply = a_.Call("b", {"answer"}, Body("")).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->body, "answered");
  ExpectAlive();
}

TEST_P(ExceptionTest, CaughtByTheHandlerIsItsOwnAffair) {
  absl::Status status = CallOf([](ServerCall call) {
    try {
      Responder mine = std::move(call.responder);
      throw std::runtime_error("caught");
    } catch (const std::runtime_error&) {
    }
  });
  EXPECT_TRUE(absl::IsInternal(status)) << status;
  EXPECT_THAT(Text(status), HasSubstr("the handler dropped the call"));
}

// Handlers that go on when another call is answered.
TEST_P(ExceptionTest, OfAContinuationIsTheAnswer) {
  const std::string told = "what the handler left to do threw std::runtime_error: in the end";
  // In the callback's captures.
  EXPECT_THAT(Text(CallOf([this](ServerCall call) {
                b_.Call("a", {"echo"}, Body(""), {},
                        [responder = std::move(call.responder)](absl::StatusOr<Received>) {
                          throw std::runtime_error("in the end");
                        });
              })),
              HasSubstr(told));
  // In a variable of the callback.
  EXPECT_THAT(Text(CallOf([this](ServerCall call) {
                b_.Call("a", {"echo"}, Body(""), {},
                        [responder = std::move(call.responder)](absl::StatusOr<Received>) mutable {
                          Responder mine = std::move(responder);
                          throw std::runtime_error("in the end");
                        });
              })),
              HasSubstr(told));
  // On the loop that brought the reply.
  EXPECT_THAT(Text(CallOf([this](ServerCall call) {
                CallOptions in_line;
                in_line.reply_inline = true;
                b_.Call("a", {"echo"}, Body(""), in_line,
                        [responder = std::move(call.responder)](absl::StatusOr<Received>) {
                          throw std::runtime_error("in the end");
                        });
              })),
              HasSubstr(told));
  // When the call failed.
  EXPECT_THAT(Text(CallOf([this](ServerCall call) {
                b_.Call("nobody", {"echo"}, Body(""), {},
                        [responder = std::move(call.responder)](absl::StatusOr<Received>) {
                          throw std::runtime_error("in the end");
                        });
              })),
              HasSubstr(told));
  // Of a call to ourselves.
  EXPECT_THAT(Text(CallOf([this](ServerCall call) {
                b_.Call("b", {"echo"}, Body(""), {},
                        [responder = std::move(call.responder)](absl::StatusOr<Received>) { throw 1; });
              })),
              HasSubstr("what the handler left to do threw int"));
  ExpectAlive();
}

TEST_P(ExceptionTest, OfAFuturesContinuationIsTheAnswer) {
  // Both inner calls end only when the continuation is there, so that rpc runs it.
  ServePark(a_);
  EXPECT_THAT(Text(CallOf([&](ServerCall call) {
                b_.Call("a", {"park"}, Body("")).Then([responder = std::move(call.responder)](const auto&) {
                  throw std::runtime_error("in the end");
                });
                ASSERT_TRUE(parked_.Await(1));
                std::move(parked_.Take()[0]).Reply(Body(""));
              })),
              HasSubstr("what the handler left to do threw std::runtime_error: in the end"));
  AgentOptions options;
  options.reconnect_limit = absl::Hours(1);
  Agent& c = Start("c", options);
  Introduce(a_, c);
  c.AddPeer({{"later", base::NewIncarnation()}, {}});
  ASSERT_TRUE(
      c.Register({"send"}, [&](ServerCall call) {
         c.Send("later", {"note"}, Body("")).Then([responder = std::move(call.responder)](const auto&) {
           throw std::runtime_error("in the end");
         });
         c.RemovePeer(c.FindPeer("later")->id, absl::OkStatus());
       }).ok());
  EXPECT_THAT(Text(a_.Call("c", {"send"}, Body("")).Wait(kHang).status()),
              HasSubstr("what the handler left to do threw std::runtime_error: in the end"));
  ExpectAlive();
}

TEST_P(ExceptionTest, OfAnAllocationRefusesTheCall) {
  MethodOptions options;
  options.allocate = [](const base::MemberId&, absl::string_view,
                        absl::Span<const TensorMeta>) -> absl::StatusOr<std::vector<at::Tensor>> {
    throw NoStdException();
  };
  std::atomic<int> ran{0};
  ASSERT_TRUE(b_.Register(
                    {"land"}, [&](ServerCall) { ++ran; }, options)
                  .ok());
  for (int64_t count : {10, 1 << 20}) {
    Payload request;
    request.tensors.push_back(Copy(at::ones({count})));
    absl::Status status = a_.Call("b", {"land"}, std::move(request)).Wait(kHang).status();
    EXPECT_TRUE(absl::IsInternal(status)) << status;
    EXPECT_EQ(GetRan(status), Ran::kNo);
    EXPECT_THAT(Text(status), HasSubstr("allocating for it threw"));
  }
  EXPECT_EQ(ran, 0);
  ExpectAlive();
}

TEST_P(ExceptionTest, WithNobodyToTellIsLoggedAndTheMemberGoesOn) {
  ::testing::internal::CaptureStderr();
  absl::Notification handled, returned, observed;
  // One way.
  ASSERT_TRUE(b_.Register({"note"}, [&](ServerCall call) {
                  absl::Cleanup last = [&] { handled.Notify(); };
                  throw std::runtime_error("the first");
                }).ok());
  EXPECT_TRUE(a_.Send("b", {"note"}, Body("")).Wait(kHang).ok());
  EXPECT_TRUE(handled.WaitForNotificationWithTimeout(kHang));
  // The end of a loan.
  Payload request;
  request.tensors.push_back(Lend(at::ones({1 << 20}), [&] {
    absl::Cleanup last = [&] { returned.Notify(); };
    throw std::runtime_error("the second");
  }));
  EXPECT_TRUE(a_.Call("b", {"echo"}, std::move(request)).Wait(kHang).ok());
  EXPECT_TRUE(returned.WaitForNotificationWithTimeout(kHang));
  // An observer; the next one is told all the same.
  a_.OnPeerDead([](const base::MemberId&, absl::Status) { throw std::runtime_error("the third"); });
  a_.OnPeerDead([&](const base::MemberId&, absl::Status) { observed.Notify(); });
  Stop("b");
  EXPECT_TRUE(observed.WaitForNotificationWithTimeout(kHang));
  EXPECT_TRUE(a_.Call("a", {"echo"}, Body("")).Wait(kHang).ok());
  Stop("a");
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("the handler of note v1, called by a#"));
  for (const char* text : {"the first", "the second", "the third"}) EXPECT_THAT(log, HasSubstr(text));
}

}  // namespace
}  // namespace Atoll::rpc
