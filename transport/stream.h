// A connection that carries frames: eight bytes of length, then as many bytes. The ground under
// TensorPipe's connections.
//
// Threads: any. Writes are sent in the calling thread as far as the socket takes them, the rest on the
// loop. Reads are completed on the loop, or in the calling thread if the frame is here already. At any
// moment one thread is the sender and one the receiver (the flags `sending_` and `receiving_`); only the
// sender touches lent write buffers, only the receiver lent read buffers, so a failure found elsewhere
// leaves it to them to give the loans back. Callbacks run without a lock, reads' in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "atoll/transport/engine.h"
#include "atoll/transport/socket.h"
#include "atoll/transport/tensorpipe_headers.h"
#include "atoll/transport/tls.h"

namespace Atoll::transport {

class Stream : public Loop::Handler, public std::enable_shared_from_this<Stream> {
 public:
  using ReadDone = std::function<void(const tensorpipe::Error&, const void*, size_t)>;
  using WriteDone = std::function<void(const tensorpipe::Error&)>;

  /// Not attached yet: reads and writes wait.
  explicit Stream(std::shared_ptr<Engine> engine)
      : engine_(std::move(engine)), loop_(*engine_->loop), traffic_(engine_->traffic) {}
  ~Stream() override;

  /// Gives it its socket, and the TLS on it (null: plain). On the loop, once.
  void AttachOnLoop(Fd fd, std::shared_ptr<Tls> tls);
  /// Frames that were read and checked before, given out by ReadFrame before any other, even after a
  /// failure of the socket (trap: an error on its first read kills TensorPipe's listener). Before the first
  /// read by TensorPipe.
  void Stash(std::string frame);

  /// Reads the next frame into `into`; a frame of another length fails the stream.
  void Read(void* into, size_t bytes, ReadDone done);
  /// Reads the next frame, whose length must be at most `max_bytes`. The bytes are there until `done`
  /// returns.
  void ReadFrame(size_t max_bytes, ReadDone done);
  /// Sends one frame. `data` is lent until `done`.
  void Write(const void* data, size_t bytes, WriteDone done);

  /// Ends it: what is outstanding fails with `status` (on the loop). If all was written, what is on its way
  /// still arrives. The first failure sticks.
  void Close(absl::Status status);
  /// Told once, when it ends, with the reason; on the loop, in the failing thread, or now if it has ended.
  void OnEnd(absl::AnyInvocable<void(const absl::Status&)> on_end);
  /// Told once, on the loop, when the peer has hung up behind bytes that nobody reads (that is no end: somebody may
  /// still read them). Set on the loop.
  void OnUnread(std::function<void()> on_unread) { on_unread_ = std::move(on_unread); }

  void OnEventsOnLoop(uint32_t events) override;

 private:
  struct ReadOp {
    void* into = nullptr;
    size_t bytes = 0;  // The length expected, or (dynamic) allowed.
    bool dynamic = false;
    ReadDone done;
  };
  struct WriteOp {
    const char* data;
    size_t bytes;
    uint64_t length;  // Little-endian, as sent before the data.
    size_t sent = 0;  // Of the eight and the bytes.
    WriteDone done;
  };
  enum class Step { kComplete, kNeedMore, kYield, kFailed };

  void AddRead(ReadOp op);
  void PumpWrites();
  void PumpReads();
  /// Takes off `writes_` what `sent` bytes complete.
  void PopSentLocked(size_t sent, std::vector<WriteDone>* completed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Step AdvanceRead(ReadOp& op, size_t* budget, absl::Status* failure);
  Step FillHead(size_t* budget, absl::Status* failure);
  /// One recvmsg into `into` and, beyond it, into what is read ahead (which must be empty then).
  Step Receive(char* into, size_t bytes, size_t* got, size_t* budget, absl::Status* failure);
  size_t TakeAhead(char* into, size_t bytes);
  void DeliverFrame();
  /// The peer has hung up, and nobody reads: fails the stream if nothing is left to read, else tells who asked.
  void LookAtEndOnLoop();
  ssize_t SendParts(Fd& fd, const iovec* parts, size_t count);
  ssize_t ReceiveParts(const iovec* parts, size_t count);
  /// What an errno of these two means.
  absl::Status SocketError(int error, absl::string_view what) const;
  void Fail(absl::Status status, bool local);
  void FinishOnLoop();
  void FailWrites();

  const std::shared_ptr<Engine> engine_;
  Loop& loop_;
  Traffic& traffic_;

  absl::Mutex mu_;
  std::vector<absl::AnyInvocable<void(const absl::Status&)>> on_end_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<Fd> fd_ ABSL_GUARDED_BY(mu_);
  Loop::HandlerId id_ ABSL_GUARDED_BY(mu_) = 0;
  std::shared_ptr<Tls> tls_;  // Constant once attached_, which every user has seen.
  bool attached_ ABSL_GUARDED_BY(mu_) = false;
  bool failed_ ABSL_GUARDED_BY(mu_) = false;
  bool closed_by_us_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;  // Off the loop; errors may be given out.
  tensorpipe::Error error_ ABSL_GUARDED_BY(mu_);
  bool hung_up_ ABSL_GUARDED_BY(mu_) = false;

  std::deque<WriteOp> writes_ ABSL_GUARDED_BY(mu_);
  bool sending_ ABSL_GUARDED_BY(mu_) = false;
  bool writable_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t write_events_ ABSL_GUARDED_BY(mu_) = 0;
  // Whether the loop is told when the socket takes more. Of a Unix socket only once it has been full: the system
  // would report room each time that the peer reads, a wake-up of the loop for every message.
  bool awaits_writable_ ABSL_GUARDED_BY(mu_) = false;

  std::deque<ReadOp> reads_ ABSL_GUARDED_BY(mu_);
  std::deque<std::string> stash_ ABSL_GUARDED_BY(mu_);
  bool receiving_ ABSL_GUARDED_BY(mu_) = false;
  bool readable_ ABSL_GUARDED_BY(mu_) = false;  // Changed on the loop alone, as only the loop receives.

  std::function<void()> on_unread_;  // Loop only.

  // The receiver's own.
  static constexpr size_t kAheadBytes = 64 << 10;
  std::unique_ptr<char[]> ahead_;
  size_t ahead_begin_ = 0;
  size_t ahead_end_ = 0;
  std::shared_ptr<Fd> receive_fd_;
  std::optional<uint64_t> frame_bytes_;  // Of the frame being read, once its head is here.
  size_t frame_got_ = 0;
  std::unique_ptr<char[]> frame_;  // For a dynamic one that does not fit what was read ahead.
};

}  // namespace Atoll::transport
