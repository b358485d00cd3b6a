// MPI of this process: initialise, finalise, abort.
#include "kernels/comm/mpi_session.h"

#include <mpi.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>

namespace fp8flow {

namespace {

// The launchers' own variables.
const char* job_name() { return std::getenv("PMIX_NAMESPACE"); }

}  // namespace

bool MpiSession::launched() {
    for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"})
        if (std::getenv(name) != nullptr) return true;
    return false;
}

MpiSession::MpiSession() {
    int provided = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
}

MpiSession::~MpiSession() { MPI_Finalize(); }

bool MpiSession::claim_report() {
    if (size_ == 1 || job_name() == nullptr) return true;
    // A name in the abstract socket space can be taken once per host, leaves no file, and is free again when its owner ends.
    const std::string name = "fp8flow.report." + std::to_string(::getuid()) + "." + job_name();
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::size_t length = std::min(name.size(), sizeof address.sun_path - 1);
    std::memcpy(address.sun_path + 1, name.data() + (name.size() - length), length);
    const int descriptor = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);  // held until the process ends
    if (descriptor < 0) return true;
    return ::bind(descriptor, reinterpret_cast<const sockaddr*>(&address),
                  static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length)) == 0;
}

void MpiSession::abort(int exit_code) {
    // A lone process has nobody to take along, and MPI_Abort would print a page about it.
    if (size_ > 1) {
        MPI_Abort(MPI_COMM_WORLD, exit_code);
    } else {
        MPI_Finalize();
    }
    _exit(exit_code);
}

}  // namespace fp8flow
