// Remote objects where scenarios of calls speak of them: docs/scenarios/rpc.md and batch_rpc.md.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>

#include "testing.h"

namespace Atoll::rref {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class RRefScenarioTest : public SpacesTest {
 protected:
  static absl::StatusOr<std::string> Text(const absl::StatusOr<rpc::Received>& reply) {
    if (!reply.ok()) return reply.status();
    return reply->body;
  }
  Record record_;
};

// Scenario rpc 6. Of what makes an object, and of what is called on it.
TEST_F(RRefScenarioTest, AnErrorKeepsItsKindAndNamesTheOwner) {
  Member& user = Start("user");
  Member& owner = Start("owner");
  for (Member* member : {&user, &owner}) {
    ASSERT_TRUE(member->objects->RegisterClass("Test", TestFactory(&record_)).ok());
  }
  for (Member* to : {&owner, &user}) {
    const std::string name = to->agent->self().name;
    const absl::Status told = user.objects->Create(name, "Test", Body("fail")).Wait(kHang).status();
    EXPECT_TRUE(absl::IsInvalidArgument(told)) << told;
    EXPECT_THAT(std::string(told.message()),
                AllOf(HasSubstr("asked to fail"), HasSubstr(to->agent->self().ToString())));
    const absl::Status thrown = user.objects->Create(name, "Test", Body("throw")).Wait(kHang).status();
    EXPECT_TRUE(absl::IsInternal(thrown)) << thrown;
    EXPECT_THAT(std::string(thrown.message()), AllOf(HasSubstr("std::runtime_error: asked to throw"),
                                                     HasSubstr(to->agent->self().ToString())));
    auto rref = user.objects->Create(name, "Test", Body("x")).Wait(kHang);
    ASSERT_TRUE(rref.ok()) << rref.status();
    const absl::Status called = (*rref)->Call({"no_such"}, Body("")).Wait(kHang).status();
    EXPECT_TRUE(absl::IsUnimplemented(called)) << called;
    EXPECT_THAT(std::string(called.message()), HasSubstr(to->agent->self().ToString()));
  }
}

// Scenario rpc 50.
TEST_F(RRefScenarioTest, AJobOfOneHasObjectsToo) {
  Member& alone = Start("alone");
  ASSERT_TRUE(alone.objects->RegisterClass("Test", TestFactory(&record_)).ok());
  auto rref = alone.objects->Create("alone", "Test", Body("own")).Wait(kHang);
  ASSERT_TRUE(rref.ok()) << rref.status();
  EXPECT_EQ(Text((*rref)->Call({"get"}, Body("!")).Wait(kHang)).value_or(""), "own!");
  EXPECT_TRUE(std::move(**rref).Release().Wait(kHang).ok());
  EXPECT_TRUE(record_.AwaitAlive(0));
  alone.objects.reset();
  EXPECT_TRUE(alone.agent->Shutdown(kHang).ok());
}

/// Answers with what another object answers, later, and holds no thread meanwhile.
class Forwarder : public Object {
 public:
  explicit Forwarder(std::shared_ptr<RRef> other) : other_(std::move(other)) {}
  void Call(rpc::ServerCall call) override {
    other_->Call(call.method, Body(call.request.body), {},
                 [responder = std::move(call.responder)](absl::StatusOr<rpc::Received> reply) mutable {
                   if (!reply.ok()) return std::move(responder).Reply(reply.status());
                   std::move(responder).Reply(Body("forwarded " + reply->body));
                 });
  }

 private:
  const std::shared_ptr<RRef> other_;
};

// Scenario batch_rpc 8. Waited for, gone on with, and kept as an object that others refer to.
TEST_F(RRefScenarioTest, MethodsThatAnswerLaterAndObjectsMadeOfWhatComesLater) {
  Member& user = Start("user");
  Member& owner = Start("owner");
  Member& third = Start("third");
  ASSERT_TRUE(third.objects->RegisterClass("Test", TestFactory(&record_)).ok());
  auto find_inner = [&] {
    return owner.objects->Create("third", "Test", Body("inner"), "inner").Wait(kHang);
  };
  ASSERT_TRUE(owner.objects
                  ->RegisterClass("Forwarder",
                                  [&](const base::MemberId&,
                                      const rpc::Received&) -> absl::StatusOr<std::shared_ptr<Object>> {
                                    auto inner = find_inner();
                                    if (!inner.ok()) return inner.status();
                                    return std::make_shared<Forwarder>(*inner);
                                  })
                  .ok());
  ASSERT_TRUE(owner.objects
                  ->RegisterClass("Value",
                                  [&](const base::MemberId&,
                                      const rpc::Received&) -> absl::StatusOr<std::shared_ptr<Object>> {
                                    auto inner = find_inner();
                                    if (!inner.ok()) return inner.status();
                                    auto value = (*inner)->Call({"get"}, Body(" value")).Wait(kHang);
                                    if (!value.ok()) return value.status();
                                    return std::make_shared<TestObject>(value->body, &record_);
                                  })
                  .ok());
  auto forwarder = user.objects->Create("owner", "Forwarder", Body("")).Wait(kHang);
  ASSERT_TRUE(forwarder.ok()) << forwarder.status();
  EXPECT_EQ(Text((*forwarder)->Call({"get"}, Body("!")).Wait(kHang)).value_or(""), "forwarded inner!");
  base::Promise<std::string> later;
  (*forwarder)->Call({"get"}, Body("?"), {}, [later](const absl::StatusOr<rpc::Received>& reply) {
    later.Set(Text(reply));
  });
  EXPECT_EQ(later.future().Wait(kHang).value_or(""), "forwarded inner?");
  auto value = user.objects->Create("owner", "Value", Body("")).Wait(kHang);
  ASSERT_TRUE(value.ok()) << value.status();
  EXPECT_EQ((*value)->owner(), owner.agent->self());
  EXPECT_EQ(Text((*value)->Call({"get"}, Body("")).Wait(kHang)).value_or(""), "inner value");
  EXPECT_TRUE((*forwarder)->Call({"no_such"}, Body("")).Wait(kHang).status().code() ==
              absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace Atoll::rref
