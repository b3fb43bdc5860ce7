#include "atoll/bench/wire.h"

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "atoll/base/future.h"
#include "atoll/bench/side.h"
#include "atoll/transport/endpoint.h"
#include "atoll/transport/pipe_impl.h"
#include "atoll/transport/tensorpipe_headers.h"

namespace Atoll::bench {
namespace {

constexpr absl::Duration kHang = absl::Seconds(60);

void EndOf(const tensorpipe::Error& error) {
  if (error) Die(error.what());
}

/// TensorPipe's pipe and nothing else.
class RawWire final : public Wire {
 public:
  /// `keep` is what the pipe needs to live.
  RawWire(std::shared_ptr<tensorpipe::Pipe> pipe, std::shared_ptr<void> keep)
      : pipe_(std::move(pipe)), keep_(std::move(keep)) {}
  void Write(std::string header, const std::vector<Piece>& pieces, std::function<void()> done) override {
    tensorpipe::Message message;
    message.metadata = std::move(header);
    for (const Piece& piece : pieces) {
      message.tensors.push_back({tensorpipe::CpuBuffer{piece.data},
                                 piece.bytes,
                                 tensorpipe::Device{tensorpipe::kCpuDeviceType, 0},
                                 {}});
    }
    pipe_->write(std::move(message), [done = std::move(done)](const tensorpipe::Error& error) {
      EndOf(error);
      if (done) done();
    });
  }
  void Await(Headed headed) override {
    pipe_->readDescriptor([pipe = pipe_.get(), headed = std::move(headed)](
                              const tensorpipe::Error& error, tensorpipe::Descriptor descriptor) {
      EndOf(error);
      std::vector<size_t> bytes;
      for (const auto& tensor : descriptor.tensors) bytes.push_back(tensor.length);
      if (bytes.empty()) pipe->read(tensorpipe::Allocation(), [](const tensorpipe::Error&) {});
      headed(std::move(descriptor.metadata), bytes);
    });
  }
  void Read(const std::vector<Piece>& into, std::function<void()> done) override {
    tensorpipe::Allocation allocation;
    for (const Piece& piece : into) allocation.tensors.push_back({tensorpipe::CpuBuffer{piece.data}});
    pipe_->read(std::move(allocation), [done = std::move(done)](const tensorpipe::Error& error) {
      EndOf(error);
      done();
    });
  }

 private:
  const std::shared_ptr<tensorpipe::Pipe> pipe_;
  const std::shared_ptr<void> keep_;
};

/// Ours.
class PipeWire final : public Wire {
 public:
  explicit PipeWire(std::shared_ptr<transport::Pipe> pipe) : pipe_(std::move(pipe)) {}
  void Write(std::string header, const std::vector<Piece>& pieces, std::function<void()> done) override {
    pipe_->Write({std::move(header), Buffers(pieces), {}}, [done = std::move(done)](absl::Status status) {
      DieOf(status);
      if (done) done();
    });
  }
  void Await(Headed headed) override {
    pipe_->ReadDescriptor([headed = std::move(headed)](absl::StatusOr<transport::Descriptor> descriptor) {
      DieOf(descriptor.status());
      std::vector<size_t> bytes;
      for (const auto& tensor : descriptor->tensors) bytes.push_back(tensor.bytes);
      headed(std::move(descriptor->header), bytes);
    });
  }
  void Read(const std::vector<Piece>& into, std::function<void()> done) override {
    pipe_->Read(Buffers(into), [done = std::move(done)](absl::Status status) {
      DieOf(status);
      done();
    });
  }

