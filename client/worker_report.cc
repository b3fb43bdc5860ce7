#include "atoll/client/worker_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace Atoll::client {
namespace {

std::string Quote(absl::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&out, "\\u%04x", static_cast<unsigned char>(c));
    } else {
      out += c;
    }
  }
  return out + '"';
}

/// JSON has no NaN and no infinity.
std::string Number(double value) { return std::isfinite(value) ? absl::StrFormat("%.9g", value) : "null"; }

/// Members of a JSON object.
class Members {
 public:
  struct Value {
    Value(absl::string_view text) : json(Quote(text)) {}
    Value(const std::string& text) : json(Quote(text)) {}
    Value(const char* text) : json(Quote(text)) {}
    Value(bool value) : json(value ? "true" : "false") {}
    Value(int value) : json(absl::StrCat(value)) {}
    Value(int64_t value) : json(absl::StrCat(value)) {}
    Value(uint64_t value) : json(absl::StrCat(value)) {}
    Value(double value) : json(Number(value)) {}
    Value(std::optional<double> value) : json(value.has_value() ? Number(*value) : "null") {}
    Value(const std::vector<Members>& objects)
        : json(absl::StrCat(
              "[",
              absl::StrJoin(objects, ", ",
                            [](std::string* out, const Members& object) { *out += object.Json(); }),
              "]")) {}
    std::string json;
  };
  Members(std::initializer_list<std::pair<absl::string_view, Value>> members) {
    for (const auto& [key, value] : members) Add(absl::StrCat(Quote(key), ": ", value.json));
  }
  Members& operator+=(const Members& more) {
    Add(more.text_);
    return *this;
  }
  std::string Json() const { return absl::StrCat("{", text_, "}"); }

 private:
  void Add(absl::string_view text) { absl::StrAppend(&text_, text_.empty() ? "" : ", ", text); }
  std::string text_;
};

Members MembersOf(const WorkerFacts& facts) {
  return {{"name", facts.name},
          {"job", facts.job},
          {"model", facts.model},
          {"data", facts.data},
          {"policy", facts.policy},
          {"owners", facts.owners},
          {"workers", facts.workers},
          {"parameters", facts.parameters},
          {"train_images", facts.train_images},
          {"test_images", facts.test_images}};
}

Members MembersOf(const WorkerProgress& p) {
  Members members = {{"epoch", p.epoch},
                     {"epochs", p.epochs},
                     {"step", p.step},
                     {"steps", p.steps},
                     {"loss", p.loss},
                     {"images_per_second", p.images_per_second},
                     {"bytes_per_second", p.bytes_per_second},
                     {"contributors", p.contributors},
                     {"end_of_epoch", p.end_of_epoch}};
  if (p.end_of_epoch) members += {{"epoch_loss", p.epoch_loss}};
  return members;
}

Members MembersOf(const WorkerSummary& summary) {
  const double steps = static_cast<double>(std::max<int64_t>(summary.steps, 1));
  const double images = static_cast<double>(summary.images);
  std::vector<Members> shards;
  for (const Trainer::ShardInfo& shard : summary.shards) {
    shards.push_back({{"owner", shard.owner},
                      {"parameters", shard.parameters},
                      {"state_bytes", shard.state_bytes},
                      {"steps", shard.steps}});
  }
  return {{"steps", summary.steps},
          {"images", summary.images},
          {"seconds", summary.seconds},
          {"images_per_second", summary.seconds > 0 ? images / summary.seconds : 0.0},
          {"loss", summary.loss},
          {"accuracy", summary.accuracy},
          {"checksum", absl::StrFormat("%08x", summary.checksum)},
          {"bytes_sent", summary.bytes_sent},
          {"bytes_received", summary.bytes_received},
          {"bytes_sent_per_step", static_cast<double>(summary.bytes_sent) / steps},
          {"bytes_received_per_step", static_cast<double>(summary.bytes_received) / steps},
          {"fewest_contributors", summary.fewest_contributors},
          {"stopped", summary.stopped},
          {"shards", shards}};
}

std::string DoneText(const WorkerSummary& summary) {
  return absl::StrFormat(
      "%s: %s after %d steps, %d images in %.1f s, loss %.4f%s, parameter checksum %08x", summary.name,
      summary.stopped ? "stopped" : "done", summary.steps, summary.images, summary.seconds, summary.loss,
      summary.accuracy.has_value() ? absl::StrFormat(", accuracy %.2f %%", *summary.accuracy * 100) : "",
      summary.checksum);
}

