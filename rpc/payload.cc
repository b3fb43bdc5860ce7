#include "atoll/rpc/payload.h"

#include <cstring>
#include <exception>
#include <utility>

#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace Atoll::rpc {
namespace {

// Room for a header's fixed parts and a tensor's own fields.
constexpr size_t kHeaderSlack = 256 + kMaxMethodName;
constexpr size_t kTensorSlack = 3 + 8 * kMaxDims;
// Inline tensors of one message together; beyond it the rest travel on their own.
constexpr size_t kMaxInlineTotal = size_t{1} << 20;
// A header above this would hold up the control lane.
constexpr size_t kMaxControlHeader = 256 << 10;

std::string Describe(at::ScalarType dtype, absl::Span<const int64_t> sizes) {
  return absl::StrCat(c10::toString(dtype), "[", absl::StrJoin(sizes, ","), "]");
}

absl::Status CheckSendable(const at::Tensor& tensor, size_t index) {
  auto refuse = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("tensor ", index, " ", why));
  };
  if (!tensor.defined()) return refuse("is undefined");
  if (tensor.layout() != at::kStrided) return refuse("is not dense");
  if (tensor.is_quantized()) return refuse("is quantized");
  if (static_cast<size_t>(tensor.dim()) > kMaxDims) return refuse("has too many dimensions");
  if (!tensor.device().is_cpu()) {
    return absl::UnimplementedError(
        absl::StrCat("tensor ", index, " is on ", tensor.device().str(), "; calls carry CPU tensors"));
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

Loan::~Loan() {
  if (hub_ != nullptr && on_return_) hub_->Schedule(std::move(on_return_));
}

void ReturnLoans(const std::shared_ptr<Hub>& hub, Payload payload) {
  for (OutTensor& tensor : payload.tensors) {
    if (tensor.lent) Loan returned(hub, std::move(tensor.on_return));
  }
}

absl::StatusOr<Prepared> Prepare(const std::shared_ptr<Hub>& hub, Payload payload) {
  const AgentOptions& options = hub->options();
  Prepared out;
  out.body = std::move(payload.body);
  out.header_bytes = kHeaderSlack + out.body.size();
  // First the loans, so that every error below returns them.
  std::vector<Loan> loans;
  loans.reserve(payload.tensors.size());
  for (OutTensor& tensor : payload.tensors) {
    loans.emplace_back(hub, tensor.lent ? std::move(tensor.on_return) : nullptr);
  }
  if (payload.tensors.size() > options.max_tensors) {
    return absl::InvalidArgumentError(
        absl::StrCat(payload.tensors.size(), " tensors in a message; the limit is ", options.max_tensors));
  }
  c10::AutoGradMode no_grad(false);
  size_t inline_total = 0;
  for (size_t i = 0; i < payload.tensors.size(); ++i) {
    OutTensor& tensor = payload.tensors[i];
    ATOLL_RETURN_IF_ERROR(CheckSendable(tensor.tensor, i));
    try {
      bool fresh = false;
      at::Tensor plain = Plain(tensor.tensor, &fresh);
      TensorOut& field = out.fields.emplace_back();
      field.meta = MetaOf(plain);
      size_t bytes = field.meta.bytes();
      out.header_bytes += kTensorSlack;
      if (bytes == 0 || (bytes <= options.inline_bytes && inline_total + bytes <= kMaxInlineTotal)) {
        static constexpr char kEmpty = 0;
        field.data = bytes == 0 ? &kEmpty : plain.const_data_ptr();
        inline_total += bytes;
        out.header_bytes += bytes;
        out.inline_tensors.push_back(std::move(plain));
        out.inline_loans.push_back(std::move(loans[i]));
        continue;
      }
      if (!tensor.lent && !fresh) {
        ATOLL_ASSIGN_OR_RETURN(at::Tensor copy, hub->buffers().Allocate(field.meta));
        std::memcpy(copy.data_ptr(), plain.const_data_ptr(), bytes);
        plain = std::move(copy);
      }
      out.tensor_bytes += bytes;
      out.tensors.push_back(std::move(plain));
      // A loan that was copied ends with the call; else it goes with the message.
      (fresh ? out.inline_loans : out.loans).push_back(std::move(loans[i]));
    } catch (const std::exception& error) {
      return absl::InvalidArgumentError(absl::StrCat("tensor ", i, ": ", error.what()));
    }
  }
  if (out.header_bytes > options.max_header_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("a body of ", out.body.size(),
                                                   " bytes; a message's header may have ",
                                                   options.max_header_bytes, " in all"));
  }
  return out;
}

