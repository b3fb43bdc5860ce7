#include "atoll/rpc/payload.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "atoll/base/log.h"
#include "atoll/rpc/exception_text.h"
#include "atoll/rpc/sink.h"
#include "atoll/rpc/user_code.h"

namespace Atoll::rpc {
namespace {

// Room for a header's fixed parts and a tensor's own fields.
constexpr size_t kHeaderSlack = 256 + kMaxMethodName;
constexpr size_t kTensorSlack = 4 + 8 * kMaxDims;
// Inline tensors of one message together; beyond it the rest travel on their own.
constexpr size_t kMaxInlineTotal = size_t{1} << 20;
// A header above this would hold up the control lane.
constexpr size_t kMaxControlHeader = 256 << 10;
// What is unwanted and no larger lands in the pool's memory: it is there already.
constexpr size_t kMinSink = size_t{1} << 20;

std::string Describe(at::ScalarType dtype, absl::Span<const int64_t> sizes, c10::Device device) {
  return absl::StrCat(c10::toString(dtype), "[", absl::StrJoin(sizes, ","), "]",
                      device.is_cpu() ? "" : absl::StrCat(" on ", device.str()));
}

absl::StatusOr<c10::Device> LandingAt(const Destination& destination, const at::Tensor& tensor,
                                      size_t index) {
  absl::StatusOr<c10::Device> landing = LandingOf(destination, tensor.device());
  if (landing.ok()) return landing;
  return absl::Status(landing.status().code(),
                      absl::StrCat("tensor ", index, ": ", landing.status().message()));
}

// The message's streams go on from here: after what makes its tensors, whose memory stays theirs.
absl::Status OrderOut(Prepared& out) {
  const bool all_on_cpu = std::all_of(out.targets.begin(), out.targets.end(),
                                      [](auto& target) { return target == transport::Device(); });
  if (all_on_cpu) out.targets.clear();
  if (out.streams.empty()) return absl::OkStatus();
  return Guarded("ordering tensors on GPUs", [&] {
    out.streams.AwaitOrigins();
    for (const at::Tensor& tensor : out.tensors) out.streams.Keep(tensor);
    for (Loan& loan : out.loans) loan.ReturnOn(out.streams);
    for (Loan& loan : out.inline_loans) loan.ReturnOn(out.streams);
  });
}

absl::Status CheckSendable(const at::Tensor& tensor, size_t index) {
  auto refuse = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", index, " ", why));
  };
  if (!tensor.defined()) return refuse("is undefined");
  if (tensor.layout() != at::kStrided) return refuse("is not dense");
  if (tensor.is_quantized()) return refuse("is quantized");
  if (static_cast<size_t>(tensor.dim()) > kMaxDims) return refuse("has too many dimensions");
  if (!tensor.device().is_cpu() && !tensor.device().is_cuda()) {
    return refuse(absl::StrCat("is on ", tensor.device().str(), ", which calls do not carry"));
  }
  return absl::OkStatus();
}

TensorMeta MetaOf(const at::Tensor& tensor) { return {tensor.scalar_type(), tensor.sizes().vec()}; }

// A contiguous form with plain bytes; `fresh` says that it is a copy.
at::Tensor Plain(const at::Tensor& tensor, bool* fresh) {
  at::Tensor plain = tensor;
  if (plain.is_conj()) plain = plain.resolve_conj();
  if (plain.is_neg()) plain = plain.resolve_neg();
  plain = plain.contiguous();
  *fresh =
      plain.unsafeGetTensorImpl() != tensor.unsafeGetTensorImpl() && plain.data_ptr() != tensor.data_ptr();
  return plain;
}

}  // namespace

OutTensor Copy(at::Tensor tensor) { return OutTensor{std::move(tensor), false, nullptr}; }

OutTensor Lend(at::Tensor tensor, absl::AnyInvocable<void()> on_return) {
  return OutTensor{std::move(tensor), true, std::move(on_return)};
}

size_t TensorMeta::bytes() const {
  size_t count = c10::elementSize(dtype);
  for (int64_t size : sizes) count *= static_cast<size_t>(size);
  return count;
}

Loan::Loan(std::shared_ptr<Hub> hub, absl::AnyInvocable<void()> on_return)
    : hub_(std::move(hub)), on_return_(std::move(on_return)) {}

void Loan::ReturnOn(const Streams& streams) {
  if (!on_return_ || streams.empty()) return;
  on_return_ = [origins = streams.origins(), on_return = std::move(on_return_)]() mutable {
    StreamScope scope(origins);
    std::move(on_return)();
  };
}

