// SPDX-License-Identifier: MIT
// MPI of this process: initialise, finalise, abort.
#include "kernels/comm/mpi_session.h"

#include "kernels/core/error.h"

#include <mpi.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <new>

namespace fp8flow {

namespace {

// Memory shared by the ranks of this host, zero until one of them claims the right to report. It outlives
// each of them, so that ranks that are terminated afterwards stay silent. Static, because signal handlers
// need it; null for a lone process.
std::atomic<int>* report_claimed = nullptr;
static_assert(std::atomic<int>::is_always_lock_free);

// Safe in a signal handler.
bool claim() { return report_claimed == nullptr || report_claimed->exchange(1) == 0; }

// mpirun terminates the remaining ranks with SIGTERM. If none has reported an error by then, a rank died
// without a message.
void on_termination(int) {
    constexpr char kText[] =
        "fp8flow: error: another rank was lost (it crashed, or was killed for lack of memory), or the job "
        "was cancelled\n";
    if (claim()) {
        [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kText, sizeof kText - 1);
    }
    ::_exit(static_cast<int>(ExitCode::peer));
}

}  // namespace

struct MpiSession::Shared {
    MPI_Comm host = MPI_COMM_NULL;
    MPI_Win window = MPI_WIN_NULL;
};

MpiSession::MpiSession() : shared_(std::make_unique<Shared>()) {
    int provided = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
    if (size_ == 1) return;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &shared_->host);
    int rank_on_host = 0, unit = 0;
    MPI_Comm_rank(shared_->host, &rank_on_host);
    void* memory = nullptr;
    MPI_Aint size = rank_on_host == 0 ? sizeof(std::atomic<int>) : 0;
    MPI_Win_allocate_shared(size, 1, MPI_INFO_NULL, shared_->host, &memory, &shared_->window);
    MPI_Win_shared_query(shared_->window, 0, &size, &unit, &memory);
    if (rank_on_host == 0) new (memory) std::atomic<int>(0);
    MPI_Barrier(shared_->host);
    report_claimed = static_cast<std::atomic<int>*>(memory);
    std::signal(SIGTERM, on_termination);
}

MpiSession::~MpiSession() {
    if (size_ > 1) {
        // Before the last barrier: if the first rank to exit has a status other than 0, the others may be
        // terminated.
        std::signal(SIGTERM, SIG_DFL);
        report_claimed = nullptr;
        MPI_Win_free(&shared_->window);
        MPI_Comm_free(&shared_->host);
    }
    MPI_Finalize();
}

bool MpiSession::claim_report() { return claim(); }

void MpiSession::abort(int exit_code) {
    // A lone process has no other rank to end, and MPI_Abort would print a page about it.
    if (size_ > 1) {
        MPI_Abort(MPI_COMM_WORLD, exit_code);
    } else {
        MPI_Finalize();
    }
    _exit(exit_code);
}

}  // namespace fp8flow
