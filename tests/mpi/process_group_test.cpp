// SPDX-License-Identifier: MIT
// ProcessGroup over MPI: every collective against closed forms, the same bits as over threads, and a peer
// that never answers.
#include "kernels/comm/process_group.h"
#include "tests/support/collective_checks.h"
#include "tests/support/files.h"

#include <gtest/gtest.h>

#include <chrono>

namespace fp8flow {
namespace {

TEST(MpiGroup, CollectivesMatchClosedForms) {
    const auto group = make_mpi_group(60);
    test::check_collectives(*group);
    group->barrier();
}

TEST(MpiGroup, MessagesOfSeveralPieces) {  // 64 MiB is one piece
    const auto group = make_mpi_group(60);
    const std::size_t bytes = (std::size_t{64} << 20) + 5;
    std::vector<uint8_t> data(bytes, 0xFF);
    if (group->rank() == group->size() - 1)
        for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>(i * 2654435761u >> 13);
    group->broadcast(data.data(), bytes, group->size() - 1);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < bytes; ++i) wrong += data[i] != static_cast<uint8_t>(i * 2654435761u >> 13);
    EXPECT_EQ(wrong, 0u);
}

TEST(MpiGroup, TwoGroupsDoNotMixTheirMessages) {
    const auto first = make_mpi_group(60), second = make_mpi_group(60);
    const auto copy = first->split(0);
    for (ProcessGroup* group : {second.get(), copy.get(), first.get()}) test::check_all_to_all(*group, 10, 3);
}

TEST(MpiGroup, APeerThatNeverAnswersIsNamedWithinTheDeadline) {
    const auto all = make_mpi_group(60), group = make_mpi_group(0.3);
    if (group->size() > 1 && group->rank() == 0) {
        group->set_activity("step 12, stage dispatch");
        const auto start = std::chrono::steady_clock::now();
        const std::string message = error_of(ExitCode::peer, [&] { group->split(0)->barrier(); });
        EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
        expect_contains(message, "rank 0: no answer from rank 1");
        expect_contains(message, "all_gather (step 12, stage dispatch)");
        expect_contains(message, "parallel.peer_deadline_seconds");
    }
    all->barrier();  // the late ranks are there, in another group
}

TEST(MpiGroup, RanksThatDisagreeAreAnError) {
    const auto all = make_mpi_group(60), group = make_mpi_group(10);
    if (group->size() > 1 && group->rank() < 2) {
        const auto peer = static_cast<std::size_t>(1 - group->rank());
        std::vector<ProcessGroup::Part> send(static_cast<std::size_t>(group->size())), recv = send;
        char data[8] = {}, received[8] = {};
        send[peer].bytes = 4;
        recv[peer].bytes = group->rank() == 0 ? 8 : 4;
        if (group->rank() == 0) {
            expect_contains(error_of(ExitCode::peer, [&] { group->all_to_all(data, send, received, recv); }),
                            "rank 1 sends 4 bytes, expected 8");
        } else {
            group->all_to_all(data, send, received, recv);
        }
    }
    all->barrier();
}

}  // namespace
}  // namespace fp8flow
