#include "atoll/client/worker_report.h"

#include <cmath>
#include <cstdio>
#include <utility>

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

/// {"a": 1, ...} member by member.
class Object {
 public:
  Object& Text(absl::string_view key, absl::string_view value) { return Raw(key, Quote(value)); }
  Object& Int(absl::string_view key, int64_t value) { return Raw(key, absl::StrCat(value)); }
  Object& Real(absl::string_view key, double value) { return Raw(key, Number(value)); }
  Object& Bool(absl::string_view key, bool value) { return Raw(key, value ? "true" : "false"); }
  Object& Raw(absl::string_view key, absl::string_view value) {
    absl::StrAppend(&text_, text_.empty() ? "" : ", ", Quote(key), ": ", value);
    return *this;
  }
  std::string Close() const { return absl::StrCat("{", text_, "}"); }

 private:
  std::string text_;
};

void AddFacts(const WorkerFacts& facts, Object* object) {
  object->Text("name", facts.name)
      .Text("job", facts.job)
      .Text("model", facts.model)
      .Text("data", facts.data)
      .Text("policy", facts.policy)
      .Int("owners", facts.owners)
      .Int("workers", facts.workers)
      .Int("parameters", facts.parameters)
      .Int("train_images", facts.train_images)
      .Int("test_images", facts.test_images);
}

void AddSummary(const WorkerSummary& summary, Object* object) {
  const double steps = static_cast<double>(summary.steps > 0 ? summary.steps : 1);
  std::vector<std::string> shards;
  for (const Trainer::ShardInfo& shard : summary.shards) {
    shards.push_back(Object()
                         .Text("owner", shard.owner)
                         .Int("parameters", shard.parameters)
                         .Int("state_bytes", static_cast<int64_t>(shard.state_bytes))
                         .Int("steps", shard.steps)
                         .Close());
  }
  object->Int("steps", summary.steps)
      .Int("images", summary.images)
      .Real("seconds", summary.seconds)
      .Real("images_per_second",
            summary.seconds > 0 ? static_cast<double>(summary.images) / summary.seconds : 0.0)
      .Real("loss", summary.loss)
      .Raw("accuracy", summary.accuracy.has_value() ? Number(*summary.accuracy) : "null")
      .Text("checksum", absl::StrFormat("%08x", summary.checksum))
      .Int("bytes_sent", static_cast<int64_t>(summary.bytes_sent))
      .Int("bytes_received", static_cast<int64_t>(summary.bytes_received))
      .Real("bytes_sent_per_step", static_cast<double>(summary.bytes_sent) / steps)
      .Real("bytes_received_per_step", static_cast<double>(summary.bytes_received) / steps)
      .Int("fewest_contributors", summary.fewest_contributors)
      .Bool("stopped", summary.stopped)
      .Raw("shards", absl::StrCat("[", absl::StrJoin(shards, ", "), "]"));
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
    write_(absl::StrFormat("%s: %s, %d parameters, on %s, %d images; %d workers, %d owners, %s\n", facts.name,
                           facts.model, facts.parameters, facts.data, facts.train_images, facts.workers,
                           facts.owners, facts.policy));
  }
  void Progress(const WorkerProgress& p) override {
    const std::string line =
        absl::StrFormat("%s: epoch %d/%d step %d/%d loss %.4f %.0f images/s %s/s%s", name_, p.epoch, p.epochs,
                        p.step, p.steps, p.loss, p.images_per_second, HumanBytes(p.bytes_per_second),
                        p.contributors < workers_ && p.contributors > 1
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
    Object object;
    object.Text("event", "start");
    AddFacts(facts, &object);
    write_(object.Close() + "\n");
  }
  void Progress(const WorkerProgress& p) override {
    Object object;
    object.Text("event", "progress")
        .Text("name", name_)
        .Int("epoch", p.epoch)
        .Int("epochs", p.epochs)
        .Int("step", p.step)
        .Int("steps", p.steps)
        .Real("loss", p.loss)
        .Real("images_per_second", p.images_per_second)
        .Real("bytes_per_second", p.bytes_per_second)
        .Int("contributors", p.contributors)
        .Bool("end_of_epoch", p.end_of_epoch);
    if (p.end_of_epoch) object.Real("epoch_loss", p.epoch_loss);
    write_(object.Close() + "\n");
  }
  void Done(const WorkerFacts& facts, const WorkerSummary& summary) override {
    Object object;
    object.Text("event", "done");
    AddFacts(facts, &object);
    AddSummary(summary, &object);
    write_(object.Close() + "\n");
  }

 private:
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
      absl::StrCat("progress '", form, "': it should be auto, plain, tty, json or none"));
}

std::string SummaryJson(const WorkerFacts& facts, const WorkerSummary& summary) {
  Object object;
  AddFacts(facts, &object);
  AddSummary(summary, &object);
  return object.Close() + "\n";
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
