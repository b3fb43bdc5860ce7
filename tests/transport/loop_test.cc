// The end of a loop: who may touch it then, and what is kept.
#include "atoll/transport/loop.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <memory>
#include <thread>

#include "absl/synchronization/notification.h"
#include "atoll/tests/transport/raw_socket.h"
#include "atoll/transport/transport_context.h"

namespace Atoll::transport::testing {
namespace {

TEST(Loop, NobodyElseRunsTasksUntilItsTimersAreGone) {
  auto loop = *Loop::Create("loop-test");
  bool ran = false;  // Guarded by the order that the test is about.
  auto on_drop = [&loop, &ran] {
    // The loop drops its timers. Another thread's task must not touch them now, so it waits for the loop.
    std::thread other([&loop, &ran] {
      loop->Defer([&loop, &ran] {
        ran = true;
        loop->At(absl::InfiniteFuture(), [] {});
      });
    });
    other.join();
    EXPECT_FALSE(ran);
  };
  loop->Defer([&loop, &on_drop] {
    std::shared_ptr<void> token(nullptr, [&on_drop](void*) { on_drop(); });
    loop->At(absl::InfiniteFuture(), [token = std::move(token)] {});
  });
  loop->Stop(absl::ZeroDuration(), nullptr);
  loop->Join();
  EXPECT_TRUE(ran);
}

TEST(Loop, ATimerAfterItsEndIsDropped) {
  auto loop = *Loop::Create("loop-test");
  loop->Stop(absl::ZeroDuration(), nullptr);
  loop->Join();
  auto held = std::make_shared<int>(1);
  loop->Defer([&] { loop->At(loop->Now(), [copy = held] {}); });
  EXPECT_EQ(held.use_count(), 1);
}

struct Transport {
  Transport() {
    engine->loop = *Loop::Create("loop-test");
    TransportContext::Options options;
    options.handshake = {"test", {"self", base::NewIncarnation()}, kKey, "fingerprint", kProtocolVersion};
    options.handshake_limit = kLimit;
    options.max_unauthenticated = 10;
    context = std::make_shared<TransportContext>(engine, options);
  }
  ~Transport() { context->join(); }
  void Fence() {
    absl::Notification done;
    engine->loop->Defer([&] { done.Notify(); });
    done.WaitForNotification();
  }
  std::shared_ptr<Engine> engine = std::make_shared<Engine>();
  std::shared_ptr<TransportContext> context;
};

TEST(TransportContext, ASocketThatCannotBeWatchedIsAnError) {
  Transport transport;
  Fd file(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));  // epoll takes no files.
  ASSERT_TRUE(file.valid());
  EXPECT_FALSE(transport.context->Serve(std::move(file), *ParseAddress("127.0.0.1:1")).ok());
}

TEST(TransportContext, ARouteThatIsAskedForAfterTheEndLeavesNothing) {
  RawListener silent(Way::kUnix);
  std::weak_ptr<TransportContext> weak;
  {
    Transport transport;
    weak = transport.context;
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    const Fd peer(ends[1]);
    const base::MemberId id{"peer", base::Incarnation(1)};
    std::shared_ptr<tensorpipe::transport::Connection> first;
    absl::Notification done;
    transport.engine->loop->Defer([&] {
      auto link = std::make_shared<Link>(PeerInfo{id, Lane::kControl, silent.address(), true});
      const std::string url =
          transport.context->Offer({Fd(ends[0]), id, Purpose{0, 0}, *ParseAddress(silent.address())}, link);
      first = transport.context->connect(url.substr(url.find("://") + 3));
      done.Notify();
    });
    done.WaitForNotification();
    transport.context->close();
    transport.Fence();
    transport.Fence();
    auto late = transport.context->connect("route/1/0");
    transport.Fence();
    first.reset();
    late.reset();
  }
  EXPECT_TRUE(weak.expired());
}

}  // namespace
}  // namespace Atoll::transport::testing
