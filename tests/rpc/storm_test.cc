// What a member is left with when its peer is killed, or stopped and woken, at any moment of much traffic: every call
// ends once, with the right word on whether it ran; every loan comes back; nothing of the peer stays behind.
//
// The moments are drawn from a seed, which is printed; ATOLL_STORM_SEED repeats a run (as far as two processes can),
// ATOLL_STORM_MOMENTS says how many. A few are always the same; many are others each time.
#include <gtest/gtest.h>
#include <malloc.h>
#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <thread>

#include "absl/cleanup/cleanup.h"
#include "agent_fixture.h"
#include "atoll/base/log.h"
#include "storm_process.h"
#include "storm_shared.h"

namespace Atoll::rpc {
namespace {

using base::GetRan;
using base::Ran;

int FromEnvironment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

class Storm : public ::testing::Test {
 protected:
  enum class What { kNothing, kSent, kReceived, kAccepted, kAuthenticated, kAllocated, kServed, kEnded };
  static constexpr const char* kWhatNames[] = {"nothing",       "bytes sent", "bytes received", "accepted",
                                               "authenticated", "allocated",  "served",         "ended"};
  struct Moment {
    What what = What::kNothing;
    uint64_t count = 0;
  };
  struct Made {
    int id = 0;
    std::string method;
    bool one_way = false;
    bool hurried = false;  // Its time runs out soon.
    at::Tensor into;
    // Under mu_.
    int ends = 0, lent = 0, returned = 0;
    absl::Status status;
  };

  uint64_t Below(uint64_t limit) { return random_() % limit; }

  void StartSurvivor() {
    transport::EndpointOptions options = StormEndpoint({"survivor", base::NewIncarnation()}, way_);
    agent_ = StartAgent(options, absl::Seconds(1));
    MethodOptions counted;
    counted.allocate = [this](const base::MemberId&, absl::string_view,
                              absl::Span<const TensorMeta> metas) -> absl::StatusOr<std::vector<at::Tensor>> {
      ++allocated_;
      return std::vector<at::Tensor>{at::empty(metas[0].sizes, metas[0].dtype)};
    };
    ASSERT_TRUE(agent_
                    ->Register(
                        {"push"},
                        [this](ServerCall call) {
                          {
                            absl::MutexLock lock(&mu_);
                            ++pushed_[{call.caller.incarnation.value(), call.request.body}];
                          }
                          EXPECT_TRUE(IsWhole(call.request.tensors.at(0)));
                          ++served_;
                          std::move(call.responder).Reply(Payload());
                        },
                        counted)
                    .ok());
    ASSERT_TRUE(agent_
                    ->Register({"echo"},
                               [](ServerCall call) {
                                 Payload reply;
                                 reply.body = call.request.body;
                                 std::move(call.responder).Reply(std::move(reply));
                               })
                    .ok());
  }
  void StartBystander() {
    bystander_ = StartAgent(StormEndpoint({"bystander", base::NewIncarnation()}, way_), absl::Seconds(20));
    bystander_->AddPeer({agent_->self(), agent_->addresses()});
    Bystand();
  }
  void StopBystander() {
    EXPECT_TRUE(bystander_->Shutdown(kHang).ok());
    bystander_ = nullptr;
  }
  static std::unique_ptr<Agent> StartAgent(const transport::EndpointOptions& endpoint_options,
                                           absl::Duration stall_limit) {
    auto endpoint = transport::CreateEndpoint(endpoint_options);
    EXPECT_TRUE(endpoint.ok()) << endpoint.status();
    AgentOptions options;
    options.endpoint = *endpoint;
    options.self = endpoint_options.self;
    options.worker_threads = 2;
    options.keep_buffer_bytes = 0;  // What is kept is no leak, but cannot be told from one.
    options.stall_limit = stall_limit;
    auto agent = Agent::Start(options);
    EXPECT_TRUE(agent.ok()) << agent.status();
    return *std::move(agent);
  }
  /// Others are served as ever.
  void Bystand() {
    Payload request;
    request.body = "bystander";
    const auto reply = bystander_->Call("survivor", {"echo"}, std::move(request)).Wait(kHang);
    EXPECT_TRUE(reply.ok()) << reply.status();
  }

