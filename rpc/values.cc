// The layout, in the body of a request or reply (docs/wire.md tells it in words):
//
//   values   count u32, each a value
//   value    tag u8, then: bool u8 | i64 | f64 | f64 f64 | string | index u32 of a tensor of the message
//            list   type of its elements | count u32, values
//            dict   types of its keys and values | count u32, (key, value) each
//            tuple  count u32, values
//            sparse layout u8 | coalesced u8 | dims u8, sizes i64 | index u32 of each part
//   type     kind u8, then of a list or optional one type, of a dict two, of a tuple count u8 and types
#include "atoll/rpc/values.h"

#include <algorithm>
#include <bit>
#include <map>
#include <string>
#include <utility>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/_sparse_compressed_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_validate_sparse_compressed_tensor_args.h>
#include <ATen/ops/_validate_sparse_coo_tensor_args.h>
#include <ATen/ops/ccol_indices.h>
#include <ATen/ops/col_indices.h>
#include <ATen/ops/crow_indices.h>
#include <ATen/ops/row_indices.h>
#include <c10/core/GradMode.h>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "atoll/base/bytes.h"
#include "atoll/base/status.h"
#include "atoll/rpc/exception_text.h"
#include "atoll/rpc/wire.h"

namespace Atoll::rpc {
namespace {

/// Numbers are never reused.
enum class Tag : uint8_t {
  kNone = 0,
  kBool = 1,
  kInt = 2,
  kDouble = 3,
  kComplex = 4,
  kString = 5,
  kTensor = 6,
  kUndefined = 7,  ///< A tensor that is not there.
  kSparse = 8,
  kList = 9,
  kDict = 10,
  kTuple = 11,
};

enum class Type : uint8_t {
  kAny = 0,
  kNone = 1,
  kBool = 2,
  kInt = 3,
  kFloat = 4,
  kComplex = 5,
  kNumber = 6,
  kString = 7,
  kTensor = 8,
  kList = 9,
  kDict = 10,
  kOptional = 11,
  kTuple = 12,
};

enum class Sparse : uint8_t { kCoo = 0, kCsr = 1, kCsc = 2, kBsr = 3, kBsc = 4 };

constexpr std::pair<Sparse, at::Layout> kLayouts[] = {{Sparse::kCoo, at::kSparse},
                                                      {Sparse::kCsr, at::kSparseCsr},
                                                      {Sparse::kCsc, at::kSparseCsc},
                                                      {Sparse::kBsr, at::kSparseBsr},
                                                      {Sparse::kBsc, at::kSparseBsc}};

const std::vector<std::pair<Type, c10::TypePtr>>& PlainTypes() {
  static const auto* const kTypes = new std::vector<std::pair<Type, c10::TypePtr>>{
      {Type::kAny, c10::AnyType::get()},       {Type::kNone, c10::NoneType::get()},
      {Type::kBool, c10::BoolType::get()},     {Type::kInt, c10::IntType::get()},
      {Type::kFloat, c10::FloatType::get()},   {Type::kComplex, c10::ComplexType::get()},
      {Type::kNumber, c10::NumberType::get()}, {Type::kString, c10::StringType::get()},
      {Type::kTensor, c10::TensorType::get()}};
  return *kTypes;
}

absl::Status TooDeep() {
  return absl::InvalidArgumentError(absl::StrCat("values nested deeper than ", kMaxValueDepth));
}

absl::Status TooMany() {
  return absl::InvalidArgumentError(
      absl::StrCat("more than ", kMaxValues, " values in one message; numbers travel as a tensor"));
}

class Encoder {
 public:
  absl::Status Put(const c10::IValue& value, int depth) {
    if (depth > kMaxValueDepth) return TooDeep();
    if (++count_ > kMaxValues) return TooMany();
    if (value.isTensor()) return PutTensor(value.toTensor());
    if (value.isNone()) return PutTag(Tag::kNone);
    if (value.isBool()) return PutPlain(Tag::kBool, value.toBool());
    if (value.isInt()) return PutPlain(Tag::kInt, value.toInt());
    if (value.isDouble()) return PutPlain(Tag::kDouble, value.toDouble());
    if (value.isComplexDouble()) {
      const c10::complex<double> number = value.toComplexDouble();
      out_.Put(Tag::kComplex);
      out_.Put(number.real());
      out_.Put(number.imag());
      return absl::OkStatus();
    }
    if (value.isString()) {
      out_.Put(Tag::kString);
      out_.PutString(value.toStringRef());
      return absl::OkStatus();
    }
    if (value.isList()) return PutList(value, depth);
    if (value.isGenericDict()) return PutDict(value, depth);
    if (value.isTuple()) return PutTuple(value, depth);
    return absl::InvalidArgumentError(absl::StrCat("a ", value.tagKind(), " does not travel"));
  }
  void PutCount(size_t count) { out_.Put(static_cast<uint32_t>(count)); }
  Payload Take() && {
    payload_.body = std::move(out_).Take();
    return std::move(payload_);
  }

