// Two session cores and all that can happen between them: every order of it, or many drawn ones.
#include "atoll/rpc/session_core.h"

#include <gtest/gtest.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "session_core_testing.h"

namespace Atoll::rpc {
namespace {

using Lane = transport::Lane;
using Action = SessionCore::Action;

// Picks among `count` possibilities.
using Chooser = std::function<int(int count)>;

// Two cores and the pipes between them. What happens next (a connection is made or fails, a message or an
// end arrives, a pipe is cut, something is posted) is the chooser's; time moves when nothing else can.
class World {
 public:
  World(Chooser choose, SessionCore::Options options, bool second_can_connect = true)
      : choose_(std::move(choose)) {
    for (int i = 0; i < 2; ++i) {
      options.wins_ties = i == 0;
      options.can_connect = i == 0 || second_can_connect;
      nodes_.push_back(std::make_unique<Node>(options));
    }
  }

  void Plan(int node, Lane lane, size_t bytes = 10) {
    Node& from = *nodes_[node];
    size_t l = static_cast<size_t>(lane);
    std::string text = absl::StrCat(node, "/", l, "/", from.planned[l].size());
    from.planned[l].push_back(text);
    from.to_post.push_back(std::make_shared<TestMessage>(lane, bytes, text, from.planned[l].size() % 2 == 0));
  }

  // Runs until nothing is left to happen. Returns a text of what went wrong, or nothing.
  std::string Run(int cuts, int connect_failures) {
    cuts_ = cuts;
    failures_ = connect_failures;
    for (int step = 0; step < 2000; ++step) {
      std::vector<std::function<void()>> events = Events();
      if (events.empty()) {
        if (!AdvanceTime()) return Check();
        continue;
      }
      events[choose_(static_cast<int>(events.size()))]();
      if (!error_.empty()) return error_;
    }
    return "it never comes to rest";
  }

  struct Node {
    explicit Node(SessionCore::Options options) : core(options) {}
    SessionCore core;
    std::deque<std::shared_ptr<TestMessage>> to_post;
    std::vector<std::string> planned[2];
    std::vector<std::string> received[2];
    std::map<std::string, int> acked;
  };
  Node& node(int i) { return *nodes_[i]; }
  // Node 0 has an address of node 1, but never reaches it there.
  void WallOff() { walled_ = true; }

 private:
  struct Packet {
    Action::Kind kind;
    Hello hello;
    Acks acks;
    uint64_t number = 0;
    std::string text;
    bool ack_now = false;
    bool open_bulk = false;
  };
  struct Pipe {
    Lane lane;
    int initiator;
    std::deque<Packet> to[2];
    bool closed[2] = {false, false};  // That end has closed it, or heard of its end.
    bool cut = false;
  };
  struct Pending {
    int node;
    Lane lane;
    uint64_t attempt;
  };

  std::vector<std::function<void()>> Events() {
    std::vector<std::function<void()>> events;
    for (int i = 0; i < 2; ++i) {
      if (!nodes_[i]->to_post.empty()) {
        events.push_back([this, i] {
          auto message = nodes_[i]->to_post.front();
          nodes_[i]->to_post.pop_front();
          absl::Status status = nodes_[i]->core.Post(message, now_);
          if (!status.ok()) error_ = absl::StrCat("post: ", status.ToString());
          After(i);
        });
      }
    }
    for (size_t k = 0; k < pending_.size(); ++k) {
      const bool walled = walled_ && pending_[k].node == 0;
      if (!walled) events.push_back([this, k] { Connected(k, true); });
      if (walled || failures_ > 0) events.push_back([this, k] { Connected(k, false); });
    }
    for (auto& [id, pipe] : pipes_) {
      for (int i = 0; i < 2; ++i) {
        if (pipe.closed[i]) continue;
        if (!pipe.to[i].empty()) {
          events.push_back([this, id = id, i] { Deliver(id, i); });
        } else if (pipe.cut || pipe.closed[1 - i]) {
          events.push_back([this, id = id, i] {
            pipes_.at(id).closed[i] = true;
            nodes_[i]->core.OnPipeClosed(id, absl::UnavailableError("cut"), now_);
            After(i);
          });
        }
      }
      if (cuts_ > 0 && !pipe.cut && !pipe.closed[0] && !pipe.closed[1]) {
        events.push_back([this, id = id] {
          --cuts_;
          Pipe& cut = pipes_.at(id);
          cut.cut = true;
          cut.to[0].clear();
          cut.to[1].clear();
        });
      }
    }
    return events;
  }

