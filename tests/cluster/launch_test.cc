#include "atoll/cluster/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

namespace Atoll::cluster {
namespace {

using ::testing::HasSubstr;

Environment Given(std::map<std::string, std::string> variables) {
  return [variables = std::move(variables)](absl::string_view name) -> std::optional<std::string> {
    auto found = variables.find(std::string(name));
    if (found == variables.end()) return std::nullopt;
    return found->second;
  };
}

std::map<std::string, std::string> Torchrun() {
  return {{"RANK", "2"},
          {"WORLD_SIZE", "4"},
          {"LOCAL_RANK", "2"},
          {"LOCAL_WORLD_SIZE", "4"},
          {"MASTER_ADDR", "host1"},
          {"MASTER_PORT", "29400"},
          {"ATOLL_OWNERS", "2"}};
}

void ExpectError(std::map<std::string, std::string> variables, const std::string& part) {
  absl::StatusOr<Launch> launch = LaunchFromEnvironment(Given(std::move(variables)));
  EXPECT_EQ(launch.status().code(), absl::StatusCode::kInvalidArgument) << part;
  EXPECT_THAT(std::string(launch.status().message()), HasSubstr(part));
}

TEST(Launch, WithoutAnyLauncherThereIsOneProcess) {
  absl::StatusOr<Launch> launch = LaunchFromEnvironment(Given({}));
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ(launch->rank, 0);
  EXPECT_EQ(launch->world_size, 1);
  EXPECT_EQ(launch->role, Role::kWorker);
  EXPECT_EQ(launch->name, "worker0");
  EXPECT_EQ(launch->bind, "127.0.0.1");
  EXPECT_TRUE(launch->is_coordinator());
  EXPECT_TRUE(OnOneHost(*launch));
  EXPECT_FALSE(RequireOwnersAndWorkers(*launch).ok());
}

TEST(Launch, TorchrunWithItsOwnStore) {
  auto variables = Torchrun();
  variables["TORCHELASTIC_RUN_ID"] = "6cb2-11";
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  variables["TORCHELASTIC_RESTART_COUNT"] = "0";
  absl::StatusOr<Launch> launch = LaunchFromEnvironment(Given(variables));
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ(launch->job, "6cb2-11");
  EXPECT_TRUE(launch->agent_store);
  EXPECT_EQ(launch->role, Role::kWorker);
  EXPECT_EQ(launch->name, "worker0");
  EXPECT_EQ(launch->local_rank, 2);
  EXPECT_EQ(launch->coordinator_host, "host1");
  EXPECT_EQ(launch->coordinator_port, 29400);
  EXPECT_EQ(launch->bind, "127.0.0.1") << "all ranks are local";
  EXPECT_TRUE(RequireOwnersAndWorkers(*launch).ok());

  variables["TORCHELASTIC_RESTART_COUNT"] = "3";
  EXPECT_EQ(LaunchFromEnvironment(Given(variables))->job, "6cb2-11.r3") << "a restart is another job";
  variables["ATOLL_JOB"] = "mine";
  EXPECT_EQ(LaunchFromEnvironment(Given(variables))->job, "mine.r3");
  variables.erase("ATOLL_JOB");
  variables["TORCHELASTIC_RUN_ID"] = "none";
  EXPECT_EQ(LaunchFromEnvironment(Given(variables))->job, "torchrun-29400.r3") << "'none' is every job's";
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "False";
  EXPECT_FALSE(LaunchFromEnvironment(Given(variables))->agent_store);
}

TEST(Launch, OwnersComeFirstAndWorkersCountFromZero) {
  for (int rank = 0; rank < 4; ++rank) {
    auto variables = Torchrun();
    variables["RANK"] = std::to_string(rank);
    absl::StatusOr<Launch> launch = LaunchFromEnvironment(Given(variables));
    ASSERT_TRUE(launch.ok()) << launch.status();
    EXPECT_EQ(launch->name, (std::vector<std::string>{"owner0", "owner1", "worker0", "worker1"})[rank]);
    EXPECT_EQ(RoleName(launch->role), rank < 2 ? "owner" : "worker");
  }
}

TEST(Launch, SlurmOnOneNode) {
  absl::StatusOr<Launch> launch = LaunchFromEnvironment(Given({{"SLURM_PROCID", "1"},
                                                               {"SLURM_NTASKS", "4"},
                                                               {"SLURM_LOCALID", "1"},
                                                               {"SLURM_JOB_ID", "77"},
                                                               {"SLURM_STEP_ID", "2"},
                                                               {"SLURM_NNODES", "1"}}));
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ(launch->job, "slurm-77.2");
  EXPECT_EQ(launch->coordinator_host, "127.0.0.1");
  EXPECT_GE(launch->coordinator_port, 20000);
  EXPECT_LT(launch->coordinator_port, 30000);
  EXPECT_TRUE(OnOneHost(*launch));
}

TEST(Launch, SlurmOnSeveralNodesTakesTheFirstThatResolvesElseSrunsNode) {
  std::map<std::string, std::string> variables = {
      {"SLURM_PROCID", "3"},  {"SLURM_NTASKS", "4"},
      {"SLURM_NNODES", "2"},  {"SLURM_STEP_NODELIST", "no-such-host-a[007-9,11],b2"},
      {"SLURM_JOB_ID", "77"}, {"SLURM_LAUNCH_NODE_IPADDR", "127.0.0.3"}};
  absl::StatusOr<Launch> launch = LaunchFromEnvironment(Given(variables));
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ(launch->coordinator_host, "127.0.0.3");
  variables["SLURM_STEP_NODELIST"] = "127.0.0.[5-9]";
  EXPECT_EQ(LaunchFromEnvironment(Given(variables))->coordinator_host, "127.0.0.5");
  variables["MASTER_ADDR"] = "::1";
  EXPECT_EQ(LaunchFromEnvironment(Given(variables))->coordinator_host, "::1");
  variables["MASTER_PORT"] = "1234";
  EXPECT_EQ(LaunchFromEnvironment(Given(variables))->coordinator_port, 1234);
}

TEST(Launch, OpenMpiAlsoInsideASlurmJob) {
  std::map<std::string, std::string> variables = {{"OMPI_COMM_WORLD_RANK", "1"},
                                                  {"OMPI_COMM_WORLD_SIZE", "2"},
                                                  {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                                  {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                                  {"PMIX_NAMESPACE", "4081.1"},
                                                  {"SLURM_PROCID", "0"},
                                                  {"SLURM_NTASKS", "1"}};
  absl::StatusOr<Launch> launch = LaunchFromEnvironment(Given(variables));
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ(launch->rank, 1);
  EXPECT_EQ(launch->job, "mpi-4081.1");
  EXPECT_EQ(launch->coordinator_host, "127.0.0.1");
  variables["OMPI_COMM_WORLD_LOCAL_SIZE"] = "1";
  ExpectError(variables, "MASTER_ADDR is not set");
}

TEST(Launch, KubernetesJobIndexIsTheRank) {
  absl::StatusOr<Launch> launch = LaunchFromEnvironment(
      Given({{"JOB_COMPLETION_INDEX", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}}));
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ(launch->rank, 1);
}

// What Kubeflow's Trainer sets in a pod of a TrainJob.
std::map<std::string, std::string> TrainJob() {
  return {{"PET_NNODES", "3"},          {"PET_NPROC_PER_NODE", "1"},
          {"PET_NODE_RANK", "1"},       {"PET_MASTER_ADDR", "127.0.0.1"},
          {"PET_MASTER_PORT", "29400"}, {"JOB_COMPLETION_INDEX", "2"},
          {"ATOLL_OWNERS", "1"}};
}

TEST(Launch, PodsOfATrainJobAreRanks) {
  auto variables = TrainJob();
  absl::StatusOr<Launch> launch = LaunchFromEnvironment(Given(variables));
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ(launch->rank, 1);
  EXPECT_EQ(launch->world_size, 3);
  EXPECT_EQ(launch->local_world_size, 1);
  EXPECT_EQ(launch->name, "worker0");
  EXPECT_EQ(launch->coordinator_host, "127.0.0.1");
  EXPECT_EQ(launch->coordinator_port, 29400);

  variables.erase("PET_NODE_RANK");  // An indexed Job's own index is the pod's too.
  EXPECT_EQ(LaunchFromEnvironment(Given(variables))->rank, 2);
  variables.erase("JOB_COMPLETION_INDEX");
  ExpectError(variables, "PET_NODE_RANK is not set: it should be this node's rank");
  variables = TrainJob();
  for (const char* counted_by_torchrun : {"auto", "gpu", "cpu"}) {
    variables["PET_NPROC_PER_NODE"] = counted_by_torchrun;
    EXPECT_EQ(LaunchFromEnvironment(Given(variables))->world_size, 3) << counted_by_torchrun;
  }
  variables["PET_NNODES"] = "3:3";
  EXPECT_EQ(LaunchFromEnvironment(Given(variables))->world_size, 3);
  variables["MASTER_ADDR"] = "localhost";
  EXPECT_EQ(LaunchFromEnvironment(Given(variables))->coordinator_host, "localhost");
}

TEST(Launch, OnePodOfATrainJobIsAJobOfItsOwn) {
  absl::StatusOr<Launch> launch = LaunchFromEnvironment(Given({{"PET_NNODES", "1"}}));
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ(launch->rank, 0);
  EXPECT_EQ(launch->world_size, 1);
  EXPECT_EQ(launch->coordinator_host, "127.0.0.1");
}

TEST(Launch, SeveralProcessesAPodNeedTheirLocalRank) {
  auto variables = TrainJob();
  variables["PET_NPROC_PER_NODE"] = "2";
  ExpectError(variables, "PET_NPROC_PER_NODE='2', but this process was not started by torchrun");
  variables["LOCAL_RANK"] = "1";
  absl::StatusOr<Launch> launch = LaunchFromEnvironment(Given(variables));
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ(launch->rank, 3);
  EXPECT_EQ(launch->world_size, 6);
  EXPECT_EQ(launch->local_rank, 1);
  EXPECT_EQ(launch->local_world_size, 2);
  variables["LOCAL_RANK"] = "2";
  ExpectError(variables, "LOCAL_RANK='2'");
}

// A PyTorchJob sets torchrun's PET_ variables beside RANK (the pod's) and WORLD_SIZE (of processes).
TEST(Launch, PodsOfAPyTorchJobAreRanks) {
  auto variables = TrainJob();
  variables["RANK"] = "2";
  variables["WORLD_SIZE"] = "3";
  variables["MASTER_ADDR"] = "127.0.0.1";
  variables["MASTER_PORT"] = "23456";
  variables["PET_NPROC_PER_NODE"] = "auto";
  absl::StatusOr<Launch> launch = LaunchFromEnvironment(Given(variables));
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_EQ(launch->rank, 2);
  EXPECT_EQ(launch->world_size, 3);
  EXPECT_EQ(launch->coordinator_port, 23456);
  variables["WORLD_SIZE"] = "6";
  variables["PET_NPROC_PER_NODE"] = "2";
  ExpectError(variables, "start it with torchrun");
  variables["LOCAL_RANK"] = "0";  // torchrun is there.
  EXPECT_EQ(LaunchFromEnvironment(Given(variables))->rank, 2);
  variables.erase("RANK");  // --workers by hand says the world, the pod its rank.
  variables.erase("PET_NPROC_PER_NODE");
  EXPECT_EQ(LaunchFromEnvironment(Given(variables))->rank, 1);
}

TEST(Launch, PodsThatCannotBeRanksAreRefused) {
  auto with = [](const char* name, const char* value) {
    auto variables = TrainJob();
    variables[name] = value;
    return variables;
  };
  ExpectError(with("PET_NNODES", "1:4"), "PET_NNODES='1:4': it should be one whole number of nodes");
  ExpectError(with("PET_NNODES", "many"), "PET_NNODES='many'");
  ExpectError(with("PET_NNODES", "0"), "PET_NNODES='0'");
  ExpectError(with("PET_NODE_RANK", "3"), "PET_NODE_RANK='3'");
  ExpectError(with("PET_NPROC_PER_NODE", "some"), "PET_NPROC_PER_NODE='some'");
  ExpectError(with("PET_NPROC_PER_NODE", "0"), "PET_NPROC_PER_NODE='0'");
  ExpectError(with("PET_MASTER_PORT", "http"), "PET_MASTER_PORT='http'");
  auto variables = TrainJob();
  variables.erase("PET_MASTER_ADDR");
  ExpectError(variables, "MASTER_ADDR is not set");
}

TEST(Launch, ACoordinatorWhoseNameMeansLoopbackHereIsReachedFromOutside) {
  auto variables = Torchrun();
  variables["MASTER_ADDR"] = "2130706433";  // Resolves to 127.0.0.1, as a host's own name may.
  variables["LOCAL_WORLD_SIZE"] = "2";
  auto launch = LaunchFromEnvironment(Given(variables));
  ASSERT_TRUE(launch.ok()) << launch.status();
  EXPECT_FALSE(OnOneHost(*launch));
  EXPECT_EQ(launch->bind, "0.0.0.0");
}

// Scenario init 16.
TEST(Launch, WhatIsMissingOrMalformedIsNamed) {
  auto without = [](const char* name) {
    auto variables = Torchrun();
    variables.erase(name);
    return variables;
  };
  auto with = [](const char* name, const char* value) {
    auto variables = Torchrun();
    variables[name] = value;
    return variables;
  };
  ExpectError(without("RANK"), "RANK is not set: it should be this process's rank");
  ExpectError(without("WORLD_SIZE"), "WORLD_SIZE is not set");
  ExpectError(without("MASTER_ADDR"), "MASTER_ADDR is not set");
  ExpectError({{"SLURM_PROCID", "0"}}, "SLURM_NTASKS is not set");
  ExpectError({{"OMPI_COMM_WORLD_RANK", "0"}}, "OMPI_COMM_WORLD_SIZE is not set");
  ExpectError(with("RANK", "two"), "RANK='two': it should be");
  ExpectError(with("RANK", ""), "RANK='': it should be");
  ExpectError(with("RANK", "-1"), "RANK='-1'");
  ExpectError(with("RANK", "4"), "rank (RANK) 4 in a world of 4 (WORLD_SIZE): it should be from 0 to 3");
  ExpectError(with("WORLD_SIZE", "0"), "WORLD_SIZE='0'");
  ExpectError(with("LOCAL_RANK", "x"), "LOCAL_RANK='x'");
  ExpectError(with("MASTER_PORT", "65536"), "MASTER_PORT='65536'");
  ExpectError(with("MASTER_PORT", "0"), "MASTER_PORT 0");
  ExpectError(with("MASTER_ADDR", ""), "MASTER_ADDR='': it should be the host of rank 0");
  ExpectError(with("ATOLL_OWNERS", "5"),
              "the number of owners (ATOLL_OWNERS) 5 in a world of 4 (WORLD_SIZE)");
  ExpectError(with("ATOLL_OWNERS", "some"), "ATOLL_OWNERS='some'");
  ExpectError(with("ATOLL_JOB", "a/b"), "the job's id (ATOLL_JOB) 'a/b'");
  ExpectError(with("ATOLL_NAME", "a b"), "the name (ATOLL_NAME) 'a b'");
  ExpectError(with("ATOLL_NAME", "a\n\x1b[31m"),
              R"((ATOLL_NAME) 'a\n\x1b[31m' should be of letters, digits and '_', '.', ':', '-' only)");
  ExpectError(with("ATOLL_NAME", std::string(128, 'n').c_str()),
              "has 128 characters: it should have 1 to 127");
  ExpectError(with("ATOLL_OWNERS", "\n"), R"(ATOLL_OWNERS='\n': it should be)");
  ExpectError(with("ATOLL_BIND", ""), "ATOLL_BIND=''");
  ExpectError(with("ATOLL_JOIN_LIMIT", "60"), "ATOLL_JOIN_LIMIT='60'");
  ExpectError(with("ATOLL_JOIN_LIMIT", "inf"), "ATOLL_JOIN_LIMIT='inf'");
  ExpectError(with("ATOLL_JOIN_LIMIT", "25h"), "at most 24h");
  ExpectError(with("ATOLL_KEY", "short"), "ATOLL_KEY: a job key of 5 bytes: it should have 16 to 4096");
  absl::Status no_key = LaunchFromEnvironment(Given(with("ATOLL_KEY_FILE", "/no/such/key"))).status();
  EXPECT_EQ(no_key.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(no_key.message()), HasSubstr("ATOLL_KEY_FILE: open the key file /no/such/key"));
}

TEST(Launch, AKeyIsNotInTheErrorAboutIt) {
  absl::Status status = LaunchFromEnvironment(Given({{"ATOLL_KEY", "hunter2"}})).status();
  EXPECT_EQ(status.ToString().find("hunter2"), std::string::npos);
  absl::StatusOr<Launch> launch = LaunchFromEnvironment(Given({{"ATOLL_KEY", "0123456789abcdef"}}));
  ASSERT_TRUE(launch.ok());
  EXPECT_EQ(launch->key, "0123456789abcdef");
}

TEST(Launch, FieldsSetAfterParsingCountAndFinishCanBeRepeated) {
  absl::StatusOr<Launch> launch = ParseLaunch(Given({}));
  ASSERT_TRUE(launch.ok());
  launch->world_size = 3;
  launch->rank = 1;
  launch->owners = 1;
  ASSERT_TRUE(Finish(*launch).ok());
  EXPECT_EQ(launch->name, "worker0");
  launch->owners = 2;
  ASSERT_TRUE(Finish(*launch).ok());
  EXPECT_EQ(launch->name, "owner1");
  EXPECT_EQ(launch->role, Role::kOwner);
  launch->given_name = "ps";
  ASSERT_TRUE(Finish(*launch).ok());
  EXPECT_EQ(launch->name, "ps");
  launch->coordinator_port = 70000;
  EXPECT_FALSE(Finish(*launch).ok());
}

TEST(Launch, AJobOfSeveralHostsIsNotBoundToLoopback) {
  Launch launch;
  launch.world_size = 2;
  launch.rank = 1;
  launch.coordinator_host = "192.0.2.1";  // TEST-NET-1: nobody.
  absl::Status status = Finish(launch);
  EXPECT_THAT(std::string(status.message()), HasSubstr("ATOLL_BIND 127.0.0.1 cannot be reached"));
  launch.bind = "";
  ASSERT_TRUE(Finish(launch).ok());
  EXPECT_NE(launch.bind, "127.0.0.1");
  EXPECT_FALSE(launch.bind.empty());
}

TEST(Launch, ABinarysJobNeedsBothRoles) {
  Launch launch;
  launch.world_size = 2;
  launch.owners = 2;
  EXPECT_THAT(std::string(RequireOwnersAndWorkers(launch).message()), HasSubstr("no worker"));
  launch.owners = 0;
  EXPECT_THAT(std::string(RequireOwnersAndWorkers(launch).message()), HasSubstr("no owner"));
  launch.owners = 1;
  EXPECT_TRUE(RequireOwnersAndWorkers(launch).ok());
}

}  // namespace
}  // namespace Atoll::cluster