  static constexpr int64_t kPlaces = 64;
  static uint8_t* Place(const at::Tensor& tensor, int64_t i) {
    return static_cast<uint8_t*>(tensor.data_ptr()) + (kStormBytes - 1) / (kPlaces - 1) * i;
  }
  static bool Holds(const at::Tensor& tensor, uint8_t byte) {
    for (int64_t i = 0; i < kPlaces; ++i) {
      if (*Place(tensor, i) != byte) return false;
    }
    return true;
  }
  static bool IsWhole(const at::Tensor& tensor) {
    return tensor.nbytes() == kStormBytes && Holds(tensor, kStormByte);
  }

  void Make(std::string method, bool large, bool one_way, bool hurried) {
    auto made = std::make_shared<Made>();
    made->id = next_id_++;
    ASSERT_LT(made->id, kStormCalls);
    made->method = std::move(method);
    made->one_way = one_way;
    made->hurried = hurried && !one_way;
    Payload request;
    request.body = absl::StrCat(made->id);
    if (large) {
      made->lent = 1;
      request.tensors.push_back(Lend(large_, [this, made] {
        absl::MutexLock lock(&mu_);
        ++made->returned;
      }));
    }
    made_.push_back(made);
    auto ended = [this, made](const absl::Status& status) {
      // The memory is ours again.
      if (!status.ok() && made->into.defined()) {
        for (int64_t i = 0; i < kPlaces; ++i) *Place(made->into, i) = 0x11;
      }
      absl::MutexLock lock(&mu_);
      made->status = status;
      if (++made->ends == 1) ++ended_;
    };
    if (one_way) {
      agent_->Send("victim", {made->method}, std::move(request))
          .Then([ended](const absl::StatusOr<base::Unit>& taken) { ended(taken.status()); });
      return;
    }
    CallOptions options;
    if (hurried) options.timeout = absl::Milliseconds(Below(300));
    options.reply_inline = Below(2) == 0;
    if (made->method == "pull") {
      made->into = into_.at(used_into_++);
      options.reply_into = {made->into};
    }
    agent_->Call("victim", {made->method}, std::move(request), options,
                 [ended, made](absl::StatusOr<Received> reply) {
                   if (reply.ok() && made->into.defined() && !IsWhole(made->into)) {
                     return ended(absl::InternalError("another answer"));
                   }
                   ended(reply.status());
                 });
  }

  uint64_t Progress(What what) {
    const transport::Endpoint::Counters now = agent_->endpoint()->counters();
    switch (what) {
      case What::kSent:
        return now.bytes_sent - before_.bytes_sent;
      case What::kReceived:
        return now.bytes_received - before_.bytes_received;
      case What::kAccepted:
        return now.accepted - before_.accepted;
      case What::kAuthenticated:
        return now.authenticated - before_.authenticated;
      case What::kAllocated:
        return allocated_;
      case What::kServed:
        return served_;
      case What::kEnded: {
        absl::MutexLock lock(&mu_);
        return ended_;
      }
      case What::kNothing:
        break;
    }
    return 0;
  }
  Moment DrawMoment(int pushes) {
    // Half of them before 4 KiB have passed: in the handshakes.
    const double log_bytes = std::log(way_ == 0 ? 16e3 : 2.0 * kStormBytes);
    const double share = std::uniform_real_distribution<double>(0, 1)(random_);
    Moment moment{static_cast<What>(Below(8)), 0};
    switch (moment.what) {
      case What::kSent:
      case What::kReceived:
        moment.count = static_cast<uint64_t>(std::exp(share * log_bytes));
        break;
      case What::kAccepted:
      case What::kAuthenticated:
        moment.count = 1 + Below(6);
        break;
      case What::kAllocated:
      case What::kServed:
        moment.count = 1 + Below(pushes + 1);
        break;
      case What::kEnded:
        moment.count = 1 + Below(made_.size());
        break;
      case What::kNothing:
        break;
    }
    return moment;
  }
  /// Until `moment`, or until all has been done that will be.
  void Await(const Moment& moment, int pushes) {
    const size_t parked = 1;
    const absl::Time limit = absl::Now() + 4 * kHang;
    for (int turn = 0; Progress(moment.what) < moment.count; ++turn) {
      if (Progress(What::kEnded) >= made_.size() - parked && served_ >= pushes) return;
      if (absl::Now() > limit) {
        ADD_FAILURE() << "no progress: " << Progress(What::kEnded) << " of " << made_.size()
                      << " calls have ended, " << served_ << " of " << pushes << " pushes have come";
        return;
      }
      if (turn < 2000) {
        std::this_thread::yield();
      } else {
        poll(nullptr, 0, 1);
      }
    }
  }