  void Connected(size_t k, bool ok) {
    Pending pending = pending_[k];
    pending_.erase(pending_.begin() + static_cast<long>(k));
    SessionCore& core = nodes_[pending.node]->core;
    if (ok) {
      uint64_t id = next_pipe_++;
      Pipe& pipe = pipes_[id];
      pipe.lane = pending.lane;
      pipe.initiator = pending.node;
      core.OnConnected(pending.lane, pending.attempt, id, now_);
    } else {
      // Who answers behind the wall may be somebody else, who refuses.
      const bool walled = walled_ && pending.node == 0;
      if (!walled) --failures_;
      core.OnConnectFailed(pending.lane, pending.attempt,
                           walled && core.open(Lane::kControl) ? SessionCore::Failure::kRefused
                                                               : SessionCore::Failure::kTransient,
                           absl::UnavailableError("away"), now_);
    }
    After(pending.node);
  }

  void Deliver(uint64_t id, int i) {
    Pipe& pipe = pipes_.at(id);
    Packet packet = std::move(pipe.to[i].front());
    pipe.to[i].pop_front();
    SessionCore& core = nodes_[i]->core;
    if (packet.kind == Action::Kind::kHello) {
      core.OnHello(id, pipe.lane, pipe.initiator == i, packet.hello, packet.acks, now_);
    } else {
      absl::Status status = core.OnAcks(packet.acks, now_);
      if (!status.ok()) error_ = status.ToString();
      if (packet.open_bulk) core.OnAskedForBulk(now_);
      if (packet.kind == Action::Kind::kWrite) {
        switch (core.OnAnnounced(id, pipe.lane, packet.number)) {
          case SessionCore::Verdict::kNew:
            core.OnReceived(pipe.lane, packet.number, 10, packet.ack_now, now_);
            nodes_[i]->received[static_cast<size_t>(pipe.lane)].push_back(packet.text);
            break;
          case SessionCore::Verdict::kGap:
            error_ = absl::StrCat("a gap before ", packet.text);
            break;
          default:
            break;
        }
      }
    }
    After(i);
  }

  // Carries out what node `i` decided.
  void After(int i) {
    while (nodes_[i]->core.has_actions()) {
      for (Action& action : nodes_[i]->core.TakeActions()) {
        auto* message = static_cast<TestMessage*>(action.message.get());
        auto found = pipes_.find(action.pipe);
        switch (action.kind) {
          case Action::Kind::kConnect:
            pending_.push_back({i, action.lane, action.attempt});
            break;
          case Action::Kind::kClose:
            if (found == pipes_.end() || found->second.closed[i]) break;
            found->second.closed[i] = true;
            found->second.to[i].clear();
            nodes_[i]->core.OnPipeClosed(action.pipe, action.status, now_);
            break;
          case Action::Kind::kAcked:
            ++nodes_[i]->acked[message->text];
            break;
          case Action::Kind::kDropped:
          case Action::Kind::kDead:
            error_ = absl::StrCat("died: ", action.status.ToString());
            break;
          case Action::Kind::kHello:
          case Action::Kind::kWrite:
          case Action::Kind::kAck:
          case Action::Kind::kBye:
            if (found == pipes_.end() || found->second.cut || found->second.closed[i]) break;
            found->second.to[1 - i].push_back({action.kind, action.hello, action.acks, action.number,
                                               message != nullptr ? message->text : "", action.ack_now,
                                               action.open_bulk});
            break;
        }
      }
    }
    nodes_[i]->core.CheckInvariants();
  }

  bool AdvanceTime() {
    absl::Time next = std::min(nodes_[0]->core.NextTimer(), nodes_[1]->core.NextTimer());
    if (next == absl::InfiniteFuture()) return false;
    now_ = std::max(now_, next);
    for (int i = 0; i < 2; ++i) {
      nodes_[i]->core.OnTimer(now_);
      After(i);
    }
    return true;
  }

  std::string Check() {
    for (int i = 0; i < 2; ++i) {
      Node& from = *nodes_[i];
      Node& to = *nodes_[1 - i];
      if (!from.core.drained()) return absl::StrCat("node ", i, " is not drained");
      for (int lane = 0; lane < 2; ++lane) {
        if (to.received[lane] != from.planned[lane]) {
          return absl::StrCat("node ", 1 - i, " received ", to.received[lane].size(), " of ",
                              from.planned[lane].size(), " on lane ", lane, ", or in another order");
        }
        for (const std::string& text : from.planned[lane]) {
          if (from.acked[text] != 1)
            return absl::StrCat(text, " was acknowledged ", from.acked[text], " times");
        }
      }
    }
    return "";
  }

