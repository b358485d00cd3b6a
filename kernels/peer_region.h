// PeerRegion: memory that all ranks of a host have mapped, for measuring the wire: a probe reads and writes a peer's part of it as it does its
// own. Read next: probe.h.
#pragma once

namespace fp8flow {

class PeerRegion {
public:
    virtual ~PeerRegion() = default;
    virtual void* of(int rank) = 0;  // of the world; a device pointer that is valid on this rank
};

}  // namespace fp8flow
