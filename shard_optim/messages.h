// What workers and shards say to each other. A shard is a remote object (rref) of class kShardClass; each
// message below is one method of it: X::Method() is its name and version, X::Encode() its body, X::Reply the
// answer's body. A body is base::ByteWriter fields in the order of the struct. Tensors travel beside the
// body.
//
// A worker's life, in order (every call to every owner's shard, in parallel over owners):
//
//   1. Create(owner, kShardClass, {ShardArguments}, ShardName(model))   get-or-create, pinned by name
//   2. Attach          answered once worker_count workers have attached (or, before its deadline, with
//                      DeadlineExceeded naming who is missing). Tells: load values? joined? next step.
//   3. Load            every chunk of the owner, if Attach's reply said so (worker 0, at the beginning).
//   4. Join            only if Attach said joined == false (a restarted or additional worker): from_step is
//                      the largest next_step of all owners; where one refuses, again on ALL owners
//                      with its larger next_step (an earlier acceptance is moved). Sync and async alike.
//   5. Pull            every chunk, min_step = first step - 1 (0 at the beginning; async: always 0).
//   6. per step s      PushGradient for each chunk as it becomes final, in any order; after backward
//                      OpenLanding(s) on each owner; the pushes' replies bring the new chunks.
//   7. Leave           after its last step.
//
// Errors, beside those of rref and rpc; `ran` is as rpc says:
//   InvalidArgument     malformed, out of range, or differs from what others said (the text says from what);
//   FailedPrecondition  right, but not now: not attached, not joined, not loaded, a past or future step, a
//                       round that went on without this worker. The text has the step that is next;
//   AlreadyExists       the worker's index is taken by another living member; values are loaded already;
//   ResourceExhausted   too many contributions are parked: nothing was taken; push the same again after
//                       another reply has come (or a pause);
//   DeadlineExceeded    the round's limit passed; names the missing workers. The round is open again under
//                       the same number: chunks that were applied in it answer a repeated push with their
//                       value, the others expect everyone's contribution anew;
//   Aborted             the same push came again: the later call gets the answer;
//   Unavailable         the shard is being destroyed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "atoll/rpc/agent.h"
#include "atoll/shard_optim/layout_core.h"
#include "atoll/shard_optim/options.h"