  Chooser choose_;
  absl::Time now_ = absl::UnixEpoch();
  std::vector<std::unique_ptr<Node>> nodes_;
  std::map<uint64_t, Pipe> pipes_;
  std::vector<Pending> pending_;
  uint64_t next_pipe_ = 1;
  int cuts_ = 0;
  int failures_ = 0;
  bool walled_ = false;
  std::string error_;
};

// Every sequence of choices, in turn.
class Everything {
 public:
  int Choose(int count) {
    if (at_ == path_.size()) path_.push_back({0, count});
    return path_[at_++].first;
  }
  bool Next() {
    at_ = 0;
    while (!path_.empty() && path_.back().first + 1 == path_.back().second) path_.pop_back();
    if (path_.empty()) return false;
    ++path_.back().first;
    return true;
  }
  std::string Text() const {
    std::string text;
    for (auto& [choice, count] : path_) absl::StrAppend(&text, choice, "/", count, " ");
    return text;
  }

 private:
  std::vector<std::pair<int, int>> path_;
  size_t at_ = 0;
};

TEST(SessionCore, EveryOrderOfTwoMessagesOneWayWithACut) {
  Everything all;
  int paths = 0;
  do {
    World world([&](int count) { return all.Choose(count); }, Defaults());
    world.Plan(0, Lane::kControl);
    world.Plan(0, Lane::kControl);
    std::string wrong = world.Run(/*cuts=*/1, /*connect_failures=*/1);
    ASSERT_EQ(wrong, "") << all.Text();
    ++paths;
  } while (all.Next());
  EXPECT_GT(paths, 100);
}

TEST(SessionCore, EveryOrderOfBothSidesConnectingAtOnceWithACut) {
  Everything all;
  int paths = 0;
  do {
    World world([&](int count) { return all.Choose(count); }, Defaults());
    world.Plan(0, Lane::kControl);
    world.Plan(1, Lane::kControl);
    std::string wrong = world.Run(/*cuts=*/1, /*connect_failures=*/0);
    ASSERT_EQ(wrong, "") << all.Text();
    ++paths;
  } while (all.Next() && paths < 300000);
  EXPECT_GT(paths, 10000);
}

// Larger worlds, drawn at random: the seed names the failure.
void Draw(int seeds, int messages, int cuts, int failures, SessionCore::Options options) {
  for (int seed = 0; seed < seeds; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    World world([&](int count) { return static_cast<int>(random() % static_cast<unsigned>(count)); },
                options);
    for (int i = 0; i < messages; ++i) {
      world.Plan(0, i % 3 == 0 ? Lane::kBulk : Lane::kControl, 1 + random() % 200);
      world.Plan(1, i % 2 == 0 ? Lane::kBulk : Lane::kControl, 1 + random() % 200);
    }
    ASSERT_EQ(world.Run(cuts, failures), "") << "seed " << seed;
  }
}

TEST(SessionCore, DrawnOrdersWithCuts) { Draw(3000, 6, 4, 3, Defaults()); }

TEST(SessionCore, DrawnOrdersWithASmallWindow) {
  SessionCore::Options options = Defaults();
  options.window_bytes = 1;
  Draw(2000, 5, 3, 2, options);
}

TEST(SessionCore, DrawnOrdersWhereOneSideCannotConnect) {
  for (int seed = 0; seed < 1000; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    SessionCore::Options options = Defaults();
    options.reconnect_limit = absl::Hours(1);
    World world([&](int count) { return static_cast<int>(random() % static_cast<unsigned>(count)); }, options,
                /*second_can_connect=*/false);
    // Node 1 has something to say as well, and waits for node 0 to come, on each lane.
    for (int i = 0; i < 3; ++i) {
      world.Plan(0, Lane::kControl);
      world.Plan(1, i == 1 ? Lane::kBulk : Lane::kControl);
    }
    ASSERT_EQ(world.Run(2, 0), "") << "seed " << seed;
  }
}

TEST(SessionCore, DrawnOrdersWhereOneSideIsOutOfTheOthersReach) {
  for (int seed = 0; seed < 1000; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    SessionCore::Options options = Defaults();
    options.reconnect_limit = absl::Hours(1);
    World world([&](int count) { return static_cast<int>(random() % static_cast<unsigned>(count)); },
                options);
    world.WallOff();
    for (int i = 0; i < 3; ++i) {
      world.Plan(0, i == 1 ? Lane::kControl : Lane::kBulk);
      world.Plan(1, Lane::kControl);
    }
    ASSERT_EQ(world.Run(2, 1), "") << "seed " << seed;
  }
}

}  // namespace
}  // namespace Atoll::rpc