 private:
  absl::Status PutTag(Tag tag) {
    out_.Put(tag);
    return absl::OkStatus();
  }
  template <class T>
  absl::Status PutPlain(Tag tag, T value) {
    out_.Put(tag);
    out_.Put(value);
    return absl::OkStatus();
  }

  uint32_t IndexOf(const at::Tensor& tensor) {
    auto [known, fresh] = indices_.try_emplace(tensor.unsafeGetTensorImpl(), payload_.tensors.size());
    if (fresh) payload_.tensors.push_back(Copy(tensor));
    return static_cast<uint32_t>(known->second);
  }

  absl::Status PutTensor(const at::Tensor& tensor) {
    if (!tensor.defined()) return PutTag(Tag::kUndefined);
    if (tensor.layout() == at::kStrided) return PutPlain(Tag::kTensor, IndexOf(tensor));
    for (const auto& [code, layout] : kLayouts) {
      if (layout == tensor.layout()) return PutSparse(tensor, code);
    }
    return absl::InvalidArgumentError(absl::StrCat("a tensor of layout ", LayoutText(tensor.layout()),
                                                   " does not travel: dense and sparse ones do"));
  }

  static std::string LayoutText(at::Layout layout) {
    std::ostringstream text;
    text << layout;
    return text.str();
  }

  absl::Status PutSparse(const at::Tensor& tensor, Sparse code) {
    std::vector<at::Tensor> parts;
    bool coalesced = false;
    try {
      switch (code) {
        case Sparse::kCoo:
          coalesced = tensor.is_coalesced();
          parts = {tensor._indices(), tensor._values()};
          break;
        case Sparse::kCsr:
        case Sparse::kBsr:
          parts = {tensor.crow_indices(), tensor.col_indices(), tensor.values()};
          break;
        case Sparse::kCsc:
        case Sparse::kBsc:
          parts = {tensor.ccol_indices(), tensor.row_indices(), tensor.values()};
          break;
      }
    } catch (...) {
      return absl::InvalidArgumentError(
          absl::StrCat("a sparse tensor that does not travel: ", ExceptionText()));
    }
    out_.Put(Tag::kSparse);
    out_.Put(code);
    out_.Put(coalesced);
    out_.Put(static_cast<uint8_t>(tensor.dim()));
    for (int64_t size : tensor.sizes()) out_.Put(size);
    for (const at::Tensor& part : parts) {
      // A part is made for this: whoever holds the sparse tensor may still change its memory.
      out_.Put(static_cast<uint32_t>(payload_.tensors.size()));
      payload_.tensors.push_back(Copy(part.detach()));
    }
    return absl::OkStatus();
  }