void Message::ReturnToOrigins() const {
  if (streams.empty()) return;
  absl::Status status = Guarded("ordering the end of a loan", [&] { streams.ReturnToOrigins(); });
  // A device that failed; whoever uses it next is told.
  if (!status.ok()) ATOLL_LOG(kError) << status.message();
}

Loan::~Loan() {
  if (hub_ == nullptr || !on_return_) return;
  hub_->Schedule([on_return = std::move(on_return_)]() mutable {
    RunCallback("the end of a loan", std::move(on_return));
  });
}

void ReturnLoans(const std::shared_ptr<Hub>& hub, Payload payload) {
  for (OutTensor& tensor : payload.tensors) {
    if (tensor.lent) Loan returned(hub, std::move(tensor.on_return));
  }
}

absl::StatusOr<Prepared> Prepare(const std::shared_ptr<Hub>& hub, Payload payload,
                                 const Destination& destination) {
  const AgentOptions& options = hub->options();
  const transport::MessageLimits& limits = hub->limits();
  Prepared out;
  out.metadata = std::move(payload.metadata);
  out.body = std::move(payload.body);
  out.header_bytes = kHeaderSlack + out.body.size();
  for (const auto& [key, value] : out.metadata) out.header_bytes += 8 + key.size() + value.size();
  // First the loans, so that every error below returns them.
  std::vector<Loan> loans;
  loans.reserve(payload.tensors.size());
  for (OutTensor& tensor : payload.tensors) {
    loans.emplace_back(hub, tensor.lent ? std::move(tensor.on_return) : nullptr);
  }
  ATOLL_RETURN_IF_ERROR(CheckMetadata(out.metadata));
  if (payload.tensors.size() > limits.max_tensors) {
    return absl::InvalidArgumentError(
        absl::StrCat(payload.tensors.size(), " tensors in a message; the limit is ", limits.max_tensors));
  }
  c10::AutoGradMode no_grad(false);
  size_t inline_total = 0;
  for (size_t i = 0; i < payload.tensors.size(); ++i) {
    OutTensor& tensor = payload.tensors[i];
    ATOLL_RETURN_IF_ERROR(CheckSendable(tensor.tensor, i));
    try {
      ATOLL_ASSIGN_OR_RETURN(c10::Device landing, LandingAt(destination, tensor.tensor, i));
      bool fresh = false;
      at::Tensor plain = Plain(tensor.tensor, &fresh);
      TensorOut& field = out.fields.emplace_back();
      field.meta = MetaOf(plain);
      field.meta.device = landing;
      const bool on_cpu = landing.is_cpu() && plain.device().is_cpu();
      size_t bytes = field.meta.bytes();
      out.header_bytes += kTensorSlack;
      if (bytes == 0 ||
          (on_cpu && bytes <= options.inline_bytes && inline_total + bytes <= kMaxInlineTotal)) {
        static constexpr char kEmpty = 0;
        field.data = bytes == 0 ? &kEmpty : plain.const_data_ptr();
        inline_total += bytes;
        out.header_bytes += bytes;
        out.inline_tensors.push_back(std::move(plain));
        out.inline_loans.push_back(std::move(loans[i]));
        continue;
      }
      if (bytes > limits.max_tensor_bytes) {
        return absl::InvalidArgumentError(
            absl::StrCat("tensor ", i, " has ", bytes, " bytes; the limit is ", limits.max_tensor_bytes));
      }
      if (!plain.device().is_cpu()) {
        if (!tensor.lent && !fresh) plain = plain.clone();
        out.streams.Add(plain.device());
      } else if (!tensor.lent && !fresh) {
        ATOLL_ASSIGN_OR_RETURN(at::Tensor copy, hub->buffers().Allocate(MetaOf(plain)));
        std::memcpy(copy.data_ptr(), plain.const_data_ptr(), bytes);
        plain = std::move(copy);
      }
      out.tensor_bytes += bytes;
      out.tensors.push_back(std::move(plain));
      out.targets.push_back(ToTransport(landing));
      // A loan that was copied ends with the call; else it goes with the message.
      (fresh ? out.inline_loans : out.loans).push_back(std::move(loans[i]));
    } catch (...) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", i, ": ", ExceptionText()));
    }
  }
  ATOLL_RETURN_IF_ERROR(OrderOut(out));
  if (out.header_bytes > limits.max_header_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("a body of ", out.body.size(),
                                                   " bytes; a message's header may have ",
                                                   limits.max_header_bytes, " in all"));
  }
  return out;
}

