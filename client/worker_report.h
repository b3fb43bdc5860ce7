// What atoll-worker says while it trains and at its end: for people, for logs, for programs.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "atoll/client/worker.h"

namespace Atoll::client {

/// Facts that do not change while it runs.
struct WorkerFacts {
  std::string name;  ///< "worker0"
  std::string job;
  std::string model;
  std::string data;
  std::string policy;  ///< "sync" or "async"
  int owners = 0;
  int workers = 0;
  int64_t parameters = 0;
  int64_t train_images = 0;
  int64_t test_images = 0;
};

/// Used from one thread. `write` gets whole lines with their end (on a terminal, also a line that the next
/// replaces).
class WorkerReport {
 public:
  virtual ~WorkerReport() = default;
  virtual void Start(const WorkerFacts& facts) = 0;
  virtual void Progress(const WorkerProgress& progress) = 0;
  virtual void Done(const WorkerFacts& facts, const WorkerSummary& summary) = 0;
};

/// `form` is "plain" (a line a report), "tty" (one line that updates), "json" (an object a line: "event" is
/// start, progress or done; docs/worker_output.md), "none", or "auto": tty if `terminal`, else plain.
/// InvalidArgument lists them.
absl::StatusOr<std::unique_ptr<WorkerReport>> MakeWorkerReport(absl::string_view form, bool terminal,
                                                               std::function<void(absl::string_view)> write);

/// The summary as one JSON object, as --summary writes it and "done" says it.
std::string SummaryJson(const WorkerFacts& facts, const WorkerSummary& summary);

/// 12345678 -> "12.3 MB".
std::string HumanBytes(double bytes);

}  // namespace Atoll::client
