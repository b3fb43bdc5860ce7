// What a message is worth, decided without I/O: the numbering, acknowledging, re-sending and windows of one
// pair of incarnations, over two lanes whose pipes come and go. Events and the time go in, actions come
// out; Session (session.h) carries them out. Not thread-safe: its owner's mutex guards it.
//
//   lane:  kIdle ──wanted──> kConnecting ──pipe──> kGreeting ──their hello──> kOpen
//            ^                   │ failed             │ cut                     │ cut
//            └── nothing to do ──┴──> kBackoff <──────┴─────────────────────────┘
//
// Each lane numbers its own messages 1, 2, 3 ... A pipe starts with a hello of each side that says what it
// has received; the other side sends the rest again. When both sides connect at once, the pipe of the side
// that wins ties stays.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "atoll/rpc/wire.h"
#include "atoll/transport/pipe.h"

namespace Atoll::rpc {

/// A message that a session keeps until the other side has it. Its destruction returns its loans.
struct OutMessage {
  OutMessage(transport::Lane lane_in, size_t bytes_in, bool ack_now_in)
      : lane(lane_in), bytes(bytes_in), ack_now(ack_now_in) {}
  virtual ~OutMessage() = default;

  const transport::Lane lane;
  const size_t bytes;   ///< Counted against the window.
  const bool ack_now;   ///< Somebody waits for the acknowledgement: it must not be delayed.
  uint64_t number = 0;  ///< 0 until it is sent. The core's.
};
using OutMessagePtr = std::shared_ptr<OutMessage>;

class SessionCore {
 public:
  using Lane = transport::Lane;
  /// Names a pipe to the core; 0 is none.
  using PipeId = uint64_t;

  struct Options {
    bool wins_ties = false;          ///< Exactly one side of a session does.
    bool can_connect = true;         ///< We know an address of the other side.
    size_t window_bytes = 0;         ///< Sent and not acknowledged, a lane. One message is always admitted.
    size_t queue_bytes = 0;          ///< Waiting to be sent, both lanes together,
    size_t forced_bytes = 64 << 20;  ///< and this much more of what must be sent; beyond it: dead.
    int ack_every = 64;              ///< Messages received before an acknowledgement is sent by itself,
    size_t ack_bytes = 1 << 20;      ///< or bytes,
    absl::Duration ack_delay = absl::Milliseconds(5);       ///< or this time after the first.
    absl::Duration reconnect_limit = absl::Seconds(30);     ///< Without a pipe for so long: dead.
    absl::Duration greeting_limit = absl::Seconds(10);      ///< For the other side's hello.
    absl::Duration first_backoff = absl::Milliseconds(20);  ///< Doubled up to last_backoff.
    absl::Duration last_backoff = absl::Seconds(2);
    /// Pipes that open and end within this, one after the other, and carry nothing, are as none (an end that has
    /// too few descriptors, say).
    absl::Duration short_life = absl::Seconds(1);
    absl::Duration passive_wait = absl::Milliseconds(150);  ///< The side that accepted lets the other try.
    /// A pipe on which nothing of what was sent is acknowledged for so long, and what its bytes take at
    /// stall_rate, is taken for lost, and closed. The next one gets twice the time, until something is
    /// acknowledged: a slow link would never finish a large message.
    absl::Duration stall_limit = absl::Seconds(20);
    size_t stall_rate = 4 << 20;  ///< Bytes a second.
    /// Behind a connect for the bulk lane that failed, while the other side is asked to open it: its pipe must not
    /// meet the next one of ours. And how often such an ask is heard.
    absl::Duration asked_wait = absl::Seconds(1);
    int refusals = 2;  ///< Connections refused in a row that mean death, without a pipe on the other lane.
  };

  /// Why a connection could not be made.
  enum class Failure {
    kTransient,  ///< Try again, up to the limit.
    kRefused,    ///< Its host says that nobody listens (transport::IsRefused).
    kFatal,      ///< Another incarnation answers, or it will never let us in.
  };

