// What a peer's bytes meet first, one decoder a run: ATOLL_FUZZ names it. Without inputs and with --seeds=FOLDER the
// program writes the seeds that stand in the tree, so that they can be made again when a layout changes.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include <sys/stat.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Logging.h>

#include "absl/strings/str_cat.h"
#include "atoll/base/bytes.h"
#include "atoll/rpc/values.h"
#include "atoll/rpc/wire.h"
#include "atoll/transport/frame_check.h"
#include "atoll/transport/handshake_core.h"
#include "fuzz.h"

namespace Atoll {
namespace {

using fuzz::Input;
using fuzz::Prefixed;
using fuzz::Seeds;
using transport::ClientHandshake;
using transport::HandshakeConfig;
using transport::ServerHandshake;

// ---- handshake: side u8 (0: we serve) | how many bytes at a time u8 | what the peer sends.

HandshakeConfig Config(const char* name) {
  return {"fuzz", {name, base::Incarnation(7)}, "a key of at least sixteen bytes", "torch 0 basic", 1};
}

void FuzzHandshake(Input input) {
  static const HandshakeConfig config = Config("we");
  const transport::Nonce nonce = {};
  const bool serve = input.Byte() % 2 == 0;
  const size_t step = 1 + input.Byte();
  ServerHandshake server(&config, nonce);
  ClientHandshake client(&config, {}, {0, 0}, nonce);
  transport::Handshake& handshake = serve ? static_cast<transport::Handshake&>(server) : client;
  while (handshake.wanted() > 0 && !input.rest().empty()) {
    handshake.Feed(input.Take(std::min(step, handshake.wanted())));
    handshake.TakeOutput();
  }
  if (handshake.finished() != (handshake.status().ok() && handshake.wanted() == 0)) std::abort();
}

// ---- frame: which type u8 | a libnop frame.

std::shared_ptr<transport::ChannelTable> Channels() {
  auto channels = std::make_shared<transport::ChannelTable>();
  channels->Add("basic", tensorpipe::channel::basic::create());
  return channels;
}

template <class T>
bool DecodeAs(absl::string_view frame, tensorpipe::NopHolder<T>* holder) {
  return transport::DecodeFrame(frame, *holder).ok();
}

void FuzzFrame(Input input) {
  static const auto channels = Channels();
  const uint8_t type = input.Byte() % 5;
  const absl::string_view frame = input.rest();
  tensorpipe::NopHolder<tensorpipe::Brochure> brochure;
  tensorpipe::NopHolder<tensorpipe::BrochureAnswer> answer;
  tensorpipe::NopHolder<tensorpipe::Descriptor> descriptor;
  tensorpipe::NopHolder<tensorpipe::Packet> packet;
  tensorpipe::NopHolder<tensorpipe::channel::mpt::Packet> lane;
  transport::DevicePairs pairs;
  pairs.Add({}, {});
  if (type == 0 && DecodeAs(frame, &brochure)) {
    transport::CheckBrochure(brochure.getObject(), *channels).status().IgnoreError();
  } else if (type == 1 && DecodeAs(frame, &answer)) {
    transport::CheckBrochureAnswer(answer.getObject(), *channels).status().IgnoreError();
  } else if (type == 2 && DecodeAs(frame, &descriptor)) {
    transport::CheckDescriptor(descriptor.getObject(), transport::MessageLimits(), pairs).IgnoreError();
  } else if (type == 3) {
    DecodeAs(frame, &packet);
  } else if (type == 4 && DecodeAs(frame, &lane)) {
    transport::CheckServerHello(lane.getObject()).IgnoreError();
  }
}

// ---- header: count u8 of announced tensors, their sizes u16 each | the header.

void FuzzHeader(Input input) {
  std::vector<size_t> sizes(input.Byte() % 8);
  for (size_t& size : sizes) size = input.Byte() | input.Byte() << 8;
  const std::string bytes(input.rest());
  auto header = rpc::Decode(bytes, sizes);
  if (!header.ok()) return;
  size_t announced = 0;
  for (const rpc::TensorIn& tensor : header->tensors) {
    if (!tensor.is_inline && tensor.meta.bytes() != sizes.at(announced++)) std::abort();
    if (tensor.is_inline && !tensor.bytes.empty() && tensor.bytes.size() != tensor.meta.bytes()) std::abort();
  }
  rpc::ToMetadata(*header);
  for (absl::string_view part : header->parts) {
    auto inner = rpc::Decode(part, {});
    if (inner.ok() && !inner->parts.empty()) std::abort();
  }
}

// ---- values: count u8 of tensors, each: dtype u8 | rows u8 | columns u8 (5: one dimension) | its bytes; then the
// body.

void FuzzValues(Input input) {
  static const at::ScalarType kTypes[] = {at::kLong, at::kFloat, at::kInt, at::kBool};
  rpc::Received received;
  const size_t count = input.Byte() % 6;
  for (size_t i = 0; i < count; ++i) {
    const at::ScalarType type = kTypes[input.Byte() % 4];
    const int64_t rows = input.Byte() % 5, columns = input.Byte() % 6;
    at::Tensor tensor = columns == 5 ? at::zeros({rows}, type) : at::zeros({rows, columns}, type);
    const absl::string_view bytes = input.Take(tensor.nbytes());
    if (!bytes.empty()) std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
    if (type == at::kBool) tensor.fill_(!bytes.empty() && bytes[0] != 0);
    received.tensors.push_back(std::move(tensor));
  }
  received.body = std::string(input.rest());
  auto values = rpc::DecodeValues(received);
  if (!values.ok()) return;
  for (const c10::IValue& value : *values) {
    if (!value.isTensor() || !value.toTensor().defined() || value.toTensor().layout() == at::kStrided)
      continue;
    if (value.toTensor().numel() > 4096) continue;
    try {
      value.toTensor().to_dense();  // Where wrong indices would write.
    } catch (const std::exception&) {
    }
  }
  auto again = rpc::EncodeValues(*std::move(values));
  if (!again.ok()) std::abort();  // What was decoded can be encoded.
}

// ---- Seeds.

Seeds HandshakeSeeds() {
  const HandshakeConfig we = Config("we"), peer = Config("peer");
  const transport::Nonce zero = {};
  transport::Nonce other = {};
  other[0] = 1;
  Seeds seeds;
  // A peer that connects to us.
  ServerHandshake server(&we, zero);
  ClientHandshake client(&peer, {}, {0, 0}, other);
  const std::string hello = client.TakeOutput();
  server.Feed(hello.substr(0, server.wanted()));
  server.Feed(hello.substr(hello.size() - server.wanted()));
  std::string challenge = server.TakeOutput();
  while (client.wanted() > 0 && !challenge.empty()) {
    const size_t part = std::min(client.wanted(), challenge.size());
    client.Feed(challenge.substr(0, part));
    challenge.erase(0, part);
  }
  const std::string proof = client.TakeOutput();
  seeds.push_back(Prefixed({0, 255}, hello + proof));
  seeds.push_back(Prefixed({0, 0}, hello + proof));
  // A peer that we connect to.
  ClientHandshake ours(&we, {}, {0, 0}, zero);
  ServerHandshake theirs(&peer, other);
  const std::string our_hello = ours.TakeOutput();
  theirs.Feed(our_hello.substr(0, theirs.wanted()));
  theirs.Feed(our_hello.substr(our_hello.size() - theirs.wanted()));
  seeds.push_back(Prefixed({1, 255}, theirs.TakeOutput()));
  seeds.push_back(Prefixed({0, 255}, "GET / HTTP/1.1\r\n\r\n"));
  return seeds;
}

template <class T>
std::string Frame(int type, T object) {
  tensorpipe::NopHolder<T> holder;
  holder.getObject() = std::move(object);
  return Prefixed({type}, transport::EncodeFrame(holder));
}

Seeds FrameSeeds() {
  Seeds seeds;
  tensorpipe::Brochure brochure;
  brochure.transportDomainDescriptors[transport::kTransportName] = transport::kTransportDomain;
  brochure.channelDeviceDescriptors["basic"] = tensorpipe::channel::basic::create()->deviceDescriptors();
  seeds.push_back(Frame(0, brochure));
  tensorpipe::BrochureAnswer answer;
  answer.transport = transport::kTransportName;
  answer.transportDomainDescriptor = transport::kTransportDomain;
  answer.address = "lane/0";
  answer.transportRegistrationIds[1] = 1;
  answer.channelDeviceDescriptors = brochure.channelDeviceDescriptors;
  answer.channelRegistrationIds["basic"] = {2};
  const tensorpipe::Device cpu("cpu", 0);
  answer.channelForDevicePair[{cpu, cpu}] = "basic";
  seeds.push_back(Frame(1, answer));
  tensorpipe::Descriptor descriptor;
  descriptor.metadata = "header";
  tensorpipe::Descriptor::Tensor tensor;
  tensor.length = 5;
  tensor.sourceDevice = cpu;
  tensor.targetDevice = cpu;
  descriptor.tensors.push_back(std::move(tensor));
  seeds.push_back(Frame(2, std::move(descriptor)));
  tensorpipe::Packet packet;
  packet.Become(packet.index_of<tensorpipe::SpontaneousConnection>());
  packet.get<tensorpipe::SpontaneousConnection>()->contextName = "link/1";
  seeds.push_back(Frame(3, std::move(packet)));
  tensorpipe::Packet request;
  request.Become(request.index_of<tensorpipe::RequestedConnection>());
  seeds.push_back(Frame(3, std::move(request)));
  tensorpipe::channel::mpt::Packet lane;
  lane.Become(lane.index_of<tensorpipe::channel::mpt::ServerHello>());
  seeds.push_back(Frame(4, std::move(lane)));
  return seeds;
}

Seeds HeaderSeeds() {
  const float numbers[] = {1, 2, 3};
  const rpc::TensorOut small{{at::kFloat, {3}}, numbers}, large{{at::kDouble, {2, 3}}, nullptr};
  rpc::BundleWriter bundle;
  bundle.Add(rpc::EncodeRequest({"m"}, absl::Seconds(5), false, {}, "body", {}));
  bundle.Add(rpc::EncodeBare(rpc::Kind::kData, rpc::What::kCancel, 9));
  rpc::Hello hello{3, 2, {"127.0.0.1:29500", "unix:@atoll"}, {{-1, -1}, {0, 1}}, {}};
  return {Prefixed({0}, rpc::EncodeHello(hello)),
          Prefixed({1, 48, 0}, rpc::EncodeRequest({"shard.push", 3}, absl::Seconds(5), false,
                                                  {{"trace.id", "x"}}, "body", {small, large})),
          Prefixed({0}, rpc::EncodeRequest({"m"}, absl::InfiniteDuration(), true, {}, "", {})),
          Prefixed({0}, rpc::EncodeReply({{"a", "b"}, {"c", ""}}, "body", {small})),
          Prefixed({0}, rpc::EncodeErrorReply(absl::NotFoundError("no such method"), base::Ran::kNo)),
          Prefixed({0}, rpc::EncodeBare(rpc::Kind::kData, rpc::What::kCancel, 9)),
          Prefixed({0}, rpc::EncodeBare(rpc::Kind::kAck, rpc::What::kNothing)),
          Prefixed({0}, std::move(bundle).Take())};
}

std::string Values(std::vector<c10::IValue> values) {
  auto payload = rpc::EncodeValues(std::move(values));
  std::string seed(1, static_cast<char>(payload->tensors.size()));
  for (const rpc::OutTensor& out : payload->tensors) {
    const at::Tensor tensor = out.tensor.contiguous();
    seed.push_back(tensor.scalar_type() == at::kLong ? 0 : 1);
    seed.push_back(static_cast<char>(tensor.size(0)));
    seed.push_back(static_cast<char>(tensor.dim() == 1 ? 5 : tensor.size(1)));
    seed.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  }
  return absl::StrCat(seed, payload->body);
}

Seeds ValueSeeds() {
  c10::Dict<std::string, at::Tensor> named;
  named.insert("w", at::arange(3, at::kLong));
  c10::List<c10::List<int64_t>> nested;
  nested.push_back(c10::List<int64_t>({1, 2}));
  return {Values({c10::IValue(), true, int64_t{7}, 0.5, c10::complex<double>(1, 2), std::string("text")}),
          Values({c10::IValue(named), c10::IValue(nested), at::Tensor()}),
          Values({c10::ivalue::Tuple::create({c10::IValue(1), c10::IValue("in")})}),
          Values({at::ones({2, 2}).to_sparse()}),
          Values({at::ones({2, 2}).to_sparse_csr()}),
          Values({at::ones({2, 3}).to_sparse_csc(), at::ones({3})})};
}

struct Decoder {
  const char* name;
  void (*fuzz)(Input);
  Seeds (*seeds)();
};
constexpr Decoder kDecoders[] = {
    {"frame", FuzzFrame, FrameSeeds},          {"handshake", FuzzHandshake, HandshakeSeeds},
    {"header", FuzzHeader, HeaderSeeds},       {"membership", fuzz::FuzzMembership, fuzz::MembershipSeeds},
    {"rref", fuzz::FuzzRref, fuzz::RrefSeeds}, {"shard", fuzz::FuzzShard, fuzz::ShardSeeds},
    {"values", FuzzValues, ValueSeeds}};

void WriteSeeds(const std::string& folder) {
  mkdir(folder.c_str(), 0777);
  for (const Decoder& decoder : kDecoders) {
    mkdir(absl::StrCat(folder, "/", decoder.name).c_str(), 0777);
    int number = 0;
    for (const std::string& seed : decoder.seeds()) {
      std::ofstream(absl::StrCat(folder, "/", decoder.name, "/", number++), std::ios::binary) << seed;
    }
  }
}

const Decoder* g_decoder = nullptr;

}  // namespace
}  // namespace Atoll

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  for (int i = 1; i < *argc; ++i) {
    const std::string argument = (*argv)[i];
    if (argument == "--list") {
      for (const Atoll::Decoder& decoder : Atoll::kDecoders) std::puts(decoder.name);
      std::exit(0);
    }
    if (argument.rfind("--seeds=", 0) == 0) {
      Atoll::WriteSeeds(argument.substr(8));
      std::exit(0);
    }
  }
  const char* wanted = std::getenv("ATOLL_FUZZ");
  for (const Atoll::Decoder& decoder : Atoll::kDecoders) {
    if (wanted != nullptr && std::strcmp(wanted, decoder.name) == 0) Atoll::g_decoder = &decoder;
  }
  if (Atoll::g_decoder == nullptr) {
    std::fputs("ATOLL_FUZZ must name a decoder; --list lists them, --seeds=FOLDER writes their seeds\n",
               stderr);
    std::exit(2);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Atoll::g_decoder->fuzz(Atoll::fuzz::Input(data, size));
  return 0;
}