  absl::Status PutType(const c10::Type& type, int depth) {
    if (depth > kMaxValueDepth) return TooDeep();
    for (const auto& [code, plain] : PlainTypes()) {
      if (plain->kind() != type.kind()) continue;
      out_.Put(code);
      return absl::OkStatus();
    }
    switch (type.kind()) {
      case c10::TypeKind::ListType:
        out_.Put(Type::kList);
        break;
      case c10::TypeKind::OptionalType:
        out_.Put(Type::kOptional);
        break;
      case c10::TypeKind::DictType:
        out_.Put(Type::kDict);
        break;
      case c10::TypeKind::TupleType:
        out_.Put(Type::kTuple);
        if (type.containedTypes().size() > 255) return TooDeep();
        out_.Put(static_cast<uint8_t>(type.containedTypes().size()));
        break;
      default:
        return absl::InvalidArgumentError(absl::StrCat("a container of ", type.str(), " does not travel"));
    }
    for (const c10::TypePtr& inner : type.containedTypes()) ATOLL_RETURN_IF_ERROR(PutType(*inner, depth + 1));
    return absl::OkStatus();
  }

  absl::Status PutList(const c10::IValue& value, int depth) {
    const c10::List<c10::IValue> list = value.toList();
    out_.Put(Tag::kList);
    ATOLL_RETURN_IF_ERROR(PutType(*list.elementType(), depth));
    PutCount(list.size());
    for (const c10::IValue& element : list) ATOLL_RETURN_IF_ERROR(Put(element, depth + 1));
    return absl::OkStatus();
  }

  absl::Status PutDict(const c10::IValue& value, int depth) {
    const c10::Dict<c10::IValue, c10::IValue> dict = value.toGenericDict();
    out_.Put(Tag::kDict);
    ATOLL_RETURN_IF_ERROR(PutType(*dict.keyType(), depth));
    ATOLL_RETURN_IF_ERROR(PutType(*dict.valueType(), depth));
    PutCount(dict.size());
    for (const auto& entry : dict) {
      if (entry.key().isTensor()) return absl::InvalidArgumentError("a tensor as a key does not travel");
      ATOLL_RETURN_IF_ERROR(Put(entry.key(), depth + 1));
      ATOLL_RETURN_IF_ERROR(Put(entry.value(), depth + 1));
    }
    return absl::OkStatus();
  }

  absl::Status PutTuple(const c10::IValue& value, int depth) {
    const auto& elements = value.toTupleRef().elements();
    out_.Put(Tag::kTuple);
    PutCount(elements.size());
    for (const c10::IValue& element : elements) ATOLL_RETURN_IF_ERROR(Put(element, depth + 1));
    return absl::OkStatus();
  }

  base::ByteWriter out_;
  Payload payload_;
  size_t count_ = 0;
  std::map<const c10::TensorImpl*, size_t> indices_;  // Of dense ones, so that one given twice travels once.
};

class Decoder {
 public:
  explicit Decoder(const Received& received) : in_(received.body), tensors_(received.tensors) {}

  std::vector<c10::IValue> GetAll() {
    const uint32_t count = in_.GetCount(1);
    std::vector<c10::IValue> values;
    for (uint32_t i = 0; i < count && in_.ok(); ++i) values.push_back(Get(0));
    return values;
  }
  absl::Status Finish() { return in_.Finish(); }

 private:
  c10::IValue Get(int depth) {
    if (depth > kMaxValueDepth) in_.Fail("values nested too deep");
    if (++count_ > kMaxValues) in_.Fail("too many values");
    switch (in_.Get<Tag>()) {
      case Tag::kNone:
        return {};
      case Tag::kBool:
        return in_.Get<bool>();
      case Tag::kInt:
        return in_.Get<int64_t>();
      case Tag::kDouble:
        return in_.Get<double>();
      case Tag::kComplex: {
        const double real = in_.Get<double>();
        return c10::complex<double>(real, in_.Get<double>());
      }
      case Tag::kString:
        return std::string(in_.GetString(in_.remaining()));
      case Tag::kTensor:
        return GetTensor();
      case Tag::kUndefined:
        return at::Tensor();
      case Tag::kSparse:
        return GetSparse();
      case Tag::kList:
        return GetList(depth);
      case Tag::kDict:
        return GetDict(depth);
      case Tag::kTuple: {
        const uint32_t count = in_.GetCount(1);
        std::vector<c10::IValue> elements;
        for (uint32_t i = 0; i < count && in_.ok(); ++i) elements.push_back(Get(depth + 1));
        return c10::ivalue::Tuple::create(std::move(elements));
      }
    }
    in_.Fail("an unknown kind of value");
    return {};
  }

