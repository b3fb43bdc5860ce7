#include "atoll/shard_optim/messages.h"

#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace Atoll::shard_optim {
namespace {

using ::testing::HasSubstr;

ShardArguments Arguments() {
  ShardArguments arguments;
  arguments.model = "net";
  arguments.owner = 1;
  arguments.worker_count = 3;
  arguments.layout = {.owners = 2, .chunk_bytes = 8192, .small_parameter_bytes = 77};
  arguments.policy = Sync{absl::Milliseconds(1234)};
  for (int i = 0; i < 3; ++i) {
    ParameterSpec spec;
    spec.name = absl::StrCat("layer.", i);
    spec.sizes = {i, 2};
    spec.strides = {2, 1};
    arguments.parameters.push_back(spec);
  }
  return arguments;
}

// Decoding any prefix, any extension and any mutation of a body gives an error or a value; nothing else.
template <class Message>
void Torture(const std::string& body) {
  ASSERT_TRUE(Message::Decode(body).ok());
  for (size_t n = 0; n < body.size(); ++n) EXPECT_FALSE(Message::Decode(body.substr(0, n)).ok());
  EXPECT_EQ(Message::Decode(body + "x").status().code(), absl::StatusCode::kInvalidArgument);
  std::mt19937 random(3);
  for (int i = 0; i < 3000 && !body.empty(); ++i) {
    std::string mutated = body;
    for (int flips = 1 + random() % 3; flips > 0; --flips)
      mutated[random() % body.size()] = static_cast<char>(random());
    (void)Message::Decode(mutated);
  }
}

TEST(PolicyTest, WhatIsValidTravels) {
  EXPECT_TRUE(Validate(Policy(Async{})).ok());
  for (absl::Duration limit : {absl::Milliseconds(1), absl::Seconds(60), absl::Hours(365 * 24)}) {
    ASSERT_TRUE(Validate(Policy(Sync{limit})).ok()) << limit;
    ShardArguments arguments = Arguments();
    arguments.policy = Sync{limit};
    auto got = ShardArguments::Decode(arguments.Encode());
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(std::get<Sync>(got->policy).round_limit, limit);
  }
  for (absl::Duration limit : {absl::Microseconds(100), absl::ZeroDuration(), -absl::Seconds(1),
                               absl::Hours(366 * 24), absl::InfiniteDuration()}) {
    absl::Status refused = Validate(Policy(Sync{limit}));
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << limit;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("round_limit"));
  }
}

TEST(MessagesTest, ArgumentsComeBackAsTheyWere) {
  ShardArguments sent = Arguments();
  ShardArguments got = *ShardArguments::Decode(sent.Encode());
  EXPECT_EQ(got.model, "net");
  EXPECT_EQ(got.owner, 1);
  EXPECT_EQ(got.worker_count, 3);
  EXPECT_EQ(got.layout, sent.layout);
  EXPECT_EQ(got.parameters, sent.parameters);
  EXPECT_EQ(std::get<Sync>(got.policy).round_limit, absl::Milliseconds(1234));
  sent.policy = Async{};
  EXPECT_TRUE(std::holds_alternative<Async>(ShardArguments::Decode(sent.Encode())->policy));
}

TEST(MessagesTest, PushComesBackAsItWas) {
  PushGradient sent{
      7, 3, {.lr = 0.5, .beta1 = 0.25, .beta2 = 0.125, .eps = 1, .weight_decay = 2}, AllDefined(11)};
  PushGradient got = *PushGradient::Decode(sent.Encode());
  EXPECT_EQ(got.step, 7);
  EXPECT_EQ(got.chunk, 3);
  EXPECT_EQ(got.optimizer, sent.optimizer);
  EXPECT_EQ(got.defined, std::string("\xff\x07"));
}

TEST(MessagesTest, BrokenBodiesAreErrors) {
  Torture<ShardArguments>(Arguments().Encode());
  Torture<Attach>(Attach{2, Arguments()}.Encode());
  Torture<Attach::Reply>(Attach::Reply{3, true, false}.Encode());
  Torture<Load>(Load{1}.Encode());
  Torture<Join>(Join{9}.Encode());
  Torture<Join::Reply>(Join::Reply{true, 9}.Encode());
  Torture<Pull>(Pull{1, 4}.Encode());
  Torture<Pull::Reply>(Pull::Reply{4}.Encode());
  Torture<PushGradient>(PushGradient{1, 2, {}, AllDefined(9)}.Encode());
  Torture<PushGradient::Reply>(PushGradient::Reply{4, 2}.Encode());
  Torture<OpenLanding>(OpenLanding{5}.Encode());
  Torture<Leave>(Leave{5}.Encode());
  Torture<Info>(Info{}.Encode());
  Torture<Info::Reply>(Info::Reply{1, 2, 3, 4, 5, true}.Encode());
  Torture<Empty>("");
}

TEST(MessagesTest, ErrorsNameTheMessage) {
  EXPECT_THAT(std::string(Pull::Decode("abc").status().message()), HasSubstr("pull"));
  ShardArguments bad = Arguments();
  bad.owner = 2;
  EXPECT_THAT(std::string(ShardArguments::Decode(bad.Encode()).status().message()), HasSubstr("owner index"));
}

TEST(OptionsTest, EveryRangeIsChecked) {
  EXPECT_TRUE(Validate(AdamOptions{}).ok());
  EXPECT_THAT(std::string(Validate({.lr = -1}).message()), HasSubstr("lr is -1"));
  EXPECT_FALSE(Validate({.lr = std::nan("")}).ok());
  EXPECT_FALSE(Validate({.beta1 = 1}).ok());
  EXPECT_FALSE(Validate({.beta2 = -0.1}).ok());
  EXPECT_FALSE(Validate({.eps = -1}).ok());
  EXPECT_FALSE(Validate({.weight_decay = INFINITY}).ok());
}

}  // namespace
}  // namespace Atoll::shard_optim
