#include "atoll/rpc/exception_text.h"

#include <cxxabi.h>

#include <cstdlib>
#include <exception>
#include <memory>

#include <c10/util/Exception.h>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace Atoll::rpc {
namespace {

constexpr size_t kMaxTypeBytes = 128;
constexpr size_t kMaxTextBytes = 1024;

std::string TypeName() {
  const std::type_info* type = abi::__cxa_current_exception_type();
  if (type == nullptr) return "a foreign exception";
  int failed = 0;
  std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(type->name(), nullptr, nullptr, &failed), &std::free);
  return std::string(absl::string_view(failed == 0 ? name.get() : type->name()).substr(0, kMaxTypeBytes));
}

std::string Printable(absl::string_view text) {
  std::string line;
  for (char c : absl::StripAsciiWhitespace(text)) {
    if (line.size() >= kMaxTextBytes) return absl::StrCat(line, "...");
    if (absl::ascii_isprint(c)) {
      line.push_back(c);
    } else if (absl::ascii_isspace(c)) {
      line.push_back(' ');
    } else {
      line.append(absl::CHexEscape(absl::string_view(&c, 1)));
    }
  }
  return line;
}

}  // namespace

std::string ExceptionText() {
  try {
    throw;
  } catch (const c10::Error& error) {
    return absl::StrCat(TypeName(), ": ", Printable(error.what_without_backtrace()));
  } catch (const std::exception& error) {
    return absl::StrCat(TypeName(), ": ", Printable(error.what()));
  } catch (...) {
    return absl::StrCat(TypeName(), ", which is no std::exception");
  }
}

}  // namespace Atoll::rpc
