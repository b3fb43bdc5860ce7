// What was thrown, in words that may travel and stand in a log.
#pragma once

#include <string>

namespace Atoll::rpc {

/// Of the exception that is being handled (call it in a catch block, `catch (...)` too): its type and its
/// text, "std::out_of_range: no such chunk". One line of printable ASCII, the rest as \xNN, of about 1 KiB at
/// most; one of LibTorch's without its backtrace.
std::string ExceptionText();

}  // namespace Atoll::rpc
