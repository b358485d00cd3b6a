// SPDX-License-Identifier: MIT
// Ranks as threads: every collective against closed forms at 1 to 5 ranks, and how a rank that fails, leaves
// or never comes shows on the others.
#include "kernels/comm/process_group.h"
#include "tests/support/collective_checks.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

namespace fp8flow {
namespace {

double seconds_of(const std::function<void()>& action) {
    const auto start = std::chrono::steady_clock::now();
    action();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

class Ranks : public testing::TestWithParam<int> {};

TEST_P(Ranks, CollectivesMatchClosedForms) {
    std::atomic<int> calls = 0;
    run_thread_ranks(GetParam(), 60, [&](ProcessGroup& group) {
        ++calls;
        ASSERT_EQ(group.size(), GetParam());
        test::check_collectives(group);
    });
    EXPECT_EQ(calls, GetParam());
}

TEST_P(Ranks, PiecesOfALargeReductionFitTogether) {  // 5 Mi floats are two pieces of 16 MiB
    run_thread_ranks(GetParam(), 60, [](ProcessGroup& group) {
        std::vector<float> values((std::size_t{5} << 20) + 3);
        for (std::size_t i = 0; i < values.size(); ++i)
            values[i] = static_cast<float>(i % 1024) * static_cast<float>(group.rank() + 1);
        group.all_reduce_sum(std::span<float>(values));
        const float factor = static_cast<float>(group.size() * (group.size() + 1) / 2);
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < values.size(); ++i)
            wrong += values[i] != static_cast<float>(i % 1024) * factor;
        EXPECT_EQ(wrong, 0u);
    });
}

INSTANTIATE_TEST_SUITE_P(Threads, Ranks, testing::Values(1, 2, 3, 4, 5));

// Many short collectives with random delays: a buffer reused too early, or a meeting mixed up with the next,
// shows here.
TEST(ThreadGroup, ManyCollectivesInARow) {
    run_thread_ranks(4, 60, [](ProcessGroup& group) {
        for (int step = 0; step < 400; ++step) {
            if (random_words(1, static_cast<uint64_t>(group.rank()), static_cast<uint64_t>(step))[0] % 50 ==
                0)
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            int value = step * 10 + group.rank();
            std::vector<int> all(4, -1);
            group.all_gather(&value, sizeof value, all.data());
            value = -1;
            for (int r = 0; r < 4; ++r) ASSERT_EQ(all[static_cast<std::size_t>(r)], step * 10 + r);
        }
    });
}

TEST(ThreadGroup, ARankThatNeverComesIsNamedWithinTheDeadline) {
    auto groups = make_thread_groups(3, 0.3);
    std::mutex mutex;
    std::vector<std::string> messages;
    const double seconds = seconds_of([&] {
        std::vector<std::thread> threads;
        for (const std::size_t r : {0u, 1u}) {
            threads.emplace_back([&, r] {
                groups[r]->set_activity("step 12, stage dispatch");
                const std::string message = error_of(ExitCode::peer, [&] { groups[r]->barrier(); });
                const std::lock_guard lock(mutex);
                messages.push_back(message);
            });
        }
        for (std::thread& thread : threads) thread.join();
    });
    EXPECT_GE(seconds, 0.29);
    EXPECT_LT(seconds, 5.0);
    ASSERT_EQ(messages.size(), 2u);
    for (const std::string& message : messages) {
        expect_contains(message, "step 12, stage dispatch");
        expect_contains(message, "barrier");
        expect_contains(message, "no answer from rank 2");
    }
    // The job is over: the late rank is notified at once.
    EXPECT_LT(seconds_of([&] { error_of(ExitCode::peer, [&] { groups[2]->barrier(); }); }), 0.2);
}

TEST(ThreadGroup, AFailingRankEndsTheWaitsOfAllAtOnce) {
    std::atomic<int> notified = 0;
    const double seconds = seconds_of([&] {
        const std::string message = error_of(ExitCode::numeric, [&] {
            run_thread_ranks(4, 60, [&](ProcessGroup& group) {
                const auto pair = group.split(group.rank() / 2);
                group.barrier();
                if (group.rank() == 1) fail(ExitCode::numeric, "planted");
                try {
                    if (group.rank() == 0) pair->barrier();  // in the failing rank's pair
                    group.barrier();                         // the others wait in the whole group
                } catch (const Error& error) {
                    ++notified;
                    expect_contains(error.what(), "planted");
                    throw;
                }
            });
        });
        EXPECT_EQ(message, "planted");
    });
    EXPECT_EQ(notified, 3);
    EXPECT_LT(seconds, 5.0);
}

TEST(ThreadGroup, ARankThatLeavesIsNotAwaited) {
    const double seconds = seconds_of([] {
        const std::string message = error_of(ExitCode::peer, [] {
            run_thread_ranks(3, 60, [](ProcessGroup& group) {
                group.barrier();
                if (group.rank() != 2) group.barrier();
            });
        });
        expect_contains(message, "rank 2 left");
    });
    EXPECT_LT(seconds, 5.0);
}

TEST(ThreadGroup, RanksThatDisagreeAreAnError) {
    std::string message = error_of(ExitCode::peer, [] {
        run_thread_ranks(2, 60, [](ProcessGroup& group) {
            std::vector<char> data(16);
            group.all_gather(data.data(), group.rank() == 0 ? 4 : 8, std::vector<char>(16).data());
        });
    });
    expect_contains(message, "expected");
    message = error_of(ExitCode::peer, [] {
        run_thread_ranks(2, 60, [](ProcessGroup& group) {
            char data = 0;
            if (group.rank() == 0)
                group.broadcast(&data, 1, 0);
            else
                group.barrier();
        });
    });
    expect_contains(message, "by ");
}

TEST(ThreadGroup, WrongArgumentsAreOurBugs) {
    const auto group = std::move(make_thread_groups(1, 1)[0]);
    char data = 0;
    const ProcessGroup::Part two[2] = {}, one[1] = {{0, 1}}, none[1] = {};
    error_of(ExitCode::internal, [&] { group->all_to_all(&data, two, &data, none); });
    error_of(ExitCode::internal, [&] { group->all_to_all(&data, one, &data, none); });
    error_of(ExitCode::internal, [&] { group->broadcast(&data, 1, 1); });
    error_of(ExitCode::internal, [&] { make_thread_groups(0, 1); });
    error_of(ExitCode::internal, [&] { make_thread_groups(1, 0); });
}

}  // namespace
}  // namespace fp8flow