  struct Action {
    enum class Kind {
      kConnect,  ///< Open a pipe for `lane`; the result goes to OnConnected with `attempt`.
      kHello,    ///< Send the first message on `pipe`: `hello` (addresses are the agent's), `acks`.
      kWrite,    ///< Send `message` (null: a bare number) as `number` with `acks`.
      kAck,    ///< Send `acks` alone, and with `open_bulk` the wish that the other side opens the bulk lane.
      kBye,    ///< Tell the other side on `pipe` that we leave.
      kClose,  ///< Close `pipe` with `status`.
      kAcked,  ///< `message` has been received by the other side.
      kDropped,  ///< `message` never will be (`sent`: perhaps it was); the session is dead.
      kDead,     ///< The session ended with `status`. Comes once, after every kDropped.
    };
    Kind kind;
    Lane lane = Lane::kControl;
    PipeId pipe = 0;
    OutMessagePtr message;
    uint64_t number = 0;
    uint64_t attempt = 0;
    bool sent = false;
    bool ack_now = false;
    bool open_bulk = false;
    Acks acks = {0, 0};
    Hello hello;
    absl::Status status;
  };

  explicit SessionCore(Options options) : options_(options) {}

  /// Queues or sends. ResourceExhausted beyond the queue's limit (not if `force`); a dead session's status.
  absl::Status Post(OutMessagePtr message, absl::Time now, bool force = false);
  /// Whether a message of `bytes` is within the lane's window and the queue's limit, behind all that waits and
  /// `reserved` bytes. One is always.
  bool HasRoom(Lane lane, size_t bytes, size_t reserved) const;
  /// Lets go of `message`. True if it was never sent and never will be; else its number, if still
  /// unacknowledged, is sent again bare.
  bool Withdraw(const OutMessage* message, absl::Time now);

  void OnConnected(Lane lane, uint64_t attempt, PipeId pipe, absl::Time now);
  void OnConnectFailed(Lane lane, uint64_t attempt, Failure failure, absl::Status status, absl::Time now);
  /// The first message of a pipe: of one that we opened (`initiated`), or of one that came in, which the
  /// session adopts or closes.
  void OnHello(PipeId pipe, Lane lane, bool initiated, const Hello& hello, const Acks& acks, absl::Time now);
  /// A pipe that the session had ended. Unknown ones are ignored.
  void OnPipeClosed(PipeId pipe, const absl::Status& status, absl::Time now);
  /// What the other side has received. InvalidArgument for a number that was never sent.
  absl::Status OnAcks(const Acks& acks, absl::Time now);
  /// The other side has something for the bulk lane, and no way to open it: it may be reached from there alone.
  void OnAskedForBulk(absl::Time now);

  enum class Verdict {
    kNew,        ///< The next number: receive it, then call OnReceived.
    kDuplicate,  ///< Received before: drop it.
    kGap,        ///< Numbers are missing: the other side broke the protocol.
    kStale,      ///< The pipe is not the session's any more: stop reading it.
  };
  Verdict OnAnnounced(PipeId pipe, Lane lane, uint64_t number) const;
  /// The message is here whole. False if it had been received before.
  bool OnReceived(Lane lane, uint64_t number, size_t bytes, bool ack_now, absl::Time now);

  void OnTimer(absl::Time now);
  /// When OnTimer wants to run next.
  absl::Time NextTimer() const;

  /// Ends the session: every message is dropped, pipes close.
  void Die(absl::Status status);
  /// Tells the other side that we leave, on a pipe if one is open; it then closes them. No pipe is opened any
  /// more.
  void SayBye();
  bool dead() const { return dead_; }
  const absl::Status& death() const { return death_; }

