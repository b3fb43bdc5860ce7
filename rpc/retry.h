// A call that is made again: what Agent::Call does where CallOptions::retry is set. Internal to rpc.
#pragma once

#include "absl/strings/string_view.h"
#include "atoll/rpc/agent.h"

namespace Atoll::rpc {

/// `agent` must live until on_reply has run, which is as late as its Shutdown.
void CallWithRetry(Agent* agent, absl::string_view to, const MethodId& method, Payload request,
                   CallOptions options, OnReply on_reply);

}  // namespace Atoll::rpc
