#include "atoll/client/worker_report.h"

#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace Atoll::client {
namespace {

using ::testing::HasSubstr;

WorkerFacts Facts() {
  return {.name = "worker0",
          .job = "j",
          .model = "mlp",
          .data = "/data/\"odd\"\n",
          .policy = "sync",
          .owners = 2,
          .workers = 3,
          .parameters = 7};
}

WorkerProgress Halfway() {
  return {.epoch = 1,
          .epochs = 2,
          .step = 5,
          .steps = 20,
          .loss = 0.5,
          .images_per_second = 1234.4,
          .bytes_per_second = 2.5e6,
          .contributors = 2};
}

WorkerSummary Summary() {
  return {.name = "worker0",
          .steps = 20,
          .images = 200,
          .seconds = 2,
          .loss = 0.25,
          .accuracy = 0.9,
          .checksum = 0xab,
          .bytes_sent = 2000,
          .bytes_received = 4000,
          .shards = {{"owner0", 4, 32, 20}, {"owner1", 3, 24, 20}}};
}

std::string Say(absl::string_view form, bool terminal, const std::function<void(WorkerReport&)>& what) {
  std::string said;
  auto report =
      MakeWorkerReport(form, terminal, [&said](absl::string_view text) { said += std::string(text); });
  EXPECT_TRUE(report.ok()) << report.status();
  what(**report);
  return said;
}

TEST(WorkerReportTest, PlainIsALineEach) {
  const std::string said = Say("plain", true, [](WorkerReport& report) {
    report.Start(Facts());
    report.Progress(Halfway());
    report.Done(Facts(), Summary());
  });
  EXPECT_THAT(
      said, HasSubstr("worker0: epoch 1/2 step 5/20 loss 0.5000 1234 images/s 2.50 MB/s (2 of 3 workers)\n"));
  EXPECT_THAT(said,
              HasSubstr("worker0: done after 20 steps, 200 images in 2.0 s, loss 0.2500, accuracy 90.00 %, "
                        "parameter checksum 000000ab\n"));
}

TEST(WorkerReportTest, SaysHowManyTakePartWhereTheyShould) {
  const auto said = [](const std::string& policy, int contributors) {
    return Say("plain", false, [&](WorkerReport& report) {
      WorkerFacts facts = Facts();
      facts.policy = policy;
      report.Start(facts);
      WorkerProgress progress = Halfway();
      progress.contributors = contributors;
      report.Progress(progress);
    });
  };
  EXPECT_THAT(said("sync", 1), HasSubstr("(1 of 3 workers)"));
  EXPECT_THAT(said("sync", 3), Not(HasSubstr(" of 3 workers)")));
  EXPECT_THAT(said("async", 1), Not(HasSubstr(" of 3 workers)")));
}

TEST(WorkerReportTest, ATerminalGetsOneLineThatUpdates) {
  const std::string said = Say("auto", true, [](WorkerReport& report) {
    WorkerProgress progress = Halfway();
    report.Progress(progress);
    report.Progress(progress);
    progress.end_of_epoch = true;
    report.Progress(progress);
  });
  EXPECT_EQ(std::count(said.begin(), said.end(), '\r'), 3);
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1);
  EXPECT_EQ(said.back(), '\n');
  // What comes behind an open line begins a new one.
  EXPECT_THAT(Say("tty", false,
                  [](WorkerReport& report) {
                    report.Progress(Halfway());
                    report.Done(Facts(), Summary());
                  }),
              HasSubstr("\nworker0: done"));
  EXPECT_THAT(Say("auto", false, [](WorkerReport& report) { report.Progress(Halfway()); }),
              Not(HasSubstr("\r")));
}

TEST(WorkerReportTest, JsonIsAnObjectALine) {
  const std::string said = Say("json", false, [](WorkerReport& report) {
    report.Start(Facts());
    WorkerProgress progress = Halfway();
    progress.loss = std::numeric_limits<double>::quiet_NaN();
    report.Progress(progress);
    report.Done(Facts(), Summary());
  });
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 3);
  EXPECT_THAT(said, HasSubstr("{\"event\": \"start\", \"name\": \"worker0\""));
  EXPECT_THAT(said, HasSubstr("\"data\": \"/data/\\\"odd\\\"\\u000a\""));
  EXPECT_THAT(said, HasSubstr("\"loss\": null"));
  EXPECT_THAT(said, HasSubstr("\"accuracy\": 0.9,"));
  EXPECT_THAT(said, HasSubstr("\"checksum\": \"000000ab\""));
  EXPECT_THAT(said, HasSubstr("\"bytes_sent_per_step\": 100, \"bytes_received_per_step\": 200"));
  EXPECT_THAT(said,
              HasSubstr("{\"owner\": \"owner1\", \"parameters\": 3, \"state_bytes\": 24, \"steps\": 20}]"));
}

TEST(WorkerReportTest, ASummaryWithoutAccuracyOrStepsIsStillJson) {
  WorkerSummary summary;
  const std::string json = SummaryJson(Facts(), summary);
  EXPECT_THAT(json, HasSubstr("\"accuracy\": null"));
  EXPECT_THAT(json, HasSubstr("\"images_per_second\": 0"));
  EXPECT_THAT(json, HasSubstr("\"shards\": []"));
}

TEST(WorkerReportTest, RefusesUnknownForms) {
  const auto report = MakeWorkerReport("xml", false, [](absl::string_view) {});
  EXPECT_THAT(std::string(report.status().message()), HasSubstr("auto, plain, tty, json or none"));
  EXPECT_EQ(Say("none", true, [](WorkerReport& quiet) { quiet.Progress(Halfway()); }), "");
}

TEST(WorkerReportTest, HumanBytes) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(999), "999 B");
  EXPECT_EQ(HumanBytes(1000), "1.00 kB");
  EXPECT_EQ(HumanBytes(12345), "12.3 kB");
  EXPECT_EQ(HumanBytes(999600), "1.00 MB");
  EXPECT_EQ(HumanBytes(123.4e9), "123 GB");
  EXPECT_EQ(HumanBytes(5e15), "5000 TB");
}

TEST(WorkerOptionsTest, NamesWhatIsOutOfRange) {
  WorkerOptions options;
  EXPECT_TRUE(Validate(options).ok());
  options.epochs = 0;
  EXPECT_THAT(std::string(Validate(options).message()), HasSubstr("epochs is 0"));
  options = {};
  options.batch = -1;
  EXPECT_THAT(std::string(Validate(options).message()), HasSubstr("batch is -1"));
  options = {};
  options.accumulate = 0;
  EXPECT_THAT(std::string(Validate(options).message()), HasSubstr("accumulate is 0"));
  options = {};
  options.policy = shard_optim::Sync{absl::ZeroDuration()};
  EXPECT_THAT(std::string(Validate(options).message()), HasSubstr("round_limit"));
  options = {};
  options.adam.beta1 = 1;
  EXPECT_THAT(std::string(Validate(options).message()), HasSubstr("beta1"));
}

}  // namespace
}  // namespace Atoll::client
