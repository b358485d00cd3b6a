// SPDX-License-Identifier: MIT
// Times of other implementations on the shapes of the suites: what was published or measured
// (peer_figures.cpp), and figures measured in the same session, given with --peers.
#pragma once

#include "model/bench/cases/case.h"

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fp8flow::bench {

struct PeerFigure {
    std::string operation, shape;  // of this program; the shape in full, as Shape::text
    double seconds = 0;
    std::string peer;    // implementation
    std::string gpu;     // empty: not stated
    std::string source;  // of the figure
    int64_t gpus = 1;
    bool same_sitting = false;
};

// One JSON object a line: operation, shape ("T=4096,H=7168", the rest by default), us, peer; gpu, gpus,
// source where known. Empty lines and lines that begin with '#' are skipped. Throws Error(usage) with `where`
// and the line's number.
std::vector<PeerFigure> parse_peers(std::string_view lines, const std::string& where);

class Peers {
public:
    Peers();  // the project's own list
    // Figures of this very GPU, measured now: they replace those of the same peer at the same shape.
    void add_measured_here(const std::string& path);

    // The fastest on a GPU of this kind; else the fastest of all others. Null: none was measured.
    const PeerFigure* best(const std::string& operation, const std::string& shape, const std::string& gpu,
                           int64_t gpus) const;
    const std::vector<PeerFigure>& all() const { return figures_; }

private:
    std::vector<PeerFigure> figures_;
};
// Whether its time is comparable with one of this GPU.
bool comparable(const PeerFigure& figure, const std::string& gpu);

extern const char* const kPeerFigures;  // peer_figures.cpp

}  // namespace fp8flow::bench
