// A child of fork can use no endpoint and no pipe of its parent, and harms neither.
#include <atomic>
#include <thread>

#include "../in_child.h"
#include "testing.h"

namespace Atoll::transport::testing {
namespace {

using Atoll::testing::InChild;
using Atoll::testing::WrongInChild;

class ForkTest : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    server_ = std::make_unique<Member>(Options("server", GetParam()));
    client_ = std::make_unique<Member>(Options("client", GetParam()));
    auto pipe = client_->Connect(*server_);
    ASSERT_TRUE(pipe.ok()) << pipe.status();
    near_ = *pipe;
    far_ = server_->Accepted();
    ASSERT_NE(far_, nullptr);
  }

  void OneMessage() {
    base::Promise<std::string> received;
    far_->ReadDescriptor([received](absl::StatusOr<Descriptor> descriptor) {
      received.Set(descriptor.ok() ? absl::StatusOr<std::string>(descriptor->header) : descriptor.status());
    });
    ASSERT_TRUE(StartWrite(*near_, Message{"hello", {}, {}}).Wait(kLimit).ok());
    auto got = received.future().Wait(kLimit);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(*got, "hello");
  }

  // Everything that there is to call, and then the destructors.
  std::string UseAll() {
    std::string wrong;
    int called = 0;
    auto expect = [&](absl::string_view what) {
      return [&wrong, &called, what](const absl::Status& status) {
        ++called;
        wrong += WrongInChild(status, what);
      };
    };
    near_->Write(Message{"from the child", {}, {}}, expect("Write"));
    near_->Read({}, expect("Read"));
    near_->ReadDescriptor(
        [done = expect("ReadDescriptor")](absl::StatusOr<Descriptor> d) { done(d.status()); });
    near_->Close(absl::CancelledError("by the child"));
    client_->endpoint().Connect(
        server_->endpoint().addresses(), {}, Lane::kBulk, kLimit,
        [done = expect("Connect")](absl::StatusOr<std::shared_ptr<Pipe>> pipe) { done(pipe.status()); });
    if (called != 4) wrong += "a callback did not run inside its call";
    if (near_->Reaches({}, {})) wrong += "a pipe of the parent reaches a device";
    (void)client_->endpoint().counters();
    near_.reset();
    far_.reset();
    client_.reset();
    server_.reset();
    return wrong;
  }

  std::unique_ptr<Member> server_, client_;
  std::shared_ptr<Pipe> near_, far_;
};

TEST_P(ForkTest, AChildIsToldSoAndSendsNothing) {
  OneMessage();
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(InChild([this] { return UseAll(); }), 0);
    OneMessage();
  }
  auto again = client_->Connect(*server_, Lane::kBulk);
  ASSERT_TRUE(again.ok()) << again.status();
  ASSERT_NE(server_->Accepted(), nullptr);
  OneMessage();
  // What the child of another process sends is in no count of ours, but would be in what arrives.
  EXPECT_TRUE(Poll([&] {
    return client_->endpoint().counters().bytes_sent == server_->endpoint().counters().bytes_received;
  }));
}

TEST_P(ForkTest, LocksThatAreHeldWhileForkingDoNotMatter) {
  ATOLL_SKIP_IF_A_BUSY_FORK_HANGS();
  std::atomic<bool> enough{false};
  std::thread busy([&] {
    while (!enough) OneMessage();
  });
  for (int i = 0; i < 6; ++i) EXPECT_EQ(InChild([this] { return UseAll(); }), 0);
  enough = true;
  busy.join();
  OneMessage();
}

TEST_P(ForkTest, AnEndpointMadeAfterTheForkIsAsGoodAsAny) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ATOLL_TEST_SKIPPED: ThreadSanitizer takes no new threads in a child of fork";
#endif
  const Way way = GetParam();
  EXPECT_EQ(InChild([this, way]() -> std::string {
              Member own(Options("child", way));
              auto pipe = own.Connect(server_->endpoint().addresses(), server_->id());
              return std::string(pipe.status().message());
            }),
            0);
  ASSERT_NE(server_->Accepted(), nullptr);
  OneMessage();
}

INSTANTIATE_TEST_SUITE_P(Ways, ForkTest, ::testing::Values(Way::kTcp4, Way::kUnix),
                         [](const auto& info) { return WayName(info.param); });

}  // namespace
}  // namespace Atoll::transport::testing
