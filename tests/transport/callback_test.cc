// Where callbacks run, and what becomes of an endpoint when one throws.
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>

#include "absl/strings/match.h"
#include "absl/synchronization/notification.h"
#include "atoll/tests/transport/raw_socket.h"
#include "atoll/tests/transport/testing.h"

namespace Atoll::transport::testing {
namespace {

class CallbackTest : public ::testing::Test {
 protected:
  struct Ends {
    std::shared_ptr<Pipe> near, far;
  };
  Ends Connect() {
    auto pipe = client_.Connect(server_);
    EXPECT_TRUE(pipe.ok()) << pipe.status();
    Ends ends{*pipe, server_.Accepted()};
    // The further connections are there once a message has come through.
    EXPECT_TRUE(Write(*ends.near, {"first", {}, {}}).ok());
    EXPECT_TRUE(ReadDescriptor(*ends.far).ok());
    return ends;
  }
  /// Returns once the client's loop has handled what the system had for it.
  void Fence() { (void)client_.Connect(std::vector<std::string>()); }

  Member server_{Options("server", Way::kUnix)};
  Member client_{Options("client", Way::kUnix)};
};

// TensorPipe lets whoever is inside a write run what is due for all pipes of the endpoint. The caller may
// hold locks that the callback takes.
TEST_F(CallbackTest, AReadsCallbackNeverRunsInsideAWrite) {
  const Ends writes = Connect(), reads = Connect();
  const std::thread::id caller = std::this_thread::get_id();
  bool caught = false;
  for (int i = 0; i < 100 && !caught; ++i) {
    std::string into(8, '\0'), tensor = "12345678";
    base::Promise<std::thread::id> descriptor, read;
    base::Future<base::Unit> written = base::Promise<base::Unit>().future();
    reads.near->ReadDescriptor([&](absl::StatusOr<Descriptor> got) {
      EXPECT_TRUE(got.ok()) << got.status();
      descriptor.Set(std::this_thread::get_id());
    });
    Fence();  // The read has begun.
    writes.near->Write({"inside this write", {}, {}}, [&](absl::Status status) {
      EXPECT_TRUE(status.ok()) << status;
      if (std::this_thread::get_id() != caller) return;  // The loop was quicker.
      caught = true;
      const uint64_t before = client_.endpoint().counters().bytes_received;
      written = StartWrite(*reads.far, {"for the other pipe", {{tensor.data(), 8, {}, nullptr}}, {}});
      EXPECT_TRUE(Poll([&] { return client_.endpoint().counters().bytes_received > before; }));
      Fence();
    });
    if (!caught) {
      written = StartWrite(*reads.far, {"again", {{tensor.data(), 8, {}, nullptr}}, {}});
    }
    auto descriptor_in = descriptor.future().Wait(kLimit);
    ASSERT_TRUE(descriptor_in.ok());
    EXPECT_NE(*descriptor_in, caller);
    reads.near->Read({{into.data(), 8, {}, nullptr}}, [&](absl::Status status) {
      EXPECT_TRUE(status.ok()) << status;
      read.Set(std::this_thread::get_id());
    });
    auto read_in = read.future().Wait(kLimit);
    ASSERT_TRUE(read_in.ok());
    EXPECT_NE(*read_in, caller);
    EXPECT_EQ(into, tensor);
    EXPECT_TRUE(written.Wait(kLimit).ok());
    ASSERT_TRUE(ReadDescriptor(*writes.far).ok());
  }
  EXPECT_TRUE(caught);
}

TEST_F(CallbackTest, RefusalsOfReadsComeOnTheLoopToo) {
  const Ends ends = Connect();
  base::Promise<std::thread::id> promise;
  ends.near->Read({}, [&](absl::Status status) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    promise.Set(std::this_thread::get_id());
  });
  auto thread = promise.future().Wait(kLimit);
  ASSERT_TRUE(thread.ok());
  EXPECT_NE(*thread, std::this_thread::get_id());
}

class BrokenTest : public CallbackTest {
 protected:
  BrokenTest() : throws_(Connect()), other_(Connect()) {
    client_.endpoint().OnBroken([told = told_](absl::Status status) { told.Set(std::move(status)); });
    outstanding_ = StartReadDescriptor(*other_.near);
  }
  void ExpectTheEnd() {
    auto told = told_.future().Wait(kLimit);
    EXPECT_TRUE(absl::IsInternal(told.status())) << told.status();
    EXPECT_TRUE(absl::StrContains(told.status().message(), "thrown by a test")) << told.status();
    auto outstanding = outstanding_.Wait(kLimit);
    EXPECT_TRUE(absl::IsInternal(outstanding.status())) << outstanding.status();
    EXPECT_TRUE(absl::IsInternal(ReadDescriptor(*other_.near).status()));
    EXPECT_TRUE(absl::IsInternal(Write(*other_.near, {"late", {}, {}})));
    auto late = client_.Connect(server_);
    EXPECT_TRUE(absl::IsInternal(late.status())) << late.status();
    // The peer learns it, and is well.
    EXPECT_TRUE(absl::IsUnavailable(ReadDescriptor(*other_.far).status()));
    Member another(Options("another", Way::kUnix));
    EXPECT_TRUE(another.Connect(server_).ok());
    // Who asks late is told too.
    base::Promise<base::Unit> again;
    client_.endpoint().OnBroken([again](absl::Status status) { again.Set(std::move(status)); });
    EXPECT_TRUE(absl::IsInternal(again.future().Wait(kLimit).status()));
  }

  base::Promise<base::Unit> told_;
  const Ends throws_, other_;
  base::Future<Descriptor> outstanding_ = base::Promise<Descriptor>().future();
};

TEST_F(BrokenTest, AReadsCallbackThatThrowsEndsAllThatIsOutstanding) {
  throws_.near->ReadDescriptor(
      [](absl::StatusOr<Descriptor>) { throw std::runtime_error("thrown by a test"); });
  ASSERT_TRUE(Write(*throws_.far, {"go", {}, {}}).ok());
  ExpectTheEnd();
}

TEST_F(BrokenTest, AWritesCallbackThatThrowsDoesNotAbort) {
  throws_.near->Write({"go", {}, {}}, [](absl::Status) { throw std::runtime_error("thrown by a test"); });
  ExpectTheEnd();
}

TEST_F(BrokenTest, AConnectUnderWayFailsToo) {
  RawListener silent(Way::kUnix);
  base::Promise<std::shared_ptr<Pipe>> promise;
  client_.endpoint().Connect(
      {silent.address()}, {}, Lane::kControl, kLimit,
      [promise](absl::StatusOr<std::shared_ptr<Pipe>> pipe) { promise.Set(std::move(pipe)); });
  const Fd held = silent.Accept();
  throws_.near->Write({"go", {}, {}}, [](absl::Status) { throw std::runtime_error("thrown by a test"); });
  auto pipe = promise.future().Wait(kLimit);
  EXPECT_TRUE(absl::IsInternal(pipe.status())) << pipe.status();
  ExpectTheEnd();
}

}  // namespace
}  // namespace Atoll::transport::testing