class PlainReport : public WorkerReport {
 public:
  PlainReport(bool terminal, std::function<void(absl::string_view)> write)
      : terminal_(terminal), write_(std::move(write)) {}

  void Start(const WorkerFacts& facts) override {
    name_ = facts.name;
    workers_ = facts.workers;
    in_rounds_ = facts.policy == "sync";  // In async every step has one contributor.
    write_(absl::StrFormat("%s: %s, %d parameters, on %s, %d images; %d workers, %d owners, %s\n", facts.name,
                           facts.model, facts.parameters, facts.data, facts.train_images, facts.workers,
                           facts.owners, facts.policy));
  }
  void Progress(const WorkerProgress& p) override {
    const std::string line =
        absl::StrFormat("%s: epoch %d/%d step %d/%d loss %.4f %.0f images/s %s/s%s", name_, p.epoch, p.epochs,
                        p.step, p.steps, p.loss, p.images_per_second, HumanBytes(p.bytes_per_second),
                        in_rounds_ && p.contributors < workers_
                            ? absl::StrFormat(" (%d of %d workers)", p.contributors, workers_)
                            : "");
    if (!terminal_) {
      write_(absl::StrCat(line, "\n"));
    } else {
      write_(absl::StrCat("\r", line, "\x1b[K", p.end_of_epoch ? "\n" : ""));
      open_ = !p.end_of_epoch;
    }
  }
  void Done(const WorkerFacts&, const WorkerSummary& summary) override {
    write_(absl::StrCat(open_ ? "\n" : "", DoneText(summary), "\n"));
  }

 private:
  const bool terminal_;
  bool in_rounds_ = false;
  const std::function<void(absl::string_view)> write_;
  std::string name_;
  int workers_ = 0;
  bool open_ = false;  // A line on the terminal that has no end yet.
};

class JsonReport : public WorkerReport {
 public:
  explicit JsonReport(std::function<void(absl::string_view)> write) : write_(std::move(write)) {}

  void Start(const WorkerFacts& facts) override {
    name_ = facts.name;
    Say("start", MembersOf(facts));
  }
  void Progress(const WorkerProgress& progress) override {
    Members members = {{"name", name_}};
    Say("progress", members += MembersOf(progress));
  }
  void Done(const WorkerFacts& facts, const WorkerSummary& summary) override {
    Members members = MembersOf(facts);
    Say("done", members += MembersOf(summary));
  }

 private:
  void Say(absl::string_view event, const Members& members) {
    Members all = {{"event", event}};
    write_((all += members).Json() + "\n");
  }

  const std::function<void(absl::string_view)> write_;
  std::string name_;
};

class NoReport : public WorkerReport {
 public:
  void Start(const WorkerFacts&) override {}
  void Progress(const WorkerProgress&) override {}
  void Done(const WorkerFacts&, const WorkerSummary&) override {}
};

}  // namespace

absl::StatusOr<std::unique_ptr<WorkerReport>> MakeWorkerReport(absl::string_view form, bool terminal,
                                                               std::function<void(absl::string_view)> write) {
  if (form == "auto") form = terminal ? "tty" : "plain";
  if (form == "plain") return std::make_unique<PlainReport>(false, std::move(write));
  if (form == "tty") return std::make_unique<PlainReport>(true, std::move(write));
  if (form == "json") return std::make_unique<JsonReport>(std::move(write));
  if (form == "none") return std::make_unique<NoReport>();
  return absl::InvalidArgumentError(
      absl::StrCat("--progress='", form, "': it should be auto, plain, tty, json or none"));
}

std::string SummaryJson(const WorkerFacts& facts, const WorkerSummary& summary) {
  Members members = MembersOf(facts);
  return (members += MembersOf(summary)).Json() + "\n";
}

std::string HumanBytes(double bytes) {
  constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB"};
  size_t unit = 0;
  while (bytes >= 999.5 && unit + 1 < std::size(kUnits)) bytes /= 1000, ++unit;
  return unit == 0 ? absl::StrFormat("%.0f B", bytes)
                   : absl::StrFormat("%.*f %s",
                                     bytes < 9.995   ? 2
                                     : bytes < 99.95 ? 1
                                                     : 0,
                                     bytes, kUnits[unit]);
}

}  // namespace Atoll::client