absl::Status CheckLimits(const Message& message, const transport::MessageLimits& limits) {
  auto above = [](size_t is, absl::string_view of_what, size_t limit) {
    return absl::InvalidArgumentError(absl::StrCat(is, " ", of_what, "; the receiver takes ", limit));
  };
  if (message.header.size() > limits.max_header_bytes) {
    return above(message.header.size(), "bytes of body and small tensors", limits.max_header_bytes);
  }
  if (message.buffers.size() > limits.max_tensors) {
    return above(message.buffers.size(), "tensors", limits.max_tensors);
  }
  for (const transport::Buffer& buffer : message.buffers) {
    if (buffer.bytes > limits.max_tensor_bytes) {
      return above(buffer.bytes, "bytes of a tensor", limits.max_tensor_bytes);
    }
  }
  return absl::OkStatus();
}

std::shared_ptr<Message> MakeMessage(std::string header, Prepared prepared, bool ack_now) {
  bool bulk = !prepared.tensors.empty() || header.size() > kMaxControlHeader;
  auto message =
      std::make_shared<Message>(bulk ? transport::Lane::kBulk : transport::Lane::kControl,
                                header.size() + prepared.tensor_bytes, ack_now || !prepared.tensors.empty());
  message->header = std::move(header);
  message->tensors = std::move(prepared.tensors);
  message->targets = std::move(prepared.targets);
  message->streams = std::move(prepared.streams);
  message->loans = std::move(prepared.loans);
  for (const at::Tensor& tensor : message->tensors) {
    message->buffers.push_back({const_cast<void*>(tensor.const_data_ptr()), tensor.nbytes(),
                                ToTransport(tensor.device()), message->streams.Handle(tensor.device())});
  }
  return message;
}

std::shared_ptr<Message> MakeMessage(std::string header) {
  auto message = std::make_shared<Message>(transport::Lane::kControl, header.size(), false);
  message->header = std::move(header);
  return message;
}

absl::Status CheckMatch(absl::Span<const at::Tensor> into, absl::Span<const TensorIn> tensors,
                        absl::string_view whose) {
  if (into.size() != tensors.size()) {
    return absl::FailedPreconditionError(
        absl::StrCat(whose, " has ", into.size(), " tensors for ", tensors.size(), " that came"));
  }
  for (size_t i = 0; i < into.size(); ++i) {
    const TensorMeta& meta = tensors[i].meta;
    if (into[i].scalar_type() == meta.dtype && into[i].nbytes() == meta.bytes() &&
        into[i].device() == meta.device) {
      continue;
    }
    return absl::FailedPreconditionError(
        absl::StrCat(whose, " has ", Describe(into[i].scalar_type(), into[i].sizes(), into[i].device()),
                     " where ", Describe(meta.dtype, meta.sizes, meta.device), " came (tensor ", i, ")"));
  }
  return absl::OkStatus();
}

absl::Status CheckLanding(absl::Span<const at::Tensor> into) {
  for (size_t i = 0; i < into.size(); ++i) {
    const at::Tensor& tensor = into[i];
    if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.is_contiguous() || tensor.is_conj() ||
        tensor.is_neg() || !(tensor.device().is_cpu() || tensor.device().is_cuda())) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", i, " to receive into is not dense, contiguous and on the CPU or a GPU"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<at::Tensor>> AllocateFresh(BufferPool& pool, absl::Span<const TensorIn> tensors) {
  std::vector<at::Tensor> fresh;
  fresh.reserve(tensors.size());
  for (const TensorIn& tensor : tensors) {
    ATOLL_ASSIGN_OR_RETURN(at::Tensor allocated, pool.Allocate(tensor.meta));
    fresh.push_back(std::move(allocated));
  }
  return fresh;
}

absl::StatusOr<std::vector<at::Tensor>> AllocateUnwanted(BufferPool& pool,
                                                         absl::Span<const TensorIn> tensors) {
  size_t total = 0;
  size_t largest = 0;
  for (const TensorIn& tensor : tensors) {
    if (tensor.is_inline || !tensor.meta.device.is_cpu()) continue;
    total += tensor.meta.bytes();
    largest = std::max(largest, tensor.meta.bytes());
  }
  // One for all: nobody minds what they write over.
  absl::StatusOr<at::Tensor> sink = total > kMinSink ? Sink(largest) : absl::UnavailableError("not needed");
  std::vector<at::Tensor> unwanted;
  for (const TensorIn& tensor : tensors) {
    if (sink.ok() && !tensor.is_inline && tensor.meta.device.is_cpu()) {
      unwanted.push_back(sink->narrow(0, 0, static_cast<int64_t>(tensor.meta.bytes())));
      continue;
    }
    ATOLL_ASSIGN_OR_RETURN(at::Tensor memory, pool.Allocate(tensor.meta));
    unwanted.push_back(std::move(memory));
  }
  return unwanted;
}

