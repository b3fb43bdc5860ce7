// Pipes between endpoints of one process: one suite over every way that a connection can take.
#include "atoll/transport/pipe.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "atoll/base/status.h"
#include "atoll/tests/transport/testing.h"
#include "atoll/transport/endpoint.h"

namespace Atoll::transport::testing {
namespace {

struct Case {
  Way way;
  bool cma;
  bool mpt = true;  // Of the client; the server has it always.
};

class PipeTest : public ::testing::TestWithParam<Case>, protected PipePair {
 protected:
  void SetUp() override {
    if (!Possible(GetParam().way)) GTEST_SKIP() << "ATOLL_TEST_SKIPPED: this machine has no ::1";
    server_ = Make("server");
    client_ = Make("client");
  }
  std::unique_ptr<Member> Make(const std::string& name) {
    EndpointOptions options = Options(name, GetParam().way);
    options.enable_cma = GetParam().cma;
    options.enable_mpt = GetParam().mpt || name == "server";
    return std::make_unique<Member>(options);
  }
};

TEST_P(PipeTest, PeersKnowEachOther) {
  auto pipe = client_->Connect(*server_, Lane::kBulk);
  ASSERT_TRUE(pipe.ok()) << pipe.status();
  EXPECT_EQ((*pipe)->peer().member, server_->id());
  EXPECT_EQ((*pipe)->peer().lane, Lane::kBulk);
  EXPECT_TRUE((*pipe)->peer().initiated);
  EXPECT_EQ((*pipe)->peer().address, server_->endpoint().addresses()[0]);
  auto far = server_->Accepted();
  ASSERT_NE(far, nullptr);
  EXPECT_EQ(far->peer().member, client_->id());
  EXPECT_EQ(far->peer().lane, Lane::kBulk);
  EXPECT_FALSE(far->peer().initiated);
}

TEST_P(PipeTest, HeadersInOrder) {
  Connect();
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(Write(*near_, {std::to_string(i), {}, {}}).ok());
  for (int i = 0; i < 100; ++i) {
    auto received = ReadDescriptor(*far_);
    ASSERT_TRUE(received.ok()) << received.status();
    EXPECT_EQ(received->header, std::to_string(i));
    EXPECT_TRUE(received->tensors.empty());
  }
}

TEST_P(PipeTest, TensorsOfAllSizes) {
  Connect();
  for (size_t bytes : {0u, 1u, 7u, 4096u, 65535u, 65536u, 65537u, 1u << 20, (4u << 20) + 3, 64u << 20}) {
    std::vector<std::string> tensors{Pattern(bytes, bytes + 1)};
    auto written = StartWrite(*near_, MessageOf("header", tensors));
    auto received = Receive(*far_);
    ASSERT_TRUE(received.ok()) << received.status();
    ASSERT_TRUE(written.Wait(kLimit).ok());
    EXPECT_EQ(received->header, "header");
    ASSERT_EQ(received->tensors.size(), 1u);
    EXPECT_TRUE(received->tensors[0] == tensors[0]) << bytes;
  }
}

TEST_P(PipeTest, ManyTensorsAndALargeHeader) {
  Connect();
  std::vector<std::string> tensors;
  for (int i = 0; i < 500; ++i) tensors.push_back(Pattern(i * 37 % 5000, i));
  const std::string header = Pattern(3 << 20, 5);
  auto written = StartWrite(*near_, MessageOf(header, tensors));
  auto received = Receive(*far_);
  ASSERT_TRUE(received.ok()) << received.status();
  ASSERT_TRUE(written.Wait(kLimit).ok());
  EXPECT_TRUE(received->header == header);
  EXPECT_TRUE(received->tensors == tensors);
}

TEST_P(PipeTest, BothDirectionsAtOnce) {
  Connect();
  auto run = [](Pipe& pipe, uint64_t mine, uint64_t theirs) {
    std::vector<std::string> tensors[10];
    std::vector<base::Future<base::Unit>> written;
    for (int i = 0; i < 10; ++i) {
      tensors[i] = {Pattern(3 << 20, mine + i), Pattern(100, mine + i)};
      written.push_back(StartWrite(pipe, MessageOf(std::to_string(mine + i), tensors[i])));
    }
    for (int i = 0; i < 10; ++i) {
      auto received = Receive(pipe);
      ASSERT_TRUE(received.ok()) << received.status();
      EXPECT_EQ(received->header, std::to_string(theirs + i));
      EXPECT_TRUE(received->tensors[0] == Pattern(3 << 20, theirs + i));
      EXPECT_TRUE(received->tensors[1] == Pattern(100, theirs + i));
    }
    for (auto& one : written) EXPECT_TRUE(one.Wait(kLimit).ok());
  };
  std::thread other([&] { run(*far_, 1000, 2000); });
  run(*near_, 2000, 1000);
  other.join();
}

TEST_P(PipeTest, ManyPipesFromManyThreads) {
  constexpr int kThreads = 4, kPipes = 5, kMessages = 50;
  std::atomic<int> echoed{0};
  std::thread echo([&] {
    std::vector<std::thread> each;
    for (int i = 0; i < kThreads * kPipes; ++i) {
      auto pipe = server_->Accepted();
      ASSERT_NE(pipe, nullptr);
      each.emplace_back([&, pipe] {
        for (int m = 0; m < kMessages; ++m) {
          auto received = Receive(*pipe);
          ASSERT_TRUE(received.ok()) << received.status();
          ASSERT_TRUE(Write(*pipe, MessageOf(received->header, received->tensors)).ok());
          ++echoed;
        }
        EXPECT_FALSE(ReadDescriptor(*pipe).ok());  // Until the other end has read all and leaves.
      });
    }
    for (std::thread& thread : each) thread.join();
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int p = 0; p < kPipes; ++p) {
        auto pipe = client_->Connect(*server_);
        ASSERT_TRUE(pipe.ok()) << pipe.status();
        for (int m = 0; m < kMessages; ++m) {
          std::vector<std::string> tensors{Pattern(1000 * m, t * p + m)};
          ASSERT_TRUE(Write(**pipe, MessageOf("m", tensors)).ok());
          auto received = Receive(**pipe);
          ASSERT_TRUE(received.ok()) << received.status();
          EXPECT_TRUE(received->tensors == tensors);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  echo.join();
  EXPECT_EQ(echoed, kThreads * kPipes * kMessages);
}

TEST_P(PipeTest, WritesBeforeTheCloseArrive) {
  Connect();
  std::vector<std::string> tensors{Pattern(1000, 1)};
  // The far end has written too: its bytes lie unread here when we close, and must not cost ours.
  ASSERT_TRUE(Write(*far_, {"unread", {}, {}}).ok());
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(Write(*near_, {std::to_string(i), {}, {}}).ok());
  near_->Close(absl::CancelledError("done"));
  for (int i = 0; i < 20; ++i) {
    auto received = ReadDescriptor(*far_);
    ASSERT_TRUE(received.ok()) << i << ": " << received.status();
    EXPECT_EQ(received->header, std::to_string(i));
  }
  auto last = ReadDescriptor(*far_);
  EXPECT_TRUE(absl::IsUnavailable(last.status())) << last.status();
}

// Its first connection has carried a message, and the further ones never come: the message cannot be delivered, and
// what waits here is told so.
TEST_P(PipeTest, AWriteAndACloseBeforeThePipeIsUpEndTheReader) {
  for (bool announced : {false, true}) {
    std::vector<std::string> tensors;
    if (announced) tensors.push_back(Pattern(1000, 1));
    base::Promise<base::Unit> written, closed;
    client_->endpoint().Connect(server_->endpoint().addresses(), server_->id(), Lane::kControl, kLimit,
                                [&](absl::StatusOr<std::shared_ptr<Pipe>> pipe) {
                                  ASSERT_TRUE(pipe.ok()) << pipe.status();
                                  // On the loop, which is to open the further connections: so they are not there.
                                  (*pipe)->Write(MessageOf("once", tensors),
                                                 [written](absl::Status) { written.Set(base::Unit()); });
                                  (*pipe)->Close(absl::CancelledError("done"));
                                  closed.Set(base::Unit());
                                });
    ASSERT_TRUE(closed.future().Wait(kLimit).ok());
    auto far = server_->Accepted();
    ASSERT_NE(far, nullptr);
    auto write = StartWrite(*far, {"to nobody", {}, {}});
    if (announced) {
      const absl::Status status = write.Wait(kLimit).status();  // Without a reader, too.
      EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    }
    auto first = ReadDescriptor(*far);
    EXPECT_TRUE(absl::IsUnavailable(first.status())) << first.status();
    EXPECT_TRUE(absl::StrContains(first.status().message(), client_->id().name)) << first.status();
    EXPECT_FALSE(absl::IsDeadlineExceeded(write.Wait(kLimit).status()));
    EXPECT_TRUE(written.future().Wait(kLimit).ok());
  }
}

TEST_P(PipeTest, CloseEndsEverythingWithItsReason) {
  Connect();
  auto descriptor = StartReadDescriptor(*near_);
  std::vector<std::string> tensors{Pattern(32 << 20, 1)};
  auto write = StartWrite(*near_, MessageOf("never read", tensors));
  near_->Close(absl::AbortedError("changed our mind"));
  auto read = descriptor.Wait(kLimit);
  EXPECT_TRUE(absl::IsAborted(read.status())) << read.status();
  EXPECT_TRUE(absl::StrContains(read.status().message(), "changed our mind")) << read.status();
  EXPECT_TRUE(absl::StrContains(read.status().message(), server_->id().name)) << read.status();
  (void)write.Wait(kLimit);  // May have got through; the loan is back in any case.
  EXPECT_TRUE(absl::IsAborted(Write(*near_, {"later", {}, {}})));
  EXPECT_TRUE(absl::IsAborted(ReadDescriptor(*near_).status()));
  near_->Close(absl::OkStatus());
  EXPECT_TRUE(absl::IsAborted(Write(*near_, {"the first reason stays", {}, {}})));
}

TEST_P(PipeTest, PeerClosesInTheMiddleOfATensor) {
  Connect();
  std::vector<std::string> tensors{Pattern(64 << 20, 1)};
  auto write = StartWrite(*near_, MessageOf("half", tensors));
  auto descriptor = ReadDescriptor(*far_);
  ASSERT_TRUE(descriptor.ok());
  std::string into(64 << 20, '\0');
  base::Promise<base::Unit> promise;
  far_->Read({{into.data(), into.size(), {}, nullptr}}, [promise](absl::Status status) {
    if (status.ok()) {
      promise.Set(base::Unit{});
    } else {
      promise.Set(status);
    }
  });
  near_.reset();
  // Either outcome of a race is right, but each callback comes, and then the pipe is over.
  (void)promise.future().Wait(kLimit);
  (void)write.Wait(kLimit);
  auto after = ReadDescriptor(*far_);
  EXPECT_FALSE(after.ok());
  EXPECT_FALSE(absl::IsDeadlineExceeded(after.status())) << after.status();
}

TEST_P(PipeTest, AnIdlePipeNoticesThatItsPeerLeft) {
  Connect();
  auto descriptor = StartReadDescriptor(*far_);
  near_.reset();
  auto read = descriptor.Wait(kLimit);
  EXPECT_TRUE(absl::IsUnavailable(read.status())) << read.status();
  EXPECT_TRUE(absl::StrContains(read.status().message(), client_->id().name)) << read.status();
}

TEST_P(PipeTest, EndpointCloseEndsItsPipes) {
  Connect();
  auto near = StartReadDescriptor(*near_);
  auto far = StartReadDescriptor(*far_);
  client_->endpoint().Close();
  client_->endpoint().Join();
  EXPECT_FALSE(near.Wait(kLimit).ok());
  EXPECT_FALSE(far.Wait(kLimit).ok());
  EXPECT_FALSE(Write(*near_, {"late", {}, {}}).ok());
  EXPECT_FALSE(ReadDescriptor(*near_).ok());
  auto late = client_->Connect(*server_);
  EXPECT_TRUE(absl::IsCancelled(late.status())) << late.status();
}

TEST_P(PipeTest, LimitsOfTheSenderRefuseWithoutHarm) {
  EndpointOptions options = Options("small", GetParam().way);
  options.max_header_bytes = 1000;
  options.max_tensors = 3;
  options.max_tensor_bytes = 5000;
  Member small(options);
  auto pipe = small.Connect(*server_);
  ASSERT_TRUE(pipe.ok()) << pipe.status();
  auto far = server_->Accepted();
  EXPECT_EQ(small.endpoint().limits().max_header_bytes, 1000u);
  EXPECT_EQ(small.endpoint().limits().max_tensors, 3u);
  EXPECT_EQ(small.endpoint().limits().max_tensor_bytes, 5000u);
  std::vector<std::string> four(4, "x"), large{std::string(5001, 'x')};
  Message targets = MessageOf("", four);
  targets.tensors.resize(2);
  targets.targets.resize(1);
  for (const Message& message :
       {Message{std::string(1001, 'x'), {}, {}}, MessageOf("", four), MessageOf("", large), targets}) {
    auto written = StartWrite(**pipe, message);
    ASSERT_TRUE(written.ready());
    const absl::Status status = written.Wait(kLimit).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_TRUE(IsMessageError(status)) << status;
  }
  EXPECT_TRUE(Write(**pipe, {std::string(1000, 'x'), {}, {}}).ok());
  EXPECT_TRUE(ReadDescriptor(*far).ok());
  // The pipe's own error is told apart, whatever its code.
  (*pipe)->Close(absl::InvalidArgumentError("the pipe's"));
  const absl::Status closed = Write(**pipe, {"x", {}, {}});
  EXPECT_TRUE(absl::IsInvalidArgument(closed)) << closed;
  EXPECT_FALSE(IsMessageError(closed)) << closed;
}

TEST_P(PipeTest, LimitsOfTheReceiverCloseThePipe) {
  EndpointOptions options = Options("small", GetParam().way);
  options.max_header_bytes = 1000;
  options.max_tensors = 3;
  options.max_tensor_bytes = 5000;
  Member small(options);
  std::vector<std::string> four(4, "x"), large{std::string(5001, 'x')};
  const std::vector<Message> messages{{std::string(1001, 'x'), {}, {}},
                                      {std::string(10 << 20, 'x'), {}, {}},
                                      MessageOf("", four),
                                      MessageOf("", large)};
  for (const Message& message : messages) {
    auto pipe = client_->Connect(small);
    ASSERT_TRUE(pipe.ok()) << pipe.status();
    auto far = small.Accepted();
    auto written = StartWrite(**pipe, message);
    auto descriptor = ReadDescriptor(*far);
    EXPECT_TRUE(absl::IsInvalidArgument(descriptor.status())) << descriptor.status();
    EXPECT_FALSE(ReadDescriptor(**pipe).ok());  // The sender's end is over too.
    (void)written.Wait(kLimit);
  }
}

TEST_P(PipeTest, ReadsOutOfTurnAreRefused) {
  Connect();
  std::string into(10, '\0');
  const Buffer right{into.data(), 10, {}, nullptr}, wrong{into.data(), 9, {}, nullptr};
  EXPECT_TRUE(absl::IsFailedPrecondition(Read(*far_, {right})));
  auto first = StartReadDescriptor(*far_);
  EXPECT_TRUE(absl::IsFailedPrecondition(ReadDescriptor(*far_).status()));
  std::vector<std::string> tensors{Pattern(10, 1)};
  auto written = StartWrite(*near_, MessageOf("", tensors));
  ASSERT_TRUE(first.Wait(kLimit).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(ReadDescriptor(*far_).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(Read(*far_, {wrong})));
  EXPECT_TRUE(absl::IsInvalidArgument(Read(*far_, {right, right})));
  EXPECT_TRUE(Read(*far_, {right}).ok());
  EXPECT_EQ(into, tensors[0]);
  EXPECT_TRUE(written.Wait(kLimit).ok());
}

TEST_P(PipeTest, ACudaBufferWithoutCudaIsAClearError) {
  Connect();
  Message message;
  message.tensors.push_back({nullptr, 8, {Device::Kind::kCuda, 0}, nullptr});
  absl::Status status = Write(*near_, message);
  if (status.ok()) GTEST_SKIP() << "this machine has CUDA";
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  std::vector<std::string> tensors{"x"};
  message = MessageOf("", tensors);
  message.targets = {{Device::Kind::kCuda, 0}};
  status = Write(*near_, message);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(IsMessageError(status)) << status;
  EXPECT_TRUE(Write(*near_, {"the pipe lives", {}, {}}).ok());
  EXPECT_TRUE(ReadDescriptor(*far_).ok());
}

TEST_P(PipeTest, PipesWaitForOnPipe) {
  auto late = CreateEndpoint(Options("late", GetParam().way));
  ASSERT_TRUE(late.ok());
  auto pipe = client_->Connect((*late)->addresses());
  ASSERT_TRUE(pipe.ok()) << pipe.status();
  ASSERT_TRUE(Write(**pipe, {"early", {}, {}}).ok());
  base::Promise<std::shared_ptr<Pipe>> promise;
  (*late)->OnPipe([promise](std::shared_ptr<Pipe> one) { promise.Set(std::move(one)); });
  auto far = promise.future().Wait(kLimit);
  ASSERT_TRUE(far.ok());
  auto received = ReadDescriptor(**far);
  ASSERT_TRUE(received.ok()) << received.status();
  EXPECT_EQ(received->header, "early");
}

INSTANTIATE_TEST_SUITE_P(
    Ways, PipeTest,
    ::testing::Values(Case{Way::kTcp4, false}, Case{Way::kTcp6, false}, Case{Way::kUnix, false},
                      Case{Way::kTcp4, true}, Case{Way::kUnix, true}, Case{Way::kTcp4, false, false},
                      Case{Way::kUnix, false, false}, Case{Way::kTcpPsk, false}, Case{Way::kTcpCert, false}),
    [](const auto& info) {
      return WayName(info.param.way) + (info.param.cma ? "Cma" : "") + (info.param.mpt ? "" : "Basic");
    });

}  // namespace
}  // namespace Atoll::transport::testing
