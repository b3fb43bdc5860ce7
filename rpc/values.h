// Arguments and results that have no layout of their own: tensors, and a closed set of plain values. Nothing that is
// encoded here runs anything where it is decoded.
//
//   what travels      none, bool, int, double, complex, string, tensor; lists, dicts and tuples of what travels
//   of tensors        dense ones (of a view only its own bytes; as contiguous ones), sparse COO, CSR, CSC, BSR, BSC;
//                     undefined ones. The same tensor given twice travels once, and is one tensor there too; two
//                     views of one storage are two tensors there. requires_grad, names and hooks do not travel.
//   what does not     modules, functions, classes, futures, references, streams, devices, generators, quantized tensors
#pragma once

#include <vector>

#include <ATen/core/ivalue.h>

#include "absl/status/statusor.h"
#include "atoll/rpc/agent.h"

namespace Atoll::rpc {

/// Values in values, at most.
inline constexpr int kMaxValueDepth = 64;
/// Of one message, with those in containers: a few bytes of it could fill memory. More numbers are a tensor.
inline constexpr size_t kMaxValues = size_t{1} << 20;

/// `values` as a request or a reply. A tensor that nobody else holds, and that owns its memory, is lent, others are
/// copied: the caller may change what it gave. InvalidArgument says which value does not travel, and why.
absl::StatusOr<Payload> EncodeValues(std::vector<c10::IValue> values);

/// What EncodeValues was given. InvalidArgument for bytes that say nothing, a depth or a number beyond the limit, elements that
/// are not of their list's type, or indices of a sparse tensor that are outside it.
absl::StatusOr<std::vector<c10::IValue>> DecodeValues(const Received& received);

}  // namespace Atoll::rpc
