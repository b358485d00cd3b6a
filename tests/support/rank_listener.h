// SPDX-License-Identifier: MIT
// How the ranks of a test job report: rank 0 prints, the others speak only of failures, and one failing rank
// ends the job, because its peers may be waiting for it.
#pragma once

#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdio>

namespace fp8flow::test {

class RankListener : public testing::EmptyTestEventListener {
public:
    explicit RankListener(int rank) : rank_(rank) {}

    void OnTestPartResult(const testing::TestPartResult& result) override {
        if (rank_ == 0 || !result.failed()) return;  // rank 0 keeps GoogleTest's own printer
        std::fprintf(stderr, "rank %d: %s:%d: %s\n", rank_, result.file_name() ? result.file_name() : "?",
                     result.line_number(), result.message());
    }

    void OnTestEnd(const testing::TestInfo& info) override {
        if (!info.result()->Failed()) return;
        std::fprintf(stderr, "rank %d: %s.%s failed, ending the job\n", rank_, info.test_suite_name(),
                     info.name());
        std::fflush(nullptr);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }

private:
    int rank_;
};

// Runs all tests of a started MPI job. Returns the exit status of this rank.
inline int run_tests_on_ranks() {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
    if (rank != 0) delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new RankListener(rank));
    return RUN_ALL_TESTS();
}

}  // namespace fp8flow::test
