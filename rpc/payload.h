// Tensors on their way out of and into calls: loans that return exactly once, what is copied and what is
// not, which go inline, and where received ones land. Internal to rpc.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "atoll/rpc/agent.h"
#include "atoll/rpc/buffer_pool.h"
#include "atoll/rpc/device.h"
#include "atoll/rpc/hub.h"
#include "atoll/rpc/session_core.h"
#include "atoll/rpc/wire.h"
#include "atoll/transport/pipe.h"

namespace Atoll::rpc {

/// Runs a tensor's on_return, once, on the pool, when it is destroyed: whatever path a message takes.
class Loan {
 public:
  Loan(std::shared_ptr<Hub> hub, absl::AnyInvocable<void()> on_return);
  /// on_return then runs with the origins of `streams` current.
  void ReturnOn(const Streams& streams);
  Loan(Loan&&) noexcept = default;
  Loan& operator=(Loan&&) noexcept = delete;
  ~Loan();

 private:
  std::shared_ptr<Hub> hub_;
  absl::AnyInvocable<void()> on_return_;
};

/// Returns the loans of a payload that goes nowhere.
void ReturnLoans(const std::shared_ptr<Hub>& hub, Payload payload);

/// A payload made ready: contiguous, copied where it must be, split into inline tensors and those that
/// travel on their own.
struct Prepared {
  Metadata metadata;
  std::string body;
  std::vector<TensorOut> fields;  ///< In order; point into `inline_tensors`.
  std::vector<at::Tensor> inline_tensors;
  std::vector<at::Tensor> tensors;         ///< Those that travel on their own.
  std::vector<transport::Device> targets;  ///< Of `tensors`; empty if all land on the CPU.
  Streams streams;                         ///< Of those on GPUs: they wait for what makes the tensors.
  std::vector<Loan> loans;                 ///< Of `tensors`; loans of inline ones end with `inline_loans`.
  std::vector<Loan> inline_loans;
  size_t header_bytes = 0;  ///< At most this, for metadata, body and inline tensors.
  size_t tensor_bytes = 0;
};
/// InvalidArgument for a tensor that cannot travel (undefined, sparse, quantized) or a payload above our own
/// limits; FailedPrecondition for one on a GPU that has no place at the destination. The loans have then been
/// returned.
absl::StatusOr<Prepared> Prepare(const std::shared_ptr<Hub>& hub, Payload payload,
                                 const Destination& destination);

/// A message of calls, as the session keeps it.
struct Message : OutMessage {
  using OutMessage::OutMessage;
  ~Message() override { ReturnToOrigins(); }
  /// What the tensors' owners launch next on the streams that they were given on comes after the last read.
  void ReturnToOrigins() const;
  std::string header;
  std::vector<at::Tensor> tensors;
  std::vector<transport::Buffer> buffers;
  std::vector<transport::Device> targets;
  Streams streams;
  std::vector<Loan> loans;
  bool written = false;  ///< Given to a pipe once: it may have been received. Of whoever carries out actions.
  absl::Time deadline = absl::InfiniteFuture();  ///< Of a request: what is left of its time travels with it.
  std::function<void()> on_received;
};
/// InvalidArgument where `message` is above what its receiver takes.
absl::Status CheckLimits(const Message& message, const transport::MessageLimits& limits);
/// `header` must be encoded from `prepared`.
std::shared_ptr<Message> MakeMessage(std::string header, Prepared prepared, bool ack_now);
std::shared_ptr<Message> MakeMessage(std::string header);

/// Where the tensors of a request land: as the method's hook says, else fresh; with `streams` current.
absl::StatusOr<std::vector<at::Tensor>> AllocateFor(const Method& method, BufferPool& pool,
                                                    const base::MemberId& caller, absl::string_view body,
                                                    absl::Span<const TensorIn> tensors,
                                                    const Streams& streams);
/// The streams for tensors that land on GPUs.
absl::Status AddStreams(absl::Span<const TensorIn> tensors, Streams* streams);
/// The streams for memory given to receive into: after what the calling thread's current streams hold.
absl::Status OrderInto(absl::Span<const at::Tensor> into, Streams* streams);
/// Fresh memory for tensors. On GPUs it is of the current streams.
absl::StatusOr<std::vector<at::Tensor>> AllocateFresh(BufferPool& pool, absl::Span<const TensorIn> tensors);
/// Where tensors land that nobody wants: what is large, on the CPU, costs no memory.
absl::StatusOr<std::vector<at::Tensor>> AllocateUnwanted(BufferPool& pool,
                                                         absl::Span<const TensorIn> tensors);
/// FailedPrecondition where `into` is not as `tensors` say; `whose` begins the text.
absl::Status CheckMatch(absl::Span<const at::Tensor> into, absl::Span<const TensorIn> tensors,
                        absl::string_view whose);
/// Copies the bytes of inline tensors to where they land.
void FillInline(absl::Span<const at::Tensor> into, absl::Span<const TensorIn> tensors);
/// The memory of the tensors that are not inline, for Pipe::Read; what is on GPUs is received on `streams`.
std::vector<transport::Buffer> ReadBuffers(absl::Span<const at::Tensor> into,
                                           absl::Span<const TensorIn> tensors, const Streams& streams);
/// For a prepared payload that stays in this process: what a receiver's header would say, all inline but what
/// a GPU has part in, which CopyHere copies.
std::vector<TensorIn> AsReceived(const Prepared& prepared);
/// Copies those into `into`, on the payload's streams, and ends their loans in that order.
absl::Status CopyHere(const Prepared& prepared, absl::Span<const at::Tensor> into);
/// InvalidArgument unless all are dense, contiguous and on the CPU or a GPU.
absl::Status CheckLanding(absl::Span<const at::Tensor> into);

}  // namespace Atoll::rpc
