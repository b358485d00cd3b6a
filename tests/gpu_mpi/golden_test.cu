// SPDX-License-Identifier: MIT
// The golden runs of the Hopper backend against tests/golden/hopper.json: the cases whose number of ranks is
// that of the job. The file is taken once per number of ranks, on a machine with a GPU for every rank; all of
// them by scripts/gpu_check.sh (see its --help), one by
//   FP8FLOW_GOLDEN=write mpirun -n 1 build/cuda-release/tests/gpu_mpi_golden_test
//   --gtest_filter=Golden.Hopper
// Where the file has no rows for this number of ranks the test is skipped, or fails with
// FP8FLOW_GOLDEN=require, as ctest runs it. The other tests need no file.
#include "model/train/trainer.h"

#include "kernels/core/random.h"
#include "kernels/hopper/device/clock.h"
#include "kernels/hopper/factory.h"
#include "kernels/hopper/runtime/cuda_check.h"
#include "tests/golden/golden.h"
#include "tests/gpu_mpi/ranks_on_gpus.h"
#include "tests/support/training.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <span>
#include <thread>

namespace fp8flow::test {
namespace {

constexpr const char* kPath = FP8FLOW_SOURCE_DIR "/tests/golden/hopper.json";

void print_how_to_write(const std::string& problem, int ranks) {
    std::printf(
        "error: %s; to take the golden runs: FP8FLOW_GOLDEN=write mpirun -n %d "
        "build/cuda-release/tests/gpu_mpi_golden_test --gtest_filter=Golden.Hopper\n",
        problem.c_str(), ranks);
}

// Every training over NCCL starts it again. NCCL 2.28 passes each handle of cuMem memory to the other process
// by a message of its own: a training takes 2.1 s on four ranks, 9 to 15 on eight. With handles of CUDA IPC
// it takes 0.6 s on four.
BackendChoice gpu_of(ProcessGroup& world) {
    ::setenv("NCCL_CUMEM_ENABLE", "0", 0);  // read at the first start
    return choose_backend(BackendKind::hopper, placement_of(world), world);
}

bool has_nccl(const ProcessGroup& world) { return hopper::built_with_nccl() && has_own_gpu(world); }

// Rank 0 says which run begins, and after how long: what a run that takes very long has come to.
golden::Hashes run(const golden::Case& c, ProcessGroup& world, const BackendChoice& backend,
                   std::string* note = nullptr, int64_t steps = golden::kSteps) {
    static const auto start = std::chrono::steady_clock::now();
    if (world.rank() == 0) {
        const double seconds =
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        std::printf("%7.1f s  %s\n", seconds, c.name().c_str());
        std::fflush(stdout);
    }
    return golden::run_case(c, world, backend, note, steps);
}

TEST(Golden, Hopper) {
    const auto world = make_mpi_group(kTestDeadline);
    if (!has_own_gpu(*world)) GTEST_SKIP() << "a GPU for every rank is wanted";
    const BackendChoice backend = gpu_of(*world);
    golden::File file(kPath);
    file.read();
    const auto has_ranks = [&](const golden::Row& row) { return row.c.ranks == world->size(); };
    if (std::none_of(file.rows().begin(), file.rows().end(), has_ranks) && !golden::writing()) {
        const std::string problem =
            fmt::format("tests/golden/hopper.json has no golden run of {} ranks", world->size());
        print_how_to_write(problem, world->size());
        if (golden::required()) FAIL() << problem;
        GTEST_SKIP() << problem;
    }
    std::vector<golden::Row> taken;
    int changed = 0;
    for (const golden::Case& c : golden::all_cases()) {
        if (c.ranks != world->size()) continue;
        std::string note;
        taken.push_back({c, run(c, *world, backend, &note)});
        // the dispatcher that the case is about, not what took its place
        const bool peer = note.find("peer memory") != std::string::npos;
        EXPECT_EQ(peer, c.ranks > 1 && c.dispatcher == "flex") << c.name() << ": " << note;
        if (golden::writing()) continue;
        const golden::Hashes* wanted = file.find(c);
        const std::string text =
            wanted == nullptr ? "has no row" : golden::difference(taken.back().hashes, *wanted);
        EXPECT_EQ(text, "") << c.name();
        changed += text.empty() ? 0 : 1;
    }
    EXPECT_GT(taken.size(), 0u) << "no golden case has " << world->size() << " ranks";
    if (changed > 0)
        print_how_to_write(fmt::format("{} of {} golden runs changed", changed, taken.size()), world->size());
    if (!golden::writing() || world->rank() != 0 || HasFailure()) return;
    file.read();  // again: a job of other ranks may have written its own rows by now
    for (const golden::Row& row : taken) file.put(row.c, row.hashes);
    file.drop_unknown();
    file.write();
    std::printf("written: %s, %zu rows\n", kPath, file.rows().size());
}

constexpr const char* kFp8AndBf16[] = {"bf16",     "fp8_tensorwise", "fp8_blockwise",
                                       "fp8_flow", "fp8_rowwise",    "mxfp8"};

constexpr const char* kBf16AndFlow[] = {"bf16", "fp8_flow"};  // those that send most differently

// All, or where ranks share GPUs and runs are slow those two.
std::span<const char* const> recipes_for(const ProcessGroup& world) {
    if (has_own_gpu(world)) return kFp8AndBf16;
    return kBf16AndFlow;
}

// Of the same batch with the same weights: peers' memory and NCCL give the same bits, for every recipe, with
// groups that share the experts and with replicas of such groups, in both orders of combining. No file is
// needed.
TEST(Golden, AlltoallIsFlex) {
    const auto world = make_mpi_group(kTestDeadline);
    if (world->size() == 1) GTEST_SKIP() << "one rank has no dispatcher";
    if (!has_own_gpu(*world)) GTEST_SKIP() << "a GPU for every rank is wanted";
    if (!hopper::built_with_nccl()) GTEST_SKIP() << "built without NCCL";
    const BackendChoice backend = gpu_of(*world);
    const auto compare = [&](golden::Case c) {
        const golden::Hashes flex = run(c, *world, backend);
        c.dispatcher = "alltoall";
        std::string note;
        const golden::Hashes alltoall = run(c, *world, backend, &note);
        EXPECT_NE(note.find("NCCL"), std::string::npos) << note;
        EXPECT_EQ(golden::difference(alltoall, flex), "") << c.name();
    };
    for (const int expert_ranks : {world->size(), world->size() / 2}) {
        for (const char* recipe : kFp8AndBf16)
            compare({.recipe = recipe, .expert_ranks = expert_ranks, .ranks = world->size()});
        for (const char* variant : {"invariant", "merging_weights", "merging_weights_invariant"})
            compare({.recipe = "fp8_flow",
                     .expert_ranks = expert_ranks,
                     .ranks = world->size(),
                     .micro_batches = 2,
                     .variant = variant});
    }
}

// Every half of the ranks on a host of its own: rows stay in peers' memory (one rank's on its GPU), sums go
// over NCCL, or all goes over NCCL where ranks on both hosts share the experts; with state divided over the
// ranks, too. The bits are those of one host.
TEST(Golden, HostsChangeNoBit) {
    const auto world = make_mpi_group(kTestDeadline);
    if (world->size() == 1) GTEST_SKIP() << "one rank is on one host";
    if (!has_own_gpu(*world)) GTEST_SKIP() << "a GPU for every rank is wanted";
    if (!hopper::built_with_nccl()) GTEST_SKIP() << "built without NCCL";
    const BackendChoice backend = gpu_of(*world);
    for (const char* recipe : kFp8AndBf16)
        for (const int expert_ranks : {world->size(), world->size() / 2}) {
            golden::Case c{
                .recipe = recipe, .expert_ranks = expert_ranks, .ranks = world->size(), .micro_batches = 2};
            const golden::Hashes one_host = run(c, *world, backend);
            c.hosts = 2;
            for (const char* variant : {"standard", "graph", "divided_overlapped"}) {
                c.variant = variant;
                std::string note;
                EXPECT_EQ(golden::difference(run(c, *world, backend, &note), one_host), "") << c.name();
                EXPECT_NE(note.find(expert_ranks == world->size() ? "ranks on several hosts share"
                                                                  : "sums over 2 hosts by NCCL"),
                          std::string::npos)
                    << note;
            }
        }
}

// Two levels, NCCL between hosts and peer memory inside: with combine order invariant, and with order rank
// where each GPU is a host, the bits of one level, in graphs too. Two hosts or as many as ranks share the
// experts, which all ranks do, or each half of at least four.
TEST(Golden, TwoLevelsChangeNoBit) {
    const auto world = make_mpi_group(kTestDeadline);
    if (world->size() == 1) GTEST_SKIP() << "one rank shares its experts with nobody";
    if (!has_own_gpu(*world)) GTEST_SKIP() << "a GPU for every rank is wanted";
    const BackendChoice backend = gpu_of(*world);
    const auto compare = [&](golden::Case c, const std::set<int>& numbers_of_hosts) {
        std::vector<std::string> variants = {c.variant};
        if (hopper::built_with_nccl())
            variants.push_back(c.variant == "standard" ? "graph" : "graph_invariant");
        const golden::Hashes one = run(c, *world, backend);
        c.dispatcher = "hierarchical";
        for (const int hosts : numbers_of_hosts)
            for (const std::string& variant : variants) {
                c.hosts = hosts;
                c.variant = variant;
                std::string note;
                EXPECT_EQ(golden::difference(run(c, *world, backend, &note), one), "")
                    << c.name() << " on " << hosts << " hosts";
                EXPECT_NE(note.find("rows once per (token, host) between"), std::string::npos) << note;
                EXPECT_EQ(note.find("peer memory") != std::string::npos, hosts != world->size()) << note;
            }
    };
    for (const char* recipe : kBf16AndFlow)
        for (int groups = 1; groups <= 2 && 2 * groups <= world->size(); ++groups) {
            golden::Case c{.recipe = recipe,
                           .expert_ranks = world->size() / groups,
                           .ranks = world->size(),
                           .micro_batches = 2};
            compare(c, {world->size()});
            c.variant = "invariant";
            compare(c, {2 * groups, world->size()});
        }
}

// With combine order invariant a run does not depend on how many of the ranks share the experts.
TEST(Golden, InvariantOrderChangesNoBit) {
    const auto world = make_mpi_group(kTestDeadline);
    if (world->size() == 1) GTEST_SKIP() << "one rank shares its experts with nobody";
    if (!has_gpu(*world)) GTEST_SKIP() << "a GPU for every rank is wanted";
    const BackendChoice backend = gpu_of(*world);
    constexpr int64_t kLongRun = 50;
    std::vector<const char*> dispatchers = {"flex"};
    if (has_nccl(*world)) dispatchers.push_back("alltoall");
    for (const std::string recipe : recipes_for(*world)) {
        if (recipe == "fp8_tensorwise") continue;  // refused
        golden::Case c{.recipe = recipe, .ranks = world->size(), .micro_batches = 2, .variant = "invariant"};
        const golden::Hashes apart = run(c, *world, backend, nullptr, kLongRun);
        const int most = std::min(world->size(), static_cast<int>(c.config().moe.num_experts));
        for (c.expert_ranks = 2; c.expert_ranks <= most; c.expert_ranks *= 2)
            for (const char* dispatcher : dispatchers) {
                c.dispatcher = dispatcher;
                EXPECT_EQ(golden::difference(run(c, *world, backend, nullptr, kLongRun), apart), "")
                    << c.name();
            }
    }
}

// Recomputation changes no bit, for every module; on one GPU with every recipe, on several with those that
// send most differently.
TEST(Golden, RecomputeChangesNoBit) {
    const auto world = make_mpi_group(kTestDeadline);
    if (!has_gpu(*world)) GTEST_SKIP() << "a GPU for every rank is wanted";
    const BackendChoice backend = gpu_of(*world);
    for (const char* recipe : kFp8AndBf16) {
        if (world->size() > 1 && recipe != std::string("bf16") && recipe != std::string("fp8_flow")) continue;
        golden::Case c{.recipe = recipe,
                       .expert_ranks = (world->size() + 1) / 2,
                       .ranks = world->size(),
                       .micro_batches = 2};
        const golden::Hashes plain = run(c, *world, backend);
        for (const char* recompute :
             {"core_attn", "layernorm", "shared_experts", "moe_act", "moe_expert", "moe", "full"}) {
            c.recompute = recompute;
            EXPECT_EQ(golden::difference(run(c, *world, backend), plain), "") << c.name();
        }
    }
}

// Nor does what moe_expert keeps of the received rows, in both combine orders, with every schedule, with
// redone steps, in graphs and on both exchanges.
TEST(Golden, SavedRowsChangeNoBit) {
    const auto world = make_mpi_group(kTestDeadline);
    if (!has_gpu(*world)) GTEST_SKIP() << "a GPU for every rank is wanted";
    const BackendChoice backend = gpu_of(*world);
    std::vector<const char*> dispatchers = {"flex"};
    if (world->size() > 1 && has_nccl(*world)) dispatchers.push_back("alltoall");
    golden::Case c{.recipe = "fp8_flow", .ranks = world->size(), .micro_batches = 2};
    c.recompute = "moe_expert";
    for (const int expert_ranks : {world->size(), (world->size() + 1) / 2}) {
        c.expert_ranks = expert_ranks;
        for (const std::string dispatcher : dispatchers) {
            c.dispatcher = dispatcher;
            for (const std::string order : {"", "_invariant"}) {
                c.variant = order.empty() ? "standard" : "invariant";
                const golden::Hashes sorted = run(c, *world, backend, nullptr, 12);
                for (const std::string rows : {"received", "no_rows"}) {
                    std::vector<std::string> variants = {rows + order};
                    if (order.empty())
                        for (const char* with : {"_tight_rows", "_overlapped", "_interleaved", "_graph"})
                            variants.push_back(rows + with);
                    for (const std::string& variant : variants) {
                        c.variant = variant;
                        EXPECT_EQ(golden::difference(run(c, *world, backend, nullptr, 12), sorted), "")
                            << c.name();
                    }
                }
            }
        }
    }
}

// Schedules change no bit: every recipe, and the recompute modes that run work on a stream again. Repeated,
// since what could go wrong is a race.
TEST(Golden, SchedulesChangeNoBit) {
    const auto world = make_mpi_group(kTestDeadline);
    if (!has_gpu(*world)) GTEST_SKIP() << "a GPU for every rank is wanted";
    const BackendChoice backend = gpu_of(*world);
    constexpr int kRepeats = 2;
    const auto compare = [&](golden::Case c, const char* serial, const char* overlapped) {
        c.variant = serial;
        const golden::Hashes wanted = run(c, *world, backend);
        c.variant = overlapped;
        for (int i = 0; i < kRepeats; ++i)
            EXPECT_EQ(golden::difference(run(c, *world, backend), wanted), "")
                << c.name() << ", repeat " << i;
    };
    for (const char* recipe : recipes_for(*world)) {
        golden::Case c{.recipe = recipe,
                       .expert_ranks = (world->size() + 1) / 2,
                       .ranks = world->size(),
                       .micro_batches = 2};
        for (const char* variant :
             {"shared_expert_overlapped", "wgrad_overlapped", "overlapped", "interleaved"})
            compare(c, "standard", variant);
        for (const char* recompute : {"shared_experts", "moe_expert", "moe", "full"}) {
            c.recompute = recompute;
            for (const char* variant : {"overlapped", "interleaved"}) compare(c, "standard", variant);
        }
    }
    golden::Case c{
        .recipe = "fp8_flow", .expert_ranks = world->size(), .ranks = world->size(), .micro_batches = 2};
    compare(c, "delayed_wgrad", "overlapped_delayed_wgrad");
    compare(c, "standard", "interleaved");
    if (world->size() == 1 || !has_own_gpu(*world)) return;
    c.dispatcher = "alltoall";
    for (const char* variant : {"overlapped", "interleaved"}) compare(c, "standard", variant);
}

// State divided over the ranks changes no bit: experts replicated or not, the wire in parallel with the
// layers and in graphs. Repeated, since what could go wrong is a race.
void expect_divided_state_changes_no_bit(ProcessGroup& world, const std::string& dispatcher,
                                         std::span<const char* const> recipes, int repeats) {
    const BackendChoice backend = gpu_of(world);
    constexpr int64_t kSteps = 12;
    const auto compare = [&](golden::Case c, const char* whole, std::initializer_list<const char*> divided) {
        c.variant = whole;
        const golden::Hashes wanted = run(c, world, backend, nullptr, kSteps);
        for (const char* variant : divided) {
            c.variant = variant;
            for (int i = 0; i < repeats; ++i)
                EXPECT_EQ(golden::difference(run(c, world, backend, nullptr, kSteps), wanted), "")
                    << c.name() << ", repeat " << i;
        }
    };
    for (int expert_ranks = 1; expert_ranks <= world.size(); expert_ranks *= 2) {
        golden::Case c{.expert_ranks = expert_ranks, .ranks = world.size(), .micro_batches = 2};
        c.dispatcher = dispatcher;
        for (const char* recipe : recipes) {
            c.recipe = recipe;
            compare(c, "standard", {"divided", "divided_overlapped", "divided_interleaved"});
        }
        c.recipe = "fp8_flow";
        compare(c, "invariant", {"divided_invariant"});
        if (dispatcher == "flex" || hopper::built_with_nccl()) compare(c, "standard", {"graph_divided"});
    }
}

TEST(Golden, DividedStateChangesNoBit) {
    const auto world = make_mpi_group(kTestDeadline);
    if (!has_gpu(*world)) GTEST_SKIP() << "a GPU for every rank is wanted";
    expect_divided_state_changes_no_bit(*world, "flex", recipes_for(*world), 2);
}

// Once each, with two recipes: others differ in what they quantise from the same gathered weights.
TEST(Golden, DividedStateOverMessagesChangesNoBit) {
    const auto world = make_mpi_group(kTestDeadline);
    if (world->size() == 1) GTEST_SKIP() << "one rank has no dispatcher";
    if (!has_own_gpu(*world)) GTEST_SKIP() << "a GPU for every rank is wanted";
    expect_divided_state_changes_no_bit(*world, "alltoall", kBf16AndFlow, 1);
}

// A step that is captured in a graph changes no bit either: every recipe, every schedule, with redone
// steps, and 200 steps of the flow (50, and recipes_for alone, where ranks share GPUs).
TEST(Golden, GraphsChangeNoBit) {
    const auto world = make_mpi_group(kTestDeadline);
    if (!has_gpu(*world)) GTEST_SKIP() << "a GPU for every rank is wanted";
    const BackendChoice backend = gpu_of(*world);
    const auto compare = [&](golden::Case c, const char* eager, const char* graph, int64_t steps) {
        c.variant = eager;
        const golden::Hashes wanted = run(c, *world, backend, nullptr, steps);
        c.variant = graph;
        EXPECT_EQ(golden::difference(run(c, *world, backend, nullptr, steps), wanted), "")
            << c.name() << ", " << steps << " steps";
    };
    golden::Case c{.expert_ranks = (world->size() + 1) / 2, .ranks = world->size(), .micro_batches = 2};
    for (const char* recipe : recipes_for(*world)) {
        c.recipe = recipe;
        for (const char* variant : {"graph", "graph_overlapped", "graph_interleaved"})
            compare(c, "standard", variant, 12);
    }
    c.recipe = "fp8_flow";
    compare(c, "bf16_state", "graph_bf16_state", 50);
    compare(c, "tight_rows", "graph_tight_rows", 12);
    for (const char* recompute : {"moe_expert", "full"}) {
        c.recompute = recompute;
        compare(c, "standard", "graph_overlapped", 12);
    }
    c.recompute = "none";
    c.expert_ranks = world->size();
    compare(c, "standard", "graph", has_own_gpu(*world) ? 200 : 50);
    if (world->size() == 1 || !has_nccl(*world)) return;
    c.dispatcher = "alltoall";  // messages of a fixed size
    for (const char* recipe : kFp8AndBf16) {
        c.recipe = recipe;
        compare(c, "standard", "graph", 12);
    }
    for (const char* variant : {"graph_overlapped", "graph_interleaved"}) compare(c, "standard", variant, 12);
    compare(c, "invariant", "graph_invariant", 12);
    compare(c, "merging_weights_invariant", "graph_merging_weights_invariant", 12);
}

__global__ void hold_kernel(uint64_t nanoseconds) {
    const uint64_t begin = hopper::global_nanoseconds();
    while (hopper::global_nanoseconds() - begin < nanoseconds) __nanosleep(200);
}

// Kernels that hold some SMs, or all, for some time, at random; the ranks of a job draw differently. What
// runs in parallel, on whichever stream, is late by as much.
class Disturbance {
public:
    explicit Disturbance(uint64_t seed) : device_(current_device()), thread_([this, seed] { run(seed); }) {}
    ~Disturbance() {
        ended_ = true;
        thread_.join();
    }

private:
    static int current_device() {
        int device = 0;
        hopper::check_cuda(cudaGetDevice(&device), "the current GPU");
        return device;
    }
    void run(uint64_t seed) {
        hopper::check_cuda(cudaSetDevice(device_), "selecting the GPU");
        int least = 0, greatest = 0;
        hopper::check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream priorities");
        cudaStream_t stream = nullptr;
        hopper::check_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
                           "a stream");
        constexpr int kThreads = 1024, kMostCtas = 2 * 132;  // two fill an SM
        for (uint64_t i = 0; !ended_; ++i) {
            const auto words = random_words(seed, i, 0);
            const uint64_t held = 1000 * (10 + words[0] % 200);
            hold_kernel<<<1 + words[1] % kMostCtas, kThreads, 0, stream>>>(held);
            hopper::check_cuda(cudaStreamSynchronize(stream), "holding SMs");
            std::this_thread::sleep_for(std::chrono::microseconds(words[2] % 300));
        }
        cudaStreamDestroy(stream);
    }

