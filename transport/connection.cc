#include "atoll/transport/connection.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace Atoll::transport {

std::string RouteAddress(const Route& route, int listener) {
  return absl::StrCat("route/", route.id, "/", listener);
}

absl::Status Inspection::Inspect(tensorpipe::AbstractNopHolder& object) const {
  using tensorpipe::NopHolder;
  if (auto* descriptor = dynamic_cast<NopHolder<tensorpipe::Descriptor>*>(&object)) {
    if (link == nullptr) return absl::InvalidArgumentError("a message on a connection that carries none");
    return CheckDescriptor(descriptor->getObject(), limits, link->pairs());
  }
  if (auto* answer = dynamic_cast<NopHolder<tensorpipe::BrochureAnswer>*>(&object)) {
    if (link == nullptr || route == nullptr) return absl::InvalidArgumentError("an answer to no question");
    absl::StatusOr<DevicePairs> pairs = CheckBrochureAnswer(answer->getObject(), *channels);
    if (!pairs.ok()) return pairs.status();
    answer->getObject().address = RouteAddress(*route, 0);
    link->Settle(*std::move(pairs));
    return absl::OkStatus();
  }
  if (auto* hello = dynamic_cast<NopHolder<tensorpipe::channel::mpt::Packet>*>(&object)) {
    if (route == nullptr) return absl::OkStatus();  // Checked before it was accepted.
    absl::Status status = CheckServerHello(hello->getObject());
    if (!status.ok()) return status;
    auto* packet = hello->getObject().get<tensorpipe::channel::mpt::ServerHello>();
    for (int i = 0; i < kLanes; ++i) packet->laneAdvertisements[i].address = RouteAddress(*route, i + 1);
    return absl::OkStatus();
  }
  if (dynamic_cast<NopHolder<tensorpipe::DescriptorReply>*>(&object) != nullptr) {
    return absl::InvalidArgumentError("a reply that nobody asked for");
  }
  return absl::OkStatus();
}

void Connection::read(read_callback_fn fn) {
  stream_->ReadFrame(inspection_->MaxFrameBytes(), std::move(fn));
}

void Connection::read(void* ptr, size_t length, read_callback_fn fn) {
  stream_->Read(ptr, length, std::move(fn));
}

void Connection::read(tensorpipe::AbstractNopHolder& object, read_nop_callback_fn fn) {
  stream_->ReadFrame(inspection_->MaxFrameBytes(),
                     [&object, inspection = inspection_, stream = std::weak_ptr<Stream>(stream_),
                      fn = std::move(fn)](const tensorpipe::Error& error, const void* data, size_t bytes) {
                       if (error) return fn(error);
                       absl::Status status =
                           DecodeFrame(absl::string_view(static_cast<const char*>(data), bytes), object);
                       if (status.ok()) status = inspection->Inspect(object);
                       if (!status.ok()) {
                         if (auto alive = stream.lock()) alive->Close(status);
                       }
                       fn(ToError(std::move(status)));
                     });
}

void Connection::write(const void* ptr, size_t length, write_callback_fn fn) {
  stream_->Write(ptr, length, std::move(fn));
}

void Connection::write(const tensorpipe::AbstractNopHolder& object, write_callback_fn fn) {
  auto frame = std::make_shared<std::string>(EncodeFrame(object));
  const char* data = frame->data();
  const size_t bytes = frame->size();
  stream_->Write(data, bytes, [frame = std::move(frame), fn = std::move(fn)](const tensorpipe::Error& error) {
    fn(error);
  });
}

void Connection::close() { stream_->Close(absl::CancelledError("closed by us")); }

}  // namespace Atoll::transport
