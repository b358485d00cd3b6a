// SPDX-License-Identifier: MIT
// The golden runs of the reference backend, with ranks as threads, against reference.json.
#include "tests/golden/golden.h"

#include "model/train/trainer.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <set>

namespace fp8flow::golden {
namespace {

constexpr const char* kPath = FP8FLOW_SOURCE_DIR "/tests/golden/reference.json";
constexpr const char* kHowToWrite =
    "if this is meant: FP8FLOW_GOLDEN=write build/cpu/tests/golden_reference_test, then commit "
    "tests/golden/reference.json with the reason and a validate run";

TEST(Golden, Reference) {
    File file(kPath);
    const bool there = file.read();
    if (writing()) {
        file.drop_unknown();
        const std::vector<Hashes> hashes = run_all_on_threads();
        for (size_t i = 0; i < hashes.size(); ++i) file.put(all_cases()[i], hashes[i]);
        ASSERT_FALSE(HasFailure()) << "nothing was written";
        file.write();
        std::printf("written: %s, %zu rows\n", kPath, file.rows().size());
        return;
    }
    ASSERT_TRUE(there) << kPath << " is missing; " << kHowToWrite;
    const std::vector<Hashes> hashes = run_all_on_threads();
    int changed = 0;
    for (size_t i = 0; i < hashes.size(); ++i) {
        const Case& c = all_cases()[i];
        const Hashes* wanted = file.find(c);
        const std::string text = wanted == nullptr ? "has no row" : difference(hashes[i], *wanted);
        if (text.empty()) continue;
        ADD_FAILURE() << c.name() << ": " << text;
        ++changed;
    }
    EXPECT_EQ(changed, 0) << "of " << all_cases().size() << " golden cases; " << kHowToWrite;
    EXPECT_EQ(file.rows().size(), all_cases().size()) << kPath << " has rows of no case; " << kHowToWrite;
}

// What the file itself must hold: neither recomputation nor the dispatcher changes a bit.
TEST(Golden, RowsThatMustBeEqualAre) {
    for (const char* name : {"reference.json", "hopper.json"}) {
        File file(std::string(FP8FLOW_SOURCE_DIR "/tests/golden/") + name);
        if (!file.read()) continue;  // the GPUs' file is missed by the GPUs' test
        int compared = 0;
        for (const Row& row : file.rows()) {
            Case plain = row.c;
            plain.recompute = "none";
            plain.dispatcher = "flex";
            const Hashes* wanted = file.find(plain);
            if (wanted == nullptr || plain == row.c) continue;
            ++compared;
            EXPECT_EQ(difference(row.hashes, *wanted), "") << name << ": " << row.c.name();
        }
        EXPECT_GE(compared, name == std::string("reference.json") ? 60 : 1) << name;
    }
}

// Two levels of exchange, as two hosts of two ranks and as four of one: the bits that one level has in the
// file, with order invariant over any hosts, with order rank where no host has two ranks.
TEST(Golden, TwoLevelsHaveTheBitsOfOne) {
    File file(kPath);
    ASSERT_TRUE(file.read());
    for (const char* recipe : {"bf16", "fp8_flow"})
        for (const int hosts : {2, 4})
            for (const char* variant : {"standard", "invariant"}) {
                const bool rank_order = variant == std::string("standard");
                Case c{.recipe = recipe, .expert_ranks = rank_order ? 4 : 2, .ranks = 4, .variant = variant};
                const Hashes* wanted = file.find(c);
                if (rank_order && wanted == nullptr) {
                    c.micro_batches = 2;
                    wanted = file.find(c);
                }
                ASSERT_NE(wanted, nullptr) << c.name();
                c.expert_ranks = 4;
                c.dispatcher = "hierarchical";
                c.hosts = hosts;
                std::string note;
                Hashes got;
                run_thread_ranks(4, 60, [&](ProcessGroup& world) {
                    std::string own;
                    const Hashes hashes = run_case(c, world, choose_backend(BackendKind::reference), &own);
                    if (world.rank() != 0) return;
                    got = hashes;
                    note = own;
                });
                EXPECT_EQ(difference(got, *wanted).empty(), !rank_order || hosts == 4)
                    << c.name() << " on " << hosts << " hosts: " << difference(got, *wanted);
                expect_contains(note, "once per (token, host) between");
            }
}

// The table covers what it says.
TEST(Golden, CasesCoverRecipesModesAndLayouts) {
    std::set<std::string> seen;
    for (const Case& c : all_cases()) {
        const Config config = c.config();  // throws where a case is not legal
        seen.insert(c.recipe + " on " + std::to_string(c.expert_ranks) + " of " + std::to_string(c.ranks));
        seen.insert(c.recipe + " recompute " + c.recompute);
        seen.insert(c.recipe + " " + c.dispatcher);
        seen.insert(c.recipe + " in " + std::to_string(c.micro_batches));
        EXPECT_EQ(config.training.global_batch_size,
                  c.ranks * c.micro_batches * config.training.micro_batch_size)
            << c.name();
    }
    for (const char* recipe : kRecipeNames) {
        for (const char* what :
             {" on 1 of 1", " on 1 of 2", " on 2 of 2", " on 1 of 4", " on 2 of 4", " on 4 of 4",
              " recompute none", " recompute full", " recompute core_attn", " recompute layernorm",
              " recompute shared_experts", " recompute moe_act", " recompute moe_expert", " recompute moe",
              " flex", " alltoall", " in 1", " in 2"})
            EXPECT_EQ(seen.count(std::string(recipe) + what), 1u) << recipe << what;
    }
}

TEST(Golden, ADifferenceIsNamed) {
    const Hashes wanted{.last_loss = 4, .losses = "a", .norms = "b", .weights = "c"};
    Hashes got = wanted;
    EXPECT_EQ(difference(got, wanted), "");
    got.weights = "d";
    EXPECT_EQ(difference(got, wanted),
              "changed: final weights d (was c); last loss 4.000000000 (was 4.000000000)");
    got.losses = "e";
    got.last_loss = 5;
    EXPECT_EQ(difference(got, wanted),
              "changed: losses e (was a), final weights d (was c); last loss 5.000000000 (was 4.000000000)");
}

}  // namespace
}  // namespace fp8flow::golden