    int device_;
    std::atomic<bool> ended_ = false;
    std::thread thread_;
};

// While streams and ranks are delayed at random: 50 steps of every recipe and schedule, and 200 short runs.
TEST(Golden, NoDelayChangesABit) {
    const auto world = make_mpi_group(kTestDeadline);
    if (!has_own_gpu(*world)) GTEST_SKIP() << "a GPU for every rank is wanted";
    const BackendChoice backend = gpu_of(*world);
    constexpr int64_t kLongRun = 50;
    constexpr int kShortRuns = 200;
    golden::Case c{.expert_ranks = world->size(), .ranks = world->size(), .micro_batches = 4};
    std::map<std::string, golden::Hashes> wanted;
    for (const char* recipe : kFp8AndBf16) {
        c.recipe = recipe;
        wanted[recipe] = run(c, *world, backend, nullptr, kLongRun);
    }
    c.recipe = "fp8_flow";
    const golden::Hashes wanted_short = run(c, *world, backend);
    const Disturbance disturbance(static_cast<uint64_t>(world->rank()) + 1);
    for (const char* recipe : kFp8AndBf16)
        for (const char* variant : {"standard", "overlapped", "interleaved"}) {
            c.recipe = recipe;
            c.variant = variant;
            EXPECT_EQ(golden::difference(run(c, *world, backend, nullptr, kLongRun), wanted[recipe]), "")
                << c.name() << ", " << kLongRun << " steps";
        }
    c.recipe = "fp8_flow";
    for (int i = 0; i < kShortRuns; ++i) {
        c.variant = i % 2 == 0 ? "overlapped" : "interleaved";
        EXPECT_EQ(golden::difference(run(c, *world, backend), wanted_short), "")
            << c.name() << ", repeat " << i;
    }
}

// The kernels that each ablation takes in place of the flow's run, and their losses are close to the flow's.
TEST(Golden, SwitchesOfTheFlow) {
    const auto world = make_mpi_group(kTestDeadline);
    if (!has_own_gpu(*world)) GTEST_SKIP() << "a GPU for every rank is wanted";
    const BackendChoice backend = gpu_of(*world);
    golden::Case c{.recipe = "fp8_flow",
                   .expert_ranks = (world->size() + 1) / 2,
                   .ranks = world->size(),
                   .micro_batches = 2};
    const golden::Hashes flow = run(c, *world, backend);
    for (const char* variant :
         {"hybrid", "bf16_wgrad", "delayed_wgrad", "fp32_scales_requantized", "bf16_dispatch", "requantized",
          "padding_apart", "act_quantize_apart", "norm_quantize_apart", "all_apart", "merging_weights"}) {
        c.variant = variant;
        const golden::Hashes once = run(c, *world, backend), again = run(c, *world, backend);
        EXPECT_EQ(golden::difference(again, once), "") << c.name() << ", run twice";
        EXPECT_NEAR(once.last_loss, flow.last_loss, 0.01 * flow.last_loss) << c.name();
    }
}

}  // namespace
}  // namespace fp8flow::test
