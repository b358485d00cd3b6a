// SPDX-License-Identifier: MIT
// main of every MPI test: all ranks run the same GoogleTest cases.
#include "tests/support/rank_listener.h"

int main(int argc, char** argv) {
    testing::InitGoogleTest(&argc, argv);
    int provided = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
    const int status = fp8flow::test::run_tests_on_ranks();
    MPI_Finalize();
    return status;
}
