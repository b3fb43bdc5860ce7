#include "atoll/transport/frame_check.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "absl/strings/match.h"
#include "atoll/tests/transport/raw_peer.h"

namespace Atoll::transport {
namespace {

using tensorpipe::NopHolder;
using testing::Encode;

tensorpipe::Descriptor SomeDescriptor() {
  tensorpipe::Descriptor descriptor = testing::DescriptorOf({0, 5, size_t{1} << 40});
  descriptor.metadata = std::string(300, 'm');
  return descriptor;
}

/// A table with the channels that need no other process.
std::shared_ptr<ChannelTable> Channels() {
  auto channels = std::make_shared<ChannelTable>();
  channels->Add("basic", tensorpipe::channel::basic::create());
  return channels;
}

tensorpipe::Brochure SomeBrochure() {
  tensorpipe::Brochure brochure;
  brochure.transportDomainDescriptors[kTransportName] = kTransportDomain;
  brochure.channelDeviceDescriptors["basic"] = tensorpipe::channel::basic::create()->deviceDescriptors();
  return brochure;
}

tensorpipe::BrochureAnswer SomeAnswer() {
  tensorpipe::BrochureAnswer answer;
  answer.transport = kTransportName;
  answer.transportDomainDescriptor = kTransportDomain;
  answer.address = "lane/0";
  answer.transportRegistrationIds[1] = 1;
  answer.channelDeviceDescriptors = SomeBrochure().channelDeviceDescriptors;
  answer.channelRegistrationIds["basic"] = {2};
  const tensorpipe::Device cpu("cpu", 0);
  answer.channelForDevicePair[{cpu, cpu}] = "basic";
  return answer;
}

DevicePairs CpuOnly() {
  DevicePairs pairs;
  pairs.Add(Device{}, Device{});
  return pairs;
}

TEST(WalkFrame, TakesWhatTensorPipeWrites) {
  EXPECT_TRUE(WalkFrame(Encode(SomeDescriptor())).ok());
  EXPECT_TRUE(WalkFrame(Encode(SomeBrochure())).ok());
  EXPECT_TRUE(WalkFrame(Encode(SomeAnswer())).ok());
  EXPECT_TRUE(WalkFrame(Encode(tensorpipe::RequestedConnection{~uint64_t{0}})).ok());
  EXPECT_TRUE(WalkFrame(Encode(tensorpipe::DescriptorReply{})).ok());
}

TEST(WalkFrame, EveryPrefixAndEveryExtensionIsRefused) {
  for (const std::string& frame : {Encode(SomeDescriptor()), Encode(SomeBrochure()), Encode(SomeAnswer())}) {
    for (size_t size = 0; size < frame.size(); ++size) {
      EXPECT_FALSE(WalkFrame(absl::string_view(frame).substr(0, size)).ok()) << size;
    }
    EXPECT_FALSE(WalkFrame(frame + '\0').ok());
  }
}

TEST(WalkFrame, WildCountsCostNothing) {
  for (char prefix : {'\xb9', '\xba', '\xbb', '\xbc', '\xbd'}) {
    std::string frame(1, prefix);
    frame += '\x83';  // A count of eight bytes.
    frame += std::string(8, '\xff');
    EXPECT_FALSE(WalkFrame(frame).ok());
    EXPECT_FALSE(WalkFrame(frame + std::string(1000, '\0')).ok());
  }
  EXPECT_FALSE(WalkFrame(std::string(100, '\xb8')).ok());  // Variants without end.
  std::string nested;
  for (int i = 0; i < 1000; ++i) nested += "\xba\x01";
  EXPECT_FALSE(WalkFrame(nested + '\0').ok());
}

template <class T>
void DecodeMutations(const T& object, int rounds) {
  const std::string frame = Encode(object);
  std::mt19937_64 random(7);
  int decoded = 0;
  for (int i = 0; i < rounds; ++i) {
    // On the heap and of the exact size, so that a sanitizer sees the first byte read beyond it.
    std::string changed = frame;
    const int changes = 1 + random() % 4;
    for (int c = 0; c < changes; ++c) {
      switch (random() % 4) {
        case 0:
          changed[random() % changed.size()] = static_cast<char>(random());
          break;
        case 1:
          changed[random() % changed.size()] = static_cast<char>(0x80 + random() % 0x40);
          break;
        case 2:
          changed.resize(1 + random() % changed.size());
          break;
        case 3:
          changed.insert(random() % changed.size(), 1, static_cast<char>(random()));
          break;
      }
    }
    std::vector<char> exact(changed.begin(), changed.end());
    NopHolder<T> holder;
    decoded += DecodeFrame(absl::string_view(exact.data(), exact.size()), holder).ok();
  }
  EXPECT_GT(decoded, 0);  // Else nothing was tried beyond the walk.
}

// Scenario users 19.
TEST(DecodeFrame, MutatedFramesNeverReachBeyondTheirBytes) {
  DecodeMutations(SomeDescriptor(), 100000);
  DecodeMutations(SomeBrochure(), 100000);
  DecodeMutations(SomeAnswer(), 100000);
}

TEST(DecodeFrame, AnotherTypeIsRefused) {
  NopHolder<tensorpipe::Brochure> holder;
  EXPECT_FALSE(DecodeFrame(Encode(SomeDescriptor()), holder).ok());
  NopHolder<tensorpipe::Packet> packet;
  EXPECT_FALSE(DecodeFrame(Encode(SomeBrochure()), packet).ok());
}

TEST(CheckBrochure, NamesWhatCanTravel) {
  auto pairs = CheckBrochure(SomeBrochure(), *Channels());
  ASSERT_TRUE(pairs.ok()) << pairs.status();
  EXPECT_TRUE(pairs->Has(Device{}, Device{}));
  EXPECT_FALSE(pairs->Has(Device{}, Device{Device::Kind::kCuda, 0}));
}

TEST(CheckBrochure, WithoutOurTransportTensorPipeWouldThrow) {
  auto brochure = SomeBrochure();
  brochure.transportDomainDescriptors.clear();
  brochure.transportDomainDescriptors["uv"] = "x";
  EXPECT_FALSE(CheckBrochure(brochure, *Channels()).ok());
  brochure = SomeBrochure();
  brochure.transportDomainDescriptors[kTransportName] = "elsewhere";
  EXPECT_FALSE(CheckBrochure(brochure, *Channels()).ok());
}

TEST(CheckBrochureAnswer, WhatTensorPipeWouldFollowBlindly) {
  const auto channels = Channels();
  EXPECT_TRUE(CheckBrochureAnswer(SomeAnswer(), *channels).ok());
  auto answer = SomeAnswer();
  answer.transport = "uv";
  EXPECT_FALSE(CheckBrochureAnswer(answer, *channels).ok());
  answer = SomeAnswer();
  answer.transportRegistrationIds.clear();
  EXPECT_FALSE(CheckBrochureAnswer(answer, *channels).ok());
  answer = SomeAnswer();
  answer.channelRegistrationIds.clear();
  EXPECT_FALSE(CheckBrochureAnswer(answer, *channels).ok());
  answer = SomeAnswer();
  answer.channelRegistrationIds["basic"].clear();
  EXPECT_FALSE(CheckBrochureAnswer(answer, *channels).ok());
  answer = SomeAnswer();
  answer.channelForDevicePair.clear();
  EXPECT_FALSE(CheckBrochureAnswer(answer, *channels).ok());
  answer = SomeAnswer();
  answer.channelForDevicePair.begin()->second = "mpt";
  EXPECT_FALSE(CheckBrochureAnswer(answer, *channels).ok());
  answer = SomeAnswer();
  answer.channelDeviceDescriptors.clear();
  EXPECT_FALSE(CheckBrochureAnswer(answer, *channels).ok());
}

TEST(CheckServerHello, OurNumberOfLanes) {
  using tensorpipe::channel::mpt::Packet;
  using tensorpipe::channel::mpt::ServerHello;
  Packet packet;
  EXPECT_FALSE(CheckServerHello(packet).ok());
  packet.Become(packet.index_of<tensorpipe::channel::mpt::ClientHello>());
  EXPECT_FALSE(CheckServerHello(packet).ok());
  packet.Become(packet.index_of<ServerHello>());
  EXPECT_FALSE(CheckServerHello(packet).ok());
  packet.get<ServerHello>()->laneAdvertisements.resize(kLanes);
  EXPECT_TRUE(CheckServerHello(packet).ok());
  packet.get<ServerHello>()->laneAdvertisements.resize(kLanes + 1);
  EXPECT_FALSE(CheckServerHello(packet).ok());
}

TEST(CheckDescriptor, LimitsAndDevices) {
  const MessageLimits limits{300, 3, size_t{1} << 40};
  EXPECT_TRUE(CheckDescriptor(SomeDescriptor(), limits, CpuOnly()).ok());
  EXPECT_FALSE(CheckDescriptor(SomeDescriptor(), {299, 3, size_t{1} << 40}, CpuOnly()).ok());
  EXPECT_FALSE(CheckDescriptor(SomeDescriptor(), {300, 2, size_t{1} << 40}, CpuOnly()).ok());
  EXPECT_FALSE(CheckDescriptor(SomeDescriptor(), {300, 3, (size_t{1} << 40) - 1}, CpuOnly()).ok());
  auto descriptor = SomeDescriptor();
  descriptor.tensors[1].targetDevice.reset();
  EXPECT_FALSE(CheckDescriptor(descriptor, limits, CpuOnly()).ok());
  for (const tensorpipe::Device& device :
       {tensorpipe::Device("cuda", 0), tensorpipe::Device("cpu", 1), tensorpipe::Device("cuda", -1),
        tensorpipe::Device("cuda", 1 << 30), tensorpipe::Device("tpu", 0), tensorpipe::Device("", 0)}) {
    descriptor = SomeDescriptor();
    descriptor.tensors[0].sourceDevice = device;
    EXPECT_FALSE(CheckDescriptor(descriptor, limits, CpuOnly()).ok());
    descriptor = SomeDescriptor();
    descriptor.tensors[2].targetDevice = device;
    EXPECT_FALSE(CheckDescriptor(descriptor, limits, CpuOnly()).ok());
  }
  descriptor = SomeDescriptor();
  descriptor.payloads.emplace_back();
  EXPECT_FALSE(CheckDescriptor(descriptor, limits, CpuOnly()).ok());
}

}  // namespace
}  // namespace Atoll::transport
