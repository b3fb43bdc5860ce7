// Messages over one pipe between processes of this host (wire.h has the ways).
//   pipe_side serve WAY
//   pipe_side call WAY CASE NAME ADDRESS
// Here a call is a message and the message that answers it. With "+hop" in WAY the far side answers from a thread of
// its own, as what runs users' code must; else from the loop.
#include <algorithm>
#include <cstring>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "atoll/base/executor.h"
#include "atoll/bench/side.h"
#include "atoll/bench/wire.h"

namespace Atoll::bench {
namespace {

constexpr absl::Duration kHang = absl::Seconds(60);

enum class Op : uint64_t { kNothing, kPut, kGet, kFill, kCheck, kInline };
/// A message's header: what is asked, and echoed. Behind it, of kInline, the bytes themselves.
struct Header {
  Op op = Op::kNothing;
  Place place;
};

std::vector<Piece> PiecesAt(uint64_t offset, const std::vector<size_t>& bytes) {
  std::vector<Piece> pieces;
  for (size_t size : bytes) {
    if (offset > kArenaBytes || size > kArenaBytes - offset) Die("beyond the arena");
    pieces.push_back({Arena() + offset, size});
    offset += size;
  }
  return pieces;
}

/// Answers one caller. Lives as long as the process.
class Served : public std::enable_shared_from_this<Served> {
 public:
  /// Without an executor it answers from the loop.
  Served(std::shared_ptr<Wire> wire, base::Executor* executor)
      : wire_(std::move(wire)), executor_(executor) {}
  void Next() {
    wire_->Await([self = shared_from_this()](std::string text, const std::vector<size_t>& bytes) {
      const Header header = Unpack<Header>(text);
      if (bytes.empty()) return self->Take(header, std::move(text));
      self->wire_->Read(PiecesAt(header.place.offset, bytes), [self, header] { self->Take(header, {}); });
    });
  }

 private:
  void Take(const Header& header, std::string text) {
    if (executor_ == nullptr) {
      Answer(header, text);
    } else {
      executor_->Schedule(
          [self = shared_from_this(), header, text = std::move(text)] { self->Answer(header, text); });
    }
    Next();
  }
  void Answer(const Header& header, const std::string& text) {
    const Place& place = header.place;
    std::vector<Piece> pieces;
    if (header.op == Op::kInline)
      std::memcpy(Arena(), text.data() + sizeof(Header), text.size() - sizeof(Header));
    if (header.op == Op::kGet) pieces = PiecesAt(place.offset, {place.bytes});
    if (header.op == Op::kFill) Fill(Arena(), kArenaBytes, place.seed);
    if (header.op == Op::kCheck) CheckFilled(Arena(), place.bytes, place.seed);
    wire_->Write(Pack(header), pieces, nullptr);
  }

  const std::shared_ptr<Wire> wire_;
  base::Executor* const executor_;
};

/// Sends, counts the answers, and waits for them. They come in order.
class Caller {
 public:
  explicit Caller(std::shared_ptr<Wire> wire) : wire_(std::move(wire)) { Next(); }
  void Post(const Header& header, const std::vector<Piece>& pieces = {}, absl::string_view bytes = {}) {
    ++sent_;
    std::string text = Pack(header);
    absl::StrAppend(&text, bytes);
    wire_->Write(std::move(text), pieces, nullptr);
  }
  void AwaitAllBut(uint64_t left) {
    const uint64_t wanted = sent_ - std::min(sent_, left);
    auto done = [this, wanted]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return received_ >= wanted; };
    absl::MutexLock lock(&mu_);
    if (!mu_.AwaitWithTimeout(absl::Condition(&done), kHang)) Die("no answer");
  }
  void Call(const Header& header, const std::vector<Piece>& pieces = {}, absl::string_view bytes = {}) {
    Post(header, pieces, bytes);
    AwaitAllBut(0);
  }
  Work WorkOf(absl::string_view name);