  enum class Act { kKill, kStopAndKill, kStopAndContinue };
  void Round(Act act, int pushes, int puts, int pulls, bool drawn) {
    made_.clear();
    used_into_ = 0;
    allocated_ = 0;
    served_ = 0;
    {
      absl::MutexLock lock(&mu_);
      ended_ = 0;
      pushed_.clear();
    }
    before_ = agent_->endpoint()->counters();
    Victim victim = nursery_.Spawn({way_, "victim", 0, pushes, {agent_->self(), agent_->addresses()}});
    agent_->AddPeer(victim.peer());
    std::vector<std::pair<std::string, bool>> calls{{"park", false}};
    for (int i = 0; i < puts; ++i) calls.emplace_back("mark", true);
    for (int i = 0; i < pulls; ++i) calls.emplace_back("pull", false);
    for (int i = 0; i < 12; ++i) calls.emplace_back("mark", false);
    std::shuffle(calls.begin(), calls.end(), random_);
    for (const auto& [method, large] : calls) {
      const bool hurried = drawn && Below(act == Act::kKill ? 8 : 2) == 0;
      Make(method, large, method == "mark" && Below(4) == 0, hurried);
    }
    const Moment moment = drawn ? DrawMoment(pushes) : Moment{What::kEnded, calls.size()};
    const Moment later = DrawMoment(pushes);
    SCOPED_TRACE(absl::StrCat("act ", static_cast<int>(act), " at ", moment.count, " ",
                              kWhatNames[static_cast<int>(moment.what)]));
    Await(moment, pushes);
    if (act != Act::kKill) victim.Signal(SIGSTOP);
    if (act == Act::kStopAndContinue) {
      if (later.what == What::kEnded) AwaitEnds(/*hurried=*/true);  // Which need nobody.
      victim.Signal(SIGCONT);
      Await(later, pushes);
    }
    if (act == Act::kStopAndKill && later.what == What::kEnded) AwaitEnds(/*hurried=*/true);
    Bystand();
    victim.Kill();
    AwaitEnds(/*hurried=*/false);
    CheckWords();
  }

  /// Until all calls have ended, or all that are hurried.
  void AwaitEnds(bool hurried) {
    auto there = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
      for (const auto& made : made_) {
        if (made->ends == 0 && (made->hurried || !hurried)) return false;
      }
      return true;
    };
    absl::MutexLock lock(&mu_);
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&there), kHang));
  }

  void CheckWords() {
    auto back = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
      for (const auto& made : made_) {
        if (made->returned != made->lent) return false;
      }
      return true;
    };
    absl::MutexLock lock(&mu_);
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&back), kHang)) << "a loan did not come back";
    for (const auto& made : made_) {
      const int ran = nursery_.Marks(made->id);
      const Ran word = GetRan(made->status);
      SCOPED_TRACE(absl::StrCat("call ", made->id, " of ", made->method, made->one_way ? " one way" : "",
                                ", ran ", ran, " times: ", made->status.ToString()));
      EXPECT_EQ(made->ends, 1);
      EXPECT_LE(ran, 1);
      if (made->status.ok()) {
        EXPECT_TRUE(made->one_way || ran == 1);
        EXPECT_NE(made->method, "park");
      } else {
        EXPECT_TRUE(absl::IsUnavailable(made->status) || absl::IsDeadlineExceeded(made->status) ||
                    absl::IsDataLoss(made->status));
        EXPECT_FALSE(word == Ran::kNo && ran != 0);
        EXPECT_FALSE(word == Ran::kYes && ran != 1);
        EXPECT_TRUE(!made->into.defined() || Holds(made->into, 0x11)) << "written after its end";
      }
      ++words_[made->status.ok() ? "ok" : std::string(base::RanName(word))];
    }
    for (const auto& [push, times] : pushed_) EXPECT_EQ(times, 1) << "push " << push.second;
    past_.insert(past_.end(), made_.begin(), made_.end());
  }

  /// Back to `start` in all that is counted; `slack_kib` more memory is allowed.
  void CheckHolding(const Holding& start, int64_t slack_kib) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    slack_kib = 1 << 30;  // They keep what is freed.