  at::Tensor GetTensor() {
    const uint32_t index = in_.Get<uint32_t>();
    if (in_.ok() && index < tensors_.size()) return tensors_[index];
    in_.Fail("a tensor that the message does not have");
    return {};
  }

  at::Tensor GetSparse() {
    const Sparse code = in_.Get<Sparse>();
    if (code > Sparse::kBsc) in_.Fail("an unknown sparse layout");
    const bool coalesced = in_.Get<bool>();
    const size_t dims = in_.Get<uint8_t>();
    if (dims > kMaxDims) in_.Fail("too many dimensions");
    std::vector<int64_t> sizes;
    for (size_t i = 0; i < dims && in_.ok(); ++i) sizes.push_back(in_.Get<int64_t>());
    std::vector<at::Tensor> parts;
    for (int i = 0; i < (code == Sparse::kCoo ? 2 : 3) && in_.ok(); ++i) parts.push_back(GetTensor());
    if (!in_.ok()) return {};
    // The same tensor may be another value too, and change after its check.
    for (at::Tensor& part : parts) part = part.clone();
    for (const at::Tensor& part : parts) {
      if (!part.device().is_cpu()) in_.Fail("a sparse tensor on a GPU");
    }
    if (!in_.ok()) return {};
    try {
      const c10::AutoGradMode no_grad(false);
      // Indices outside the tensor would be reads and writes outside its memory later.
      if (code == Sparse::kCoo) {
        at::_validate_sparse_coo_tensor_args(parts[0], parts[1], sizes, coalesced);
        return at::_sparse_coo_tensor_unsafe(parts[0], parts[1], sizes,
                                             parts[1].options().layout(at::kSparse), coalesced);
      }
      const at::Layout layout = kLayouts[static_cast<size_t>(code)].second;
      at::_validate_sparse_compressed_tensor_args(parts[0], parts[1], parts[2], sizes, layout);
      return at::_sparse_compressed_tensor_unsafe(parts[0], parts[1], parts[2], sizes,
                                                  parts[2].options().layout(layout));
    } catch (...) {
      in_.Fail("a sparse tensor whose parts do not fit");
      return {};
    }
  }

  c10::TypePtr GetType(int depth) {
    if (depth > kMaxValueDepth) in_.Fail("types nested too deep");
    const Type type = in_.Get<Type>();
    if (!in_.ok()) return c10::AnyType::get();
    switch (type) {
      case Type::kList:
        return c10::ListType::create(GetType(depth + 1));
      case Type::kOptional: {
        // get() keeps what it makes for ever: for plain types alone, which are few. isOptionalTensorList compares
        // with its one.
        const c10::TypePtr inner = GetType(depth + 1);
        return inner->containedTypes().empty() ? c10::TypePtr(c10::OptionalType::get(inner))
                                               : c10::TypePtr(c10::OptionalType::create(inner));
      }
      case Type::kDict: {
        const c10::TypePtr key = GetKeyType(depth + 1);
        return c10::DictType::create(key, GetType(depth + 1));
      }
      case Type::kTuple: {
        std::vector<c10::TypePtr> types(in_.Get<uint8_t>());
        for (c10::TypePtr& inner : types) inner = GetType(depth + 1);
        return c10::TupleType::create(std::move(types));
      }
      default:
        for (const auto& [code, plain] : PlainTypes()) {
          if (code == type) return plain;
        }
        in_.Fail("an unknown type");
        return c10::AnyType::get();
    }
  }

  c10::TypePtr GetKeyType(int depth) {
    c10::TypePtr type = GetType(depth);
    switch (type->kind()) {
      case c10::TypeKind::IntType:
      case c10::TypeKind::FloatType:
      case c10::TypeKind::BoolType:
      case c10::TypeKind::ComplexType:
      case c10::TypeKind::StringType:
        return type;
      default:
        in_.Fail("a dict whose keys are neither numbers nor strings");
        return c10::StringType::get();
    }
  }

