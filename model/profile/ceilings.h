// SPDX-License-Identifier: MIT
// The ceilings that `profile` compares with: the time each call of a stage would take at the rates that this
// machine reaches on the simplest work of the same size. Read next: model/measure/ceilings.h.
#pragma once

#include "model/job/backend.h"
#include "model/measure/ceilings.h"
#include "model/profile/profile.h"

#include <memory>

namespace fp8flow::profile {

class ProfileCeilings {
public:
    // Collective; the rates between GPUs are measured at once.
    ProfileCeilings(const BackendChoice& backend, ProcessGroup& world);

    // The longest of its memory traffic, its arithmetic and the bytes it sends to other ranks.
    double seconds_of(const OpCall& call, double wire_bytes);
    MachineRates rates();

private:
    double traffic_seconds(const OpCost& cost);

    std::unique_ptr<Ops> ops_;
    std::unique_ptr<Probe> probe_;
    Meter meter_;
    Ceilings ceilings_;
    PeerRates peers_;  // 0: not measured
    std::string no_peers_;
    int64_t largest_;  // bytes of memory traffic that are measured; above, time grows with the bytes
};

}  // namespace fp8flow::profile
