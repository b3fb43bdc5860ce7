// Whether a peer is there is not for its Unix name or a loopback address to say, if it has others.
#include "atoll/transport/dial_verdict.h"

#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "atoll/tests/transport/raw_socket.h"
#include "atoll/tests/transport/testing.h"
#include "atoll/transport/refusal.h"

namespace Atoll::transport::testing {
namespace {

const absl::Status kRefused = RefusedError("nobody listens");
const absl::Status kUnreachable = absl::UnavailableError("no route");
const absl::Status kAnother = absl::NotFoundError("another member");
const absl::Status kKeys = absl::UnauthenticatedError("another key");
const absl::Status kBuild = absl::FailedPreconditionError("another build");

absl::Status Verdict(const std::vector<DialFailure>& failures, bool late = false) {
  std::optional<Reach> farthest;
  for (const DialFailure& one : failures) farthest = std::max(farthest, one.reach);
  return DialVerdict("cannot connect", failures, farthest, late);
}

TEST(DialVerdict, ReachOfAddresses) {
  EXPECT_EQ(ReachOf(*ParseAddress("unix:@a")), Reach::kHost);
  for (const char* text : {"127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1"})
    EXPECT_EQ(ReachOf(*ParseAddress(text)), Reach::kLoopback) << text;
  for (const char* text : {"10.0.0.1:1", "[2001:db8::1]:1", "[::ffff:10.0.0.1]:1"})
    EXPECT_EQ(ReachOf(*ParseAddress(text)), Reach::kEverywhere) << text;
}

TEST(DialVerdict, ARefusalIsForTheFarthestToSay) {
  for (Reach near : {Reach::kHost, Reach::kLoopback}) {
    for (const absl::Status& said : {kRefused, kAnother, kKeys, kBuild}) {
      const absl::Status status = Verdict({{near, said}, {Reach::kEverywhere, kUnreachable}});
      EXPECT_TRUE(absl::IsUnavailable(status)) << status;
      EXPECT_FALSE(IsRefused(status)) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), said.message())) << status;
      EXPECT_TRUE(IsRefused(Verdict({{near, said}, {Reach::kEverywhere, kRefused}})));
      EXPECT_TRUE(absl::IsNotFound(Verdict({{near, said}, {Reach::kEverywhere, kAnother}})));
    }
    EXPECT_TRUE(IsRefused(Verdict({{near, kRefused}})));  // It has no others.
    EXPECT_TRUE(absl::IsNotFound(Verdict({{near, kAnother}})));
  }
  EXPECT_TRUE(IsRefused(Verdict({{Reach::kHost, kUnreachable}, {Reach::kLoopback, kRefused}})));
}

TEST(DialVerdict, AllOfTheFarthestMustAgreeThatItIsGone) {
  // 172.17.0.1 is there on every host with containers: it may lead to ourselves.
  const DialFailure bridge_another{Reach::kEverywhere, kAnother}, refused{Reach::kEverywhere, kRefused},
      unreachable{Reach::kEverywhere, kUnreachable};
  EXPECT_TRUE(absl::IsUnavailable(Verdict({unreachable, bridge_another})));
  EXPECT_FALSE(IsRefused(Verdict({unreachable, refused})));
  EXPECT_TRUE(absl::IsNotFound(Verdict({refused, bridge_another})));
  EXPECT_TRUE(IsRefused(Verdict({refused, refused})));
}

TEST(DialVerdict, WhatWasNotTriedIsNotGone) {
  EXPECT_TRUE(absl::IsDeadlineExceeded(Verdict({{Reach::kEverywhere, kRefused}}, /*late=*/true)));
  EXPECT_TRUE(absl::IsDeadlineExceeded(Verdict({{Reach::kEverywhere, kAnother}}, /*late=*/true)));
  EXPECT_TRUE(absl::IsUnauthenticated(Verdict({{Reach::kEverywhere, kKeys}}, /*late=*/true)));
  const absl::Status nothing = Verdict({{std::nullopt, absl::InvalidArgumentError("nonsense")}});
  EXPECT_TRUE(absl::IsUnavailable(nothing)) << nothing;
  EXPECT_FALSE(IsRefused(nothing)) << nothing;
  EXPECT_FALSE(IsRefused(DialVerdict("", {{Reach::kHost, kRefused}}, Reach::kEverywhere, false)));
}

TEST(DialVerdict, WrongKeysAndBuildsOutweighTheRest) {
  EXPECT_TRUE(absl::IsUnauthenticated(Verdict(
      {{Reach::kEverywhere, kUnreachable}, {Reach::kEverywhere, kBuild}, {Reach::kEverywhere, kKeys}})));
  EXPECT_TRUE(absl::IsFailedPrecondition(Verdict(
      {{Reach::kEverywhere, kRefused}, {Reach::kEverywhere, kAnother}, {Reach::kEverywhere, kBuild}})));
}

// A peer on another host, as an endpoint sees it: its Unix name is nobody's here, its loopback address is
// another's, and the one that counts cannot be reached for now (no connection leads to a multicast address).
TEST(DialVerdict, OfAConnect) {
  Member member(Options("member", Way::kUnix)), own(Options("own"));
  const std::string nobody = "unix:@atoll-nobody-listens-here";
  const std::string loopback = own.endpoint().addresses()[0];
  auto pipe = member.Connect({nobody, loopback, "224.0.0.1:1"}, {"far", {}});
  EXPECT_TRUE(absl::IsUnavailable(pipe.status())) << pipe.status();
  EXPECT_FALSE(IsRefused(pipe.status())) << pipe.status();
  // One on this host.
  pipe = member.Connect({nobody, loopback}, {"far", {}});
  EXPECT_TRUE(absl::IsNotFound(pipe.status())) << pipe.status();
  own.endpoint().Close();
  own.endpoint().Join();
  pipe = member.Connect({nobody, loopback}, {"far", {}});
  EXPECT_TRUE(IsRefused(pipe.status())) << pipe.status();
  pipe = member.Connect({nobody}, {"far", {}});
  EXPECT_TRUE(IsRefused(pipe.status())) << pipe.status();
  EXPECT_FALSE(IsRefused(member.Connect({"nonsense"}).status()));
}

}  // namespace
}  // namespace Atoll::transport::testing