absl::StatusOr<std::vector<at::Tensor>> AllocateFor(const Method& method, BufferPool& pool,
                                                    const base::MemberId& caller, absl::string_view body,
                                                    absl::Span<const TensorIn> tensors,
                                                    const Streams& streams) {
  if (tensors.empty()) return std::vector<at::Tensor>();
  StreamScope scope(streams);
  if (!method.options.allocate) return AllocateFresh(pool, tensors);
  std::vector<TensorMeta> metas;
  metas.reserve(tensors.size());
  for (const TensorIn& tensor : tensors) metas.push_back(tensor.meta);
  absl::StatusOr<std::vector<at::Tensor>> into = absl::InternalError("");
  try {
    into = method.options.allocate(caller, body, metas);
  } catch (...) {
    return absl::InternalError(absl::StrCat("allocating for it threw ", ExceptionText()));
  }
  if (!into.ok()) return into;
  ATOLL_RETURN_IF_ERROR(CheckLanding(*into));
  ATOLL_RETURN_IF_ERROR(CheckMatch(*into, tensors, "what was allocated"));
  if (!streams.empty()) {
    ATOLL_RETURN_IF_ERROR(Guarded("keeping what was allocated", [&] {
      for (const at::Tensor& tensor : *into) streams.Keep(tensor);
    }));
  }
  return into;
}

absl::Status AddStreams(absl::Span<const TensorIn> tensors, Streams* streams) {
  for (const TensorIn& tensor : tensors) {
    if (tensor.is_inline || tensor.meta.device.is_cpu()) continue;
    ATOLL_RETURN_IF_ERROR(Guarded("a stream to receive on", [&] { streams->Add(tensor.meta.device); }));
  }
  return absl::OkStatus();
}

absl::Status OrderInto(absl::Span<const at::Tensor> into, Streams* streams) {
  for (const at::Tensor& tensor : into) {
    if (tensor.device().is_cpu()) continue;
    ATOLL_RETURN_IF_ERROR(Guarded("ordering memory to receive into", [&] {
      streams->Add(tensor.device());
      streams->Keep(tensor);
    }));
  }
  if (streams->empty()) return absl::OkStatus();
  return Guarded("ordering memory to receive into", [&] { streams->AwaitOrigins(); });
}

void FillInline(absl::Span<const at::Tensor> into, absl::Span<const TensorIn> tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    absl::string_view bytes = tensors[i].bytes;
    if (tensors[i].is_inline && !bytes.empty()) std::memcpy(into[i].data_ptr(), bytes.data(), bytes.size());
  }
}

std::vector<transport::Buffer> ReadBuffers(absl::Span<const at::Tensor> into,
                                           absl::Span<const TensorIn> tensors, const Streams& streams) {
  std::vector<transport::Buffer> buffers;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].is_inline) continue;
    const c10::Device device = into[i].device();
    buffers.push_back({into[i].data_ptr(), into[i].nbytes(), ToTransport(device), streams.Handle(device)});
  }
  return buffers;
}

std::vector<TensorIn> AsReceived(const Prepared& prepared) {
  std::vector<TensorIn> tensors;
  size_t next = 0;
  for (const TensorOut& field : prepared.fields) {
    const at::Tensor* tensor = field.data != nullptr ? nullptr : &prepared.tensors[next++];
    if (tensor != nullptr && !(tensor->device().is_cpu() && field.meta.device.is_cpu())) {
      tensors.push_back({field.meta, false, {}});
      continue;
    }
    const void* data = tensor == nullptr ? field.data : tensor->const_data_ptr();
    tensors.push_back(
        {field.meta, true, absl::string_view(static_cast<const char*>(data), field.meta.bytes())});
  }
  return tensors;
}

absl::Status CopyHere(const Prepared& prepared, absl::Span<const at::Tensor> into) {
  if (prepared.streams.empty() && prepared.targets.empty()) return absl::OkStatus();
  return Guarded("copying tensors on GPUs", [&] {
    c10::AutoGradMode no_grad(false);
    StreamScope scope(prepared.streams);
    size_t next = 0;
    for (size_t i = 0; i < prepared.fields.size(); ++i) {
      if (prepared.fields[i].data != nullptr) continue;
      const at::Tensor& source = prepared.tensors[next++];
      if (source.device().is_cpu() && into[i].device().is_cpu()) continue;
      // To the CPU the copy must have ended when the receiver looks; nothing on a GPU needs that.
      into[i].view({-1}).copy_(source.view({-1}), /*non_blocking=*/!into[i].device().is_cpu());
    }
    prepared.streams.ReturnToOrigins();
  });
}

}  // namespace Atoll::rpc