 private:
  void Next() {
    wire_->Await([this](std::string text, const std::vector<size_t>& bytes) {
      if (bytes.empty()) return Took();
      wire_->Read(PiecesAt(Unpack<Header>(text).place.offset, bytes), [this] { Took(); });
    });
  }
  void Took() {
    Next();
    absl::MutexLock lock(&mu_);
    ++received_;
  }
  Work InFlight(size_t count) {
    return {nullptr,
            [this, count] {
              Post({});
              AwaitAllBut(count - 1);
            },
            [this] { AwaitAllBut(0); }, nullptr};
  }
  Work Push(size_t bytes, std::function<void()> send) {
    return {[this, bytes](uint64_t seed) { Fill(Arena(), bytes, seed_ = seed); }, std::move(send), nullptr,
            [this, bytes] {
              Call({Op::kCheck, {0, bytes, seed_}});
            }};
  }

  const std::shared_ptr<Wire> wire_;
  uint64_t sent_ = 0;
  uint64_t seed_ = 0;
  absl::Mutex mu_;
  uint64_t received_ ABSL_GUARDED_BY(mu_) = 0;
};

Work Caller::WorkOf(absl::string_view name) {
  if (name == "empty_call") return {nullptr, [this] { Call({}); }, nullptr, nullptr};
  if (name == "calls_in_flight") return InFlight(kCallsInFlight);
  if (name == "many_to_one") return InFlight(kCallsInFlightEach);
  if (name == "small_tensor") {
    return Push(kSmallBytes, [this] { Call({Op::kInline, {}}, {}, {Arena(), kSmallBytes}); });
  }
  if (name == "many_tensors") {
    const std::vector<size_t> sizes = ResNet50Bytes();
    size_t all = 0;
    for (size_t bytes : sizes) all += bytes;
    return Push(all, [this, sizes] { Call({Op::kPut, {}}, PiecesAt(0, sizes)); });
  }
  if (name == "push_64mib") {
    return Push(kBulkBytes, [this] {
      for (size_t at = 0; at < kBulkBytes; at += kChunkBytes) {
        Post({Op::kPut, {at, kChunkBytes, 0}}, PiecesAt(at, {kChunkBytes}));
      }
      AwaitAllBut(0);
    });
  }
  if (name == "pull_64mib") {
    return {[this](uint64_t seed) {
              Call({Op::kFill, {0, 0, seed_ = seed}});
            },
            [this] {
              for (size_t at = 0; at < kBulkBytes; at += kChunkBytes) Post({Op::kGet, {at, kChunkBytes, 0}});
              AwaitAllBut(0);
            },
            nullptr, [this] { CheckFilled(Arena(), kBulkBytes, seed_); }};
  }
  Die(absl::StrCat("no case ", name));
}

void Serve(absl::string_view way) {
  base::ThreadPool hop({"hop", /*threads=*/1});
  base::Executor* const executor = absl::StrContains(way, "+hop") ? &hop : nullptr;
  Arena();
  std::unique_ptr<Station> station = OpenStation(way, "server");
  station->OnWire([executor](std::shared_ptr<Wire> wire) {
    std::make_shared<Served>(std::move(wire), executor)->Next();
  });
  Announce(station->address());
  std::_Exit(0);  // Without a farewell: the other side ends too.
}

}  // namespace
}  // namespace Atoll::bench

int main(int argc, char** argv) {
  using namespace Atoll::bench;
  Begin();
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() == 2 && words[0] == "serve") Serve(words[1]);
  if (words.size() != 5 || words[0] != "call") Die("usage: pipe_side serve WAY | call WAY CASE NAME ADDRESS");
  Arena();
  std::unique_ptr<Station> station = OpenStation(words[1], words[3]);
  Caller caller(station->Connect(words[4]));
  Drive(caller.WorkOf(words[2]));
  std::_Exit(0);
}
