// SPDX-License-Identifier: MIT
// The lower bound of a call's time at the rates that this machine reaches on the simplest work of the same
// size: what `bench` and `profile` compare with. Large GEMMs and copies on a GPU; small ones on a host, where
// they are a rough guide. Read next: ceilings.h.
#pragma once

#include "kernels/core/op_observer.h"
#include "model/job/backend.h"
#include "model/measure/ceilings.h"

#include <algorithm>
#include <memory>

namespace fp8flow {

// What the machine reaches, measured at the start; 0: not measured.
struct MachineRates {
    std::string device;
    double bytes_per_second = 0;  // copies, read plus written
    double bf16_flops = 0,
           fp8_flops = 0;  // of GEMMs back to back; a GEMM between lighter stages may exceed it
    double peer_load = 0, peer_store = 0;  // bytes per second between one GPU and all others, all active
    std::string no_peers;                  // why they are 0, where there is more than one rank
};

// Seconds of its memory traffic, its GEMM FLOPs and the bytes that it sends, each alone.
struct LowerBound {
    double traffic = 0, gemms = 0, wire = 0;
    double seconds() const { return std::max({traffic, gemms, wire}); }
};

class MachineCeilings {
public:
    // Collective; the rates between GPUs are measured at once.
    MachineCeilings(const BackendChoice& backend, ProcessGroup& world, const MeasureOptions& options);
    static MeasureOptions usual_options(const BackendChoice& backend);

    LowerBound bound_of(const OpCost& cost, double wire_bytes);
    MachineRates rates();

    Probe& probe() { return *probe_; }
    Meter& meter() { return meter_; }
    const Together& together() const { return together_; }
    const PeerRates& peers() const { return peers_; }  // 0: not measured
    const std::string& no_peers() const { return no_peers_; }

private:
    double traffic_seconds(const OpCost& cost);

    std::unique_ptr<Ops> ops_;
    std::unique_ptr<Probe> probe_;
    Meter meter_;
    Ceilings ceilings_;
    Together together_;
    PeerRates peers_;
    std::string no_peers_;
    int64_t largest_;  // bytes of memory traffic that are measured; above, time grows with the bytes
};

}  // namespace fp8flow