 private:
  static std::vector<transport::Buffer> Buffers(const std::vector<Piece>& pieces) {
    std::vector<transport::Buffer> buffers;
    for (const Piece& piece : pieces) buffers.push_back({piece.data, piece.bytes, {}, nullptr});
    return buffers;
  }
  const std::shared_ptr<transport::Pipe> pipe_;
};

/// Over our transports: the handshake is the endpoint's, what follows goes by its pipes, or straight by TensorPipe's
/// beneath them.
class EndpointStation final : public Station {
 public:
  EndpointStation(absl::string_view way, const std::string& name, bool raw) : raw_(raw) {
    transport::EndpointOptions options;
    options.job = "bench";
    options.self = {name, base::NewIncarnation()};
    options.key.bytes = "not a secret: loopback, one run";
    options.enable_unix = absl::StartsWith(way, "unix");
    options.enable_cma = absl::StrContains(way, "+cma");
    options.enable_mpt = !absl::StrContains(way, "+basic");
    options.enable_cuda = false;
    // The cost of bytes is that of certificates too: the suite is the same.
    if (absl::StrContains(way, "+tls")) options.tls.mode = base::TlsMode::kPsk;
    auto endpoint = transport::CreateEndpoint(options);
    DieOf(endpoint.status());
    endpoint_ = *std::move(endpoint);
  }
  std::string address() const override { return absl::StrJoin(endpoint_->addresses(), ","); }
  void OnWire(std::function<void(std::shared_ptr<Wire>)> on_wire) override {
    endpoint_->OnPipe([this, on_wire = std::move(on_wire)](std::shared_ptr<transport::Pipe> pipe) {
      on_wire(WireOf(std::move(pipe)));
    });
  }
  std::shared_ptr<Wire> Connect(const std::string& address) override {
    base::Promise<std::shared_ptr<transport::Pipe>> promise;
    endpoint_->Connect(absl::StrSplit(address, ','), {}, transport::Lane::kBulk, kHang,
                       [promise](auto pipe) { promise.Set(std::move(pipe)); });
    auto pipe = promise.future().Wait(kHang);
    DieOf(pipe.status());
    return WireOf(*std::move(pipe));
  }

 private:
  std::shared_ptr<Wire> WireOf(std::shared_ptr<transport::Pipe> pipe) const {
    if (!raw_) return std::make_shared<PipeWire>(std::move(pipe));
    auto* beneath = static_cast<transport::PipeImpl*>(pipe.get());
    return std::make_shared<RawWire>(beneath->tensorpipe_pipe(), std::move(pipe));
  }
  const bool raw_;
  std::shared_ptr<transport::Endpoint> endpoint_;
};

/// TensorPipe's own. Not for earnest: strangers end its process.
class UvStation final : public Station {
 public:
  explicit UvStation(const std::string& name) {
    context_ = std::make_shared<tensorpipe::Context>(tensorpipe::ContextOptions().name(name));
    context_->registerTransport(1, "uv", tensorpipe::transport::uv::create());
    context_->registerChannel(1, "basic", tensorpipe::channel::basic::create());
    listener_ = context_->listen({"uv://127.0.0.1"});
  }
  std::string address() const override { return listener_->url("uv"); }
  void OnWire(std::function<void(std::shared_ptr<Wire>)> on_wire) override {
    listener_->accept(
        [this, on_wire](const tensorpipe::Error& error, std::shared_ptr<tensorpipe::Pipe> pipe) {
          EndOf(error);
          on_wire(std::make_shared<RawWire>(std::move(pipe), nullptr));
          OnWire(on_wire);
        });
  }
  std::shared_ptr<Wire> Connect(const std::string& address) override {
    return std::make_shared<RawWire>(context_->connect(address), nullptr);
  }

 private:
  std::shared_ptr<tensorpipe::Context> context_;
  std::shared_ptr<tensorpipe::Listener> listener_;
};

}  // namespace

std::unique_ptr<Station> OpenStation(absl::string_view way, const std::string& name) {
  if (way == "uv") return std::make_unique<UvStation>(name);
  const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(way, absl::MaxSplits(':', 1));
  if (parts.first != "raw" && parts.first != "pipe") Die("no such way: " + std::string(way));
  return std::make_unique<EndpointStation>(parts.second, name, parts.first == "raw");
}

}  // namespace Atoll::bench