namespace Atoll::shard_optim {

inline constexpr char kShardClass[] = "shard_optim.Shard";
/// The name under which an owner pins its shard of a model. One owner holds one shard of a model.
std::string ShardName(absl::string_view model);

/// Arguments of the class's factory (the body; no tensors). All workers send an owner the same.
struct ShardArguments {
  std::string model;         ///< 1 to 256 bytes.
  int32_t owner = 0;         ///< Index of the owner that this goes to, 0 .. layout.owners - 1.
  int32_t worker_count = 1;  ///< Workers 0 .. worker_count - 1 take part from step 1. 1 to 65,536.
  LayoutOptions layout;
  std::vector<ParameterSpec> parameters;
  Policy policy;
  std::string Encode() const;
  static absl::StatusOr<ShardArguments> Decode(absl::string_view body);
};

/// The answer of methods that only succeed or fail.
struct Empty {
  std::string Encode() const { return {}; }
  static absl::StatusOr<Empty> Decode(absl::string_view body);
};

/// Registers the caller as a worker. A new incarnation under the same index replaces the old one (which
/// counts as dead). Repeating it changes nothing but that it closes the landing: after a failed step the same
/// one is made again, and its backward has not ended. InvalidArgument names the first difference of the
/// arguments.
struct Attach {
  static rpc::MethodId Method() { return {"attach", 1}; }
  int32_t worker = 0;        ///< Its index among the workers: rank order of summation.
  ShardArguments arguments;  ///< As it would create the shard.
  struct Reply {
    int64_t next_step =
        1;                ///< Sync: the first step whose round has not begun. Async: of this worker's count.
    bool joined = false;  ///< It is in the roster from next_step on; else it has to Join.
    bool load = false;    ///< The values are not there, and this worker (0) is to Load them.
    std::string Encode() const;
    static absl::StatusOr<Reply> Decode(absl::string_view body);
  };
  std::string Encode() const;
  static absl::StatusOr<Attach> Decode(absl::string_view body);
};

/// The initial value of a chunk, by worker 0: one tensor, chunk.elements() floats. Once all chunks of the
/// shard are there it is loaded: pulls are answered, and another Load is AlreadyExists.
struct Load {
  static rpc::MethodId Method() { return {"load", 1}; }
  int32_t chunk = 0;
  using Reply = Empty;
  std::string Encode() const;
  static absl::StatusOr<Load> Decode(absl::string_view body);
};

/// From round from_step on the caller is in the roster, and in none before (it is dropped from open ones).
/// Asked for a round that has begun, or for a step it already pushed, the answer is accepted = false.
struct Join {
  static rpc::MethodId Method() { return {"join", 1}; }
  int64_t from_step = 1;
  struct Reply {
    bool accepted = false;
    int64_t next_step = 1;  ///< The smallest from_step that would be (was) accepted here, now.
    std::string Encode() const;
    static absl::StatusOr<Reply> Decode(absl::string_view body);
  };
  std::string Encode() const;
  static absl::StatusOr<Join> Decode(absl::string_view body);
};

/// A chunk's value: one tensor. Deferred until the shard is loaded and, in sync, until step min_step has been
/// applied to the chunk; the value is then whole, of step Reply::step >= min_step (of exactly min_step if the
/// caller is in the roster of the next). Not held for a landing. Where too many wait, those whose callers gave
/// up are forgotten first; then ResourceExhausted.
struct Pull {
  static rpc::MethodId Method() { return {"pull", 1}; }
  int32_t chunk = 0;
  int64_t min_step = 0;
  struct Reply {
    int64_t step = 0;  ///< Sync: the round. Async: contributions applied to this chunk so far.
    std::string Encode() const;
    static absl::StatusOr<Reply> Decode(absl::string_view body);
  };
  std::string Encode() const;
  static absl::StatusOr<Pull> Decode(absl::string_view body);
};

/// One worker's gradient of one chunk for one step: one tensor of chunk.elements() floats; none if no
/// parameter of the chunk has a gradient. Applied exactly once, however often (worker, step, chunk) comes.
/// The reply (one tensor: the chunk's new value) comes when the chunk has been applied AND the worker has
/// opened its landing for the step. Sync: steps follow each other without a hole; the value is of this step.
/// Async: a worker counts its own steps; the value is the newest at the time of the landing.
struct PushGradient {
  static rpc::MethodId Method() { return {"push_gradient", 1}; }
  int64_t step = 1;
  int32_t chunk = 0;
  AdamOptions optimizer;  ///< Sync: must be equal on all workers of a round.
  /// Bit i (of byte i / 8, from its lowest bit): segment i of the chunk has a gradient. (segments + 7) / 8
  /// bytes, unused bits 0. A parameter undefined on all workers stays untouched and its step count does not
  /// advance; on some, theirs counts as zero. What the tensor holds for undefined segments is ignored.
  std::string defined;
  struct Reply {
    int64_t step = 0;  ///< As in Pull::Reply.
    int32_t contributors =
        0;  ///< Workers whose gradients are in it (a dead one's counts if it was received).
    std::string Encode() const;
    static absl::StatusOr<Reply> Decode(absl::string_view body);
  };
  std::string Encode() const;
  static absl::StatusOr<PushGradient> Decode(absl::string_view body);
};
/// The bitmap for `segments` segments, all defined.
std::string AllDefined(size_t segments);

/// The caller's backward of `step` has ended: replies of its pushes up to `step` may be sent.
struct OpenLanding {
  static rpc::MethodId Method() { return {"open_landing", 1}; }
  int64_t step = 1;
  using Reply = Empty;
  std::string Encode() const;
  static absl::StatusOr<OpenLanding> Decode(absl::string_view body);
};

/// The caller contributes to no round after after_step; rounds already begun go on without it.
struct Leave {
  static rpc::MethodId Method() { return {"leave", 1}; }
  int64_t after_step = 0;
  using Reply = Empty;
  std::string Encode() const;
  static absl::StatusOr<Leave> Decode(absl::string_view body);
};

struct Info {
  static rpc::MethodId Method() { return {"info", 1}; }
  struct Reply {
    int64_t elements = 0;      ///< Of parameters here.
    uint64_t state_bytes = 0;  ///< Of optimizer state.
    int64_t steps = 0;         ///< Sync: rounds complete. Async: steps of all workers together.
    int32_t chunks = 0;
    int32_t workers = 0;  ///< Attached and alive.
    bool loaded = false;
    std::string Encode() const;
    static absl::StatusOr<Reply> Decode(absl::string_view body);
  };
  std::string Encode() const { return {}; }
  static absl::StatusOr<Info> Decode(absl::string_view body);
};

}  // namespace Atoll::shard_optim