  /// Connects the control lane if it is idle.
  void Probe(absl::Time now) { Want(Lane::kControl, now); }
  /// Addresses became known.
  void SetCanConnect(absl::Time now);
  /// Nothing waits to be sent or acknowledged.
  bool drained() const;
  /// There is a pipe, or an address to open one to. Else what is left waits for a peer that may never come.
  bool reachable() const;
  bool open(Lane lane) const { return LaneOf(lane).state == State::kOpen; }
  PipeId pipe(Lane lane) const { return LaneOf(lane).pipe; }
  uint64_t last_received(Lane lane) const { return LaneOf(lane).last_received; }
  size_t unacked_count() const { return lanes_[0].unacked.size() + lanes_[1].unacked.size(); }
  size_t queued_count() const { return lanes_[0].queue.size() + lanes_[1].queue.size(); }

  bool has_actions() const { return !actions_.empty(); }
  std::vector<Action> TakeActions();

  /// Aborts on a broken invariant. For tests, after every event.
  void CheckInvariants() const;

 private:
  enum class State { kIdle, kConnecting, kGreeting, kOpen, kBackoff };
  struct Unacked {
    uint64_t number;
    size_t bytes;
    OutMessagePtr message;  // Null once withdrawn.
  };
  struct LaneState {
    State state = State::kIdle;
    PipeId pipe = 0;
    bool by_us = false;                              // Who opened `pipe`.
    uint64_t attempt = 0;                            // Of our last connect.
    uint64_t accepted = 0;                           // Highest attempt of theirs that we took.
    absl::Time retry_at = absl::InfiniteFuture();    // kBackoff; in kGreeting the limit.
    absl::Time give_up_at = absl::InfiniteFuture();  // Set while it is wanted and not open.
    absl::Duration backoff;
    int refusals = 0;
    absl::Status last_error;
    absl::Time deaf_until = absl::InfinitePast();  // To asks.
    absl::Time opened_at = absl::InfinitePast();
    // When the last pipe of use ended, if one has opened and ended since.
    absl::Time fruitless_since = absl::InfiniteFuture();

    uint64_t next_number = 1;
    std::deque<Unacked> unacked;
    size_t unacked_bytes = 0;
    absl::Time stalled_at = absl::InfiniteFuture();  // While it is open and something is not acknowledged.
    absl::Time awaited_since;                        // If so.
    int stalls = 0;                                  // In a row.
    std::deque<OutMessagePtr> queue;

    uint64_t last_received = 0;
  };
  LaneState& LaneOf(Lane lane) { return lanes_[static_cast<size_t>(lane)]; }
  const LaneState& LaneOf(Lane lane) const { return lanes_[static_cast<size_t>(lane)]; }

  Action& Emit(Action::Kind kind, Lane lane);
  void Want(Lane lane, absl::Time now);
  void Connect(Lane lane, absl::Time now);
  void AskForBulk();
  void LengthenBackoff(LaneState& state) const;
  void Backoff(Lane lane, absl::Duration wait, absl::Status error, absl::Time now);
  void Open(Lane lane, PipeId pipe, bool by_us, const Acks& acks, absl::Time now);
  void Pump(Lane lane, absl::Time now);
  void AwaitAck(LaneState& state, absl::Time now) const;
  static void Carried(LaneState& state);
  bool Admits(const LaneState& lane, size_t bytes) const;
  void Send(Lane lane, OutMessagePtr message, absl::Time now);
  void Greet(Lane lane);
  void Acknowledge();
  Acks TakeAcks();

  Options options_;
  std::array<LaneState, 2> lanes_;
  size_t queued_bytes_ = 0;
  int owed_count_ = 0;  // Received and not yet acknowledged.
  size_t owed_bytes_ = 0;
  absl::Time ack_at_ = absl::InfiniteFuture();
  bool leaving_ = false;
  bool dead_ = false;
  absl::Status death_;
  std::vector<Action> actions_;
};

}  // namespace Atoll::rpc