#endif
    Holding now;
    // Lingering sockets have a second.
    for (const absl::Time limit = absl::Now() + kHang; absl::Now() < limit; poll(nullptr, 0, 1)) {
      malloc_trim(0);
      now = Holding::Now();
      if (now.descriptors <= start.descriptors && now.threads <= start.threads &&
          now.resident_kib <= start.resident_kib + slack_kib) {
        break;
      }
    }
    EXPECT_EQ(now.descriptors, start.descriptors);
    EXPECT_EQ(now.threads, start.threads);
    EXPECT_EQ(now.shared_maps, start.shared_maps);
    EXPECT_EQ(now.locked_kib, start.locked_kib);
    EXPECT_LE(now.resident_kib, start.resident_kib + slack_kib);
    std::fprintf(stderr, "%s: %zu descriptors, %zu threads, memory %+lld KiB\n", kStormWays[way_],
                 now.descriptors, now.threads, static_cast<long long>(now.resident_kib - start.resident_kib));
  }

  void Batch(int way, int rounds) {
    SCOPED_TRACE(kStormWays[way]);
    way_ = way;
    StartSurvivor();
    Holding start = Holding::Now();
    StartBystander();
    Round(Act::kKill, 2, 2, 2, /*drawn=*/false);  // Touches all that is kept.
    StopBystander();
    ASSERT_FALSE(HasFailure());
    CheckHolding(start, 1 << 30);
    malloc_trim(0);
    start.resident_kib = Holding::Now().resident_kib;
    StartBystander();
    for (int round = 0; round < rounds && !HasFailure(); ++round) {
      SCOPED_TRACE(absl::StrCat("round ", round));
      const int puts = static_cast<int>(Below(3)), pulls = static_cast<int>(Below(3));
      const int pushes = static_cast<int>(Below(3)) + (puts + pulls == 0 ? 1 : 0);
      Round(static_cast<Act>(Below(3)), pushes, puts, pulls, /*drawn=*/true);
    }
    StopBystander();
    CheckHolding(start, 24 << 10);  // Less than half of one transfer.
    {
      absl::MutexLock lock(&mu_);
      for (const auto& made : past_) EXPECT_EQ(made->ends, 1);
    }
    past_.clear();
    EXPECT_TRUE(agent_->Shutdown(kHang).ok());
    agent_ = nullptr;
  }

  Nursery nursery_;
  std::mt19937_64 random_;
  int way_ = 0;
  at::Tensor large_ = at::full({kStormBytes}, kStormByte, at::kByte);
  std::vector<at::Tensor> into_{at::full({kStormBytes}, 1, at::kByte), at::full({kStormBytes}, 1, at::kByte)};
  size_t used_into_ = 0;
  int next_id_ = 0;
  std::vector<std::shared_ptr<Made>> made_, past_;
  transport::Endpoint::Counters before_;
  std::atomic<int> allocated_{0}, served_{0};
  absl::Mutex mu_;
  uint64_t ended_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<std::pair<uint64_t, std::string>, int> pushed_ ABSL_GUARDED_BY(mu_);
  std::map<std::string, int> words_;
  std::unique_ptr<Agent> agent_, bystander_;
};

TEST_F(Storm, APeerMayEndOrStopAtAnyMoment) {
  constexpr int kFew = 20;
  const int moments = FromEnvironment("ATOLL_STORM_MOMENTS", kFew);
  const int seed =
      FromEnvironment("ATOLL_STORM_SEED", moments > kFew ? static_cast<int>(std::random_device()() >> 1) : 1);
  std::fprintf(stderr, "ATOLL_STORM_SEED=%d ATOLL_STORM_MOMENTS=%d\n", seed, moments);
  base::SetLogLevel(base::LogLevel::kError);  // Else it tells of each.
  absl::Cleanup restore = [] { base::SetLogLevel(base::LogLevel::kWarning); };
  random_.seed(static_cast<uint64_t>(seed));
  const int ways = static_cast<int>(std::size(kStormWays));
  for (int way = 0; way < ways && !HasFailure(); ++way) {
    Batch(way, moments / ways + (way < moments % ways ? 1 : 0));
  }
  EXPECT_GT(words_["ok"], 0);
  EXPECT_GT(words_["no"], 0);
  EXPECT_GT(words_["maybe"], 0);
  for (const auto& [word, count] : words_) std::fprintf(stderr, "%s: %d calls\n", word.c_str(), count);
}

}  // namespace
}  // namespace Atoll::rpc
