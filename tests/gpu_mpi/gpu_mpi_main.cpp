// SPDX-License-Identifier: MIT
// main of every test that runs on GPUs under mpirun: without a Hopper GPU, or where every test is skipped,
// all ranks exit with the code that ctest shows as skipped.
#include "kernels/hopper/runtime/device_query.h"
#include "tests/support/rank_listener.h"

#include <cstdio>
#include <cstdlib>
#include <string>

int main(int argc, char** argv) {
    testing::InitGoogleTest(&argc, argv);
    if (fp8flow::hopper::device_count() == 0) {  // before MPI starts, so that the rank may exit
        const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
        if (rank == nullptr || std::atoi(rank) == 0)
            std::printf("skipped: %s\n", fp8flow::hopper::unavailable_reason().c_str());
        return FP8FLOW_SKIPPED_CODE;
    }
    ::setenv("NCCL_NVLS_ENABLE", "0", 0);  // as the program does; before the first NCCL call
    int provided = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
    const int status = fp8flow::test::run_tests_on_ranks();
    MPI_Finalize();
    const auto& tests = *testing::UnitTest::GetInstance();
    const bool none_ran = tests.successful_test_count() == 0 && tests.skipped_test_count() > 0;
    return status == 0 && none_ran ? FP8FLOW_SKIPPED_CODE : status;
}
