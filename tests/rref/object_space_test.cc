#include <atomic>
#include <map>
#include <memory>
#include <thread>

#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "testing.h"

namespace Atoll::rref {
namespace {

using testing::HasSubstr;

class ObjectSpaceTest : public SpacesTest {
 protected:
  // The owner, with class "Test", and two users.
  void SetUp() override {
    owner_ = &Start("owner");
    ann_ = &Start("ann");
    bob_ = &Start("bob");
    ASSERT_TRUE(owner_->objects->RegisterClass("Test", TestFactory(&record_)).ok());
    ASSERT_TRUE(owner_->objects->RegisterClass("Slow", TestFactory(&record_, &proceed_)).ok());
  }

  std::shared_ptr<RRef> Make(Member& user, const std::string& text, const std::string& pin = "") {
    auto rref = user.objects->Create("owner", "Test", Body(text), pin).Wait(kHang);
    EXPECT_TRUE(rref.ok()) << rref.status();
    return rref.ok() ? *rref : nullptr;
  }
  static absl::StatusOr<std::string> Get(const RRef& rref) {
    auto reply = rref.Call({"get"}, Body("!")).Wait(kHang);
    if (!reply.ok()) return reply.status();
    return reply->body;
  }

  Record record_;
  absl::Notification proceed_;
  Member *owner_, *ann_, *bob_;
};

TEST_F(ObjectSpaceTest, CreatesCallsAndReleases) {
  auto rref = Make(*ann_, "text");
  ASSERT_NE(rref, nullptr);
  EXPECT_EQ(rref->owner(), owner_->agent->self());
  EXPECT_EQ(*Get(*rref), "text!");
  rpc::Payload request;
  request.tensors.push_back(rpc::Copy(at::ones({3, 2})));
  auto reply = rref->Call({"add_one"}, std::move(request)).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(reply->tensors[0].equal(at::ones({3, 2}).mul(2)));
  EXPECT_EQ(record_.allocated(), 1);
  auto list = owner_->objects->List();
  ASSERT_EQ(list.size(), 1u);
  EXPECT_EQ(list[0].class_name, "Test");
  EXPECT_EQ(list[0].holders, std::vector<base::MemberId>{ann_->agent->self()});
  ASSERT_TRUE(owner_->objects->Local(rref->id()).ok());
  EXPECT_FALSE(ann_->objects->Local(rref->id()).ok());
  EXPECT_TRUE(std::move(*rref).Release().Wait(kHang).ok());
  EXPECT_FALSE(rref->valid());
  EXPECT_TRUE(record_.AwaitAlive(0));
  EXPECT_EQ(rref->Call({"get"}, Body("")).Wait(kHang).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(ObjectSpaceTest, DestructionAndMoveAssignmentRelease) {
  auto first = Make(*ann_, "1");
  auto second = Make(*ann_, "2");
  *first = std::move(*second);
  EXPECT_TRUE(record_.AwaitAlive(1));
  EXPECT_EQ(*Get(*first), "2!");
  first.reset();
  EXPECT_TRUE(record_.AwaitAlive(0));
}

TEST_F(ObjectSpaceTest, ErrorsSayWhatAndWhere) {
  auto code = [&](const base::Future<std::shared_ptr<RRef>>& future, const std::string& text) {
    auto result = future.Wait(kHang);
    EXPECT_THAT(std::string(result.status().message()), HasSubstr(text));
    return result.status().code();
  };
  EXPECT_EQ(code(ann_->objects->Create("owner", "None", Body("")), "'None'"), absl::StatusCode::kNotFound);
  EXPECT_EQ(code(ann_->objects->Create("nobody", "Test", Body("")), "nobody"), absl::StatusCode::kNotFound);
  EXPECT_EQ(code(ann_->objects->Create("owner", "Test", Body("fail")), "asked to fail"),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(ann_->objects->Create("owner", "Test", Body("throw"), "pin"), "asked to throw"),
            absl::StatusCode::kInternal);
  EXPECT_EQ(code(ann_->objects->Create("owner", "Test", Body("throw 7")), "the factory threw int"),
            absl::StatusCode::kInternal);
  EXPECT_EQ(code(ann_->objects->Create("owner", "Te\nst", Body("")), "'Te\\nst'"),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(ann_->objects->Create("owner", "Test", Body(""), "\x1b"), "without control characters"),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(ann_->objects->Find("owner", ""), "a pinned name is 1 to 512 bytes"),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(ann_->objects->Find("owner", "pin"), "'pin'"), absl::StatusCode::kNotFound);
  EXPECT_EQ(owner_->objects->Unpin("pin").code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(owner_->objects->List().empty());
  auto rref = Make(*ann_, "x");
  auto reply = rref->Call({"dance"}, Body("")).Wait(kHang);
  EXPECT_EQ(reply.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(reply.status().message()), HasSubstr("owner"));
  rpc::Payload refused = Body("refuse");
  refused.tensors.push_back(rpc::Copy(at::ones({1 << 20})));
  reply = rref->Call({"add_one"}, std::move(refused)).Wait(kHang);
  EXPECT_EQ(reply.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(owner_->objects->RegisterClass("Test", TestFactory(&record_)).code(),
            absl::StatusCode::kAlreadyExists);
}

TEST_F(ObjectSpaceTest, RacingCreatorsGetOneObject) {
  std::vector<base::Future<std::shared_ptr<RRef>>> futures;
  for (Member* user : {ann_, bob_, owner_}) {
    futures.push_back(user->objects->Create("owner", "Slow", Body("one"), "shared"));
  }
  futures.push_back(bob_->objects->Create("owner", "Slow", Body("one"), "shared"));
  proceed_.Notify();
  base::ObjectId id;
  std::vector<std::shared_ptr<RRef>> rrefs;
  for (auto& future : futures) {
    auto rref = future.Wait(kHang);
    ASSERT_TRUE(rref.ok()) << rref.status();
    if (rrefs.empty()) id = (*rref)->id();
    EXPECT_EQ((*rref)->id(), id);
    rrefs.push_back(*rref);
  }
  EXPECT_EQ(record_.made(), 1);
  EXPECT_EQ(owner_->objects->List()[0].holders.size(), 4u);
  futures.clear();  // They hold the references too.
  rrefs.clear();
  EXPECT_EQ(record_.alive(), 1);  // Its name holds it.
  auto found = ann_->objects->Find("owner", "shared").Wait(kHang);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(*Get(**found), "one!");
  ASSERT_TRUE(owner_->objects->Unpin("shared").ok());
  EXPECT_EQ(record_.alive(), 1);
  found->reset();
  EXPECT_TRUE(record_.AwaitAlive(0));
}

TEST_F(ObjectSpaceTest, AHoldersDeathReleasesAndIsTold) {
  auto anns = Make(*ann_, "ann's");
  auto pinned = Make(*ann_, "pinned", "pin");
  auto bobs = Make(*bob_, "bob's");
  EXPECT_EQ(record_.alive(), 3);
  const base::MemberId ann = ann_->agent->self();
  owner_->objects->OnPeerGone(ann, absl::UnavailableError("killed"));
  owner_->objects->OnPeerGone(ann, absl::UnavailableError("killed"));  // Told twice.
  EXPECT_TRUE(record_.AwaitAlive(2));
  EXPECT_TRUE(record_.AwaitGone(std::vector<std::string>{"ann", "ann"}));
  EXPECT_EQ(*Get(*bobs), "bob's!");
  // The dead cannot come back under the same incarnation.
  auto late = ann_->objects->Create("owner", "Test", Body("late")).Wait(kHang);
  EXPECT_EQ(late.status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(ObjectSpaceTest, AnOwnersDeathFailsCallsWithItsName) {
  auto rref = Make(*ann_, "x");
  auto hanging = rref->Call({"hang"}, Body(""));
  const base::MemberId owner = owner_->agent->self();
  ann_->agent->RemovePeer(owner, absl::UnavailableError("owner was killed"));
  ann_->objects->OnPeerGone(owner, absl::UnavailableError("owner was killed"));
  auto reply = hanging.Wait(kHang);
  EXPECT_EQ(reply.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(reply.status().message()), HasSubstr("owner"));
  reply = rref->Call({"get"}, Body("")).Wait(kHang);
  EXPECT_EQ(reply.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(reply.status().message()), HasSubstr(owner.ToString()));
  EXPECT_EQ(base::GetRan(reply.status()), base::Ran::kNo);
  owner_->agent->RemovePeer(ann_->agent->self(), absl::OkStatus());  // Else its end waits for ann's.
}

// Counts the calls that leave.
class CallCounter : public rpc::Interceptor {
 public:
  absl::Status OnCall(rpc::OutgoingCall& call) override {
    ++count_;
    return absl::OkStatus();
  }
  int count() const { return count_.load(); }

 private:
  std::atomic<int> count_{0};
};

// Scenario init 13.
TEST_F(ObjectSpaceTest, NothingIsSentToTheDead) {
  std::vector<std::shared_ptr<RRef>> rrefs;
  for (int i = 0; i < 100; ++i) rrefs.push_back(Make(*ann_, "x"));
  auto counter = std::make_shared<CallCounter>();
  ann_->agent->AddInterceptor(counter);
  rrefs.pop_back();
  EXPECT_EQ(counter->count(), 1) << "a living owner is told";
  const base::MemberId owner = owner_->agent->self();
  ann_->agent->RemovePeer(owner, absl::UnavailableError("owner was killed"));
  ann_->objects->OnPeerGone(owner, absl::UnavailableError("owner was killed"));
  rrefs.clear();
  EXPECT_EQ(counter->count(), 1) << "a dead one is not";
  owner_->agent->RemovePeer(ann_->agent->self(), absl::OkStatus());  // Else its end waits for ann's.
}

TEST_F(ObjectSpaceTest, ACallThatGoesNowhereEndsInAnotherThread) {
  auto rref = Make(*ann_, "x");
  EXPECT_EQ(RefusedElsewhere(*rref, "odd\nname").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(RefusedElsewhere(*rref, std::string(129, 'a')).code(), absl::StatusCode::kInvalidArgument);
  ann_->objects->OnPeerGone(owner_->agent->self(), absl::UnavailableError("owner was killed"));
  EXPECT_EQ(RefusedElsewhere(*rref, "get").code(), absl::StatusCode::kUnavailable);
}

TEST_F(ObjectSpaceTest, TensorsOfAnObjectWithoutAnOpinionLandInPages) {
  auto rref = Make(*ann_, "x");
  rpc::Payload request;
  request.tensors.push_back(rpc::Copy(at::ones({1 << 18})));
  request.tensors.push_back(rpc::Copy(at::ones({1 << 18})));
  auto reply = rref->Call({"pages"}, std::move(request)).Wait(kHang);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->body, "yy");
}

TEST_F(ObjectSpaceTest, AnObjectGivenUpWhileARequestLandsEndsOnThePool) {
  auto rref = Make(*ann_, "x");
  std::thread::id landed_on;
  record_.OnAllocate([&] {
    landed_on = std::this_thread::get_id();
    owner_->objects->OnPeerGone(ann_->agent->self(), absl::UnavailableError("killed"));
  });
  rpc::Payload request;
  request.tensors.push_back(rpc::Copy(at::ones({1 << 18})));
  auto reply = rref->Call({"add_one"}, std::move(request)).Wait(kHang);
  EXPECT_EQ(reply.status().code(), absl::StatusCode::kNotFound) << reply.status();
  EXPECT_TRUE(record_.AwaitAlive(0));
  EXPECT_NE(record_.last_destroyed_on(), landed_on);
}

TEST_F(ObjectSpaceTest, OwnersMayHoldTheirOwn) {
  auto rref = Make(*owner_, "own");
  EXPECT_EQ(*Get(*rref), "own!");
  EXPECT_EQ(owner_->objects->List()[0].holders, std::vector<base::MemberId>{owner_->agent->self()});
  rref.reset();
  EXPECT_TRUE(record_.AwaitAlive(0));
}

TEST_F(ObjectSpaceTest, AClosedSpaceRefusesAndReferencesOutliveIt) {
  auto rref = Make(*ann_, "x");
  auto own = Make(*owner_, "own");
  owner_->objects.reset();
  EXPECT_EQ(record_.alive(), 0);
  EXPECT_EQ(Get(*rref).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Get(*own).status().code(), absl::StatusCode::kFailedPrecondition);
  ann_->objects.reset();
  EXPECT_EQ(Get(*rref).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(ObjectSpaceTest, ManyThreadsCreateCallAndRelease) {
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      Member& user = t % 2 == 0 ? *ann_ : *bob_;
      for (int i = 0; i < 25; ++i) {
        auto rref = user.objects->Create("owner", "Test", Body(std::to_string(i))).Wait(kHang);
        if (!rref.ok() || Get(**rref).value_or("") != std::to_string(i) + "!") ++failures;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(record_.made(), 100);
  EXPECT_TRUE(record_.AwaitAlive(0));
  EXPECT_TRUE(owner_->objects->List().empty());
}

}  // namespace
}  // namespace Atoll::rref