std::shared_ptr<Message> MakeMessage(std::string header, Prepared prepared, bool ack_now) {
  bool bulk = !prepared.tensors.empty() || header.size() > kMaxControlHeader;
  auto message =
      std::make_shared<Message>(bulk ? transport::Lane::kBulk : transport::Lane::kControl,
                                header.size() + prepared.tensor_bytes, ack_now || !prepared.tensors.empty());
  message->header = std::move(header);
  message->tensors = std::move(prepared.tensors);
  message->loans = std::move(prepared.loans);
  for (const at::Tensor& tensor : message->tensors) {
    message->buffers.push_back({const_cast<void*>(tensor.const_data_ptr()), tensor.nbytes(), {}, nullptr});
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
    if (into[i].scalar_type() == meta.dtype && into[i].nbytes() == meta.bytes()) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(whose, " has ", Describe(into[i].scalar_type(), into[i].sizes()), " where ",
                     Describe(meta.dtype, meta.sizes), " came (tensor ", i, ")"));
  }
  return absl::OkStatus();
}

absl::Status CheckLanding(absl::Span<const at::Tensor> into) {
  for (size_t i = 0; i < into.size(); ++i) {
    const at::Tensor& tensor = into[i];
    if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.is_contiguous() || tensor.is_conj() ||
        tensor.is_neg() || !tensor.device().is_cpu()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", i, " to receive into is not dense, contiguous and on the CPU"));
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

absl::StatusOr<std::vector<at::Tensor>> AllocateFor(const Method& method, BufferPool& pool,
                                                    const base::MemberId& caller, absl::string_view body,
                                                    absl::Span<const TensorIn> tensors) {
  if (tensors.empty()) return std::vector<at::Tensor>();
  if (!method.options.allocate) return AllocateFresh(pool, tensors);
  std::vector<TensorMeta> metas;
  metas.reserve(tensors.size());
  for (const TensorIn& tensor : tensors) metas.push_back(tensor.meta);
  absl::StatusOr<std::vector<at::Tensor>> into = absl::InternalError("");
  try {
    into = method.options.allocate(caller, body, metas);
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat("allocating for it: ", error.what()));
  }
  if (!into.ok()) return into;
  ATOLL_RETURN_IF_ERROR(CheckLanding(*into));
  ATOLL_RETURN_IF_ERROR(CheckMatch(*into, tensors, "what was allocated"));
  return into;
}

void FillInline(absl::Span<const at::Tensor> into, absl::Span<const TensorIn> tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    absl::string_view bytes = tensors[i].bytes;
    if (tensors[i].is_inline && !bytes.empty()) std::memcpy(into[i].data_ptr(), bytes.data(), bytes.size());
  }
}

std::vector<transport::Buffer> ReadBuffers(absl::Span<const at::Tensor> into,
                                           absl::Span<const TensorIn> tensors) {
  std::vector<transport::Buffer> buffers;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].is_inline) buffers.push_back({into[i].data_ptr(), into[i].nbytes(), {}, nullptr});
  }
  return buffers;
}

std::vector<TensorIn> AsReceived(const Prepared& prepared) {
  std::vector<TensorIn> tensors;
  size_t next = 0;
  for (const TensorOut& field : prepared.fields) {
    const void* data = field.data != nullptr ? field.data : prepared.tensors[next++].const_data_ptr();
    tensors.push_back(
        {field.meta, true, absl::string_view(static_cast<const char*>(data), field.meta.bytes())});
  }
  return tensors;
}

}  // namespace Atoll::rpc