  c10::IValue GetOf(const c10::Type& type, int depth) {
    c10::IValue value = Get(depth);
    if (!in_.ok()) return value;
    // An undefined tensor has no type of its own.
    const c10::TypePtr own = value.isTensor() ? c10::TypePtr(c10::TensorType::get()) : value.type();
    if (!own->isSubtypeOf(type)) in_.Fail("an element that is not of its container's type");
    return value;
  }

  c10::IValue GetList(int depth) {
    const c10::TypePtr type = GetType(depth);
    const uint32_t count = in_.GetCount(1);
    c10::impl::GenericList list(type);
    for (uint32_t i = 0; i < count && in_.ok(); ++i) {
      c10::IValue element = GetOf(*type, depth + 1);
      if (in_.ok()) list.push_back(std::move(element));
    }
    return list;
  }

  // c10's dict doubles its table until no key is far from its slot, which is the top of its hash times a constant:
  // some thirty keys that share a slot would make it take all memory.
  static bool Crowded(const std::vector<std::pair<c10::IValue, c10::IValue>>& entries) {
    if (entries.size() < 5) return false;
    const int bits = std::bit_width(16 * entries.size());
    absl::flat_hash_map<uint64_t, int> slots;
    for (const auto& [key, value] : entries) {
      const uint64_t hash = c10::detail::DictKeyHash()(key);
      if (++slots[(11400714819323198485u * hash) >> (64 - bits)] > std::max(4, bits - 1)) return true;
    }
    return false;
  }

  c10::IValue GetDict(int depth) {
    const c10::TypePtr keys = GetKeyType(depth);
    const c10::TypePtr values = GetType(depth);
    const uint32_t count = in_.GetCount(2);
    std::vector<std::pair<c10::IValue, c10::IValue>> entries;
    for (uint32_t i = 0; i < count && in_.ok(); ++i) {
      c10::IValue key = GetOf(*keys, depth + 1);
      entries.emplace_back(std::move(key), GetOf(*values, depth + 1));
    }
    c10::impl::GenericDict dict(keys, values);
    if (Crowded(entries)) in_.Fail("a dict whose keys are made to collide");
    for (auto& [key, value] : entries) {
      if (in_.ok() && !dict.insert(std::move(key), std::move(value)).second)
        in_.Fail("a key that comes twice");
    }
    return dict;
  }

  base::ByteReader in_;
  size_t count_ = 0;
  const std::vector<at::Tensor>& tensors_;
};

// Memory that a tensor does not own (at::from_blob without a deleter) is its maker's, who may free it once the call
// has been made.
bool NobodyElseHolds(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.storage().use_count() == 1 &&
         tensor.storage().data_ptr().get_context() != nullptr;
}

}  // namespace

absl::StatusOr<Payload> EncodeValues(std::vector<c10::IValue> values) {
  Encoder encoder;
  encoder.PutCount(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    absl::Status status;
    try {
      status = encoder.Put(values[i], 0);
    } catch (...) {
      status = absl::InvalidArgumentError(ExceptionText());
    }
    if (!status.ok()) return base::Annotate(status, absl::StrCat("value ", i));
  }
  Payload payload = std::move(encoder).Take();
  values.clear();
  for (OutTensor& tensor : payload.tensors) tensor.lent = NobodyElseHolds(tensor.tensor);
  return payload;
}

absl::StatusOr<std::vector<c10::IValue>> DecodeValues(const Received& received) {
  Decoder decoder(received);
  try {
    std::vector<c10::IValue> values = decoder.GetAll();
    ATOLL_RETURN_IF_ERROR(base::Annotate(decoder.Finish(), "values"));
    return values;
  } catch (...) {
    return absl::InvalidArgumentError(absl::StrCat("values: ", ExceptionText()));
  }
}

}  // namespace Atoll::rpc
